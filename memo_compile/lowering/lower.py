"""Lowers regions as the options say, each distinct one once; and graphs that memo does not plan."""

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
from memo_compile.reporting.compiling import say
from memo_compile.step.problem import CallKind
from memo_compile.torch_private import autograd, fx_graphs, inductor_api

log = logging.getLogger("memo")


def lower_regions(
    regions: Iterable[RegionGraph], config: MemoConfig, runner: PassRunner
) -> dict[str, LoweredRegion]:
    """Lowers every region as ``config.lowering`` says; returns them by name."""
    by_inductor = config.lowering != "aten"
    store = config.store() if by_inductor else None
    cache = None if store is None else RegionCache(store=store)
    regions = list(regions)
    if store is not None and any(region.device.type == "cpu" for region in regions):
        vector_probe.probe_once(store)
    session = inductor.session(config.inductor_options) if by_inductor else contextlib.nullcontext()
    with session:
        by_name = {}
        for done, region in enumerate(regions):
            say(f"lowering {len(regions)} regions" + (f" ({done} are done)" if done else ""))
            lowered = _once(region, config, runner, cache)
            inputs, outputs = region.input_layouts(), region.output_layouts()
            profile = replace(lowered.profile, input_layouts=inputs, output_layouts=outputs)
            by_name[region.name] = replace(lowered, profile=profile)
    if cache is not None:
        log.info("memo: regions so far, from the cache and not: %s", region_cache.counts)
    return by_name


_LOWERED: list[dict[Hashable, LoweredRegion]] = []
"""Lowered regions by content, for each open context of ``lowered_once``."""


@contextlib.contextmanager
def lowered_once() -> Iterator[None]:
    """Inside, regions of equal content are lowered once; they share their code."""
    _LOWERED.append({})
    try:
        yield
    finally:
        _LOWERED.pop()


def _once(
    region: RegionGraph, config: MemoConfig, runner: PassRunner, cache: RegionCache | None
) -> LoweredRegion:
    """Lowers ``region``, or takes the code of an equal one (``lowered_once``)."""
    if not _LOWERED or region.kind is not CallKind.RUN:
        return _lowered(region, config, runner, cache)
    by_name = region.op_by_op or config.lowering == "aten"  # buffers have the names of nodes there
    key = (
        content_of(region.gm, region.external_outputs, region.static_inputs),
        *(region.is_backward, str(region.device), region.op_by_op, region.donated),
        *(config.lowering, repr(config.inductor_options), "poison" in config.debug),
        tuple(node.name for node in region.gm.graph.nodes) if by_name else (),
        # ``RoundValues`` reads the tag.
        tuple(node.meta.get("partitioner_tag") for node in region.gm.graph.nodes)
        if config.recomputes
        else None,
    )
    if key not in _LOWERED[-1]:
        _LOWERED[-1][key] = _lowered(region, config, runner, cache)
    lowered = _LOWERED[-1][key]
    return replace(lowered, profile=replace(lowered.profile, name=region.name))


def _lowered(
    region: RegionGraph, config: MemoConfig, runner: PassRunner, cache: RegionCache | None
) -> LoweredRegion:
    """Lowers ``region`` by what its kind and the options say; by Inductor after memo's passes."""
    poison = "poison" in config.debug
    if region.kind is not CallKind.RUN:
        return collective_profile.lower(region)
    if region.op_by_op or config.lowering == "aten":
        return aten.lower(region, poison=poison)
    passes: list[GraphPass] = [OwnOutputs(external_outputs=region.external_outputs)]
    if config.recomputes:
        passes.append(RoundValues())
    if region.device.type == "cuda":  # each kernel is launched there, and launches cost time
        passes.append(SpreadSeeds(external_outputs=region.external_outputs))
    copied = fx_graphs.copied(region.gm)  # Inductor rewrites it, and others still read the first
    prepared = replace(region, gm=runner.run(copied, passes, stage=region.name))

    def lower_for_its_sizes() -> LoweredRegion:
        """Lowers by Inductor, again without donated inputs that it made results for the user."""
        current = prepared
        while True:
            unchanged = fx_graphs.copied(current.gm) if current.donated else current.gm
            lowered = inductor.lower(current, poison=poison, cache=cache)
            given_away = inductor.given_away(lowered, current)
            if not given_away:
                return lowered
            donated = tuple(sorted({*current.donated} - given_away))
            current = replace(current, gm=unchanged, donated=donated)

    def at_others(sizes: OtherSizes) -> fx.GraphModule:
        return runner.run(sizes.graph(region.gm), passes, stage=f"{region.name}-other-size")

    varying = varying_sizes.current()
    if varying is None:
        return lower_for_its_sizes()
    prepared = replace(prepared, donated=())
    return varying.lower(prepared, poison=poison, alone=lower_for_its_sizes, at_others=at_others)


def plain_inner(
    gm: fx.GraphModule, examples: Sequence[Any], config: MemoConfig, kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """Compiles a graph without a plan (inference): by plain Inductor, or op by op."""
    if config.lowering == "aten":
        return aten.interpret(gm)
    with (
        inductor_api.inductor_patch(inductor_api.NO_GRAPH_CACHE),
        autograd.functorch_patch(bundled_autograd_cache=False),
    ):
        compiled: Callable[..., Any] = inductor_api.compile_fx_inner(gm, examples, **kwargs)
    return compiled
