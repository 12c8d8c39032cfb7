"""Two levels: a layer class's transients once, then the whole step with each call as one body.

Level 1 places the transients of one block of each class, flat and exactly. Level 2 places the
skeletal, rotating and recompute buffers and all blocks. A block is a rigid body, not a rectangle:
its parts keep their offsets relative to its base, and everything else may use the steps of its
outline. A plain rectangle would lose wherever a region's output is born in the middle of its call.

Blocks whose transients differ from their class (times relative to ``lower``, sizes, alignments,
gaps) form a class of their own; a block with a transient at a fixed offset is dissolved.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from memo_compile.planners.placement.effort import Effort
from memo_compile.planners.placement.greedy import greedy_offsets, lowest
from memo_compile.planners.placement.instance import (
    FREE,
    Instance,
    Ints,
    PlacedSpans,
    build_instance,
)
from memo_compile.planners.placement.kernel import FOUND
from memo_compile.planners.placement.mip import mip_offsets
from memo_compile.planners.placement.placement_problem import Block, Buffer
from memo_compile.planners.placement.portfolio import Searcher

_CLASS_SECONDS = 0.5
"""Most seconds for level 1 of one class: enough, since a layer has tens of transients."""
_CLASS_SHARE = 0.3
"""Share of the whole time that level 1 of all classes together may take."""
_NOISY_TURNS = 8
"""Rounds of the level-2 orders with noise; each order costs about what a greedy one does."""
_NOISE = 0.3
"""Standard deviation of the logarithmic noise on a body's height."""


class _Body(NamedTuple):
    """Buffers that move together: one skeletal buffer, or the transients of a block."""

    items: Ints
    """(K,) indices of buffers."""
    relative: Ints
    """(K,) offsets from the body's base."""


def bilevel_offsets(
    instance: Instance, target: int, effort: Effort, level1: str = "search"
) -> Ints:
    """Offsets (N,) of the lowest of several level-2 orders; stops at ``target`` bytes.

    ``level1`` is the solver of the classes: greedy, mip, or search (also for auto).
    """
    bodies = _bodies(instance, effort, level1)
    placements = (
        _place_bodies(instance, [bodies[i] for i in sequence])
        for sequence in _sequences(instance, bodies)
    )
    return lowest(instance, placements, target, effort)


def _sequences(instance: Instance, bodies: Sequence[_Body]) -> Iterator[Ints]:
    """Orders of the bodies: five static ones, then the same with noise on their heights."""
    first, last, size = instance.first, instance.last, instance.size
    birth = np.array([first[b.items].min() for b in bodies])
    death = np.array([last[b.items].max() for b in bodies])
    length, most = death - birth, instance.most_loaded(birth, death)
    heights = np.array([float((b.relative + size[b.items]).max()) for b in bodies])
    rng = np.random.default_rng(0)
    for turn in range(1 + _NOISY_TURNS):
        height = heights * np.exp(rng.normal(0.0, _NOISE, len(bodies))) if turn else heights
        # np.lexsort sorts by its last key first.
        yield np.lexsort((-height, -length, -most))
        yield np.lexsort((-height, -length))
        yield np.lexsort((-length, -height))
        yield np.lexsort((-height * length,))
        yield np.lexsort((-height, birth))


def _bodies(instance: Instance, effort: Effort, level1: str) -> list[_Body]:
    """All buffers of the instance, each in one body; classes are solved on the way."""
    by_block: dict[str | None, list[int]] = {}
    for index, buffer in enumerate(instance.buffers):
        by_block.setdefault(buffer.block, []).append(index)
    singles = by_block.pop(None, [])
    blocks: dict[str | None, Block] = {block.id: block for block in instance.problem.blocks}
    groups: dict[object, list[list[int]]] = {}
    for name, members in by_block.items():
        if any(instance.fixed[i] != FREE for i in members):
            singles += members
            continue
        block = blocks[name]
        members.sort(key=lambda i: _shape(instance.buffers[i], block.lower))
        shapes = tuple(_shape(instance.buffers[i], block.lower) for i in members)
        groups.setdefault((block.class_key, shapes), []).append(members)
    bodies = [_Body(np.array([i]), np.zeros(1, dtype=np.int64)) for i in singles]
    share_s = effort.left_s * _CLASS_SHARE / max(len(groups), 1)
    for group in groups.values():
        part = effort.part(min(share_s, _CLASS_SECONDS))
        relative = _solve_class(instance, group[0], part, level1)
        bodies += [_Body(np.array(members), relative) for members in group]
    return bodies


def _shape(buffer: Buffer, origin: int) -> tuple[object, ...]:
    gaps = tuple((lower - origin, upper - origin) for lower, upper in buffer.gaps)
    return buffer.lower - origin, buffer.upper - origin, buffer.size, buffer.alignment, gaps


def _solve_class(instance: Instance, members: list[int], effort: Effort, level1: str) -> Ints:
    """(K,) offsets of one block's transients, as low as ``level1`` finds them."""
    ids = [instance.buffers[i].id for i in members]
    part = build_instance(instance.problem, ids)
    bound = part.lower_bound()
    offsets = greedy_offsets(part, bound, effort)
    if part.height(offsets) > bound and level1 == "mip":
        offsets = mip_offsets(part, offsets, bound, effort).offsets
    elif part.height(offsets) > bound and level1 != "greedy":
        outcome, found = Searcher(part).decide(bound, effort)
        offsets = found if outcome == FOUND else offsets
    at = {buffer.id: int(offset) for buffer, offset in zip(part.buffers, offsets, strict=True)}
    return np.array([at[name] for name in ids], dtype=np.int64)


def _place_bodies(instance: Instance, bodies: Iterable[_Body]) -> Ints:
    """(N,) offsets when each body in turn takes the lowest base at which all its parts are free."""
    bodies = sorted(bodies, key=lambda body: bool((instance.fixed[body.items] == FREE).any()))
    placed = PlacedSpans(instance)
    for body in bodies:
        base = _lowest_base(instance, body, [placed.walls(item) for item in body.items])
        for item, relative in zip(body.items, body.relative, strict=True):
            placed.add(item, base + relative)
    return placed.offsets


def _lowest_base(instance: Instance, body: _Body, walls: Sequence[tuple[Ints, Ints]]) -> int:
    """The lowest aligned base at which no part hits its walls; a fixed body keeps its own.

    Each part can only push the base up, so the first base that none of them pushes is the lowest.
    """
    fixed = int(instance.fixed[body.items[0]])
    if len(body.items) == 1 and fixed != FREE:
        return fixed
    align = int(np.lcm.reduce(instance.align[body.items]))
    base, calm, turn = 0, 0, 0
    while calm < len(body.items):
        item, relative = int(body.items[turn]), int(body.relative[turn])
        free = _next_free(walls[turn], base + relative, int(instance.size[item]))
        raised = -(-(free - relative) // align) * align
        calm = calm + 1 if raised == base else 1 if free == raised + relative else 0
        base, turn = raised, (turn + 1) % len(body.items)
    return base


def _next_free(walls: tuple[Ints, Ints], start: int, size: int) -> int:
    """The lowest offset from ``start`` on at which ``size`` bytes fit between the walls."""
    starts, ends = walls
    # Holes lie below each wall and above the last: floors[k] to starts[k].
    k = int(np.searchsorted(ends, start, side="right"))
    if k == len(starts) or start + size <= starts[k]:
        return start
    floors = ends[k:]
    tops = np.append(starts[k + 1 :], np.iinfo(np.int64).max)
    return int(floors[np.flatnonzero(tops - floors >= size)[0]])
