"""A length at which a named shape was not traced: the same plan as if it had been."""

import dataclasses

import pytest

from memo_compile.costs import models
from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import ModelShape
from memo_compile.offline import plan_offline
from memo_compile.offline.forecast import Question, forecast
from memo_compile.offline.shapes.degrees import Degrees
from memo_compile.offline.subject import ModelLengths, is_shape
from memo_compile.step.serialise import to_json

GPT = ModelShape(
    name="tiny-lengths",
    hidden=64,
    num_layers=2,
    ffn=256,
    num_heads=4,
    num_kv_heads=4,
    vocab=512,
    gated=False,
)
LLAMA = dataclasses.replace(GPT, name="tiny-long-llama", num_layers=8, num_kv_heads=2, gated=True)
ONE, TWO = Degrees(), Degrees(tp=2)
BUDGETED = {"policy": "greedy", "budget": 1}


@pytest.fixture(autouse=True)
def tiny_models(monkeypatch):
    for shape in (GPT, LLAMA):
        monkeypatch.setitem(models.MODELS, shape.name, shape)
    monkeypatch.setenv("MEMO_LOWERING", "aten")


@pytest.fixture
def traces(monkeypatch):
    """How often a model was traced."""
    seen, traced = [], plan_offline.tracing

    def counted(*args, **kwargs):
        seen.append(1)
        return traced(*args, **kwargs)

    monkeypatch.setattr(plan_offline, "tracing", counted)
    return seen


def answer(shape, seq, lengths=None, degrees=ONE, **more):
    """All that is answered, as text, but for how long it took."""
    hardware = find_hardware("h200")
    asked = Question(model=shape.name, hardware=hardware, seq=seq, degrees=degrees, **more)
    found = forecast(asked, lengths=lengths)
    plan = dataclasses.replace(found.step.plan, planning_s=0.0, lowering_s=0.0)
    facts = (found.name, found.peak_bytes, found.tokens_per_s, found.mfu, found.notes)
    return to_json(found.step.problem), to_json(plan), to_json(found.step.costs), facts


@pytest.mark.parametrize(
    ("shape", "degrees", "traced", "others", "more"),
    [
        (GPT, ONE, (1024, 1536), (2048,), {"policy": "save"}),
        (LLAMA, ONE, (1024, 1536), (512,), BUDGETED),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (GPT, ONE, (512, 4096), (768, 1024, 1000, 8192), BUDGETED),
                (GPT, ONE, (1000, 999), (777, 1024, 4097), BUDGETED),
                (GPT, ONE, (512, 4096), (256, 5000), {"budget": "30MiB", "batch": 3}),
                (LLAMA, TWO, (2048, 1024), (512, 1536, 16384), BUDGETED),
                (LLAMA, ONE, (4096, 8192), (65536,), {"budget": "160MiB"}),
            )
        ),
    ],
)
def test_a_length_that_was_not_traced_has_the_plan_of_one_that_was(
    traces, shape, degrees, traced, others, more
):
    lengths = ModelLengths()
    for seq in traced:
        answer(shape, seq, lengths, degrees, **more)
    traces.clear()
    found = [answer(shape, seq, lengths, degrees, **more) for seq in others]
    assert not traces
    assert found == [answer(shape, seq, None, degrees, **more) for seq in others]
    assert traces


def test_a_length_whose_sizes_are_no_functions_of_it_is_traced(traces, caplog):
    """Of one token, whose dimension torch takes away here and there."""
    lengths, keep = ModelLengths(), {"policy": "save"}
    for seq in (64, 96):
        answer(GPT, seq, lengths, **keep)
    traces.clear()
    found = answer(GPT, 1, lengths, **keep)
    assert traces
    assert "length 1 is traced anew" in caplog.text
    assert found == answer(GPT, 1, **keep)


def test_what_the_user_wrote_is_traced_at_every_length(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert is_shape("llama3-8b")
    assert not is_shape("models:small")
    assert not is_shape(str(tmp_path / "config.json"))


def test_a_model_with_other_parameters_at_another_length_is_traced(traces, caplog):
    lengths, keep = ModelLengths(), {"policy": "save"}
    answer(GPT, 64, lengths, **keep)
    answer(GPT, 96, lengths, **keep)
    traced = lengths.traced[False]
    first, second = traced._known.values()
    traced._known[96] = dataclasses.replace(second, constant_bytes=first.constant_bytes + 1)
    traces.clear()
    answer(GPT, 128, lengths, **keep)
    assert traces
    assert "two lengths have other parameters" in caplog.text
