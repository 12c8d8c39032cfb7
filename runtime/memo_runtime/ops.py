"""Operators of the step program, and of regions whose kernels allocate their own results."""

import functools
import re
from collections.abc import Callable
from typing import Any

import torch

from memo_runtime import flash_attention


def lease(*saved: Any) -> Any:
    """Stands in a forward graph for "keep ``saved`` in this step's frame"; returns the handle.

    The executor does that; this function is never called.
    """
    raise AssertionError("memo's lease is run by the step executor only")


def fetch(handle: Any, index: int) -> Any:
    """Stands in a backward graph for the ``index``-th tensor kept under ``handle``."""
    raise AssertionError("memo's fetch is run by the step executor only")


def _copy(out: torch.Tensor, value: torch.Tensor) -> None:
    out.copy_(value)


_library = torch.library.Library("memo", "FRAGMENT")

_library.define("copy_into(Tensor(a!) out, Tensor value) -> ()")
_library.impl("copy_into", _copy, "CompositeExplicitAutograd")
torch.library.register_fake("memo::copy_into", lambda out, value: None, lib=_library)


@functools.cache
def into(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """Returns ``op`` with its results copied into buffers given first: ``(Tensor(a!) o0, ...)``.

    For kernels without an ``out`` argument, so that their results can lie in the arena. The
    kernel's own result and the copy exist at once; the planner counts both, but for the first
    result of an operator that ``writes_first``.
    """
    schema = op._schema
    name = f"{schema.name}_{schema.overload_name}_into".replace("::", "_").replace(".", "_")
    num_outputs = len(schema.returns)
    outputs = [f"Tensor({chr(ord('a') + i)}!) out{i}" for i in range(num_outputs)]
    num_positional = sum(not arg.kwarg_only for arg in schema.arguments)
    _library.define(f"{name}({', '.join([*outputs, *_declarations(schema)])}) -> ()")
    keyword_names = [arg.name for arg in schema.arguments if arg.kwarg_only]

    def run(*args: Any) -> None:
        """Copies the results of ``op`` into the first arguments, if they do not lie there."""
        targets, inputs = args[:num_outputs], args[num_outputs:]
        if flash_attention.takes_output(schema.name) and targets[0].stride(-1) == 1:
            results = flash_attention.forward_into(schema.name, targets[0], inputs)
        else:
            keywords = zip(keyword_names, inputs[num_positional:], strict=True)
            result = op(*inputs[:num_positional], **dict(keywords))
            results = result if isinstance(result, tuple | list) else (result,)
        for target, value in zip(targets, results, strict=True):
            if value.data_ptr() != target.data_ptr():
                target.copy_(value)

    operator = _registered(name, run)
    _calls[operator] = schema.name
    return operator


def _registered(name: str, run: Callable[..., None]) -> torch._ops.OpOverload:
    """Returns memo's operator ``name``, declared before, which now runs ``run``."""
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"memo::{name}", lambda *args: None, lib=_library)
    operator: torch._ops.OpOverload = getattr(torch.ops.memo, name).default
    return operator


_calls: dict[torch._ops.OpOverload, str] = {}
"""An operator of ``into`` -> the one that it calls."""


def called(operator: torch._ops.OpOverload) -> str:
    """Returns the name of ``operator``; of one of ``into`` the name of the one that it calls."""
    return _calls.get(operator, operator._schema.name)


def writes_first(operator: Any) -> bool:
    """True for an operator of ``into`` that writes its first result straight into the buffer."""
    return operator in _calls and flash_attention.takes_output(_calls[operator])


@functools.cache
def spread(num_numbers: int) -> torch._ops.OpOverload:
    """Returns an operator that copies numbers of a tensor into tensors of shape (1,).

    ``(Tensor(a!) out0, ..., Tensor numbers, int[] at) -> ()``; one kernel, and no allocation.
    """
    name = f"spread_{num_numbers}"
    outputs = [f"Tensor(a{number}!) out{number}" for number in range(num_numbers)]
    _library.define(f"{name}({', '.join(outputs)}, Tensor numbers, int[] at) -> ()")

    def run(*args: Any) -> None:
        *targets, numbers, at = args
        parts = numbers.unsqueeze(1).unbind()
        torch._foreach_copy_(targets, [parts[position] for position in at])

    return _registered(name, run)


def copies_results(operator: Any) -> bool:
    """True for an operator of ``into``: what it calls allocates, beside the given buffers."""
    return operator in _calls


def _declarations(schema: Any) -> list[str]:
    """Returns the arguments of ``schema`` as written, without defaults: ``int[2] size``."""
    text = str(schema)
    inside = text[text.index("(") + 1 : text.rindex(") ->")]
    parts = re.split(r", (?=[A-Za-z*])", inside)
    return [part.split("=")[0] for part in parts if part and part != "*"]
