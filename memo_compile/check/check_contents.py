"""What every byte of a step holds while its calls run, and which copies are in flight.

Part of the independent checker; it needs no plan. The rules are those of three lanes. Calls run
in order on the compute lane. A copy begins after all calls before it, and after earlier copies of
its own lane; it may still run at any later moment, up to the WAIT that names it. So, from its
issue to its WAIT,

- the bytes that an OFFLOAD reads are not written (reads are fine);
- the bytes that a RELOAD writes are neither read nor written by a call.

A weight on the host is read by RELOADs alone, and nothing in the step writes it.

A collective may run at any moment from its ISSUE to the COMM_WAIT that names it. In between its
input is not written and its output neither read nor written. If it writes its output in place of
its input, only the values that it and its wait make may be read from then on.

The content of a byte is named by the buffer that was last written into it, and by its place in the
storage: a RELOAD must bring byte i of a value to byte i.
"""

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from memo_compile.step.halves import HalfKey, half_keys
from memo_compile.step.problem import (
    ALIGNMENT_BYTES,
    CallKind,
    Into,
    Phase,
    Problem,
    RegionOutput,
    RegionProfile,
    StepCall,
    Storage,
)

T = TypeVar("T")

COPIES = (CallKind.OFFLOAD, CallKind.RELOAD)

MAX_PROBLEMS = 20
"""A verdict stops after this many problems."""

Pieces = list[tuple[int, int, str]]
"""(start, end, the buffer that wrote these bytes), in order."""

UNKNOWN_BYTES = 1 << 62
"""Stands for the unknown size of memory that the step is given."""


class ByteMap(Generic[T]):
    """Disjoint ranges ``[start, end)``, each with a tag. Painting a range replaces what was there.

    Cost of one operation: log of the number of ranges, and the ranges it touches.
    """

    __slots__ = ("_pieces", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[tuple[int, int, T]] = []

    def paint(self, start: int, end: int, tag: T) -> None:
        """Gives ``[start, end)`` the tag ``tag``."""
        low, high = self._touched(start, end)
        pieces: list[tuple[int, int, T]] = []
        for piece_start, piece_end, old in self._pieces[low:high]:
            if piece_start < start:
                pieces.append((piece_start, start, old))
            if piece_end > end:
                pieces.append((end, piece_end, old))
        pieces.append((start, end, tag))
        pieces.sort(key=lambda piece: piece[0])
        self._pieces[low:high] = pieces
        self._starts[low:high] = [piece[0] for piece in pieces]

    def pieces(self, start: int, end: int) -> list[tuple[int, int, T]]:
        """Returns the tagged parts of ``[start, end)`` in order; equal neighbours are one part."""
        low, high = self._touched(start, end)
        joined: list[tuple[int, int, T]] = []
        for piece_start, piece_end, tag in self._pieces[low:high]:
            first, last = max(start, piece_start), min(end, piece_end)
            if joined and joined[-1][1] == first and joined[-1][2] == tag:
                joined[-1] = (joined[-1][0], last, tag)
            else:
                joined.append((first, last, tag))
        return joined

    def gaps(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields the parts of ``[start, end)`` without a tag, in order."""
        at = start
        for first, last, _ in self.pieces(start, end):
            if first > at:
                yield at, first
            at = last
        if at < end:
            yield at, end

    def _touched(self, start: int, end: int) -> tuple[int, int]:
        """Returns bounds in ``_pieces`` of those that share a byte with ``[start, end)``."""
        low = bisect.bisect_right(self._starts, start)
        if low and self._pieces[low - 1][1] > start:
            low -= 1
        return low, max(low, bisect.bisect_left(self._starts, end))


@dataclass(slots=True, eq=False)
class _Bytes:
    """One storage: what its bytes hold, and what reads or writes them."""

    name: str
    """Tag of the bytes that its maker left in it: ``call/buffer``, or a value's name outside."""
    size_bytes: int
    held: ByteMap[str] = field(default_factory=ByteMap)
    """The tag of each byte: the buffer that was last written there."""
    busy: dict[str, "Flight"] = field(default_factory=dict)
    """The copies and collectives in flight that read or write it, by name."""
    written: list[tuple[int, int, str]] = field(default_factory=list)
    """(start, end, call) of writes into it."""
    reader: str | None = None
    """The call that read it last."""
    in_arena: bool = False
    is_partial: bool = False
    """A RELOAD made it, and no read has shown yet that all of its bytes are there."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A copy that was issued and not yet waited for; or the input or output of a collective."""

    call: StepCall
    value: str
    storage: _Bytes
    start: int
    end: int
    """It reads or writes bytes ``[start, end)`` of the storage."""
    host_start: int = 0
    is_written: bool = False
    """The storage is written, so that it may not be read before the wait."""

    @property
    def host_end(self) -> int:
        """The first byte of the host frame behind those copied."""
        return self.host_start + self.end - self.start


@dataclass(slots=True, eq=False)
class Stored:
    """What an OFFLOAD left in host memory."""

    flight: Flight
    pieces: Pieces
    reloads: list[str] = field(default_factory=list)
    """Names of the RELOADs that have read it."""


def misshapen_calls(problem: Problem) -> tuple[str, ...]:
    """Returns faults in the form of calls (too few inputs, ...), which no replay survives."""
    faults = []
    halves = half_keys(problem)
    for call in problem.calls:
        half = call.half
        if half not in halves:
            faults.append(f"{call.name} is of the {_half_text(half)}, which the step has not got")
        region = problem.regions.get(call.region)
        if region is None:
            faults.append(f"{call.name} runs {call.region}, which is no region")
            continue
        ports = (len(region.input_ends), len(region.outputs))
        # (inputs, outputs, has a copy, waits), as below by the call's kind
        counts = (len(call.inputs), len(call.outputs), call.copy is not None, bool(call.waits_for))
        if counts[:2] != ports:
            faults.append(
                f"{call.name}: {call.region} has (inputs, outputs) {ports}, got {counts[:2]}"
            )
        if any(not 0 <= into.buffer < len(region.buffers) for into in call.into):
            faults.append(f"{call.name} writes a buffer that {call.region} has not got")
        if any(not 0 <= at < ports[0] for at in region.overwrites):
            faults.append(f"{call.name} writes over an input that {call.region} has not got")
        expected = {
            CallKind.OFFLOAD: (1, 0, True, False),
            CallKind.RELOAD: (ports[0], 1, True, False),
            CallKind.WAIT: (1, 0, False, True),
            CallKind.ISSUE: (1, 1, False, False),
            CallKind.COMM_WAIT: (2, 1, False, True),
        }.get(call.kind, (*ports, False, False))
        if counts != expected:
            faults.append(
                f"{call.name}: expected (inputs, outputs, has a copy, waits) of a "
                f"{call.kind.value} to be {expected}, got {counts}"
            )
    return tuple(faults)


class StepContents:
    """Replays calls one by one, and hands every fault to ``complain`` as a sentence."""

    def __init__(
        self,
        problem: Problem,
        complain: Callable[[str], None],
        recomputed_of: Callable[[StepCall, int], Pieces | None] | None = None,
    ) -> None:
        """``recomputed_of`` returns what a RECOMPUTE call writes into a buffer; None: not known."""
        self.problem = problem
        self.complain = complain
        self.recomputed_of = recomputed_of or (lambda call, buffer: None)
        self.storages: dict[str, _Bytes] = {}
        """By name."""
        self.storage_of: dict[str, _Bytes] = {}
        """Value -> the storage that it lies in."""
        self.source_of: dict[str, str] = {}
        """RELOADed value -> the value that was offloaded, or the weight on the host."""
        self.flights: dict[str, Flight] = {}
        """Copies in flight, by name."""
        self.issued: dict[str, StepCall] = {}
        """Collectives in flight, by name."""
        self._overwritten: dict[str, str] = {}
        """Value that was overwritten by a collective, or by a region -> that call."""
        self._returned = {value for half in problem.halves for value in half.results}
        """What the halves return to autograd."""
        self._calls: dict[str, CallKind] = {}
        """The calls replayed so far."""
        self._waited: set[str] = set()
        """Copies and collectives that a call has waited for."""
        self._host: ByteMap[Stored] = ByteMap()
        """What the bytes of the host frame hold."""
        self._inputs = frozenset(problem.inputs)
        self._on_host = frozenset(problem.host_weights)
        self._halves = [(half.phase, half.member) for half in problem.halves]
        self._half = 0
        """Index of the half of the last call that ran a region."""
        self._in_backward = False
        """True once a call of a backward was replayed."""
        outputs = {value for call in problem.calls for value in call.outputs}
        for value in problem.inputs:
            if value not in outputs:  # else autograd brings it from a forward to its backward
                size_bytes = problem.layer_weights.get(value, UNKNOWN_BYTES)
                self.storage_of[value] = self._fill(value, size_bytes)

    def replay(self, call: StepCall) -> None:
        """Checks all that ``call`` reads, writes, issues or waits for, and follows its effects."""
        region = self.problem.regions[call.region]
        self._check_order(call)
        if call.kind is CallKind.WAIT:
            self._wait(call)
        if call.kind is CallKind.COMM_WAIT:
            self._wait_for_ranks(call, region)
        for value in call.inputs:
            self._read(call, value)
        for into in call.into:
            self._write(call, region, into)
        for position in region.overwrites:
            self._overwrite(call, call.inputs[position])
        if call.kind is CallKind.OFFLOAD:
            self._offload(call)
        for output, value in zip(region.outputs, call.outputs, strict=True):
            self._make(call, region, output, value)
        if call.kind is CallKind.RELOAD:
            self._reload(call)
        if call.kind is CallKind.ISSUE:
            self._issue(call)

    def finish(self) -> None:
        """Complains of copies and collectives that nothing has waited for."""
        for name in (*self.flights, *self.issued):
            self.complain(f"{name} is never waited for")

    def is_busy(self, name: str) -> bool:
        """True while a copy reads or writes the storage called ``name``."""
        return name in self.storages and bool(self.storages[name].busy)

    def pieces_of(self, value: str) -> Pieces:
        """Returns what the storage of ``value`` holds; empty: it has no storage."""
        storage = self.storage_of.get(value)
        return storage.held.pieces(0, storage.size_bytes) if storage is not None else []

    def maker_of(self, value: str) -> str | None:
        """Returns the tag of what the maker of the storage of ``value`` left; None: no storage."""
        storage = self.storage_of.get(value)
        return None if storage is None else storage.name

    def _check_order(self, call: StepCall) -> None:
        """Checks that names differ, and that halves follow each other."""
        if call.name in self._calls:
            self.complain(f"two calls are named {call.name}")
        self._calls[call.name] = call.kind
        # Forwards and backwards of a group may take turns; the order of its halves holds below.
        if self._in_backward and call.phase is Phase.FORWARD and len(self._halves) <= 2:
            self.complain(f"{call.name} of the forward comes after the backward has begun")
        self._in_backward |= call.phase is Phase.BACKWARD
        if not self._halves:
            return
        half_index = self._halves.index(call.half)
        half, last = _half_text(call.half), _half_text(self._halves[self._half])
        if call.kind is CallKind.OFFLOAD and half_index != self._half:
            self.complain(f"{call.name} of the {half} is issued in the {last}")
        if call.kind in (*COPIES, CallKind.WAIT):
            return
        if half_index < self._half:
            self.complain(f"{call.name} of the {half} comes after the {last} has begun")
        self._half = max(self._half, half_index)

    def _wait(self, call: StepCall) -> None:
        """Ends the copy that the call waits for."""
        name = call.waits_for
        assert name is not None, f"{call.name} waits for nothing"
        flight = self.flights.pop(name, None)
        if flight is None:
            why = "did not begin" if self._calls.get(name) in COPIES else "was not issued before"
            why = "was waited for before" if name in self._waited else why
            self.complain(f"{call.name} waits for {name}, but it {why}")
            return
        self._waited.add(name)
        # Of a RELOAD that brings a weight the input, the weight on the host, is busy too.
        for storage in (flight.storage, *map(self.storage_of.get, flight.call.inputs)):
            if storage is not None:
                storage.busy.pop(name, None)
        if call.inputs != (flight.value,):
            self.complain(
                f"{call.name} waits for the copy of {flight.value} but holds {call.inputs}"
            )

    def _issue(self, call: StepCall) -> None:
        """From now to its wait the collective reads its input and writes its output."""
        self.issued[call.name] = call
        (read,), (written,) = call.inputs, call.outputs
        source, output = self.storage_of.get(read), self.storage_of.get(written)
        if source is None or output is None:
            return
        for flight in tuple(output.busy.values()):
            self.complain(f"{call.name} writes {written} while {flight.call.name} is in flight")
        if source is output:  # in place: what lay there is overwritten
            for value in self._values_in(output):
                if value != written:
                    self._overwritten[value] = call.name
            output.held.paint(0, output.size_bytes, f"{call.name}/{written}")
        for value, storage, is_written in ((read, source, False), (written, output, True)):
            whole = (0, storage.size_bytes)
            storage.busy[call.name] = Flight(call, value, storage, *whole, is_written=is_written)

    def _wait_for_ranks(self, call: StepCall, region: RegionProfile) -> None:
        """Ends the collective that the call waits for."""
        name = call.waits_for or ""
        issued = self.issued.pop(name, None)
        if issued is None:
            why = "was waited for before" if name in self._waited else "was not issued before"
            self.complain(f"{call.name} waits for {name}, but it {why}")
            return
        self._waited.add(name)
        for value in (*issued.inputs, *issued.outputs):
            if value in self.storage_of:
                self.storage_of[value].busy.pop(name, None)
        in_flight = (*issued.outputs, *issued.inputs)
        if call.inputs != in_flight:
            self.complain(
                f"{call.name} waits for {name}, which holds {in_flight}, with {call.inputs}"
            )
        (output,) = region.outputs
        if output.storage is not Storage.INPUT or output.index != 0:
            self.complain(f"{call.name} makes something else than what {name} has written")

    def _read(self, call: StepCall, value: str) -> None:
        """Checks that the bytes of ``value`` may be read now."""
        storage = self.storage_of.get(value)
        if storage is None:
            self.complain(f"{call.name} reads {value} before it is made")
            return
        if call.kind is CallKind.WAIT:  # which only keeps the bytes
            return
        if (storage.name in self._on_host) is not (call.kind is CallKind.RELOAD):
            self.complain(f"{call.name} reads {value} from the wrong side of the link")
        for flight in storage.busy.values():
            if flight.is_written:
                self.complain(f"{call.name} reads {value} before a wait for {flight.call.name}")
        if value in self._overwritten and call.waits_for != self._overwritten[value]:
            self.complain(f"{call.name} reads {value}, which {self._overwritten[value]} overwrites")
        if storage.is_partial:
            self._require_full(call, value, storage)
        # A call may write in place over what it reads itself (``_write``).
        if not any(self.storage_of.get(into.value) is storage for into in call.into):
            storage.reader = call.name

    def _require_full(self, call: StepCall, value: str, storage: _Bytes) -> None:
        """Complains of missing bytes, but for those that rounding up to the alignment added."""
        size = storage.size_bytes
        gaps = list(storage.held.gaps(0, size))
        if gaps and gaps[-1][1] == size and size - gaps[-1][0] < ALIGNMENT_BYTES:
            gaps.pop()
        for start, end in gaps:
            self.complain(f"{call.name} reads {value}, but nothing fills bytes [{start}, {end})")
        storage.is_partial = bool(gaps)

    def _write(self, call: StepCall, region: RegionProfile, into: Into) -> None:
        """Checks that the call may write a buffer into another value, and notes the bytes."""
        storage = self.storage_of.get(into.value)
        if storage is None:
            self.complain(f"{call.name} writes into {into.value} before it is made")
            return
        if storage.name in self._on_host:
            self.complain(f"{call.name} writes into {into.value}, a weight on the host")
        start = into.offset_bytes
        end = start + region.buffers[into.buffer].size_bytes
        size = storage.size_bytes
        if start < 0 or start >= size or end - size >= ALIGNMENT_BYTES:
            self.complain(
                f"{call.name} writes bytes [{start}, {end}) into {into.value} of {size} B"
            )
        for flight in storage.busy.values():
            if _clash(start, end, flight.start, flight.end):
                what = "is in flight" if flight.call.kind is CallKind.ISSUE else "copies it"
                self.complain(
                    f"{call.name} writes into {into.value} while {flight.call.name} {what}"
                )
        if not any(self.storage_of.get(value) is storage for value in call.inputs):
            self._check_first_write(call, into.value, storage, start, end)
        elif len(region.buffers) > 1 or region.outside:
            self.complain(
                f"{call.name} writes over {into.value}, which it reads, in several operations: the "
                "first may overwrite what a later one reads"
            )
        storage.written.append((start, end, call.name))
        self._paint(call, into, storage, start, min(end, size))

    def _overwrite(self, call: StepCall, value: str) -> None:
        """Checks that a region may overwrite its input ``value``, which nothing else may need."""
        storage = self.storage_of.get(value)
        if storage is None:
            return
        values = self._values_in(storage)
        if not storage.in_arena:
            self.complain(f"{call.name} writes over {value}, which is not in the arena")
        if not self._returned.isdisjoint(values):
            self.complain(f"{call.name} writes over {value}, which the step returns")
        for flight in storage.busy.values():
            self.complain(f"{call.name} writes over {value} while {flight.call.name} is in flight")
        read = [other for other in call.inputs if self.storage_of.get(other) is storage]
        if len(read) > 1:
            self.complain(f"{call.name} writes over {value}, which it reads as {read[1]} as well")
        self._overwritten.update(dict.fromkeys(values, call.name))
        storage.held.paint(0, storage.size_bytes, f"{call.name}/over.{value}")

    def _values_in(self, storage: _Bytes) -> list[str]:
        return [value for value, holder in self.storage_of.items() if holder is storage]

    def _check_first_write(
        self, call: StepCall, value: str, storage: _Bytes, start: int, end: int
    ) -> None:
        """Complains if the call writes bytes that hold a result, without having read them."""
        for other_start, other_end, other in storage.written:
            # The end of a copy is exact, that of a buffer rounded up: either may be padding then.
            is_exact = self._calls.get(other) is CallKind.RELOAD
            if _clash(start, end, other_start, other_end) and (
                is_exact or _clash(other_start, other_end, start, end)
            ):
                self.complain(f"{call.name} and {other} write the same bytes of {value}")
        if storage.reader is not None:
            self.complain(f"{call.name} writes into {value} after {storage.reader} has read it")

    def _paint(self, call: StepCall, into: Into, storage: _Bytes, start: int, end: int) -> None:
        """Tags bytes ``[start, end)``, written by a buffer of ``call``, but for others' padding."""
        for other_start, _, _ in storage.written:
            if start < other_start < end and end - other_start < ALIGNMENT_BYTES:
                end = other_start
        # Rows are recomputed from the first one on: elsewhere the bytes are others.
        pieces = self.recomputed_of(call, into.buffer) if start == 0 else None
        if pieces is None:
            name = self.problem.regions[call.region].buffers[into.buffer].name
            pieces = [(start, end, f"{call.name}/{name}")]
        for first, last, tag in pieces:
            if 0 <= first < min(last, end):
                storage.held.paint(first, min(last, end), tag)

    def _offload(self, call: StepCall) -> None:
        """Begins a copy to the host, which must not overwrite bytes that are still needed."""
        flight = self._begin(call, call.inputs[0])
        if flight is None:
            return
        for start, end, stored in self._host.pieces(flight.host_start, flight.host_end):
            in_flight = [name for name in stored.reloads if name in self.flights]
            if not stored.reloads or in_flight:
                why = f"{in_flight[0]} still reads" if in_flight else "nothing has reloaded"
                self.complain(
                    f"{call.name} overwrites host bytes [{start}, {end}) of {stored.flight.value}, "
                    f"which {why}"
                )
        pieces = flight.storage.held.pieces(flight.start, flight.end)
        self._host.paint(flight.host_start, flight.host_end, Stored(flight=flight, pieces=pieces))

    def _begin(self, call: StepCall, value: str, *, is_written: bool = False) -> Flight | None:
        """Returns the copy from or to ``value``, now in flight; None: it copies nothing known."""
        copy, storage = call.copy, self.storage_of.get(value)
        if copy is None or storage is None:
            return None
        if not storage.in_arena:
            self.complain(f"{call.name} copies {value}, which is not in the arena")
            return None
        copied = (copy.start_bytes, copy.end_bytes, copy.host_offset)
        flight = Flight(call, value, storage, *copied, is_written=is_written)
        if flight.end > storage.size_bytes:
            self.complain(
                f"{call.name} copies bytes [{flight.start}, {flight.end}) of {value}, which has "
                f"{storage.size_bytes} B"
            )
        weight = call.inputs[0] if is_written and call.inputs else ""  # on the host, or no weight
        host_bytes = self.problem.layer_weights.get(weight, self.problem.host_bytes)
        if flight.host_end > host_bytes:
            self.complain(
                f"{call.name} uses host bytes [{flight.host_start}, {flight.host_end}) of "
                f"{host_bytes} B"
            )
        self.flights[call.name] = flight
        storage.busy[call.name] = flight
        return flight

    def _reload(self, call: StepCall) -> None:
        """Begins a copy from the host: the value holds what was offloaded there."""
        flight = self._begin(call, call.outputs[0], is_written=True)
        if flight is None:
            return
        storage = flight.storage
        storage.is_partial = True
        if call.inputs:
            self._bring_weight(call, flight)
            return
        for start, end in self._host.gaps(flight.host_start, flight.host_end):
            self.complain(
                f"{call.name} reads host bytes [{start}, {end}), which nothing has written"
            )
        shift = flight.host_start - flight.start  # from a byte of the value to its host byte
        for start, end, stored in self._host.pieces(flight.host_start, flight.host_end):
            stored.reloads.append(call.name)
            self._check_stored(call, flight, stored)
            for first, last, tag in stored.pieces:
                low, high = max(start - shift, first), min(end - shift, last)
                if low < high:
                    storage.held.paint(low, high, tag)
        storage.written = [(flight.start, flight.end, call.name)]

    def _bring_weight(self, call: StepCall, flight: Flight) -> None:
        """Begins to copy a weight on the host, byte i to byte i; nothing writes it meanwhile."""
        (weight,) = call.inputs
        source = self.storage_of.get(weight)
        if source is None or weight not in self._on_host:
            return  # of which ``_read`` has complained
        if flight.host_start != flight.start:
            self.complain(f"{call.name} brings byte {flight.host_start} to byte {flight.start}")
        source.busy[call.name] = replace(flight, value=weight, storage=source, is_written=False)
        for first, last, tag in source.held.pieces(flight.start, flight.end):
            flight.storage.held.paint(first, last, tag)
        flight.storage.written = [(flight.start, flight.end, call.name)]
        self.source_of[flight.value] = weight

    def _check_stored(self, call: StepCall, flight: Flight, stored: Stored) -> None:
        """Checks that a RELOAD brings unchanged bytes to their old place."""
        source = stored.flight
        if source.call.name in self.flights:
            self.complain(f"{call.name} begins before a wait for {source.call.name}")
        if flight.host_start - flight.start != source.host_start - source.start:
            self.complain(
                f"{call.name} brings bytes of {source.value} to another place: host byte "
                f"{flight.host_start} is its byte "
                f"{flight.host_start - source.host_start + source.start}, not {flight.start}"
            )
        if self.source_of.setdefault(flight.value, source.value) != source.value:
            self.complain(
                f"{call.name} mixes bytes of {self.source_of[flight.value]} and {source.value}"
            )
        if source.storage.held.pieces(source.start, source.end) != stored.pieces:
            self.complain(
                f"{call.name} reloads {source.value} as it was before a call wrote into it"
            )

    def _make(
        self, call: StepCall, region: RegionProfile, output: RegionOutput, value: str
    ) -> None:
        """Notes the storage in which an output lies, a new one or another value's."""
        if value in self.storage_of:
            self.complain(f"{call.name} makes {value}, which exists already")
        if output.storage is Storage.ARENA and value in self._inputs:
            # autograd hands outputs of the forward to the backward; they are in ordinary memory
            self.complain(f"{call.name} makes {value} in the arena, but the step is given it")
        holder: str | None = None
        if output.storage is Storage.INPUT:
            assert output.index is not None, f"{call.name}: INPUT output without an input"
            holder = call.inputs[output.index]
        elif output.storage is Storage.ARENA:
            assert output.index is not None, f"{call.name}: ARENA output without a buffer"
            holder = call.value_around(output.index)
        if holder is None:
            self.storage_of[value] = self._new_storage(call, region, output, value)
        elif holder in self.storage_of:
            self.storage_of[value] = self.storage_of[holder]

    def _new_storage(
        self, call: StepCall, region: RegionProfile, output: RegionOutput, value: str
    ) -> _Bytes:
        """Returns the storage of an output that lies in no other value; one for each buffer."""
        if output.storage is not Storage.ARENA or output.index is None:
            return self.storages.get(value) or self._fill(value, max(output.size_bytes, 1))
        buffer = region.buffers[output.index]
        name = f"{call.name}/{buffer.name}"
        if name not in self.storages:
            pieces = [] if call.kind is CallKind.RELOAD else self.recomputed_of(call, output.index)
            self._fill(name, buffer.size_bytes, pieces).in_arena = True
        return self.storages[name]

    def _fill(self, name: str, size_bytes: int, pieces: Pieces | None = None) -> _Bytes:
        """Adds the storage ``name`` with ``pieces`` in it; None: what its maker wrote there."""
        storage = self.storages[name] = _Bytes(name, size_bytes)
        for start, end, tag in [(0, size_bytes, name)] if pieces is None else pieces:
            if start < min(end, size_bytes):
                storage.held.paint(start, min(end, size_bytes), tag)
        return storage


def _half_text(half: HalfKey) -> str:
    return f"{half[0].value} of member {half[1]}"


def _clash(start: int, end: int, other_start: int, other_end: int) -> bool:
    """True when a write to ``[start, end)`` touches the other range.

    A buffer's size is rounded up to the alignment, so that a range that begins in the last
    ``ALIGNMENT_BYTES - 1`` bytes of the write is not touched.
    """
    if start >= other_end or other_start >= end:
        return False
    return not (start < other_start and end - other_start < ALIGNMENT_BYTES)
