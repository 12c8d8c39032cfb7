"""What no plan of a step recomputes, because there is no room for what that holds."""

import itertools
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from memo_compile.planners.bound_parts import Life, size_of, sources_of
from memo_compile.planners.move_rules import can_split, may_pass
from memo_compile.planners.policy.outside_memory import OutsideMemory
from memo_compile.step.movable import MovableStep, RecomputeRegion

MAX_KINDS = 4
"""Most kinds of plans that a bound tells apart, by how much memory their kernels take."""


MAX_PASSING = 4
"""Of so many sources that take no time to make each choice of those that are kept is looked at."""


class Never(NamedTuple):
    """What no plan of one kind recomputes, since there is no room for what that reads.

    A region reads tensors that stay on the device until the backward reads them, since nothing is
    copied back twice, or made again, but for what takes no time.
    """

    raised_bytes: int
    """What such a plan's recomputations add to the memory of kernels in all calls, at least."""
    alone: frozenset[tuple[int, int]]
    """(layer, slot)."""
    together: frozenset[tuple[int, int, int]]
    """(layer, slot, source): a slot and what it is made from; each of them may be."""

    def again(self, own: Iterable[Life]) -> frozenset[int]:
        """Those slots of one layer that may be recomputed."""
        return frozenset(life.slot for life in own if (life.layer, life.slot) not in self.alone)

    def apart(self, own: Iterable[Life]) -> frozenset[tuple[int, int]]:
        """Pairs of slots of one layer of which one may be recomputed."""
        layers = {life.layer for life in own}
        return frozenset((slot, source) for at, slot, source in self.together if at in layers)


def never_again(
    step: MovableStep,
    moved: Sequence[Life],
    spare: Any,
    regions: Iterable[RecomputeRegion] = (),
) -> Iterator[Never]:
    """What no plan recomputes: for each kind of plans, of which every plan is one.

    Plans are told apart by the recomputation that adds most to the memory of kernels: what adds
    more is not in them. ``spare`` are the bytes left in each call where all is off the device that
    may be, negative where some are missing. ``regions`` are recomputations that are known.
    """
    rooms = _Rooms(step, moved, spare, regions)
    added = (rooms.added_bytes(life) for life in moved)
    raises = sorted({0, *(own for own in added if own <= rooms.least)})
    for kind in np.array_split(raises, min(len(raises), MAX_KINDS)):
        yield _never_of(rooms, moved, int(kind[0]), int(kind[-1]))


def _never_of(rooms: "_Rooms", moved: Iterable[Life], least: int, most: int) -> Never:
    """What plans do not recompute that add so many bytes to the memory of kernels."""
    alone: set[tuple[int, int]] = set()
    together: set[tuple[int, int, int]] = set()
    for life in moved:
        sources = rooms.sources(life)
        if rooms.added_bytes(life) > most or not rooms.has_room(life, sources, least):
            alone.add((life.layer, life.slot))
            continue
        for source in sources:
            more = rooms.sources(source)
            if more and not rooms.has_room(life, (*sources, *more), least):
                together.add((life.layer, life.slot, source.slot))
    return Never(least, frozenset(alone), frozenset(together))


class _Rooms:
    """Whether there is room for what a recomputation holds."""

    def __init__(
        self,
        step: MovableStep,
        moved: Sequence[Life],
        spare: Any,
        regions: Iterable[RecomputeRegion],
    ) -> None:
        self._step, self._spare = step, spare
        self.least = int(spare.min()) if len(spare) else 0
        self._lives = {(life.layer, life.slot): life for life in moved}
        self._sources: dict[tuple[str, int], frozenset[int]] = {}
        self._outside = _outside_of(step, regions)
        self._memory = OutsideMemory(step)
        self._first: dict[int, int] = {}
        for life in moved:
            self._first[life.layer] = min(life.read, self._first.get(life.layer, life.read))

    def sources(self, life: Life) -> Sequence[Life]:
        """The other slots of the layer that recomputing it reads."""
        key = life.class_key, life.slot
        if key not in self._sources:
            self._sources[key] = sources_of(self._step.classes[life.class_key], life.slot)
        found = (self._lives.get((life.layer, source)) for source in self._sources[key])
        return [source for source in found if source is not None]

    def has_room(self, life: Life, held: Iterable[Life], raised_bytes: int) -> bool:
        """True where ``held`` may be on the device from the first read of ``life`` to their own.

        In plans that add so many bytes to the memory of kernels, or more. What takes no time may be
        gone in between, where what it is made from is there.
        """
        added = max(raised_bytes, self.added_bytes(life))
        left = {own for own in held if own.read > life.read}
        cls = self._step.classes[life.class_key]
        passing = [own for own in left if may_pass(cls, own.slot)]
        if len(passing) > MAX_PASSING:
            return self._fits(life, left.difference(passing), added)
        return any(
            self._fits(life, self._instead(left, gone), added)
            for number in range(len(passing) + 1)
            for gone in itertools.combinations(passing, number)
        )

    def _instead(self, held: Iterable[Life], gone: Collection[Life]) -> set[Life]:
        """``held`` with what those are made from that are ``gone``."""
        made_from = itertools.chain.from_iterable(map(self.sources, gone))
        cls_of = self._step.classes
        kept = {own for own in made_from if not may_pass(cls_of[own.class_key], own.slot)}
        return {own for own in held if own not in gone} | kept

    def _fits(self, life: Life, held: Iterable[Life], added: int) -> bool:
        left = {own for own in held if own.read > life.read}
        return all(
            sum(size_of(self._step, own) for own in left if own.read >= until)
            <= max(0, self._spare[life.read : until].min() - added)
            for until in {own.read for own in left}
        )

    def added_bytes(self, life: Life) -> int:
        """What recomputing it adds to the memory of kernels in all calls.

        A region runs before a call that is the first to read one of the layer's slots.
        """
        outside = self._outside.get((life.class_key, life.slot), 0)
        return self._memory.raised(range(self._first[life.layer], life.read + 1), outside)


def _outside_of(
    step: MovableStep, regions: Iterable[RecomputeRegion]
) -> dict[tuple[str, int], int]:
    """(class, slot) -> bytes that its operator allocates itself, in all known regions.

    Of slots that are recomputed as wholes: for a part of the rows an operator takes less.
    """
    found: dict[tuple[str, int], int] = {}
    for region in regions:
        cls = step.classes[region.key.class_key]
        for op in cls.ops:
            is_made = op.slot is not None and op.slot in region.key.slots
            if op.slot is None or not is_made or can_split(cls, (op.slot,)):
                continue
            own = (
                buffer.size_bytes
                for buffer in region.profile.outside
                if buffer.size_bytes == cls.slots[op.slot].size_bytes
                and re.sub(r"_\d+$", "", op.name) == _operator(buffer.kind)
            )
            key = cls.key, op.slot
            found[key] = min(max(own, default=0), found.get(key, sys.maxsize))
    return found


def _operator(kind: str) -> str:
    """``_grouped_mm`` of ``aten._grouped_mm.default``, and of memo's own form of it."""
    name = kind.removeprefix("torch.ops.").partition(".")[2].partition(".")[0]
    return name.removesuffix("__into").removeprefix("aten_")
