"""Cuts an update into chunks of a bounded size.

A chunk is updated at one time. It holds whole parameters and, where the optimizer works element by
element, slices of large ones: an embedding of 1 GiB is updated in slices of some MiB.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from memo_compile.torch_private.distributed import local_part
from memo_compile.training_state.traits import Group, StateTraits

SLICE_ELEMENTS = 1024
"""Slices are multiples of so many elements: kernels see whole vectors of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePiece:
    """A parameter, or elements ``[start, end)`` of one that lies in memory without holes.

    Of a DTensor it is this rank's part, and a part of that.
    """

    parameter: torch.Tensor
    group: int
    """Index of its parameter group."""
    traits: StateTraits
    start: int
    end: int

    @property
    def is_whole(self) -> bool:
        """True for all elements of the parameter."""
        return self.end - self.start == local_part(self.parameter).numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameter's own elements."""
        return (self.end - self.start) * self.parameter.element_size()

    @property
    def state_bytes(self) -> int:
        """Bytes of its state on the host."""
        return (self.end - self.start) * self.traits.bytes_per_element

    def tensor(self) -> torch.Tensor:
        """What the optimizer updates: the parameter itself, or a slice of it with its gradient."""
        local = local_part(self.parameter)
        if self.is_whole and local is self.parameter:
            return self.parameter
        assert self.parameter.grad is not None, "only parameters with gradients are updated"
        values, gradient = local.detach(), local_part(self.parameter.grad)
        if not self.is_whole:
            values, gradient = (each.view(-1)[self.start : self.end] for each in (values, gradient))
        values.requires_grad_().grad = gradient
        return values


def pieces_of(
    groups: Iterable[Group],
    traits: Mapping[tuple[int, torch.dtype], StateTraits],
    slice_bytes: int,
) -> Iterator[UpdatePiece]:
    """All parameters with gradients, those above ``slice_bytes`` in slices where that is exact."""
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            kind = traits[number, parameter.dtype]
            size = step = local_part(parameter).numel()
            if kind.is_elementwise and _is_flat(parameter):
                step = slice_elements(parameter, slice_bytes)
            for start in range(0, max(1, size), max(1, step)):  # an empty one has state too
                yield UpdatePiece(
                    parameter=parameter,
                    group=number,
                    traits=kind,
                    start=start,
                    end=min(size, start + step),
                )


def slice_elements(parameter: torch.Tensor, slice_bytes: int) -> int:
    """Elements of a slice of about ``slice_bytes``."""
    elements = slice_bytes // parameter.element_size() // SLICE_ELEMENTS * SLICE_ELEMENTS
    return max(SLICE_ELEMENTS, elements)


def chunks_of(pieces: Iterable[UpdatePiece], chunk_bytes: int) -> Iterator[list[UpdatePiece]]:
    """Runs of pieces whose parameters take ``chunk_bytes`` or less, or a single larger piece."""
    chunk: list[UpdatePiece] = []
    for piece in pieces:
        if chunk and sum(each.num_bytes for each in chunk) + piece.num_bytes > chunk_bytes:
            yield chunk
            chunk = []
        chunk.append(piece)
    if chunk:
        yield chunk


def _is_flat(parameter: torch.Tensor) -> bool:
    assert parameter.grad is not None, "only parameters with gradients are updated"
    values, gradient = local_part(parameter), local_part(parameter.grad)
    is_dense = gradient.layout == torch.strided
    return is_dense and values.is_contiguous() and gradient.is_contiguous()
