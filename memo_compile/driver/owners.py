"""Which parameter a tensor inside of it is of, where that is a tensor subclass (DTensor).

AOTAutograd hands to a planned half what a subclass is made of. Gradients, and who a module is, are
told by the parameter, which the compiled function is called with.
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
"""Of the call that runs: a tensor, by its id -> the parameter that it is inside of."""


def telling(run: Callable[..., Any], example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """``run``, during which ``owned`` knows; itself where no input is made of others."""
    if not any(map(_parts, example_inputs)):
        return run

    def call(*args: Any) -> Any:
        with _told(args):
            return run(*args)

    return call


def owned(values: Sequence[Any]) -> list[Any]:
    """``values``, each of which that is inside a parameter replaced by that."""
    owners = _owners.get({})
    return [owners.get(id(value), value) for value in values] if owners else [*values]


@contextlib.contextmanager
def _told(args: Sequence[Any]) -> Iterator[None]:
    token = _owners.set({id(part): value for value in args for part in _parts(value)})
    try:
        yield
    finally:
        _owners.reset(token)


def _parts(value: Any) -> list[torch.Tensor]:
    return autograd.inner_tensors(value) if isinstance(value, torch.nn.Parameter) else []
