"""Graphs of changing sizes go through AOTAutograd once, and compute what eager computes."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional

import memo_compile
from memo_compile.backends import all_lengths
from memo_compile.backends.all_lengths import AllLengths, KnownCut
from memo_compile.errors import Infeasible
from memo_compile.torch_private import inductor_api
from tests.numerics.closeness import assert_equals_eager
from tests.numerics.small import Pair, Stack, leased_slabs
from tests.numerics.training import ATEN, assert_planned, in_ci


@pytest.fixture
def counts(monkeypatch):
    """How often AOTAutograd traced, and steps were made from a cut that was known, or compared."""
    found: Counter[str] = Counter()
    compile_fx, at, compare = inductor_api.compile_fx, KnownCut.at, KnownCut.compare

    def traced(*args, **kwargs):
        found["traces"] += 1
        return compile_fx(*args, **kwargs)

    def made(self, numbers):
        found["known"] += 1
        return at(self, numbers)

    def compared(self, *args):
        found["compared"] += 1
        return compare(self, *args)

    monkeypatch.setattr(KnownCut, "compare", compared)
    monkeypatch.setattr(inductor_api, "compile_fx", traced)
    monkeypatch.setattr(KnownCut, "at", made)
    return found


class Words(nn.Module):
    """A small decoder; ``body`` is what else it does between its layers."""

    def __init__(self, body, hidden: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, hidden)
        self.mix = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.head = nn.Linear(hidden, 13)
        self.body, self.dropout = body, dropout

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.mix:
            x = x + functional.dropout(layer(x).tanh(), self.dropout)
            x = self.body(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def words(tokens: int, batch: int = 2, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed + 100 * tokens + batch)
    return torch.randint(13, (batch, tokens), generator=source)


def assert_lengths(pair: Pair, sizes) -> None:
    """A step each, from eager's parameters, with an optimizer."""
    optimizers = [torch.optim.SGD(of.parameters(), lr=0.01) for of in (pair.ours, pair.eager)]
    for size in sizes:
        pair.assert_step(words(*size) if isinstance(size, tuple) else words(size))
        for optimizer in optimizers:
            optimizer.step()
        pair.ours.load_state_dict(pair.eager.state_dict())


def attends(x: torch.Tensor) -> torch.Tensor:
    tokens = x.shape[1]
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    places = torch.arange(tokens).float().div(tokens)[:, None]
    scores = (x @ x.transpose(1, 2)).div(8).masked_fill(~mask, -1e4).softmax(-1)
    return x + scores @ (x + places)


def branches(x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] > 10:
        x = x * 0.5
    return x.tanh() if x.shape[1] % 2 else x.sigmoid()


def shifts(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[1] // 2
    x = x * (1.0 / x.shape[1] ** 0.5)
    return x + functional.pad(x[:, half:], (0, 0, half, 0)) + x[:, -1:] * x.mean(1, keepdim=True)


def folds(x: torch.Tensor) -> torch.Tensor:
    """Pads to a multiple of four, and works in groups of four."""
    missing = -x.shape[1] % 4
    whole = functional.pad(x, (0, 0, 0, missing))
    groups = whole.view(x.shape[0], -1, 4, x.shape[2])
    return x + groups.softmax(2).flatten(1, 2)[:, : x.shape[1]]


BODIES = {"attends": attends, "branches": branches, "shifts": shifts, "folds": folds}
LENGTHS = (9, 12, 15, 10, 13, 8, 14, 11, 5, 6, 7, 31, 17, 1, 2, 12)


def test_one_trace_and_two_cuts_serve_all_lengths(counts):
    pair = Pair(Words(attends))
    assert_lengths(pair, (*LENGTHS[:6], 70, 40))
    assert_planned()
    assert counts == {"traces": 2, "known": 6, "compared": 2}  # 15 and 70; 40 lies between
    assert leased_slabs() == 0
    assert not memo_compile.report().notes


class Labelled(Words):
    """Labels are an input of their own, which has as many tokens as the other."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.mix:
            x = self.body(x + layer(x).tanh())
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def apart(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return words(tokens), words(tokens, seed=1)


def shifted(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of one tensor, one token apart."""
    whole = words(tokens + 1)
    return whole[:, :-1], whole[:, 1:]


def halves(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of one tensor: where the second begins depends on the length."""
    first, second = torch.stack(apart(tokens)).unbind()
    return first, second


@pytest.mark.full
@pytest.mark.parametrize("inputs", [apart, shifted, halves])
def test_inputs_that_share_a_length(counts, inputs):
    pair = Pair(Labelled(attends))
    for tokens in LENGTHS[:6]:
        pair.assert_step(*inputs(tokens))
    assert_planned()
    assert counts["traces"] == 2
    assert not memo_compile.report().notes


class Scaled(Words):
    """A float of the model's, which ``dynamic=True`` makes an input of the graph."""

    def __init__(self) -> None:
        super().__init__(attends)
        self.scale = 0.5

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.scale


MADE_INPUTS = {
    "a part": lambda h, tokens: (h * 2)[:, :tokens],
    "a later part": lambda h, tokens: (h * 2)[:, 1 : tokens + 1],
    "turned": lambda h, tokens: (h * 2)[:, :tokens].transpose(0, 1),
    "stretched": lambda h, tokens: (h * 2)[:, :1].expand(-1, tokens, -1),
    "of its own": lambda h, tokens: h[:, :tokens] * 2,
}
"""How code outside of the graph makes its input."""


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at each input's
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("lies", in_ci(list(MADE_INPUTS), "a part", "stretched"))
def test_an_input_that_code_outside_made_lies_as_it_does(lies, dynamic):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8))

    def model(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1).tanh().square().sum() + (x * weight).sin().sum()

    compiled = torch.compile(model, backend="memo", dynamic=dynamic, options=ATEN)
    for tokens in (9, 12, 15, 7, 20, 9):
        hidden = torch.randn(2, 24, 8, requires_grad=True)
        found = [
            torch.autograd.grad(of(MADE_INPUTS[lies](hidden, tokens)), (hidden, weight))
            for of in (model, compiled)
        ]
        for ours, eager in zip(*found, strict=True):
            torch.testing.assert_close(eager, ours, rtol=1e-5, atol=1e-5)
    assert_planned()


@pytest.mark.full
def test_floats_that_stay_and_sizes_that_vary(counts):
    pair = Pair(Scaled())
    pair.compiled = torch.compile(pair.ours, backend="memo", options=ATEN, dynamic=True)
    assert_lengths(pair, ((9, 2), (12, 2), (15, 3), (10, 4)))
    assert counts["traces"] == 1
    pair.ours.scale = pair.eager.scale = 0.25
    assert_lengths(pair, ((12, 2),))
    assert counts["traces"] == 2  # by itself: it may be another one in each step
    assert_planned()


@pytest.mark.full
@pytest.mark.parametrize("body", BODIES)
def test_models_whose_python_reads_the_length(body):
    pair = Pair(Words(BODIES[body]), max_plans=32)
    assert_lengths(pair, LENGTHS)
    assert_planned()


@pytest.mark.full
def test_two_sizes_that_vary(counts):
    pair = Pair(Words(attends), max_plans=32)
    sizes = [(9, 2), (12, 3), (13, 2), (10, 3), (15, 3), (11, 2), (14, 2), (8, 3), (12, 12)]
    assert_lengths(pair, sizes)
    assert_planned()
    assert counts["known"] > 2


@pytest.mark.full
def test_a_length_that_is_the_width(counts):
    pair = Pair(Words(attends, hidden=12))
    assert_lengths(pair, (9, 12, 13, 10, 15, 12))
    assert_planned()


@pytest.mark.full
def test_dropout_at_every_length():
    torch.manual_seed(0)
    model = Words(attends, dropout=0.5)
    compiled = torch.compile(model, backend="memo", options=ATEN)
    for tokens in (9, 12, 13, 10, 15, 11):
        losses = []
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(tokens)
            loss = compiled(words(tokens))
            loss.backward()
            losses.append((loss.detach(), model.embed.weight.grad.clone()))
        assert all(map(torch.equal, *losses))
        again = compiled(words(tokens))
        assert not torch.equal(again, losses[0][0])
        del again
    assert_planned()


def test_a_step_whose_plan_is_gone_still_has_its_backward(counts):
    pair = Pair(Words(attends), max_plans=1)
    pair.zero_grad()
    lengths = (9, 12, 13, 10)
    for model in (pair.compiled, pair.eager):
        losses = [model(words(tokens)) for tokens in lengths]
        for loss in losses:
            loss.backward(retain_graph=True)
            loss.backward()
        del losses, loss
    pair.assert_equal()
    assert leased_slabs() == 0


class Returns(nn.Module):
    """Results of the graph that are views, inputs and values that the backward reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()
        self.register_buffer("seen", torch.zeros(32))

    def forward(self, x: torch.Tensor):
        y = self.stack.features(x)
        self.seen.add_(y.detach().mean(0))
        z = y.exp()
        return z, z[1:], x, y * self.seen, x.shape[0] * 2


def test_results_of_many_kinds_and_a_buffer():
    pair = Pair(Returns())
    for rows in (9, 12, 13, 10):
        x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
        pair.zero_grad()
        grads = []
        for model in (pair.compiled, pair.eager):
            given = x.clone().requires_grad_()
            z, tail, same, more, double = model(given)
            assert double == 2 * rows
            assert same.shape == x.shape
            weights = torch.arange(tail.numel()).view(tail.shape[1], -1).t() / tail.numel()
            (z.sum() + (tail * weights).sum() + more.square().mean()).backward()
            grads.append(given.grad)
        pair.assert_equal()
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(pair.ours.seen, pair.eager.seen)
    assert_planned()


def test_inputs_that_share_memory_and_are_written():
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x, y):
            x.add_(1.0)
            return (self.weight * x * y).sum()

    pair = Pair(Writes())
    for rows in (9, 12, 13):
        for shares in (False, True):
            pair.zero_grad()
            for model in (pair.compiled, pair.eager):
                whole = torch.arange(4.0 * 2 * rows).view(2 * rows, 4)
                given = whole[:rows], (whole[1 : rows + 1] if shares else whole[rows:])
                model(*given).backward()
            pair.assert_equal()


@pytest.mark.full
def test_where_torch_cannot_trace_with_symbols_each_length_is_traced(counts, monkeypatch):
    def refuses(*_, **__):
        raise RuntimeError("no symbols today")

    monkeypatch.setattr(all_lengths._Traced, "__init__", refuses)
    pair = Pair(Words(attends))
    assert_lengths(pair, (9, 12, 13, 10))
    assert_planned()
    assert counts["traces"] == 4
    assert any("no symbols today" in note for note in memo_compile.report().notes)


@pytest.mark.full
def test_lengths_under_a_budget_keep_it_and_are_monotone():
    model = Stack(hidden=32, num_layers=4)
    options = {"costs": "roofline", "max_plans": 32}
    Pair(model, **options).assert_step(torch.randn(256, 32))
    plan = memo_compile.report().plans[-1]
    budget = plan.peak_bytes - plan.arena_bytes // 3
    torch._dynamo.reset()
    memo_compile.reporting.state.reset()
    pair = Pair(model, **options, memory_budget=budget)
    peaks = {}
    for rows in (130, 192, 140, 250, 161, 200, 256, 131):
        pair.assert_step(torch.randn(rows, 32))
        peaks[rows] = memo_compile.report().plans[-1].peak_bytes
    assert_planned()
    assert all(peak <= budget for peak in peaks.values())
    with pytest.raises(Infeasible, match="largest so far that fit"):
        pair.compiled(torch.randn(4096, 32))


@pytest.mark.full
def test_autocast_at_every_length():
    pair = Pair(Words(attends))
    for tokens in (9, 12, 13, 10, 15):
        pair.zero_grad()
        for model in (pair.compiled, pair.eager):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(words(tokens))
            loss.backward()
        assert_equals_eager(pair.ours, pair.eager, relative=0.05)
    assert_planned()


def test_a_graph_forgets_no_more_than_it_must():
    lengths = AllLengths(gm=None, positions=(0,))  # type: ignore[arg-type]
    assert lengths.compiled((1,), None, []) is None  # type: ignore[arg-type]
