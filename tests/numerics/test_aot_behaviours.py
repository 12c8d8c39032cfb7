"""What programs do with inputs, results and gradients: the same under memo as in eager.

Each case is a training around one thing that AOTAutograd has a rule for: inputs that share memory,
results that are views, writes, hooks, gradients of odd layouts.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memo_compile
from tests.numerics.aot_cases import WIDTH, Case, Compile, deep, leaf, weights
from tests.numerics.aot_gradient_cases import CASES
from tests.numerics.training import ATEN, in_ci

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:TwoTensor does not implement"),
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex"),
]

INHERITED = {
    "gradient_of_the_last_result": "zeros where eager has no gradient",
}
"""Cases in which torch's own aot_eager differs from eager too, and how."""


class _Refused(Exception):
    """Stands for any error of a program."""


def outcome(run_case: Case, compile: Compile) -> list[Any]:
    try:
        return run_case(compile)
    except Exception as error:  # compared with eager's, whatever it is
        return [_Refused(f"{type(error).__name__}: {error}")]


def _tolerance(dtype: torch.dtype) -> dict[str, float]:
    if dtype in (torch.float32, torch.bfloat16):  # under autocast
        return {"rtol": 2e-2, "atol": 2e-2}
    return {"rtol": 1e-9, "atol": 1e-9} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-5}


def difference(ours: list[Any], expected: list[Any]) -> str:
    """How two outcomes differ; empty where they do not."""
    if isinstance(expected[0], _Refused) or isinstance(ours[0], _Refused):
        both = isinstance(expected[0], _Refused) and isinstance(ours[0], _Refused)
        return "" if both else f"{ours[0]!s:.300} in place of {expected[0]!s:.300}"
    if len(ours) != len(expected):
        return f"{len(ours)} observations in place of {len(expected)}"
    for at, (own, other) in enumerate(zip(ours, expected, strict=True)):
        if isinstance(own, torch.Tensor):
            close = own.shape == other.shape and torch.allclose(
                own.to(torch.complex128), other.to(torch.complex128), **_tolerance(own.dtype)
            )
            if not close:
                return f"observation {at}: {own} in place of {other}"
        elif own != other:
            return f"observation {at}: {own} in place of {other}"
    return ""


@contextlib.contextmanager
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


COVERED = {
    "accumulated_gradients",
    "autocast_outside",
    "channels_last",
    "complex_numbers",
    "evaluation_between_steps",
    "gradient_of_a_part",
    "gradient_of_the_first_result",
    "gradient_of_the_second_result",
    "gradient_that_is_transposed",
    "integers",
    "numbers_beside_tensors",
    "some_layers_are_frozen",
    "the_result_goes_in_again",
    "the_same_result_twice_and_none",
    "tied_parameters",
    "two_forwards_then_two_backwards",
    "views_that_do_not_overlap",
}
"""Cases whose law another case, or another file, holds in CI as well."""


@pytest.mark.parametrize("policy", in_ci(["auto", "full-recompute"], "full-recompute"))
@pytest.mark.parametrize("name", in_ci(CASES, *(CASES.keys() - COVERED)))
def test_as_in_eager(name: str, policy: str) -> None:
    run_case = CASES[name]
    with _fresh():
        expected = outcome(run_case, lambda function: function)
    options = {**ATEN, "costs": "roofline", "policy": policy}
    with _fresh():
        ours = outcome(run_case, lambda f: torch.compile(f, backend="memo", options=options))
        report = memo_compile.report()
    if name in REFUSED:
        assert isinstance(ours[0], _Refused)
        assert REFUSED[name] in str(ours[0])
        return
    wrong = difference(ours, expected)
    if not wrong:
        assert name not in INHERITED, "torch has mended it"
        assert name in UNPLANNED or (report.active and report.plans)
        return
    with _fresh():
        judge = outcome(run_case, lambda f: torch.compile(f, backend="aot_eager"))
    assert name in INHERITED, f"memo: {wrong}; aot_eager: {difference(judge, expected) or 'right'}"
    assert difference(judge, expected)


REFUSED = {"data_of_an_input_is_replaced": "gives an input memory that the step makes"}
"""Cases that no plan can serve, and how that is said; plain Inductor runs them."""

UNPLANNED = {
    "a_leaf_is_written",
    "two_forwards_then_two_backwards",
    "the_result_goes_in_again",
}
"""Cases whose forward is refused, or some of whose steps run in ordinary memory."""


@pytest.mark.full
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_runs_all_the_same(name: str) -> None:
    expected = outcome(CASES[name], lambda function: function)
    ours = outcome(CASES[name], lambda f: torch.compile(f, backend="memo"))
    assert not difference(ours, expected)
    assert not memo_compile.report().active


def test_a_second_derivative_is_refused_in_words() -> None:
    run = torch.compile(deep, backend="memo", options={**ATEN, "costs": "roofline"})
    x, layers = leaf(4, WIDTH), weights()
    (gradient,) = torch.autograd.grad(run(x, layers).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()
