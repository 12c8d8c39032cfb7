"""Entries of torch's databases, and which of their samples are tried: always the same ones.

torch's databases (``op_db``, ``module_db``) hold for each operator or module a generator of calls
that torch's own tests make.
"""

import copy
import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import hypothesis
import torch
from torch import nn

from tests.opdb.blocks import NUM_BLOCKS, Call, emptied

FORMS = ("plain", "strided", "expanded")

MODES = ("recompute", "offload", "floor")
"""Everything made again, everything copied to the host, and the least budget that can be kept."""

MOST_CALLS = 60
"""Of an entry's calls that are looked at."""

MOST_NUMBERS = 20_000
"""In the tensors of a call: what is larger says no more, and takes longer."""

FEW_NUMBERS = 8
"""Calls with fewer are taken only where there are no others: nearly nothing is saved for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One call of an entry, and how its tensors lie in memory."""

    entry: str
    """``op NAME`` or ``module NAME``."""
    dtype: str
    form: str = "plain"
    """See ``Call.form``."""
    at: float = 0.0
    """Where among the entry's calls it is: 0 the first, 1 the last."""

    def __str__(self) -> str:
        return f"{self.entry} {self.dtype} {self.form}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What runs as one model: calls side by side in each block."""

    samples: Sequence[Sample]
    modes: Sequence[str]
    """See ``MODES``."""
    lowering: str = "aten"


@functools.cache
def databases() -> Mapping[str, Any]:
    """Every entry that can be differentiated, by name, sorted."""
    # On import torch's tests forbid flags of backends to be set, and load a profile of hypothesis.
    profile = hypothesis.settings.get_current_profile_name()
    with mock.patch.object(torch.backends, "disable_global_flags"):
        from torch.testing._internal import common_methods_invocations
        from torch.testing._internal.common_modules import module_db
    hypothesis.settings.load_profile(profile)
    # Operators that draw seed their generator in each call, which Dynamo does not trace. Here
    # every step is seeded instead.
    common_methods_invocations.wrapper_set_seed = _called
    op_db = common_methods_invocations.op_db
    entries = {f"op {_operator_name(entry)}": entry for entry in op_db if entry.supports_autograd}
    entries |= {f"module {entry.name}": entry for entry in module_db}
    return dict(sorted(entries.items()))


def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _operator_name(entry: Any) -> str:
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name


def quick_cases_of(numbered: Mapping[str, int]) -> list[Case]:
    """One call of each entry, op by op, in one mode."""
    samples = [
        Sample(entry=name, dtype=usual, form=FORMS[number % 3], at=number % 5 / 4)
        for name, number in numbered.items()
        if (usual := usual_dtype(name)) is not None
    ]
    turn = min(numbered.values()) // len(numbered)
    return [Case(samples=samples, modes=[MODES[turn % 2]])] if samples else []


def cases_of(numbered: Mapping[str, int]) -> list[Case]:
    """What is tried of some entries, each of them with its number.

    Every entry in float64, op by op: its first call as it is, one from the middle with gaps in
    memory, one from the end with a dimension repeated; under the least budget one of the three. Of
    three entries in turn one has complex numbers and bfloat16 besides, and one goes through
    Inductor, in one mode.
    """
    samples: list[Sample] = []
    cornered, small, compiled = [], [], []
    for name, number in numbered.items():
        dtypes, usual = _dtypes(databases()[name]), usual_dtype(name)
        if usual is None:
            continue
        turn, kind = divmod(number, 3)
        forms = [
            Sample(entry=name, dtype=usual, form=form, at=at / 2) for at, form in enumerate(FORMS)
        ]
        samples += forms
        cornered.append(forms[turn % 3])
        if kind == 0 and "complex128" in dtypes:
            samples.append(Sample(entry=name, dtype="complex128", at=0.25))
        if kind == 0 and "bfloat16" in dtypes:
            small.append(Sample(entry=name, dtype="bfloat16", at=0.25))
        if kind == 1:
            compiled.append(forms[0])
    turn = min(numbered.values()) // len(numbered)
    cases = [
        Case(samples=samples, modes=["recompute", "offload"]),
        Case(samples=cornered, modes=["floor"]),
        Case(samples=small, modes=[MODES[turn % 2]]),
        Case(samples=compiled, modes=[MODES[turn % 3]], lowering="inductor"),
    ]
    return [case for case in cases if case.samples]


def usual_dtype(name: str) -> str | None:
    """In which most of an entry's calls are made."""
    dtypes = _dtypes(databases()[name])
    return next((dtype for dtype in ("float64", "complex128", "float32") if dtype in dtypes), None)


def _dtypes(entry: Any) -> set[str]:
    if hasattr(entry, "supported_backward_dtypes"):
        dtypes = entry.supported_backward_dtypes("cpu")
    else:
        dtypes = entry.dtypes
    return {str(dtype).removeprefix("torch.") for dtype in dtypes}


def candidates(sample: Sample) -> Iterator[Call]:
    """Calls of the sample's entry: the one that it says, then its neighbours."""
    entry = databases()[sample.entry]
    torch.manual_seed(zlib.crc32(str(sample).encode()))
    made = _of_module if sample.entry.startswith("module ") else _of_operator
    calls = made(entry, getattr(torch, sample.dtype), sample.form)
    small = list(filter(_is_small, itertools.islice(calls, MOST_CALLS)))
    taken = [call for call in small if _num_numbers(call) >= FEW_NUMBERS] or small
    first = round(sample.at * (len(taken) - 1)) if taken else 0
    yield from taken[first:]
    yield from reversed(taken[:first])


def _is_small(call: Call) -> bool:
    are_dense = all(tensor.layout == torch.strided and tensor.numel() for tensor in call.tensors)
    return are_dense and 0 < _num_numbers(call) <= MOST_NUMBERS


def _num_numbers(call: Call) -> int:
    return sum(tensor.numel() for tensor in call.tensors)


def _of_operator(entry: Any, dtype: torch.dtype, form: str) -> Iterator[Call]:
    for sample in entry.sample_inputs("cpu", dtype, requires_grad=True):
        tensors: list[torch.Tensor] = []
        args = emptied([sample.input, *sample.args], tensors)
        kwargs = emptied(dict(sample.kwargs), tensors)
        functions = [entry.op] * NUM_BLOCKS
        yield _call(functions, args, kwargs, tensors, form, sample.output_process_fn_grad)


def _of_module(entry: Any, dtype: torch.dtype, form: str) -> Iterator[Call]:
    inputs = entry.module_inputs_func(
        entry, device="cpu", dtype=dtype, requires_grad=True, training=True
    )
    for sample in inputs:
        made = sample.constructor_input
        module = entry.module_cls(*made.args, **made.kwargs).to(dtype).train()
        tensors: list[torch.Tensor] = []
        args = emptied(list(sample.forward_input.args), tensors)
        kwargs = emptied(dict(sample.forward_input.kwargs), tensors)
        if entry.is_lazy:
            with torch.no_grad():
                module(*sample.forward_input.args, **sample.forward_input.kwargs)
        functions = [_copy(module, number) for number in range(NUM_BLOCKS)]
        yield _call(functions, args, kwargs, tensors, form, lambda result: result)


def _copy(module: nn.Module, number: int) -> nn.Module:
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1 + 0.01 * number)
    return copied


def _call(
    functions: Sequence[Callable[..., Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[torch.Tensor],
    form: str,
    finish: Callable[[Any], Any],
) -> Call:
    trained = [at for at, tensor in enumerate(tensors) if tensor.requires_grad]
    return Call(
        functions=functions,
        args=args,
        kwargs=kwargs,
        tensors=tuple(tensor.detach() for tensor in tensors),
        trained=tuple(trained),
        finish=finish,
        form=form,
    )
