"""A router's choice is made once: what experts multiply is recomputed for the rows it chose."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

import memo_compile
from tests.numerics.closeness import Reference
from tests.numerics.training import assert_planned, in_ci, sgd

HIDDEN, WIDE, EXPERTS, TOKENS = 16, 32, 4, 64


class Experts(nn.Module):
    """Two of four experts see each token; rows are sorted by expert and multiplied in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.into = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * WIDE) / 4)
        self.out = nn.Parameter(torch.randn(EXPERTS, WIDE, HIDDEN) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        weights, experts = self.router(normed).softmax(-1).topk(2)
        experts, order = experts.reshape(-1).sort()
        counts = functional.one_hot(experts, EXPERTS).sum(0)
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = grouped(normed[order // 2], self.into, ends).chunk(2, -1)
        rows = grouped(functional.silu(gate) * up, self.out, ends)
        rows = rows * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return x + rows[back].view(len(x), 2, -1).sum(1)


def grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows of each group by its own matrix; in float64 one after the other, for the reference.

    The operator is traced for bfloat16 alone.
    """
    if rows.dtype != torch.float64:
        return torch._grouped_mm(rows.bfloat16(), weights.bfloat16(), offs=ends).to(rows.dtype)
    parts = rows.split(ends.diff(prepend=ends.new_zeros(1)).tolist())
    return torch.cat([part @ own for part, own in zip(parts, weights, strict=True)])


class Mixture(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


@pytest.fixture(scope="module")
def reference() -> Reference:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(TOKENS, HIDDEN)}
    return Reference((Mixture(3), inputs, lambda model, **inputs: model(**inputs)), [sgd])


SETTINGS = (
    ("aten", 4, "full-recompute"),
    ("aten", 1, "full-recompute"),
    ("inductor", 1, "full-recompute"),
    ("aten", 4, "memo"),
    ("inductor", 1, "kwai"),
)


@pytest.mark.parametrize(("lowering", "tiles", "policy"), in_ci(SETTINGS, *SETTINGS[:2]))
def test_products_of_experts_are_made_again_for_the_rows_that_were_chosen(
    lowering, tiles, policy, reference
):
    options = {"lowering": lowering, "token_tiles": tiles, "policy": policy, "strict": True}
    options |= {"debug": "poison,copies-late", "costs": "roofline", "token_granule": 8}
    ours = reference.train(functools.partial(torch.compile, backend="memo", options=options))
    assert_planned()
    reference.assert_close(ours)
    decided = {
        (row.tensor.split()[0].rstrip("_0123456789"), row.tensor.partition(" ")[2], row.decision)
        for row in memo_compile.report().plans[-1].decisions
    }
    assert ("cumsum", f"[{EXPERTS}]", "SAVE") in decided
    assert ("getitem", f"[{TOKENS}, 2]", "RECOMPUTE") not in decided  # what topk chose
    if policy == "full-recompute":
        assert "RECOMPUTE" in {decision for name, _, decision in decided if name == "_grouped_mm"}
