"""When values are read last, and how many bytes of the arena are alive: of many alike programs.

Programs that are made of one step by different moves share most of their calls. ``CallTables``
keeps what such a call reads and makes as numbers, so that a program is a few arrays put together.
"""

from collections.abc import Iterator, Mapping
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

_IDLE = np.zeros(2, dtype=np.int64)
"""What a copy or a wait holds on each of its lines."""


class _Region(NamedTuple):
    """What the calls of one region have in common; lines count from the first of the call."""

    profile: RegionProfile
    """Kept, so that its identity stays its own."""
    read_ends: Any
    """Per input the line after its last use, and for each value that is written into, the end."""
    starts: Any
    """Per buffer that lives at least as long as the call: its first line."""
    ends: Any
    sizes: Any
    outputs: list[list[int]]
    """Per such buffer its outputs, by position."""
    inner: Any
    """Per line the bytes of the buffers that die in the call."""
    shares: bool
    """True where an output has the storage of an input, or of an earlier output."""


class _Call(NamedTuple):
    """What one call reads and makes, by the numbers of values."""

    call: StepCall
    """Kept, so that its identity stays its own."""
    region: _Region
    reads: Any
    outputs: Any
    """Per buffer of ``region.starts`` a row of its outputs, filled up with ``_NOTHING``."""


@dataclass(slots=True)
class CallTables:
    """The numbers of values, and the calls of programs that share most of them."""

    _numbers: dict[str, int] = field(default_factory=dict)
    _regions: dict[tuple[int, frozenset[int]], _Region] = field(default_factory=dict)
    _calls: dict[tuple[object, int], _Call] = field(default_factory=dict)

    def number(self, value: str) -> int:
        """What stands for ``value``, from 1 on."""
        return self._numbers.setdefault(value, len(self._numbers) + 1)

    @property
    def num_values(self) -> int:
        """How many values have numbers."""
        return len(self._numbers)

    def region_of(self, profile: RegionProfile, inside: frozenset[int]) -> _Region:
        """The region's table where its buffers ``inside`` lie in other values."""
        key = id(profile), inside
        if key not in self._regions:
            self._regions[key] = _region(profile, inside)
        return self._regions[key]

    def of(self, call: StepCall, profile: RegionProfile) -> _Call:
        """The call's table; of a copy back what it makes tells all."""
        key = call.outputs if call.kind is CallKind.RELOAD else id(call), id(profile)
        found = self._calls.get(key)
        if found is None:
            found = self._made(call, self.region_of(profile, call.into_buffers()))
            if len(self._calls) >= MOST_CALLS:
                self._calls.clear()
            self._calls[key] = found
        return found

    def _made(self, call: StepCall, region: _Region) -> _Call:
        number = self.number
        if region.shares:  # what is no buffer has a life as well
            _ = [*map(number, call.outputs)]
        reads = [*map(number, call.inputs), *(number(into.value) for into in call.into)]
        widest = max(map(len, region.outputs), default=0)
        rows = [
            [*(number(call.outputs[at]) for at in some), *(widest - len(some)) * (_NOTHING,)]
            for some in region.outputs
        ]
        outputs = np.array(rows, dtype=np.int64).reshape(len(rows), widest)
        return _Call(call, region, np.array(reads, dtype=np.int64), outputs)


def _region(profile: RegionProfile, inside: frozenset[int]) -> _Region:
    crossing = profile.outputs_of_buffers()
    own = [index for index in crossing if index not in inside]
    buffers = [profile.buffers[index] for index in own]
    inner = np.zeros(profile.num_lines + 2, dtype=np.int64)
    for index, buffer in enumerate(profile.buffers):
        if index not in crossing and index not in inside:
            inner[buffer.start] += buffer.size_bytes
            inner[min(buffer.end, profile.num_lines + 1)] -= buffer.size_bytes
    into_ends = [profile.num_lines] * len(inside)
    return _Region(
        profile=profile,
        read_ends=np.array([*profile.input_ends, *into_ends], dtype=np.int64),
        starts=np.array([buffer.start for buffer in buffers], dtype=np.int64),
        ends=np.array([max(buffer.end, profile.num_lines) for buffer in buffers], dtype=np.int64),
        sizes=np.array([buffer.size_bytes for buffer in buffers], dtype=np.int64),
        outputs=[crossing[index] for index in own],
        inner=np.cumsum(inner)[:-1],
        shares=any(
            output.same_as is not None or output.storage is Storage.INPUT
            for output in profile.outputs
        ),
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
    regions = problem.regions
    copied: list[int] = []
    copied_at: list[int] = []
    known: list[_Call] = []
    known_at: list[int] = []
    inner: list[Any] = []
    for at, call in enumerate(problem.calls):
        if call.region == COPY_REGION:  # makes nothing, and holds nothing of its own
            copied.append(tables.number(call.inputs[0]))
            copied_at.append(at)
            inner.append(_IDLE)
        else:
            known.append(tables.of(call, regions[call.region]))
            known_at.append(at)
            inner.append(known[-1].region.inner)
    lines = np.array(starts, dtype=np.int64)
    begins = lines[np.array(known_at, dtype=np.int64)]
    last = _last_lines(known, begins, tables.num_values)
    if copied:
        np.maximum.at(last, copied, lines[np.array(copied_at, dtype=np.int64)] + 1)
    _with_shared(last, known, begins, tables)
    level = _crossing_level(known, begins, last, starts[-1]) + _joined(inner)
    return Lives(starts, LastReads(tables._numbers, last), level)


def _joined(arrays: list[Any]) -> Any:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)


def _repeated(begins: Any, arrays: list[Any]) -> Any:
    """Each of ``begins`` as often as its array has entries."""
    return np.repeat(begins, [len(array) for array in arrays])


def _last_lines(known: list[_Call], begins: Any, num_values: int) -> Any:
    """Per value the line after its last read, 0 for none; no storage is shared yet."""
    last = np.zeros(num_values + 1, dtype=np.int64)
    ends = [call.region.read_ends for call in known]
    reads = _joined([call.reads for call in known])
    np.maximum.at(last, reads, _joined(ends) + _repeated(begins, ends))
    return last


def _with_shared(last: Any, known: list[_Call], begins: Any, tables: CallTables) -> None:
    """What shares another value's storage makes that live as long; the last calls first."""
    number = tables.number
    for call, begin in zip(reversed(known), reversed(begins.tolist()), strict=True):
        if not call.region.shares:
            continue
        end = begin + call.region.profile.num_lines
        names, outputs = call.call, call.region.profile.outputs
        for output, value in zip(outputs, names.outputs, strict=True):
            alive = last[number(value)]
            if output.same_as is not None:
                first = number(names.outputs[output.same_as])
                last[first] = max(last[first], alive)
            if output.storage is Storage.INPUT and output.index is not None:
                source = number(names.inputs[output.index])
                last[source] = max(last[source], alive, end)


def _crossing_level(known: list[_Call], begins: Any, last: Any, num_lines: int) -> Any:
    """Per line the bytes alive of buffers that live at least as long as a call."""
    changes = np.zeros(num_lines + 1, dtype=np.int64)
    making = [at for at, call in enumerate(known) if call.region.outputs]
    known, begins = [known[at] for at in making], begins[making]
    if known:
        firsts = [call.region.starts for call in known]
        begun = _repeated(begins, firsts)
        sizes = _joined([call.region.sizes for call in known])
        widest = max(call.outputs.shape[1] for call in known)
        made = _joined([_as_wide(call.outputs, widest) for call in known])
        ends = begun + _joined([call.region.ends for call in known])
        ends = np.minimum(np.maximum(ends, last[made].max(axis=1)), num_lines)
        np.add.at(changes, begun + _joined(firsts), sizes)
        np.subtract.at(changes, ends, sizes)
    return np.cumsum(changes)[:-1]


def _as_wide(rows: Any, width: int) -> Any:
    missing = width - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, missing)), constant_values=_NOTHING) if missing else rows
