"""Which parameters have optimizer state and gradient on the host, for the plans of their steps.

``memo_compile.offload`` writes it. A plan then counts no state of these parameters, but what their
update borrows of the device when the backward has ended; and a gradient only until autograd has
added it, where it goes to the host then. Parameters are held weakly.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """Where the optimizer state of one parameter is, and its gradient, in bytes."""

    host_bytes: int
    """What is at home on the host."""
    device_bytes: int
    """What stays on the device all the time: sums over rows and columns, as Adafactor has them."""
    update_bytes: int
    """The least of the device that an update of the whole optimizer borrows: state on its way, and
    temporary results of the update itself."""
    gradient_bytes: int = 0
    """The gradient at home on the host, where it goes as soon as autograd has added it; 0: it stays
    on the device until the program frees it."""


class MovableUpdate(Protocol):
    """An optimizer that may update on the device or on the host."""

    def move_update_to_host(self, require_room: Callable[[int], None]) -> bool:
        """Sends gradients to the host from now on; True if it did not before, and does now.

        Raises what ``require_room`` raises of the bytes of its gradients.
        """


_states: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def keep_on_host(
    parameter: torch.Tensor, state: HostState, optimizer: MovableUpdate | None = None
) -> None:
    """Plans count ``state`` for ``parameter`` from now on, while ``optimizer`` is there."""
    _states[parameter] = state, None if optimizer is None else weakref.ref(optimizer)


def host_state(parameter: torch.Tensor) -> HostState | None:
    """What was said of ``parameter``; None: its state lies on the device."""
    state, optimizer = _states.get(parameter, (None, None))
    return None if optimizer is not None and optimizer() is None else state


def update_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """The least that updates of these parameters borrow of the device, one after another."""
    states = map(host_state, parameters)
    return max((state.update_bytes for state in states if state is not None), default=0)


def move_updates_to_host(
    parameters: Iterable[torch.Tensor], require_room: Callable[[int], None]
) -> bool:
    """Asks the optimizers of ``parameters``, whose step does not fit; True if one of them moved."""
    references = (_states.get(parameter, (None, None))[1] for parameter in parameters)
    optimizers = {id(ref()): ref() for ref in references if ref is not None and ref() is not None}
    return any([optimizer.move_update_to_host(require_room) for optimizer in optimizers.values()])


def gradient_goes_home(parameter: torch.Tensor) -> bool:
    """True where the gradient goes to the host as soon as autograd has added it."""
    state = host_state(parameter)
    return state is not None and state.gradient_bytes > 0
