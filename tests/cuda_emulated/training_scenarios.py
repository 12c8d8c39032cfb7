"""What users do with training state on the host: optimizer state, gradients, updates and weights.

As in ``scenarios``, whose ``STEPS`` come first in ``SCENARIOS``; those of ``captured_scenarios``
come next. All numbers are small integers and halves of them, so that every kernel of an update
gives the same.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

import torch
from memo_runtime.copies import CopyEngine, Ticket
from memo_runtime.instructions import CopyRange, StartReload, WaitCopy
from memo_runtime.run_step import RunHalf, StepPlan, run_backward, run_forward
from torch import nn

import memo_compile
from memo_compile.driver.layer_weights import place_on_host
from memo_compile.training_state import offloaded_optimizer, sizes, update
from memo_compile.training_state.traits import StateTraits, traits_of
from tests.cuda_emulated.captured_scenarios import SCENARIOS as CAPTURED
from tests.cuda_emulated.scenarios import (
    CUDA,
    LARGER,
    STEPS,
    Broken,
    Result,
    Scenario,
    new_memory,
    new_memory_where_frames_were,
    own_streams,
    plan_of,
    step_of,
)
from tests.steps import moving

ELEMENTS = (1024, 1024, 3 * 1024, moving.NUM)
"""Of the parameters: whole chunks, one that is updated in slices, and a step's weight."""
CHUNK_BYTES = 4096
MICROBATCHES = 5


@contextlib.contextmanager
def small_chunks(least_bytes: int = CHUNK_BYTES) -> Iterator[None]:
    """Updates in several chunks. The optimizer is tried on the CPU, whose kernels all compute."""

    def on_cpu(
        optimizer: torch.optim.Optimizer, group: dict[str, Any], dtype: torch.dtype, _: object
    ) -> StateTraits:
        return traits_of(optimizer, group, dtype, torch.device("cpu"))

    with (
        mock.patch.object(sizes, "LEAST_CHUNK_BYTES", least_bytes),
        mock.patch.object(offloaded_optimizer, "traits_of", on_cpu),
    ):
        yield


class Training:
    """Parameters on the device under an offloaded optimizer, and equal ones on the CPU."""

    def __init__(self, where: str, *, weights_on_host: bool = False) -> None:
        draw = torch.Generator().manual_seed(0)

        def whole(number: int) -> torch.Tensor:
            return torch.randint(-8, 9, (number,), generator=draw).float()

        self.plain = [whole(number) for number in ELEMENTS]
        self.parameters = [nn.Parameter(each.to(CUDA)) for each in self.plain]
        if weights_on_host:
            with torch.no_grad():
                place_on_host(self.parameters, CUDA, "pinned")
        made = [[whole(number) for number in ELEMENTS] for _ in range(MICROBATCHES)]
        self._gradients = iter([(each, [x.to(CUDA) for x in each]) for each in made])
        make = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5, foreach=False)
        self._twin = make(self.plain)
        self.optimizer = memo_compile.offload(make(self.parameters), update=where)

    def backward(self) -> None:
        """One more micro-batch."""
        gradients, on_device = next(self._gradients)
        pairs = zip(self.parameters, on_device, strict=True)
        torch.autograd.backward([(parameter * x).sum() for parameter, x in pairs])
        for plain, gradient in zip(self.plain, gradients, strict=True):
            plain.grad = gradient.clone() if plain.grad is None else plain.grad + gradient

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._twin.step()
        self._twin.zero_grad()

    def weights(self) -> Iterator[Result]:
        """As kernels of the current stream see them."""
        for parameter, plain in zip(self.parameters, self.plain, strict=True):
            yield parameter.detach().clone(), plain.clone()

    def state(self) -> Iterator[Result]:
        """As a checkpoint has it: the host reads it at once."""
        found, expected = self.optimizer.state_dict()["state"], self._twin.state_dict()["state"]
        for number, state in expected.items():
            yield found[number]["momentum_buffer"].clone(), state["momentum_buffer"].clone()


def _updates(where: str, **more: bool) -> Iterator[Result]:
    with small_chunks(), torch.cuda.stream(*own_streams(1)):
        training = Training(where, **more)
        for microbatches in (1, 2, 1):
            for _ in range(microbatches):
                training.backward()
            training.step()
        yield from training.weights()
        yield from training.state()


def updates_on_the_device() -> Iterator[Result]:
    yield from _updates("device")


def updates_on_the_host() -> Iterator[Result]:
    yield from _updates("host")


def updates_on_the_device_of_weights_on_the_host() -> Iterator[Result]:
    yield from _updates("device", weights_on_host=True)


def updates_on_the_host_of_weights_there() -> Iterator[Result]:
    yield from _updates("host", weights_on_host=True)


def updates_between_steps_of_another_stream() -> Iterator[Result]:
    """State comes to where the other stream's step is, and was."""
    first, second = own_streams()
    with small_chunks():
        with torch.cuda.stream(first):
            training = Training("device")
            training.backward()
        plan = plan_of()
        for _ in range(2):
            with torch.cuda.stream(first):
                training.step()
            with torch.cuda.stream(second):
                yield from step_of(plan)
            with torch.cuda.stream(first):
                training.backward()
        with torch.cuda.stream(first):
            training.step()
            yield from training.weights()
            del training


def frames_freed_behind_an_update() -> Iterator[Result]:
    """The frame is of the default stream, where new memory may lie where it was."""
    plan = plan_of(host_store="shm")
    plan = dataclasses.replace(plan, arena_bytes=LARGER * plan.arena_bytes)
    plan.reserve()
    with small_chunks(), torch.cuda.stream(*own_streams(1)):
        training = Training("device")
        for _ in range(2):
            training.backward()
            training.step()
    yield from new_memory_where_frames_were(plan)


def _broken_update(where: str) -> Iterator[Result]:
    """The optimizer raises while the next chunk is on its way; a step and a checkpoint follow."""
    with small_chunks(), torch.cuda.stream(*own_streams(1)):
        training = Training(where)
        training.backward()
        training.step()
        training.backward()
        breaks = mock.patch.object(update, "run_update", side_effect=[None, Broken])
        with breaks, contextlib.suppress(Broken):
            training.step()
        yield from step_of(plan_of())
        for parameter in training.parameters:
            yield parameter.detach().fill_(3), torch.tensor(3)


def an_update_on_the_device_that_breaks() -> Iterator[Result]:
    yield from _broken_update("device")


def an_update_on_the_host_that_breaks() -> Iterator[Result]:
    yield from _broken_update("host")


def a_gradient_whose_copy_is_interrupted() -> Iterator[Result]:
    """It is freed, and its memory used again."""
    begin = CopyEngine.begin

    def interrupted(engine: CopyEngine, ticket: Ticket) -> NoReturn:
        begin(engine, ticket)
        raise Broken

    with small_chunks(), torch.cuda.stream(*own_streams(1)):
        training = Training("host")
        with mock.patch.object(CopyEngine, "begin", interrupted), contextlib.suppress(Broken):
            training.backward()
        training.optimizer.zero_grad()
        for number in ELEMENTS * 2:
            yield new_memory(4 * number)
        del training


def _brought(number: int, frame_offset: int, table: int, output: int, weight: int) -> StartReload:
    copy = CopyRange(
        number=number,
        frame_offset_bytes=frame_offset,
        start_bytes=0,
        end_bytes=moving.NUM_BYTES,
        host_offset_bytes=0,
    )
    return StartReload(copy=copy, table=table, output=output, weight=weight)


def _weight_plan() -> StepPlan:
    """A step whose weight ``w`` is on the host; its loss is sum(2x * w).

    frame:    [0, n) w, then the product     [n, 2n) 2x, then 2g     [2n, 3n) 2x * w
              [3n, 4n) w again
    """
    n = moving.NUM_BYTES
    table = [[moving.view(at)] for at in (0, n, 2 * n, 0, 3 * n, n)] + [[]]
    forward = (
        _brought(0, 0, 0, 2, 1),
        moving.call(moving.double, 1, (0,), (3,)),
        WaitCopy(number=0),
        moving.call(moving.multiply, 2, (3, 2), (4,)),
        moving.call(moving.total, 3, (4,), (5,)),
    )
    backward = (
        _brought(1, 3 * n, 4, 3, 2),
        moving.call(moving.double, 5, (1,), (4,)),
        WaitCopy(number=1),
        moving.call(moving.multiply_outside, 6, (4, 3), (5,)),
    )
    halves = {
        name: RunHalf(
            num_registers=7,
            constants=(),
            arguments=arguments,
            calls=calls,
            results=results,
            leased=(),
            handle=handle,
        )
        for name, arguments, calls, results, handle in (
            ("forward", (0, 1), forward, (5, 6), 6),
            ("backward", (0, 1, 2), backward, (5,), 0),
        )
    }
    plan = plan_of(host_bytes=0)
    return StepPlan(
        key=plan.key, device=CUDA, arena_bytes=4 * n, table=table, host_store="pinned", **halves
    )


def _steps_with_a_weight(where: str) -> Iterator[Result]:
    """The weight is updated between them."""
    plan = _weight_plan()
    with small_chunks(), torch.cuda.stream(*own_streams(1)):
        training = Training(where, weights_on_host=True)
        weight, plain = training.parameters[-1], training.plain[-1]
        given = [(moving.values(seed), moving.values(seed + 1)) for seed in range(3)]
        for (x, g), (own_x, own_g) in [(pair, [each.to(CUDA) for each in pair]) for pair in given]:
            loss, handle = run_forward(plan, [own_x, weight])
            (gradient,) = run_backward(plan, [handle, own_g, weight], keep_graph=False)
            yield loss, (2 * x * plain).sum()
            yield gradient, 2 * g * plain
            training.backward()
            training.step()
        yield from training.weights()


def steps_whose_weight_is_updated_on_the_device() -> Iterator[Result]:
    yield from _steps_with_a_weight("device")


def steps_whose_weight_is_updated_on_the_host() -> Iterator[Result]:
    yield from _steps_with_a_weight("host")


SCENARIOS: tuple[Scenario, ...] = (
    *STEPS,
    *CAPTURED,
    updates_on_the_device,
    updates_on_the_host,
    updates_on_the_device_of_weights_on_the_host,
    updates_on_the_host_of_weights_there,
    updates_between_steps_of_another_stream,
    frames_freed_behind_an_update,
    an_update_on_the_device_that_breaks,
    an_update_on_the_host_that_breaks,
    a_gradient_whose_copy_is_interrupted,
    steps_whose_weight_is_updated_on_the_device,
    steps_whose_weight_is_updated_on_the_host,
)
