"""The state behind ``memo_compile.report()``: plans, notes, steps that ran without a plan."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from memo_compile.step.plans import ReportedGroup, ReportedPlan, TrainingState

log = logging.getLogger("memo")


@dataclass(frozen=True, slots=True)
class Report:
    """A picture of one moment; ``print`` it for a few lines."""

    active: bool
    """True when a plan stands, no training graph runs without one, and every forward of the last
    step ran by its plan."""
    plans: tuple[ReportedPlan, ...]
    """Newest last. A plan whose model is gone stays until the next one stands."""
    unplanned_steps: int
    """Training steps that ran in ordinary memory although a plan exists."""
    notes: tuple[str, ...]
    """What was left out, replaced or ignored, in order."""
    groups: tuple[ReportedGroup, ...] = ()
    """Blocks that are compiled one by one and planned as one step."""

    @property
    def training_state(self) -> TrainingState | None:
        """Where parameters, gradients and optimizer state of the newest plan are; None: no plan."""
        plans = (*self.plans, *self.groups)
        return plans[-1].training_state if plans else None

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False) -> str:
        """The report for people; ``verbose``: as tables, with the reason for every tensor."""
        from memo_compile.reporting.table import render

        return render(self, verbose=verbose)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data for JSON."""
        return {
            "active": self.active,
            "unplanned_steps": self.unplanned_steps,
            "notes": list(self.notes),
            "plans": [_plan_dict(plan) for plan in self.plans],
            "groups": [
                {
                    "num_instances": group.num_instances,
                    "between_bytes": group.between_bytes,
                    **_plan_dict(group),
                }
                for group in self.groups
            ],
        }


def _plan_dict(plan: ReportedPlan) -> dict[str, Any]:
    return {
        "name": plan.name,
        "arena_bytes": plan.arena_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "outside_bytes": plan.outside_bytes,
        "outside_bytes_by_kind": dict(plan.outside_bytes_by_kind),
        "peak_bytes": plan.peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "num_regions": plan.num_regions,
        "layer_classes": [asdict(cls) for cls in plan.layer_classes],
        "decisions": [asdict(decision) for decision in plan.decisions],
        "check": str(plan.check),
    }


LeftOut = tuple[tuple[str, ...], bool]
"""Notes on what never reached memo, and whether some of it runs without a plan for good."""


@dataclass(slots=True)
class _State:
    plans: list[ReportedPlan] = field(default_factory=list)
    gone: list[ReportedPlan] = field(default_factory=list)
    """Those of ``plans`` whose models are gone."""
    groups: list[ReportedGroup] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ran: list[ReportedPlan] = field(default_factory=list)
    """The plans by which the last step ran, with what it has moved."""
    begins: bool = False
    """A step has begun, and none of its backwards has ended."""
    unplanned_steps: int = 0
    unplanned_now: bool = False
    """A forward of the last step ran without its plan."""
    failed: bool = False
    refused: bool = False
    refusal_notes: list[str] = field(default_factory=list)
    """Those of ``notes`` that a refused compilation made: they go when the next try gets a plan."""
    left_out: Callable[[], LeftOut] = lambda: ((), False)
    begin: Callable[[], None] = lambda: None
    noting: list[list[str]] = field(default_factory=list)
    """What ``noting`` gathers, the innermost last."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Reentrant: the collector may find a model gone in the thread that holds it."""


_state = _State()


def report() -> Report:
    """What memo planned in this process so far."""
    notes, gave_up = _state.left_out()
    with _state.lock:
        without = _state.failed or _state.refused or gave_up or _state.unplanned_now
        return Report(
            active=bool(_state.plans) and not without,
            plans=tuple(_state.plans),
            unplanned_steps=_state.unplanned_steps,
            notes=(*_state.notes, *notes),
            groups=tuple(_state.groups),
        )


def watch(left_out: Callable[[], LeftOut], begin: Callable[[], None]) -> None:
    """Ask ``left_out`` at every report what torch kept from memo since ``begin`` was called."""
    _state.left_out, _state.begin = left_out, begin


def reset() -> None:
    """Forget everything: for tests and notebooks."""
    with _state.lock:
        _state.plans.clear()
        _state.gone.clear()
        _state.groups.clear()
        _state.notes.clear()
        _state.refusal_notes.clear()
        _state.ran.clear()
        _state.unplanned_steps = 0
        _state.failed = _state.refused = _state.unplanned_now = False
    _state.begin()


def add_plan(plan: ReportedPlan) -> None:
    """Adds ``plan`` to the report.

    Plans of models that are gone leave it, with their groups, and so does what a refused try noted.
    """
    with _state.lock:
        gone_ids = {id(gone) for gone in _state.gone}
        gone_names = {gone.name for gone in _state.gone}
        _state.gone = []
        _state.groups = [group for group in _state.groups if gone_names.isdisjoint(group.graphs)]
        _state.plans = [*(old for old in _state.plans if id(old) not in gone_ids), plan]
        _state.refused = False
        _state.notes = [note for note in _state.notes if note not in _state.refusal_notes]
        _state.refusal_notes.clear()


def replace_plan(old: ReportedPlan, new: ReportedPlan) -> None:
    """Puts ``new``, which says more about the same step, in the place of ``old``."""
    with _state.lock:
        _state.plans = [new if plan is old else plan for plan in _state.plans]


def plan_is_gone(plan: ReportedPlan) -> None:
    """Notes that the model of ``plan`` is gone, so that no step of it will run any more."""
    with _state.lock:
        _state.gone.append(plan)


def replace_group(old: ReportedGroup | None, new: ReportedGroup) -> None:
    """Puts ``new`` in the place of ``old``; None: it is the first plan of its group."""
    with _state.lock:
        _state.groups = [*(group for group in _state.groups if group is not old), new]


def group_is_gone(group: ReportedGroup) -> None:
    """Removes ``group``, of which no step will run any more."""
    with _state.lock:
        _state.groups = [other for other in _state.groups if other is not group]


def add_note(note: str) -> bool:
    """Keep ``note``; False when it was there already."""
    with _state.lock:
        for gathered in _state.noting:
            gathered.append(note)
        # It is true of what is compiled now as well, however many compilations were refused.
        _state.refusal_notes = [each for each in _state.refusal_notes if each != note]
        if note in _state.notes:
            return False
        _state.notes.append(note)
        return True


@contextlib.contextmanager
def noting() -> Iterator[list[str]]:
    """Collects the notes that are added inside the block, also those that were there already."""
    gathered: list[str] = []
    with _state.lock:
        _state.noting.append(gathered)
    try:
        yield gathered
    finally:
        with _state.lock:
            _state.noting = [notes for notes in _state.noting if notes is not gathered]


def warn_once(note: str) -> None:
    """Adds ``note`` to the report, and logs it the first time."""
    if add_note(note):
        log.warning("memo: %s", note.removeprefix("memo: "))


def mark_failed(note: str) -> None:
    """Notes that a training graph got no plan and runs without one."""
    add_note(note)
    with _state.lock:
        _state.failed = True


def current_notes() -> frozenset[str]:
    """The notes of the report by now, for ``mark_refused``."""
    with _state.lock:
        return frozenset(_state.notes).difference(_state.refusal_notes)


def mark_refused(note: str, before: frozenset[str]) -> None:
    """Notes that a compilation ended with an error; ``before`` are the notes when it began.

    This note and others of that compilation are removed once another graph, its next try, gets a
    plan.
    """
    add_note(note)
    with _state.lock:
        _state.refused = True
        _state.refusal_notes += [new for new in _state.notes if new not in before]


def count_unplanned() -> None:
    """Counts a step that ran without its plan."""
    with _state.lock:
        _state.unplanned_now = True
        _state.unplanned_steps += 1


def step_begins() -> None:
    """Notes that a forward begins while no other step waits for its backward."""
    with _state.lock:
        _state.unplanned_now = False
        _state.begins = True


def step_ran(plan: ReportedPlan) -> None:
    """Notes that a backward by ``plan`` has ended; each graph of a step has a backward."""
    with _state.lock:
        if _state.begins:
            _state.ran.clear()
        _state.begins = False
        _state.ran.append(plan)


def last_step() -> tuple[ReportedPlan, ...]:
    """The plans of the last step that has ended, with the bytes that it moved."""
    with _state.lock:
        return tuple(_state.ran)
