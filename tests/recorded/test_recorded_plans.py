"""Plans of recorded problems are as good as those that were recorded, or better."""

from collections.abc import Iterator

import pytest

from tests.recorded.problems import KnownRecord, RecordedPlan, answer, contents, problem_of

SLOWER = 1.005
"""A step may take so many times as long as the recorded one."""
ROUNDING = 1e-6
"""Of a bound, which a solver finds."""


@pytest.mark.parametrize("name", contents())
def test_plans_are_as_fast_and_floors_as_low_as_recorded(name: str) -> None:
    """The planner itself has each plan checked, and raises where the checker refuses it."""
    problem = problem_of(name)
    known = KnownRecord(problem.step)
    faults = []
    for recorded in problem.plans:
        found = answer(known, recorded)
        faults += [f"{recorded.name}: {fault}" for fault in worse(recorded, found)]
    assert not faults, "\n".join(faults)


def worse(recorded: RecordedPlan, found: RecordedPlan) -> Iterator[str]:
    """In what ``found`` is worse than what was ``recorded``."""
    if recorded.floor_bytes is not None:
        if found.floor_bytes is None or found.floor_bytes > recorded.floor_bytes:
            yield f"floor {recorded.floor_bytes}, now {found.floor_bytes}"
        return
    if found.floor_bytes is not None:
        yield f"does not fit, floor {found.floor_bytes}"
        return
    if found.step_s > recorded.step_s * SLOWER:
        yield f"step {recorded.step_s:.6g} s, now {found.step_s:.6g} s"
    if found.step_s < found.bound_s * (1 - ROUNDING):
        yield f"a plan of {found.step_s:.6g} s is below its bound of {found.bound_s:.6g} s"
    if found.peak_bytes > recorded.budget_bytes:
        yield f"peak {found.peak_bytes} above the budget"
    if found.host_bytes > recorded.host_budget_bytes:
        yield f"{found.host_bytes} on the host"
