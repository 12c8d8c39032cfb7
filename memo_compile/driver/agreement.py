"""The ranks of a group begin the same collectives in the same order, or none of them goes on.

A rank that begins another collective than the others, or none, leaves them waiting for ever. So
before a graph runs for the first time each rank tells the others, through the store at which they
met, what it will begin among the ranks of each process group, and compares. What else their plans
hold may differ: a rank's waits, copies and recomputations are its own affair, and no plan changes
the order in which collectives begin (``check.check_moves``). So a step that is planned again, on
one rank or on several, needs no new agreement. Nor does a graph whose collectives all ranks have
agreed on before: a branch that only one rank takes is compiled there and nowhere else.
"""

import itertools
import json
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from memo_runtime.collectives import CollectiveKind

from memo_compile import shim_distributed
from memo_compile.analysis.regions import LoweredRegion
from memo_compile.errors import RanksDisagree
from memo_compile.step.problem import CallKind, Problem
from memo_compile.units import format_seconds


class _Rounds:
    """What the ranks of each group have compared since this process joined its job."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._agreed: set[tuple[str, tuple[str, ...]]] = set()
        self._world: weakref.ref[Any] | None = None

    def next(self, order: "GroupOrder") -> int | None:
        """The number of the next round; None: all ranks have agreed on ``order`` before.

        After ``destroy_process_group`` nothing is agreed on, and rounds are counted anew.
        """
        world = torch.distributed.group.WORLD
        if self._world is None or self._world() is not world:
            self._world, self._counts = weakref.ref(world), Counter()
            self._agreed.clear()
        if order.content in self._agreed:
            return None
        self._counts[order.group_name] += 1
        return self._counts[order.group_name]

    def add(self, order: "GroupOrder") -> None:
        """All ranks have agreed on ``order``."""
        self._agreed.add(order.content)


_rounds = _Rounds()


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
    def content(self) -> tuple[str, tuple[str, ...]]:
        """What must be equal on all ranks: names of calls need not."""
        return self.group_name, tuple(begun.what for begun in self.begun)


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
        GroupOrder(group_name=name, ranks=shim_distributed.ranks_of_group(name), begun=tuple(begun))
        for name, begun in found.items()
    )
    return tuple(order for order in orders if len(order.ranks) > 1)


def agree(orders: Sequence[GroupOrder], graph: str, timeout_s: float) -> None:
    """All ranks of each group will begin what ``orders`` say, or have agreed on it before.

    Waits for the others, each group at most ``timeout_s`` seconds. Raises RanksDisagree: a rank
    begins something else, or did not come; it is named.
    """
    for order in orders:
        _agree(order, graph, timeout_s)


def _agree(order: GroupOrder, graph: str, timeout_s: float) -> None:
    number = _rounds.next(order)
    if number is None:
        return
    own = torch.distributed.get_rank()
    prefix = f"memo/{order.group_name}/{number}"
    shim_distributed.tell(f"{prefix}/{own}", json.dumps(order.begun))
    deadline_s = time.monotonic() + timeout_s
    missing = []
    for rank in order.ranks:
        if rank == own:
            continue
        text = shim_distributed.told(f"{prefix}/{rank}", deadline_s - time.monotonic())
        if text is None:
            missing.append(rank)
            continue
        others = [Begun(*entry) for entry in json.loads(text)]
        if difference := _difference(order.begun, others):
            number_of, mine, theirs = difference
            raise RanksDisagree(
                f"{graph}: collective {number_of} among ranks {list(order.ranks)} is {mine} on "
                f"rank {own} and {theirs} on rank {rank}; all of them must compile the same model, "
                "in the same order of graphs, with the same shapes and options"
            )
    if missing:
        first = order.begun[0]
        raise RanksDisagree(
            f"{graph}: rank {', '.join(map(str, missing))} did not say within "
            f"{format_seconds(timeout_s)} what it begins among ranks {list(order.ranks)}; here the "
            f"first is {_text(first)}. It raised an error, has stepped aside to plain Inductor, or "
            "compiles longer than ranks_timeout_s"
        )
    _rounds.add(order)


def _difference(ours: Sequence[Begun], theirs: Sequence[Begun]) -> tuple[int, str, str] | None:
    """The first collective that differs, counted from 1, and what it is on both sides."""
    for number, (mine, other) in enumerate(itertools.zip_longest(ours, theirs), start=1):
        if mine is None or other is None or mine.what != other.what:
            return number, _text(mine), _text(other)
    return None


def _text(begun: Begun | None) -> str:
    return "none" if begun is None else f"{begun.what} ({begun.call})"
