"""A lowered step as a ``StepRecord``, from its graphs."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from memo_compile.analysis.regions import RegionGraph
from memo_compile.analysis.tile_chains import transient_bytes
from memo_compile.config import MemoConfig
from memo_compile.costs.roofline import looked_up_bytes, node_cost
from memo_compile.costs.work import NodeCost
from memo_compile.driver.knowledge import StepKnowledge
from memo_compile.driver.pipeline import first_request
from memo_compile.driver.recompute_library import RegionMaker
from memo_compile.driver.recompute_regions import RecomputeGraphs
from memo_compile.driver.stages import CapturedStep
from memo_compile.offline.long_length import (
    PARTS,
    ClassWork,
    LongCost,
    LongStep,
    LongWork,
    RepeatedFlops,
)
from memo_compile.offline.offline_step import OfflineFacts
from memo_compile.offline.plan_offline import FORWARD_AND_BACKWARD, forward_costs, offline_facts
from memo_compile.offline.remembered_step import ClassRecord, StepRecord, Threshold
from memo_compile.passes.cut import Cut
from memo_compile.step.movable import RecomputeKey
from memo_compile.step.problem import CallKind
from memo_compile.step.serialise import plain


def record_of(
    known: StepKnowledge, captured: CapturedStep, facts: OfflineFacts, options: MemoConfig
) -> StepRecord:
    """All that a plan asks of ``known``, which was lowered from ``captured`` for ``options``."""
    step, host_store = known.lowered.cut, options.host_store
    problem = known.requested(first_request(known))
    movable = known.movable(problem, host_store)
    in_tiles = (options.token_tiles or 1) > 1
    drops = options.drops_above()
    transients = _transients(step.forward, step.backward) if in_tiles else ()
    return StepRecord(
        tile_above=Threshold(bound_bytes=options.tile_above_bytes, sizes=tuple(transients)),
        drop_above=Threshold(
            bound_bytes=drops or 0,
            sizes=() if drops is None else captured.droppable,
        ),
        problem=problem,
        whole=known.whole,
        classes=tuple(
            ClassRecord(key=cls.key, slots=cls.slots, ops=cls.ops)
            for cls in movable.classes.values()
        ),
        layers=movable.layers,
        token_granule=movable.token_granule,
        costs=facts.costs,
        whole_compute_s=known.whole_compute_s(),
        labels=known.labels(),
        leased_bytes=known.leased_bytes(),
        device_type=known.device_type,
        model_flops=facts.model_flops,
        exact=facts.exact,
        tiled=tuple(facts.tiled),
    )


def long_step_of(
    known: StepKnowledge, captured: CapturedStep, options: MemoConfig, long: int
) -> LongStep:
    """What ``known``, lowered at ``long`` tokens, is at any length. Raises NotAtLengthError."""
    record, base = record_of(known, captured, offline_facts(known), options), long // PARTS
    graphs = known.class_graphs(options.host_store)
    regions = known.lowered.cut.regions
    undivided = Threshold(bound_bytes=0, sizes=())  # a bound is no function of the length
    # Operations are told by ``model_flops``: their sum has digits that are as large as the base.
    bare = replace(record, tile_above=undivided, drop_above=undivided, model_flops=0)
    return LongStep(
        long=long,
        tile_above=record.tile_above,
        drop_above=record.drop_above,
        text=json.dumps(plain(bare), separators=(",", ":")),
        region_work={
            name: _work(regions[name].gm, base) if regions[name].kind is CallKind.RUN else ()
            for name in known.lowered.regions
        },
        whole_work={name: _work(region.gm, base) for name, region in known.whole_regions().items()},
        class_work=tuple(
            _class_work(graphs[own.key].region.gm, own, base) for own in record.classes
        ),
        model_flops=tuple(
            RepeatedFlops(flops=LongCost.of(cost, base).flops, times=FORWARD_AND_BACKWARD * times)
            for cost, times in Counter(map(_flops_alone, forward_costs(known))).items()
        ),
    )


def _flops_alone(cost: NodeCost) -> NodeCost:
    return NodeCost(flops=cost.flops, bytes=0)


def _class_work(gm: fx.GraphModule, record: ClassRecord, base: int) -> ClassWork:
    nodes = {node.name: node for node in gm.graph.nodes}
    ops = (_long_cost(nodes[op.name], base) for op in record.ops)
    return ClassWork(all=_work(gm, base), ops=tuple(ops))


def _work(gm: fx.GraphModule, base: int) -> LongWork:
    costs = (_long_cost(node, base) for node in gm.graph.nodes)
    return tuple(cost for cost in costs if cost.flops or cost.bytes or cost.looked_up)


def _long_cost(node: fx.Node, base: int) -> LongCost:
    cost = node_cost(node)
    looked_up = looked_up_bytes(node) if cost.bytes else None
    return LongCost.of(cost, base, looked_up or ())


def region_work(maker: RegionMaker, key: RecomputeKey, base: int) -> LongWork:
    """What the region of ``key`` computes, which ``maker`` has made."""
    assert isinstance(maker, RecomputeGraphs), "offline steps have graphs"
    return _work(maker.region_graphs[key].gm, base)


def region_maker(known: StepKnowledge) -> RegionMaker:
    """What makes the recompute regions of ``known`` from its graphs."""
    return known.library(known.config.host_store).maker


def _transients(*halves: Cut) -> Iterator[int]:
    """What was compared with ``tile_above_bytes``: of every region as it was before any tiles."""
    for half in halves:
        called: dict[str, RegionGraph] = {
            call.region: half.whole_regions.get(call.region) or half.regions[call.region]
            for call in half.whole_calls
        }
        yield from (transient_bytes(region.gm) for region in called.values())
