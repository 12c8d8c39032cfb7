"""Regions to work on: the forward of real models' middle layers, and regions of plain functions."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from memo_runtime.current import current
from torch.fx.experimental.proxy_tensor import make_fx

from memo_compile.analysis.regions import LoweredRegion, RegionGraph
from tests.models import ModelCase
from tests.steps.programs import step_programs


@functools.cache
def layer_region(builder: Callable[..., ModelCase], batch: int = 2, **sizes: Any) -> RegionGraph:
    """The forward region of the two layers of a builder of ``tests.models``, on fake tensors."""

    def make():
        model, inputs, loss = builder(num_layers=2, **sizes)
        names = list(inputs)

        def step(*values):
            return loss(model, **dict(zip(names, values, strict=True)))

        return step, [value[:batch].clone() for value in inputs.values()]

    return step_programs(make).forward.regions["layer0_fwd"]


def region_of(function: Callable[..., Any], *shapes: Sequence[int]) -> RegionGraph:
    """A region that computes ``function``, which returns a tuple, on float32 inputs."""
    inputs = [torch.randn(*shape) for shape in shapes]
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    return RegionGraph(
        name="region",
        gm=gm,
        external_outputs=frozenset(),
        static_inputs=(),
        is_backward=False,
        device=torch.device("cpu"),
    )


def outputs_of(region: RegionGraph) -> list[Any]:
    return list(region.gm.graph.find_nodes(op="output")[0].args[0])


def real_inputs(region: RegionGraph) -> list[torch.Tensor]:
    """Random numbers, and for whole numbers (seeds) distinct ones, with the region's strides."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for index, fake in enumerate(region.example_inputs()):
        value = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
        if value.is_floating_point():
            value.copy_(torch.randn(fake.shape, generator=generator))
        else:
            value.fill_(index + 7)
        made.append(value)
    return made


def run_region(lowered: LoweredRegion, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """The region's outputs; every buffer lies in memory of its own."""
    current.views = [
        torch.empty_strided(view.size, view.stride, dtype=view.dtype) for view in lowered.views
    ]
    try:
        return list(lowered.run(list(inputs)))
    finally:
        current.views = ()
