"""Runs an optimizer's update chunk by chunk, while other chunks come and go.

While one chunk is updated, what the next one needs is on its way, and what the one before has made
is on its way back:

    here      | chunk 0 | chunk 1 | chunk 2 |
    update    |         | chunk 0 | chunk 1 | chunk 2 |
    back      |         |         | chunk 0 | chunk 1 | chunk 2 |

What comes lies in the two halves of one block of memory. For an update on the device it is state,
and the block is a slab of the arena, which is idle between a backward and the next forward. For one
on the host (``host_update``) it is weights of a device. State that does not exist yet is made by
the optimizer itself and goes home from where it is.
"""

import abc
import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from memo_runtime.arena import Slab, arena_of
from memo_runtime.copies import CopyEngine, Lane, Ticket
from memo_runtime.heap import anonymous_bytes
from memo_runtime.host_store import HostStore
from memo_runtime.pages import gives_pages_back, trim_heap

from memo_compile.training_state.homes import Home, Homes, aligned, dense_bytes, laid_out
from memo_compile.training_state.traits import Group, run_update
from memo_compile.training_state.update_pieces import UpdatePiece

Small = Any
"""State that stays where it is: counts of steps, numbers."""

Memory = Slab | HostStore
"""Where what a chunk needs comes to: on the device, or on the host."""


@dataclass(slots=True, kw_only=True)
class Chunk:
    """Pieces that are updated at one time, and their state on the device."""

    pieces: Sequence[UpdatePiece]
    states: dict[torch.Tensor, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    """By what the optimizer updates: the piece's own tensor."""
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Those tensors, piece by piece."""
    tickets: list[Ticket] = field(default_factory=list)
    """Copies in flight: to the device before the update, home after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBefore:
    """The state of one parameter when the update begins."""

    small: dict[str, Small]
    homes: dict[str, Home]

    @classmethod
    def of(cls, state: Mapping[str, Any], homes: Mapping[str, Home]) -> "StateBefore":
        """Divides ``state`` into what lies at home and what does not."""
        small = {name: value for name, value in state.items() if name not in homes}
        return cls(small=small, homes=dict(homes))


class Update(abc.ABC):
    """One ``step()`` for the parameters of one device, chunk by chunk."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        homes: Homes,
        engine: CopyEngine,
        chunks: Sequence[Sequence[UpdatePiece]],
    ) -> None:
        self._optimizer, self._homes, self._engine = optimizer, homes, engine
        self._pieces = chunks
        self._chunks = [Chunk(pieces=pieces) for pieces in chunks]
        parameters = {piece.parameter for pieces in chunks for piece in pieces}
        self._before = {
            parameter: StateBefore.of(
                optimizer.state.get(parameter, {}), homes.of_parameter.get(parameter, {})
            )
            for parameter in parameters
        }
        """What slices of one parameter begin with, whichever of them is updated first."""

    def run(self) -> None:
        """Updates all chunks. When it returns, the current stream has waited for all copies."""
        half_bytes = max(map(self._staged_bytes, self._pieces), default=0)
        with self._staging(2 * half_bytes) as memory:
            try:
                self._run(memory, half_bytes)
            finally:  # after an error nothing may touch that memory any more
                self._settle()

    def _run(self, memory: Memory | None, half_bytes: int) -> None:
        most_bytes = self._most_anonymous_bytes(half_bytes)
        for number, chunk in enumerate(self._chunks):
            if number == 0:
                self._bring(chunk, memory, 0)
            else:  # its half of the memory is needed for the next chunk
                self._finish(self._chunks[number - 1])
            if number + 1 < len(self._chunks):
                self._bring(self._chunks[number + 1], memory, (number + 1) % 2 * half_bytes)
            self._wait(chunk)
            run_update(self._optimizer, list(self._groups(chunk)), chunk.states)
            self._give_back(chunk)
            if most_bytes is not None and anonymous_bytes() > most_bytes:
                trim_heap()
        if self._chunks:
            self._finish(self._chunks[-1])

    def _most_anonymous_bytes(self, half_bytes: int) -> int | None:
        """Where the process's memory between two chunks is above it, free heap goes back (CPU).

        Temporary tensors of a chunk are small, so that they come from the heap, each from another
        free place. Their pages would stay until the next step: as many as there is free heap.
        """
        if not gives_pages_back(self._homes.device):
            return None
        trim_heap()
        sizes = (sum(piece.num_bytes for piece in pieces) for pieces in self._pieces)
        return anonymous_bytes() + 2 * half_bytes + max(sizes, default=0)

    @abc.abstractmethod
    def _staged_bytes(self, pieces: Sequence[UpdatePiece]) -> int:
        """Bytes of what comes for the update of ``pieces``."""

    @abc.abstractmethod
    def _staging(self, size_bytes: int) -> contextlib.AbstractContextManager[Memory | None]:
        """Memory where so many bytes may come; None where nothing comes."""

    @abc.abstractmethod
    def _bring(self, chunk: Chunk, memory: Memory | None, offset_bytes: int) -> None:
        """Begins to copy what the chunk needs to ``memory``, and fills its tensors and states."""

    @abc.abstractmethod
    def _give_back(self, chunk: Chunk) -> None:
        """Keeps what the chunk's update has made, and begins to copy it to where it belongs."""

    def _finish(self, chunk: Chunk) -> None:
        """The chunk's copies have ended; what it had in memory is free."""
        self._wait(chunk)
        chunk.states.clear()
        chunk.tensors.clear()

    def _groups(self, chunk: Chunk) -> Iterator[Group]:
        """The parameter groups, with the chunk's tensors in place of all."""
        tensors: dict[int, list[torch.Tensor]] = {}
        for piece, tensor in zip(chunk.pieces, chunk.tensors, strict=True):
            tensors.setdefault(piece.group, []).append(tensor)
        for number, group in enumerate(self._optimizer.param_groups):
            if number in tensors:
                yield {**group, "params": tensors[number]}

    def _wait(self, chunk: Chunk) -> None:
        for ticket in chunk.tickets:
            self._engine.wait(ticket)
        chunk.tickets.clear()

    def _settle(self) -> None:
        """Waits until nothing touches the bytes of any copy."""
        for chunk in self._chunks:
            for ticket in chunk.tickets:
                self._engine.settle(ticket)

    def _small_state(self, piece: UpdatePiece) -> dict[str, Any]:
        """What the update of ``piece`` finds of the state that has no home."""
        small = dict(self._before[piece.parameter].small)
        if not piece.is_whole:  # each slice counts its steps by itself
            small = {name: _copied(value) for name, value in small.items()}
        return small

    def _keep_state(
        self, chunk: Chunk, piece: UpdatePiece, tensor: torch.Tensor
    ) -> Iterator[tuple[Home, torch.Tensor]]:
        """Puts the updated state into the optimizer's; yields what is to be copied home."""
        state = chunk.states.get(tensor)
        if state is None:
            return
        homes = self._homes.of_parameter.get(piece.parameter, {})
        yield from ((home, state[name]) for name, home in homes.items() if name in state)
        kept = self._optimizer.state[piece.parameter]
        kept.update({name: value for name, value in state.items() if name not in homes})
        kept.update({name: home.tensor for name, home in homes.items()})

    def _make_homes(self, chunk: Chunk) -> None:
        """Allocates host memory for state that this update was the first to make.

        Memory is for whole parameters: the first slice of one makes it for all of them.
        """
        wanted: dict[torch.Tensor, dict[str, torch.dtype]] = {}
        for piece, tensor in zip(chunk.pieces, chunk.tensors, strict=True):
            homes = self._homes.of_parameter.get(piece.parameter, {})
            for name, value in chunk.states.get(tensor, {}).items():
                if (
                    name in piece.traits.itemsizes
                    and name not in homes
                    and isinstance(value, torch.Tensor)
                    and value.shape == tensor.shape
                ):
                    wanted.setdefault(piece.parameter, {})[name] = value.dtype
        self._homes.take_in(wanted)

    def _begin(self, chunk: Chunk, lane: Lane, to: torch.Tensor, source: torch.Tensor) -> None:
        ticket = Ticket(lane, to, source)
        chunk.tickets.append(ticket)  # first, so that an interrupt cannot lose it
        self._engine.begin(ticket)


class ChunkedUpdate(Update):
    """An update on the device, to which state comes and from which it goes."""

    def _bring(self, chunk: Chunk, memory: Memory | None, offset_bytes: int) -> None:
        """Begins to copy the chunk's state to its half of the slab."""
        for piece in chunk.pieces:
            tensor = piece.tensor()
            chunk.tensors.append(tensor)
            state = self._small_state(piece)
            for name, home in self._before[piece.parameter].homes.items():
                source = home.bytes(piece.start, piece.end)
                assert memory is not None, "state at home needs a place on the device"
                here = memory.bytes(source.numel(), offset_bytes)
                offset_bytes += aligned(source.numel())
                state[name] = _as_state(piece, home, here)
                self._begin(chunk, Lane.H2D, here, source)
            if state:
                chunk.states[tensor] = state

    def _give_back(self, chunk: Chunk) -> None:
        """Begins to copy the chunk's state home, and keeps the small state in its place."""
        self._make_homes(chunk)
        for piece, tensor in zip(chunk.pieces, chunk.tensors, strict=True):
            for home, value in self._keep_state(chunk, piece, tensor):
                memory = home.bytes(piece.start, piece.end)
                self._begin(chunk, Lane.D2H, memory, dense_bytes(value))

    def _staged_bytes(self, pieces: Sequence[UpdatePiece]) -> int:
        """Bytes of their state that comes from home."""
        homes = ((piece, self._before[piece.parameter].homes) for piece in pieces)
        return sum(
            aligned((piece.end - piece.start) * home.tensor.element_size())
            for piece, of_piece in homes
            for home in of_piece.values()
        )

    @contextlib.contextmanager
    def _staging(self, size_bytes: int) -> Iterator[Slab | None]:
        """A free slab of the device's arena."""
        if not size_bytes:
            yield None
            return
        arena = arena_of(self._homes.device)
        slab = arena.acquire(size_bytes)
        try:
            slab.occupy(size_bytes)
            yield slab
        finally:
            arena.release(slab)


def _as_state(piece: UpdatePiece, home: Home, memory: torch.Tensor) -> torch.Tensor:
    """The piece's state in ``memory``, laid out as the optimizer would have made it."""
    if piece.is_whole:
        return laid_out(piece.parameter, home.tensor.dtype, memory)
    return memory.view(home.tensor.dtype)


def _copied(value: Small) -> Small:
    return value.clone() if isinstance(value, torch.Tensor) else value
