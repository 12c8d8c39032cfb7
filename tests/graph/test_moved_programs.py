"""Step programs of unmodified models whose activations move, on fakes; the text is the golden.

Deterministic: seconds are those of a declared device, and nothing runs.
"""

import functools

import pytest
import torch
from torch._subclasses import FakeTensorMode

from memo_compile.config import resolve
from memo_compile.offline.offline_step import offline_config
from memo_compile.offline.plan_offline import OfflineStep, tracing
from memo_compile.reporting import state
from memo_compile.step.problem import CallKind
from memo_compile.step.program_text import program_text
from memo_compile.torch_private import fx_graphs
from tests import models
from tests.numerics.training import in_ci

TOKENS = 32
LAYERS = 4

BUILDERS = {"llama": models.llama, "gpt2": functools.partial(models.gpt2, dropout=0.0)}

DECISIONS = {
    "offload": {"policy": "full-offload"},
    "recompute": {"policy": "full-recompute"},
    "mix": {"policy": "memo", "alpha": 0.5},
}

OPTIONS = {"lowering": "aten", "token_granule": 4, "token_tiles": 1}


@pytest.fixture(autouse=True)
def _forget():
    torch._dynamo.reset()
    state.reset()
    yield
    torch._dynamo.reset()
    state.reset()


@functools.cache
def moved_steps(name: str) -> dict[str, OfflineStep]:
    """The model's step under every decision, traced once."""
    with FakeTensorMode():
        torch.manual_seed(0)
        model, *_ = BUILDERS[name](num_layers=LAYERS, seq=TOKENS)
        ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    given = {"input_ids": ids, "labels": ids}
    steps = {}
    with tracing(model, (), given, hardware=None, loss=lambda out: out.loss) as traced:
        for decision, options in DECISIONS.items():
            config = offline_config(resolve({**OPTIONS, **options}, None), None)
            traced._planned.clear()  # it has one plan in each tiling
            graph = fx_graphs.copied(traced.gm)
            steps[decision] = traced.attempt(graph, config)
    return steps


def moved_step(name: str, decision: str) -> OfflineStep:
    return moved_steps(name)[decision]


def bytes_of(step: OfflineStep, kind: CallKind) -> int:
    return sum(
        call.copy.num_bytes for call in step.problem.calls if call.kind is kind and call.copy
    )


@pytest.mark.parametrize("decision", DECISIONS)
@pytest.mark.parametrize("name", in_ci(BUILDERS, "llama"))
def test_program(golden, name, decision):
    step = moved_step(name, decision)
    assert step.plan.check.ok
    text = program_text(step.problem)
    golden(f"moved_{name}_{decision}", text)


@pytest.mark.parametrize("name", in_ci(BUILDERS, "llama"))
def test_what_goes_out_comes_back(name):
    """Every byte that is offloaded is reloaded, once, and every copy is waited for."""
    for decision in DECISIONS:
        calls = moved_step(name, decision).problem.calls
        out = bytes_of(moved_step(name, decision), CallKind.OFFLOAD)
        assert out == bytes_of(moved_step(name, decision), CallKind.RELOAD)
        assert (out > 0) == (decision != "recompute")
        copies = {call.name for call in calls if call.copy is not None}
        assert copies == {call.waits_for for call in calls if call.kind is CallKind.WAIT}
        again = any(call.kind is CallKind.RECOMPUTE for call in calls)
        assert again == (decision != "offload")


@pytest.mark.parametrize("name", in_ci(BUILDERS, "llama"))
def test_a_mix_moves_part_of_the_tokens(name):
    """Half of a tensor's tokens lie in the host frame; the others are written beside them."""
    calls = moved_step(name, "mix").problem.calls
    parts = [call.copy for call in calls if call.kind is CallKind.RELOAD and call.copy.start_bytes]
    assert parts
    assert all(part.start_bytes == part.num_bytes for part in parts)
    into = [target for call in calls if call.kind is CallKind.RECOMPUTE for target in call.into]
    assert len(into) == len(parts)
    assert all(target.offset_bytes == 0 for target in into)
