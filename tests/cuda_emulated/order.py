"""Happens-before over a log of the emulated device: two accesses that nothing orders are a race.

Each stream has a vector clock. Work comes after what its stream did before, after the events that
the stream waited for, and after everything that the host had waited for when it issued the work.
The host's calls are taken to be ordered as they are logged, whatever thread made them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.cuda_emulated.device_calls import Did, Entry

Clock = dict[int, int]
"""Stream -> how many pieces of its work have ended."""


@dataclass(frozen=True, slots=True)
class Access:
    """One piece of work on bytes [start, end)."""

    stream: int
    number: int
    start: int
    end: int
    writes: bool
    what: str

    def meets(self, other: "Access") -> bool:
        """True where the order of the two matters."""
        overlap = self.start < other.end and other.start < self.end
        return overlap and (self.writes or other.writes)

    def __str__(self) -> str:
        does = "writes" if self.writes else "reads"
        return f"{self.what} on stream {self.stream} {does} [{self.start:#x}, {self.end:#x})"


@dataclass(slots=True)
class _Checker:
    streams: dict[int, Clock] = field(default_factory=dict)
    events: dict[int, Clock] = field(default_factory=dict)
    host: Clock = field(default_factory=dict)
    accesses: list[Access] = field(default_factory=list)
    races: list[str] = field(default_factory=list)

    def clock(self, stream: int) -> Clock:
        """Of ``stream``, which has seen what the host has seen."""
        return _join(self.streams.setdefault(stream, {}), self.host)

    def access(self, entry: Entry, start: int, num_bytes: int, *, writes: bool) -> None:
        clock = self.clock(entry.stream)
        number = clock.get(entry.stream, 0) + 1
        what = entry.did.name.lower()
        found = Access(entry.stream, number, start, start + num_bytes, writes, what)
        for before in self.accesses:
            if found.meets(before) and clock.get(before.stream, 0) < before.number:
                self.races.append(f"{found}, and nothing orders it after: {before}")
        self.accesses.append(found)

    def freed(self, entry: Entry) -> None:
        """The host takes bytes back without waiting."""
        gone = Access(-1, 0, entry.a, entry.a + entry.c, True, "free")
        for before in self.accesses:
            if gone.meets(before) and self.host.get(before.stream, 0) < before.number:
                self.races.append(f"memory is freed under: {before}")
        self.accesses = [access for access in self.accesses if not gone.meets(access)]

    def waited(self, clock: Clock) -> None:
        """The host knows ``clock``, and so does all that it will issue."""
        _join(self.host, clock)
        self.accesses = [
            access for access in self.accesses if self.host.get(access.stream, 0) < access.number
        ]

    def step(self, entry: Entry) -> None:
        did, stream = entry.did, entry.stream
        if did is Did.COPY:
            self.access(entry, entry.b, entry.c, writes=False)
            self.access(entry, entry.a, entry.c, writes=True)
        elif did in (Did.READ, Did.WRITE, Did.FILL):
            self.access(entry, entry.a, entry.c, writes=did is not Did.READ)
        elif did is Did.RECORD:
            self.events[entry.a] = dict(self.clock(stream))
        elif did is Did.WAIT:
            _join(self.clock(stream), self.events.get(entry.a, {}))
        elif did is Did.FREE:
            self.freed(entry)
        elif did is Did.SYNC_STREAM:
            self.waited(self.clock(stream))
        elif did is Did.SYNC_EVENT:
            self.waited(self.events.get(entry.a, {}))
        elif did is Did.SYNC_ALL:
            for stream in list(self.streams):
                self.waited(self.clock(stream))
        if did in (Did.COPY, Did.FILL, Did.LAUNCH, Did.READ, Did.WRITE):
            clock = self.clock(stream)
            clock[stream] = clock.get(stream, 0) + 1


def _join(clock: Clock, other: Clock) -> Clock:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)
    return clock


def races(log: Iterable[Entry]) -> list[str]:
    """Accesses whose order nothing guarantees, one sentence each."""
    checker = _Checker()
    for entry in log:
        checker.step(entry)
    return checker.races
