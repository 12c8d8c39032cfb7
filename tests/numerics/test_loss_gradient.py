"""Heads whose gradient is made in the forward: every kind of loss, every way to call backward."""

import copy
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import memo_compile
from memo_compile.passes import loss_gradient
from memo_compile.passes.loss_gradient import GradientOfLoss
from tests.numerics.training import in_ci

WIDTH, VOCABULARY, BATCH, TOKENS = 8, 48, 4, 32


def _soft(logits, labels):
    targets = F.one_hot(labels, VOCABULARY).to(logits.dtype) * 0.9 + 0.1 / VOCABULARY
    return F.cross_entropy(logits, targets)


def _shifted(logits, labels):
    moved = F.pad(labels.view(BATCH, TOKENS), (0, 1), value=-100)[:, 1:]
    loss = F.cross_entropy(logits.float(), moved.reshape(-1), reduction="sum")
    return loss / (moved != -100).sum()


def _with_z(logits, labels):
    return F.cross_entropy(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean()


def _weighted(logits, labels):
    return F.cross_entropy(logits, labels, torch.linspace(0.5, 2, VOCABULARY, dtype=logits.dtype))


def _ignoring(logits, labels):
    return F.cross_entropy(logits, labels.masked_fill(labels % 3 == 0, -100))


def _capped(logits, labels):
    return F.cross_entropy(5 * torch.tanh(logits / 5), labels)


LOSSES = {
    "mean": F.cross_entropy,
    "sum": functools.partial(F.cross_entropy, reduction="sum"),
    "smoothed": functools.partial(F.cross_entropy, label_smoothing=0.1),
    "soft": _soft,
    "shifted": _shifted,
    "z": _with_z,
    "weights": _weighted,
    "ignored": _ignoring,
    "capped": _capped,
}


IN_CI = ("smoothed", "shifted", "capped")
"""The shifted loss is a sum that ignores some labels."""


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))


class WithHead(nn.Module):
    """Two layers, a head and its loss; ``behind`` changes the logits, ``tied`` the weight."""

    def __init__(self, loss, behind=lambda logits: logits, *, tied=False, returns_logits=False):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.loss, self.behind, self.returns_logits = loss, behind, returns_logits

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.behind(self.head(self.norm(x)).flatten(0, 1))
        loss = self.loss(logits, labels.flatten())
        return (loss, logits) if self.returns_logits else loss


def assert_values_are_as_noted(gm):
    """Every node gives a value of the dtype and strides that others read from its meta."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        args, noted = fx.node.map_arg(node.args, lambda read: read.meta["val"]), node.meta["val"]
        made = node.target(*args)
        assert (made.dtype, made.stride()) == (noted.dtype, noted.stride()), node.format_node()


@pytest.fixture
def modified(monkeypatch):
    """Whether the pass changed anything, for each graph it saw; nothing is too small for it."""
    found = []
    run = GradientOfLoss.__call__

    def noted(self, gm):
        result = run(self, gm)
        found.append(result.modified)
        assert_values_are_as_noted(result.graph_module)
        return result

    monkeypatch.setattr(loss_gradient, "MIN_BYTES", 0)
    monkeypatch.setattr(GradientOfLoss, "__call__", noted)
    return found


def _once(result):
    loss = result[0] if isinstance(result, tuple) else result
    loss.backward()


def _scaled(result):
    (result * 0.3).backward()


def _twice(result):
    result.backward(retain_graph=True)
    (result * -2).backward()


def _zero(result):
    (result * 0).backward()


def assert_equals_eager(model, *, backward=_once, dtype=torch.float32, steps=2, **options):
    """Gradients that add up over two steps, and losses, within rounding of eager's."""
    torch.manual_seed(0)
    model = model.to(dtype)
    twin = copy.deepcopy(model)
    options = {"lowering": "aten", "strict": True, "debug": "poison", **options}
    ours = torch.compile(model, backend="memo", options=options)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    for seed in range(steps):
        source = torch.Generator().manual_seed(seed)
        ids, labels = torch.randint(VOCABULARY, (2, BATCH, TOKENS), generator=source)
        found, expected = ours(ids, labels), twin(ids, labels)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        backward(found)
        backward(expected)
    for (name, parameter), like in zip(model.named_parameters(), twin.parameters(), strict=True):
        error = (parameter.grad - like.grad).abs().max()
        assert error <= tolerance * like.grad.abs().max() + 1e-12, name
    assert memo_compile.report().active


@pytest.mark.parametrize(
    ("name", "tiles"),
    in_ci(itertools.product(LOSSES, (1, 4)), ("mean", 1), *((name, 4) for name in IN_CI)),
)
def test_losses(name, tiles, modified):
    assert_equals_eager(WithHead(LOSSES[name]), token_tiles=tiles, backward=_scaled)
    assert modified == [True]
    plan = memo_compile.report().plans[-1]
    assert plan.tiles["epilogue_fwd"] == tiles


@pytest.mark.parametrize(
    ("tied", "backward"),
    in_ci(
        itertools.product((False, True), (_once, _twice, _zero)),
        *((False, _once), (True, _twice), (False, _zero)),
    ),
)
def test_ways_to_call_backward(backward, tied, modified):
    assert_equals_eager(WithHead(F.cross_entropy, tied=tied), backward=backward, token_tiles=4)
    assert modified == [True]


@pytest.mark.parametrize(
    "policy", in_ci(["save", "full-offload", "full-recompute"], "full-offload")
)
def test_steps_that_move(policy, modified):
    model = WithHead(F.cross_entropy)
    assert_equals_eager(model, policy=policy, token_granule=4, memory_budget=2**30, token_tiles=4)
    assert modified == [True]


def test_without_the_pass(modified):
    model = WithHead(F.cross_entropy)
    assert_equals_eager(model, passes=f"-{GradientOfLoss.name}", token_tiles=4)
    assert modified == []


@pytest.mark.full
def test_inductor(modified):
    model = WithHead(_shifted)
    assert_equals_eager(model, lowering="inductor", dtype=torch.bfloat16, token_tiles=4)
    assert modified == [True]


class WithSquares(WithHead):
    """Logits and hidden states read the gradient of one sum: a number, expanded to all tokens."""

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x).flatten(0, 1)
        losses = self.loss(self.head(x), labels.flatten(), reduction="none")
        return (losses + x.square().sum(-1)).sum()


class WithTemperature(WithHead):
    """Its loss is in float32, and the gradient of one bfloat16 number goes through the layers."""

    def forward(self, ids, labels):
        x = self.embed(ids)
        temperature = x.mean().sigmoid()
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).flatten(0, 1) * temperature
        return self.loss(logits.float(), labels.flatten())


class InFloat8(torch.autograd.Function):
    """Its backward is in float8, as of a product of such tensors."""

    @staticmethod
    def forward(ctx, logits):
        return logits.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to(torch.float8_e5m2).to(gradient.dtype)


@pytest.mark.parametrize("tiles", in_ci([1, 4], 4))
def test_an_expanded_number_is_expanded_again(tiles, modified):
    assert_equals_eager(WithSquares(F.cross_entropy), token_tiles=tiles, backward=_scaled)
    assert modified == [True]


def test_the_gradient_of_a_number_keeps_its_type(modified):
    assert_equals_eager(WithTemperature(F.cross_entropy), dtype=torch.bfloat16, token_tiles=4)
    assert modified == [True]


def test_small_gradients_in_float8_are_scaled_first(modified):
    def scaled(loss):
        (loss * 2**16).backward()

    assert_equals_eager(WithHead(F.cross_entropy, InFloat8.apply), backward=scaled)
    assert modified == [False]


class Clamped(torch.autograd.Function):
    """Its backward is not linear."""

    @staticmethod
    def forward(ctx, logits):
        return logits.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.001, 0.001)


def _hooked(logits):
    logits.register_hook(lambda gradient: gradient.clamp(min=-0.001))
    return logits


@pytest.mark.parametrize("behind", [Clamped.apply, _hooked], ids=["function", "hook"])
def test_a_backward_that_is_not_linear_stays_in_the_backward(behind, modified):
    assert_equals_eager(WithHead(F.cross_entropy, behind), backward=_scaled)
    assert modified == [False]


def test_what_the_user_takes_and_exactness_leave_the_head_as_it_is(modified):
    assert_equals_eager(WithHead(F.cross_entropy, returns_logits=True))
    assert modified == [False]
    torch._dynamo.reset()
    assert_equals_eager(WithHead(F.cross_entropy), exact=True)
    assert modified == [False]


@pytest.mark.parametrize("lowering", in_ci(["aten", "inductor"], "aten"))
def test_labels_out_of_range_are_an_error_in_tiles_too(lowering, modified):
    model = WithHead(_soft)
    ours = torch.compile(model, backend="memo", options={"lowering": lowering, "token_tiles": 4})
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    ours(ids, ids)
    assert memo_compile.report().plans[-1].tiles["epilogue_fwd"] == 4
    for call in (model, ours):
        with pytest.raises(RuntimeError, match="Class values must be"):
            call(ids, ids + VOCABULARY)
