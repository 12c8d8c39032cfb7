"""Cuts what is no layer into segments at its narrow places, so that a budget finds what to move.

A convolutional network has stages of a few blocks each, a random stack no blocks at all. As one
region, all that such a range makes would be alive together in its backward. A segment is a unit
like a layer, of which there is one: it has its regions, and what it saves is kept, offloaded or
recomputed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from torch import fx

from memo_compile.analysis.layers import LayerStructure, Unit
from memo_compile.analysis.module_paths import Range
from memo_compile.analysis.structure import (
    GRADIENT,
    UNCUTTABLE_BYTES,
    Tape,
    is_matmul,
    make_tape,
    op_name,
)

MAX_SEGMENTS = 16
"""Each segment is two regions to compile and copies to plan; more are hardly narrower."""

HEAVY_PER_SEGMENT = 2
"""A segment holds about so many products or convolutions: a loss head, with one or two, is left
whole, so that it can run in tiles."""


REACH = 0.75
"""Of a segment: so far from equal parts a cut may lie."""


def with_segments(nodes: Sequence[fx.Node], structure: LayerStructure) -> LayerStructure:
    """``structure`` of ``nodes``, whose large units without a class are cut into segments.

    Cuts lie where the bytes made so far are about equal parts of the range's; near such a place,
    where the fewest bytes cross. Cost: linear in the nodes for each of them, in numpy.
    """
    tape = make_tape(nodes)
    units: list[Unit] = []
    moved: dict[int, int] = {}
    num_others = 0
    for index, unit in enumerate(structure.units):
        moved[index] = len(units)
        if unit.class_key is not None:
            units.append(unit)
            continue
        for start, end in pairwise([unit.start, *_cuts(tape, unit.start, unit.end), unit.end]):
            units.append(Unit(start=start, end=end, class_key=None, instance=num_others))
            num_others += 1
    classes = tuple(
        replace(found, units=tuple(moved[index] for index in found.units))
        for found in structure.classes
    )
    return LayerStructure(units=tuple(units), classes=classes)


def _cuts(tape: Tape, start: int, end: int) -> Iterator[int]:
    """Where segments of ``[start, end)`` begin, but for the first."""
    heavy = np.array([_is_heavy(node) for node in tape.nodes[start:end]], dtype=np.int64)
    count = min(MAX_SEGMENTS, int(heavy.sum()) // HEAVY_PER_SEGMENT)
    made = np.cumsum(_made_bytes(tape, (start, end)))
    if count < 2 or not made[-1]:
        return
    last, heavy_before = start, np.concatenate(([0], np.cumsum(heavy)))
    for number in range(1, count):
        low, middle, high = (
            start + 1 + int(np.searchsorted(made, (number + at) / count * made[-1]))
            for at in (-REACH, 0.0, REACH)
        )
        cut = _narrowest(tape, range(low, min(high, end)), start, middle)
        if cut is None or cut <= last:
            continue
        before, here, after = (heavy_before[at - start] for at in (last, cut, end))
        if before < here < after:
            yield cut
            last = cut


def _narrowest(tape: Tape, places: Sequence[int], start: int, middle: int) -> int | None:
    """Of ``places`` the one that the fewest bytes cross, then fewest chains, next to ``middle``.

    None: no place can be cut.
    """
    borders = {cut: tape.border_bytes(cut, start) for cut in places}
    least = min(borders.values(), default=UNCUTTABLE_BYTES)
    if least >= UNCUTTABLE_BYTES:
        return None
    narrow = (cut for cut, border in borders.items() if border == least)
    return min(narrow, key=lambda cut: (tape.broken_chains(cut, start), abs(cut - middle)))


def _is_heavy(node: fx.Node) -> bool:
    return GRADIENT not in node.meta and (is_matmul(node) or "convolution" in op_name(node))


def _made_bytes(tape: Tape, where: Range) -> np.ndarray:
    """Bytes of the storage that each node of the range makes."""
    positions = np.arange(*where)
    sizes = tape.storage_bytes[positions]
    own = (tape.storage[positions] == positions) & (sizes < UNCUTTABLE_BYTES)
    return np.where(own, sizes, 0)
