"""A lowered step as a ``StepRecord``, from its graphs."""

from collections.abc import Iterator

from memo_compile.analysis.regions import RegionGraph
from memo_compile.analysis.tile_chains import transient_bytes
from memo_compile.config import MemoConfig
from memo_compile.driver.knowledge import StepKnowledge
from memo_compile.driver.pipeline import first_request
from memo_compile.driver.recompute_library import RegionMaker
from memo_compile.driver.stages import CapturedStep
from memo_compile.offline.offline_step import OfflineFacts
from memo_compile.offline.remembered_step import ClassRecord, StepRecord, Threshold
from memo_compile.passes.cut import Cut


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
