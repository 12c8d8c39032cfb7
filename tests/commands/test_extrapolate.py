"""The seconds of a region that does not fit whole follow from two shorter ones."""

import pytest
import torch

import memo_compile
from memo_compile.config import MemoConfig
from memo_compile.costs import extrapolate as module
from memo_compile.costs import measure_regions
from memo_compile.costs.extrapolate import RegionWork, extrapolate, extrapolated_seconds
from memo_compile.costs.hardware import hardware_of
from memo_compile.costs.measure_regions import TooLarge, measure, measure_all
from memo_compile.errors import UnsupportedGraph
from memo_compile.lowering import aten
from memo_compile.passes.runner import PassRunner
from tests import models
from tests.numerics.training import assert_planned, memo_compiled
from tests.steps.layer_regions import layer_region, region_of

CPU = hardware_of("cpu")
CONFIG = MemoConfig(lowering="aten")


def work(in_proportion_s: float, faster_s: float) -> RegionWork:
    return RegionWork(in_proportion_s=in_proportion_s, faster_s=faster_s)


EIGHTH, QUARTER, WHOLE = work(1, 1), work(2, 4), work(8, 64)


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (3.0, 0.5), (0.25, 2.0), (2.0, 0.0)])
def test_both_factors_are_found(a, b):
    seconds = [a * part.in_proportion_s + b * part.faster_s for part in (EIGHTH, QUARTER)]
    assert extrapolate((EIGHTH, QUARTER), seconds, WHOLE) == pytest.approx(8 * a + 64 * b)


def test_where_the_runs_disagree_one_factor_serves():
    assert extrapolate((EIGHTH, QUARTER), (1.0, 9.0), WHOLE) == pytest.approx(9.0 * 72 / 6)
    assert extrapolate((EIGHTH, QUARTER), (4.0, 4.0), WHOLE) == pytest.approx(4.0 * 72 / 6)


def test_without_attention_time_grows_in_proportion():
    assert extrapolate((work(1, 0), work(2, 0)), (0.5, 1.2), work(8, 0)) == pytest.approx(4.8)


def test_a_real_layer_is_extrapolated_by_what_its_operators_do(monkeypatch):
    """A device that is three times slower than the roofline at all but attention, twice at that."""
    region = layer_region(models.llama, seq=112)
    wholes = []

    def slow(_, part, **_more):
        faster = module._which_grow_faster(region.gm, wholes[0].gm, CPU)
        made = module._work(part.gm, faster, CPU)
        return 3 * made.in_proportion_s + 2 * made.faster_s

    shorten = module.shorten
    monkeypatch.setattr(
        module, "shorten", lambda *given: wholes.insert(0, shorten(*given)) or wholes[0]
    )
    monkeypatch.setattr(module, "measure", slow)
    found = extrapolated_seconds(region, CONFIG, CPU, PassRunner())
    assert found == pytest.approx(slow(None, region))
    faster = module._which_grow_faster(region.gm, wholes[0].gm, CPU)
    names = [str(node.target) for node, f in zip(region.gm.graph.nodes, faster, strict=True) if f]
    assert any("attention" in name for name in names)


@pytest.mark.full
def test_what_does_not_fit_is_not_tried(monkeypatch):
    region = layer_region(models.llama)
    lowered = aten.lower(region)
    monkeypatch.setattr(measure_regions, "_free_bytes", lambda _: 1024)
    with pytest.raises(TooLarge, match="does not fit to run alone"):
        measure(lowered, region)
    with pytest.raises(TooLarge):
        measure_all({"a": lowered}, {"a": region})
    asked = []

    def too_large(region, error):
        asked.append((region, str(error)))
        return 2.5

    assert measure_all({"a": lowered}, {"a": region}, too_large=too_large) == {"a": 2.5}
    assert asked[0][0] is region


def test_a_region_without_tokens_is_refused():
    with pytest.raises(UnsupportedGraph, match="cannot be cut"):
        extrapolated_seconds(region_of(lambda x: (x + 1,), (3, 5)), CONFIG, CPU, PassRunner())


def test_a_step_whose_layers_do_not_fit_is_planned_with_extrapolated_costs(monkeypatch):
    torch._dynamo.reset()
    model, inputs, loss = models.llama(num_layers=2, seq=112)
    inputs = {name: value[:1] for name, value in inputs.items()}
    monkeypatch.setattr(measure_regions, "_free_bytes", lambda _: 900_000)
    compiled = memo_compiled(model, policy="full-recompute", costs="measured")
    loss(compiled, **inputs).backward()
    assert_planned()
    notes = memo_compile.report().notes
    assert any("layer0" in note and "timed on an eighth and a quarter" in note for note in notes)
    assert not any("computed, not measured" in note for note in notes)
