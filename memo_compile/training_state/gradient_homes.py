"""Host memory to which gradients go as soon as autograd has added them up.

A hook on each parameter copies the gradient home and frees the one on the device. ``.grad`` is then
a tensor of the same device, shape and numbers whose memory is the host's: clipping, scaling, later
hooks and the next microbatch's ``.grad += gradient`` work on it as on any other.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from memo_runtime.copies import CopyEngine, Lane, Ticket
from memo_runtime.host_store import HostStore, end_to_end
from memo_runtime.host_tensors import host_tensor, place_of

from memo_compile.reporting import state
from memo_compile.torch_private import autograd
from memo_compile.training_state.homes import dense_bytes

IN_A_BUFFER = (
    "gradients that are parts of a larger tensor (a buffer of the program, a bucket) stay on the "
    "device, although plans count them on the host"
)
"""The report's note on such gradients, once for all of them."""


@dataclass(slots=True)
class _Slot:
    """Where the gradient of one parameter goes, step by step."""

    store: HostStore
    offset_bytes: int
    size_bytes: int
    last: Any = None
    """Weak reference to the storage of the gradient that lies there, or lay there last."""

    def has_room(self, size_bytes: int) -> bool:
        """Nobody holds an earlier gradient, and the next one is not larger."""
        is_free = self.last is None or self.last.expired()
        return is_free and size_bytes <= self.size_bytes


@dataclass(slots=True, kw_only=True, weakref_slot=True, eq=False)
class GradientHomes:
    """The gradients of one optimizer's parameters."""

    kind_on: Callable[[torch.device], str]
    """Kind of host memory, as of ``HostStore``, for gradients of a device."""
    engine_on: Callable[[torch.device], CopyEngine]
    _slots: dict[torch.Tensor, _Slot] = field(default_factory=dict)
    _hooks: dict[torch.Tensor, Any] = field(default_factory=dict)

    def follow(self, parameters: Iterable[torch.Tensor]) -> None:
        """Takes their gradients home from now on; those of frozen ones when they are trained."""
        homes = weakref.ref(self)

        def accumulated(parameter: torch.Tensor) -> None:
            here = homes()
            if here is not None:
                here.take(parameter)

        for parameter in parameters:
            if parameter not in self._hooks and parameter.is_floating_point():
                is_trained = parameter.requires_grad
                parameter.requires_grad_(True)  # without it torch takes no hook
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(accumulated)
                parameter.requires_grad_(is_trained)

    def is_followed(self, parameter: torch.Tensor) -> bool:
        """True where its gradient goes home."""
        return parameter in self._hooks

    def take(self, parameter: torch.Tensor) -> None:
        """Puts the gradient into host memory, and frees the one on the device.

        One that is there already stays, and so does one whose own graph may be needed, that is
        sparse, or that is a part of a larger memory: a buffer of the program, which it goes on
        using, and of which the report says so.
        """
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided or gradient.requires_grad:
            return
        if place_of(gradient) is not None or not gradient.numel():
            return
        if gradient.untyped_storage().nbytes() > gradient.nbytes:
            state.warn_once(IN_A_BUFFER)
            return
        slot = self._slot_for(parameter, gradient.nbytes)
        home = host_tensor(slot.store, slot.offset_bytes, like=gradient)
        if home.stride() != gradient.stride():  # it has holes
            gradient = torch.empty_like(gradient).copy_(gradient)
        engine = self.engine_on(gradient.device)
        memory = slot.store.bytes(gradient.nbytes, slot.offset_bytes)
        ticket = Ticket(Lane.D2H, memory, dense_bytes(gradient))
        try:
            engine.begin(ticket)
            engine.wait(ticket)
        finally:  # after an interrupt nothing may read the gradient any more
            engine.settle(ticket)
        (slot.last, _), *_ = autograd.storages_of([home])
        parameter.grad = home

    def _slot_for(self, parameter: torch.Tensor, size_bytes: int) -> _Slot:
        """The parameter's own slot; memory for this time only where that is still in use."""
        if parameter not in self._slots:
            self._make_slots(parameter)
        slot = self._slots[parameter]
        if slot.has_room(size_bytes):
            return slot
        store = HostStore(slot.store.kind, size_bytes, parameter.device)
        return _Slot(store, 0, size_bytes)

    def _make_slots(self, first: torch.Tensor) -> None:
        """Allocates host memory for all trained parameters of the device that have none yet."""
        others = (
            each
            for each in self._hooks
            if each.requires_grad and each.device == first.device and each not in self._slots
        )
        parameters = list(dict.fromkeys((first, *others)))
        offsets, size_bytes = end_to_end([each.nbytes for each in parameters])
        store = HostStore(self.kind_on(first.device), size_bytes, first.device)
        for parameter, offset_bytes in zip(parameters, offsets, strict=True):
            self._slots[parameter] = _Slot(store, offset_bytes, parameter.nbytes)

    @property
    def host_bytes(self) -> int:
        """Bytes of all slots."""
        stores = {id(slot.store): slot.store.size_bytes for slot in self._slots.values()}
        return sum(stores.values())
