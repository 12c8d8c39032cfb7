"""How large chunks of an update are, and what they borrow of the device."""

from collections.abc import Iterable

import torch
from memo_runtime import host_state
from memo_runtime.host_state import HostState

CHUNKS = 64
"""The smallest chunk has this part of all parameters, within the next two bounds."""

LEAST_CHUNK_BYTES = 2**16
"""Parameters of the smallest chunk: below it the time of a launch counts more than the bytes."""

MOST_CHUNK_BYTES = 2**26
"""Parameters of the largest chunk: larger copies are no faster."""

TEMPORARY = 3
"""Tensors of a chunk's size that an update makes meanwhile: Adam's denominator and its parts."""


def chunk_bytes(parameters_bytes: int) -> int:
    """Bytes of parameters in the smallest chunk of an optimizer of so many bytes of parameters."""
    return min(max(parameters_bytes // CHUNKS, LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES)


def borrowed_per_byte(state_bytes: float, itemsize: int) -> float:
    """Device memory that the update of a byte of parameters borrows.

    ``state_bytes`` are those of the state of one number of ``itemsize`` bytes. The state of two
    chunks is on the device, and temporary tensors of one.
    """
    return 2 * state_bytes / itemsize + TEMPORARY


def update_borrows(
    state_bytes: float, itemsize: int, *, updates_on_host: bool, on_cpu: bool
) -> float:
    """As ``borrowed_per_byte``; an update on the host borrows only where that is the device too."""
    if updates_on_host:
        return TEMPORARY if on_cpu else 0
    return borrowed_per_byte(state_bytes, itemsize)


def keep_on_host(
    parameters: Iterable[torch.Tensor],
    state_bytes: float,
    *,
    updates_on_host: bool = False,
    on_cpu: bool = False,
) -> None:
    """Says that an optimizer with so many bytes of state for a number keeps them on the host.

    For plans of an optimizer that does not exist; it works element by element. With
    ``updates_on_host`` gradients go there too. ``on_cpu``: the device is the CPU.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    all_bytes = sum(parameter.nbytes for parameter in trained)
    for parameter in trained:
        chunk = min(all_bytes, chunk_bytes(all_bytes))
        borrowed = chunk * update_borrows(
            state_bytes, parameter.element_size(), updates_on_host=updates_on_host, on_cpu=on_cpu
        )
        told = HostState(
            host_bytes=int(parameter.numel() * state_bytes),
            device_bytes=0,
            update_bytes=int(borrowed),
            gradient_bytes=parameter.nbytes if updates_on_host else 0,
        )
        host_state.keep_on_host(parameter, told)
