"""What the bound of a step is made of: saved values, how long they live, and variables for them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from memo_compile.planners import solver
from memo_compile.planners.move_rules import StepFacts, can_split, closure_of, facts_of
from memo_compile.step.movable import LayerClass, MovableStep
from memo_compile.step.problem import CallKind, Problem

UNITS = 1e4
"""Times that go into a step's computation, of the unit of time in programs. Engines leave out what
costs less than 1e-7: of a step of microseconds such seconds are too much."""


class Life(NamedTuple):
    """A saved value of one layer."""

    value: str
    layer: int
    class_key: str
    slot: int
    made: int
    """The forward's call that makes it."""
    last_use: int
    """The forward's last call that has to do with it."""
    read: int
    """The backward's first that reads it."""

    def may_be_off(self, at: float) -> bool:
        """True where some of call ``at`` can run without it; for ``at - 0.5``, where it can begin.

        A value that an earlier call made may be gone before the end of the call that reads it last.
        """
        done = self.last_use < at or self.made < self.last_use == at
        return done and at < self.read


def lives_of(step: MovableStep, facts: StepFacts) -> Iterator[Life]:
    """What layers save and the backward reads; what two layers save comes twice."""
    uses = _last_uses(step.problem) if facts.talks else facts.last_use
    for number, layer in enumerate(step.layers):
        for slot, value in enumerate(layer.values):
            readers = facts.backward_readers.get(value, ())
            if readers and value in uses:
                made = facts.written_at.get(value, 0)
                last_use = max(made, uses[value])
                yield Life(value, number, layer.class_key, slot, made, last_use, readers[0])


def _last_uses(problem: Problem) -> dict[str, int]:
    """Value -> the last call of the forward that makes or reads it.

    A wait reads what its collective did, and may stand right behind the beginning of that.
    """
    found: dict[str, int] = {}
    for at, call in enumerate(problem.calls[: problem.first_backward]):
        read = () if call.kind is CallKind.COMM_WAIT else call.inputs
        found.update(dict.fromkeys((*read, *call.outputs), at))
    return found


def sources_of(cls: LayerClass, slot: int) -> frozenset[int]:
    """The other slots that recomputing ``slot`` reads; none where it cannot be recomputed."""
    if not cls.slots[slot].can_recompute:
        return frozenset()
    read = {
        cls.ops[source].slot for op in closure_of(cls, (slot,)) for source in cls.ops[op].inputs
    }
    return frozenset(other for other in read if other is not None and other != slot)


def size_of(step: MovableStep, life: Life) -> int:
    """Bytes of a slot that may be off the device; 0 for one that must stay."""
    slot = step.classes[life.class_key].slots[life.slot]
    return slot.size_bytes if slot.can_offload or slot.can_recompute else 0


def off_bytes(step: MovableStep, moved: Iterable[Life], num_calls: int) -> Any:
    """Per call (int64) the bytes of ``moved`` that may be off the device during it."""
    changes = np.zeros(num_calls + 1, dtype=np.int64)
    for life in moved:
        start = life.last_use + (life.made == life.last_use)
        if start < life.read:
            changes[start] += size_of(step, life)
            changes[life.read] -= size_of(step, life)
    return changes.cumsum()[:-1]


def minimum_s(model: Any, objective: Any, unit_s: float) -> float:
    """The least ``objective``, whose unit are so many seconds; infinite where nothing keeps it."""
    model.objective = objective
    status = solver.solve(model)
    if status is solver.SolveStatus.INFEASIBLE:
        return math.inf
    if not status.has_solution:
        return 0.0
    least = model.objective_bound if model.num_int else model.objective_value
    return unit_s * max(0.0, float(least))


def unit_of_s(step: MovableStep) -> float:
    """The unit of time in programs of ``step``, see ``UNITS``."""
    return sum(facts_of(step).call_s) / UNITS or 1.0


def slot_variables(
    model: Any,
    cls: LayerClass,
    num_off: Mapping[int, int],
    num_again: Mapping[int, int],
    *,
    apart: Iterable[tuple[int, int]] | None = None,
) -> tuple[dict[int, Any], dict[int, Any]]:
    """Per slot the layers that recompute it, and that offload it.

    With ``apart``, of one layer: all that is recomputed is for the same part of its rows, or as a
    whole where that cannot be split, and of these pairs at most one is.
    """
    x: dict[int, Any] = {}
    y: dict[int, Any] = {}
    is_again: dict[int, Any] = {}
    part = model.add_var(ub=1, name="part") if apart is not None else None
    for slot, kind in enumerate(cls.slots):
        count, again = num_off.get(slot, 0), num_again.get(slot, 0)
        if again and kind.can_recompute:
            x[slot] = model.add_var(ub=again)
            if part is not None:
                is_again[slot] = model.add_var(var_type="B")
                _require_part(model, x[slot], part, is_again[slot], can_split(cls, (slot,)))
        if count and kind.can_offload:
            y[slot] = model.add_var(ub=count)
        if slot in x and slot in y:
            model.add_constr(x[slot] + y[slot] <= count)
    for slot, source in apart or ():
        if slot in x and source in x:
            model.add_constr(is_again[slot] + is_again[source] <= 1)
    return x, y


def _require_part(model: Any, rows: Any, part: Any, is_again: Any, is_split: bool) -> None:
    """``rows`` is ``part`` where ``is_again``, which is 1 unless they can be split, and else 0."""
    model.add_constr(rows <= is_again)
    model.add_constr(rows <= part)
    model.add_constr(rows >= (part + is_again - 1 if is_split else is_again))


def require_operators(
    model: Any, cls: LayerClass, num_layers: int, x: Mapping[int, Any]
) -> list[tuple[int, float, Any]]:
    """Each operator that a recomputed slot needs: its seconds, and how many layers run it again."""
    makers = {op.slot: at for at, op in enumerate(cls.ops) if op.slot is not None}
    users: dict[int, list[int]] = {}
    for at, op in enumerate(cls.ops):
        for source in op.inputs:
            users.setdefault(source, []).append(at)
    runs: dict[int, Any] = {}
    for at in reversed(range(len(cls.ops))):
        op = cls.ops[at]
        if op.slot is None:
            needs = [runs[user] for user in users.get(at, ()) if user in runs]
        else:
            needs = [x[op.slot]] if op.slot in x and makers[op.slot] == at else []
        if op.can_recompute and needs:
            runs[at] = model.add_var(ub=num_layers)
            for need in needs:
                model.add_constr(runs[at] >= need)
    return [(at, cls.ops[at].seconds, run) for at, run in runs.items()]


def sum_of(terms: Sequence[tuple[float, Any]]) -> Any:
    """The sum of (weight, variable) pairs; no variable comes twice."""
    return solver.weighted([weight for weight, _ in terms], [variable for _, variable in terms])
