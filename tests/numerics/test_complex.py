"""Complex numbers, and values that are read conjugated or negated, kept, copied and made again."""

import copy
import itertools

import pytest
import torch
from memo_runtime.instructions import view_inside
from torch import nn

import memo_compile
from memo_compile.errors import Infeasible, UnsupportedGraph
from tests.numerics.budget_cases import SCHEDULES
from tests.numerics.training import adamw, assert_planned, in_ci, memo_compiled


class Layer(nn.Module):
    """Makes a value that it saves as it is, or read in another way."""

    def __init__(self, kind: str, width: int = 16) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.pairs = nn.Linear(width, 2 * width)
        self.scale = nn.Parameter(torch.linspace(0.2, 0.8, width))

    def forward(self, x):
        y = self.norm(x)
        if self.kind == "transform":
            f = torch.fft.rfft(y * self.scale, dim=1)
            y = torch.fft.irfft(f + f * f.conj() * 0.01, n=x.shape[1], dim=1)
        else:
            z = torch.view_as_complex(self.pairs(y).unflatten(-1, (-1, 2)))
            y = VALUES[self.kind](z)
        return x + self.out(y)


def conjugated(z):
    made = z * z.conj() * 0.1 + z
    return made.real + made.imag


def negated(z):
    imaginary = (z * z).conj().imag  # shown negated
    return imaginary * torch.sigmoid(imaginary)


def both(z):
    w = (z * z).conj()
    return (w * torch.exp(1j * w.imag)).real + w.imag * w.real


VALUES = {"conjugated": conjugated, "negated": negated, "both": both}
KINDS = ("transform", *VALUES)
POLICIES = ("save", "full-offload", "full-recompute")
EARLY, LATE = SCHEDULES[1:3]


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def assert_trains_as_eager(kind, **options):
    """Three steps of two batches each, and an optimizer."""
    torch.manual_seed(0)
    model = Model(kind)
    ours = copy.deepcopy(model)
    compiled = memo_compiled(ours, **options)
    optimizers = adamw(model), adamw(ours)
    for _ in range(3):
        for _ in range(2):
            x = torch.randn(2, 33, 16)
            loss, found = model(x), compiled(x)
            torch.testing.assert_close(found, loss)
            loss.backward()
            found.backward()
        pairs = zip(model.named_parameters(), ours.parameters(), strict=True)
        for (name, expected), own in pairs:
            if expected.grad is None:
                assert own.grad is None
                continue
            least = 1e-5 * float(expected.grad.abs().max())
            torch.testing.assert_close(
                own.grad,
                expected.grad,
                rtol=1e-4,
                atol=least,
                msg=lambda text, n=name: f"{n}: {text}",
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_planned()


@pytest.mark.parametrize(
    ("kind", "policy", "schedule"),
    in_ci(
        itertools.product(KINDS, POLICIES, (EARLY, LATE)),
        ("transform", "full-recompute", EARLY),
        ("conjugated", "full-offload", LATE),
        ("negated", "save", EARLY),
        ("both", "full-offload", EARLY),
        ("both", "full-recompute", LATE),
    ),
)
def test_what_is_read_conjugated_or_negated_equals_eager(kind, policy, schedule):
    assert_trains_as_eager(kind, policy=policy, debug=schedule)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("kind", in_ci(["transform", "conjugated"], "conjugated"))
def test_also_as_inductor_lowers_it(kind):
    assert_trains_as_eager(kind, policy="full-offload", lowering="inductor")


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_also_within_a_budget(kind):
    torch.manual_seed(0)
    with pytest.raises(Infeasible) as caught:
        memo_compiled(Model(kind), memory_budget=1)(torch.randn(2, 33, 16))
    assert_trains_as_eager(kind, memory_budget=caught.value.floor_bytes * 5 // 4)


class Multiplied(nn.Module):
    """Layers that all multiply their input with what the model is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, z):
        x = z.real
        for layer in self.layers:
            x = x + torch.tanh(layer((z * self.scale * z).abs()))
        return x.square().mean()


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("policy", in_ci(POLICIES, "full-recompute"))
@pytest.mark.parametrize("shown", [torch.conj, lambda z: z.conj().imag], ids=["conj", "neg"])
def test_an_input_that_other_code_shows_conjugated_or_negated(shown, policy):
    torch.manual_seed(0)
    model = Multiplied()
    ours = copy.deepcopy(model)
    compiled = memo_compiled(ours, policy=policy)
    for _ in range(2):
        leaf = torch.randn(5, 6, dtype=torch.complex64, requires_grad=True)
        own = leaf.detach().clone().requires_grad_()
        model(shown(leaf)).backward()
        compiled(shown(own)).backward()
        torch.testing.assert_close(own.grad, leaf.grad)
        for expected, found in zip(model.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)
    assert_planned()


class Written(nn.Module):
    """Layers on a real input, which is written into where ``writes``."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        if self.writes:
            x.mul_(0.5)
        for layer in self.layers:
            x = x + torch.tanh(layer(x * x - x))
        return x.square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("writes", "lowering"),
    in_ci(
        itertools.product((False, True), ("aten", "inductor")), (False, "inductor"), (True, "aten")
    ),
)
def test_a_real_input_that_is_shown_negated_is_read_and_written_as_it_is_shown(lowering, writes):
    """Stock Inductor reads its memory without the sign."""
    torch.manual_seed(0)
    model = Written(writes=writes)
    ours = copy.deepcopy(model)
    compiled = memo_compiled(ours, lowering=lowering, policy="full-offload")
    for is_negated in (False, True, True):
        leaf = torch.randn(5, 6, dtype=torch.complex64, requires_grad=True)
        own = leaf.detach().clone().requires_grad_()
        inputs = [(z * 1).conj().imag if is_negated else (z * 1).imag for z in (leaf, own)]
        for call, shown in zip((model, compiled), inputs, strict=True):
            assert shown.is_neg() == is_negated
            call(shown).backward()
        torch.testing.assert_close(inputs[1], inputs[0])
        torch.testing.assert_close(own.grad, leaf.grad)
        for expected, found in zip(model.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)
    assert_planned()


def beside_another(shown, other, weight):
    shown.add_(2)
    return ((other * 1) @ weight).tanh() + shown


def given_back(shown, _, weight):
    return ((shown * 1) @ weight).tanh(), shown[1:3]


def by_place(shown, _, weight):
    return (torch.as_strided(shown, (4, 6), (24, 2), 1) @ weight).tanh()


MEMORY_IS_NEEDED = {
    "lies in memory of another": (beside_another, lambda z: (z.conj().imag, z.imag)),
    "of another, and one": (beside_another, lambda z: (z.imag, z.conj().imag)),
    "given back": (given_back, lambda z: (z.conj().imag, z.real)),
    "by its place": (by_place, lambda z: (z.conj().imag, z.real)),
}


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
@pytest.mark.parametrize("reason", MEMORY_IS_NEEDED)
def test_where_the_memory_of_a_negated_input_is_needed_it_runs_by_operators(reason, lowering):
    function, views = MEMORY_IS_NEEDED[reason]
    torch.manual_seed(0)
    z = torch.randn(8, 6, dtype=torch.complex64)
    weight = torch.randn(6, 6, requires_grad=True)
    compiled = torch.compile(function, backend="memo", options={"lowering": lowering})
    found = []
    for run in (function, compiled):
        own = z.clone()
        results = run(*views(own), weight)
        results = results if isinstance(results, tuple) else (results,)
        if len(results) > 1:
            results[1].mul_(5)
        (gradient,) = torch.autograd.grad(results[0].sum(), weight)
        found.append([own, gradient, *results])
    torch.testing.assert_close(found[1], found[0])
    assert any(reason in note for note in memo_compile.report().notes)


def test_under_a_budget_a_graph_that_needs_a_negated_input_is_refused():
    z, weight = torch.randn(8, 6, dtype=torch.complex64), torch.randn(6, 6, requires_grad=True)
    compiled = torch.compile(given_back, backend="memo", options={"memory_budget": "1GiB"})
    with pytest.raises(UnsupportedGraph, match="given back"):
        compiled(z.conj().imag, z.real, weight)


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_too(writes, mode):
    torch.manual_seed(0)
    model, z = Written(writes=writes), torch.randn(5, 6, dtype=torch.complex64)
    with mode():
        own, theirs = (z.clone().conj().imag for _ in range(2))
        compiled = torch.compile(model, backend="memo")
        torch.testing.assert_close(compiled(own), model(theirs))
        torch.testing.assert_close(own, theirs)


def test_a_view_of_bytes_reads_them_as_what_it_is_like_does():
    z = torch.randn(3, 4, dtype=torch.complex64)
    negated = z.conj().imag
    assert z.conj().is_conj()
    assert negated.is_neg()
    for like in (z, z.conj(), z.t().conj(), negated, z.real):
        found = view_inside(z, like, like.storage_offset() * like.element_size())
        assert torch.equal(found, like)
