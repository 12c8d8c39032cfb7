"""Last reads of values and live bytes of the arena, found quickly for many similar programs.

The programs that different moves make of one step share most of their ``StepCall`` objects.
``CallTables`` turns what a call reads and makes into rows of integers once; the arrays of a whole
program are then concatenations of its calls' rows, and numpy does the rest.
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

MAX_CALLS = 60_000
"""Most calls that are kept, in about 30 MiB: those of a hundred programs of 80 layers."""

_NOTHING = 0
"""The number of no value: no call reads it."""


@dataclass(slots=True)
class _Rows:
    """Rows of entries, kept end to end in one array; an entry has an integer in each column."""

    _values: Any = field(default_factory=lambda: np.zeros((1, 0), dtype=np.int64))
    """(columns, entries), with room for more."""
    _bounds: Any = field(default_factory=lambda: np.zeros((2, 0), dtype=np.int64))
    """(2, rows), with room for more: index of a row's first entry, and how many it has."""
    _num_entries: int = 0
    _num_rows: int = 0
    _new: list[list[int]] = field(default_factory=lambda: [[]])
    """Columns of the entries that were added, but are not in ``_values`` yet."""
    _new_counts: list[int] = field(default_factory=list)

    def add(self, *columns: Sequence[int]) -> int:
        """Adds a row; returns its number. Columns that it lacks are filled with ``_NOTHING``."""
        count = len(columns[0]) if columns else 0
        while len(self._new) < len(columns):
            self._new.append([_NOTHING] * len(self._new[0]))
        for at, column in enumerate(self._new):
            column += columns[at] if at < len(columns) else [_NOTHING] * count
        self._new_counts.append(count)
        return self._num_rows + len(self._new_counts) - 1

    def counts(self, numbers: Any) -> Any:
        """Returns how many entries each of these rows has."""
        self._store_new()
        return self._bounds[1, numbers]

    def joined(self, numbers: Any) -> Any:
        """Returns the entries of these rows, one row behind the other: (columns, entries)."""
        self._store_new()
        firsts, counts = self._bounds[:, numbers]
        ends = np.cumsum(counts)
        return self._values[:, np.repeat(firsts - ends + counts, counts) + np.arange(ends[-1])]

    def _store_new(self) -> None:
        """Moves added rows into the arrays, all at once."""
        if not self._new_counts:
            return
        entries = np.array(self._new, dtype=np.int64)
        self._values = _appended(self._values, self._num_entries, entries)
        counts = np.array(self._new_counts, dtype=np.int64)
        firsts = self._num_entries + np.cumsum(counts) - counts
        self._bounds = _appended(self._bounds, self._num_rows, np.stack([firsts, counts]))
        self._num_entries += entries.shape[1]
        self._num_rows += len(counts)
        self._new, self._new_counts = [[] for _ in self._new], []


def _appended(array: Any, used: int, entries: Any) -> Any:
    """Writes ``entries`` behind the ``used`` ones of ``array``; returns it, or a larger copy."""
    num_columns, end = len(entries), used + entries.shape[1]
    if end > array.shape[1] or num_columns > len(array):
        larger = np.full((num_columns, max(2 * end, array.shape[1])), _NOTHING, dtype=np.int64)
        larger[: len(array), :used] = array[:, :used]
        array = larger
    array[:, used:end] = entries
    return array


class _Region(NamedTuple):
    """What the calls of one region have in common."""

    number: int
    """Of its rows in ``read_ends``, ``buffers`` and ``inner``."""
    profile: RegionProfile
    """Kept alive, so that no other object gets its id."""
    outputs: list[list[int]]
    """Positions of the outputs in each buffer that lives at least as long as the call."""
    shares: bool
    """True where an output has the storage of an input, or of an earlier output."""


class _Call(NamedTuple):
    """A call and where its rows are."""

    call: StepCall
    """Kept alive, so that no other object gets its id."""
    profile: RegionProfile
    row: int
    """In ``reads`` and ``made``."""
    region: int
    """Number of its region."""


@dataclass(slots=True)
class CallTables:
    """Rows of integers for the calls and regions of programs that share most of them.

    A buffer is *crossing* if it lives at least as long as its call. Lines count from the first line
    of the call.
    """

    _numbers: dict[str, int] = field(default_factory=dict)
    """Value -> its number."""
    _region_of: dict[tuple[int, frozenset[int]], _Region] = field(default_factory=dict)
    """By the id of the profile and the buffers that lie in other values."""
    _call_of: dict[int, _Call] = field(default_factory=dict)
    """By the id of the call."""
    _row_of: dict[object, int] = field(default_factory=dict)
    """Row of a copy, by what it reads or makes: each program has copies of its own."""
    regions: list[_Region] = field(default_factory=list)
    """By number."""
    reads: _Rows = field(default_factory=_Rows)
    """Row of a call: the values that it reads and those that it writes into."""
    read_ends: _Rows = field(default_factory=_Rows)
    """Row of a region, entries as in ``reads``: the line after the last use of an input, or the end
    of the call for a value that it writes into."""
    made: _Rows = field(default_factory=_Rows)
    """Row of a call: an entry for each crossing buffer, a column for each value in it."""
    buffers: _Rows = field(default_factory=_Rows)
    """Row of a region, entries as in ``made``: first line, end and bytes of a crossing buffer."""
    inner: _Rows = field(default_factory=_Rows)
    """Row of a region: for each line the bytes of buffers that die inside the call."""

    def number(self, value: str) -> int:
        """Returns the number that stands for ``value``, at least 1."""
        return self._numbers.setdefault(value, len(self._numbers) + 1)

    @property
    def num_values(self) -> int:
        """How many values have numbers."""
        return len(self._numbers)

    def rows_of(self, problem: Problem) -> tuple[list[int], list[int]]:
        """Returns for each call of the program the number of its row, and that of its region."""
        if len(self._call_of) >= MAX_CALLS:
            self._call_of.clear()
            self._row_of.clear()
            self.reads, self.made = _Rows(), _Rows()
        call_of, profiles = self._call_of, problem.regions
        rows: list[int] = []
        regions: list[int] = []
        for call in problem.calls:
            entry = call_of.get(id(call))
            if entry is None or entry.profile is not profiles[call.region]:
                entry = call_of[id(call)] = self._add_call(call, profiles[call.region])
            rows.append(entry.row)
            regions.append(entry.region)
        return rows, regions

    def _add_call(self, call: StepCall, profile: RegionProfile) -> _Call:
        """Adds the rows of a call; a copy gets those of an equal one."""
        region = self._region(profile, call.into_buffers())
        if call.region == COPY_REGION or call.kind is CallKind.RELOAD:
            key = call.inputs, call.outputs, region.number
            if key not in self._row_of:
                self._row_of[key] = self._add_rows(call, region)
            row = self._row_of[key]
        else:
            row = self._add_rows(call, region)
        return _Call(call, profile, row, region.number)

    def _add_rows(self, call: StepCall, region: _Region) -> int:
        """Adds what ``call`` reads and makes; returns the number of its row in both tables."""
        number = self.number
        if region.shares:  # outputs without a buffer need a number as well: `_with_shared`
            _ = [*map(number, call.outputs)]
        reads = [*map(number, call.inputs), *(number(into.value) for into in call.into)]
        made_values = [
            [number(call.outputs[at]) for at in positions] for positions in region.outputs
        ]
        self.made.add(*map(list, itertools.zip_longest(*made_values, fillvalue=_NOTHING)))
        return self.reads.add(reads)

    def _region(self, profile: RegionProfile, inside: frozenset[int]) -> _Region:
        """Returns the region whose buffers ``inside`` lie in other values."""
        key = id(profile), inside
        if key not in self._region_of:
            self._region_of[key] = self._add_region(profile, inside)
            self.regions.append(self._region_of[key])
        return self._region_of[key]

    def _add_region(self, profile: RegionProfile, inside: frozenset[int]) -> _Region:
        """Adds the rows of a region, whose buffers ``inside`` lie in other values."""
        crossing = profile.outputs_of_buffers()
        in_arena = [index for index in crossing if index not in inside]
        buffers = [profile.buffers[index] for index in in_arena]
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
            outputs=[crossing[index] for index in in_arena],
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
    """Returns the lives of ``problem``; calls that ``tables`` lacks are added. Cost: linear."""
    starts = call_starts(problem)
    if not problem.calls:
        return Lives(starts, LastReads({}, ()), np.zeros(0, dtype=np.int64))
    row_list, region_list = tables.rows_of(problem)
    rows, regions = np.array(row_list, dtype=np.int64), np.array(region_list, dtype=np.int64)
    begins = np.array(starts[:-1], dtype=np.int64)
    last = _last_lines(tables, rows, regions, begins)
    _with_shared(last, problem, starts, tables, region_list)
    level = _crossing_level(tables, rows, regions, begins, last, starts[-1])
    return Lives(starts, LastReads(tables._numbers, last), level + tables.inner.joined(regions)[0])


def _last_lines(tables: CallTables, rows: Any, regions: Any, begins: Any) -> Any:
    """Returns by a value's number the line after its last read, 0: none; shared storage apart."""
    last = np.zeros(tables.num_values + 1, dtype=np.int64)
    call_begins = np.repeat(begins, tables.reads.counts(rows))
    ends = tables.read_ends.joined(regions)[0] + call_begins
    np.maximum.at(last, tables.reads.joined(rows)[0], ends)
    return last


def _with_shared(
    last: Any, problem: Problem, starts: Sequence[int], tables: CallTables, regions: Sequence[int]
) -> None:
    """Lets a storage live as long as each value in it; writes that into ``last``."""
    number = tables.number
    sharing = {region.number for region in tables.regions if region.shares}
    # the last calls first, so that chains of such values are settled in one pass
    for at in reversed([at for at, region in enumerate(regions) if region in sharing]):
        call, profile = problem.calls[at], tables.regions[regions[at]].profile
        end = starts[at] + profile.num_lines
        for output, value in zip(profile.outputs, call.outputs, strict=True):
            alive = last[number(value)]
            if output.same_as is not None:
                first = number(call.outputs[output.same_as])
                last[first] = max(last[first], alive)
            if output.storage is Storage.INPUT and output.index is not None:
                source = number(call.inputs[output.index])
                last[source] = max(last[source], alive, end)


def _crossing_level(
    tables: CallTables, rows: Any, regions: Any, begins: Any, last: Any, num_lines: int
) -> Any:
    """Returns for each line the bytes alive in crossing buffers, as an array.

    Arrays with an entry for each call: ``rows`` and ``regions`` (numbers of its rows in
    ``tables``), ``begins`` (its first line). ``last`` is what ``_last_lines`` returns.
    """
    call_begins = np.repeat(begins, tables.buffers.counts(regions))
    firsts, ends, sizes = tables.buffers.joined(regions)
    # Of all values in a buffer the last read; those it lacks are ``_NOTHING``, which is never read.
    last_read = last[tables.made.joined(rows)].max(axis=0)
    ends = np.minimum(np.maximum(call_begins + ends, last_read), num_lines)
    changes = np.zeros(num_lines + 1, dtype=np.int64)
    np.add.at(changes, call_begins + firsts, sizes)
    np.subtract.at(changes, ends, sizes)
    return np.cumsum(changes)[:-1]
