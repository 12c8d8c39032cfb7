"""Random orders of copies and waits: whatever waits before it reads computes the right numbers."""

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memo_runtime.current import current
from memo_runtime.instructions import StartOffload, StartReload, WaitCopy
from memo_runtime.run_step import RunHalf, StepPlan, run_backward, run_forward

from tests.steps.moving import (
    CPU,
    NUM_BYTES,
    SCHEDULES,
    call,
    moved,
    nothing_is_held,
    values,
    view,
)


@st.composite
def chains(draw):
    """Per value of a chain: when its offload is waited for, and how early it comes back."""
    num = draw(st.integers(1, 5))
    waits = [draw(st.integers(index, 2 * num)) for index in range(num)]
    returns = [draw(st.integers(0, num - 1 - index)) for index in range(num)]
    return waits, returns


@settings(max_examples=25, deadline=None)
@given(chain=chains(), schedule=st.sampled_from(SCHEDULES), throttled=st.booleans())
def test_any_order_that_waits_before_it_reads_is_right(chain, schedule, throttled):
    """Value i = x + i + 1 is offloaded when made and comes back at any time before its reader."""
    waits, returns = chain
    num = len(waits)
    make, read, table = _chain_regions(num)
    fwd, bwd = [], []
    for at in range(num):
        fwd += [make[at], StartOffload(copy=_range(at, at, at), input=1 + at)]
        fwd += [WaitCopy(number=i, dying=((i * NUM_BYTES, NUM_BYTES),)) for i in _at(waits, at)]
    for at in range(num):
        bwd += [WaitCopy(number=i) for i in _at(waits, num + at)]
        for index in _at([num - 1 - issued - back for issued, back in enumerate(returns)], at):
            bwd += [WaitCopy(number=index)]  # at the latest now; a second wait does nothing
            bwd += [_reload(index, num)]
        bwd += [WaitCopy(number=num + num - 1 - at), read[at]]
    plan = _chain_plan(num, fwd, bwd, table, schedule, 1e6 if throttled else None)
    x = values(3)
    (handle,) = run_forward(plan, [x])
    results = run_backward(plan, [handle], keep_graph=False)
    assert all(
        torch.equal(result, x + (index + 1)) for index, result in enumerate(reversed(results))
    )
    assert nothing_is_held(plan)


def _at(positions, at):
    return [index for index, position in enumerate(positions) if position == at]


def _range(number, value, frame):
    return dataclasses.replace(
        moved(number, frame * NUM_BYTES), host_offset_bytes=value * NUM_BYTES
    )


def _reload(index, num):
    return StartReload(
        copy=_range(num + index, index, num + index),
        table=num + index,
        output=1 + index,
        offload=index,
    )


def _chain_regions(num):
    """Calls that make the values, calls that read them backwards, the views of both."""

    def make(index):
        def run(args):
            torch.add(args[0], index + 1, out=current.views[0])
            return [current.views[0]]

        return run

    table = [[view(at * NUM_BYTES)] for at in range(2 * num)] + [[]]
    whole = {"resident_bytes": 2 * num * NUM_BYTES}
    makes = [call(make(i), i, (0,), (1 + i,), **whole) for i in range(num)]
    reads = [
        call(lambda args: [args[0].clone()], 2 * num, (num - at,), (1 + num + at,), **whole)
        for at in range(num)
    ]
    return makes, reads, table


def _chain_plan(num, fwd, bwd, table, schedule, bytes_per_s):
    return StepPlan(
        key=10_000 + num,
        device=CPU,
        arena_bytes=2 * num * NUM_BYTES,
        table=table,
        forward=RunHalf(
            num_registers=2 + num,
            constants=(),
            arguments=(0,),
            calls=tuple(fwd),
            results=(1 + num,),
            leased=(),
            handle=1 + num,
        ),
        backward=RunHalf(
            num_registers=1 + 2 * num,
            constants=(),
            arguments=(0,),
            calls=tuple(bwd),
            results=tuple(range(1 + num, 1 + 2 * num)),
            leased=(),
            handle=0,
        ),
        host_bytes=num * NUM_BYTES,
        schedule=schedule,
        poison=True,
        throttle_bytes_per_s=bytes_per_s,
    )
