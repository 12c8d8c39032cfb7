"""Finds the parameter that a plain tensor is a part of, where that is a tensor subclass (DTensor).

AOTAutograd hands a planned half the plain tensors inside of a subclass. Its gradient, and the
module that it is of, belong to the parameter, which the compiled function is called with.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from memo_compile.torch_private import autograd

_owners: contextvars.ContextVar[Mapping[int, torch.nn.Parameter]] = contextvars.ContextVar(
    "memo_owners"
)
"""In the call that runs now: id of a tensor -> the parameter that it is inside of."""


def with_owners(run: Callable[..., Any], example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Wraps ``run`` so that ``owned`` works while it runs; not where no input is a subclass."""
    if not any(map(_parts, example_inputs)):
        return run

    def call(*args: Any) -> Any:
        with _parameters_of(args):
            return run(*args)

    return call


def owned(values: Sequence[Any]) -> list[Any]:
    """Returns ``values``; one that is inside a parameter is replaced by the parameter."""
    owners = _owners.get({})
    return [owners.get(id(value), value) for value in values] if owners else [*values]


@contextlib.contextmanager
def _parameters_of(args: Sequence[Any]) -> Iterator[None]:
    token = _owners.set({id(part): value for value in args for part in _parts(value)})
    try:
        yield
    finally:
        _owners.reset(token)


def _parts(value: Any) -> list[torch.Tensor]:
    return autograd.inner_tensors(value) if isinstance(value, torch.nn.Parameter) else []
