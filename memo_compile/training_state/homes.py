"""Host memory in which optimizer state lies between updates.

Each state tensor of a parameter is one tensor on the host, in the parameter's own layout, so that
``state_dict()`` is as it always was. Memory is taken in exact sizes, for many parameters at once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from memo_runtime.host_store import HostStore

from memo_compile.torch_private.distributed import distributed_like, local_part

ALIGNMENT = 64
"""State tensors begin at multiples of so many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where one state tensor lies on the host."""

    store: HostStore
    offset_bytes: int
    tensor: torch.Tensor
    """The state itself, on the CPU."""

    def bytes(self, start: int, end: int) -> torch.Tensor:
        """The bytes of its elements ``[start, end)`` in memory order, as uint8."""
        itemsize = self.tensor.element_size()
        return self.store.bytes((end - start) * itemsize, self.offset_bytes + start * itemsize)


@dataclass(slots=True, kw_only=True)
class Homes:
    """All state of one optimizer that lies on the host."""

    kind: str
    """Kind of host memory, as of ``HostStore``."""
    device: torch.device
    of_parameter: dict[torch.Tensor, dict[str, Home]]
    """By parameter, then by the name of its state."""
    _staging: HostStore | None = None
    """Host memory for weights of a device while they are updated on the host."""

    def take_in(self, wanted: Mapping[torch.Tensor, Mapping[str, torch.dtype]]) -> None:
        """Makes room for these state tensors, in memory of its own.

        Raises HostStoreError: the memory was refused.
        """
        places, size_bytes = [], 0
        for parameter, dtypes in wanted.items():
            for name, dtype in dtypes.items():
                places.append((parameter, name, dtype, size_bytes))
                size_bytes += aligned(size_of(parameter, dtype))
        if not places:
            return
        store = HostStore(self.kind, max(size_bytes, 1), self.device)
        for parameter, name, dtype, offset_bytes in places:
            memory = store.bytes(size_of(parameter, dtype), offset_bytes)
            self.of_parameter.setdefault(parameter, {})[name] = Home(
                store=store,
                offset_bytes=offset_bytes,
                tensor=distributed_like(parameter, laid_out(parameter, dtype, memory)),
            )

    def staging(self, size_bytes: int) -> HostStore | None:
        """Host memory for weights that are updated, kept for the next update; None for none."""
        store = self._staging
        if size_bytes and (store is None or store.size_bytes < size_bytes):
            self._staging = None  # before the larger one is made
            self._staging = HostStore(self.kind, size_bytes, self.device)
        return self._staging

    def drop(self, parameters: Iterable[torch.Tensor]) -> None:
        """Forgets the state of ``parameters``; memory goes with the last tensor over it."""
        for parameter in parameters:
            self.of_parameter.pop(parameter, None)

    @property
    def host_bytes(self) -> int:
        """Bytes of all stores."""
        stores = {
            id(home.store): home.store.size_bytes
            for homes in self.of_parameter.values()
            for home in homes.values()
        }
        return sum(stores.values())


def aligned(size_bytes: int) -> int:
    """``size_bytes``, rounded up to where the next state tensor may begin."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def size_of(parameter: torch.Tensor, dtype: torch.dtype) -> int:
    """Bytes of a state tensor of the parameter's shape: of a DTensor, those of this rank."""
    return local_part(parameter).numel() * dtype.itemsize


def laid_out(parameter: torch.Tensor, dtype: torch.dtype, memory: torch.Tensor) -> torch.Tensor:
    """``memory``, uint8, as a tensor of the parameter's shape, and its strides if those are dense.

    A parameter with holes between its elements, or that overlaps itself, has contiguous state, as
    ``torch.zeros_like`` makes it. Of a DTensor it is this rank's part.
    """
    layout = torch.empty_like(local_part(parameter), device="meta", dtype=dtype)
    values = memory.view(dtype)
    return values.as_strided(layout.shape, layout.stride(), values.storage_offset())


def dense_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's bytes in memory order, as uint8."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)
