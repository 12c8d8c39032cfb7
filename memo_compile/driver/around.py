"""What belongs to a model beside the blocks of a group: embeddings, a head, their gradients."""

import gc
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from memo_compile.config import MemoConfig
from memo_compile.driver.facts import OptimizerState, allocated_bytes, staying
from memo_compile.step.problem import FixedBytes
from memo_compile.torch_private import autograd, dynamo
from memo_compile.torch_private.distributed import ShardedParameter, sharded_parameters


def parameters_around(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Returns the other parameters of the largest module that has all of ``parameters``.

    Nothing leads from a block to the model around it, so that all modules of the process are looked
    at: that takes a tenth of a second or two, once for each plan of a group.
    """
    ids = {id(parameter) for parameter in parameters}
    largest: list[nn.Parameter] = []
    for _, of_module in _modules():
        if len(of_module) > len(largest) and ids <= {id(parameter) for parameter in of_module}:
            largest = of_module
    return [parameter for parameter in largest if id(parameter) not in ids]


def compiled_alike(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Returns the parameters of each block that is compiled like the one with ``parameters``.

    Those are modules of one class that are compiled one by one, with parameters of the same shapes.
    """
    ids = {id(parameter) for parameter in parameters}
    around = [pair for pair in _modules() if ids and ids <= {id(each) for each in pair[1]}]
    blocks = [pair for pair in around if dynamo.is_compiled_alone(pair[0])]
    if not blocks:
        return []
    block, block_parameters = min(blocks, key=lambda pair: len(pair[1]))
    model, _ = max(around, key=lambda pair: len(pair[1]))
    alike = (module for module in model.modules() if type(module) is type(block))
    compiled = [list(module.parameters()) for module in alike if dynamo.is_compiled_alone(module)]
    shapes = [parameter.shape for parameter in block_parameters]
    return [of_module for of_module in compiled if [each.shape for each in of_module] == shapes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedBytes:
    """What ``fully_shard()`` holds of a model on this rank."""

    held: int
    """This rank's shards of all parameters, and parameters that are not sharded."""
    trained: Sequence[nn.Parameter]
    """Those of them that get gradients: what an optimizer updates."""
    gathered: int
    """Parameters beside the blocks of the group, whole: they may be gathered all the time."""


def sharded_around(parameters: Sequence[nn.Parameter]) -> ShardedBytes | None:
    """Measures the sharded model that gathers ``parameters``; None: they are of no such model.

    Only some of them need to be gathered now.
    """
    if not has_fsdp_modules():
        return None
    ids = {id(parameter) for parameter in parameters}
    around = [pair for pair in _modules() if ids & {id(parameter) for parameter in pair[1]}]
    if not around:
        return None
    model, all_parameters = max(around, key=lambda pair: len(pair[1]))
    sharded: dict[int, ShardedParameter] = {}
    """Id of a shard, or of the parameter as it is gathered -> the sharded parameter."""
    for each in itertools.chain.from_iterable(
        sharded_parameters(module) for module in model.modules() if _is_sharded(module)
    ):
        sharded |= {id(form): each for form in (each.shard, each.gathered) if form is not None}
    if sharded.keys().isdisjoint(map(id, all_parameters)):
        return None

    def held(parameter: nn.Parameter) -> nn.Parameter:
        return sharded[id(parameter)].shard if id(parameter) in sharded else parameter

    def gathered_bytes(several: Sequence[nn.Parameter]) -> int:
        return sum(sharded[id(each)].gathered_bytes for each in several if id(each) in sharded)

    return ShardedBytes(
        held=sum(local_bytes(held(each)) for each in all_parameters),
        trained=[held(each) for each in all_parameters if each.requires_grad],
        gathered=max(0, gathered_bytes(all_parameters) - gathered_bytes(parameters)),
    )


def fixed_beside(
    parameters: Sequence[nn.Parameter], config: MemoConfig, gathered: int | None = None
) -> FixedBytes:
    """Bytes that the members of a group and the model around them hold beside the group's frame.

    ``parameters`` are the members'. Gradients of others count from the beginning on: a group does
    not see when they are made. Of a sharded model ``gathered`` bytes of ``parameters`` were there
    at once; None: all may be. Inputs, buffers and libraries are not counted.
    """
    of_members = apart(parameters)
    new_bytes = sum(map(local_bytes, staying([each for each in of_members if each.requires_grad])))
    sharded = sharded_around(parameters)
    of_model = apart([*parameters, *parameters_around(parameters)])
    trained = [parameter for parameter in of_model if parameter.requires_grad]
    held_bytes = sum(map(local_bytes, of_model))
    if sharded is not None:  # what its modules show changes as parameters are gathered and freed
        all_gathered = sum(map(local_bytes, of_members))
        held_bytes = sharded.held + sharded.gathered
        held_bytes += all_gathered if gathered is None else gathered
        trained = [*sharded.trained]
    trained_bytes = sum(map(local_bytes, staying(trained)))
    state = OptimizerState.of(trained, local_bytes)
    return FixedBytes(
        parameters=held_bytes,
        gradients=trained_bytes + (0 if sharded is None else new_bytes),
        optimizer_state=state.device_bytes(config.optimizer_state_bytes_per_parameter),
        new_gradients=new_bytes,
        state_on_host=state.host_bytes,
        gradients_on_host=state.gradients_on_host,
        update=state.update_bytes,
    )


def has_fsdp_modules() -> bool:
    """True once ``fully_shard()`` was used: it gives every module that it shards a new class."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    # torch's own ReplicateModule derives from FSDPModule too, and is no module yet.
    return any(issubclass(cls, nn.Module) for cls in FSDPModule.__subclasses__())


def _is_sharded(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def _modules() -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yields all modules of the process, each with its parameters.

    No list of all objects outlives the one call that makes it, which runs no Python code: while a
    list holds a tuple that another thread is just making from a generator, Python raises
    SystemError in that thread.
    """
    classes = frozenset(_with_subclasses(nn.Module))
    objects = itertools.chain.from_iterable(map(operator.call, (gc.get_objects,)))
    used_classes = set(filter(classes.__contains__, map(type, objects)))
    for referrer in gc.get_referrers(*used_classes):
        if type(referrer) in used_classes:
            yield referrer, list(referrer.parameters())


def _with_subclasses(cls: type[nn.Module]) -> Iterator[type[nn.Module]]:
    yield cls
    for derived in cls.__subclasses__():
        yield from _with_subclasses(derived)


def local_bytes(tensor: torch.Tensor) -> int:
    """Returns what a tensor takes of this rank's device: its part of a DTensor."""
    return sum(map(allocated_bytes, autograd.inner_tensors(tensor) or [tensor]))


def apart(parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Returns one of ``parameters`` for each storage: tied weights count once."""
    return list({each.untyped_storage()._cdata: each for each in parameters}.values())
