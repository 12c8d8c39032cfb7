"""Ranks hear at once that another one will run no planned step of a graph.

A rank that steps aside to plain Inductor, or raises, would leave those waiting that have planned
the same graph. So it tells why, under what Dynamo handed over, which is the same on all ranks that
compile the same; those who wait look there (``driver.agreement``).
"""

import dataclasses
import json
import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memo_compile.errors import RanksDisagree, RankSteppedAside
from memo_compile.file_store import digest_of
from memo_compile.torch_private import distributed

log = logging.getLogger("memo")

LOOK_S = 0.2
"""Between two looks at what a rank that has planned a graph before does with it now."""


class ThisJob:
    """Asked before what a process knows of the other ranks is used: is that still true?"""

    def __init__(self) -> None:
        self._world: weakref.ref[Any] | None = None

    def is_new(self) -> bool:
        """True once after ``destroy_process_group`` and another start: nothing is told then."""
        world = torch.distributed.group.WORLD
        if self._world is not None and self._world() is world:
            return False
        self._world = weakref.ref(world)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a rank runs no planned step of a graph."""

    attempt: int
    """The rank's tries to plan the graph, this one among them: a program may catch and try again,
    and a rank that is further must not hear of the try before."""
    steps_aside: bool
    """Plain Inductor runs the graph there; else the rank has raised."""
    why: str


class _Known:
    def __init__(self) -> None:
        self.attempts: dict[str, int] = {}
        """Graph -> how often this rank has begun to plan it."""
        self.refused: set[str] = set()
        """Graphs that this rank refuses now."""
        self._job = ThisJob()

    def here(self) -> "_Known":
        if self._job.is_new():
            self.attempts.clear()
            self.refused.clear()
        return self


_known = _Known()


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


def begin(key: str) -> None:
    """This rank plans the graph ``key``, whatever it has refused before."""
    if not key:
        return
    known = _known.here()
    known.attempts[key] = known.attempts.get(key, 0) + 1
    if key in known.refused:
        known.refused.discard(key)
        distributed.tell(_refused(key, torch.distributed.get_rank()), "")


def refuse(key: str, error: Exception, *, steps_aside: bool, timeout_s: float = 0.0) -> None:
    """Those who wait for this rank's step of the graph ``key`` hear why there will be none.

    Raises RanksDisagree: this rank is to step aside, and another runs its plan of the graph, which
    it may since all had agreed on those collectives before. Plain Inductor may order them
    otherwise. Who has planned the graph before may be about to refuse it now: for that it has
    ``timeout_s`` seconds.
    """
    if not key:
        return
    why = f"{type(error).__name__}: {error}".partition("\n")[0]
    try:
        _tell_refusal(key, why, steps_aside=steps_aside)
        planned = _who_runs_a_plan(key, timeout_s) if steps_aside else None
        if planned is not None:
            _tell_refusal(key, why, steps_aside=False)
    except RuntimeError as failed:  # the store went with the rank that held it: nobody waits
        log.warning("memo: the other ranks were not told of an error: %s", failed)
        return
    if planned is not None:
        raise RanksDisagree(
            f"rank {planned} runs a plan of a graph for which this rank has none: {why}"
        ) from error


def _tell_refusal(key: str, why: str, *, steps_aside: bool) -> None:
    known = _known.here()
    refusal = Refusal(attempt=known.attempts.get(key, 0), steps_aside=steps_aside, why=why)
    text = json.dumps(dataclasses.asdict(refusal))
    distributed.tell(_refused(key, torch.distributed.get_rank()), text)
    known.refused.add(key)


def _who_runs_a_plan(key: str, timeout_s: float) -> int | None:
    """Another rank that does not refuse the graph with this one."""
    own, attempt = torch.distributed.get_rank(), _known.here().attempts.get(key, 0)
    others = (rank for rank in range(distributed.num_ranks()) if rank != own)
    planned = [rank for rank in others if distributed.told(_planned(key, rank))]
    deadline_s = time.monotonic() + timeout_s
    while planned := [rank for rank in planned if not _refuses_too(key, rank, attempt)]:
        runs = (rank for rank in planned if _planned_at(key, rank) >= attempt)
        if (found := next(runs, None)) is not None:
            return found
        if time.monotonic() > deadline_s:
            return planned[0]
        time.sleep(LOOK_S)
    return None


def _refuses_too(key: str, rank: int, attempt: int) -> bool:
    """True where ``rank`` has refused the graph in that try, or a later one, or is not there."""
    refusal = _refusal_of(key, rank)
    is_refused = refusal is not None and refusal.attempt >= attempt
    return is_refused or distributed.is_gone(rank)


def _planned_at(key: str, rank: int) -> int:
    """The last try in which ``rank`` had a plan."""
    return int(distributed.told(_planned(key, rank)) or 0)


def tell_planned(key: str) -> None:
    """Told before a planned step with collectives, made of the graph ``key``, first runs."""
    if key:
        attempt = _known.here().attempts.get(key, 0)
        distributed.tell(_planned(key, torch.distributed.get_rank()), str(attempt))


def require_not_refused(key: str, rank: int, what: str, *, is_late: bool) -> None:
    """Raise where ``rank`` has refused the graph ``key``; ``what`` was to be done there.

    What it has refused in an earlier try counts where it ``is_late``: it may be about to try again.

    Raises:
        RankSteppedAside: plain Inductor runs the graph there.
        RanksDisagree: it has raised.
    """
    refusal = _refusal_of(key, rank)
    if refusal is None or (refusal.attempt < _known.here().attempts.get(key, 0) and not is_late):
        return
    if refusal.steps_aside:
        raise RankSteppedAside(f"rank {rank} runs plain Inductor in place of {what}: {refusal.why}")
    raise RanksDisagree(f"rank {rank} raised in place of {what}: {refusal.why}")


def _refusal_of(key: str, rank: int) -> Refusal | None:
    text = distributed.told(_refused(key, rank)) if key else None
    return Refusal(**json.loads(text)) if text else None


def _refused(key: str, rank: int) -> str:
    return f"memo/refused/{key}/{rank}"


def _planned(key: str, rank: int) -> str:
    return f"memo/planned/{key}/{rank}"
