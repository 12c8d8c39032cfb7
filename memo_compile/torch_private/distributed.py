"""What memo needs of ``torch.distributed`` that has no public name. Read in 2.11.0 and 2.13.0."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import dlpack

_NOBODY_ASKS = 0x6D656D6F
"""A tag under which no message is ever received."""


def num_ranks() -> int:
    """Returns the ranks of the default process group; 0 without one."""
    distributed = torch.distributed
    has_group = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if has_group else 0


def ranks_of_group(name: str) -> tuple[int, ...]:
    """Returns the global ranks of the process group that functional collectives call ``name``."""
    return tuple(torch.distributed.get_process_group_ranks(_group(name)))


def backend_of_group(name: str) -> str:
    """Returns the backend of that group: ``gloo``, ``nccl`` ..."""
    return str(torch.distributed.get_backend(_group(name)))


def _group(name: str) -> Any:
    groups: Any = torch.distributed.distributed_c10d
    return groups._resolve_process_group(name)


def is_gone(rank: int) -> bool:
    """True where the process of ``rank`` has ended, as far as gloo's connection to it shows.

    A message is sent that nobody receives: gloo only looks whether it could be. Other backends
    cannot tell.
    """
    groups: Any = torch.distributed.distributed_c10d
    try:
        backend = groups._get_default_group()._get_backend(torch.device("cpu"))
    except RuntimeError:  # none carries tensors of a CPU
        return False
    if backend.name() != "gloo":
        return False
    try:
        backend.send([torch.zeros(1)], rank, _NOBODY_ASKS)
    except RuntimeError:
        return True
    return False


class ShardedParameter(NamedTuple):
    """A parameter that ``fully_shard()`` shards."""

    shard: torch.nn.Parameter
    gathered: torch.nn.Parameter | None
    """The module's parameter while it is gathered; None: it was not gathered yet."""
    gathered_bytes: int
    """Of this rank; less than the parameter's where other ranks have parts of it all the time."""


def sharded_parameters(module: torch.nn.Module) -> Iterator[ShardedParameter]:
    """Yields the parameters gathered for ``module``, which ``fully_shard()`` was called with."""
    sharded: Any = module
    state = sharded._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    for parameter in (each for group in groups for each in group.fsdp_params):
        dtype = getattr(parameter, "param_dtype", None) or parameter.sharded_param.dtype
        yield ShardedParameter(
            shard=parameter.sharded_param,
            gathered=getattr(parameter, "_unsharded_param", None),
            gathered_bytes=parameter._orig_size.numel() * dtype.itemsize,
        )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, over the same memory; any other tensor itself."""
    if not is_distributed(tensor):
        return tensor
    part: torch.Tensor = tensor.detach()._local_tensor  # type: ignore[attr-defined]
    return part


def is_distributed(tensor: torch.Tensor) -> bool:
    """True for a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def distributed_like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """``part``, wherever it lies, as this rank's part of a DTensor like ``tensor``.

    Returns ``part`` itself where ``tensor`` is no DTensor. ``DTensor.from_local`` is not used: it
    would move ``part`` to the mesh's devices. DLPack gives it a storage that begins where it does,
    since ``copy.deepcopy`` fails for a DTensor that lies elsewhere.
    """
    if not is_distributed(tensor):
        return part
    distributed: Any = tensor.detach()
    spec = distributed._spec
    meta = spec.tensor_meta._replace(dtype=part.dtype)
    spec = dataclasses.replace(spec, tensor_meta=meta)
    whole: torch.Tensor = type(distributed)(dlpack.from_dlpack(part), spec, requires_grad=False)
    return whole


def is_in_flight(value: Any) -> bool:
    """True for a tensor that a collective may still write: it waits when it is first used."""
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    return collectives is not None and isinstance(value, collectives.AsyncCollectiveTensor)


def arrived(value: torch.Tensor) -> torch.Tensor:
    """Waits for a tensor that is in flight, and returns the one behind it; differentiable."""
    tensor: torch.Tensor = _Arrived.apply(value)
    return tensor


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, value: Any) -> torch.Tensor:
        tensor: torch.Tensor = value.wait()
        return tensor

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class JobStore:
    """torch.distributed's store of a job: texts that its ranks leave for each other, by key."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def tell(self, key: str, text: str) -> None:
        """Sets ``key`` to ``text`` for all ranks of the job."""
        self._store.set(key, text)

    def get(self, key: str) -> str | None:
        """Returns the text of ``key``; None: it has none."""
        return self.told_under([key])[0]

    def setdefault(self, key: str, text: str) -> str:
        """Sets ``key`` to ``text`` unless another rank was first; returns what is set for good."""
        first: bytes = self._store.compare_set(key, "", text)
        return first.decode()

    def told_under(self, keys: Sequence[str]) -> list[str | None]:
        """Returns the text of each of ``keys``; None: it has none."""
        if not keys:
            return []
        if self._store.check(list(keys)):
            return [text.decode() for text in self._store.multi_get(list(keys))]
        set_keys = [key for key in keys if self._store.check([key])]
        texts = dict(zip(set_keys, self.told_under(set_keys), strict=True))
        return [texts.get(key) for key in keys]

    def next_number(self, key: str) -> int:
        """Returns one more than any rank got before for ``key``."""
        number: int = self._store.add(key, 1)
        return number


def job_store() -> JobStore:
    """Returns the store at which the ranks of the job met."""
    groups: Any = torch.distributed.distributed_c10d
    return JobStore(groups._get_default_store())
