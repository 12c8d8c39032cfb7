"""A step of many layers from the trace of a few: the one that tracing all of them gives."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

from memo_compile.config import resolve
from memo_compile.costs import models
from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import ModelShape
from memo_compile.offline import plan_offline
from memo_compile.offline.longer_model import LongerModel, NotUniform
from memo_compile.offline.shapes import load
from memo_compile.offline.shapes.transformer import Degrees, first_stage
from memo_compile.step.problem import CallKind
from memo_compile.torch_private.fx_graphs import fake_mode

LAYERS = 8
HARDWARE = "h200"


@functools.cache
def eight_layers(gated):
    return ModelShape(
        name="eight",
        hidden=128,
        num_layers=LAYERS,
        ffn=256,
        num_heads=4,
        num_kv_heads=2,
        vocab=2000,
        gated=gated,
    )


@functools.cache
def planned(gated, tp, policy, is_short):
    """The step of LAYERS layers, traced whole or from as few as ``memo plan`` traces."""
    shape = eight_layers(gated)
    sizes = {"seq": 512, "batch": 2, "dtype": torch.bfloat16}
    with fake_mode():
        model, args = first_stage(shape, Degrees(tp=tp), **sizes)
        shorter = load._shorter(model, shape, Degrees(tp=tp), **sizes)
    options = {"policy": policy, "lowering": "aten"}
    plan = functools.partial(
        plan_offline.plan_step_offline,
        config=resolve(options, None),
        hardware=find_hardware(HARDWARE),
    )
    assert len(shorter.model.layers) == load.TRACED_LAYERS < LAYERS
    if is_short:
        return plan(shorter.model, shorter.args, {}, longer_model=shorter.longer_model)
    return plan(model, args, {})


def wiring(problem):
    """The step with its values numbered as they come up: equal for steps that differ in names.

    What is reloaded has the number of what was offloaded to that place. Copies that may begin
    together are sorted: their order goes by name.
    """
    numbers, host, runs, copies = {}, {}, [], []

    def numbered(names):
        return tuple(numbers.setdefault(name, len(numbers)) for name in names)

    for call in problem.calls:
        if call.kind is CallKind.OFFLOAD:
            (host[call.copy.host_offset],) = numbered(call.inputs)
        elif call.kind is CallKind.RELOAD:
            numbers[call.outputs[0]] = host[call.copy.host_offset]
        if call.copy is not None:
            copies.append((call.kind.value, host[call.copy.host_offset], call.copy.end_bytes))
            continue
        if call.kind is CallKind.WAIT:
            continue
        into = ((into.buffer, *numbered([into.value]), into.offset_bytes) for into in call.into)
        values = (numbered(call.inputs), numbered(call.outputs), call.reads, tuple(into))
        runs.append((call.region, call.phase, call.instance, *values))
    return runs, sorted(copies)


SETTINGS = [
    pytest.param(False, 1, "full-recompute"),
    pytest.param(True, 2, "full-offload", marks=pytest.mark.full),
    pytest.param(True, 2, "save", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("gated", "tp", "policy"), SETTINGS)
def test_the_plan_is_that_of_all_layers_traced(gated, tp, policy):
    whole, short = (planned(gated, tp, policy, is_short) for is_short in (False, True))
    assert len(short.problem.calls) == len(whole.problem.calls)
    assert short.problem.fixed == whole.problem.fixed
    assert short.problem.layer_classes == whole.problem.layer_classes
    assert short.model_flops == whole.model_flops
    for name in (
        "peak_bytes",
        "arena_bytes",
        "host_bytes",
        "tiles",
        "step_lower_bound_s",
        "policy",
    ):
        assert getattr(short.plan, name) == getattr(whole.plan, name), name
    assert short.plan.timeline.step_s == pytest.approx(whole.plan.timeline.step_s)


def test_each_layer_reads_and_makes_what_it_did():
    gated, tp, policy = SETTINGS[0].values
    whole, short = (planned(gated, tp, policy, is_short).problem for is_short in (False, True))
    assert wiring(short) == wiring(whole)
    for ours, theirs in zip(short.halves, whole.halves, strict=True):
        assert sorted(map(str, ours.layouts)) == sorted(map(str, theirs.layouts))
        assert len(set(ours.results)) >= len(set(theirs.results))


@pytest.mark.parametrize(
    ("gated", "tp", "policy"), [setting for setting in SETTINGS if "save" not in setting.values]
)
def test_what_is_compared_moves_or_recomputes(gated, tp, policy):
    problem = planned(gated, tp, policy, True).problem
    assert (problem.host_bytes > 0) == (policy == "full-offload")
    recomputes = any(call.kind is CallKind.RECOMPUTE for call in problem.calls)
    assert recomputes == (policy == "full-recompute")


class Skipping(nn.Module):
    """Every layer reads what the first one made."""

    def __init__(self, reads_first: bool):
        super().__init__()
        self.reads_first = reads_first
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = None
        for layer in self.layers:
            x = layer(x).tanh() + (x if first is None or not self.reads_first else first)
            first = x if first is None else first
        return x.sum()


def test_layers_that_reach_further_than_their_neighbours_are_refused():
    config = resolve({"lowering": "aten"}, None)
    model, x = Skipping(reads_first=True), torch.randn(4, 8)
    with pytest.raises(NotUniform):
        plan_offline.plan_step_offline(
            model, (x,), {}, config=config, longer_model=LongerModel(num_layers=8, untraced=())
        )


def test_all_layers_are_traced_where_few_do_not_tell(monkeypatch):
    from memo_compile.offline import forecast

    def refuse(*_):
        raise NotUniform("for this test")

    monkeypatch.setenv("MEMO_LOWERING", "aten")
    monkeypatch.setattr(plan_offline, "with_layers", refuse)
    monkeypatch.setattr(load, "TRACED_LAYERS", 2)
    three = dataclasses.replace(eight_layers(gated=False), num_layers=3)
    monkeypatch.setitem(models.MODELS, "three", three)
    question = forecast.Question(
        model="three", hardware=find_hardware(HARDWARE), seq=256, policy="save"
    )
    assert forecast.forecast(question).step.problem.layer_classes[0].num_layers == 3
