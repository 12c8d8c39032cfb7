"""Runs an optimizer's update on the host, where its state and the gradients lie.

State and gradients are read and written where they are. Weights of a CPU model are, too; those of
a device come to the host in chunks and go back, both while other chunks are updated::

    to the host      | chunk 0 | chunk 1 | chunk 2 |
    update           |         | chunk 0 | chunk 1 | chunk 2 |
    to the device    |                   | chunk 0 | chunk 1 | chunk 2 |
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from memo_runtime.arena import arena_of
from memo_runtime.copies import Lane
from memo_runtime.host_store import HostStore
from memo_runtime.host_tensors import on_cpu, place_of

from memo_compile.training_state.homes import aligned, dense_bytes, laid_out
from memo_compile.training_state.sizes import TEMPORARY
from memo_compile.training_state.traits import Group
from memo_compile.training_state.update import Chunk, Memory, Update
from memo_compile.training_state.update_pieces import UpdatePiece


class HostUpdate(Update):
    """One ``step()`` on the host, of the parameters of one device."""

    @contextlib.contextmanager
    def _staging(self, size_bytes: int) -> Iterator[HostStore | None]:
        """Host memory for weights, and room on a CPU for what the update makes beside them."""
        device = self._homes.device
        if device.type == "cuda":  # the host reads what kernels have written into gradients
            torch.cuda.current_stream(device).synchronize()
        temporary = max((sum(map(_temporary_bytes, pieces)) for pieces in self._pieces), default=0)
        arena_of(device).make_room(temporary)
        yield self._homes.staging(size_bytes)

    def _staged_bytes(self, pieces: Sequence[UpdatePiece]) -> int:
        """Bytes of their weights that come from a device."""
        return sum(aligned(piece.num_bytes) for piece in pieces if _is_staged(piece))

    def _groups(self, chunk: Chunk) -> Iterator[Group]:
        """The parameter groups, as the host updates them."""
        return (host_group(group, self._homes.device) for group in super()._groups(chunk))

    def _bring(self, chunk: Chunk, memory: Memory | None, offset_bytes: int) -> None:
        """Begins to copy the chunk's weights to the host, and shows its state where it is."""
        for piece in chunk.pieces:
            tensor = piece.tensor()
            if _is_staged(piece):
                assert memory is not None, "weights of a device need a place on the host"
                here = memory.bytes(piece.num_bytes, offset_bytes)
                offset_bytes += aligned(piece.num_bytes)
                self._begin(chunk, Lane.D2H, here, dense_bytes(tensor.detach()))
                tensor = _as_weight(piece, tensor, laid_out(tensor, tensor.dtype, here))
            elif tensor.device.type != "cpu":
                tensor = _as_weight(piece, tensor, on_cpu(tensor.detach()))
            chunk.tensors.append(tensor)
            state = {name: on_host(value) for name, value in self._small_state(piece).items()}
            for name, home in self._before[piece.parameter].homes.items():
                flat = home.bytes(piece.start, piece.end).view(home.tensor.dtype)
                state[name] = home.tensor if piece.is_whole else flat
            if state:
                chunk.states[tensor] = state

    def _give_back(self, chunk: Chunk) -> None:
        """Keeps the chunk's new state, and begins to copy its weights to where they belong."""
        self._make_homes(chunk)
        for piece, tensor in zip(chunk.pieces, chunk.tensors, strict=True):
            if _is_staged(piece):
                weight = piece.tensor().detach()
                self._begin(chunk, Lane.H2D, dense_bytes(weight), dense_bytes(tensor.detach()))
            elif piece.parameter.device.type != "cpu":  # autograd has not seen it change
                torch.autograd.graph.increment_version(piece.parameter)
            for home, value in self._keep_state(chunk, piece, tensor):
                at_home = home.bytes(piece.start, piece.end)
                if value.data_ptr() != at_home.data_ptr():
                    at_home.copy_(dense_bytes(value))
        chunk.states.clear()  # it is at home; what the update has made beside it goes

    def _wait(self, chunk: Chunk) -> None:
        """Waits on the host, which reads and writes these bytes next."""
        for ticket in chunk.tickets:
            self._engine.wait_on_host(ticket)
        chunk.tickets.clear()


def host_group(group: Group, device: torch.device) -> Group:
    """The options of ``group`` for an update on the host of parameters that are on ``device``.

    Those of a device run fused where the program has chosen no kernel.
    """
    if device.type == "cpu":
        return group
    is_open = group.get("fused", False) is None and not group.get("foreach")
    numbers = {name: on_host(value) for name, value in group.items() if name != "params"}
    return {**group, **numbers, **({"fused": True} if is_open else {})}


def on_host(value: Any) -> Any:
    """``value``, on the CPU if it is a tensor."""
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _is_staged(piece: UpdatePiece) -> bool:
    """True for a weight in a device's memory."""
    parameter = piece.parameter
    return parameter.device.type != "cpu" and place_of(parameter) is None


def _temporary_bytes(piece: UpdatePiece) -> int:
    """What its update takes beside it of the memory that the plan counts."""
    return TEMPORARY * piece.num_bytes if piece.parameter.device.type == "cpu" else 0


def _as_weight(piece: UpdatePiece, device: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``weight``, on the host, as what the optimizer updates in place of the device's tensor."""
    weight.requires_grad_()
    assert device.grad is not None, "only parameters with gradients are updated"
    weight.grad = on_cpu(device.grad)
    return weight
