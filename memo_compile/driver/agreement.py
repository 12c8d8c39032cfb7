"""Makes sure that the ranks of a job begin the same collectives in the same order.

A rank that begins another collective than the others, or none, leaves them waiting for ever. So
before a graph runs for the first time, each rank publishes what it will begin in each process
group, and waits until all ranks of these groups have published the same. It also waits for those
that they wait for in turn, so that a rank that raises is noticed across a mesh of groups.

Nothing else of the plans must agree: the order of collectives follows from the graph, and from the
first plan where that gathers weights again (``planners.gather_again``); no later plan changes it
(``check.check_moves``). So replanning needs no new agreement. Nor does a graph whose collectives
all ranks have agreed on before: a branch that only one rank takes is compiled there alone.

Each rank writes one record of itself (``RankRecord``) into torch.distributed's store whenever it
changes, and reads those of the others. If two ranks each wait for a collective that the other does
not begin, the one that has waited longer raises. The other goes on: a program may catch the error
of a graph that did not fit on one rank, and then both are at the next graph. A rank without a plan
for a graph publishes that under a digest of the graph (``graph_key``); those that wait for it raise
too, or run the graph through plain Inductor too.
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

POLL_S, MAX_POLL_S = 0.001, 0.1
"""Seconds between two reads of other ranks' records; doubled after each read."""

ALIVE_CHECK_S = 1.0
"""Seconds between two checks whether ranks that have published nothing still live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCollective:
    """One collective of a step, as all ranks of its group must begin it."""

    call: str
    """The name of its call, for messages."""
    what: str
    """Kind, reduction, dtype and shape (all_to_all: of a row); equal on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """The collectives of one process group in a step, in the order in which they begin."""

    group_name: str
    ranks: tuple[int, ...]
    collectives: tuple[StepCollective, ...]

    @property
    def key(self) -> str:
        """A digest of what must be equal on all ranks: names of calls need not be."""
        return f"{self.group_name}/{digest_of([each.what for each in self.collectives])}"

    @property
    def first(self) -> str:
        """Names the first collective, for messages."""
        return f"the first is {_text(self.collectives[0])}"


def orders_of(problem: Problem, lowered: Mapping[str, LoweredRegion]) -> tuple[GroupOrder, ...]:
    """Returns what ``problem`` begins in each process group of several ranks."""
    by_group: dict[str, list[StepCollective]] = {}
    for call in problem.calls:
        collective = lowered[call.region].collective if call.kind is CallKind.ISSUE else None
        if collective is None:
            continue
        words = [collective.kind.value, *([collective.reduce_op] if collective.reduce_op else [])]
        sends_rows = collective.kind is CollectiveKind.ALL_TO_ALL  # each rank a number of its own
        words += ["rows of"] if sends_rows else []
        for layout in call.reads:
            if layout is not None:
                words.append(f"{layout.dtype}{list(layout.size[sends_rows:])}")
        step_collective = StepCollective(call=call.name, what=" ".join(words))
        by_group.setdefault(collective.group_name, []).append(step_collective)
    orders = (
        GroupOrder(
            group_name=name, ranks=distributed.ranks_of_group(name), collectives=tuple(collectives)
        )
        for name, collectives in by_group.items()
    )
    return tuple(order for order in orders if len(order.ranks) > 1)


def graph_key(gm: fx.GraphModule, inputs: Sequence[object]) -> str:
    """Returns a digest of a Dynamo graph and its inputs, equal on all ranks; "" for a lone rank."""
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
    """The collectives of a step as this rank has planned it."""

    name: str
    """For messages."""
    key: str
    """``graph_key`` of the graph that it was made of."""
    orders: tuple[GroupOrder, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a rank runs no planned step of a graph."""

    attempt: int
    """How often the rank has tried to plan the graph. A program may catch the error and try again:
    a rank that is at its next try must ignore a refusal of the try before."""
    steps_aside: bool
    """Plain Inductor runs the graph there; else the rank has raised."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What a rank publishes of itself."""

    orders: tuple[GroupOrder, ...] = ()
    """What it begins next, and waits for the others to agree on."""
    is_waiting: bool = False
    """False once it has given up waiting for ``orders``."""
    turn: int = 0
    """The number of this wait among all waits of the job, in the order in which they began."""
    begins: tuple[str, ...] = ()
    """Keys of the orders that it begins now, or may begin since all have agreed on them."""
    planned: Mapping[str, int] = field(default_factory=dict)
    """Graph -> the last attempt in which it had a plan."""
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    """Graph -> why it runs no planned step of it."""


class JobRank:
    """This rank among those of its job: publishes its record, reads theirs. A lone one does not."""

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
        """Keys of the orders that all ranks have agreed on."""
        self.attempts: dict[str, int] = {}
        """Graph -> how often this rank has begun to plan it."""
        self._num_asked: dict[str, int] = {}
        """Question -> how often this rank has asked it."""

    def begin(self, key: str) -> None:
        """Counts an attempt to plan the graph ``key``, and takes back an earlier refusal of it."""
        self.attempts[key] = self.attempts.get(key, 0) + 1
        refused = dict(self.record.refused)
        if refused.pop(key, None) is not None:
            self._publish(refused=refused)

    def refuse(
        self, key: str, error: Exception, *, steps_aside: bool, timeout_s: float = 0.0
    ) -> None:
        """Publishes why this rank will run no planned step of the graph ``key``.

        Raises RanksDisagree: this rank would step aside to plain Inductor, which may order
        collectives otherwise, while another runs its plan; ``timeout_s`` as of ``_rank_with_plan``.
        """
        if self.num_ranks < 2:
            return
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        refusal = Refusal(attempt=self.attempts.get(key, 0), steps_aside=steps_aside, why=why)
        try:
            self._publish(refused={**self.record.refused, key: refusal})
            running = self._rank_with_plan(key, timeout_s) if steps_aside else None
            if running is not None:
                refusal = replace(refusal, steps_aside=False)
                self._publish(refused={**self.record.refused, key: refusal})
        except RuntimeError as failed:  # the store went with the rank that held it: nobody waits
            log.warning("memo: the other ranks were not told of an error: %s", failed)
            return
        if running is not None:
            raise RanksDisagree(
                f"rank {running} runs a plan of a graph for which this rank has none: {why}"
            ) from error

    def agree(self, step: RankStep, timeout_s: float) -> None:
        """Waits until all ranks of each group begin what ``step`` begins, ``timeout_s`` at most.

        Returns at once where they have agreed on it before.

        Raises:
            RanksDisagree: a rank begins something else, has raised, did not come, or has ended.
            RankSteppedAside: a rank runs the graph through plain Inductor.
        """
        if not step.orders:  # the step has no collectives
            return
        orders = tuple(order for order in step.orders if order.key not in self.agreed)
        if orders:
            self._publish(
                orders=orders,
                is_waiting=True,
                turn=self._store.next_number("memo/waits"),
                begins=(*self.agreed, *(order.key for order in orders)),
            )
            try:
                self._wait(step, timeout_s)
            except MemoError:
                self._publish(is_waiting=False, begins=tuple(self.agreed))
                raise
            self.agreed.update(order.key for order in orders)
        planned = {**self.record.planned, step.key: self.attempts.get(step.key, 0)}
        self._publish(orders=(), is_waiting=False, planned=planned)

    def ask(self, question: str) -> tuple[str, int]:
        """Returns the key of the answer, and the rank that answers: the first that asks.

        Each time a rank asks the same question it gets a new key: an old answer may be out of date.
        """
        number = self._num_asked[question] = self._num_asked.get(question, 0) + 1
        key = f"memo/answer/{question}/{number}"
        return key, int(self._store.setdefault(f"{key}/by", str(self.rank)))

    def answer(self, key: str, text: str) -> None:
        """Publishes ``text`` as the answer for all ranks that read ``key``."""
        self._store.tell(key, text)

    def answer_of(self, rank: int, key: str, timeout_s: float) -> str | None:
        """Waits for the answer of ``rank``; None: ``timeout_s`` have passed, or it has ended."""
        for is_late, checks_alive in _polls(timeout_s):
            text = self._store.get(key)
            if text is not None or is_late or (checks_alive and self._is_gone(rank)):
                return text
        raise AssertionError("the last poll is late")

    def _publish(self, **changes: Any) -> None:
        """Changes fields of this rank's record, and writes it for the others."""
        self.record = replace(self.record, **changes)
        self._store.tell(_record_key(self.rank), json.dumps(plain(self.record)))

    def _records(self, ranks: Sequence[int]) -> dict[int, RankRecord]:
        """Returns the records of ``ranks``; an empty one where a rank has published nothing."""
        texts = self._store.told_under([_record_key(rank) for rank in ranks])
        return {
            rank: restore(json.loads(text or "{}"), RankRecord, f"record of rank {rank}")
            for rank, text in zip(ranks, texts, strict=True)
        }

    def _rank_with_plan(self, key: str, timeout_s: float) -> int | None:
        """Returns another rank that runs a plan of the graph ``key``; None: none does.

        A rank that planned it in an earlier attempt only may be about to refuse it now: for that it
        has ``timeout_s`` seconds.
        """
        other_ranks = [rank for rank in range(self.num_ranks) if rank != self.rank]
        attempt = self.attempts.get(key, 0)
        for is_late, _ in _polls(timeout_s):
            running: dict[int, int] = {}  # rank -> the attempt in which it planned the graph
            for rank, record in self._records(other_ranks).items():
                refusal = record.refused.get(key)
                refuses_too = refusal is not None and refusal.attempt >= attempt
                if key in record.planned and not refuses_too and not self._is_gone(rank):
                    running[rank] = record.planned[key]
            planned_now = [rank for rank, planned in running.items() if planned >= attempt]
            if planned_now or not running or is_late:
                return next(iter(planned_now or running), None)
        raise AssertionError("the last poll is late")

    def _wait(self, step: RankStep, timeout_s: float) -> None:
        """Waits until all ranks that this one waits for begin what it does. Raises as ``agree``."""
        for is_late, checks_alive in _polls(timeout_s):
            missing = self._missing()
            if not missing:
                return
            for rank, (order, record) in missing.items():
                self._require_not_refused(step, rank, record, is_late=is_late)
                if order in self.record.orders:  # else a rank that this one waits for waits for it
                    self._require_equal_order(step, order, rank, record, is_late=is_late)
            if is_late:
                raise RanksDisagree(
                    f"{step.name}: rank {_names(missing)} did not say within "
                    f"{format_seconds(timeout_s)} what it begins {_among(missing)}. It raised an "
                    "error elsewhere, compiles something else, or compiles longer than "
                    "ranks_timeout_s"
                )
            gone = {
                rank: order_and_record
                for rank, order_and_record in missing.items()
                if checks_alive and self._is_gone(rank)
            }
            if gone:
                raise RanksDisagree(
                    f"{step.name}: the process of rank {_names(gone)} has ended, and did not "
                    f"say what it begins {_among(gone)}"
                )

    def _missing(self) -> "_Missing":
        """Returns the ranks that do not begin what they should, with that order and their record.

        Starts from this rank's orders and goes on to those of each rank that waits with it: any of
        them may have to raise.
        """
        missing: _Missing = {}
        records, waiting = {self.rank: self.record}, [self.rank]
        for waiter in waiting:  # which grows
            for order in records[waiter].orders if records[waiter].is_waiting else ():
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
        """Raises where ``rank`` has refused the graph of ``step``.

        A refusal of an earlier attempt counts only when this rank ``is_late``: until then the other
        may be about to try again.
        """
        refusal, attempt = record.refused.get(step.key), self.attempts.get(step.key, 0)
        if refusal is None or (refusal.attempt < attempt and not is_late):
            return
        instead_of = f"in place of {step.name} ({self.record.orders[0].first}): {refusal.why}"
        if refusal.steps_aside:
            raise RankSteppedAside(f"rank {rank} runs plain Inductor {instead_of}")
        raise RanksDisagree(f"rank {rank} raised {instead_of}")

    def _require_equal_order(
        self, step: RankStep, order: GroupOrder, rank: int, record: RankRecord, *, is_late: bool
    ) -> None:
        """Raises where ``rank`` waits for other collectives of the same group than this rank.

        Of the two the one that began to wait first raises. Where this rank ``is_late`` it raises in
        any case, also if the other has given up meanwhile.
        """
        began_later = record.is_waiting and record.turn > self.record.turn
        for other in record.orders if began_later or is_late else ():
            if other.group_name != order.group_name or other.key in self.record.begins:
                continue
            pairs = enumerate(itertools.zip_longest(order.collectives, other.collectives), start=1)
            number, text_here, text_there = next(
                (number, _text(ours), _text(theirs))
                for number, (ours, theirs) in pairs
                if ours is None or theirs is None or ours.what != theirs.what
            )
            raise RanksDisagree(
                f"{step.name}: collective {number} among ranks {list(order.ranks)} is {text_here} "
                f"on rank {self.rank} and {text_there} on rank {rank}; all of them must compile "
                "the same model, in the same order of graphs, with the same shapes and options"
            )


_Missing = dict[int, tuple[GroupOrder, RankRecord]]
"""Rank -> the order that it should begin and does not, and what it publishes."""

_job_ranks: weakref.WeakKeyDictionary[Any, JobRank] = weakref.WeakKeyDictionary()
"""Process group of the whole job -> this rank; gone after ``destroy_process_group``."""


def job_rank() -> JobRank:
    """Returns this process as a rank of its job; without torch.distributed, as a lone one."""
    if distributed.num_ranks() < 2:
        return JobRank(0, 1, distributed.JobStore(None))
    world = torch.distributed.group.WORLD
    if world not in _job_ranks:
        rank, num_ranks = torch.distributed.get_rank(), distributed.num_ranks()
        _job_ranks[world] = JobRank(rank, num_ranks, distributed.job_store())
    return _job_ranks[world]


def _polls(timeout_s: float) -> Iterator[tuple[bool, bool]]:
    """Yields, ever more rarely: is the time over, is it time to check which ranks still live."""
    poll_s, checked_s = POLL_S, time.monotonic()
    deadline_s = checked_s + timeout_s
    while True:
        now_s = time.monotonic()
        checks_alive = now_s > checked_s + ALIVE_CHECK_S
        if checks_alive:
            checked_s = now_s
        yield now_s > deadline_s, checks_alive
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, MAX_POLL_S)


def _record_key(rank: int) -> str:
    return f"memo/rank/{rank}"


def _names(missing: _Missing) -> str:
    return ", ".join(map(str, missing))


def _among(missing: _Missing) -> str:
    order, _ = next(iter(missing.values()))
    return f"among ranks {list(order.ranks)}; here {order.first}"


def _text(collective: StepCollective | None) -> str:
    return "none" if collective is None else f"{collective.what} ({collective.call})"
