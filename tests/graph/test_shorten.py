"""A region for fewer tokens is the one that a shorter sequence traces to."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from memo_compile.analysis.regions import RegionGraph
from memo_compile.costs.measure_regions import measure
from memo_compile.errors import UnsupportedGraph
from memo_compile.lowering import aten
from memo_compile.passes.runner import PassRunner
from memo_compile.passes.shorten import shorten
from memo_compile.torch_private.fx_graphs import failing_fakes_unlogged
from tests import models
from tests.numerics.training import in_ci
from tests.steps.layer_regions import outputs_of, region_of
from tests.steps.programs import step_programs

WHOLE, PART = 112, 4
"""Tokens, of which one in PART is kept; no other size of the models is a multiple of them."""


def regions(builder: Callable[..., models.ModelCase], seq: int) -> dict[str, RegionGraph]:
    def make():
        model, inputs, loss = builder(num_layers=2, seq=seq)

        def step(*values: torch.Tensor) -> torch.Tensor:
            return loss(model, **dict(zip(inputs, values, strict=True)))

        return step, [value.clone() for value in inputs.values()]

    programs = step_programs(make)
    return {**programs.forward.regions, **programs.backward.regions}


def layouts(values: list[Any]) -> list[Any]:
    return [
        (tuple(value.shape), value.stride(), value.dtype)
        if isinstance(value, torch.Tensor)
        else value
        for value in values
    ]


def results(region: RegionGraph) -> list[Any]:
    return [
        output.meta["val"] if hasattr(output, "meta") else output for output in outputs_of(region)
    ]


@pytest.mark.parametrize(
    "builder", in_ci([models.llama, models.mixtral, models.bert], models.llama)
)
def test_a_shorter_region_is_that_of_a_shorter_sequence(builder):
    whole, expected = regions(builder, WHOLE), regions(builder, WHOLE // PART)
    assert whole.keys() == expected.keys()
    for name, region in whole.items():
        with failing_fakes_unlogged():
            found = shorten(region, PART, PassRunner())
        assert found.name == f"{name}.{PART}th"
        targets = [[node.target for node in r.gm.graph.nodes] for r in (found, region)]
        assert targets[0] == targets[1]
        found.gm.graph.lint()
        if not region.static_inputs or builder is models.mixtral:
            continue  # several sizes could be the tokens; the work grows with each of them
        assert layouts(found.example_inputs()) == layouts(expected[name].example_inputs())
        assert layouts(results(found)) == layouts(results(expected[name]))
    runs = shorten(whole["layer0_bwd"], PART, PassRunner())
    assert measure(aten.lower(runs), runs, repeats=1) > 0


def test_the_largest_size_need_not_be_the_tokens():
    """A parameter keeps its shape, so that what is multiplied with it must as well."""
    region = replace(region_of(lambda x, w: (x @ w,), (32, 48), (48, 8)), static_inputs=(1,))
    shorter = shorten(region, 2, PassRunner())
    assert [tuple(tensor.shape) for tensor in shorter.example_inputs()] == [(16, 48), (48, 8)]
    assert [tuple(value.shape) for value in results(shorter)] == [(16, 8)]


def test_what_cannot_be_cut_is_refused():
    region = region_of(lambda x, y: (x.view(7, 3) @ y,), (21,), (3, 5))
    with pytest.raises(UnsupportedGraph, match="cannot be cut to one 4th of its tokens"):
        shorten(region, 4, PassRunner())
