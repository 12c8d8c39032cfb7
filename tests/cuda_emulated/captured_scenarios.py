"""What users do with steps whose halves are CUDA graphs, as in ``scenarios``.

Each scenario also requires which halves were replayed: one that is not captured fails.
"""

import contextlib
import math
from collections.abc import Iterator

import torch
from memo_runtime.arena import arena_of
from memo_runtime.cuda_graphs import GraphUse
from memo_runtime.instructions import RunCall
from memo_runtime.run_step import StepPlan

from memo_compile.torch_private.storages import end_failed_capture
from tests.cuda_emulated.device_calls import counts
from tests.cuda_emulated.scenarios import (
    CUDA,
    Result,
    Scenario,
    new_memory_where_frames_were,
    own_streams,
    plan_of,
    step_of,
    two_steps_of,
)
from tests.steps import moving


def graphed(**options: object) -> StepPlan:
    """A plan that uses CUDA graphs, with what it was told in ``plan.graphs.say.__self__``."""
    use = GraphUse(most_bytes=math.inf, say=[].append, clean_up=end_failed_capture)
    return plan_of(graphs=use, **options)


def said(plan: StepPlan) -> list[str]:
    return plan.graphs.say.__self__


def require_captured(plan: StepPlan, *, forward: bool = True, backward: bool = True) -> None:
    """Each half is captured, or refused, as is said."""
    slabs = [slab for slab in arena_of(CUDA)._slabs if (plan.key, False) in slab.graphs]
    for slab in slabs:
        for is_backward, wanted in ((False, forward), (True, backward)):
            state = slab.graphs[plan.key, is_backward]
            assert (state.graph is not None) == wanted, said(plan)
    assert slabs, "the step has run"


@contextlib.contextmanager
def replayed(halves: int = 2) -> Iterator[None]:
    """The block launches so many graphs, and no other work than copies of inputs and results."""
    before = counts().graph_launches
    yield
    assert counts().graph_launches == before + halves


def steps(plan: StepPlan, streams: list, number: int = 5) -> Iterator[Result]:
    """Steps on one stream after another. Each batch stays alive, so that each lies elsewhere."""
    for seed in range(number):
        with torch.cuda.stream(streams[seed % len(streams)]):
            yield from step_of(plan, 2 * seed)


def _captured(plan: StepPlan, num_streams: int = 1) -> Iterator[Result]:
    """Steps, the later of them by two launches each, and the order that is left for others."""
    streams = own_streams(num_streams)
    results = list(steps(plan, streams))
    require_captured(plan)
    with replayed():
        results += steps(plan, streams, 1)
    yield from results
    with torch.cuda.stream(*own_streams(1)):
        yield from step_of(plan_of(host_store="shm"))  # in the same frame


def captured_on_one_stream() -> Iterator[Result]:
    yield from _captured(graphed())


def captured_on_two_streams() -> Iterator[Result]:
    yield from _captured(graphed(), 2)


def captured_early() -> Iterator[Result]:
    yield from _captured(graphed(schedule="early"), 2)


def captured_late() -> Iterator[Result]:
    yield from _captured(graphed(schedule="late"), 2)


def captured_and_poisoned() -> Iterator[Result]:
    yield from _captured(graphed(poison=True), 2)


TOTAL_BEHIND = moving.call(moving.total, 4, (2,), (3,))
"""The loss, where nothing has been: what is copied to the host meanwhile stays."""
COPY_ACROSS = {
    "forward": (moving.DOUBLE, moving.START_OFFLOAD, moving.SHIFT, TOTAL_BEHIND),
    "backward": (moving.WAIT_OFFLOAD, *moving.BACKWARD),
}
"""The backward waits for a copy that the forward begins."""


def captured_with_a_copy_across_the_halves() -> Iterator[Result]:
    yield from _captured(graphed(**COPY_ACROSS), 2)


def shift_on_the_host(args: list) -> list:
    """A host that waits: no capture."""
    args[0][0].item()
    return moving.shift(args)


def a_forward_that_is_not_captured() -> Iterator[Result]:
    """The backward is, and waits for the forward's copy, also where it is replayed."""
    forward = list(COPY_ACROSS["forward"])
    forward[2] = moving.with_run(moving.SHIFT, shift_on_the_host)
    plan = graphed(**COPY_ACROSS | {"forward": tuple(forward)})
    yield from steps(plan, own_streams())
    require_captured(plan, forward=False)
    with replayed(1):
        yield from steps(plan, own_streams(1), 1)


def a_backward_that_is_not_captured() -> Iterator[Result]:
    """It runs behind a forward that was replayed."""

    def waits(args: list) -> list:
        args[0][0].item()
        return moving.multiply(args)

    backward = tuple(
        moving.with_run(call, waits) if call is moving.TIMES_B else call
        for call in COPY_ACROSS["backward"]
    )
    plan = graphed(**COPY_ACROSS | {"backward": backward})
    yield from steps(plan, own_streams())
    require_captured(plan, backward=False)
    with replayed(1):
        yield from steps(plan, own_streams(1), 1)


def captured_and_retained() -> Iterator[Result]:
    """The frame is put back between two replays of a backward."""
    plan = graphed()
    with torch.cuda.stream(*own_streams(1)):
        for seed in range(5):
            x, g = moving.values(seed), moving.values(seed + 1)
            loss, handle = moving.forward(plan, x.to(CUDA))
            for keep in (True, False):
                found = moving.backward(plan, handle, g.to(CUDA), keep_graph=keep)
                yield found, moving.gradient_of(x, g)
            yield loss, (2 * x + 1).sum()
    require_captured(plan)


def captured_and_dropped() -> Iterator[Result]:
    """Forwards without a backward, on two streams: the next step has their frame."""
    plan = graphed(**COPY_ACROSS)
    yield from steps(plan, own_streams())
    require_captured(plan)
    for stream in own_streams(4):
        with torch.cuda.stream(stream), replayed(1):
            moving.forward(plan, moving.values(3).to(CUDA))
    yield from steps(plan, own_streams(), 2)


def _drawing(call: RunCall) -> RunCall:
    """``call``, which also draws random numbers: torch keeps one seed for all graphs."""

    def draws(args: list) -> list:
        torch.empty(8, device=CUDA).uniform_()
        return call.run(args)

    return moving.with_run(call, draws)


def two_live_steps_captured() -> Iterator[Result]:
    """Each has a frame, and graphs of its own."""
    forward = (_drawing(moving.DOUBLE), *moving.FORWARD[1:])
    backward = (*moving.BACKWARD[:-1], _drawing(moving.TIMES_A))
    plan = graphed(forward=forward, backward=backward, max_inflight=2)
    for repeat in range(5):
        yield from two_steps_of(plan, 7 * repeat)
    require_captured(plan)


def frames_and_graphs_freed_behind_a_replay() -> Iterator[Result]:
    """New memory may lie where the frame was, and where the graphs' memory was."""
    plan = graphed()
    plan.reserve()
    yield from steps(plan, own_streams(1))
    require_captured(plan)
    yield from new_memory_where_frames_were(plan)


def inputs_overwritten_behind_a_replay() -> Iterator[Result]:
    """The host goes on at once: a batch is freed, and another one comes to its place."""
    plan = graphed()
    with torch.cuda.stream(*own_streams(1)):
        for seed in range(6):
            x, g = moving.values(seed), moving.values(seed + 1)
            batch = x.to(CUDA)
            loss, handle = moving.forward(plan, batch)
            batch.zero_()
            gradient = moving.backward(plan, handle, g.to(CUDA))
            yield loss + 0, (2 * x + 1).sum()
            yield gradient + 0, moving.gradient_of(x, g)
            loss.zero_()
            gradient.zero_()
    require_captured(plan)


SCENARIOS: tuple[Scenario, ...] = (
    captured_on_one_stream,
    captured_on_two_streams,
    captured_early,
    captured_late,
    captured_and_poisoned,
    captured_with_a_copy_across_the_halves,
    a_forward_that_is_not_captured,
    a_backward_that_is_not_captured,
    captured_and_retained,
    captured_and_dropped,
    two_live_steps_captured,
    frames_and_graphs_freed_behind_a_replay,
    inputs_overwritten_behind_a_replay,
)
