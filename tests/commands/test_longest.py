"""``memo_compile.longest``: what it names fits the backend's budget, and the next size does not."""

import functools

import pytest
import torch
from torch import nn

import memo_compile
from memo_compile.errors import ConfigError, Infeasible, InputError
from memo_compile.offline import fit
from memo_compile.reporting import state
from tests.numerics.small import Block

OPTIONS = {"lowering": "aten", "costs": "roofline", "strict": True, "token_tiles": 1}
BUDGET = 100_000


class Model(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.fixture(autouse=True)
def _forget():
    torch._dynamo.reset()
    state.reset()
    yield
    torch._dynamo.reset()
    state.reset()


def call(batch=2, tokens=64):
    return functools.partial(Model(), torch.zeros(batch, tokens, dtype=torch.int64))


def test_the_backend_takes_that_length_and_not_the_next():
    found = memo_compile.longest(call(), BUDGET, options=OPTIONS, multiple_of=8)
    assert found.size % 8 == 0
    assert found.size > 0
    assert found.plan.peak_bytes <= found.budget_bytes == BUDGET
    assert not found.refused
    model = Model()
    compiled = torch.compile(model, backend="memo", options=found.options)
    compiled(torch.zeros(2, found.size, dtype=torch.int64)).backward()
    (plan,) = memo_compile.report().plans
    assert plan.peak_bytes == found.plan.peak_bytes
    torch._dynamo.reset()
    with pytest.raises(Infeasible):
        compiled(torch.zeros(2, found.size + 8, dtype=torch.int64))


@pytest.mark.full
def test_a_batch_of_what_is_compiled_already():
    step = call()
    compiled = torch.compile(step.func, backend="memo", options=OPTIONS)
    again = functools.partial(compiled, *step.args)
    both = [
        memo_compile.longest(asked, "150KB", vary="batch", options=OPTIONS)
        for asked in (step, again)
    ]
    assert both[0].size == both[1].size > 0
    assert both[0].multiple_of == 1


def test_a_budget_below_the_smallest_size_is_infeasible():
    with pytest.raises(Infeasible, match="not even a sequence of 64 fits") as refused:
        memo_compile.longest(call(), 1000, options=OPTIONS)
    assert refused.value.floor_bytes > 1000


def test_the_scripts_own_budget_is_the_default(monkeypatch):
    asked = []
    monkeypatch.setattr(fit.Fitting, "need", lambda self, varied, size: asked.append(self) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        memo_compile.longest(call(), options={**OPTIONS, "memory_budget": "3MB"})
    assert asked[0].room.available_bytes == 3_000_000


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((lambda: None, "1MB"), InputError, r"functools\.partial\(model, \*args"),
        ((functools.partial(Model()), "1MB"), InputError, r"functools\.partial\(model, \*args"),
        ((call(), "much"), ConfigError, "memory"),
    ],
    ids=["no partial", "no inputs", "no size"],
)
def test_what_cannot_be_asked_is_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        memo_compile.longest(*arguments)


def test_options_of_the_question_are_checked():
    with pytest.raises(InputError, match='expected "sequence" or "batch"'):
        memo_compile.longest(call(), "1MB", vary="tokens")
    with pytest.raises(InputError, match="at least 1"):
        memo_compile.longest(call(), "1MB", multiple_of=0)
