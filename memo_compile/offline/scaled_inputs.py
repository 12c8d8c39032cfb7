"""Makes the arguments of a step with other sizes: a longer sequence, a larger batch.

Which dimensions vary is read from the shapes. The batch is the first dimension. The sequence is the
second one of token ids ``(B, T)`` or, where there are none, of features ``(B, T, C)``.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memo_compile.errors import InputError
from memo_compile.offline.fit_question import Vary


@dataclass(frozen=True, slots=True, kw_only=True)
class Varied:
    """Dimensions that are varied together: all of one size, which is the sequence's or batch's."""

    what: Vary
    size: int
    """In the script."""
    dims: tuple[tuple[str, int], ...]
    """(path of a tensor among the arguments, number of its dimension), like ("labels", 1)."""

    def __str__(self) -> str:
        return ", ".join(f"{path}[{dim}]" for path, dim in self.dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The positional and keyword arguments of a step."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    names: Sequence[str]
    """Of ``args``."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns path -> input tensor, for all that are no parameters and have dimensions."""
        tensors: dict[str, torch.Tensor] = {}

        def add(path: str, value: Any) -> Any:
            if _is_input(value):
                tensors.setdefault(path, value)
            return value

        self._mapped(add)
        return tensors

    def varied(self, what: Vary) -> Varied | None:
        """Finds the dimensions of kind ``what``; None where no tensor has one."""
        tensors = self.tensors()
        batched = [value for value in tensors.values() if value.dim() > 1] or [*tensors.values()]
        batch = batched[0].shape[0] if batched else None
        size = batch if what is Vary.BATCH else _tokens(tensors.values())
        if size is None or batch is None:
            return None
        dims = tuple(
            (path, dim)
            for path, value in tensors.items()
            for dim in _dims(what, value, size, batch)
        )
        return Varied(what=what, size=size, dims=dims)

    def named(self, what: Vary, text: str) -> Varied:
        """Returns the dimensions in ``text``, like ``input_ids:1,labels:1``. Raises InputError."""
        tensors, dims, sizes = self.tensors(), [], set()
        for part in text.split(","):
            path, _, number = part.strip().rpartition(":")
            if path not in tensors or not number.isdecimal():
                names = ", ".join(f"{name} {_shape(value)}" for name, value in tensors.items())
                raise InputError(f"dims: expected NAME:DIM of {names or 'no tensor'}, got {part!r}")
            dim = int(number)
            if dim >= tensors[path].dim():
                raise InputError(f"dims: {path} has shape {_shape(tensors[path])}, no {dim}")
            dims.append((path, dim))
            sizes.add(tensors[path].shape[dim])
        if len(sizes) > 1:
            raise InputError(f"dims: sizes differ ({', '.join(map(str, sorted(sizes)))}): {text}")
        return Varied(what=what, size=sizes.pop(), dims=tuple(dims))

    def with_size(self, varied: Varied, size: int) -> "Arguments":
        """Returns the arguments with ``size`` in the varied dimensions, their tensors as zeros."""
        dims_of: dict[str, list[int]] = {}
        for path, dim in varied.dims:
            dims_of.setdefault(path, []).append(dim)

        def resized(path: str, value: Any) -> Any:
            if path not in dims_of or not _is_input(value):
                return value
            shape = [size if dim in dims_of[path] else n for dim, n in enumerate(value.shape)]
            return value.new_zeros(shape).requires_grad_(value.requires_grad)

        return self._mapped(resized)

    def bytes_with(self, varied: Varied, size: int) -> int:
        """Returns bytes of the input tensors of ``with_size``, without making them."""
        tensors = self.tensors()
        shapes = {path: [*value.shape] for path, value in tensors.items()}
        for path, dim in varied.dims:
            shapes[path][dim] = size
        return sum(
            math.prod(shapes[path]) * value.element_size() for path, value in tensors.items()
        )

    def numbers_like(self, size: int) -> list[str]:
        """Returns paths of integer arguments that equal ``size``: they do not vary with tensors."""
        paths: list[str] = []

        def add(path: str, value: Any) -> Any:
            if type(value) is int and value == size and size > 1:
                paths.append(path)
            return value

        self._mapped(add)
        return paths

    def _mapped(self, change: Callable[[str, Any], Any]) -> "Arguments":
        """Returns the arguments with ``change(path, leaf)`` for every leaf, such as a tensor."""
        args = tuple(
            _mapped(name, value, change) for name, value in zip(self.names, self.args, strict=True)
        )
        kwargs = {name: _mapped(name, value, change) for name, value in self.kwargs.items()}
        return Arguments(args=args, kwargs=kwargs, names=self.names)


def _mapped(path: str, value: Any, change: Callable[[str, Any], Any]) -> Any:
    """Returns ``value`` with ``change(path, leaf)`` for each leaf of its dicts, lists, tuples."""
    if type(value) is dict:
        return {key: _mapped(f"{path}.{key}", part, change) for key, part in value.items()}
    if type(value) in (list, tuple):
        parts = (_mapped(f"{path}.{i}", part, change) for i, part in enumerate(value))
        return type(value)(parts)
    return change(path, value)


def _is_input(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
        return False
    return value.dim() > 0 and value.layout is torch.strided


def _tokens(tensors: Collection[torch.Tensor]) -> int | None:
    """Returns the length of the sequences: of token ids (B, T), else of features (B, T, C)."""
    for num_dims, has_ids in ((2, True), (3, False)):
        for value in tensors:
            is_integer = not (value.dtype.is_floating_point or value.dtype.is_complex)
            if value.dim() == num_dims and is_integer is has_ids:
                return int(value.shape[1])
    return None


def _dims(what: Vary, value: torch.Tensor, size: int, batch: int) -> Iterator[int]:
    """Yields the dims that are B: the first; or T: of (B, T, ...), masks (B, 1, T, T), (T,)."""
    if what is Vary.BATCH:
        if value.shape[0] == batch:
            yield 0
    elif value.dim() == 1:
        if value.shape[0] == size != batch:
            yield 0
    elif _is_mask(value):
        yield from (dim for dim in range(value.dim() - 2, value.dim()) if value.shape[dim] == size)
    elif value.shape[1] == size and value.shape[0] in (1, batch):
        yield 1


def _is_mask(value: torch.Tensor) -> bool:
    """True for an attention mask by its shape and dtype; false for images and hidden states."""
    if value.dim() == 4:
        return value.dtype is torch.bool or value.shape[1] == 1
    return value.dim() == 3 and value.dtype is torch.bool


def _shape(value: torch.Tensor) -> str:
    return " x ".join(map(str, value.shape))
