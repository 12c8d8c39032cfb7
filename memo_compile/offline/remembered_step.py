"""A lowered step as plain data: what a plan needs of it when nothing is traced or lowered again.

``StepRecord`` holds all that ``driver.step_planner`` asks of a step, and every recompute region
that was asked for. A region that was not raises ``NotRemembered``: the step is traced then.
"""

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from memo_compile.check.check_moves import Recomputation, recomputations_of
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.driver.recompute_library import Estimated, Lowered, RecomputeLibrary, RegionMaker
from memo_compile.driver.stages import PlanRequest
from memo_compile.errors import UnsupportedGraph
from memo_compile.offline.remembered_places import RememberedPlaces
from memo_compile.planners.move_rules import recompute_keys
from memo_compile.planners.placement import Placement, PlacementProblem
from memo_compile.planners.policy.candidates import SearchMemory
from memo_compile.planners.policy.modes import EIGHTHS
from memo_compile.step.movable import (
    Layer,
    LayerClass,
    LayerOp,
    MovableStep,
    RecomputeKey,
    RegionInput,
    Slot,
    StepCosts,
)
from memo_compile.step.problem import Problem, RegionProfile
from memo_compile.step.serialise import plain, restore
from memo_compile.step.tilings import WholeStep

if TYPE_CHECKING:
    from memo_compile.analysis.regions import LoweredRegion


class NotRemembered(Exception):
    """A plan asks for a recompute region that no plan before it has asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A bound in bytes, and the sizes that were compared with it: only those above it count."""

    bound_bytes: int
    sizes: tuple[int, ...]

    def tells_like(self, bound_bytes: int) -> bool:
        """True where ``bound_bytes`` divides the sizes in the same way."""
        return self.above(bound_bytes) == self.above(self.bound_bytes)

    def above(self, bound_bytes: int) -> list[bool]:
        """Which of the sizes are above that bound; 0 is below all."""
        return [size > bound_bytes or not bound_bytes for size in self.sizes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRecord:
    """A ``LayerClass``, without what is found out while planning."""

    key: str
    slots: tuple[Slot, ...]
    ops: tuple[LayerOp, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRecord:
    """All that is known of one recompute region."""

    key: RecomputeKey
    unsupported: str | None = None
    """Why there is no such region."""
    estimate: RegionProfile | None = None
    inputs: tuple[RegionInput, ...] = ()
    refused: str | None = None
    """Why it was not lowered."""
    profile: RegionProfile | None = None
    """As it was lowered; None: it was not asked for."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step in certain tiles, lowered for a certain device."""

    tile_above: Threshold
    drop_above: Threshold
    problem: Problem
    """The step that keeps everything."""
    whole: WholeStep
    classes: tuple[ClassRecord, ...]
    layers: tuple[Layer, ...]
    token_granule: int
    costs: StepCosts
    whole_compute_s: float
    labels: Mapping[str, str | None]
    leased_bytes: Mapping[str, int]
    device_type: str
    model_flops: int
    exact: bool
    tiled: tuple[str, ...]
    """The regions that run in tiles."""
    regions: tuple[RegionRecord, ...] = ()


@dataclass(slots=True)
class RememberedRegions:
    """Recompute regions that are made once; a ``recompute_library.RegionMaker``.

    Without a ``maker`` nothing is made, and what is not known raises NotRemembered.
    """

    known: dict[RecomputeKey, RegionRecord] = field(default_factory=dict)
    maker: RegionMaker | None = None
    num_made: int = 0
    """How many answers ``maker`` gave."""

    def estimated(self, key: RecomputeKey) -> Estimated:
        """The region of ``key`` before it is lowered. Raises UnsupportedGraph: there is none."""
        if key not in self.known:
            self.known[key] = self._made(key)
        record = self.known[key]
        if record.unsupported is not None:
            raise UnsupportedGraph(record.unsupported)
        assert record.estimate is not None, f"{key.region} is supported and has no profile"
        return Estimated(record.estimate, record.inputs)

    def _made(self, key: RecomputeKey) -> RegionRecord:
        if self.maker is None:
            raise NotRemembered(f"{key.region} is not remembered")
        self.num_made += 1
        try:
            found = self.maker.estimated(key)
        except UnsupportedGraph as error:
            return RegionRecord(key=key, unsupported=str(error))
        return RegionRecord(key=key, estimate=found.profile, inputs=found.inputs)

    def lowered(self, keys: Sequence[RecomputeKey]) -> Mapping[RecomputeKey, Lowered | str]:
        """Each of ``keys`` lowered, or why it cannot be used. All were estimated before."""
        missing = [key for key in keys if not _is_lowered(self.known[key])]
        if missing:
            self._lower(missing)
        return {key: _lowered(self.known[key]) for key in keys}

    def _lower(self, keys: Sequence[RecomputeKey]) -> None:
        if self.maker is None:
            raise NotRemembered(f"{keys[0].region} is not remembered as lowered")
        self.num_made += len(keys)
        for key in keys:
            self.maker.estimated(key)  # its graph, where the estimate itself was remembered
        for key, made in self.maker.lowered(keys).items():
            if isinstance(made, str):
                self.known[key] = replace(self.known[key], refused=made)
            else:
                self.known[key] = replace(
                    self.known[key], profile=made.profile, seconds=made.seconds
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsBetween:
    """A ``RegionMaker`` that knows regions for some rows from the same ones for others.

    All that an estimate has is a multiple of the rows, or no function of them.
    """

    known: Mapping[RecomputeKey, RegionRecord]

    def estimated(self, key: RecomputeKey) -> Estimated:
        """The region of ``key``. Raises NotRemembered, and UnsupportedGraph where others do."""
        others = [
            record
            for own, record in self.known.items()
            if own.rows and key.rows and replace(own, rows=key.rows) == key
        ]
        for record in others:
            if record.unsupported is not None:
                raise UnsupportedGraph(record.unsupported)
        if len(others) < 2 or key.rows is None:
            raise NotRemembered(f"{key.region} is not remembered")
        first, second = others[:2]
        assert first.estimate is not None, "it is supported"
        assert second.estimate is not None, "it is supported"
        assert first.key.rows, "it has rows"
        assert second.key.rows, "it has rows"
        between = _Line(first.key.rows, second.key.rows, key.rows)
        profile = restore(
            between.of(plain(first.estimate), plain(second.estimate)), RegionProfile, "profile"
        )
        return Estimated(replace(profile, name=key.region), first.inputs)

    def lowered(self, keys: Sequence[RecomputeKey]) -> Mapping[RecomputeKey, Lowered | str]:
        """Raises NotRemembered."""
        raise NotRemembered(f"{keys[0].region} is not remembered as lowered")


class _Line(NamedTuple):
    """A straight line through what is known at two numbers of rows, at a third."""

    first: int
    second: int
    wanted: int

    def of(self, first: Any, second: Any) -> Any:
        """Raises NotRemembered: they do not differ in integers alone."""
        if first == second or isinstance(first, str):  # names
            return first
        if isinstance(first, dict) and first.keys() == second.keys():
            return {name: self.of(own, second[name]) for name, own in first.items()}
        if isinstance(first, list) and len(first) == len(second):
            return [self.of(own, other) for own, other in zip(first, second, strict=True)]
        if type(first) is not int or type(second) is not int:
            raise NotRemembered("regions for other rows differ")
        more, rest = divmod((second - first) * (self.wanted - self.first), self.second - self.first)
        if rest:
            raise NotRemembered("regions for other rows are no multiples of them")
        return first + more


def _is_lowered(record: RegionRecord) -> bool:
    return record.profile is not None or record.refused is not None


def _lowered(record: RegionRecord) -> Lowered | str:
    if record.refused is not None:
        return record.refused
    assert record.profile is not None, f"{record.key.region} is not lowered"
    return Lowered(record.profile, record.seconds)


@dataclass(slots=True, kw_only=True)
class RememberedStep:
    """A step of a record, as the planner knows it; a ``step_planner.KnownStep``."""

    record: StepRecord
    name: str
    hardware: HardwareProfile
    maker: RememberedRegions
    places: RememberedPlaces
    searches_of: Callable[[int | None, bool], SearchMemory]
    """By the bound on the host, and whether slices of rows are forbidden."""
    _library: RecomputeLibrary | None = None
    _classes: dict[str, LayerClass] = field(default_factory=dict)
    _searched: list[SearchMemory] = field(default_factory=list)

    def __post_init__(self) -> None:
        for known in self.record.classes:
            self._classes[known.key] = LayerClass(key=known.key, slots=known.slots, ops=known.ops)

    @property
    def whole(self) -> WholeStep:
        """The step before tiles and moves, for the checker."""
        return self.record.whole

    @property
    def device_type(self) -> str:
        """The kind of device that the tensors lie on."""
        return self.record.device_type

    def requested(self, request: PlanRequest) -> Problem:
        """The step that keeps everything; nothing else is asked of a step that never runs."""
        assert request == PlanRequest(), f"a plan that never runs has no {request}"
        return self.record.problem

    def movable(self, problem: Problem, host_store: str, num_members: int = 1) -> MovableStep:
        """``problem`` as layers with slots."""
        assert num_members == 1, "groups are planned where they run"
        return MovableStep(
            problem=problem,
            classes=self._classes,
            layers=self.record.layers,
            costs=self.record.costs,
            token_granule=self.record.token_granule,
        )

    def library(self, host_store: str) -> RecomputeLibrary:
        """The step's recompute regions."""
        if self._library is None:
            step = self.movable(self.record.problem, host_store)
            self._library = RecomputeLibrary(step=step, maker=self.maker)
        return self._library

    def compute_s(self) -> float:
        """Seconds of the step that keeps everything."""
        return math.fsum(map(self.record.costs.call_s, self.record.problem.calls))

    def whole_compute_s(self) -> float:
        """The same before any region ran in tiles."""
        return self.record.whole_compute_s

    def recomputations(
        self, moved: Problem, unmoved: Problem | None = None, num_members: int = 1
    ) -> Mapping[str, Recomputation]:
        """What each RECOMPUTE call of ``moved`` makes, and from what."""
        if self._library is None:
            return {}
        return recomputations_of(self._library.step, moved, self._library.regions.values())

    def searches(self, host_budget_bytes: int | None, *, exact: bool) -> SearchMemory:
        """What was found for other budgets, and is kept for more."""
        self._searched.append(self.searches_of(host_budget_bytes, exact))
        return self._searched[-1]

    def lower_found(self) -> None:
        """Lower what the plans that were found recompute with, which other budgets may choose."""
        searches = (found for memory in self._searched for found in memory.moves.values())
        taken = {
            (layer.class_key, mode)
            for moves in itertools.chain.from_iterable(searches)
            for layer, mode in zip(self.record.layers, moves.modes, strict=True)
        }
        wanted = {key for name, mode in taken for key in recompute_keys(self._classes[name], mode)}
        known = self.maker.known.items()
        self.maker.lowered([key for key, own in known if key in wanted and own.estimate])
        self._estimate_rows()

    def _estimate_rows(self) -> None:
        """What is known for one number of rows is made for another, which tells all others."""
        counts = Counter(replace(key, rows=1) for key in self.maker.known if key.rows)
        for key in [*self.maker.known]:
            if key.rows and counts[replace(key, rows=1)] == 1:
                num_rows = self._classes[key.class_key].slots[key.slots[0]].num_rows
                others = (num_rows // EIGHTHS * number for number in (1, 2))
                other = next(rows for rows in others if rows != key.rows)
                with contextlib.suppress(UnsupportedGraph):
                    self.maker.estimated(replace(key, rows=other))

    def place(self, problem: PlacementProblem, *, solver: str, time_limit_s: float) -> Placement:
        """Offsets for the buffers of ``problem``, those that were found before."""
        return self.places(problem, solver=solver, time_limit_s=time_limit_s)

    def regions(self) -> "Mapping[str, LoweredRegion]":
        """Nothing: no code is remembered."""
        return {}

    def labels(self) -> Mapping[str, str | None]:
        """Layer class -> the path of its modules, where it has one."""
        return self.record.labels

    def leased_bytes(self) -> Mapping[str, int]:
        """Saved activation -> its own bytes."""
        return self.record.leased_bytes

    def device_bytes(self) -> int | None:
        """All memory of the device that is planned for."""
        return self.hardware.memory_bytes

    def bytes_left(self) -> int | None:
        """Nothing is known of the tensors' device, on which nothing runs."""
        return None
