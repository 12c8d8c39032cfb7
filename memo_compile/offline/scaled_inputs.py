"""The arguments of a step with other sizes: a longer sequence, a larger batch.

What varies is read from the shapes. The batch is the first dimension, the sequence the second one
of token numbers ``(B, T)`` or, without any, of numbers ``(B, T, C)``.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from memo_compile.errors import InputError


class Vary(Enum):
    """What of a step's inputs is made longer."""

    SEQUENCE = "sequence"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Varied:
    """Dimensions that are made longer together."""

    what: Vary
    size: int
    """What the script has."""
    dims: tuple[tuple[str, int], ...]
    """Paths of tensors among the arguments, and which dimension of each varies."""

    def __str__(self) -> str:
        return ", ".join(f"{path}[{dim}]" for path, dim in self.dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What a step is called with."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    names: Sequence[str]
    """Of ``args``."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Path -> tensor that is no parameter and has dimensions."""
        found: dict[str, torch.Tensor] = {}

        def note(path: str, value: Any) -> Any:
            if _is_input(value):
                found.setdefault(path, value)
            return value

        self._mapped(note)
        return found

    def varied(self, what: Vary) -> Varied | None:
        """What is made longer for ``what``; None where no tensor has such a dimension."""
        tensors = self.tensors()
        batch = next((value.shape[0] for value in tensors.values() if value.dim() > 1), None)
        if batch is None:
            batch = next((value.shape[0] for value in tensors.values()), None)
        tokens = _tokens(tensors.values())
        size = batch if what is Vary.BATCH else tokens
        if size is None or batch is None:
            return None
        dims = tuple(
            (path, dim)
            for path, value in tensors.items()
            for dim in (
                _batch_dims(value, batch)
                if what is Vary.BATCH
                else _sequence_dims(value, size, batch)
            )
        )
        return Varied(what=what, size=size, dims=dims)

    def named(self, what: Vary, text: str) -> Varied:
        """What ``text`` says is made longer: ``input_ids:1,labels:1``. Raises InputError."""
        tensors, dims, sizes = self.tensors(), [], set()
        for part in text.split(","):
            path, _, number = part.strip().rpartition(":")
            if path not in tensors or not number.isdecimal():
                known = ", ".join(f"{name} {_shape(value)}" for name, value in tensors.items())
                raise InputError(f"dims: expected NAME:DIM of {known or 'no tensor'}, got {part!r}")
            dim = int(number)
            if dim >= tensors[path].dim():
                raise InputError(f"dims: {path} has shape {_shape(tensors[path])}, no {dim}")
            dims.append((path, dim))
            sizes.add(tensors[path].shape[dim])
        if len(sizes) > 1:
            raise InputError(f"dims: sizes differ ({', '.join(map(str, sorted(sizes)))}): {text}")
        return Varied(what=what, size=sizes.pop(), dims=tuple(dims))

    def with_size(self, varied: Varied, size: int) -> "Arguments":
        """The same arguments with ``size`` in the place of what varies; the numbers are zeros."""
        wanted: dict[str, list[int]] = {}
        for path, dim in varied.dims:
            wanted.setdefault(path, []).append(dim)

        def longer(path: str, value: Any) -> Any:
            if path not in wanted or not _is_input(value):
                return value
            shape = [size if dim in wanted[path] else n for dim, n in enumerate(value.shape)]
            return value.new_zeros(shape).requires_grad_(value.requires_grad)

        return self._mapped(longer)

    def bytes_with(self, varied: Varied, size: int) -> int:
        """Bytes of the tensors of ``with_size``, without making them."""
        tensors = self.tensors()
        shapes = {path: [*value.shape] for path, value in tensors.items()}
        for path, dim in varied.dims:
            shapes[path][dim] = size
        return sum(
            math.prod(shapes[path]) * value.element_size() for path, value in tensors.items()
        )

    def numbers_like(self, size: int) -> Iterator[str]:
        """Paths of whole numbers among the arguments that are ``size``, and stay what they are."""
        found: list[str] = []

        def note(path: str, value: Any) -> Any:
            if type(value) is int and value == size and size > 1:
                found.append(path)
            return value

        self._mapped(note)
        yield from found

    def _mapped(self, change: Callable[[str, Any], Any]) -> "Arguments":
        args = tuple(
            _mapped(name, value, change) for name, value in zip(self.names, self.args, strict=True)
        )
        kwargs = {name: _mapped(name, value, change) for name, value in self.kwargs.items()}
        return Arguments(args=args, kwargs=kwargs, names=self.names)


def _mapped(path: str, value: Any, change: Callable[[str, Any], Any]) -> Any:
    """``value`` with ``change`` applied to all that its dicts, lists and tuples hold."""
    if type(value) is dict:
        return {key: _mapped(f"{path}.{key}", part, change) for key, part in value.items()}
    if type(value) in (list, tuple):
        parts = (_mapped(f"{path}.{at}", part, change) for at, part in enumerate(value))
        return type(value)(parts)
    return change(path, value)


def _is_input(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
        return False
    return value.dim() > 0 and value.layout is torch.strided


def _tokens(tensors: Collection[torch.Tensor]) -> int | None:
    """The length of the sequences; None where nothing looks like one."""
    for dims, of_numbers in ((2, True), (3, False)):
        for value in tensors:
            is_whole = not (value.dtype.is_floating_point or value.dtype.is_complex)
            if value.dim() == dims and is_whole is of_numbers:
                return int(value.shape[1])
    return None


def _batch_dims(value: torch.Tensor, batch: int) -> Iterator[int]:
    if value.shape[0] == batch:
        yield 0


def _sequence_dims(value: torch.Tensor, length: int, batch: int) -> Iterator[int]:
    """``(B, T, ...)``; a mask ``(B, 1, T, T)`` or ``(B, T, T)``; positions ``(T,)``."""
    if value.dim() == 1:
        if value.shape[0] == length != batch:
            yield 0
        return
    if _is_mask(value):
        yield from (
            dim for dim in range(value.dim() - 2, value.dim()) if value.shape[dim] == length
        )
    elif value.shape[1] == length and value.shape[0] in (1, batch):
        yield 1


def _is_mask(value: torch.Tensor) -> bool:
    """True for what is added to scores, or chooses among them: no image, no hidden states."""
    if value.dim() == 4:
        return value.dtype is torch.bool or value.shape[1] == 1
    return value.dim() == 3 and value.dtype is torch.bool


def _shape(value: torch.Tensor) -> str:
    return " x ".join(map(str, value.shape))
