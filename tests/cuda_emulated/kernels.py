"""Kernels that compute: torch's CPU operators on the emulated memory, in their stream's order.

So a copy that comes too early or too late changes numbers. Each also says what it reads and writes
(``order.races``). Nothing here holds a tensor until its kernel runs: as on a GPU, memory that is
given to another owner too early is overwritten.
"""

import ctypes
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tests.cuda_emulated.device_calls import Did, launch, say, shadow

OPERATORS = (
    *("add.out", "add.Tensor", "add_.Tensor", "mul.out", "mul.Tensor", "mul_.Tensor"),
    *("sum.dim_IntList", "fill_.Scalar", "zero_", "_foreach_copy_"),
)
"""Those that the small steps of ``tests.steps.moving`` launch."""

STACK_OPERATORS = (
    *("addmm", "addmm.out", "mm", "mm.out", "sum.IntList_out", "mean", "mean.out", "mean.dim"),
    *("sub.Tensor", "sub.out", "div.Tensor", "div.out", "pow.Tensor_Scalar"),
    *("pow.Tensor_Scalar_out", "tanh", "tanh.out", "erf", "erf.out", "exp", "exp.out"),
    *("rsqrt", "rsqrt.out", "var_mean.correction", "var_mean.correction_out"),
)
"""With OPERATORS, those of steps of ``tests.numerics.small.Stack``, lowered op by op."""

FILLS = ("fill_.Scalar", "zero_")
"""By which Inductor learns the values of constants, when it folds them."""

MOST_BYTES = 2**20
"""What is larger is not computed: it would take the host's memory."""

_library = torch.library.Library("aten", "IMPL")
_installed: set[str] = set()


def install(names: Iterable[str] = OPERATORS) -> None:
    """From now on ``names`` compute, in this process; a second call changes nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced is the point
        for name in names:
            if name not in _installed:
                _installed.add(name)
                packet, overload = [*name.split("."), "default"][:2]
                op = getattr(getattr(torch.ops.aten, packet), overload)
                _library.impl(name, _kernel(op), "CUDA", allow_override=True)


def _kernel(op: torch._ops.OpOverload) -> Callable[..., Any]:
    written = {
        argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }

    def run(*args: Any, **kwargs: Any) -> Any:
        targets = [
            value
            for declared, value in zip(op._schema.arguments, args, strict=False)
            if declared.name in written
        ] + [kwargs[name] for name in written if name in kwargs]
        result = None if targets else _result(op, args, kwargs)
        made = [*_on_device(targets or result)]
        for tensor in _on_device((args, kwargs)):
            _say(Did.READ, tensor)
        for tensor in made:
            _say(Did.WRITE, tensor)
        seen_args, seen_kwargs = _seen(args), _seen(kwargs)
        seen_result = None if targets else [*_tensors(_seen(result))]

        def compute() -> None:
            with torch.no_grad(), torch._C._DisableTorchDispatch():
                found = op(*seen_args, **seen_kwargs)
                if seen_result is not None:
                    for to, value in zip(seen_result, _tensors(found), strict=True):
                        to.copy_(value)

        launch(compute if all(tensor.nbytes <= MOST_BYTES for tensor in made) else lambda: None)
        if not targets:
            return result
        returned = tuple(targets[: len(op._schema.returns)])  # some write into others besides
        return returned[0] if len(returned) == 1 else returned or None

    return run


def _result(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
    """What ``op`` returns, on the device; nothing is in it yet."""
    return _mapped(op(*_mapped(args, _as_meta), **_mapped(kwargs, _as_meta)), _as_made)


def _as_made(shape: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device="cuda")


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _seen(values: Any) -> Any:
    """``values`` as the device sees them: CPU tensors over the same bytes."""
    return _mapped(values, _alias)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(shadow(storage.data_ptr()))
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())


def _say(did: Did, tensor: torch.Tensor) -> None:
    extent = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if tensor.numel():
        say(did, tensor.data_ptr(), extent * tensor.element_size())


def _on_device(values: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in _tensors(values) if tensor.is_cuda)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, tuple | list | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors(value)


def _mapped(values: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(values, torch.Tensor):
        return change(values)
    if isinstance(values, dict):
        return {key: _mapped(value, change) for key, value in values.items()}
    if isinstance(values, tuple | list):
        return type(values)(_mapped(value, change) for value in values)
    return values
