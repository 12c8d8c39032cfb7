"""Builds a user's model of fake tensors, also where model code does what fakes refuse.

Read in torch 2.11.0 and 2.13.0.
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from memo_compile.torch_private.patches import replaced

MAX_REAL = 1024
"""A result that is computed only from real tensors of at most so many numbers is real."""


@contextlib.contextmanager
def model_of_fakes() -> Iterator[None]:
    """Tensors made inside take no memory; real ones may be mixed in.

    Four things work inside that fakes refuse: to change a module's dtype (torch swaps parameters,
    and the mode has weak references to them); to copy a module (``TransformerEncoder``);
    ``trunc_normal_``, which reads what it draws (here it draws nothing); and to read a ``linspace``
    between numbers, which is real (models take the rates of their layers from one).
    """
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    mode.__deepcopy__ = lambda _: mode  # a copy of a module is of the same mode
    swap = torch.utils.swap_tensors

    def swapped(first: torch.Tensor, second: torch.Tensor) -> None:
        """Swaps two tensors once the mode has forgotten both."""
        converter = mode.fake_tensor_converter
        memo = converter.tensor_memo
        for tensor in (first, second):
            for key in [key for key, fake in memo.items() if fake is tensor]:
                del memo[key]
            if isinstance(tensor, FakeTensor) and tensor.constant is not None:
                converter.invalidate_constant_aliases(tensor.constant)
        swap(first, second)

    with (
        mode,
        _FewNumbers(),
        replaced(torch.utils, swap_tensors=swapped),
        replaced(torch.nn.init, _no_grad_trunc_normal_=_as_it_is),
    ):
        yield


class _FewNumbers(TorchFunctionMode):
    """Keeps a ``linspace`` real, and what is computed from small real tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            return _copied(*args)
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if tensors:
            is_real = all(map(_is_few, tensors))
        else:
            device = kwargs.get("device") or torch.get_default_device()
            is_real = func is torch.linspace and torch.device(device).type == "cpu"
        with unset_fake_temporarily() if is_real else contextlib.nullcontext():
            return func(*args, **kwargs)


def _copied(fake: FakeTensor, memo: dict[int, Any]) -> Any:
    """Copies a fake without its constant, which torch would turn into a fake."""
    constant, fake.constant = fake.constant, None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            return torch.Tensor.__deepcopy__(fake, memo)
    finally:
        fake.constant = constant


def _is_few(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.numel() <= MAX_REAL


def _as_it_is(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor
