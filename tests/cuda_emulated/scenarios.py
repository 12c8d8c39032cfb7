"""What users do with a step whose activation goes to the host and back, on their own streams.

Each scenario queues its work, lets go of memory where a user would, and returns results with what
they must be. Nothing in it waits for the device but what the runtime waits for by itself.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
from memo_runtime.arena import arena_of
from memo_runtime.run_step import StepPlan

from tests.cuda_emulated.device_calls import new_stream, run_at_once, run_late, start_log, stop_log
from tests.cuda_emulated.order import races
from tests.steps import moving

CUDA = torch.device("cuda")
LARGER = 4

Result = tuple[torch.Tensor, torch.Tensor]
"""What the device made, what it must be."""


Scenario = Callable[[], Iterator[Result]]


class Broken(Exception):
    """What a user's code raises in the middle of a step."""


def plan_of(**options: object) -> StepPlan:
    return moving.step(**{"device": CUDA, "host_store": "pinned", **options})


def step_of(plan: StepPlan, seed: int = 0) -> Iterator[Result]:
    """One whole step on the current stream."""
    x, g = moving.values(seed), moving.values(seed + 1)
    loss, handle = moving.forward(plan, x.to(CUDA))
    gradient = moving.backward(plan, handle, g.to(CUDA))
    yield loss, (2 * x + 1).sum()
    yield gradient, moving.gradient_of(x, g)


@functools.cache
def _own() -> Iterator[torch.cuda.ExternalStream]:
    """Streams that are never those of copies, as torch's own could be: one stream is an order."""
    return itertools.cycle([new_stream() for _ in range(16)])


def own_streams(number: int = 2) -> list[torch.cuda.ExternalStream]:
    return list(itertools.islice(_own(), number))


def one_stream() -> Iterator[Result]:
    plan = plan_of()
    for seed in range(2):
        yield from step_of(plan, seed)


def two_streams() -> Iterator[Result]:
    plan = plan_of()
    for stream in own_streams():
        with torch.cuda.stream(stream):
            yield from step_of(plan)


def two_streams_with_other_frames() -> Iterator[Result]:
    """The second step's frames are larger: those of the first are freed, or grow."""
    small = plan_of()
    larger = dataclasses.replace(
        plan_of(), arena_bytes=LARGER * small.arena_bytes, host_bytes=LARGER * small.host_bytes
    )
    for plan, stream in zip((small, larger), own_streams(), strict=True):
        with torch.cuda.stream(stream):
            yield from step_of(plan)


def frames_freed_behind_the_last_step() -> Iterator[Result]:
    """Frames of the default stream are used on another; new memory may lie where they were.

    Host memory is pageable in these: the end of pinned memory would wait for the device.
    """
    plan = plan_of(host_store="shm")
    plan.reserve()
    with torch.cuda.stream(own_streams()[0]):
        yield from step_of(plan)
    yield from new_memory_where_frames_were(plan)


def host_frames_freed_behind_the_last_step() -> Iterator[Result]:
    plan = plan_of()
    with torch.cuda.stream(own_streams()[0]):
        yield from step_of(plan)
    _forget(plan)


def new_memory_where_frames_were(plan: StepPlan) -> Iterator[Result]:
    """On the current stream; it is written at once."""
    _forget(plan)
    for _ in range(LARGER):
        yield new_memory(plan.arena_bytes)


def new_memory(size_bytes: int) -> Result:
    """What torch's allocator gives is written at once."""
    made = torch.full((size_bytes,), 3, dtype=torch.uint8, device=CUDA)
    return made, torch.tensor(3)


def reserved_on_another_stream_and_freed() -> Iterator[Result]:
    plan = plan_of(poison=True, host_store="shm")
    plan.reserve()
    with torch.cuda.stream(own_streams()[0]):
        plan.reserve()
    yield from new_memory_where_frames_were(plan)


def a_step_then_a_reserve_that_poisons() -> Iterator[Result]:
    first, second = own_streams()
    with torch.cuda.stream(first):
        yield from step_of(plan_of())
    with torch.cuda.stream(second):
        plan_of(poison=True, host_store="shm").reserve()


def _whole(**options: object) -> None:
    list(step_of(plan_of(**options)))


def _dropped(**options: object) -> None:
    """A forward that nobody goes on with; its copy is still to be waited for."""
    forward = (moving.DOUBLE, moving.START_OFFLOAD, moving.SHIFT)
    moving.forward(plan_of(forward=forward, **options), moving.values(3).to(CUDA))


def _broken(**options: object) -> None:
    """A forward raises while its copy runs, behind work that it had launched."""

    def breaks(args: list) -> NoReturn:
        moving.shift(args)
        raise Broken

    forward = tuple(
        moving.with_run(call, breaks) if call is moving.SHIFT else call for call in moving.FORWARD
    )
    with contextlib.suppress(Broken):
        moving.forward(plan_of(forward=forward, **options), moving.values(3).to(CUDA))


def _reserved(**options: object) -> None:
    plan_of(poison=True, **options).reserve()


ENDS = (_whole, _dropped, _broken, _reserved)
"""Ways in which a hold on frames ends."""


def frames_shared_after_each_end() -> Iterator[Result]:
    """The next step works on the same frame, and has a host frame of another kind."""
    for end in ENDS:
        first, second = own_streams()
        with torch.cuda.stream(first):
            end()
        with torch.cuda.stream(second):
            yield from step_of(plan_of(host_store="shm"))
        torch.cuda.synchronize()
        _forget()


def host_frames_shared_after_each_end() -> Iterator[Result]:
    """The next step has a frame of its own, because another step holds the last one's."""
    for end in ENDS:
        first, second, third = own_streams(3)
        with torch.cuda.stream(first):
            end()
        with torch.cuda.stream(third):
            kept = plan_of(forward=(moving.DOUBLE, moving.SHIFT, moving.TOTAL), host_bytes=0)
            held = moving.forward(kept, moving.values(3).to(CUDA))
        with torch.cuda.stream(second):
            yield from step_of(plan_of())
        del held
        torch.cuda.synchronize()
        _forget()


def the_same_stream_after_each_end() -> Iterator[Result]:
    for end in ENDS:
        with torch.cuda.stream(own_streams()[0]):
            end()
            yield from step_of(plan_of())


def new_memory_after_each_end() -> Iterator[Result]:
    """Frames were made on the default stream, which makes new memory where they were."""
    for end in ENDS:
        plan = plan_of(host_store="shm")
        plan.reserve()
        with torch.cuda.stream(own_streams()[0]):
            end(host_store="shm")
        _forget()
        yield from new_memory_where_frames_were(plan)


def an_early_exception() -> Iterator[Result]:
    first, second = own_streams()
    with torch.cuda.stream(first):
        _broken(schedule="early")
    with torch.cuda.stream(second):
        yield from step_of(plan_of(schedule="early"))


def a_graph_that_is_retained() -> Iterator[Result]:
    plan = plan_of()
    x, g = moving.values(0), moving.values(1)
    with torch.cuda.stream(own_streams()[0]):
        _, handle = moving.forward(plan, x.to(CUDA))
        for keep in (True, False):
            found = moving.backward(plan, handle, g.to(CUDA), keep_graph=keep)
            yield found, moving.gradient_of(x, g)


def a_graph_that_is_retained_and_breaks() -> Iterator[Result]:
    """The first backward raises while a reload is on its way; the second one is whole."""
    tries = []

    def breaks_once(args: list) -> list:
        tries.append(args)
        if len(tries) == 1:
            raise Broken
        return moving.multiply(args)

    backward = tuple(
        moving.with_run(call, breaks_once) if call is moving.TIMES_B else call
        for call in moving.BACKWARD
    )
    plan = plan_of(backward=backward)
    x, g = moving.values(0), moving.values(1)
    with torch.cuda.stream(own_streams()[0]):
        _, handle = moving.forward(plan, x.to(CUDA))
        with contextlib.suppress(Broken):
            moving.backward(plan, handle, g.to(CUDA), keep_graph=True)
        yield moving.backward(plan, handle, g.to(CUDA)), moving.gradient_of(x, g)


def beyond_the_planned_steps() -> Iterator[Result]:
    """The second forward before a backward gets frames in ordinary memory, which go at its end."""
    plan = plan_of()
    held = []
    for seed, stream in enumerate(own_streams()):
        with torch.cuda.stream(stream):
            x, g = moving.values(seed), moving.values(seed + 5)
            _, handle = moving.forward(plan, x.to(CUDA))
            held.append((stream, handle, g, moving.gradient_of(x, g)))
    for stream, handle, g, wanted in reversed(held):
        with torch.cuda.stream(stream):
            yield moving.backward(plan, handle, g.to(CUDA)), wanted
            yield new_memory(plan.arena_bytes)


def early() -> Iterator[Result]:
    yield from _on_streams(schedule="early")


def late() -> Iterator[Result]:
    yield from _on_streams(schedule="late")


def serial() -> Iterator[Result]:
    yield from _on_streams(schedule="serial")


def poisoned() -> Iterator[Result]:
    yield from _on_streams(poison=True)


def stalls_measured() -> Iterator[Result]:
    yield from _on_streams(measure_stall=True)


def _on_streams(**options: object) -> Iterator[Result]:
    plan = plan_of(**options)
    for stream in own_streams():
        with torch.cuda.stream(stream):
            yield from step_of(plan)


def two_live_steps() -> Iterator[Result]:
    yield from two_steps_of(plan_of(max_inflight=2))


def two_steps_of(plan: StepPlan, first_seed: int = 0) -> Iterator[Result]:
    """Two forwards, each with its own frames, then their backwards, the first one first."""
    held = []
    for seed, stream in enumerate(own_streams(), start=first_seed):
        with torch.cuda.stream(stream):
            x, g = moving.values(seed), moving.values(seed + 5)
            _, handle = moving.forward(plan, x.to(CUDA))
            held.append((stream, handle, g, moving.gradient_of(x, g)))
    for stream, handle, g, wanted in held:
        with torch.cuda.stream(stream):
            yield moving.backward(plan, handle, g.to(CUDA)), wanted


STEPS: tuple[Scenario, ...] = (
    one_stream,
    two_streams,
    two_streams_with_other_frames,
    frames_freed_behind_the_last_step,
    host_frames_freed_behind_the_last_step,
    reserved_on_another_stream_and_freed,
    a_step_then_a_reserve_that_poisons,
    the_same_stream_after_each_end,
    frames_shared_after_each_end,
    host_frames_shared_after_each_end,
    new_memory_after_each_end,
    an_early_exception,
    a_graph_that_is_retained,
    a_graph_that_is_retained_and_breaks,
    beyond_the_planned_steps,
    early,
    late,
    serial,
    poisoned,
    stalls_measured,
    two_live_steps,
)


def failure(scenario: Scenario, *, chance: float | None, seed: int = 0) -> str:
    """What goes wrong: a race, a wrong number, an exception; "" if nothing does.

    Work runs at once where ``chance`` is None, else late, see ``device_calls.run_late``. Memory
    that earlier scenarios left free goes first: a scenario then gets again what it has freed.
    """
    run_at_once()
    torch.cuda.empty_cache()
    if chance is not None:
        run_late(chance, seed)
    start_log()
    try:
        results = list(scenario())
        torch.cuda.synchronize()
    except Exception as error:
        stop_log()
        return f"{type(error).__name__}: {error}"
    finally:
        _forget()
    found = races(stop_log())
    run_at_once()
    for number, (result, wanted) in enumerate(results):
        if not torch.equal(result.cpu(), wanted.expand(result.shape).to(result.dtype)):
            found.append(f"result {number} is wrong")
    return "; ".join(found)


def _forget(plan: StepPlan | None = None) -> None:
    """Nothing needs the frames of ``plan`` any more, or of any."""
    arena = arena_of(CUDA)
    keys = {key for slab in arena._slabs for key in slab._tables}
    keys |= {key for store in arena.host.stores for key in store.plans}
    for key in keys or {0} if plan is None else {plan.key}:  # also slabs that no plan has used
        arena.forget(key)
