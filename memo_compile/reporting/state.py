"""What memo did in this process: plans, notes, steps that ran without a plan."""

import threading
from dataclasses import dataclass, field
from typing import Any

from memo_compile.plans import Plan


@dataclass(frozen=True, slots=True)
class Report:
    """A picture of one moment; ``print`` it for a table."""

    active: bool
    """True when at least one plan stands and the last compilation of a training graph got one."""
    plans: tuple[Plan, ...]
    """Newest last."""
    unplanned_steps: int
    """Training steps that ran in ordinary memory although a plan exists."""
    notes: tuple[str, ...]
    """What was left out, replaced or ignored, in order."""

    def __str__(self) -> str:
        from memo_compile.reporting.table import render

        return render(self)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data for JSON."""
        from memo_compile.reporting.table import report_dict

        return report_dict(self)


@dataclass(slots=True)
class _State:
    plans: list[Plan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unplanned_steps: int = 0
    failed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


_state = _State()


def report() -> Report:
    """What memo planned in this process so far."""
    with _state.lock:
        return Report(
            active=bool(_state.plans) and not _state.failed,
            plans=tuple(_state.plans),
            unplanned_steps=_state.unplanned_steps,
            notes=tuple(_state.notes),
        )


def reset() -> None:
    """Forget everything: for tests and notebooks."""
    with _state.lock:
        _state.plans.clear()
        _state.notes.clear()
        _state.unplanned_steps = 0
        _state.failed = False


def add_plan(plan: Plan) -> None:
    """A plan stands."""
    with _state.lock:
        _state.plans.append(plan)
        _state.failed = False


def replace_plan(old: Plan, new: Plan) -> None:
    """``new`` says more than ``old`` about the same step."""
    with _state.lock:
        _state.plans = [new if one is old else one for one in _state.plans]


def add_note(note: str) -> bool:
    """Keep ``note``; False when it was there already."""
    with _state.lock:
        if note in _state.notes:
            return False
        _state.notes.append(note)
        return True


def mark_failed(note: str) -> None:
    """A training graph got no plan: memo is not active for it."""
    add_note(note)
    with _state.lock:
        _state.failed = True


def count_unplanned() -> int:
    """One more step ran without its plan; returns how many so far."""
    with _state.lock:
        _state.unplanned_steps += 1
        return _state.unplanned_steps
