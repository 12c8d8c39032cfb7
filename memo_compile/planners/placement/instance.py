"""A placement problem in the form that the solvers work on: integer arrays over compressed time.

Time is cut into sections, one for each maximal set of buffers that are live together (a run of
births followed by a death). Two buffers overlap in time exactly when they share a section, and all
that a bound has to look at is the load of each section.

``N`` = buffers with a size above 0, ``G`` = live spans (more than N when buffers have gaps),
``S`` = sections.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memo_compile.planners.placement.placement_problem import Buffer, PlacementProblem

Ints = npt.NDArray[np.int64]

FREE = -1
"""Stands in ``Instance.fixed`` for an offset that the solver chooses."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Instance:
    """Arrays of a problem's buffers, in the problem's order without the empty ones."""

    problem: PlacementProblem
    buffers: tuple[Buffer, ...]
    size: Ints
    """(N,) bytes."""
    align: Ints
    """(N,) bytes; the offset is a multiple."""
    fixed: Ints
    """(N,) bytes, or FREE."""
    span_start: Ints
    """(N + 1,): buffer i has the spans span_start[i] to span_start[i + 1]."""
    span_lower: Ints
    """(G,) first section of a span."""
    span_upper: Ints
    """(G,) section after a span."""
    num_sections: int
    padding: int
    """Common divisor of all alignments: in a stack each buffer but the top one is padded to it."""

    @property
    def num_buffers(self) -> int:
        """N."""
        return len(self.buffers)

    @property
    def padded(self) -> Ints:
        """(N,) bytes that a buffer takes from the one above it: size rounded up to ``padding``."""
        return -(-self.size // self.padding) * self.padding

    @property
    def max_slack(self) -> int:
        """Most bytes by which padding can overstate a stack: the top buffer needs none."""
        return int((self.padded - self.size).max(initial=0))

    @property
    def first(self) -> Ints:
        """(N,) first section of each buffer."""
        return self.span_lower[self.span_start[:-1]]

    @property
    def last(self) -> Ints:
        """(N,) section after each buffer's last span."""
        return self.span_upper[self.span_start[1:] - 1]

    @property
    def owner(self) -> Ints:
        """(G,) buffer of each span."""
        return np.repeat(np.arange(self.num_buffers), np.diff(self.span_start))

    def loads(self, weight: Ints) -> Ints:
        """(S,) sum of ``weight`` (N,) over the buffers that are live in each section."""
        change = np.zeros(self.num_sections + 1, dtype=np.int64)
        of_span = weight[self.owner]
        np.add.at(change, self.span_lower, of_span)
        np.subtract.at(change, self.span_upper, of_span)
        return np.cumsum(change)[:-1]

    def most_loaded(self, lower: Ints, upper: Ints) -> Ints:
        """(K,) bytes live in the busiest of the sections ``lower`` (K,) to before ``upper``."""
        loads = self.loads(self.size)
        busiest = [loads[lo:hi].max() for lo, hi in zip(lower, upper, strict=True)]
        return np.array(busiest, dtype=np.int64)

    def lower_bound(self) -> int:
        """Bytes that every placement needs: the largest bound of a section; 0 without buffers."""
        return int(self.section_bounds().max(initial=0))

    def section_bounds(self) -> Ints:
        """(S,) bytes that the buffers live in each section need at least.

        Live buffers stand on each other, and all but the top one are followed by padding up to the
        common alignment. A fixed buffer is never lower than its end.
        """
        bounds = self.loads(self.padded) - self._largest(self.padded - self.size)
        ends = np.where(self.fixed == FREE, 0, self.fixed + self.size)
        return np.maximum(bounds, self._largest(ends))

    def _largest(self, of_buffer: Ints) -> Ints:
        """(S,) largest value of a buffer that is live in the section; at least 0."""
        largest = np.zeros(self.num_sections, dtype=np.int64)
        of_span = of_buffer[self.owner]
        for g in np.flatnonzero(of_span > 0):
            view = largest[self.span_lower[g] : self.span_upper[g]]
            np.maximum(view, of_span[g], out=view)
        return largest

    def offsets(self, of_item: Ints) -> dict[str, int]:
        """Offsets by id for the whole problem; empty buffers lie at 0 or where they are fixed."""
        offsets = {b.id: b.offset or 0 for b in self.problem.buffers}
        for buffer, offset in zip(self.buffers, of_item, strict=True):
            offsets[buffer.id] = int(offset)
        return offsets

    def height(self, of_item: Ints) -> int:
        """Largest end in bytes of the offsets ``of_item`` (N,)."""
        return int((of_item + self.size).max(initial=0))


def build_instance(problem: PlacementProblem, only: Iterable[str] | None = None) -> Instance:
    """The arrays of ``problem``, or of its buffers whose ids are in ``only``."""
    chosen = None if only is None else set(only)
    buffers = tuple(b for b in problem.buffers if b.size > 0 and (chosen is None or b.id in chosen))
    spans = [b.segments() for b in buffers]
    lower, upper, num_sections = _sections([span for of_one in spans for span in of_one])
    align = np.array([problem.alignment_of(b) for b in buffers], dtype=np.int64)
    fixed = [FREE if b.offset is None else b.offset for b in buffers]
    return Instance(
        problem=problem,
        buffers=buffers,
        size=np.array([b.size for b in buffers], dtype=np.int64),
        align=align,
        fixed=np.array(fixed, dtype=np.int64),
        span_start=np.cumsum([0, *map(len, spans)], dtype=np.int64),
        span_lower=lower,
        span_upper=upper,
        num_sections=num_sections,
        padding=int(np.gcd.reduce(align)) if buffers else 1,
    )


def _sections(spans: Sequence[tuple[int, int]]) -> tuple[Ints, Ints, int]:
    """First section and section after, for each half-open span of time; and how many there are."""
    events = sorted(
        [(lower, 1, index) for index, (lower, _) in enumerate(spans)]
        + [(upper, 0, index) for index, (_, upper) in enumerate(spans)]
    )
    first = np.zeros(len(spans), dtype=np.int64)
    after = np.zeros(len(spans), dtype=np.int64)
    section, died = 0, False
    for _, birth, index in events:
        if birth:
            section += died
            died = False
            first[index] = section
        else:
            died = True
            after[index] = section + 1
    return first, after, section + 1 if spans else 0


class PlacedSpans:
    """The live spans of the buffers that have their places already."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self.offsets: Ints = np.zeros(instance.num_buffers, dtype=np.int64)
        """(N,) of the placed buffers."""
        num_spans = len(instance.span_lower)
        self._lower, self._upper, self._owner = (np.zeros(num_spans, np.int64) for _ in range(3))
        """(G,) first section, section after and buffer of the placed spans, ``_count`` by now."""
        self._count = 0

    def walls(self, item: int) -> tuple[Ints, Ints]:
        """Starts and running ends, from low to high, of the placed ranges that ``item`` avoids."""
        lower, upper = self._lower[: self._count], self._upper[: self._count]
        others = self._owner[: self._count][_sharing(self._instance, item, lower, upper)]
        starts = self.offsets[others]
        order = np.argsort(starts)
        ends = np.maximum.accumulate((starts + self._instance.size[others])[order])
        return starts[order], ends

    def add(self, item: int, offset: int) -> None:
        """``item`` has its place at ``offset``."""
        self.offsets[item] = offset
        begin, end = self._instance.span_start[item], self._instance.span_start[item + 1]
        new = slice(self._count, self._count + end - begin)
        self._lower[new] = self._instance.span_lower[begin:end]
        self._upper[new] = self._instance.span_upper[begin:end]
        self._owner[new] = item
        self._count += end - begin


def _sharing(instance: Instance, item: int, lower: Ints, upper: Ints) -> npt.NDArray[np.bool_]:
    """Which of the spans from ``lower`` to ``upper`` share a section with a span of ``item``."""
    hit = np.zeros(len(lower), dtype=bool)
    for g in range(instance.span_start[item], instance.span_start[item + 1]):
        hit |= (lower < instance.span_upper[g]) & (upper > instance.span_lower[g])
    return hit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Overlaps:
    """Who is live together with whom, as rows of one array."""

    start: Ints
    """(N + 1,): buffer i overlaps with other[start[i]:start[i + 1]]."""
    other: npt.NDArray[np.int32]
    """Indices of buffers, ascending within a row."""


def find_overlaps(instance: Instance) -> Overlaps:
    """All pairs of buffers that share a section. Quadratic: N vector operations of length G."""
    lower, upper, owner = instance.span_lower, instance.span_upper, instance.owner
    simple = len(lower) == instance.num_buffers
    rows = [np.zeros(0, dtype=np.int32)]
    for i in range(instance.num_buffers):
        hit = _sharing(instance, i, lower, upper)
        row = np.flatnonzero(hit) if simple else np.unique(owner[hit])
        rows.append(row[row != i].astype(np.int32))
    start = np.cumsum([len(row) for row in rows], dtype=np.int64)
    return Overlaps(start=start, other=np.concatenate(rows))
