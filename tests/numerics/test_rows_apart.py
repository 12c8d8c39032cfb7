"""Steps in tiles and slices where sizes collide, operands have size 1, or losses are unusual.

Every case was wrong, or ended in a raw exception, while rows were told apart by their sizes.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import memo_compile
from memo_compile.analysis import row_rules
from memo_compile.errors import Infeasible
from memo_compile.reporting import state
from tests.numerics.closeness import assert_equals_eager
from tests.numerics.training import assert_planned, in_ci, memo_compiled

WIDTH, CLASSES = 32, 256


class Mlp(nn.Module):
    """A residual layer; ``change`` is applied to its wide activations."""

    def __init__(self, change: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        self.change = change

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        h = functional.gelu(self.up(x))
        if self.change is not None:
            h = self.change(h, x, *more)
        return x + self.down(h)


class Attention(Mlp):
    """Attention with a mask, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=more[0])
        return super().forward(x + mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))


class TrainedMask(nn.Module):
    """Attention op by op, since its mask is trained. The bias of keys gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mask = nn.Parameter(torch.randn(15))

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        split = [
            part(x).unflatten(-1, (8, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        ]
        mixed = functional.scaled_dot_product_attention(*split, attn_mask=self.mask)
        return x + mixed.transpose(1, 2).flatten(2)


class Net(nn.Module):
    """Two layers, a head, and a loss."""

    def __init__(self, layer: Callable[[], nn.Module], loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.loss = loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *more)
        return self.loss(self.head(x), labels)


def plain(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=0.1)


def variance(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.var_mean(logits, -1)[0].sum()


def two_best(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.topk(2, -1)[0].sum()


def turned(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding with complex numbers."""
    pairs = torch.view_as_complex(h.reshape(*h.shape[:-1], -1, 2))
    angles = torch.outer(torch.arange(h.shape[1]).float(), torch.ones(pairs.shape[-1]))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def with_first_token(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return h + x[:, :1].expand(*x.shape).repeat(1, 1, 8)


def inputs(*shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(*shape, WIDTH, generator=generator),
        torch.randint(0, CLASSES, shape, generator=generator),
    ]


def with_mask(size: int) -> list[torch.Tensor]:
    return [*inputs(size, size), torch.randn(size, size)]


def with_scatter() -> list[torch.Tensor]:
    return [*inputs(8), torch.tensor([[3, 9, 100]]), torch.tensor([[1.0, -2.0, 3.0]])]


CASES: dict[str, tuple[Callable[[], nn.Module], list[torch.Tensor]]] = {
    "mask [T, T], as many sequences as tokens": (lambda: Net(Attention, plain), with_mask(4)),
    "scatter of one row": (
        lambda: Net(lambda: Mlp(lambda h, x, at, new: h.scatter(1, at, new)), plain),
        with_scatter(),
    ),
    "scatter_add of one row": (
        lambda: Net(lambda: Mlp(lambda h, x, at, new: h.scatter_add(1, at, new)), plain),
        with_scatter(),
    ),
    "label smoothing": (lambda: Net(Mlp, smoothed), inputs(4, 4)),
    "label smoothing of an odd number": (lambda: Net(Mlp, smoothed), inputs(1, 7)),
    "variance of two rows": (lambda: Net(Mlp, variance), inputs(1, 2)),
    "two best of two rows": (lambda: Net(Mlp, two_best), inputs(2, 1)),
    "complex rotary embedding": (lambda: Net(lambda: Mlp(turned), plain), inputs(4, 4)),
    "the first token everywhere": (lambda: Net(lambda: Mlp(with_first_token), plain), inputs(4, 4)),
    "one token": (lambda: Net(Mlp, plain), inputs(1, 1)),
}


def compare(name: str, **options: object) -> None:
    """One step of memo and of eager; each parameter's error relative to its own gradient."""
    make, given = CASES[name]
    ours = make()
    eager = copy.deepcopy(ours)
    memo_compiled(ours, costs="roofline", token_granule=1, **options)(*given).backward()
    eager(*given).backward()
    assert_equals_eager(ours, eager)
    assert_planned()


def assert_nothing_dropped() -> None:
    """Every slice was compared with the whole, and none was refused."""
    words = ("compared", "Error", "something else", "differs from")
    assert [
        note for note in memo_compile.report().notes if any(word in note for word in words)
    ] == []


FLOORS_IN_FULL = (
    "scatter_add of one row",
    "label smoothing",
    "label smoothing of an odd number",
    "variance of two rows",
    "the first token everywhere",
    "mask [T, T], as many sequences as tokens",
    "complex rotary embedding",
    "one token",
)


@pytest.mark.parametrize("name", in_ci(CASES, *(CASES.keys() - FLOORS_IN_FULL[:5])))
def test_tiles(name):
    compare(name, token_tiles=4)
    assert_nothing_dropped()


@pytest.mark.parametrize("name", in_ci(CASES, *(CASES.keys() - FLOORS_IN_FULL)))
def test_the_floor(name):
    """A budget below every plan names a floor, and that floor can be kept."""
    make, given = CASES[name]
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        memo_compiled(make(), costs="roofline", token_granule=1, memory_budget=1000)(*given)
    error = raised.value.inner_exception
    assert isinstance(error, Infeasible)
    torch._dynamo.reset()
    state.reset()
    compare(name, memory_budget=error.floor_bytes)
    assert_nothing_dropped()


POLICIES = (
    ("full-recompute", "complex rotary embedding"),
    ("full-recompute", "scatter of one row"),
    ("full-offload", "scatter of one row"),
    ("full-offload", "complex rotary embedding"),
    ("save", "complex rotary embedding"),
    ("save", "scatter of one row"),
)


@pytest.mark.parametrize(("policy", "name"), in_ci(POLICIES, *POLICIES[:3]))
def test_policies(name, policy):
    compare(name, policy=policy)


@pytest.mark.parametrize("name", in_ci(list(CASES)[:2]))
def test_inductor(name):
    compare(name, token_tiles=4, lowering="inductor")


def test_tiles_whose_sums_cancel_are_not_refused():
    ours = Net(TrainedMask, plain)
    eager = copy.deepcopy(ours)
    memo_compiled(ours, costs="roofline", token_tiles=4)(*inputs(4, 15)).backward()
    eager(*inputs(4, 15)).backward()
    for layer in (*ours.layers, *eager.layers):
        assert layer.k.bias.grad.abs().max() < 1e-6 * layer.q.bias.grad.abs().max()
        layer.k.bias.grad = None
    assert_equals_eager(ours, eager)
    assert any(
        "bwd@1.tile" in call for plan in memo_compile.report().plans for call in plan.offsets
    )
    assert_nothing_dropped()


def test_tiles_that_a_wrong_rule_proposes_are_refused(monkeypatch):
    """A rule that takes an index of one row for one that is broadcast: numbers tell otherwise."""
    name = "scatter of one row"
    monkeypatch.setitem(row_rules._BY_NAME, "scatter", row_rules._broadcast)
    compare(name, token_tiles=4)
    notes = [note for note in memo_compile.report().notes if "compute something else" in note]
    assert len(notes) == 3, (
        "the forward of a layer, and the backward of the first and of the others"
    )


@pytest.mark.parametrize("budget", in_ci([1000, "1GB"], 1000))
def test_a_rule_that_raises_ends_in_a_plan_or_in_infeasible(monkeypatch, budget):
    def broken(*_: object) -> None:
        raise KeyError("div_2")

    monkeypatch.setitem(row_rules._BY_NAME, "addmm", broken)
    make, given = CASES["label smoothing"]
    model = memo_compiled(make(), costs="roofline", memory_budget=budget)
    if budget == 1000:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
            model(*given)
        assert isinstance(raised.value.inner_exception, Infeasible)
        assert raised.value.inner_exception.floor_bytes is not None
        assert any("KeyError: 'div_2'" in note for note in memo_compile.report().notes)
    else:
        model(*given).backward()
        assert_planned()
