"""The configuration search, its cost model, and its calibration."""

from pathlib import Path

import numpy as np
import pytest

from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import find_model
from memo_compile.errors import InputError
from memo_compile.papers.kwai.offload import Checkpoint, divide_gpus, plan_offload
from memo_compile.papers.search.calibrate import calibrate, predict_seconds, read_cost_model
from memo_compile.papers.search.cost import CostModel, describe_workload, evaluate
from memo_compile.papers.search.measurements import read_measurements
from memo_compile.papers.search.ranking import SearchQuestion, search
from memo_compile.papers.search.space import CHECKPOINTS, enumerate_space

DATA = Path(__file__).parents[1] / "data"
H800 = find_hardware("h800")
BUDGET_BYTES = 65000 * 2**20


def find(model="llama-175b", top=None, **changes):
    arguments = {"gpus": 256, "seq": 4096, "global_batch": 256, **changes}
    question = SearchQuestion(shape=find_model(model), hardware=H800, **arguments)
    return search(question, top)


@pytest.mark.parametrize(("model", "points"), [("llama-175b", 2310), ("llama-65b", 1710)])
def test_size_of_the_published_space(model, points):
    assert find(model).num_points == points


def test_vectorised_memory_equals_the_closed_form():
    shape = find_model("llama2-70b")
    columns = enumerate_space(shape, 64)
    work = describe_workload(shape, 8192, 64)
    found = evaluate(work, columns, H800, CostModel(), BUDGET_BYTES)
    for i in range(0, len(columns), 7):
        config = divide_gpus(
            shape,
            gpus=64,
            tp=int(columns.tp[i]),
            cp=int(columns.cp[i]),
            pp=int(columns.pp[i]),
            layers_per_chunk=int(columns.layers_per_chunk[i]),
            checkpoint=CHECKPOINTS[columns.checkpoint[i]],
        )
        plan = plan_offload(shape, seq=8192, config=config, budget_bytes=BUDGET_BYTES)
        assert found.peak_bytes[i] == pytest.approx(plan.peak_bytes, rel=1e-9)
        if plan.fits:
            assert found.alpha[i] == pytest.approx(plan.alpha, abs=1e-9)


def test_results_are_usable_and_ordered():
    found = find().configurations
    assert len(found) > 100
    times = [c.iteration_s for c in found]
    assert times == sorted(times)
    for c in found:
        assert c.tp * c.cp * c.pp * c.dp == 256
        assert 256 % c.dp == 0
        assert c.peak_bytes <= H800.memory_bytes * 65000 / 81920 + 1
        assert 0 < c.mfu < 0.6
        assert 0 <= c.alpha <= 1
    assert find(top=3).configurations == found[:3]


def test_offloading_and_recomputation_cost_what_they_should():
    found = find("llama-65b", seq=32768)
    full = [c for c in found.configurations if c.checkpoint is Checkpoint.FULL]
    assert full
    same = {(c.tp, c.cp, c.pp, c.layers_per_chunk): c for c in full}
    for c in found.configurations:
        other = same.get((c.tp, c.cp, c.pp, c.layers_per_chunk))
        if c.checkpoint is Checkpoint.BALANCED and c.alpha == 0 and other is not None:
            assert c.iteration_s < other.iteration_s


def test_nothing_fits():
    found = find(gpus=8)
    assert found.configurations == ()
    assert "the smallest peak of 630 configurations" in found.conflict
    odd = find(model="llama-7b", gpus=16, global_batch=7)
    assert all(7 % c.dp == 0 for c in odd.configurations)


def test_each_run_is_predicted_by_the_other_four():
    runs = read_measurements(DATA / "kwai_offload_fractions.csv")
    for i in range(len(runs)):
        fit = calibrate((*runs[:i], *runs[i + 1 :]), H800)
        predicted = predict_seconds(runs[i : i + 1], H800, fit.model)[0]
        assert predicted == pytest.approx(runs[i].iteration_s, rel=0.12)


def test_calibration_recovers_a_known_machine(tmp_path):
    truth = CostModel(gemm_efficiency=0.5, link_efficiency=0.4)
    lines = ["model,seq,gpus,global_batch,tp,cp,pp,layers_per_chunk,checkpoint,alpha,iteration_s"]
    for tp, cp, pp, layers in ((1, 1, 8, 2), (8, 1, 4, 4), (4, 2, 8, 1), (2, 1, 16, 1)):
        shape = find_model("llama-65b")
        if (shape.num_layers // pp) % layers:
            continue
        columns = enumerate_space(shape, 128)
        work = describe_workload(shape, 4096, 256)
        times = evaluate(work, columns, H800, truth, np.inf, alpha=np.zeros(len(columns)))
        pick = (columns.tp == tp) & (columns.cp == cp) & (columns.pp == pp)
        pick &= (columns.layers_per_chunk == layers) & (columns.checkpoint == 0)
        seconds = times.iteration_s[pick][0]
        lines.append(f"llama-65b,4096,128,256,{tp},{cp},{pp},{layers},none,0,{seconds}")
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines))
    fit = calibrate(read_measurements(path), H800)
    assert fit.model.gemm_efficiency == pytest.approx(0.5, rel=0.05)
    assert fit.model.link_efficiency == pytest.approx(0.4, rel=0.15)
    assert np.abs(fit.errors).max() < 0.01


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gbs", "batch", r"runs.csv:1: missing column global_batch or gbs"),
        ("tokens_per_s", "speed", r"runs.csv:1: expected a column tokens_per_s or iteration_s"),
        ("Llama-65B,4096,200", "Llama-66B,4096,200", r"runs.csv:2: model: unknown 'Llama-66B'"),
        ("250,4,1,5", "250,4,1,7", r"runs.csv:2: gpus: 200 is not divisible"),
        ("no,0.522", "some,0.522", r"runs.csv:3: ckpt: expected none, balanced or full"),
        ("0.522", "1.522", r"runs.csv:3: alpha: expected a share"),
        ("97577", "fast", r"runs.csv:3: tokens_per_s: expected a number, got 'fast'"),
        ("97577", "-1", r"runs.csv:3: tokens_per_s: expected a finite number"),
        (",97577", "", r"runs.csv:3: expected 11 values"),
    ],
)
def test_bad_measurements_name_the_line(tmp_path, old, new, message):
    path = tmp_path / "runs.csv"
    text = (DATA / "kwai_offload_fractions.csv").read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=message):
        read_measurements(path)


def test_cost_model_file(tmp_path):
    path = tmp_path / "model.json"
    path.write_text('{"model": {"gemm_efficiency": 0.5}}')
    assert read_cost_model(path).gemm_efficiency == 0.5
    path.write_text('{"model": {"gemm_efficiency": 1.5}}')
    with pytest.raises(InputError, match=r"gemm_efficiency: expected a share in \(0, 1\]"):
        read_cost_model(path)
    path.write_text('{"model": {"speed": 1}}')
    with pytest.raises(InputError, match="model: expected an object with"):
        read_cost_model(path)
