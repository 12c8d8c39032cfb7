"""What belongs to a model beside the blocks of a group: embeddings, a head, their gradients."""

import gc
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from memo_compile.config import MemoConfig
from memo_compile.driver.facts import (
    OPTIMIZER_TENSORS,
    OptimizerState,
    allocated_bytes,
    staying,
)
from memo_compile.step.problem import FixedBytes
from memo_compile.torch_private import autograd, dynamo
from memo_compile.torch_private.distributed import ShardedParameter, sharded_parameters


def parameters_around(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The other parameters of the largest module that has all of ``parameters``.

    Nothing leads from a block to the model around it, so that all modules of the process are looked
    at: that takes a tenth of a second or two, once for each plan of a group.
    """
    own = {id(parameter) for parameter in parameters}
    largest: list[nn.Parameter] = []
    for _, others in _modules():
        if len(others) > len(largest) and own <= {id(parameter) for parameter in others}:
            largest = others
    return [parameter for parameter in largest if id(parameter) not in own]


def compiled_alike(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters of each block of a model that is compiled like the one with ``parameters``.

    Those are modules of one class that are compiled one by one, with parameters of the same shapes.
    """
    own = {id(parameter) for parameter in parameters}
    around = [found for found in _modules() if own and own <= {id(each) for each in found[1]}]
    blocks = [found for found in around if dynamo.is_compiled_alone(found[0])]
    if not blocks:
        return []
    block, of_block = min(blocks, key=lambda found: len(found[1]))
    model, _ = max(around, key=lambda found: len(found[1]))
    alike = (each for each in model.modules() if type(each) is type(block))
    compiled = [list(each.parameters()) for each in alike if dynamo.is_compiled_alone(each)]
    shapes = [parameter.shape for parameter in of_block]
    return [found for found in compiled if [each.shape for each in found] == shapes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedBytes:
    """What ``fully_shard()`` holds of a model on this rank."""

    own: int
    """This rank's shards of all parameters, and parameters that are not sharded."""
    trained: int
    """Those of them that get gradients."""
    gathered: int
    """Parameters beside the blocks of the group, whole: they may be gathered all the time."""


def sharded_around(parameters: Sequence[nn.Parameter]) -> ShardedBytes | None:
    """The sharded model that gathers ``parameters``; None: they are of no such model.

    Only some of them need to be gathered now.
    """
    if not has_fsdp_modules():
        return None
    own = {id(parameter) for parameter in parameters}
    found = [model for model in _modules() if own & {id(parameter) for parameter in model[1]}]
    if not found:
        return None
    model, all_of_them = max(found, key=lambda each: len(each[1]))
    parts = [part for part in model.modules() if _is_sharded(part)]
    sharded: dict[int, ShardedParameter] = {}
    """A parameter that ``fully_shard()`` manages, its shard or as it is gathered."""
    for each in itertools.chain.from_iterable(map(sharded_parameters, parts)):
        sharded |= {id(form): each for form in (each.shard, each.gathered) if form is not None}
    if sharded.keys().isdisjoint(map(id, all_of_them)):
        return None

    def held(parameter: nn.Parameter) -> int:
        known = sharded.get(id(parameter))
        return local_bytes(parameter if known is None else known.shard)

    def gathered(some: Sequence[nn.Parameter]) -> int:
        return sum(sharded[id(each)].gathered_bytes for each in some if id(each) in sharded)

    return ShardedBytes(
        own=sum(map(held, all_of_them)),
        trained=sum(held(each) for each in all_of_them if each.requires_grad),
        gathered=max(0, gathered(all_of_them) - gathered(parameters)),
    )


def fixed_beside(
    found: Sequence[nn.Parameter], config: MemoConfig, gathered: int | None = None
) -> FixedBytes:
    """Bytes that the members of a group and the model around them hold beside the group's frame.

    ``found`` are the members' parameters. Gradients of others count from the beginning on, since a
    group does not see when they are made. Of a sharded model ``gathered`` bytes of ``found`` were
    there at once; None: all of them may be. Inputs, buffers and libraries are not among them.
    """
    own = [each for each in apart(found) if each.requires_grad]
    own_bytes = sum(map(local_bytes, staying(own)))
    sharded = sharded_around(found)
    parameters = apart([*found, *parameters_around(found)])
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    held_bytes = sum(map(local_bytes, parameters))
    trained_bytes = sum(map(local_bytes, staying(trained)))
    if sharded is not None:
        most = sum(map(local_bytes, apart(found)))
        held_bytes = sharded.own + sharded.gathered + (most if gathered is None else gathered)
        trained_bytes = sharded.trained
    state = OptimizerState.of(trained, local_bytes)
    if sharded is not None and trained:
        count = trained_bytes // trained[0].element_size()
        assumed_bytes = OPTIMIZER_TENSORS * trained_bytes
        state = replace(state, assumed_bytes=assumed_bytes, num_on_device=count)
    return FixedBytes(
        parameters=held_bytes,
        gradients=trained_bytes + (0 if sharded is None else own_bytes),
        optimizer_state=state.device_bytes(config.optimizer_state_bytes_per_parameter),
        new_gradients=own_bytes,
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
    """All modules of the process, and their parameters.

    No list of all objects outlives the one call that makes it, which runs no Python code: while a
    list holds a tuple that another thread is just making from a generator, Python raises
    SystemError in that thread.
    """
    classes = frozenset(_with_subclasses(nn.Module))
    objects = itertools.chain.from_iterable(map(operator.call, (gc.get_objects,)))
    there = set(filter(classes.__contains__, map(type, objects)))
    for found in gc.get_referrers(*there):
        if type(found) in there:
            yield found, list(found.parameters())


def _with_subclasses(cls: type[nn.Module]) -> Iterator[type[nn.Module]]:
    yield cls
    for derived in cls.__subclasses__():
        yield from _with_subclasses(derived)


def local_bytes(tensor: torch.Tensor) -> int:
    """What a tensor takes of this rank's device: its part of a DTensor."""
    return sum(map(allocated_bytes, autograd.inner_tensors(tensor) or [tensor]))


def apart(parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """One for each storage: tied weights count once."""
    return list({own.untyped_storage()._cdata: own for own in parameters}.values())
