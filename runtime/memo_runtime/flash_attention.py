"""The forward kernels of the package flash-attn, with their output in a buffer that is given.

The package's operators return new tensors. The kernels behind them take the output as an argument,
for which the operators give None (read in ``flash_attn_interface.py`` and ``flash_api.cpp``, 2.7
and 2.8). Nothing here imports the package: whoever uses its operators has.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memo_runtime.open_numbers import as_number

_MODULE = "flash_attn.flash_attn_interface"
_OUT = 3
"""Position of the output among a kernel's arguments, behind queries, keys and values."""


def _fwd(q: Any, k: Any, v: Any, *settings: Any) -> tuple[str, tuple[Any, ...]]:
    dropout, scale, causal, left, right, softcap, slopes, returns_scores = settings
    options = (slopes, dropout, scale, causal, left, right, softcap, returns_scores, None)
    return "fwd", (q, k, v, None, *options)


def _varlen_fwd(q: Any, k: Any, v: Any, *settings: Any) -> tuple[str, tuple[Any, ...]]:
    ends_q, ends_k, most_q, most_k, dropout, scale, causal, left, right, softcap = settings[:10]
    slopes, returns_scores, blocks, padding, used, zeroes = settings[10:]
    most = (as_number(most_q), as_number(most_k))
    lengths = (ends_q, ends_k, used, padding, blocks, slopes, *most)
    options = (dropout, scale, zeroes, causal, left, right, softcap, returns_scores, None)
    return "varlen_fwd", (q, k, v, None, *lengths, *options)


_KERNELS: dict[str, Callable[..., tuple[str, tuple[Any, ...]]]] = {
    "flash_attn::_flash_attn_forward": _fwd,
    "flash_attn::_flash_attn_varlen_forward": _varlen_fwd,
}
"""Operator -> its kernel, and the kernel's arguments, from those of the operator."""


def takes_output(operator: str) -> bool:
    """True for an operator whose kernel ``forward_into`` can call."""
    return operator in _KERNELS and _kernels() is not None


def forward_into(operator: str, out: torch.Tensor, args: Sequence[Any]) -> Sequence[torch.Tensor]:
    """Returns the results of ``operator`` on ``args``, the first of them written into ``out``.

    Queries, keys, values and ``out`` are (B, T, H, D), or (T, H, D) of packed sequences.
    """
    name, kernel_args = _KERNELS[operator](*map(_contiguous, args[:_OUT]), *args[_OUT:])
    kernel = getattr(_kernels(), name)
    results: Sequence[torch.Tensor] = kernel(*kernel_args[:_OUT], out, *kernel_args[_OUT + 1 :])
    return results


def _kernels() -> Any:
    """The package's extension; None where it is not loaded, or of a version that names it else."""
    return getattr(sys.modules.get(_MODULE), "flash_attn_gpu", None)


def _contiguous(value: torch.Tensor) -> torch.Tensor:
    return value if value.stride(-1) == 1 else value.contiguous()
