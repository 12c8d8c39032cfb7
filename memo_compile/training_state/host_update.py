"""Runs an optimizer's update on the host, where its state and the gradients lie.

State and gradients are read and written where they are. Weights of a CPU model are, too; those of
a device come to the host in chunks and go back, both while other chunks are updated::

    to the host      | chunk 0 | chunk 1 | chunk 2 |
    update           |         | chunk 0 | chunk 1 | chunk 2 |
    to the device    |                   | chunk 0 | chunk 1 | chunk 2 |
"""

from collections.abc import Sequence
from typing import Any

import torch
from memo_runtime.arena import arena_of
from memo_runtime.copies import Lane
from memo_runtime.host_store import HostStore
from memo_runtime.host_tensors import on_cpu, place_of

from memo_compile.training_state.homes import aligned, dense_bytes, laid_out
from memo_compile.training_state.sizes import TEMPORARY
from memo_compile.training_state.traits import Group, run_update
from memo_compile.training_state.update import Chunk, Update
from memo_compile.training_state.update_pieces import UpdatePiece


class HostUpdate(Update):
    """One ``step()`` on the host, of the parameters of one device."""

    def run(self) -> None:
        """Updates all chunks. When it returns, the current stream has waited for all copies."""
        device = self._homes.device
        if device.type == "cuda":  # the host reads what kernels have written into gradients
            torch.cuda.current_stream(device).synchronize()
        temporary = max((sum(map(_temporary_bytes, pieces)) for pieces in self._pieces), default=0)
        arena_of(device).make_room(temporary)
        half_bytes = max(map(_staged_bytes, self._pieces), default=0)
        store = self._homes.staging(2 * half_bytes)
        try:
            self._run(store, half_bytes)
        finally:  # after an error nothing may touch the staged weights any more
            self._settle()

    def _run(self, store: HostStore | None, half_bytes: int) -> None:
        for number, chunk in enumerate(self._chunks):
            if number == 0:
                self._bring(chunk, store, 0)
            if number > 0:  # its half of the store is needed for the next chunk
                self._wait_on_host(self._chunks[number - 1])
            if number + 1 < len(self._chunks):
                self._bring(self._chunks[number + 1], store, (number + 1) % 2 * half_bytes)
            self._wait_on_host(chunk)
            groups = [host_group(group, self._homes.device) for group in self._groups(chunk)]
            run_update(self._optimizer, groups, chunk.states)
            self._give_back(chunk)
        if self._chunks:
            self._wait(self._chunks[-1])

    def _bring(self, chunk: Chunk, store: HostStore | None, offset_bytes: int) -> None:
        """Begins to copy the chunk's weights to the host, and shows its state where it is."""
        for piece in chunk.pieces:
            tensor = piece.tensor()
            if _is_staged(piece):
                assert store is not None, "weights of a device need a place on the host"
                memory = store.bytes(piece.num_bytes, offset_bytes)
                offset_bytes += aligned(piece.num_bytes)
                self._begin(chunk, Lane.D2H, memory, dense_bytes(tensor.detach()))
                tensor = _as_weight(piece, tensor, laid_out(tensor, tensor.dtype, memory))
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
                memory = home.bytes(piece.start, piece.end)
                if value.data_ptr() != memory.data_ptr():
                    memory.copy_(dense_bytes(value))
        chunk.states.clear()
        chunk.tensors.clear()

    def _wait_on_host(self, chunk: Chunk) -> None:
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


def _staged_bytes(pieces: Sequence[UpdatePiece]) -> int:
    return sum(aligned(piece.num_bytes) for piece in pieces if _is_staged(piece))


def _as_weight(piece: UpdatePiece, device: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``weight``, on the host, as what the optimizer updates in place of the device's tensor."""
    weight.requires_grad_()
    assert device.grad is not None, "only parameters with gradients are updated"
    weight.grad = on_cpu(device.grad)
    return weight
