"""Cuts ranges that are no layers into segments at narrow places, so that a budget can be met.

A convolutional network has stages of a few blocks each, a random stack no blocks at all. If such a
range were one region, all its values would be alive together in its backward. A segment is a unit
like a layer, the only one of its kind: it has its own regions, and its saved tensors are kept,
offloaded or recomputed.
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
"""Each segment is two regions to compile and copies to plan; more hardly lower the peak."""

HEAVY_PER_SEGMENT = 2
"""A segment holds about so many products or convolutions: a loss head, with one or two, is left
whole, so that it can run in tiles."""

REACH = 0.75
"""A cut may lie this share of a segment before or behind its place among equal parts."""


def with_segments(nodes: Sequence[fx.Node], structure: LayerStructure) -> LayerStructure:
    """Returns ``structure`` of ``nodes`` with large units without a class cut into segments.

    Segments make about equally many bytes; near such a place, the cut is where the fewest bytes
    cross. Cost: quadratic in the nodes, in numpy.
    """
    tape = make_tape(nodes)
    units: list[Unit] = []
    new_index: dict[int, int] = {}
    num_segments = 0
    for index, unit in enumerate(structure.units):
        new_index[index] = len(units)
        if unit.class_key is not None:
            units.append(unit)
            continue
        for start, end in pairwise([unit.start, *_cuts(tape, unit.start, unit.end), unit.end]):
            units.append(Unit(start=start, end=end, class_key=None, instance=num_segments))
            num_segments += 1
    classes = tuple(
        replace(layers, units=tuple(new_index[index] for index in layers.units))
        for layers in structure.classes
    )
    return LayerStructure(units=tuple(units), classes=classes)


def _cuts(tape: Tape, start: int, end: int) -> Iterator[int]:
    """Yields where segments of ``[start, end)`` begin, but for the first.

    The n-th of ``count`` cuts lies near the place where n / count of the bytes are made.
    """
    heavy = np.array([_is_heavy(node) for node in tape.nodes[start:end]], dtype=np.int64)
    count = min(MAX_SEGMENTS, int(heavy.sum()) // HEAVY_PER_SEGMENT)
    bytes_so_far = np.cumsum(_new_bytes(tape, (start, end)))
    if count < 2 or not bytes_so_far[-1]:
        return
    last_cut, heavy_before = start, np.concatenate(([0], np.cumsum(heavy)))
    for number in range(1, count):
        low, middle, high = (
            start + 1 + int(np.searchsorted(bytes_so_far, place / count * bytes_so_far[-1]))
            for place in (number - REACH, number, number + REACH)
        )
        cut = _narrowest(tape, range(low, min(high, end)), start, middle)
        if cut is None or cut <= last_cut:
            continue
        at_last, at_cut, at_end = (heavy_before[at - start] for at in (last_cut, cut, end))
        if at_last < at_cut < at_end:  # a heavy operator on both sides
            yield cut
            last_cut = cut


def _narrowest(tape: Tape, places: Sequence[int], start: int, middle: int) -> int | None:
    """Returns where fewest bytes made since ``start`` cross, among ``places``; None: nowhere.

    Of equals: where fewest pairs of pointwise operators are cut apart, then nearest to ``middle``.
    """
    borders = {cut: tape.border_bytes(cut, start) for cut in places}
    least = min(borders.values(), default=UNCUTTABLE_BYTES)
    if least >= UNCUTTABLE_BYTES:
        return None
    narrow = (cut for cut, border in borders.items() if border == least)
    return min(narrow, key=lambda cut: (tape.broken_chains(cut, start), abs(cut - middle)))


def _is_heavy(node: fx.Node) -> bool:
    return GRADIENT not in node.meta and (is_matmul(node) or "convolution" in op_name(node))


def _new_bytes(tape: Tape, where: Range) -> np.ndarray:
    """Returns the bytes of the storage that each node of the range makes; 0 for views."""
    positions = np.arange(*where)
    sizes = tape.storage_bytes[positions]
    is_new = (tape.storage[positions] == positions) & (sizes < UNCUTTABLE_BYTES)
    return np.where(is_new, sizes, 0)
