"""A step whose saved activation goes to the host and back, small enough to draw.

frame:    [0, n) a, then c     [n, 2n) b     [2n, 3n) a again     [3n, 4n) d
forward:  x -> double -> a, OFFLOAD a, shift(a) -> b, WAIT, c over a -> loss
backward: RELOAD a, d = g * b, WAIT, d * a -> grad

loss = sum(2x + 1) and grad = g * (2x + 1) * 2x.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from memo_runtime.arena import FrameView, arena_of
from memo_runtime.current import current
from memo_runtime.instructions import CopyRange, RunCall, StartOffload, StartReload, WaitCopy
from memo_runtime.run_step import RunHalf, StepPlan, run_backward, run_forward

CPU = torch.device("cpu")
SCHEDULES = ("normal", "early", "late", "serial")
NUM = 256
NUM_BYTES = 4 * NUM
OFFLOAD, RELOAD = 0, 1

_keys = itertools.count(10_000_000)


def view(offset_bytes: int) -> FrameView:
    return FrameView(offset_bytes=offset_bytes, dtype=torch.float32, size=(NUM,), stride=(1,))


def call(run: Callable, table: int, inputs: tuple, outputs: tuple, **more: Any) -> RunCall:
    return RunCall(
        run=run,
        table=table,
        inputs=inputs,
        outputs=outputs,
        **{"resident_bytes": 4 * NUM_BYTES, "views": (), "drop": (), **more},
    )


def double(args: list) -> list:
    torch.mul(args[0], 2, out=current.views[0])
    return [current.views[0]]


def shift(args: list) -> list:
    torch.add(args[0], 1, out=current.views[0])
    return [current.views[0]]


def total(args: list) -> list:
    """The loss; writes where ``a`` was."""
    current.views[0].copy_(args[0])
    return [current.views[0].sum()]


def multiply(args: list) -> list:
    torch.mul(args[0], args[1], out=current.views[0])
    return [current.views[0]]


def multiply_outside(args: list) -> list:
    return [args[0] * args[1]]


def moved(number: int, frame_offset: int, start: int = 0, end: int = NUM_BYTES) -> CopyRange:
    return CopyRange(
        number=number,
        frame_offset_bytes=frame_offset,
        start_bytes=start,
        end_bytes=end,
        host_offset_bytes=start,
    )


TABLE = [[view(at)] for at in (0, NUM_BYTES, 0)] + [[view(at * NUM_BYTES)] for at in (2, 3)] + [[]]
DOUBLE = call(double, 0, (0,), (1,))
START_OFFLOAD = StartOffload(copy=moved(OFFLOAD, 0), input=1)
SHIFT = call(shift, 1, (1,), (2,))
WAIT_OFFLOAD = WaitCopy(number=OFFLOAD, dying=((0, NUM_BYTES),))
TOTAL = call(total, 2, (2,), (3,))
FORWARD = (DOUBLE, START_OFFLOAD, SHIFT, WAIT_OFFLOAD, TOTAL)

START_RELOAD = StartReload(copy=moved(RELOAD, 2 * NUM_BYTES), table=3, output=3, offload=OFFLOAD)
TIMES_B = call(multiply, 4, (1, 2), (4,))
WAIT_RELOAD = WaitCopy(number=RELOAD)
TIMES_A = call(multiply_outside, 5, (4, 3), (5,))
BACKWARD = (START_RELOAD, TIMES_B, WAIT_RELOAD, TIMES_A)

RELOAD_OVER_B = StartReload(copy=moved(RELOAD, NUM_BYTES), table=1, output=3, offload=OFFLOAD)
BACKWARD_OVER_B = (TIMES_B, RELOAD_OVER_B, WAIT_RELOAD, TIMES_A)
"""The same step, but ``a`` comes back where the saved ``b`` was."""


def step(forward: tuple = FORWARD, backward: tuple = BACKWARD, **options: Any) -> StepPlan:
    """The step of the picture, or one with other instructions."""
    return StepPlan(
        key=next(_keys),
        device=options.pop("device", CPU),
        arena_bytes=4 * NUM_BYTES,
        table=TABLE,
        forward=RunHalf(
            num_registers=5,
            constants=(),
            arguments=(0,),
            calls=forward,
            results=(3, 4),
            leased=(2,),
            handle=4,
        ),
        backward=RunHalf(
            num_registers=6,
            constants=(),
            arguments=(0, 1),
            calls=backward,
            results=(5,),
            leased=(2,),
            handle=0,
        ),
        **{"host_bytes": NUM_BYTES, **options},
    )


def with_run(call: RunCall, run: Callable) -> RunCall:
    """``one`` with another region."""
    return dataclasses.replace(call, run=run)


def values(seed: int, device: torch.device = CPU) -> torch.Tensor:
    return torch.randn(NUM, generator=torch.Generator().manual_seed(seed)).to(device)


def forward(plan: StepPlan, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and handle."""
    loss, handle = run_forward(plan, [x])
    return loss, handle


def backward(plan: StepPlan, handle: torch.Tensor, g: torch.Tensor, **more: bool) -> torch.Tensor:
    (gradient,) = run_backward(plan, [handle, g], **{"keep_graph": False, **more})
    return gradient


def gradient_of(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return g * (2 * x + 1) * (2 * x)


def is_right(plan: StepPlan, seed: int = 0) -> bool:
    """True when one whole step gives the loss and the gradient, bit for bit."""
    x, g = values(seed, plan.device), values(seed + 1, plan.device)
    loss, handle = forward(plan, x)
    gradient = backward(plan, handle, g)
    return torch.equal(loss, (2 * x + 1).sum()) and torch.equal(gradient, gradient_of(x, g))


def nothing_is_held(plan: StepPlan) -> bool:
    """True when no frame, slab or host frame of the device is leased."""
    arena = arena_of(plan.device)
    slabs = any(slab.leased for slab in arena._slabs)
    return plan.live == 0 and not slabs and not any(store.leased for store in arena.host.stores)
