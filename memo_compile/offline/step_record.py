"""A lowered step as plain data, which ``memo plan`` keeps on disk. No torch here.

A ``StepRecord`` holds all that planning needs of a step that never runs, so that another budget is
planned without tracing the model again. It has the recompute regions that earlier plans asked for.
When a plan asks for another one, the model is traced and lowered, and the region is added.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from memo_compile.config import MemoConfig
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.driver.recompute_library import Estimated, Lowered, RecomputeLibrary, RegionMaker
from memo_compile.driver.stages import PlanRequest
from memo_compile.errors import UnsupportedGraph
from memo_compile.offline.offline_step import OfflineFacts
from memo_compile.planners.placement import Placement, PlacementProblem, place
from memo_compile.planners.policy.candidates import SearchMemory
from memo_compile.step.movable import (
    Layer,
    LayerClass,
    LayerOp,
    MovableStep,
    RecomputeKey,
    RegionInput,
    Slot,
)
from memo_compile.step.problem import Problem, RegionProfile
from memo_compile.step.tilings import WholeStep

if TYPE_CHECKING:
    from memo_compile.analysis.regions import LoweredRegion

GRAPH_NAME = "graph0"
"""What plans call the step: a model that is forecast is one graph."""

Tiling = tuple[int | None, ...]
"""How a graph is lowered: number of tiles, the bytes above which a region is cut into them, the
bytes above which a tensor may not be saved, whether weights may lie on the host (1), and whether
attention runs by heads (1)."""


def tiling_of(options: MemoConfig) -> Tiling:
    """Returns the options that decide how a graph is cut, and what may lie where."""
    weights = int(options.weights != "device")
    above_bytes = options.attempt.tile_above_bytes
    by_heads = int(options.attempt.by_heads)
    return options.token_tiles, above_bytes, options.drops_above(), weights, by_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A bound in bytes, and the sizes that cutting the step compared with it.

    Two bounds between the same two sizes give the same step: of sizes 10 and 30, bounds 15 and 20.
    """

    bound_bytes: int
    sizes: tuple[int, ...]

    def decides_as(self, bound_bytes: int) -> bool:
        """True where the same sizes are above ``bound_bytes``."""
        return self.above(bound_bytes) == self.above(self.bound_bytes)

    def above(self, bound_bytes: int) -> list[bool]:
        """Returns for each size whether it is above that bound; a bound of 0 is below all."""
        return [size > bound_bytes or not bound_bytes for size in self.sizes]


@dataclass(frozen=True, slots=True, kw_only=True)
class TilesRecord:
    """The two bounds by which a step was cut into tiles: another budget has other bounds."""

    tile_above: Threshold
    """Regions whose transients are no larger than this run whole."""
    drop_above: Threshold
    """Tensors that are no larger than this may be saved."""

    def suits(self, options: MemoConfig) -> bool:
        """True where the bounds of ``options`` give the same tiles and the same saved tensors."""
        above_bytes = options.attempt.tile_above_bytes
        drops_bytes = options.drops_above() or 0
        return self.tile_above.decides_as(above_bytes) and self.drop_above.decides_as(drops_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRecord:
    """A ``LayerClass`` without the fields that planning fills."""

    key: str
    slots: tuple[Slot, ...]
    ops: tuple[LayerOp, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRecord:
    """One recompute region: its estimate, and its profile once it was lowered."""

    key: RecomputeKey
    unsupported: str | None = None
    """Why the region cannot be made; None where it can."""
    estimate: RegionProfile | None = None
    inputs: tuple[RegionInput, ...] = ()
    refused: str | None = None
    """Why the lowered region cannot be used; None where it can."""
    profile: RegionProfile | None = None
    """Of the lowered region; None: no plan has asked for it yet."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step in certain tiles, lowered for a certain device."""

    tiles: TilesRecord
    problem: Problem
    """The step that keeps everything."""
    whole: WholeStep
    classes: tuple[ClassRecord, ...]
    layers: tuple[Layer, ...]
    token_granule: int
    facts: OfflineFacts
    whole_compute_s: float
    labels: Mapping[str, str | None]
    leased_bytes: Mapping[str, int]
    device_type: str
    regions: tuple[RegionRecord, ...] = ()


@dataclass(slots=True)
class RecordedRegions:
    """A ``recompute_library.RegionMaker`` that answers from records, and makes each region once."""

    records: dict[RecomputeKey, RegionRecord]
    traced_maker: Callable[[], RegionMaker]
    """Traces and lowers the step, for a region without a record."""
    has_grown: bool = False
    """True once a region was added to the records."""

    def estimated(self, key: RecomputeKey) -> Estimated:
        """Returns the region's estimate. Raises UnsupportedGraph: the region cannot be made."""
        if key not in self.records:
            self.records[key] = self._estimate(key)
        record = self.records[key]
        if record.unsupported is not None:
            raise UnsupportedGraph(record.unsupported)
        assert record.estimate is not None, f"{key.region} is supported and has no profile"
        return Estimated(record.estimate, record.inputs)

    def _estimate(self, key: RecomputeKey) -> RegionRecord:
        """Makes a new record by tracing the step."""
        maker, self.has_grown = self.traced_maker(), True
        try:
            region = maker.estimated(key)
        except UnsupportedGraph as error:
            return RegionRecord(key=key, unsupported=str(error))
        return RegionRecord(key=key, estimate=region.profile, inputs=region.inputs)

    def lowered(self, keys: Sequence[RecomputeKey]) -> Mapping[RecomputeKey, Lowered | str]:
        """Returns each of ``keys`` lowered, or why it cannot be used. All were estimated before."""
        records = [self.records[key] for key in keys]
        missing = [each.key for each in records if each.profile is None and each.refused is None]
        if missing:
            self._lower(missing)
        return {key: _lowered(self.records[key]) for key in keys}

    def _lower(self, keys: Sequence[RecomputeKey]) -> None:
        """Adds the profiles of ``keys`` to their records, by lowering the step."""
        maker, self.has_grown = self.traced_maker(), True
        for key in keys:
            maker.estimated(key)  # makes the graph: the estimate may have come from a record
        for key, region in maker.lowered(keys).items():
            record = self.records[key]
            if isinstance(region, str):
                self.records[key] = replace(record, refused=region)
            else:
                self.records[key] = replace(record, profile=region.profile, seconds=region.seconds)


def _lowered(record: RegionRecord) -> Lowered | str:
    """Returns the lowered region of ``record``, or why it cannot be used."""
    if record.refused is not None:
        return record.refused
    assert record.profile is not None, f"{record.key.region} is not lowered"
    return Lowered(record.profile, record.seconds)


@dataclass(slots=True, kw_only=True)
class RecordedStep:
    """A ``step_planner.KnownStep`` that answers the planner from a record."""

    record: StepRecord
    hardware: HardwareProfile
    maker: RecordedRegions
    name: str = GRAPH_NAME
    _library: RecomputeLibrary | None = None
    _classes: dict[str, LayerClass] = field(default_factory=dict)
    _searches: dict[tuple[int | None, bool], SearchMemory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for cls in self.record.classes:
            self._classes[cls.key] = LayerClass(key=cls.key, slots=cls.slots, ops=cls.ops)

    def grown_record(self) -> StepRecord:
        """Returns the record with all recompute regions that were asked for by now."""
        return replace(self.record, regions=tuple(self.maker.records.values()))

    @property
    def whole(self) -> WholeStep:
        """Returns the step before tiles and moves, for the checker."""
        return self.record.whole

    @property
    def device_type(self) -> str:
        """Returns the kind of device that the tensors lie on."""
        return self.record.device_type

    def requested(self, request: PlanRequest) -> Problem:
        """Returns the step that keeps everything; one that never runs has no other request."""
        assert request == PlanRequest(), f"a plan that never runs has no {request}"
        return self.record.problem

    def movable(self, problem: Problem, host_store: str) -> MovableStep:
        """Returns ``problem`` as layers with slots."""
        return MovableStep(
            problem=problem,
            classes=self._classes,
            layers=self.record.layers,
            costs=self.record.facts.costs,
            token_granule=self.record.token_granule,
        )

    def library(self, host_store: str) -> RecomputeLibrary:
        """Returns the step's recompute regions."""
        if self._library is None:
            step = self.movable(self.record.problem, host_store)
            self._library = RecomputeLibrary(step=step, maker=self.maker)
        return self._library

    def compute_s(self) -> float:
        """Returns the seconds of the step that keeps everything."""
        return math.fsum(map(self.record.facts.costs.call_s, self.record.problem.calls))

    def whole_compute_s(self) -> float:
        """Returns the seconds of the step that keeps everything, before it was cut into tiles."""
        return self.record.whole_compute_s

    def searches(self, host_budget_bytes: int | None, *, exact: bool) -> SearchMemory:
        """Returns what searches for other budgets found, which the next one starts from."""
        return self._searches.setdefault((host_budget_bytes, exact), SearchMemory())

    def place(self, problem: PlacementProblem, *, solver: str, time_limit_s: float) -> Placement:
        """Returns offsets for the buffers of ``problem``."""
        return place(problem, solver=solver, time_limit_s=time_limit_s)

    def regions(self) -> "Mapping[str, LoweredRegion]":
        """Returns nothing: no code is recorded."""
        return {}

    def labels(self) -> Mapping[str, str | None]:
        """Layer class -> the path of its modules, where it has one."""
        return self.record.labels

    def leased_bytes(self) -> Mapping[str, int]:
        """Saved activation -> its bytes."""
        return self.record.leased_bytes

    def device_bytes(self) -> int | None:
        """Returns all memory of the device that is planned for."""
        return self.hardware.memory_bytes

    def bytes_left(self) -> int | None:
        """Returns None: nothing runs on the device, so that its free memory does not count."""
        return None
