"""From decisions to a step program: copies, waits and recomputations between the calls of a step.

Rewrite, for a layer L whose saved value v is offloaded and w recomputed:

    forward     L -> v, w;  offload v;  ...;  wait: v dies;  ...
    backward    ...;  reload v -> reloaded.v;  ...;  wait;
                recompute L -> recomputed.w;  Lb reads both

An offload is issued where its value has been made, and a reload is waited for right before the
first call that reads it. In between each lasts for as many layers as ``Schedule`` says. Where it is
to last for as long as memory allows, both are at once here, and ``transfers.with_time`` gives them
their time. In a token-wise mix the first rows of a value
are recomputed into the buffer that its other rows are reloaded to.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from memo_compile.errors import InvalidPlan
from memo_compile.planners.host_weights import weight_of
from memo_compile.planners.move_rules import (
    RecomputeOf,
    facts_of,
    recompute_keys,
    recompute_rows,
    require_valid_modes,
)
from memo_compile.planners.transfers import at_once, late
from memo_compile.step.movable import Action, MovableStep, Moves, RecomputeRegion
from memo_compile.step.problem import (
    COPY_REGION,
    CallKind,
    Copy,
    Into,
    Phase,
    Problem,
    StepCall,
    Storage,
    align,
    copy_regions,
    reload_region,
)

_RECOMPUTED, _RELOADED = "recomputed.", "reloaded."
"""Prefixes to a value's name for its recomputation and for its reload."""


@dataclass(slots=True, kw_only=True)
class _CopiedValue:
    """A value that is copied to the host and back."""

    value: str
    layer: int
    size_bytes: int
    """Bytes of its buffer."""
    start_bytes: int
    """The first byte of it that is copied."""
    end_bytes: int
    issued_call: int
    """Index of the call before which the copy to the host is issued."""
    needed_item: int
    """Index among the step's items of the first of a backward that reads it."""
    latest_item: int
    """Index of the item before which its buffer must exist."""
    host_offset: int = 0

    @property
    def num_bytes(self) -> int:
        """How much is copied."""
        return self.end_bytes - self.start_bytes


@dataclass(slots=True, kw_only=True)
class _Recomputation:
    """What one region recomputes for a layer, right before the first call that reads it.

    Calls and recomputations are the *items* of the compute lane.
    """

    layer: int
    number: int
    """Among those of the layer."""
    region: RecomputeRegion
    values: tuple[str, ...]
    """The values of ``region.key.slots``."""
    at: int = -1
    """Index among the step's items."""


def apply_moves(step: MovableStep, moves: Moves, recompute: RecomputeOf) -> Problem:
    """The step program that does what ``moves`` says.

    A value that nothing in the backward reads is not moved. Cost: linear in the number of calls,
    their inputs and what moves.

    Raises:
        InputError: a region of the step has no seconds.
        InvalidPlan: a mode cannot be (``require_valid_modes``), or a recomputation needs a value
            that does not exist when it runs.
    """
    require_valid_modes(step, moves)
    return _Builder(step, moves, recompute).build()


class _Builder:
    """Builds one step program."""

    def __init__(self, step: MovableStep, moves: Moves, recompute: RecomputeOf) -> None:
        self.step = step
        self.problem = step.problem
        self.facts = facts_of(step)
        self.layers = 0 if moves.schedule.widen else moves.schedule.layers
        """How many layers run beside a copy; with ``widen`` copies get their time later."""
        self.forward_at, self.backward_at = self.facts.forward_at, self.facts.backward_at
        self.recomputations = self._find_recomputations(moves, recompute)
        self.recomputation_of = {
            value: recomputation
            for recomputation in self.recomputations
            for value in recomputation.values
        }
        self.item_of_call = self._items_of_calls()
        """Per call of the step its index among the items: calls and recomputations together."""
        self.first_read = self._first_reads()
        """Value -> the first item of the backward that reads it."""
        self.copied = self._copied_values(moves)
        self.reloaded = {move.value: move for move in self.copied}

    def build(self) -> Problem:
        """The step program: the calls in their order, and the regions that they need."""
        regions = dict(self.problem.regions)
        regions.update(copy_regions(dict.fromkeys(move.size_bytes for move in self.copied)))
        for recomputation in self.recomputations:
            regions[recomputation.region.key.region] = recomputation.region.profile
        host_bytes = sum(align(move.num_bytes) for move in self.copied)
        moved = replace(
            self.problem, regions=regions, calls=tuple(self._calls()), host_bytes=host_bytes
        )
        moved = self.facts.weight_copies.copied_in(moved)
        if not self.facts.talks:
            return moved
        return late(moved) if self.step.waits_late else at_once(moved)

    def _find_recomputations(self, moves: Moves, recompute: RecomputeOf) -> list[_Recomputation]:
        """The recomputations of ``moves`` of which the backward reads something."""
        recomputations, is_read = [], self.facts.backward_readers.__contains__
        for index, (layer, mode) in enumerate(zip(self.step.layers, moves.modes, strict=True)):
            for number, key in enumerate(recompute_keys(self.step.class_of(layer), mode)):
                values = tuple(layer.values[slot] for slot in key.slots)
                if any(map(is_read, values)):
                    region = recompute(key)
                    work = _Recomputation(layer=index, number=number, region=region, values=values)
                    recomputations.append(work)
        return recomputations

    def _items_of_calls(self) -> list[int]:
        """``item_of_call``; also sets the index ``at`` of each recomputation.

        With a recomputation that call 1 is the first to read, calls 0 and 1 are items 0 and 2.
        """
        read_by: dict[int, list[_Recomputation]] = {}
        readers = self.facts.backward_readers
        for recomputation in self.recomputations:
            first = min(readers[value][0] for value in recomputation.values if value in readers)
            read_by.setdefault(first, []).append(recomputation)
        items: list[int] = []
        num_before = 0
        for call in sorted(read_by):
            items += range(len(items) + num_before, call + num_before)
            for recomputation in read_by[call]:
                recomputation.at = call + num_before
                num_before += 1
        items += range(len(items) + num_before, len(self.problem.calls) + num_before)
        return items

    def _first_reads(self) -> dict[str, int]:
        """Value -> the first item that reads it, as the step names it before any move."""
        readers = self.facts.backward_readers
        first = {
            value: self.item_of_call[readers[value][0]]
            for value in self.facts.layered
            if value in readers
        }
        for recomputation in self.recomputations:
            for value in self._sources_of(recomputation):
                first[value] = min(recomputation.at, first.get(value, recomputation.at))
        return first

    def _sources_of(self, recomputation: _Recomputation) -> Iterator[str]:
        """The values that a recomputation reads, by their names before any move."""
        layer = self.step.layers[recomputation.layer]
        for source in recomputation.region.inputs:
            if source.slot is not None:
                yield layer.values[source.slot]
            else:
                assert source.forward_input is not None, (
                    f"{layer.forward}: a region input without a source"
                )
                yield layer.inputs[source.forward_input]

    def _copied_values(self, moves: Moves) -> list[_CopiedValue]:
        """Every value that is copied, in the order of the lane to the host."""
        copied_values = []
        for index, (layer, mode) in enumerate(zip(self.step.layers, moves.modes, strict=True)):
            slots = self.step.class_of(layer).slots
            rows = recompute_rows(self.step.class_of(layer), mode)
            for slot, action in enumerate(mode.actions):
                is_mixed = action is Action.RECOMPUTE and rows is not None
                value = layer.values[slot]
                if (action is not Action.OFFLOAD and not is_mixed) or value not in self.first_read:
                    continue
                size, needed = self.facts.size_of[value], self.first_read[value]
                start, end, latest = 0, size, needed
                if is_mixed and rows is not None:  # the first rows are recomputed into its buffer
                    row_bytes, latest = slots[slot].row_bytes, self.recomputation_of[value].at
                    start, end = rows * row_bytes, slots[slot].num_rows * row_bytes
                moved = _CopiedValue(
                    value=value,
                    layer=index,
                    size_bytes=size,
                    start_bytes=start,
                    end_bytes=end,
                    issued_call=self.facts.written_at[value] + 1,
                    needed_item=needed,
                    latest_item=latest,
                )
                copied_values.append(moved)
        copied_values.sort(key=lambda move: (move.issued_call, -move.num_bytes, move.value))
        end = 0
        for move in copied_values:  # all are on the host when the backward begins
            move.host_offset = end
            end += align(move.num_bytes)
        return copied_values

    def _calls(self) -> list[StepCall]:
        """The items, and at each place between them first what goes to the host."""
        recomputed = {recomputation.at: recomputation for recomputation in self.recomputations}
        offloads, reloads = self._offloads(), self._reloads()
        renamed = {value: _RECOMPUTED + value for value in self.recomputation_of}
        renamed |= {value: _RELOADED + value for value in self.reloaded}
        calls = list(self.problem.calls)
        for index in {at for value in renamed for at in self.facts.backward_readers.get(value, ())}:
            calls[index] = self._with_new_names(index, renamed)
        ordered: list[StepCall] = []
        at = num_recomputed = 0  # the calls, and the recomputations, that are in ``ordered``
        for place in sorted({*offloads, *reloads, *recomputed}):
            ordered += calls[at : place - num_recomputed]
            at = place - num_recomputed
            ordered += [*offloads.get(place, ()), *reloads.get(place, ())]
            if place in recomputed:
                ordered.append(self._recompute_call(recomputed[place]))
                num_recomputed += 1
        return ordered + calls[at:]

    def _place_before(self, call: int) -> int:
        """The place behind the call before ``call``; recomputations for ``call`` come behind it."""
        return self.item_of_call[call - 1] + 1 if call else 0

    def _offloads(self) -> dict[int, list[StepCall]]:
        """Place -> the copies to the host that are issued and waited for there."""
        issues = [self._place_before(move.issued_call) for move in self.copied]
        waits = [self._place_before(self._latest_wait(move)) for move in self.copied]
        return self._copies_at(self.copied, issues, waits, CallKind.OFFLOAD)

    def _latest_wait(self, move: _CopiedValue) -> int:
        """The call before which the step waits for the copy to the host, as ``Schedule`` says."""
        # The layer behind those that run beside the copy.
        turn, layer_behind = self.facts.turn_at[move.layer], move.layer + self.layers + 1
        if not self.layers:
            return move.issued_call
        if layer_behind >= len(self.forward_at):
            return turn
        return min(turn, max(move.issued_call, self.forward_at[layer_behind]))

    def _reloads(self) -> dict[int, list[StepCall]]:
        """Place -> the copies back that are issued and waited for there."""
        order = sorted(
            self.copied,
            key=lambda move: (move.latest_item, move.needed_item, -move.num_bytes, move.value),
        )
        issues = [*itertools.accumulate(map(self._earliest_reload, order), max)]  # one by one
        waits = [move.needed_item for move in order]
        return self._copies_at(order, issues, waits, CallKind.RELOAD)

    def _earliest_reload(self, move: _CopiedValue) -> int:
        """The first place where the reload may begin, as ``Schedule`` says: its copy has ended."""
        following = self.facts.following
        turn = self._place_before(self.facts.turn_at[move.layer])
        if not self.layers:
            return move.latest_item
        layer_before = following.index(move.layer) - self.layers - 1  # as in ``_latest_wait``
        if layer_before < 0:
            return turn
        ended = self.item_of_call[self.backward_at[following[layer_before]]] + 1
        return min(move.latest_item, max(turn, ended))

    def _copies_at(
        self, moved: list[_CopiedValue], issues: list[int], waits: list[int], kind: CallKind
    ) -> dict[int, list[StepCall]]:
        """Place -> the copies that are issued there, then the waits; ``moved`` is their order."""
        calls_at: dict[int, list[StepCall]] = {}
        copy_calls, name = self.facts.copies, kind.value
        for move, place in zip(moved, issues, strict=True):
            key = name, move.layer, move.value, move.start_bytes, move.end_bytes, move.host_offset
            if key not in copy_calls:
                copy_calls[key] = self._copy_call(move, kind)
            calls_at.setdefault(place, []).append(copy_calls[key])
        waiting = self.facts.waits
        for move, place in zip(moved, waits, strict=True):
            awaited = name, move.layer, move.value
            if awaited not in waiting:
                waiting[awaited] = self._wait_call(move, kind)
            calls_at.setdefault(place, []).append(waiting[awaited])
        return calls_at

    def _added_call(self, layer: int, **fields: Any) -> StepCall:
        """A new call that belongs to the layer, and to the member of its forward."""
        owner = self.problem.calls[self.forward_at[layer]]
        return StepCall(
            layer_class=owner.layer_class, instance=owner.instance, member=owner.member, **fields
        )

    def _copy_call(self, move: _CopiedValue, kind: CallKind) -> StepCall:
        """The copy to the host, or back, by ``kind``."""
        offload = kind is CallKind.OFFLOAD
        return self._added_call(
            move.layer,
            name=f"{kind.value}.{move.value}",
            region=COPY_REGION if offload else reload_region(move.size_bytes),
            phase=Phase.FORWARD if offload else Phase.BACKWARD,
            inputs=(move.value,) if offload else (),
            outputs=() if offload else (_RELOADED + move.value,),
            kind=kind,
            copy=Copy(
                start_bytes=move.start_bytes, end_bytes=move.end_bytes, host_offset=move.host_offset
            ),
        )

    def _wait_call(self, move: _CopiedValue, kind: CallKind) -> StepCall:
        """The wait for the copy of ``kind``."""
        offload = kind is CallKind.OFFLOAD
        return self._added_call(
            move.layer,
            name=f"wait.{kind.value}.{move.value}",
            region=COPY_REGION,
            phase=Phase.FORWARD if offload else Phase.BACKWARD,
            inputs=(move.value if offload else _RELOADED + move.value,),
            outputs=(),
            kind=CallKind.WAIT,
            waits_for=f"{kind.value}.{move.value}",
        )

    def _with_new_names(self, index: int, renamed: Mapping[str, str]) -> StepCall:
        """Call number ``index``, which reads, and writes into, values by their new names."""
        movable = self._movable_of(index)
        names = tuple([renamed.get(value, value) for value in movable])
        if names == movable:
            return self.problem.calls[index]
        cache = self.facts.renamed
        if (index, names) not in cache:
            changed = dict(zip(movable, names, strict=True))
            cache[index, names] = _renamed(self.problem.calls[index], changed)
        return cache[index, names]

    def _movable_of(self, index: int) -> tuple[str, ...]:
        """What call number ``index`` reads, or writes into, that some layer may move."""
        cache = self.facts.movable
        if index not in cache:
            touched, layered = self.problem.calls[index].touched, self.facts.layered
            cache[index] = tuple(dict.fromkeys(filter(layered.__contains__, touched)))
        return cache[index]

    def _recompute_call(self, recomputation: _Recomputation) -> StepCall:
        """The call of the region, on values by the names that they have by then."""
        sources = self._sources_of(recomputation)
        return self._added_call(
            recomputation.layer,
            name=self._recompute_name(recomputation),
            region=recomputation.region.key.region,
            phase=Phase.BACKWARD,
            inputs=tuple(self._present_name(recomputation, value) for value in sources),
            outputs=tuple(_RECOMPUTED + value for value in recomputation.values),
            kind=CallKind.RECOMPUTE,
            into=self._into(recomputation),
            reads=recomputation.region.profile.input_layouts,
        )

    def _recompute_name(self, recomputation: _Recomputation) -> str:
        name = f"recompute.{self.step.layers[recomputation.layer].forward}"
        return f"{name}.part{recomputation.number}" if recomputation.number else name

    def _present_name(self, recomputation: _Recomputation, value: str) -> str:
        """The name under which ``value`` exists when the recomputation runs."""
        maker, layer = self.recomputation_of.get(value), self.step.layers[recomputation.layer]
        if maker is not None and maker.at >= recomputation.at:
            raise InvalidPlan(
                f"{layer.forward} is recomputed from {value}, which is not "
                "recomputed before; SAVE or OFFLOAD that"
            )
        overwriting = self.facts.overwritten_at.get(value)
        if overwriting is not None and self.item_of_call[overwriting] < recomputation.at:
            raise InvalidPlan(
                f"{layer.forward} is recomputed from {value}, which "
                f"{self.problem.calls[overwriting].name} has written over; SAVE what it recomputes"
            )
        if value in self.reloaded:
            return _RELOADED + value
        return value if maker is None else _RECOMPUTED + value

    def _into(self, recomputation: _Recomputation) -> tuple[Into, ...]:
        """In a token-wise mix, every result lies at the start of the buffer that was reloaded."""
        region = recomputation.region
        if region.key.rows is None:
            return ()
        into_of_buffer: dict[int, Into] = {}
        for output, value in zip(region.profile.outputs, recomputation.values, strict=True):
            index = output.index
            if output.storage is not Storage.ARENA or index is None or index in into_of_buffer:
                raise InvalidPlan(
                    f"{region.key.region} must make {value} in an arena buffer of its own, "
                    f"so that it can be written into the reloaded one; got {output.storage.value}. "
                    "Recompute all rows"
                )
            if value in self.reloaded:
                into_of_buffer[index] = Into(buffer=index, value=_RELOADED + value, offset_bytes=0)
        return tuple(into_of_buffer.values())


def _renamed(call: StepCall, names: Mapping[str, str]) -> StepCall:
    """``call``, which reads, and writes into, values by their new ``names``."""
    into = tuple(
        replace(target, value=names.get(target.value, target.value)) for target in call.into
    )
    inputs = tuple([names.get(value, value) for value in call.inputs])
    return replace(call, inputs=inputs, into=into)


def original_name(value: str) -> str:
    """The value that ``value`` is a recomputation or a reload of; else itself."""
    return weight_of(value.removeprefix(_RECOMPUTED).removeprefix(_RELOADED))
