"""What may be moved or recomputed in a step, and what recomputing takes."""

import bisect
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memo_compile.errors import InvalidPlan
from memo_compile.planners.host_weights import WeightCopies
from memo_compile.step.communication import has_collectives, value_sizes
from memo_compile.step.lives import CallTables
from memo_compile.step.movable import (
    Action,
    Layer,
    LayerClass,
    Mode,
    MovableStep,
    Moves,
    RecomputeKey,
    RecomputePart,
    RecomputeRegion,
    once_per_step,
)
from memo_compile.step.problem import Phase, Problem, StepCall

RecomputeOf = Callable[[RecomputeKey], RecomputeRegion]
"""Gives the region of a key, or raises UnsupportedGraph if there is none; the mode is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Where the values of a step are made and read, by index of the call."""

    first_backward: int
    """The first call of the backward; the number of calls where there is none."""
    index_of: dict[str, int]
    """Name of a call -> its index."""
    written_at: dict[str, int]
    """Value -> the last call of the forward that makes it or writes into it."""
    last_use: dict[str, int]
    """Value -> the last call of the forward that makes or reads it."""
    size_of: dict[str, int]
    """Value -> bytes of its arena buffer, for values that the forward makes there."""
    backward_readers: dict[str, tuple[int, ...]]
    """Value -> the calls of the backward that read it, ascending."""
    overwritten_at: dict[str, int]
    """Value -> the call that writes over it."""
    call_s: tuple[float, ...]
    """Seconds of every call."""
    talks: bool
    """True where the step talks to other ranks: it begins collectives."""
    halves_s: tuple[float, float]
    """Seconds of all calls of forwards, and of those of backwards."""
    forward_at: tuple[int, ...]
    """Per layer, the index of its forward call; ascending."""
    backward_at: tuple[int, ...]
    """Per layer, the index of its first backward call."""
    turn_at: tuple[int, ...]
    """Per layer, the first call behind its forward that is of a backward: by then its copies to the
    host have ended, and from there on they may come back."""
    following: tuple[int, ...]
    """The layers in the order in which their backwards run."""
    forward_s: tuple[float, ...]
    """Per layer, seconds of its forward, of all its tiles where it runs in tiles."""
    backward_s: tuple[float, ...]
    """Per layer, seconds of its backward likewise."""
    tables: CallTables | None
    """Of the calls of the step and of ``renamed``; None where it talks, and calls are made anew
    in each program."""
    layered: frozenset[str]
    """The values of all layers' slots."""
    renamed: dict[tuple[int, tuple[str, ...]], StepCall] = field(default_factory=dict)
    """Calls of the backward by index and by the names, after moves, of their ``movable`` values.
    This and the four below are kept because plans of the step share most of their calls."""
    copies: dict[tuple[str, int, str, int, int, int], StepCall] = field(default_factory=dict)
    """Copies by kind, layer, value, first byte, end byte and place on the host."""
    waits: dict[tuple[str, int, str], StepCall] = field(default_factory=dict)
    """The calls that wait for ``copies``, by kind, layer and value."""
    weight_copies: WeightCopies = field(default_factory=WeightCopies)
    """The copies of weights on the host, which are the same in all plans."""
    movable: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Call -> those of the ``layered`` values that it reads or writes into; as far as asked for."""


@once_per_step
def facts_of(step: MovableStep) -> StepFacts:
    """The facts of ``step``."""
    problem = step.problem
    calls = problem.calls
    first_backward = problem.first_backward
    written_at: dict[str, int] = {}
    last_use: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    for at, call in enumerate(calls):
        if call.phase is Phase.BACKWARD:
            for value in dict.fromkeys(call.touched):
                readers.setdefault(value, []).append(at)
            continue
        written_at.update((into.value, at) for into in call.into)
        written_at.update(dict.fromkeys(call.outputs, at))
        last_use.update(dict.fromkeys((*call.inputs, *call.outputs), at))
    index_of = {call.name: at for at, call in enumerate(calls)}
    call_s = tuple(map(step.costs.call_s, calls))
    sizes, talks = value_sizes(problem), has_collectives(problem)
    forward_at = tuple(index_of[layer.forward] for layer in step.layers)
    backward_at = tuple(index_of[layer.backward] for layer in step.layers)
    return StepFacts(
        first_backward=first_backward,
        index_of=index_of,
        forward_at=forward_at,
        backward_at=backward_at,
        turn_at=_first_backwards_behind(problem, forward_at),
        following=tuple(sorted(range(len(backward_at)), key=backward_at.__getitem__)),
        forward_s=tuple(_layer_pass_s(calls, call_s, at) for at in forward_at),
        backward_s=tuple(_layer_pass_s(calls, call_s, at) for at in backward_at),
        written_at=written_at,
        last_use=last_use,
        size_of={value: sizes[value] for value in written_at if value in sizes},
        backward_readers={value: tuple(calls_reading) for value, calls_reading in readers.items()},
        overwritten_at={
            call.inputs[position]: at
            for at, call in enumerate(calls)
            for position in problem.regions[call.region].overwrites
        },
        call_s=call_s,
        layered=frozenset(itertools.chain.from_iterable(layer.values for layer in step.layers)),
        talks=talks,
        tables=CallTables(),
        halves_s=(
            sum(s for s, call in zip(call_s, calls, strict=True) if call.phase is Phase.FORWARD),
            sum(s for s, call in zip(call_s, calls, strict=True) if call.phase is Phase.BACKWARD),
        ),
    )


def _first_backwards_behind(problem: Problem, forward_at: Sequence[int]) -> tuple[int, ...]:
    """For each of these calls the first call of a backward behind it (``StepFacts.turn_at``)."""
    backwards = [at for at, call in enumerate(problem.calls) if call.phase is Phase.BACKWARD]
    backwards.append(len(problem.calls))
    return tuple(backwards[bisect.bisect_left(backwards, at)] for at in forward_at)


def _layer_pass_s(calls: Sequence[StepCall], call_s: Sequence[float], first: int) -> float:
    """Seconds of call ``first`` and of the calls of the same layer right behind it, its tiles."""
    layer = calls[first].layer_class, calls[first].instance
    if layer[0] is None:
        return call_s[first]
    pass_calls = itertools.takewhile(
        lambda at: (calls[at].layer_class, calls[at].instance) == layer, range(first, len(calls))
    )
    return math.fsum(call_s[at] for at in pass_calls)


def recompute_closure(
    cls: LayerClass, slots: Iterable[int], available: Collection[int]
) -> tuple[int, ...]:
    """The operators that recompute ``slots`` when ``available`` are at hand, in the order they run.

    Where a -> b -> c make slots 0, 1, 2, slot 2 takes c if 1 is available, b and c if only 0 is.
    Whether each of these operators can be recomputed is checked by ``require_valid_modes``.
    """
    wanted = set(slots)
    at_hand = set(available) - wanted
    makers = {op.slot: at for at, op in enumerate(cls.ops) if op.slot is not None}
    pending = [makers[slot] for slot in wanted if slot in makers]
    closure: set[int] = set()
    while pending:
        at = pending.pop()
        if at in closure:
            continue
        closure.add(at)
        for source in cls.ops[at].inputs:
            if cls.ops[source].slot not in at_hand:
                pending.append(source)
    return tuple(sorted(closure))


def can_split(cls: LayerClass, recomputed: Iterable[int]) -> bool:
    """True when these slots can be recomputed for a part of their rows, and copied for the rest."""
    slots = tuple(recomputed)
    rows = {cls.slots[slot].num_rows for slot in slots}
    copies_rows = all(cls.slots[slot].can_offload and cls.slots[slot].row_bytes for slot in slots)
    if len(rows) != 1 or rows == {1} or not copies_rows:
        return False
    return all(cls.ops[op].row_wise for op in closure_of(cls, slots))


NO_TIME_SHARE = 0.005
"""Share of its layer's seconds: operators that together take no more may run in several of the
regions that recompute."""


def closure_of(
    cls: LayerClass, slots: Collection[int], passing: Collection[int] = ()
) -> tuple[int, ...]:
    """The operators that recompute ``slots``, with all slots at hand but these and ``passing``."""
    made = {*slots, *passing}
    at_hand = [slot for slot in range(len(cls.slots)) if slot not in made]
    return recompute_closure(cls, slots, at_hand)


def slots_bytes(cls: LayerClass, slots: Iterable[int]) -> int:
    """Bytes of ``slots`` of one layer."""
    return sum(cls.slots[slot].size_bytes for slot in slots)


def slots_s(cls: LayerClass, slots: Collection[int]) -> float:
    """Seconds to recompute ``slots``, with every other slot at hand."""
    return sum(cls.ops[at].seconds for at in closure_of(cls, slots))


def recompute_seconds(step: MovableStep, key: RecomputeKey) -> float:
    """Seconds of the operators of the region of ``key``, in proportion to its rows."""
    cls = step.classes[key.class_key]
    seconds = sum(cls.ops[at].seconds for at in closure_of(cls, key.slots, key.passing))
    if key.rows is None or not key.slots:
        return seconds
    return seconds * key.rows / cls.slots[key.slots[0]].num_rows


def recomputable(step: MovableStep, layer: Layer, slot: int) -> bool:
    """True when ``slot`` can be recomputed before everything in the backward that reads it."""
    if not step.class_of(layer).slots[slot].can_recompute:
        return False
    facts = facts_of(step)
    readers = facts.backward_readers.get(layer.values[slot], ())
    return not readers or readers[0] >= facts.index_of[layer.backward]


def recompute_rows(cls: LayerClass, mode: Mode) -> int | None:
    """How many rows ``mode`` recomputes; None for all of them, or where it recomputes nothing."""
    recomputed = mode.slots(Action.RECOMPUTE)
    if mode.recompute_rows is None or not recomputed:
        return None
    return None if mode.recompute_rows == cls.slots[recomputed[0]].num_rows else mode.recompute_rows


def recompute_keys(cls: LayerClass, mode: Mode) -> tuple[RecomputeKey, ...]:
    """The regions with which ``mode`` recomputes, in the order in which the backward needs them."""
    slots, rows = mode.slots(Action.RECOMPUTE), recompute_rows(cls, mode)
    if slots not in cls.parts:
        cls.parts[slots] = tuple(_recompute_parts(cls, slots))
    return tuple(
        RecomputeKey(class_key=cls.key, slots=part.slots, rows=rows, passing=part.passing)
        for part in cls.parts[slots]
    )


def may_pass(cls: LayerClass, slot: int) -> bool:
    """True where several regions may make ``slot``: it takes no time (``RecomputeKey.passing``).

    Wherever several do, this holds, whatever else is recomputed.
    """
    return cls.slots[slot].can_recompute and _takes_no_time(cls, closure_of(cls, (slot,)))


def _takes_no_time(cls: LayerClass, ops: Iterable[int]) -> bool:
    """True where ``ops`` take ``NO_TIME_SHARE`` of the layer at most."""
    layer_s = sum(op.seconds for op in cls.ops)
    return sum(cls.ops[at].seconds for at in ops) <= NO_TIME_SHARE * layer_s


def joined_parts(cls: LayerClass, slots: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Sets of slots that share operators; each would be one region if none ran twice (``_cut``)."""
    return (part.slots for part in _recompute_parts(cls, slots, cuts=False))


def _recompute_parts(
    cls: LayerClass, slots: Sequence[int], *, cuts: bool = True
) -> Iterator[RecomputePart]:
    """Cuts the recomputation of ``slots`` into regions, in the order they run.

    There is one for each call that is the first to read some of them. Slots that share an operator
    with an earlier part are made with that part, so that nothing runs twice; the rest waits until
    it is read. With ``cuts``, operators that take no time may run again in a late part, so that
    their results do not exist meanwhile.
    """
    others = [slot for slot in range(len(cls.slots)) if slot not in slots]
    by_read: dict[int, list[int]] = {}
    for slot in slots:
        by_read.setdefault(cls.slots[slot].first_read, []).append(slot)
    parts: list[_Part] = []
    for _, slots_read in sorted(by_read.items()):
        when_read: list[_Part] = []
        for whole in _apart_parts(cls, slots_read, others):
            meeting = [part for part in parts if whole.meets(part)]
            early, late = _cut(cls, whole, meeting, others, cuts=cuts)
            when_read += late
            if early is not None:  # it joins the parts that it meets, at the place of the first
                meeting = [part for part in meeting if early.meets(part)]
                at = parts.index(meeting[0])
                behind = [part for part in parts[at:] if part not in meeting]
                # It runs earlier now than parts that may make what it reads: these join it too.
                joined, behind = _with_sources(cls, _together([*meeting, early]), behind)
                parts = [*parts[:at], joined, *behind]
        parts += [_together(when_read)] if when_read else []
    for part in parts:
        made = {cls.ops[at].slot for at in part.ops}
        passing = (slot for slot in slots if slot in made and slot not in part.slots)
        yield RecomputePart(tuple(sorted(part.slots)), tuple(passing))


def _cut(
    cls: LayerClass,
    whole: "_Part",
    earlier: Sequence["_Part"],
    available: Sequence[int],
    *,
    cuts: bool,
) -> "tuple[_Part | None, Sequence[_Part]]":
    """What of ``whole`` is made with the ``earlier`` parts that it meets, and what when it is read.

    As few slots as may be are made early: the first of those that share operators, so that the rest
    runs nothing twice but what takes no time. Each late part must be larger than what it keeps
    waiting (``_is_larger``). Without ``cuts`` all slots are made early, or none.
    """
    if not earlier:
        return None, (whole,)
    made = frozenset().union(*(part.ops for part in earlier))
    makers = {op.slot: at for at, op in enumerate(cls.ops)}
    shared = sorted((slot for slot in whole.slots if makers[slot] in made), key=makers.__getitem__)
    for end in range(len(shared) + 1 if cuts else 1):
        early = tuple(shared[:end])
        rest = [slot for slot in whole.slots if slot not in early]
        late = _apart_parts(cls, rest, [*available, *early])
        twice = made.intersection(itertools.chain.from_iterable(part.ops for part in late))
        if (
            late
            and _takes_no_time(cls, twice)
            and all(_is_larger(cls, part, available) for part in late)
        ):
            ops = frozenset(recompute_closure(cls, early, available))
            return _Part(early, ops) if early else None, late
    return whole, ()


def _with_sources(
    cls: LayerClass, part: "_Part", behind: Sequence["_Part"]
) -> tuple["_Part", list["_Part"]]:
    """``part`` with the parts ``behind`` it joined that make what it reads, and the other parts."""
    read = {
        cls.ops[source].slot
        for at in part.ops
        for source in cls.ops[at].inputs
        if source not in part.ops
    }
    makers = [other for other in behind if not read.isdisjoint(other.slots)]
    rest = [other for other in behind if other not in makers]
    return _with_sources(cls, _together([part, *makers]), rest) if makers else (part, rest)


def _is_larger(cls: LayerClass, part: "_Part", available: Collection[int]) -> bool:
    """True where ``part`` is larger than its sources that the backward has read before it."""
    first = min(cls.slots[slot].first_read for slot in part.slots)
    sources = {cls.ops[source].slot for at in part.ops for source in cls.ops[at].inputs}
    held = (cls.slots[slot] for slot in sources.intersection(available) if slot is not None)
    held_bytes = sum(slot.size_bytes for slot in held if slot.first_read < first)
    return held_bytes < sum(cls.slots[slot].size_bytes for slot in part.slots)


class _Part(NamedTuple):
    """Slots that are recomputed together, and the operators that do."""

    slots: tuple[int, ...]
    ops: frozenset[int]

    def meets(self, other: "_Part") -> bool:
        """True where an operator runs for both."""
        return not self.ops.isdisjoint(other.ops)


def _together(parts: Sequence[_Part]) -> _Part:
    """One part with the slots and operators of all."""
    slots = tuple(slot for part in parts for slot in part.slots)
    return _Part(slots, frozenset().union(*(part.ops for part in parts)))


def _apart_parts(
    cls: LayerClass, slots: Iterable[int], available: Sequence[int]
) -> Sequence[_Part]:
    """``slots`` in as many parts as share no operator, with ``available`` at hand."""
    parts: list[_Part] = []
    for slot in slots:
        slot_part = _Part((slot,), frozenset(recompute_closure(cls, (slot,), available)))
        meeting = [part for part in parts if slot_part.meets(part)]
        parts = [part for part in parts if part not in meeting]
        parts.append(_together([*meeting, slot_part]))
    return parts


def require_valid_modes(step: MovableStep, moves: Moves) -> None:
    """Raises InvalidPlan for a mode that cannot be; it names layer, slot and what to choose."""
    if len(moves.modes) != len(step.layers):
        raise InvalidPlan(
            f"expected a mode for each of {len(step.layers)} layers, got {len(moves.modes)}"
        )
    facts = facts_of(step)
    mover: dict[str, str] = {}
    valid: set[tuple[str, Mode]] = set()
    for layer, mode in zip(step.layers, moves.modes, strict=True):
        cls = step.class_of(layer)
        if (cls.key, mode) not in valid:
            fault = next(_faults(cls, mode, step.token_granule), None)
            if fault is not None:
                raise InvalidPlan(f"{cls.key}: {fault}")
            valid.add((cls.key, mode))
        for slot, action in enumerate(mode.actions):
            if action is Action.SAVE:
                continue
            value = layer.values[slot]
            if mover.setdefault(value, layer.forward) != layer.forward:
                raise InvalidPlan(
                    f"{layer.forward} and {mover[value]} both move {value}; SAVE it in one of them"
                )
            _check_value(step, facts, layer, slot, mode)


def _faults(cls: LayerClass, mode: Mode, granule: int) -> Iterator[str]:
    """Why no layer of ``cls`` can do what ``mode`` says; a later one assumes the earlier mended."""
    if len(mode.actions) != len(cls.slots):
        yield f"expected an action for each of {len(cls.slots)} slots, got {len(mode.actions)}"
    for slot in mode.slots(Action.OFFLOAD):
        if not cls.slots[slot].can_offload:
            yield f"slot {_name(cls, slot)} cannot be offloaded; SAVE it"
    recomputed = mode.slots(Action.RECOMPUTE)
    for slot in recomputed:
        if not cls.slots[slot].can_recompute:
            yield f"slot {_name(cls, slot)} cannot be recomputed; SAVE it"
        if all(op.slot != slot for op in cls.ops):
            yield f"no operator recomputes slot {_name(cls, slot)}; SAVE it"
    closure = closure_of(cls, recomputed)
    for op in (cls.ops[at] for at in closure):
        if not op.can_recompute:
            yield (
                f"recomputing {_names(cls, recomputed)} runs {op.name}, which cannot be "
                "recomputed; SAVE or OFFLOAD what it makes"
            )
    if mode.recompute_rows is not None:
        yield from _row_faults(cls, mode.recompute_rows, recomputed, closure, granule)


def _row_faults(
    cls: LayerClass, rows: int, recomputed: tuple[int, ...], closure: tuple[int, ...], granule: int
) -> Iterator[str]:
    """Why these slots cannot be recomputed for the first ``rows`` rows and copied beyond."""
    if not recomputed:
        yield f"recompute_rows {rows} but no slot is to RECOMPUTE"
    counts = {cls.slots[slot].num_rows for slot in recomputed}
    if len(counts) > 1 or 1 in counts:
        yield (
            f"recompute_rows {rows} needs slots of one number of rows above 1, got "
            f"{sorted(counts)} of {_names(cls, recomputed)}"
        )
    num_rows = counts.pop()
    if not 0 < rows <= num_rows or (rows % granule and rows != num_rows):
        yield f"expected recompute_rows in multiples of {granule} up to {num_rows}, got {rows}"
    if rows == num_rows:
        return
    for slot in recomputed:
        if not cls.slots[slot].can_offload or not cls.slots[slot].row_bytes:
            yield f"slot {_name(cls, slot)} cannot be offloaded in part; recompute all of its rows"
    for op in (cls.ops[at] for at in closure):
        if not op.row_wise:
            yield (
                f"recomputing {_names(cls, recomputed)} for {rows} rows runs {op.name}, "
                "which mixes rows; recompute all rows"
            )


def _check_value(step: MovableStep, facts: StepFacts, layer: Layer, slot: int, mode: Mode) -> None:
    """Raises InvalidPlan when this layer's value of ``slot`` cannot do what the mode says."""
    value = layer.values[slot]
    is_recomputed = mode.actions[slot] is Action.RECOMPUTE
    if is_recomputed and not recomputable(step, layer, slot):
        reader = step.problem.calls[facts.backward_readers[value][0]].name
        raise InvalidPlan(
            f"{layer.forward}: {value} cannot be recomputed before {layer.backward}, since "
            f"{reader} reads it earlier; SAVE or OFFLOAD it"
        )
    is_copied = not is_recomputed or mode.recompute_rows is not None
    if is_copied and value not in facts.size_of:
        raise InvalidPlan(
            f"{layer.forward}: {value} cannot be copied, since no call of the forward makes it "
            "in the arena; SAVE it"
        )


def _name(cls: LayerClass, slot: int) -> str:
    return f"{slot} ({cls.slots[slot].name})"


def _names(cls: LayerClass, slots: Iterable[int]) -> str:
    return ", ".join(cls.slots[slot].name for slot in slots)
