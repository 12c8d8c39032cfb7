"""The generator of models: what it draws, what it sees, how it makes a failing case smaller."""

import dataclasses
import json
import runpy
import sys
from unittest import mock

import pytest
import torch

from memo_compile.backends import entry
from tests.fuzz import judge, oracle
from tests.fuzz.case import KINDS, UPDATES, Case, Piece, draw_case, from_dict, is_allowed
from tests.fuzz.driver import Record
from tests.fuzz.oracle import Finding, Outcome
from tests.fuzz.script import script
from tests.fuzz.shrink import shrink
from tests.fuzz.source import model_source
from tests.fuzz.worker import Worker


def tiny(seed: int = 0) -> Case:
    """One linear layer under memo without anything special."""
    case = draw_case(seed, "aten")
    linear = Piece(kind="linear", options={"bias": "True"})
    return shrink(
        dataclasses.replace(
            case, groups=(dataclasses.replace(case.groups[0], pieces=(linear,), shared=False),)
        ),
        lambda smaller: True,
        attempts=1000,
        seconds=60.0,
    )


def test_seeds_draw_the_same_case_and_json_keeps_it():
    for seed in range(60):
        case = draw_case(seed, "aten")
        assert case == draw_case(seed, "aten")
        assert from_dict(json.loads(json.dumps(case.as_dict()))) == case
        assert is_allowed(case)
        compile(model_source(case), "model", "exec")


def test_every_kind_and_sizes_that_collide_are_drawn():
    cases = [draw_case(seed, "aten") for seed in range(1500)]
    assert {piece.kind for case in cases for piece in case.pieces()} == KINDS.keys()
    sizes = [case.sizes for case in cases]
    assert any(size.batch == size.tokens == size.heads == size.width > 1 for size in sizes)
    assert any(size.batch == size.tokens != size.heads for size in sizes)
    assert {1, 2, 3, 5} <= {size.tokens for size in sizes}
    assert {case.dtype for case in cases} == {"float32", "float64", "bfloat16"}
    offloaded = [case.run for case in cases if case.run["offload"]]
    assert 0.2 < len(offloaded) / len(cases) < 0.4
    for name, values in UPDATES.items():
        assert {case.run[name] for case in cases} >= {*values}


def test_shrinking_keeps_what_fails_and_drops_the_rest():
    case = next(
        case
        for case in (draw_case(seed, "aten") for seed in range(500))
        if any(piece.kind == "conv" for piece in case.pieces()) and len(case.pieces()) > 2
    )
    small = shrink(
        case,
        lambda smaller: any(piece.kind == "conv" for piece in smaller.pieces()),
        attempts=1000,
        seconds=60.0,
    )
    assert [piece.kind for piece in small.pieces()] == ["conv"]
    assert small.groups[0].repeats == 1
    assert small.loss.kind == "sum"
    assert not small.budgets
    assert small.sizes.tokens == small.sizes.batch == 2


def test_an_allowed_case_has_no_state_that_runs_twice():
    case = tiny()
    stateful = Piece(kind="buffer", options={"read": "bias", "write": "mul"})
    groups = (dataclasses.replace(case.groups[0], pieces=(stateful,)),)
    assert is_allowed(dataclasses.replace(case, groups=groups))
    run = {**case.run, "checkpoint": True}
    assert not is_allowed(dataclasses.replace(case, groups=groups, run=run))


@pytest.mark.parametrize("off", [1e-3, float("nan"), float("inf")])
def test_small_gradients_are_judged_by_their_own_size(off):
    exact = [{"gradient a": torch.full((4,), 1.0), "gradient b": torch.full((4,), 0.05)}]
    allowed = judge.tolerances(exact, exact, "float32")
    rounded = [{name: value * (1 + 2e-7) for name, value in exact[0].items()}]
    assert judge.faults(rounded, exact, exact, allowed) == []
    wrong = [{**exact[0], "gradient b": exact[0]["gradient b"] + off}]
    (fault,) = judge.faults(wrong, exact, exact, allowed)
    assert "gradient b" in fault


def test_a_sum_that_cancels_may_be_as_wrong_as_eager():
    exact = [{"gradient a": torch.zeros(4), "gradient b": torch.ones(4)}]
    own = [{"gradient a": torch.full((4,), 1e-5), "gradient b": torch.ones(4)}]
    allowed = judge.tolerances(exact, own, "float32")
    ours = [{"gradient a": torch.full((4,), -3e-5), "gradient b": torch.ones(4)}]
    assert judge.faults(ours, exact, own, allowed) == []


@pytest.mark.parametrize(("second", "is_right"), [(0.999, True), (0.9, False)])
def test_the_place_of_the_largest_logit_may_be_another_where_rounding_decides(second, is_right):
    logits = torch.tensor([[1.0, second, 0.0]])
    exact = [{"output 0.0": logits, "output 0.3": logits.argmax(-1)}]
    allowed = judge.tolerances(exact, exact, "bfloat16")
    allowed[0]["output 0.0"] = 0.01
    ours = [{**exact[0], "output 0.3": torch.tensor([1])}]
    assert (judge.faults(ours, exact, exact, allowed) == []) == is_right
    ours = [{**exact[0], "output 0.3": torch.tensor([3])}]
    assert judge.faults(ours, exact, exact, allowed) != []


def _changed(record: Record) -> Record:
    name = next(name for name in record.steps[0] if name.startswith("gradient layers0"))
    record.steps[0][name] = record.steps[0][name] * 1.01
    return record


def _shared(record: Record) -> Record:
    record.shared.add("gradient a and gradient b")
    return record


def _updated(record: Record) -> Record:
    assert set(record.updates.values()) == {0.0}
    return dataclasses.replace(record, updates={**record.updates, "head.weight": 1e-9})


@pytest.mark.parametrize(
    ("spoil", "signature"),
    [
        (_changed, "wrong: gradient"),
        (_shared, "shared memory: gradient"),
        (_updated, "wrong: update"),
    ],
    ids=["changed", "shared", "updated"],
)
def test_a_wrong_run_is_found(monkeypatch, spoil, signature):
    compiled = oracle._Arms.compiled

    def spoiled(self, **how):
        record = compiled(self, **how)
        return spoil(record) if how["backend"] == "memo" else record

    case = tiny()
    case = dataclasses.replace(case, run={**case.run, "offload": "host"})
    outcome = oracle.run_case(case)
    assert outcome.findings == []
    assert outcome.counts["gradients on host"] == outcome.counts["runs"]
    monkeypatch.setattr(oracle._Arms, "compiled", spoiled)
    (finding,) = oracle.run_case(case).findings
    assert finding.signature == signature
    assert not finding.torch_too


@pytest.mark.parametrize(
    ("where", "kind"), [("compile_static", "exception"), ("plan_graph", "aside by an error")]
)
def test_an_error_inside_is_found_also_where_memo_steps_aside(monkeypatch, where, kind):
    def broken(*_args, **_kwargs):
        raise KeyError("div_2")

    monkeypatch.setattr(entry, where, broken)
    plain = mock.patch.object(entry.inductor_api, "compile_fx", lambda gm, _inputs: gm)
    with plain:
        (finding,) = oracle.run_case(tiny()).findings
    assert finding.kind == kind
    assert "KeyError" in finding.signature


def test_a_case_of_one_layer_is_planned_and_equals_eager():
    outcome = oracle.run_case(tiny())
    assert outcome.findings == []
    assert outcome.counts["runs"] == outcome.counts["planned"] == 1
    assert Outcome.from_dict(json.loads(json.dumps(outcome.as_dict()))) == outcome


@pytest.mark.parametrize(
    ("program", "kind"),
    [("import os; input(); os.abort()", "crash"), ("import time; time.sleep(60)", "timeout")],
    ids=["crash", "timeout"],
)
def test_a_process_that_dies_or_hangs_is_a_finding(program, kind):
    with Worker(timeout_s=2.0, command=(sys.executable, "-c", program)) as worker:
        outcome = worker.run(tiny())
    assert [finding.kind for finding in outcome.findings] == [kind]


def test_a_case_prints_as_a_script_that_runs(tmp_path, capsys):
    case = tiny()
    case = dataclasses.replace(case, run={**case.run, "offload": "host", "clip": "norm"})
    options = {**case.options, "debug": []}
    finding = Finding(kind="wrong", where="gradient", detail="first\nsecond", options=options)
    path = tmp_path / "case.py"
    path.write_text(script(case, finding, "float32"))
    with oracle._no_size_limits():  # which the script sets, and this puts back
        runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    assert said.split("\n    ")[0] == "inductor"
    assert said.count("equals eager") == 2
