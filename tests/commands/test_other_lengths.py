"""A length at which a named shape was not traced: the same plan as if it had been."""

import dataclasses
import re

import pytest

from memo_compile.config import resolve
from memo_compile.costs import models
from memo_compile.costs.hardware import find_hardware
from memo_compile.file_store import FileStore
from memo_compile.offline import forecast as forecasting
from memo_compile.offline import plan_offline, subject
from memo_compile.offline.forecast import Question, forecast
from memo_compile.offline.long_length import LONG, MOST_WORDS
from memo_compile.offline.shapes.degrees import Degrees
from memo_compile.offline.subject import ModelLengths, is_shape
from memo_compile.step.serialise import to_json
from tests.commands.tiny import TINY

GPT = dataclasses.replace(TINY, name="tiny-lengths")
LLAMA = dataclasses.replace(GPT, name="tiny-long-llama", num_layers=8, num_kv_heads=2, gated=True)
ONE, TWO = Degrees(), Degrees(tp=2)
BUDGETED = {"policy": "greedy", "budget": 1}


@pytest.fixture(autouse=True)
def tiny_models(monkeypatch):
    for shape in (GPT, LLAMA):
        monkeypatch.setitem(models.MODELS, shape.name, shape)
    monkeypatch.setenv("MEMO_LOWERING", "aten")


def answer(shape, seq, lengths=None, degrees=ONE, **more):
    """All that is answered, as text, but for how long it took."""
    hardware = find_hardware("h200")
    asked = Question(model=shape.name, hardware=hardware, seq=seq, degrees=degrees, **more)
    found = forecast(asked, lengths=lengths)
    plan = dataclasses.replace(found.step.plan, planning_s=0.0, lowering_s=0.0)
    facts = (found.name, found.peak_bytes, found.tokens_per_s, found.mfu, found.notes)
    return to_json(found.step.problem), to_json(plan), to_json(found.step.costs), facts


def numbered(text):
    """``text`` with classes of layers by number: their names are digests of sizes."""
    known: dict[str, str] = {}
    return re.sub(
        r"\b[0-9a-f]{16}\b", lambda found: known.setdefault(found[0], f"class{len(known)}"), text
    )


def traced_at(monkeypatch, *asked, **more):
    """The answer where no length is told from another."""
    with monkeypatch.context() as patched:
        patched.setattr(subject, "LEAST_PER_WIDTH", 10**9)
        problem, plan, costs, facts = answer(*asked, **more)
    return numbered(problem), numbered(plan), costs, facts


def told(*asked, **more):
    """The answer where lengths are told from one."""
    problem, plan, costs, facts = answer(*asked, **more)
    return numbered(problem), numbered(plan), costs, facts


@pytest.fixture
def store(tmp_path, monkeypatch):
    made = FileStore(folder=tmp_path / "steps")
    monkeypatch.setattr(forecasting, "user_store", lambda: made)


@pytest.mark.parametrize(
    ("shape", "before", "more"),
    [
        (GPT, 5120, {"policy": "greedy", "budget": "206MiB"}),
        pytest.param(LLAMA, 2048, {"policy": "greedy", "budget": "160MiB"}, marks=pytest.mark.full),
    ],
)
def test_one_trace_tells_all_lengths(store, monkeypatch, traces, shape, before, more):
    """In seconds and bytes as if each was traced, in another process too."""
    told(shape, before, **more)
    assert len(traces) == 1
    traces.clear()
    found = told(shape, 3072, **more)
    assert not traces
    assert found == traced_at(monkeypatch, shape, 3072, **more)


def test_any_bound_divides_sizes_at_the_long_length_as_at_the_asked_one():
    asked = subject.Subject(
        model=GPT.name,
        seq=2048,
        batch=1,
        dtype="bfloat16",
        degrees=ONE,
        hardware=find_hardware("h200"),
    )
    options = resolve({"memory_budget": "206MiB", "token_tiles": 4}, None)
    options = dataclasses.replace(options, tile_above_bytes=4_012_345)
    with asked:
        steps = asked._plans_of(shortened=False).long
        assert steps is not None
        with steps.recording(options, 2048) as (record, _):
            assert record.tile_above.tells_like(4_012_345)
            assert record.tiled


KEEPS = {"policy": "save"}
_traced: list[ModelLengths] = []


@pytest.fixture
def lengths():
    """GPT as it was traced at 64 and at 96 tokens."""
    if not _traced:
        made = ModelLengths()
        for seq in (64, 96):
            answer(GPT, seq, made, **KEEPS)
        _traced.append(made)
    found = _traced[0].traced[False]
    return ModelLengths(
        facts=_traced[0].facts, traced={False: dataclasses.replace(found, _known={**found._known})}
    )


def test_a_length_that_was_not_traced_has_the_plan_of_one_that_was(lengths, traces):
    found = answer(GPT, 250, lengths, **KEEPS)
    assert not traces
    assert found == answer(GPT, 250, **KEEPS)
    assert traces


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "degrees", "traced", "others", "more"),
    [
        (LLAMA, ONE, (1000, 1536), (512, 1537), {"policy": "full-recompute"}),
        (LLAMA, TWO, (2000, 1024), (512, 4032), {"policy": "save"}),
        (GPT, ONE, (512, 4032), (768, 1000, 8128), BUDGETED),
        (GPT, ONE, (1000, 999), (777, 1023, 4097), {"budget": "200MiB", "batch": 3}),
        (LLAMA, ONE, (4096, 8192), (65536,), BUDGETED),
    ],
)
def test_all_policies_at_lengths_that_were_not_traced(traces, shape, degrees, traced, others, more):
    lengths = ModelLengths()
    for seq in traced:
        answer(shape, seq, lengths, degrees, **more)
    traces.clear()
    found = [answer(shape, seq, lengths, degrees, **more) for seq in others]
    assert not traces
    assert found == [answer(shape, seq, None, degrees, **more) for seq in others]


def test_a_length_whose_sizes_are_no_functions_of_it_is_traced(lengths, traces, caplog):
    """Of one token, whose dimension torch takes away here and there."""
    found = answer(GPT, 1, lengths, **KEEPS)
    assert traces
    assert "length 1 is traced anew" in caplog.text
    assert found == answer(GPT, 1, **KEEPS)


class TracedError(Exception):
    """A model would be traced now."""


def test_a_model_with_other_parameters_at_another_length_is_traced(lengths, monkeypatch, caplog):
    def refuse(*_, **__):
        raise TracedError

    traced = lengths.traced[False]
    traced._functions = None
    traced._known[96] = dataclasses.replace(traced._known[96], constant_bytes=1)
    monkeypatch.setattr(plan_offline, "tracing", refuse)
    with pytest.raises(TracedError):
        answer(GPT, 128, lengths, **KEEPS)
    assert "two lengths have other parameters" in caplog.text


@pytest.mark.parametrize(("batch", "lengths_traced"), [(1, [LONG]), (8, [2048])])
def test_logits_that_have_too_many_bytes_at_the_long_length_are_traced_as_asked(
    monkeypatch, batch, lengths_traced
):
    """Their bytes would not fit torch's integers, which torch tells with an error's whole trace."""
    shape = dataclasses.replace(GPT, name="tiny-many-words", vocab=MOST_WORDS // 8)
    monkeypatch.setitem(models.MODELS, shape.name, shape)
    traced, loaded_at = [], subject.Subject._loaded_at
    monkeypatch.setattr(
        subject.Subject, "_loaded_at", lambda own, seq: traced.append(seq) or loaded_at(own, seq)
    )
    answer(shape, 2048, batch=batch)
    assert list(dict.fromkeys(traced)) == lengths_traced


def test_what_the_user_wrote_is_traced_at_every_length(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert is_shape("llama3-8b")
    assert not is_shape("models:small")
    assert not is_shape(str(tmp_path / "config.json"))
