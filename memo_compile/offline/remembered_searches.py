"""What searches for the best plan found of a step, kept for other budgets of the same step.

Candidates do not depend on the budget (``planners.policy.frontier``), and take longest to simulate.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memo_compile.errors import MemoError
from memo_compile.file_store import FileStore, digest_of
from memo_compile.planners.policy.candidate import Figures
from memo_compile.planners.policy.candidates import SearchMemory
from memo_compile.step.movable import Mode, Moves, Schedule
from memo_compile.step.serialise import plain, restore

log = logging.getLogger("memo")


@dataclass(frozen=True, slots=True, kw_only=True)
class MovesRecord:
    """``Moves``, whose modes are numbers in a table: most layers share a few."""

    modes: tuple[int, ...]
    schedule: Schedule
    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """A search, what was known of the step's regions then, and what it found, by number."""

    key: tuple[str, ...]
    found: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FiguresRecord:
    """What a simulation tells of moves, by number, with some regions estimated."""

    moves: int
    estimated: tuple[str, ...]
    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchesRecord:
    """A ``SearchMemory``."""

    modes: tuple[Mode, ...]
    moves: tuple[MovesRecord, ...]
    searches: tuple[SearchRecord, ...]
    figures: tuple[FiguresRecord, ...]


@dataclass(slots=True, kw_only=True)
class RememberedSearches:
    """The searches of one model, kept in this object and in the user's cache."""

    store: FileStore | None
    _known: dict[str, tuple[Mapping[str, Any], SearchMemory, int]] = field(default_factory=dict)
    """By digest: the key, what is known, and how much of it the store has."""

    def of(self, step: Mapping[str, Any]) -> SearchMemory:
        """What is known of ``step``, which is data that stands for a step, device and options."""
        key = {**step, "kind": "searches"}
        name = digest_of(key)
        if name not in self._known:
            memory = self._read(key)
            self._known[name] = key, memory, _count(memory)
        return self._known[name][1]

    def write(self) -> None:
        """Remember what was found since."""
        for name, (key, memory, num_written) in self._known.items():
            if self.store is not None and _count(memory) > num_written:
                self.store.write(key, plain(_record(memory)))
                self._known[name] = key, memory, _count(memory)

    def _read(self, key: Mapping[str, Any]) -> SearchMemory:
        for body in () if self.store is None else self.store.read(key):
            try:
                return _memory(restore(body, SearchesRecord, "searches"))
            except (MemoError, IndexError) as error:
                log.warning("memo: what was searched before is not used: %s", error)
        return SearchMemory()


def _count(memory: SearchMemory) -> int:
    return len(memory.moves) + len(memory.figures)


def _record(memory: SearchMemory) -> SearchesRecord:
    modes: dict[Mode, int] = {}
    moves: dict[Moves, int] = {}
    for own in (*(own for found in memory.moves.values() for own in found), *_simulated(memory)):
        moves.setdefault(own, len(moves))
        for mode in own.modes:
            modes.setdefault(mode, len(modes))
    return SearchesRecord(
        modes=tuple(modes),
        moves=tuple(
            MovesRecord(
                modes=tuple(modes[mode] for mode in own.modes),
                schedule=own.schedule,
                policy=own.policy,
            )
            for own in moves
        ),
        searches=tuple(
            SearchRecord(key=key, found=tuple(moves[own] for own in found))
            for key, found in memory.moves.items()
        ),
        figures=tuple(
            FiguresRecord(moves=moves[own], estimated=estimated, figures=figures)
            for (own, estimated), figures in memory.figures.items()
        ),
    )


def _simulated(memory: SearchMemory) -> list[Moves]:
    return [own for own, _ in memory.figures]


def _memory(record: SearchesRecord) -> SearchMemory:
    moves = [
        Moves(
            modes=tuple(record.modes[at] for at in own.modes),
            schedule=own.schedule,
            policy=own.policy,
        )
        for own in record.moves
    ]
    return SearchMemory(
        moves={search.key: tuple(moves[at] for at in search.found) for search in record.searches},
        figures={(moves[known.moves], known.estimated): known.figures for known in record.figures},
    )
