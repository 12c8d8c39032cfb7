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
        """Where the newest plan has parameters, gradients, optimizer state; None: no plan."""
        plans = (*self.plans, *self.groups)
        return plans[-1].training_state if plans else None

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False) -> str:
        """Returns the report for people; ``verbose``: as tables, with each tensor's reason."""
        from memo_compile.reporting.table import render

        return render(self, verbose=verbose)

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as plain data for JSON."""
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
    """What this process has planned and run so far."""

    plans: list[ReportedPlan] = field(default_factory=list)
    plans_of_gone_models: list[ReportedPlan] = field(default_factory=list)
    """Those of ``plans`` that leave when the next plan comes."""
    groups: list[ReportedGroup] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    last_step_plans: list[ReportedPlan] = field(default_factory=list)
    """The plans by which the last step ran, with what it has moved."""
    is_before_backward: bool = False
    """A step has begun, and none of its backwards has ended."""
    unplanned_steps: int = 0
    last_step_unplanned: bool = False
    """A forward of the last step ran without its plan."""
    failed: bool = False
    """A training graph got no plan, and runs without one."""
    refused: bool = False
    """The last compilation ended with an error."""
    refusal_notes: list[str] = field(default_factory=list)
    """Those of ``notes`` that a refused compilation made: they go when the next try gets a plan."""
    left_out: Callable[[], LeftOut] = lambda: ((), False)
    """Says what torch kept from memo since the last call of ``begin_watch``."""
    begin_watch: Callable[[], None] = lambda: None
    gathered_notes: list[list[str]] = field(default_factory=list)
    """A list for each ``noting`` block that is running."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Reentrant: the collector may find a model gone in the thread that holds it."""


_state = _State()


def report() -> Report:
    """Returns what memo planned in this process so far."""
    torch_notes, gave_up = _state.left_out()
    with _state.lock:
        unplanned = _state.failed or _state.refused or gave_up or _state.last_step_unplanned
        return Report(
            active=bool(_state.plans) and not unplanned,
            plans=tuple(_state.plans),
            unplanned_steps=_state.unplanned_steps,
            notes=(*_state.notes, *torch_notes),
            groups=tuple(_state.groups),
        )


def watch(left_out: Callable[[], LeftOut], begin_watch: Callable[[], None]) -> None:
    """Makes reports ask ``left_out`` what torch kept from memo since ``begin_watch`` was called."""
    _state.left_out, _state.begin_watch = left_out, begin_watch


def reset() -> None:
    """Forgets everything: for tests and notebooks."""
    with _state.lock:
        _state.plans.clear()
        _state.plans_of_gone_models.clear()
        _state.groups.clear()
        _state.notes.clear()
        _state.refusal_notes.clear()
        _state.last_step_plans.clear()
        _state.unplanned_steps = 0
        _state.failed = _state.refused = _state.last_step_unplanned = False
    _state.begin_watch()


def add_plan(plan: ReportedPlan) -> None:
    """Adds ``plan`` to the report.

    Plans of models that are gone leave it, with their groups, and so does what a refused try noted.
    """
    with _state.lock:
        gone_ids = {id(gone) for gone in _state.plans_of_gone_models}
        gone_names = {gone.name for gone in _state.plans_of_gone_models}
        _state.plans_of_gone_models = []
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
        _state.plans_of_gone_models.append(plan)


def replace_group(old: ReportedGroup | None, new: ReportedGroup) -> None:
    """Puts ``new`` in the place of ``old``; None: it is the first plan of its group."""
    with _state.lock:
        _state.groups = [*(group for group in _state.groups if group is not old), new]


def group_is_gone(group: ReportedGroup) -> None:
    """Removes ``group``, of which no step will run any more."""
    with _state.lock:
        _state.groups = [other for other in _state.groups if other is not group]


def add_note(note: str) -> bool:
    """Keeps ``note`` for the report; returns False when it was there already."""
    with _state.lock:
        for notes in _state.gathered_notes:
            notes.append(note)
        # A note of a refused compilation is true of this one as well: it stays when that is mended.
        _state.refusal_notes = [other for other in _state.refusal_notes if other != note]
        if note in _state.notes:
            return False
        _state.notes.append(note)
        return True


@contextlib.contextmanager
def noting() -> Iterator[list[str]]:
    """Collects the notes that are added inside the block, also those that were there already."""
    notes: list[str] = []
    with _state.lock:
        _state.gathered_notes.append(notes)
    try:
        yield notes
    finally:
        with _state.lock:  # by identity: lists with equal notes are of other blocks
            _state.gathered_notes = [each for each in _state.gathered_notes if each is not notes]


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
    """Returns the notes that a later ``mark_refused`` must not count as the refused try's."""
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
        _state.last_step_unplanned = True
        _state.unplanned_steps += 1


def step_begins() -> None:
    """Notes that a forward begins while no other step waits for its backward."""
    with _state.lock:
        _state.last_step_unplanned = False
        _state.is_before_backward = True


def step_ran(plan: ReportedPlan) -> None:
    """Notes that a backward by ``plan`` has ended; each graph of a step has a backward."""
    with _state.lock:
        if _state.is_before_backward:  # the first backward of its step
            _state.last_step_plans.clear()
        _state.is_before_backward = False
        _state.last_step_plans.append(plan)


def last_step() -> tuple[ReportedPlan, ...]:
    """Returns the plans of the last step that has ended, with the bytes that it moved."""
    with _state.lock:
        return tuple(_state.last_step_plans)
