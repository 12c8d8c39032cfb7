"""Weights of layers that may lie on the host: which they are, and how they get there.

A weight stays the program's parameter, a tensor of its device with the host's memory
(``memo_runtime.host_tensors``): its state dict, its optimizer and steps without a plan use it as
before, over the link. A planned step copies it to the device before each pass of its layer.
"""

from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from memo_runtime.host_store import HostStore, end_to_end
from memo_runtime.host_tensors import host_tensor, place_of

from memo_compile.config import MemoConfig
from memo_compile.driver.stages import CutStep
from memo_compile.passes.cut import CutCall
from memo_compile.reporting import state
from memo_compile.step.problem import CallKind, Layout, Problem, StepCall, Storage
from memo_compile.torch_private import fx_graphs, storages
from memo_compile.units import format_bytes

LEAST_SHARE = 0.01
"""Weights with less than this share of their step's largest stay on the device: norms, biases,
small adapters. A copy costs its latency, and they take next to nothing."""

LEAST_BYTES = 1024
"""And so do those of fewer bytes."""


def weights_of_layers(step: CutStep, problem: Problem) -> dict[str, int]:
    """Returns the bytes of the weights that only repeating layers read, by the value's name.

    What a collective reads is a shard, and stays on the device.
    """
    layouts = {**problem.halves[0].given(), **problem.halves[1].given()}
    sizes: dict[str, int] = {}
    for value in _parameters(step):
        layout = layouts.get(value)
        if layout is not None and _is_dense(layout):
            sizes[value] = layout.num_elements * layout.item_bytes
    for call in problem.calls:
        for value in _read_elsewhere(call, problem):
            sizes.pop(value, None)
    least = max(LEAST_BYTES, int(LEAST_SHARE * max(sizes.values(), default=0)))
    return {value: size for value, size in sizes.items() if size >= least}


def on_host_already(step: CutStep) -> frozenset[str]:
    """Returns the step's parameters that lie on the host."""
    parameters = step.facts.parameters().items()
    return frozenset(name for name, parameter in parameters if place_of(parameter) is not None)


def move_back_to_host(
    step: CutStep, names: Iterable[str], config: MemoConfig, inputs: Sequence[Any]
) -> None:
    """Moves those of ``names`` that the program has brought to the device; ``inputs`` of a call.

    For example by ``model.cpu()`` and back. One whose memory another tensor shows by now stays.
    Raises HostStoreError: the memory was refused.
    """
    parameters = step.facts.parameters(inputs)
    brought = [name for name in names if name in parameters and place_of(parameters[name]) is None]
    alone = [name for name in brought if storages.is_plain_alone(parameters[name])]
    move_to_host(step, alone, config, inputs)
    if len(alone) < len(brought):
        size = format_bytes(sum(parameters[name].nbytes for name in {*brought} - {*alone}))
        state.warn_once(
            f"{size} of weights that lay on the host are on the device again, which no plan "
            "counts: other tensors show their memory"
        )


def move_to_host(
    step: CutStep, names: Iterable[str], config: MemoConfig, inputs: Sequence[Any] | None = None
) -> None:
    """Moves the parameters called ``names`` to host memory of their own, if they are not there.

    ``inputs`` as of ``GraphFacts.parameters``. Raises HostStoreError: the memory was refused; then
    none has moved.
    """
    parameters = step.facts.parameters(inputs)
    moving = [parameters[name] for name in names if place_of(parameters[name]) is None]
    if not moving:
        return
    with fx_graphs.real_tensors(), torch.no_grad():
        place_on_host(moving, step.facts.device, config.kind_for_kernels(step.facts.device.type))
    size = format_bytes(sum(parameter.nbytes for parameter in moving))
    state.add_note(f"{len(moving)} weights of layers lie on the host, {size}")


def place_on_host(
    parameters: Sequence[torch.nn.Parameter], device: torch.device, kind: str
) -> None:
    """Makes ``parameters`` tensors of ``device`` in one block of host memory of that ``kind``.

    Raises HostStoreError: the memory was refused; then none has moved.
    """
    offsets, size_bytes = end_to_end([each.nbytes for each in parameters])
    store = HostStore(kind, size_bytes, device)
    for parameter, offset_bytes in zip(parameters, offsets, strict=True):
        there = host_tensor(store, offset_bytes, parameter, device=device)
        there.copy_(parameter)
        parameter.data = there


def _parameters(step: CutStep) -> set[str]:
    """Returns the values that are parameters which may move, in copies of traced layers too.

    A copy's are inputs of the same regions at the same positions (``ports``). One whose memory
    another tensor shows stays: that would not see what is written later.
    """
    parameters = step.facts.parameters()
    stays = {
        name
        for name, parameter in parameters.items()
        if place_of(parameter) is None and not storages.is_plain_alone(parameter)
    }
    calls = [*step.forward.calls, *step.backward.calls]
    ports = {(call.region, at) for call in calls for at in _positions(call, parameters.keys())}
    return {value for call in calls for value in _at(call, ports)} - stays


def _positions(call: CutCall, values: Set[str]) -> Sequence[int]:
    return [at for at, value in enumerate(call.inputs) if value in values]


def _at(call: CutCall, ports: set[tuple[str, int]]) -> Sequence[str]:
    return [value for at, value in enumerate(call.inputs) if (call.region, at) in ports]


def _is_dense(layout: Layout) -> bool:
    return layout.offset == 0 and layout.end == layout.num_elements > 0


def _read_elsewhere(call: StepCall, problem: Problem) -> Iterable[str]:
    """Yields what ``call`` reads or writes otherwise than a layer reads a weight."""
    if call.layer_class is None or call.kind is CallKind.ISSUE:
        yield from call.inputs
    yield from (target.value for target in call.into)
    yield from call.outputs
    region = problem.regions[call.region]
    yield from (call.inputs[at] for at in region.overwrites)
    for output in region.outputs:  # a view that lives longer than the call
        if output.storage is Storage.INPUT and output.index is not None:
            yield call.inputs[output.index]
