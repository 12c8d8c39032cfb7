"""A compiled model on the device, whose kernels compute, beside its eager twin on the CPU.

Offloading and recomputation are real here: bytes go to pinned memory and back, and what comes back
too early or to the wrong place changes a gradient.
"""

import copy
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from memo_runtime.arena import arena_of
from memo_runtime.copies import CopyEngine, Ticket

import memo_compile
from tests.cuda_emulated import kernels
from tests.cuda_emulated.device_calls import run_at_once, run_late, start_log, stop_log
from tests.cuda_emulated.offline_plans import believing
from tests.cuda_emulated.order import races
from tests.numerics.small import Stack, rows
from tests.numerics.training import memo_compiled

CUDA = torch.device("cuda", 0)
NUM_ROWS = 32
LAYERS = 3
MIX = {
    **{"policy": "memo", "alpha": 0.5, "costs": "roofline"},
    **{"token_granule": 4, "token_tiles": 1, "debug": ""},
}
"""Half of each layer's rows go to the host, the other half is recomputed."""


def rows_of(seed: int) -> torch.Tensor:
    return rows(seed, NUM_ROWS)


class Computing:
    """A ``Stack`` on the device under memo, and the same one in eager on the CPU."""

    def __init__(self, **options: object) -> None:
        kernels.install((*kernels.OPERATORS, *kernels.STACK_OPERATORS))
        self.eager = Stack(num_layers=LAYERS)
        self.ours = copy.deepcopy(self.eager).to(CUDA)
        self.compiled = memo_compiled(self.ours, **MIX | options)

    def begin(self) -> None:
        """Compile; the step moves and recomputes, and every kernel of it computes."""
        with believing():
            self.assert_step(0)
        plan = memo_compile.report().plans[-1]
        assert plan.offloaded_bytes > 0
        assert plan.recomputed_bytes > 0
        self.unplanned_steps = memo_compile.report().unplanned_steps

    def is_planned(self) -> bool:
        """True while no step since ``begin`` ran in ordinary memory, of any model."""
        return memo_compile.report().unplanned_steps == self.unplanned_steps

    def step(self, seed: int) -> None:
        """One step of ours."""
        self.ours.zero_grad(set_to_none=True)
        self.compiled(rows_of(seed).to(CUDA)).backward()

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.ours.parameters()]

    def gradients_of(self, seed: int) -> Sequence[torch.Tensor]:
        """Those of one step, beside ``.grad``; nothing has waited for them."""
        return torch.autograd.grad(self.compiled(rows_of(seed).to(CUDA)), [*self.ours.parameters()])

    def wanted(self, seed: int) -> Sequence[torch.Tensor]:
        """The eager twin's gradients."""
        return torch.autograd.grad(self.eager(rows_of(seed)), [*self.eager.parameters()])

    def assert_step(self, seed: int) -> None:
        self.step(seed)
        assert_close(self.gradients(), self.wanted(seed))


@contextmanager
def quick_collections() -> Iterator[None]:
    """In the block Python's collector looks only at what is made there."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def assert_close(ours: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for own, theirs in zip(ours, wanted, strict=True):
        torch.testing.assert_close(own.cpu(), theirs, rtol=1e-5, atol=1e-6)


def leased() -> int:
    """Frames of the device and of the host that some step holds."""
    arena = arena_of(CUDA)
    return sum(held.leased for held in (*arena._slabs, *arena.host.stores))


@contextmanager
def ordered(chance: float | None, seed: int = 0) -> Iterator[None]:
    """In the block work runs late (``device_calls.run_late``), and no two accesses race."""
    if chance is not None:
        run_late(chance, seed)
    start_log()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        log = stop_log()
        run_at_once()
    assert races(log) == []


@dataclass(frozen=True, slots=True)
class Copies:
    """Those that began in a block, and those of them that a step waited for."""

    issued: list[Ticket] = field(default_factory=list)
    waited: list[Ticket] = field(default_factory=list)

    def in_flight(self) -> list[Ticket]:
        """What nothing has waited for: no stream, and the host has not seen its end."""
        passed = (ticket for ticket in self.issued if ticket.event and ticket.event.query())
        ended = [*self.waited, *passed]
        return [ticket for ticket in self.issued if ticket not in ended or not ticket.finished]


@contextmanager
def copies_of() -> Iterator[Copies]:
    """The copies of all steps of the block."""
    found = Copies()
    begin, wait = CopyEngine.begin, CopyEngine.wait

    def noted_begin(engine: CopyEngine, ticket: Ticket) -> None:
        found.issued.append(ticket)
        begin(engine, ticket)

    def noted_wait(engine: CopyEngine, ticket: Ticket) -> float:
        stall_s = wait(engine, ticket)
        found.waited.append(ticket)
        return stall_s

    with (
        mock.patch.object(CopyEngine, "begin", noted_begin),
        mock.patch.object(CopyEngine, "wait", noted_wait),
    ):
        yield found
