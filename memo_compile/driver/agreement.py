"""The ranks of a job begin the same collectives in the same order, or none of them goes on.

A rank that begins another collective than the others, or none, leaves them waiting for ever. So
before a graph runs for the first time each rank tells what it will begin in each process group, and
waits until all ranks of these groups tell the same, and those that they wait for in turn: then a
rank that raises is heard across a mesh. What else their plans hold may differ: no plan changes the
order in which collectives begin (``check.check_moves``), which follows from the graph, and from the
first plan where that gathers weights again (``planners.gather_again``). So a step that is planned
again needs no new agreement. Nor does a graph whose collectives all ranks have agreed on before: a
branch that only one rank takes is compiled there and nowhere else.

Each rank writes one record of itself (``RankRecord``) into the store at which the ranks met, anew
whenever it changes, and reads the records of the others. Two ranks of which each waits for what the
other does not begin would wait for ever. The one that has waited longer raises; the other goes on,
for a program may catch the error of a graph that did not fit on one rank, and then both are at the
next graph. A rank that has no plan for a graph says so under what Dynamo handed over
(``graph_key``), which is the same on all ranks that compile the same, and those who wait for it
raise, or step aside to plain Inductor, with it.
"""

import itertools
import json
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from memo_runtime.collectives import CollectiveKind
from torch import fx

from memo_compile.analysis.regions import LoweredRegion
from memo_compile.errors import MemoError, RanksDisagree, RankSteppedAside
from memo_compile.file_store import digest_of
from memo_compile.step.problem import CallKind, Problem
from memo_compile.step.serialise import plain, restore
from memo_compile.torch_private import distributed
from memo_compile.units import format_seconds

log = logging.getLogger("memo")

LOOK_S, MAX_LOOK_S = 0.001, 0.1
"""Between two looks at what others have told; ever longer."""

THERE_S = 1.0
"""Between two looks whether those who have told nothing are still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
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
    def key(self) -> str:
        """Stands for what must be equal on all ranks: names of calls need not."""
        return f"{self.group_name}/{digest_of([begun.what for begun in self.begun])}"

    @property
    def first(self) -> str:
        """The first of what is to begin, for messages."""
        return f"the first is {_text(self.begun[0])}"


def orders_of(problem: Problem, lowered: Mapping[str, LoweredRegion]) -> tuple[GroupOrder, ...]:
    """What each group of several ranks begins in ``problem``."""
    by_group: dict[str, list[Begun]] = {}
    for call in problem.calls:
        collective = lowered[call.region].collective if call.kind is CallKind.ISSUE else None
        if collective is None:
            continue
        words = [collective.kind.value, *([collective.reduce_op] if collective.reduce_op else [])]
        for layout in call.reads:
            if layout is not None and collective.kind is not CollectiveKind.ALL_TO_ALL:
                words.append(f"{layout.dtype}{list(layout.size)}")
        begun = Begun(call=call.name, what=" ".join(words))
        by_group.setdefault(collective.group_name, []).append(begun)
    orders = (
        GroupOrder(group_name=name, ranks=distributed.ranks_of_group(name), begun=tuple(begun))
        for name, begun in by_group.items()
    )
    return tuple(order for order in orders if len(order.ranks) > 1)


def graph_key(gm: fx.GraphModule, inputs: Sequence[object]) -> str:
    """Stands for a Dynamo graph and its inputs on all ranks; empty where a rank is alone."""
    if distributed.num_ranks() < 2:
        return ""
    operators = [
        getattr(node.target, "__name__", str(node.target))
        for node in gm.graph.nodes
        if node.op in ("call_function", "call_method")
    ]
    shapes = [
        f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else str(type(value))
        for value in inputs
    ]
    return digest_of([operators, shapes])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """A step as this rank has planned it."""

    name: str
    """For messages."""
    key: str
    """``graph_key`` of the graph that it was made of."""
    orders: tuple[GroupOrder, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a rank runs no planned step of a graph."""

    attempt: int
    """The rank's tries to plan the graph, this one among them: a program may catch and try again,
    and a rank that is further must not hear of the try before."""
    steps_aside: bool
    """Plain Inductor runs the graph there; else the rank has raised."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What a rank tells of itself."""

    orders: tuple[GroupOrder, ...] = ()
    """What it has not agreed on with the others, and is to begin next."""
    is_waiting: bool = False
    """False once it has given ``orders`` up."""
    turn: int = 0
    """Waits of all ranks of the job, this one among them, in the order in which they began."""
    begins: tuple[str, ...] = ()
    """Keys of the orders that it begins, or may begin since all have agreed on them."""
    planned: Mapping[str, int] = field(default_factory=dict)
    """Graph -> the last try in which it had a plan."""
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    """Graph -> why it runs no planned step of it."""


class JobRank:
    """This rank among those of its job: what it tells them, and what it reads of them.

    Where it is alone it tells nothing.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        store: distributed.JobStore,
        is_gone: Callable[[int], bool] = distributed.is_gone,
    ) -> None:
        self.rank, self.num_ranks, self._store, self._is_gone = rank, num_ranks, store, is_gone
        self.record = RankRecord()
        self.agreed: set[str] = set()
        """Keys of orders."""
        self.attempts: dict[str, int] = {}
        """Graph -> how often this rank has begun to plan it."""
        self._num_asked: dict[str, int] = {}
        """Question -> how often this rank has asked it."""

    def begin(self, key: str) -> None:
        """This rank plans the graph ``key``, whatever it has refused before."""
        self.attempts[key] = self.attempts.get(key, 0) + 1
        refused = dict(self.record.refused)
        if refused.pop(key, None) is not None:
            self._tell(refused=refused)

    def refuse(
        self, key: str, error: Exception, *, steps_aside: bool, timeout_s: float = 0.0
    ) -> None:
        """Those who wait for this rank's step of the graph ``key`` hear why there will be none.

        Raises RanksDisagree: this rank is to step aside, and another runs its plan of the graph,
        which it may since all had agreed on those collectives before. Plain Inductor may order
        them otherwise. Who has planned the graph before may be about to refuse it now: for that
        it has ``timeout_s`` seconds.
        """
        if self.num_ranks < 2:
            return
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        refusal = Refusal(attempt=self.attempts.get(key, 0), steps_aside=steps_aside, why=why)
        try:
            self._tell(refused={**self.record.refused, key: refusal})
            running = self._who_runs_a_plan(key, timeout_s) if steps_aside else None
            if running is not None:
                refusal = replace(refusal, steps_aside=False)
                self._tell(refused={**self.record.refused, key: refusal})
        except RuntimeError as failed:  # the store went with the rank that held it: nobody waits
            log.warning("memo: the other ranks were not told of an error: %s", failed)
            return
        if running is not None:
            raise RanksDisagree(
                f"rank {running} runs a plan of a graph for which this rank has none: {why}"
            ) from error

    def agree(self, step: RankStep, timeout_s: float) -> None:
        """All ranks of each group will begin what ``step`` begins, or have agreed on it before.

        Waits for the others, at most ``timeout_s`` seconds.

        Raises:
            RanksDisagree: a rank begins something else, has raised, did not come, or has ended.
            RankSteppedAside: a rank runs the graph through plain Inductor.
        """
        if not step.orders:  # nor need others come
            return
        orders = tuple(order for order in step.orders if order.key not in self.agreed)
        if orders:
            self._tell(
                orders=orders,
                is_waiting=True,
                turn=self._store.next_number("memo/waits"),
                begins=(*self.agreed, *(order.key for order in orders)),
            )
            try:
                self._wait(step, timeout_s)
            except MemoError:
                self._tell(is_waiting=False, begins=tuple(self.agreed))
                raise
            self.agreed.update(order.key for order in orders)
        planned = {**self.record.planned, step.key: self.attempts.get(step.key, 0)}
        self._tell(orders=(), is_waiting=False, planned=planned)

    def ask(self, question: str) -> tuple[str, int]:
        """What to answer or to hear under, and which rank has to answer: the first that asks.

        Who asks the same once more means the second answer, since the first may be out of date.
        """
        number = self._num_asked[question] = self._num_asked.get(question, 0) + 1
        place = f"memo/answer/{question}/{number}"
        return place, int(self._store.setdefault(f"{place}/by", str(self.rank)))

    def answer(self, place: str, text: str) -> None:
        """All that look at ``place`` hear ``text``."""
        self._store.tell(place, text)

    def answer_of(self, rank: int, place: str, timeout_s: float) -> str | None:
        """What ``rank`` answers at ``place``; None: it does not in that time, or has ended."""
        for is_late, looks_who_is_there in _looks(timeout_s):
            text = self._store.get(place)
            if text is not None or is_late or (looks_who_is_there and self._is_gone(rank)):
                return text
        raise AssertionError("it looks until it is late")

    def _tell(self, **changes: Any) -> None:
        self.record = replace(self.record, **changes)
        self._store.tell(_place(self.rank), json.dumps(plain(self.record)))

    def _records(self, ranks: Sequence[int]) -> dict[int, RankRecord]:
        """What each of ``ranks`` tells; an empty record where it has told nothing."""
        texts = self._store.told_under([_place(rank) for rank in ranks])
        return {
            rank: restore(json.loads(text or "{}"), RankRecord, f"record of rank {rank}")
            for rank, text in zip(ranks, texts, strict=True)
        }

    def _who_runs_a_plan(self, key: str, timeout_s: float) -> int | None:
        """Another rank that does not refuse the graph ``key`` with this one.

        One that has planned it in an earlier try only may be about to refuse it now: for that it
        has ``timeout_s`` seconds.
        """
        others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        attempt = self.attempts.get(key, 0)
        for is_late, _ in _looks(timeout_s):
            running: dict[int, int] = {}
            for rank, record in self._records(others).items():
                refusal = record.refused.get(key)
                refuses_too = refusal is not None and refusal.attempt >= attempt
                if key in record.planned and not refuses_too and not self._is_gone(rank):
                    running[rank] = record.planned[key]
            planned_now = [rank for rank, planned in running.items() if planned >= attempt]
            if planned_now or not running or is_late:
                return next(iter(planned_now or running), None)
        raise AssertionError("it looks until it is late")

    def _wait(self, step: RankStep, timeout_s: float) -> None:
        """All ranks that this one waits for begin what it does. Raises as ``agree``."""
        for is_late, looks_who_is_there in _looks(timeout_s):
            missing = self._missing()
            if not missing:
                return
            for rank, (order, record) in missing.items():
                self._require_not_refused(step, rank, record, is_late=is_late)
                if order in self.record.orders:
                    self._require_no_other(step, order, rank, record, is_late=is_late)
            if is_late:
                raise RanksDisagree(
                    f"{step.name}: rank {_names(missing)} did not say within "
                    f"{format_seconds(timeout_s)} what it begins {_among(missing)}. It raised an "
                    "error elsewhere, compiles something else, or compiles longer than "
                    "ranks_timeout_s"
                )
            gone = {
                rank: each
                for rank, each in missing.items()
                if looks_who_is_there and self._is_gone(rank)
            }
            if gone:
                raise RanksDisagree(
                    f"{step.name}: the process of rank {_names(gone)} has ended, and did not "
                    f"say what it begins {_among(gone)}"
                )

    def _missing(self) -> "_Missing":
        """The ranks that do not begin what they should, each with that order and its record.

        That is an order of this rank, or of one that waits with it: that one may have to raise.
        """
        missing: _Missing = {}
        records, waiting = {self.rank: self.record}, [self.rank]
        for here in waiting:  # which grows
            for order in records[here].orders if records[here].is_waiting else ():
                records |= self._records([rank for rank in order.ranks if rank not in records])
                for rank in order.ranks:
                    if order.key not in records[rank].begins:
                        missing.setdefault(rank, (order, records[rank]))
                    elif rank not in waiting:
                        waiting.append(rank)
        return missing

    def _require_not_refused(
        self, step: RankStep, rank: int, record: RankRecord, *, is_late: bool
    ) -> None:
        """Raise where ``rank`` has refused the graph of ``step``.

        What it has refused in an earlier try counts where it ``is_late``: it may be about to try
        again.
        """
        refusal, attempt = record.refused.get(step.key), self.attempts.get(step.key, 0)
        if refusal is None or (refusal.attempt < attempt and not is_late):
            return
        what = f"in place of {step.name} ({self.record.orders[0].first}): {refusal.why}"
        if refusal.steps_aside:
            raise RankSteppedAside(f"rank {rank} runs plain Inductor {what}")
        raise RanksDisagree(f"rank {rank} raised {what}")

    def _require_no_other(
        self, step: RankStep, order: GroupOrder, rank: int, record: RankRecord, *, is_late: bool
    ) -> None:
        """Raise where ``rank`` waits for an order that this rank does not begin, and began later.

        Where ``is_late``, whenever it began, and also where it has given up meanwhile.
        """
        began_later = record.is_waiting and record.turn > self.record.turn
        for other in record.orders if began_later or is_late else ():
            if other.group_name != order.group_name or other.key in self.record.begins:
                continue
            pairs = enumerate(itertools.zip_longest(order.begun, other.begun), start=1)
            number, mine, there = next(
                (number, _text(ours), _text(theirs))
                for number, (ours, theirs) in pairs
                if ours is None or theirs is None or ours.what != theirs.what
            )
            raise RanksDisagree(
                f"{step.name}: collective {number} among ranks {list(order.ranks)} is {mine} on "
                f"rank {self.rank} and {there} on rank {rank}; all of them must compile the same "
                "model, in the same order of graphs, with the same shapes and options"
            )


_Missing = dict[int, tuple[GroupOrder, RankRecord]]

_job_ranks: weakref.WeakKeyDictionary[Any, JobRank] = weakref.WeakKeyDictionary()
"""Process group of the whole job -> this rank; after ``destroy_process_group`` nothing is told."""


def job_rank() -> JobRank:
    """This process among the ranks of its job, or alone."""
    if distributed.num_ranks() < 2:
        return JobRank(0, 1, distributed.JobStore(None))
    world = torch.distributed.group.WORLD
    if world not in _job_ranks:
        rank, num_ranks = torch.distributed.get_rank(), distributed.num_ranks()
        _job_ranks[world] = JobRank(rank, num_ranks, distributed.job_store())
    return _job_ranks[world]


def _looks(timeout_s: float) -> Iterator[tuple[bool, bool]]:
    """Ever more rarely: whether the time is over, and whether to look who is still there."""
    look_s, there_s = LOOK_S, time.monotonic()
    deadline_s = there_s + timeout_s
    while True:
        now_s = time.monotonic()
        looks_who_is_there = now_s > there_s + THERE_S
        if looks_who_is_there:
            there_s = now_s
        yield now_s > deadline_s, looks_who_is_there
        time.sleep(look_s)
        look_s = min(2 * look_s, MAX_LOOK_S)


def _place(rank: int) -> str:
    """Where a rank tells of itself."""
    return f"memo/rank/{rank}"


def _names(missing: _Missing) -> str:
    return ", ".join(map(str, missing))


def _among(missing: _Missing) -> str:
    order, _ = next(iter(missing.values()))
    return f"among ranks {list(order.ranks)}; here {order.first}"


def _text(begun: Begun | None) -> str:
    return "none" if begun is None else f"{begun.what} ({begun.call})"
