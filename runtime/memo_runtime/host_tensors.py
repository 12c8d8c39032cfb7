"""Tensors of a device whose memory is the host's.

Example: a weight of a CUDA model that lies in pinned host memory. It stays a CUDA tensor for the
program: every kernel can read and write it, over the link. What computes with it often copies it
into device memory first, and finds by ``place_of`` where it lies.

On a CPU device memory is ordinary memory and the host's is shared memory, as for activations.
"""

import bisect
import ctypes
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from memo_runtime.host_store import HostStore
from memo_runtime.pinned_memory import HostStoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """Where the memory of a tensor lies in a host store."""

    store: HostStore
    offset_bytes: int


class _Stores:
    """The stores that hold such tensors, by address; a store that has gone is forgotten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_address: dict[int, weakref.ref[HostStore]] = {}
        self._addresses: list[int] = []

    def add(self, store: HostStore) -> None:
        with self._lock:
            self._by_address[store.bytes(store.size_bytes).data_ptr()] = weakref.ref(store)
            self._addresses = sorted(self._by_address)

    def place_at(self, address: int) -> HostPlace | None:
        """Returns which store holds ``address``, and where; None: none does."""
        with self._lock:
            while (index := bisect.bisect_right(self._addresses, address) - 1) >= 0:
                start = self._addresses[index]
                store = self._by_address[start]()
                if store is not None:
                    place = HostPlace(store=store, offset_bytes=address - start)
                    return place if place.offset_bytes < store.size_bytes else None
                del self._by_address[start], self._addresses[index]  # another may lie around it
        return None


_stores = _Stores()

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def host_tensor(
    store: HostStore, offset_bytes: int, like: torch.Tensor, device: torch.device | None = None
) -> torch.Tensor:
    """Returns a tensor of ``device``, in the layout of ``like``, over the bytes of ``store``.

    Its memory lives as long as any tensor over it, and is found by ``place_of`` meanwhile. Raises
    HostStoreError: the device (by default that of ``like``) cannot read this kind of host memory.
    """
    layout = torch.empty_like(like, device="meta")
    device = like.device if device is None else device
    if device.type == "cuda" and store.kind != "pinned":
        raise HostStoreError(
            f"memo: expected pinned host memory, which {device} can read, got {store.kind}; "
            "set kind='pinned'"
        )
    memory = _Memory(store, offset_bytes, layout.untyped_storage().nbytes())
    _stores.add(store)
    seen = memory.on_cuda(device) if device.type == "cuda" else memory.on_cpu()
    return seen.view(layout.dtype).as_strided(layout.shape, layout.stride())


def place_of(tensor: torch.Tensor) -> HostPlace | None:
    """Returns where a tensor of ``host_tensor``, or a view of one, lies; None for other tensors."""
    if not _stores._addresses or type(tensor) not in _PLAIN:  # others have no address
        return None
    if tensor.layout is not torch.strided:
        return None
    return _stores.place_at(tensor.data_ptr())


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the CPU; a copy where it is memory of another device."""
    if tensor.device.type == "cpu":
        return tensor
    place = place_of(tensor)
    if place is None or not tensor.numel():
        return tensor.cpu()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = place.store.bytes((last + 1) * tensor.element_size(), place.offset_bytes)
    values = memory.view(tensor.dtype)
    return values.as_strided(tensor.shape, tensor.stride(), values.storage_offset())


def bytes_at_home(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor as uint8, for a copy to the device: host memory if it is there.

    A program may have moved a weight to other memory in the meantime, which is copied then.
    """
    place = place_of(tensor)
    if place is not None:
        return place.store.bytes(tensor.nbytes, place.offset_bytes)
    storage = tensor.detach().untyped_storage()
    start = tensor.storage_offset() * tensor.element_size()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return whole[start : start + tensor.nbytes]


class _Memory:
    """Some bytes of a store, which keep the store while a tensor's storage keeps them."""

    def __init__(self, store: HostStore, offset_bytes: int, num_bytes: int) -> None:
        self.store, self.num_bytes = store, num_bytes
        self.address = store.bytes(num_bytes, offset_bytes).data_ptr()

    def on_cpu(self) -> torch.Tensor:
        """The bytes as a CPU tensor with a storage of its own."""
        if not self.num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        array = (ctypes.c_uint8 * self.num_bytes).from_address(self.address)
        array.memory = self  # type: ignore[attr-defined]
        return torch.frombuffer(array, dtype=torch.uint8)

    def on_cuda(self, device: torch.device) -> torch.Tensor:
        """The bytes as a CUDA tensor: pinned memory has the same address for kernels."""
        return torch.as_tensor(self, device=device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": data, "version": 3}
