"""Which lowering runs a region, and what happens to graphs that memo does not plan."""

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from memo_compile.analysis.regions import LoweredRegion, RegionGraph
from memo_compile.config import MemoConfig
from memo_compile.lowering import (
    aten,
    collective_profile,
    inductor,
    region_cache,
    varying_sizes,
    vector_probe,
)
from memo_compile.lowering.region_cache import RegionCache
from memo_compile.passes.cut import content_of
from memo_compile.passes.cut_template import OtherSizes
from memo_compile.passes.own_outputs import OwnOutputs
from memo_compile.passes.round_values import RoundValues
from memo_compile.passes.runner import GraphPass, PassRunner
from memo_compile.passes.spread_seeds import SpreadSeeds
from memo_compile.step.problem import CallKind
from memo_compile.torch_private import autograd, fx_graphs, inductor_api

log = logging.getLogger("memo")


def lower_regions(
    regions: Iterable[RegionGraph], config: MemoConfig, runner: PassRunner
) -> dict[str, LoweredRegion]:
    """Every region by its name, lowered as ``config.lowering`` says."""
    by_inductor = config.lowering != "aten"
    store = config.store() if by_inductor else None
    cache = None if store is None else RegionCache(store=store)
    regions = list(regions)
    if store is not None and any(region.device.type == "cpu" for region in regions):
        vector_probe.probe_once(store)
    session = inductor.session(config.inductor_options) if by_inductor else contextlib.nullcontext()
    with session:
        found = {}
        for region in regions:
            lowered = _once(region, config, runner, cache)
            inputs, outputs = region.input_layouts(), region.output_layouts()
            profile = replace(lowered.profile, input_layouts=inputs, output_layouts=outputs)
            found[region.name] = replace(lowered, profile=profile)
    if cache is not None:
        log.info("memo: regions so far, from the cache and not: %s", region_cache.counts)
    return found


_KNOWN: list[dict[Hashable, LoweredRegion]] = []
"""What was lowered, by content, in each context of ``lowered_once`` that is open."""


@contextlib.contextmanager
def lowered_once() -> Iterator[None]:
    """Inside, regions of equal content are lowered once; they share their code."""
    _KNOWN.append({})
    try:
        yield
    finally:
        _KNOWN.pop()


def _once(
    region: RegionGraph, config: MemoConfig, runner: PassRunner, cache: RegionCache | None
) -> LoweredRegion:
    """``region`` lowered, or what its like became."""
    if not _KNOWN or region.kind is not CallKind.RUN:
        return _lowered(region, config, runner, cache)
    by_name = region.op_by_op or config.lowering == "aten"  # buffers have the names of nodes there
    key = (
        content_of(region.gm, region.external_outputs, region.static_inputs),
        *(region.is_backward, str(region.device), region.op_by_op, region.donated),
        *(config.lowering, repr(config.inductor_options), "poison" in config.debug),
        tuple(node.name for node in region.gm.graph.nodes) if by_name else (),
        tuple(map(_tag_of, region.gm.graph.nodes)) if config.recomputes else None,
    )
    if key not in _KNOWN[-1]:
        _KNOWN[-1][key] = _lowered(region, config, runner, cache)
    found = _KNOWN[-1][key]
    return replace(found, profile=replace(found.profile, name=region.name))


def _tag_of(node: fx.Node) -> Any:
    """What ``RoundValues`` asks of a node, beside what it computes."""
    return node.meta.get("partitioner_tag")


def _lowered(
    region: RegionGraph, config: MemoConfig, runner: PassRunner, cache: RegionCache | None
) -> LoweredRegion:
    poison = "poison" in config.debug
    if region.kind is not CallKind.RUN:
        return collective_profile.lower(region)
    if region.op_by_op or config.lowering == "aten":
        return aten.lower(region, poison=poison)
    own: list[GraphPass] = [OwnOutputs(external_outputs=region.external_outputs)]
    if config.recomputes:
        own.append(RoundValues())
    if region.device.type == "cuda":  # each kernel is launched there, and launches cost time
        own.append(SpreadSeeds(external_outputs=region.external_outputs))
    copied = fx_graphs.copied(region.gm)  # lowering rewrites it, and others still read the first
    own_region = replace(region, gm=runner.run(copied, own, stage=region.name))

    def alone() -> LoweredRegion:
        mine = own_region
        while True:
            before = fx_graphs.copied(mine.gm) if mine.donated else mine.gm
            found = inductor.lower(mine, poison=poison, cache=cache)
            given = inductor.given_away(found, mine)
            if not given:
                return found
            mine = replace(mine, gm=before, donated=tuple(sorted({*mine.donated} - given)))

    def at_others(sizes: OtherSizes) -> fx.GraphModule:
        return runner.run(sizes.graph(region.gm), own, stage=f"{region.name}-other-size")

    varying = varying_sizes.current()
    if varying is None:
        return alone()
    own_region = replace(own_region, donated=())
    return varying.lower(own_region, poison=poison, alone=alone, at_others=at_others)


def plain_inner(
    gm: fx.GraphModule, examples: Sequence[Any], config: MemoConfig, kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """A graph without a plan (inference): plain Inductor, or op by op under the aten lowering."""
    if config.lowering == "aten":
        return aten.interpret(gm)
    with (
        inductor_api.inductor_patch(inductor_api.NO_GRAPH_CACHE),
        autograd.functorch_patch(bundled_autograd_cache=False),
    ):
        compiled: Callable[..., Any] = inductor_api.compile_fx_inner(gm, examples, **kwargs)
    return compiled
