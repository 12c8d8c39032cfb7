"""Ranks hear at once that another one will run no planned step of a graph.

A rank that steps aside to plain Inductor, or raises, would leave those waiting that have planned
the same graph. So it tells why, under what Dynamo handed over, which is the same on all ranks that
compile the same; those who wait look there (``driver.agreement``).
"""

import dataclasses
import json
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memo_compile import shim_distributed
from memo_compile.errors import RanksDisagree, RankSteppedAside
from memo_compile.file_store import digest_of

log = logging.getLogger("memo")


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

    number: int
    """Of the refusal that came first: those that follow from it have its number."""
    steps_aside: bool
    """Plain Inductor runs the graph there; else the rank has raised."""
    why: str


class _Known:
    def __init__(self) -> None:
        self.refused: set[str] = set()
        """Graphs that this rank refuses now."""
        self.raised_with: set[int] = set()
        """Refusals for which this rank has raised. Each counts once: the program may try again."""
        self._job = ThisJob()

    def here(self) -> "_Known":
        if self._job.is_new():
            self.refused.clear()
            self.raised_with.clear()
        return self


_known = _Known()


def graph_key(gm: fx.GraphModule, inputs: Sequence[object]) -> str:
    """Stands for a Dynamo graph and its inputs on all ranks; empty where a rank is alone."""
    if shim_distributed.num_ranks() < 2:
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
    if key and key in _known.here().refused:
        _known.refused.discard(key)
        shim_distributed.tell(_refused(key, torch.distributed.get_rank()), "")


def refuse(key: str, error: Exception, *, steps_aside: bool) -> None:
    """Those who wait for this rank's step of the graph ``key`` hear why there will be none.

    Raises RanksDisagree: this rank is to step aside, and another runs its plan of the graph, which
    it may since all had agreed on those collectives before. Plain Inductor may order them
    otherwise.
    """
    if not key:
        return
    why = f"{type(error).__name__}: {error}".partition("\n")[0]
    number = error.refusal if isinstance(error, RanksDisagree) else None
    try:
        planned = shim_distributed.told(_planned(key)) if steps_aside else None
        if number is None:
            number = shim_distributed.next_number("memo/refusals")
        refusal = Refusal(number=number, steps_aside=planned is None and steps_aside, why=why)
        text = json.dumps(dataclasses.asdict(refusal))
        shim_distributed.tell(_refused(key, torch.distributed.get_rank()), text)
    except RuntimeError as failed:  # the store went with the rank that held it: nobody waits
        log.warning("memo: the other ranks were not told of an error: %s", failed)
        return
    _known.here().refused.add(key)
    if planned is not None:
        raise RanksDisagree(
            f"rank {planned} runs a plan of a graph for which this rank has none: {why}"
        ) from error


def tell_planned(key: str) -> None:
    """Told before a planned step with collectives, made of the graph ``key``, first runs."""
    if key:
        shim_distributed.tell(_planned(key), str(torch.distributed.get_rank()))


def require_not_refused(key: str, rank: int, what: str) -> None:
    """Raise where ``rank`` has refused the graph ``key``; ``what`` was to be done there.

    Raises:
        RankSteppedAside: plain Inductor runs the graph there.
        RanksDisagree: it has raised, and this rank has not done so for the same reason before.
    """
    text = shim_distributed.told(_refused(key, rank)) if key else None
    if not text:
        return
    refusal = Refusal(**json.loads(text))
    if refusal.steps_aside:
        raise RankSteppedAside(f"rank {rank} runs plain Inductor in place of {what}: {refusal.why}")
    number = refusal.number
    if number not in _known.here().raised_with:
        _known.raised_with.add(number)
        why = f"rank {rank} raised in place of {what}: {refusal.why}"
        raise RanksDisagree(why, refusal=number)


def _refused(key: str, rank: int) -> str:
    return f"memo/refused/{key}/{rank}"


def _planned(key: str) -> str:
    return f"memo/planned/{key}"
