"""Which saved activations are rounded to float8."""

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from memo_compile.analysis.views import results_of
from memo_compile.passes.store_float8 import FLOAT8_NAME, StoreFloat8

aten = torch.ops.aten


def saved(function, *inputs: torch.Tensor) -> fx.GraphModule:
    """The forward ``(loss, value)`` of ``value = function(...)`` behind the pass."""

    def forward(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = function(*given)
        return value.sum(), value

    gm = make_fx(forward, tracing_mode="fake")(*inputs)
    gm = StoreFloat8(num_fwd_outputs=1)(gm).graph_module
    gm.recompile()
    return gm


X = torch.randn(32, 256)


@pytest.mark.parametrize(
    ("function", "is_rounded"),
    [
        (lambda x: x.sigmoid() * 3, True),
        (lambda x: (x @ x.t()).exp(), True),  # rows of 32, with a scale each
        (lambda x: x > 0, False),
        (lambda x: torch.where(x > 0, x, torch.finfo(x.dtype).min), False),
        (lambda x: x * 2 + x[:, :1], False),
        (lambda x: x.sigmoid()[:, :16] * 2, False),
        (lambda x: x.double() * 2, False),
    ],
)
def test_what_is_rounded(function, is_rounded: bool) -> None:
    value = results_of(saved(function, X).graph)[1]
    assert value.name.endswith(FLOAT8_NAME) == is_rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_come_back_within_a_sixteenth(dtype: torch.dtype) -> None:
    x = (torch.randn(16, 256) * torch.logspace(-6, 6, 16).view(-1, 1)).to(dtype)
    x[3] = 0.0
    rows = saved(lambda value: value * 1.0, x)(x)[1]
    assert rows.shape == (16, 258)
    values = rows[:, :256].view(torch.float8_e4m3fn).float().view(16, 2, 128)
    scales = (rows[:, 256:].float() - 127).exp2().view(16, 2, 1)
    again, exact = (values * scales).view(16, 256), x.float()
    large = exact.abs() > exact.abs().amax(-1, keepdim=True) / 1024
    torch.testing.assert_close(again[large], exact[large], rtol=1 / 16, atol=0.0)
    assert not again[3].any()
    assert again.isfinite().all()
