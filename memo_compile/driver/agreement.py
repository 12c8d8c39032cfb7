"""The ranks of a group begin the same collectives in the same order, or none of them goes on.

A rank that begins another collective than the others, or none, leaves them waiting for ever. So
before a graph runs for the first time each rank tells the others, through the store at which they
met, what it will begin among the ranks of each process group, and waits until all have told the
same. What else their plans hold may differ: no plan changes the order in which collectives begin
(``check.check_moves``), which follows from the graph, and from the first plan where that gathers
weights again (``planners.gather_again``). So a step that is planned again, on one rank
or on several, needs no new agreement. Nor does a graph whose collectives all ranks have agreed on
before: a branch that only one rank takes is compiled there and nowhere else. Ranks plan with equal
costs (``driver.shared_costs``), so that first plans that differ are a surprise, which is said.

Told under the digest of an order: that this rank begins it. Told under the rank: what it waits for
now. Two ranks of which each waits for an order that the other has not told would wait for ever. The
one that has waited longer raises; the other goes on, for a program may catch the error of a graph
that did not fit on one rank, and then both are at the next graph. What it told is taken back.
"""

import dataclasses
import enum
import hashlib
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Never, TypeVar

import torch
from memo_runtime.collectives import CollectiveKind

from memo_compile.analysis.regions import LoweredRegion
from memo_compile.driver import rank_refusals
from memo_compile.driver.rank_refusals import ThisJob
from memo_compile.errors import MemoError, RanksDisagree
from memo_compile.file_store import digest_of
from memo_compile.reporting import state
from memo_compile.step.problem import CallKind, Problem
from memo_compile.torch_private import distributed
from memo_compile.units import format_seconds

T = TypeVar("T")

LOOK_S, MAX_LOOK_S = 0.001, 0.1
"""Between two looks at what others have told; ever longer."""

THERE_S = 1.0
"""Between two looks whether those who have told nothing are still there."""

MAX_ROUNDS = 4
"""More dimensions than a mesh of ranks has in one graph: a rank that raises in the last of them is
heard as late as the timeout of the ranks' collectives."""


class Begun(NamedTuple):
    """One collective of a step, as all ranks of its group must begin it."""

    call: str
    """The name of its call, for messages."""
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """What one process group does in a step, in order."""

    group_name: str
    ranks: tuple[int, ...]
    begun: tuple[Begun, ...]

    @property
    def digest(self) -> str:
        """Stands for what must be equal on all ranks: names of calls need not."""
        content = json.dumps([begun.what for begun in self.begun])
        return hashlib.sha256(content.encode()).hexdigest()[:32]


def orders_of(problem: Problem, lowered: Mapping[str, LoweredRegion]) -> tuple[GroupOrder, ...]:
    """What each group of several ranks begins in ``problem``."""
    found: dict[str, list[Begun]] = {}
    for call in problem.calls:
        collective = lowered[call.region].collective if call.kind is CallKind.ISSUE else None
        if collective is None:
            continue
        words = [collective.kind.value, *([collective.reduce_op] if collective.reduce_op else [])]
        for layout in call.reads:
            if layout is not None and collective.kind is not CollectiveKind.ALL_TO_ALL:
                words.append(f"{layout.dtype}{list(layout.size)}")
        begun = Begun(call=call.name, what=" ".join(words))
        found.setdefault(collective.group_name, []).append(begun)
    orders = (
        GroupOrder(group_name=name, ranks=distributed.ranks_of_group(name), begun=tuple(begun))
        for name, begun in found.items()
    )
    return tuple(order for order in orders if len(order.ranks) > 1)


class Ended(enum.StrEnum):
    """How a wait ended."""

    NOT_YET = "not yet"
    AGREED = "agreed"
    GAVE_UP = "gave up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What a rank tells of the order that it waits for, or waited for last."""

    turn: int
    """Waits of all ranks of the job, in the order in which they began."""
    digest: str
    begun: tuple[Begun, ...]
    ended: Ended = Ended.NOT_YET


class _Told:
    """What this process has told and agreed on since it joined its job."""

    def __init__(self) -> None:
        self.told: set[tuple[str, str]] = set()
        """Group, digest."""
        self.agreed: set[tuple[str, str]] = set()
        self._job = ThisJob()

    def here(self) -> "_Told":
        """After ``destroy_process_group`` nothing is told or agreed on."""
        if self._job.is_new():
            self.told.clear()
            self.agreed.clear()
        return self


_told = _Told()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """A step as this rank has planned it."""

    name: str
    """For messages."""
    key: str
    """``rank_refusals.graph_key`` of the graph that it was made of."""
    orders: tuple[GroupOrder, ...]
    program: tuple[str, ...]
    """Its calls in order, copies and waits among them."""


def program_of(problem: Problem) -> tuple[str, ...]:
    """The calls of ``problem`` by kind, name and region."""
    return tuple(f"{call.kind.value} {call.name} ({call.region})" for call in problem.calls)


def agree(step: RankStep, timeout_s: float, *, strict: bool) -> None:
    """All ranks of each group will begin what ``step`` begins, or have agreed on it before.

    Waits for the others, at most ``timeout_s`` seconds. What all groups begin is told before the
    first wait, since another rank may wait for another group first; and told again, in as many
    rounds as there are groups, once the others have told it, so that a rank that raises is heard in
    groups that it is not in. That programs are others is noted, and raised where ``strict``.

    Raises:
        RanksDisagree: a rank begins something else, has raised, did not come, or has ended.
        RankSteppedAside: a rank runs the graph through plain Inductor.
    """
    if not step.orders:  # nor need there be other ranks
        return
    agreed = _told.here().agreed
    waiting = [
        _Agreement(order, step, timeout_s)
        for order in step.orders
        if (order.group_name, order.digest) not in agreed
    ]
    try:
        for number in range(min(len(waiting), MAX_ROUNDS)):
            for agreement in waiting:
                agreement.tell(number)
            for agreement in waiting:
                agreement.reach(number)
        for agreement in waiting:
            agreement.end(strict=strict)
    except MemoError:
        for agreement in waiting:
            agreement.take_back()
        raise
    rank_refusals.tell_planned(step.key)


class _Agreement:
    """One wait of this rank for the others of a group."""

    def __init__(self, order: GroupOrder, step: RankStep, timeout_s: float) -> None:
        self.order, self.step, self.timeout_s = order, step, timeout_s
        self.deadline_s = time.monotonic() + timeout_s
        self.own = torch.distributed.get_rank()
        self.others = [rank for rank in order.ranks if rank != self.own]
        self.waiting = Waiting(
            turn=distributed.next_number("memo/waits"), digest=order.digest, begun=order.begun
        )
        self.num_rounds = 0
        """In which this rank has told its order."""

    def tell(self, number: int) -> None:
        """The other ranks can hear what this one will begin; it has heard ``number`` rounds."""
        if number == 0:
            _told.told.add(self._name())
            self._tell(Ended.NOT_YET)
            distributed.tell(self._program_key(self.own), digest_of(self.step.program))
        distributed.tell(self._key_of(self.own, number), "begins it")
        self.num_rounds = number + 1

    def reach(self, number: int) -> None:
        """All ranks have told the same order so often. Raises as ``agree``."""
        look_s, there_s = LOOK_S, time.monotonic()
        while missing := self._missing(number):
            now_s = time.monotonic()
            is_late = now_s > self.deadline_s
            for rank in missing:
                self._require_not_refused(rank, is_late=is_late)
                self._require_no_other(rank, is_late=is_late)
            if is_late:
                self._raise_missing(missing)
            if now_s > there_s + THERE_S:
                there_s = now_s
                self._require_there(missing)
            time.sleep(look_s)
            look_s = min(2 * look_s, MAX_LOOK_S)

    def end(self, *, strict: bool) -> None:
        """This rank goes on, and has told so to those who wait for more rounds."""
        while self.num_rounds < MAX_ROUNDS:
            self.tell(self.num_rounds)
        self._tell(Ended.AGREED)
        _told.agreed.add(self._name())
        self._compare_programs(strict=strict)

    def take_back(self) -> None:
        """What was told in vain is not told any more."""
        if self._name() in _told.told - _told.agreed:
            self._give_up()

    def _name(self) -> tuple[str, str]:
        return self.order.group_name, self.order.digest

    def _key_of(self, rank: int, what: int | str) -> str:
        return f"memo/{self.order.group_name}/{self.order.digest}/{rank}/{what}"

    def _program_key(self, rank: int) -> str:
        return self._key_of(rank, "program")

    def _tell(self, ended: Ended) -> None:
        text = json.dumps(dataclasses.asdict(dataclasses.replace(self.waiting, ended=ended)))
        distributed.tell(f"memo/{self.order.group_name}/{self.own}", text)

    def _missing(self, number: int) -> list[int]:
        """The ranks that have not told in round ``number`` that they begin this order."""
        keys = [self._key_of(rank, number) for rank in self.others]
        if distributed.are_told(keys):
            return []
        told = [distributed.are_told([key]) for key in keys]
        return [rank for rank, is_told in zip(self.others, told, strict=True) if not is_told]

    def _require_not_refused(self, rank: int, *, is_late: bool) -> None:
        try:
            what = f"{self.step.name} ({self._first()})"
            rank_refusals.require_not_refused(self.step.key, rank, what, is_late=is_late)
        except MemoError:
            self._give_up()
            raise

    def _first(self) -> str:
        """The first of what is to begin, for messages."""
        return f"the first is {_text(self.order.begun[0])}"

    def _require_no_other(self, rank: int, *, is_late: bool) -> None:
        """Raise where ``rank`` waits for an order that this rank has not told, and began later.

        Where ``is_late``, whenever it began, and also where it has given up meanwhile.
        """
        text = distributed.told(f"memo/{self.order.group_name}/{rank}")
        if text is None:
            return
        theirs = _waiting(text)
        if (self.order.group_name, theirs.digest) in _told.told:
            return
        began_later = theirs.ended is Ended.NOT_YET and theirs.turn > self.waiting.turn
        if began_later or (is_late and theirs.ended is not Ended.AGREED):
            self._raise_difference(rank, theirs)

    def _raise_difference(self, rank: int, theirs: Waiting) -> Never:
        self._give_up()
        ours = self.order.begun
        number = _first_difference(
            [begun.what for begun in ours], [begun.what for begun in theirs.begun]
        )
        mine, other = _text(_at(ours, number)), _text(_at(theirs.begun, number))
        raise RanksDisagree(
            f"{self.step.name}: collective {number + 1} among ranks {list(self.order.ranks)} is "
            f"{mine} on rank {self.own} and {other} on rank {rank}; all of them must compile the "
            "same model, in the same order of graphs, with the same shapes and options"
        )

    def _raise_missing(self, missing: Sequence[int]) -> Never:
        self._give_up()
        raise RanksDisagree(
            f"{self.step.name}: rank {', '.join(map(str, missing))} did not say within "
            f"{format_seconds(self.timeout_s)} what it begins among ranks "
            f"{list(self.order.ranks)}; here {self._first()}. It raised an error elsewhere, "
            "compiles something else, or compiles longer than ranks_timeout_s"
        )

    def _require_there(self, ranks: Sequence[int]) -> None:
        gone = [rank for rank in ranks if distributed.is_gone(rank)]
        if gone:
            self._give_up()
            raise RanksDisagree(
                f"{self.step.name}: the process of rank {', '.join(map(str, gone))} has ended, and "
                f"did not say what it begins among ranks {list(self.order.ranks)}; here "
                f"{self._first()}"
            )

    def _give_up(self) -> None:
        _told.told.discard(self._name())
        for number in range(self.num_rounds):
            distributed.take_back(self._key_of(self.own, number))
        self._tell(Ended.GAVE_UP)

    def _compare_programs(self, *, strict: bool) -> None:
        """Note that a rank has planned another program, or raise RanksDisagree where ``strict``."""
        own = digest_of(self.step.program)
        told = {rank: distributed.told(self._program_key(rank)) for rank in self.others}
        differing = [rank for rank, digest in told.items() if digest not in (own, None)]
        if not differing:
            return
        other = differing[0]
        distributed.tell(f"memo/program/{own}", json.dumps(self.step.program))
        theirs = self._program(f"memo/program/{told[other]}")
        number = _first_difference(self.step.program, theirs)
        mine, there = _at(self.step.program, number), _at(theirs, number)
        text = (
            f"{self.step.name}: call {number + 1} of the step is {mine or 'none'} on rank "
            f"{self.own} and {there or 'none'} on rank {other}, of ranks {list(self.order.ranks)}: "
            "they have planned with other costs, options, or memory that is left"
        )
        if strict:
            raise RanksDisagree(text)
        state.warn_once(f"{text}. Their numbers are right, but one may wait for the other")

    def _program(self, key: str) -> Sequence[str]:
        """What another rank tells that has found the same difference; empty where it is late."""
        while (text := distributed.told(key)) is None:
            if time.monotonic() > self.deadline_s:
                return ()
            time.sleep(LOOK_S)
        found: Sequence[str] = json.loads(text)
        return found


def _waiting(text: str) -> Waiting:
    found = json.loads(text)
    begun = tuple(Begun(*entry) for entry in found.pop("begun"))
    return Waiting(**{**found, "ended": Ended(found["ended"])}, begun=begun)


def _first_difference(ours: Sequence[str], theirs: Sequence[str]) -> int:
    """Where two sequences that differ do so first."""
    pairs = enumerate(itertools.zip_longest(ours, theirs))
    return next(number for number, (mine, other) in pairs if mine != other)


def _at(entries: Sequence[T], number: int) -> T | None:
    return entries[number] if number < len(entries) else None


def _text(begun: Begun | None) -> str:
    return "none" if begun is None else f"{begun.what} ({begun.call})"
