"""Three equal blocks around calls of one operator or module, as a model with a loss.

A block is a small residual layer with two products, which memo takes for a layer of a model.
Between them it calls the operator on tensors of its own, scaled by what the block computes. A
weighted sum of everything that the operator returns goes to the loss, and scales what the block
hands on. So every call depends on the block before it and the block behind it on the call, whatever
shapes and dtypes the operator takes and returns. Scaling keeps an input that is positive, symmetric
or sorted what it is.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

NUM_BLOCKS = 3

WIDTH = 4
"""Of what goes from block to block: as many tokens, each as wide."""

LEAN = 0.005
"""By what part an operator's input grows in a block; less than 0 where its domain ends above."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands in a call's arguments for the tensor of this number."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An operator or module with its arguments, tensors taken out of them.

    Each block has the tensors numbered ``trained`` as parameters of its own, and scales the first
    of them; all others are given from outside, to every block.
    """

    functions: Sequence[Callable[..., Any]]
    """One for each block: the operator, or a copy of the module."""
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: Sequence[torch.Tensor]
    trained: Sequence[int]
    finish: Callable[[Any], Any]
    """What torch's tests do to the results: of eigenvectors, only what is unique."""
    form: str = "plain"
    """``plain``; ``strided``: the trained tensors have gaps in memory; ``expanded``: a dimension of
    the first one is repeated with stride 0."""


class Piece(nn.Module):
    """One call in one block."""

    def __init__(self, call: Call, number: int, lean: float) -> None:
        super().__init__()
        self.args, self.kwargs, self.form = call.args, call.kwargs, call.form
        self.numbers, self.finish = call.trained, call.finish
        self.function = call.functions[number]
        self.trained = nn.ParameterList(
            call.tensors[at].detach().clone() * (1 + lean * number) for at in call.trained
        )

    def forward(self, factors, given):
        tensors = dict(given)
        for at, (number, tensor) in enumerate(zip(self.numbers, self.trained, strict=True)):
            if not at:
                tensor = scaled(tensor, factors, self.form)
            elif self.form == "strided":
                tensor = with_gaps(tensor)
            tensors[number] = tensor
        args, kwargs = filled(self.args, tensors), filled(self.kwargs, tensors)
        return self.finish(self.function(*args, **kwargs))


class Block(nn.Module):
    """A residual layer that calls each of ``calls`` once."""

    def __init__(self, calls: Sequence[Call], number: int, lean: float, wide: torch.dtype) -> None:
        super().__init__()
        self.lean = lean
        generator = torch.Generator().manual_seed(number)
        self.enter, self.leave = (
            nn.Parameter(torch.rand(WIDTH, WIDTH, generator=generator, dtype=wide) - 0.5)
            for _ in range(2)
        )
        self.register_buffer("unit", torch.eye(2, dtype=wide))
        self.pieces = nn.ModuleList(Piece(call, number, lean) for call in calls)

    def forward(self, x, given, weights):
        hidden = torch.tanh(linear(x, self.enter))
        factors = self.unit * (1 + self.lean * (1 + hidden.mean()))
        added = 0.0
        for piece, tensors, weight in zip(self.pieces, given, weights, strict=True):
            added = added + weighed(piece(factors, tensors), weight, x.dtype)
        return x + linear(hidden * (1 + 0.1 * torch.tanh(added)), self.leave), added


class Blocks(nn.Module):
    """The model: ``forward`` returns the loss."""

    def __init__(self, calls: Sequence[Call], lean: float, wide: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(calls, at, lean, wide) for at in range(NUM_BLOCKS))

    def forward(self, x, given, weights):
        total = 0.0
        for block in self.blocks:
            x, added = block(x, given, weights)
            total = total + added
        return total + x.sum()


def inputs_of(calls: Sequence[Call], wide: torch.dtype) -> tuple[torch.Tensor, list[Any]]:
    """What the model is called with besides weights."""
    generator = torch.Generator().manual_seed(100)
    x = torch.rand(WIDTH, WIDTH, generator=generator, dtype=wide)
    return x, [
        {at: value for at, value in enumerate(call.tensors) if at not in call.trained}
        for call in calls
    ]


def weights_of(calls: Sequence[Call], lean: float, wide: torch.dtype) -> list[list[torch.Tensor]]:
    """A weight for each number that each of the calls returns. Raises what eager torch raises."""
    factors = torch.eye(2, dtype=wide)
    generator = torch.Generator().manual_seed(200)
    weights = []
    for call, tensors in zip(calls, inputs_of(calls, wide)[1], strict=True):
        torch.manual_seed(0)
        results = copy.deepcopy(Piece(call, 0, lean))(factors, tensors)
        shapes = [as_numbers(result, wide).shape for result in tensors_of(results)]
        weights.append(
            [torch.rand(shape, generator=generator, dtype=wide) + 0.5 for shape in shapes]
        )
    return weights


def scaled(value: torch.Tensor, factors: torch.Tensor, form: str) -> torch.Tensor:
    """``value`` times what stands on the diagonal of ``factors``, by a matrix product.

    Torch's partitioner keeps what products give. A mere multiple of a parameter it would make
    again, with nearly all that operators make of it, and nothing would be left to plan.
    """
    pairs = torch.stack((value, value), -1).reshape(-1, 2)
    product = (pairs @ factors.to(value.dtype))[:, 0].reshape(value.shape)
    if form == "strided":
        return product
    product = product.clone(memory_format=torch.contiguous_format)
    at = next((at for at, size in enumerate(value.shape) if size > 1), None)
    if form == "plain" or at is None:
        return product
    return product.narrow(at, 0, 1).expand(value.shape)


def with_gaps(value: torch.Tensor) -> torch.Tensor:
    return torch.stack((value, value), -1)[..., 0]


def filled(part: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """``part`` of a call's arguments with tensors in place of the slots."""
    if isinstance(part, Slot):
        return tensors[part.number]
    if isinstance(part, dict):
        return {name: filled(value, tensors) for name, value in part.items()}
    if isinstance(part, list | tuple) and type(part) in (list, tuple):
        return type(part)([filled(value, tensors) for value in part])
    return part


def emptied(part: Any, tensors: list[torch.Tensor]) -> Any:
    """``part`` of a call's arguments with slots in place of tensors, which are appended."""
    if isinstance(part, torch.Tensor):
        tensors.append(part)
        return Slot(len(tensors) - 1)
    if isinstance(part, dict):
        return {name: emptied(value, tensors) for name, value in part.items()}
    if isinstance(part, list | tuple) and type(part) in (list, tuple):
        return type(part)([emptied(value, tensors) for value in part])
    return part


def tensors_of(results: Any) -> Iterator[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        yield results
    elif isinstance(results, dict):
        for value in results.values():
            yield from tensors_of(value)
    elif isinstance(results, list | tuple):
        for value in results:
            yield from tensors_of(value)


def as_numbers(result: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """``result`` as real numbers."""
    if result.layout != torch.strided:
        result = result.to_dense()
    if result.is_complex():
        result = torch.view_as_real(result.resolve_conj())
    return result.to(wide)


def weighed(results: Any, weights: Sequence[torch.Tensor], wide: torch.dtype) -> torch.Tensor:
    """A sum of all numbers in ``results``, each with its own weight.

    Where the number of results depends on the data they have one weight.
    """
    total = 0.0
    for result, weight in zip(tensors_of(results), weights, strict=True):
        numbers = as_numbers(result, wide)
        total = total + (numbers * weight if numbers.shape == weight.shape else numbers).sum()
    return total
