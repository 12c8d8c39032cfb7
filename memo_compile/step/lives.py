"""When values are read last, and how many bytes of the arena are alive: of many alike programs.

Programs that are made of one step by different moves share most of their calls. ``CallTables``
keeps what such a call reads and makes as rows of numbers, so that a program is a few arrays, put
together from the rows of its calls.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from memo_compile.step.problem import (
    COPY_REGION,
    CallKind,
    Problem,
    RegionProfile,
    StepCall,
    Storage,
    call_starts,
)

MOST_CALLS = 60_000
"""So many calls are kept, in about 30 MiB: of a step of 80 layers and of a hundred programs."""

_NOTHING = 0
"""The number that stands for no value; nothing reads it."""


@dataclass(slots=True)
class _Rows:
    """Rows of numbers, each found by its own number; an entry is a number in each column."""

    _values: Any = field(default_factory=lambda: np.zeros((1, 0), dtype=np.int64))
    """(columns, entries), with room for more."""
    _bounds: Any = field(default_factory=lambda: np.zeros((2, 0), dtype=np.int64))
    """(2, rows), with room for more: the first entry of a row, and how many it has."""
    _num_entries: int = 0
    _num_rows: int = 0
    _new: list[list[int]] = field(default_factory=lambda: [[]])
    """Columns of the entries that are not in ``_values`` yet."""
    _new_counts: list[int] = field(default_factory=list)

    def add(self, *columns: Sequence[int]) -> int:
        """Keep a row; its number. Columns that it lacks are filled up with ``_NOTHING``."""
        count = len(columns[0]) if columns else 0
        while len(self._new) < len(columns):
            self._new.append([_NOTHING] * len(self._new[0]))
        for at, column in enumerate(self._new):
            column += columns[at] if at < len(columns) else [_NOTHING] * count
        self._new_counts.append(count)
        return self._num_rows + len(self._new_counts) - 1

    def counts(self, numbers: Any) -> Any:
        """How many entries each of these rows has."""
        self._put_away()
        return self._bounds[1, numbers]

    def joined(self, numbers: Any) -> Any:
        """(columns, entries) of these rows, one behind the other."""
        self._put_away()
        firsts, counts = self._bounds[:, numbers]
        ends = np.cumsum(counts)
        return self._values[:, np.repeat(firsts - ends + counts, counts) + np.arange(ends[-1])]

    def _put_away(self) -> None:
        if not self._new_counts:
            return
        entries = np.array(self._new, dtype=np.int64)
        self._values = _with(self._values, self._num_entries, entries)
        counts = np.array(self._new_counts, dtype=np.int64)
        firsts = self._num_entries + np.cumsum(counts) - counts
        self._bounds = _with(self._bounds, self._num_rows, np.stack([firsts, counts]))
        self._num_entries += entries.shape[1]
        self._num_rows += len(counts)
        self._new, self._new_counts = [[] for _ in self._new], []


def _with(array: Any, used: int, more: Any) -> Any:
    """``array``, of which ``used`` entries are used, or a larger one, with ``more`` behind them."""
    num_columns, end = len(more), used + more.shape[1]
    if end > array.shape[1] or num_columns > len(array):
        larger = np.full((num_columns, max(2 * end, array.shape[1])), _NOTHING, dtype=np.int64)
        larger[: len(array), :used] = array[:, :used]
        array = larger
    array[:, used:end] = more
    return array


class _Region(NamedTuple):
    """What the calls of one region have in common."""

    number: int
    """Of its rows."""
    profile: RegionProfile
    """Kept, so that its identity stays its own."""
    outputs: list[list[int]]
    """Per buffer that lives at least as long as the call its outputs, by position."""
    shares: bool
    """True where an output has the storage of an input, or of an earlier output."""


class _Call(NamedTuple):
    """A call whose rows are known."""

    call: StepCall
    """Kept, so that its identity stays its own."""
    profile: RegionProfile
    row: int
    region: int
    """Number of its region."""


@dataclass(slots=True)
class CallTables:
    """The numbers of values, and the calls of programs that share most of them."""

    _numbers: dict[str, int] = field(default_factory=dict)
    _region_of: dict[tuple[int, frozenset[int]], _Region] = field(default_factory=dict)
    _known: dict[int, _Call] = field(default_factory=dict)
    """By the identity of calls."""
    _row_of: dict[object, int] = field(default_factory=dict)
    """Of copies, by what they read or make: each program has its own calls."""
    regions: list[_Region] = field(default_factory=list)
    """By number."""
    reads: _Rows = field(default_factory=_Rows)
    """Per call the values that it reads and writes into."""
    read_ends: _Rows = field(default_factory=_Rows)
    """Per region likewise the line after each use: of an input its last one, of a value that is
    written into the end. Lines count from the first of the call."""
    made: _Rows = field(default_factory=_Rows)
    """Per call the values in each buffer that lives at least as long as the call."""
    buffers: _Rows = field(default_factory=_Rows)
    """Per region of each such buffer its first line, its end, and its bytes."""
    inner: _Rows = field(default_factory=_Rows)
    """Per region for each line the bytes of the buffers that die in the call."""

    def number(self, value: str) -> int:
        """What stands for ``value``, from 1 on."""
        return self._numbers.setdefault(value, len(self._numbers) + 1)

    @property
    def num_values(self) -> int:
        """How many values have numbers."""
        return len(self._numbers)

    def rows_of(self, problem: Problem) -> tuple[list[int], list[int]]:
        """Per call the number of its rows, and that of its region's."""
        if len(self._known) >= MOST_CALLS:
            self._known.clear()
            self._row_of.clear()
            self.reads, self.made = _Rows(), _Rows()
        known, profiles = self._known, problem.regions
        rows: list[int] = []
        regions: list[int] = []
        for call in problem.calls:
            found = known.get(id(call))
            if found is None or found.profile is not profiles[call.region]:
                found = known[id(call)] = self._learned(call, profiles[call.region])
            rows.append(found.row)
            regions.append(found.region)
        return rows, regions

    def _learned(self, call: StepCall, profile: RegionProfile) -> _Call:
        region = self._region(profile, call.into_buffers())
        if call.region == COPY_REGION or call.kind is CallKind.RELOAD:
            key = call.inputs, call.outputs, region.number
            if key not in self._row_of:
                self._row_of[key] = self._row(call, region)
            row = self._row_of[key]
        else:
            row = self._row(call, region)
        return _Call(call, profile, row, region.number)

    def _row(self, call: StepCall, region: _Region) -> int:
        number = self.number
        if region.shares:  # what is no buffer has a life as well
            _ = [*map(number, call.outputs)]
        reads = [*map(number, call.inputs), *(number(into.value) for into in call.into)]
        numbers = [[number(call.outputs[at]) for at in some] for some in region.outputs]
        self.made.add(*map(list, itertools.zip_longest(*numbers, fillvalue=_NOTHING)))
        return self.reads.add(reads)

    def _region(self, profile: RegionProfile, inside: frozenset[int]) -> _Region:
        """The region where its buffers ``inside`` lie in other values."""
        key = id(profile), inside
        if key not in self._region_of:
            self._region_of[key] = self._new_region(profile, inside)
            self.regions.append(self._region_of[key])
        return self._region_of[key]

    def _new_region(self, profile: RegionProfile, inside: frozenset[int]) -> _Region:
        crossing = profile.outputs_of_buffers()
        own = [index for index in crossing if index not in inside]
        buffers = [profile.buffers[index] for index in own]
        inner = np.zeros(profile.num_lines + 2, dtype=np.int64)
        for index, buffer in enumerate(profile.buffers):
            if index not in crossing and index not in inside:
                inner[buffer.start] += buffer.size_bytes
                inner[min(buffer.end, profile.num_lines + 1)] -= buffer.size_bytes
        into_ends = [profile.num_lines] * len(inside)
        self.read_ends.add([*profile.input_ends, *into_ends])
        self.buffers.add(
            [buffer.start for buffer in buffers],
            [max(buffer.end, profile.num_lines) for buffer in buffers],
            [buffer.size_bytes for buffer in buffers],
        )
        return _Region(
            number=self.inner.add(np.cumsum(inner)[:-1].tolist()),
            profile=profile,
            outputs=[crossing[index] for index in own],
            shares=profile.shares_storage,
        )


class LastReads(Mapping[str, int]):
    """Value -> the line after its last read, as ``problem.last_reads``."""

    def __init__(self, numbers: Mapping[str, int], lines: Any) -> None:
        self._numbers, self._lines = numbers, lines

    def __getitem__(self, value: str) -> int:
        number = self._numbers.get(value, _NOTHING)
        line = int(self._lines[number]) if number < len(self._lines) else 0
        if not line:
            raise KeyError(value)
        return line

    def __iter__(self) -> Iterator[str]:
        return (value for value in self._numbers if value in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Lives(NamedTuple):
    """When the values of a program are read last, and what of the arena is alive."""

    starts: tuple[int, ...]
    """The program's ``call_starts``."""
    last_read: LastReads
    arena_level: Any
    """Per line the bytes alive in the arena."""


def lives_of(problem: Problem, tables: CallTables) -> Lives:
    """The lives of ``problem``, whose calls ``tables`` knows or learns. Cost: linear."""
    starts = call_starts(problem)
    if not problem.calls:
        return Lives(starts, LastReads({}, ()), np.zeros(0, dtype=np.int64))
    some_rows, some_regions = tables.rows_of(problem)
    rows, regions = np.array(some_rows, dtype=np.int64), np.array(some_regions, dtype=np.int64)
    begins = np.array(starts[:-1], dtype=np.int64)
    last = _last_lines(tables, rows, regions, begins)
    _with_shared(last, problem, starts, tables, some_regions)
    level = _crossing_level(tables, rows, regions, begins, last, starts[-1])
    return Lives(starts, LastReads(tables._numbers, last), level + tables.inner.joined(regions)[0])


def _last_lines(tables: CallTables, rows: Any, regions: Any, begins: Any) -> Any:
    """Per value the line after its last read, 0 for none; no storage is shared yet."""
    last = np.zeros(tables.num_values + 1, dtype=np.int64)
    begun = np.repeat(begins, tables.reads.counts(rows))
    np.maximum.at(last, tables.reads.joined(rows)[0], tables.read_ends.joined(regions)[0] + begun)
    return last


def _with_shared(
    last: Any,
    problem: Problem,
    starts: Sequence[int],
    tables: CallTables,
    regions: Sequence[int],
) -> None:
    """What shares another value's storage makes that live as long; the last calls first."""
    number = tables.number
    sharing = {region.number for region in tables.regions if region.shares}
    for at in reversed([at for at, region in enumerate(regions) if region in sharing]):
        names, profile = problem.calls[at], tables.regions[regions[at]].profile
        end = starts[at] + profile.num_lines
        for output, value in zip(profile.outputs, names.outputs, strict=True):
            alive = last[number(value)]
            if output.same_as is not None:
                first = number(names.outputs[output.same_as])
                last[first] = max(last[first], alive)
            if output.storage is Storage.INPUT and output.index is not None:
                source = number(names.inputs[output.index])
                last[source] = max(last[source], alive, end)


def _crossing_level(
    tables: CallTables, rows: Any, regions: Any, begins: Any, last: Any, num_lines: int
) -> Any:
    """Per line the bytes alive of buffers that live at least as long as a call."""
    begun = np.repeat(begins, tables.buffers.counts(regions))
    firsts, ends, sizes = tables.buffers.joined(regions)
    read = last[tables.made.joined(rows)].max(axis=0)
    ends = np.minimum(np.maximum(begun + ends, read), num_lines)
    changes = np.zeros(num_lines + 1, dtype=np.int64)
    np.add.at(changes, begun + firsts, sizes)
    np.subtract.at(changes, ends, sizes)
    return np.cumsum(changes)[:-1]
