"""``saved_dtype="float8"``: saved activations rounded to float8 where that makes a step fit."""

import copy

import pytest
import torch
from torch import nn

import memo_compile
from memo_compile.errors import ConfigError, Infeasible
from tests.models import gpt2

LOSSY = {"lowering": "aten", "costs": "roofline", "saved_dtype": "float8", "token_tiles": 1}


class Mlp(nn.Module):
    """One layer, whose maximum a comparison reads again in the backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """A gated layer with a residual."""
        wide = torch.nn.functional.silu(self.up(x))
        wide = wide / wide.amax(-1, keepdim=True).clamp_min(1.0)
        return x + self.down(wide)


def _stack(layers: int = 6, width: int = 64, dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Mlp(width) for _ in range(layers))).to(dtype)


def _floor(model: nn.Module, x: torch.Tensor, options: dict) -> int:
    """The least bytes that a step of ``model`` takes with these options."""
    options = options | {"memory_budget": 1}
    compiled = torch.compile(copy.deepcopy(model), backend="memo", options=options)
    with pytest.raises(Infeasible) as error:
        compiled(x).square().mean()
    return error.value.floor_bytes


def _gradients(model: nn.Module, x: torch.Tensor, options: dict | None):
    model = copy.deepcopy(model)
    if options is None:
        model(x).float().square().mean().backward()
    else:
        torch.compile(model, backend="memo", options=options)(x).float().square().mean().backward()
    return [parameter.grad.float() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_fits_with_rounded_activations(dtype):
    model, x = _stack(dtype=dtype), torch.randn(2, 128, 64).to(dtype)
    options = LOSSY | {"policy": "save", "debug": ("poison",)}
    lossy, exact = _floor(model, x, options), _floor(model, x, options | {"saved_dtype": "same"})
    assert lossy < exact
    gradients = _gradients(model, x, options | {"memory_budget": lossy})
    assert memo_compile.report().plans[-1].peak_bytes <= lossy
    rounded = [row for row in memo_compile.report().plans[-1].decisions if "_float8" in row.tensor]
    assert rounded
    for row in rounded:  # a byte for each number, and one for the scale of each block
        assert row.bytes == 2 * 128 * 258
    assert any("rounded to float8" in note for note in memo_compile.report().notes)
    for ours, eager in zip(gradients, _gradients(model, x, None), strict=True):
        assert (ours - eager).norm() < 0.1 * eager.norm()


def test_a_step_that_fits_as_it_is_keeps_its_numbers():
    model, x = _stack(), torch.randn(2, 128, 64)
    gradients = _gradients(model, x, LOSSY | {"memory_budget": "1GiB"})
    for ours, exact in zip(
        gradients, _gradients(model, x, LOSSY | {"saved_dtype": "same"}), strict=True
    ):
        assert torch.equal(ours, exact)


def test_masks_statistics_and_attention_are_never_rounded():
    model, inputs, loss = gpt2(num_layers=3, seq=32, dropout=0.1)
    options = LOSSY | {"policy": "save"}
    with pytest.raises(Infeasible) as error:
        torch.compile(loss, backend="memo", options=options | {"memory_budget": 1})(model, **inputs)
    torch._dynamo.reset()
    options["memory_budget"] = error.value.floor_bytes
    torch.compile(loss, backend="memo", options=options)(model, **inputs).backward()
    rows = memo_compile.report().plans[-1].decisions
    rounded = {row.role for row in rows if "_float8" in row.tensor}
    exact = {row.role for row in rows if "_float8" not in row.tensor}
    assert rounded
    assert not any("attention" in role for role in rounded)
    assert exact
    dtypes = {row.tensor: row for row in rows}
    assert not any("native_dropout" in name and "_float8" in name for name in dtypes)


def test_exact_and_float8_exclude_each_other():
    with pytest.raises(ConfigError, match="saved_dtype: exact=True forbids"):
        memo_compile.configure(saved_dtype="float8", exact=True)
