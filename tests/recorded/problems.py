"""Recorded planning problems: steps as data, budgets, and how good the plans were.

A ``RecordedStep`` is all that the planner asks of a step (a ``step_planner.KnownStep``). Its
recompute regions follow from the operators of its layer classes, so that it answers for every
choice of saved tensors, not only for those that were tried when it was recorded.
"""

import functools
import json
import lzma
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memo_compile.config import MemoConfig
from memo_compile.costs.hardware import find_hardware
from memo_compile.driver.recompute_library import Estimated, Lowered, RecomputeLibrary
from memo_compile.driver.stages import PlannedStep, PlanRequest
from memo_compile.driver.step_planner import plan_known
from memo_compile.errors import Infeasible
from memo_compile.planners.move_rules import closure_of
from memo_compile.planners.placement import Placement, PlacementProblem, place
from memo_compile.planners.policy.candidates import SearchMemory
from memo_compile.step.joint_step import JointStep
from memo_compile.step.movable import (
    Layer,
    LayerClass,
    LayerOp,
    MovableStep,
    RecomputeKey,
    RecomputeRegion,
    RegionInput,
    Slot,
    StepCosts,
)
from memo_compile.step.problem import (
    FixedBytes,
    Problem,
    RegionBuffer,
    RegionOutput,
    RegionProfile,
    Storage,
    align,
)
from memo_compile.step.serialise import plain, restore
from memo_compile.step.tilings import WholeStep

FILE = Path(__file__).with_name("problems.json.xz")

DEVICE = replace(find_hardware("h200"), memory_bytes=2**50)
"""The planner asks a recorded step for nothing but the size of the device, which is no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpMemory:
    """What one operator of a layer allocates and reads beside the operators that it names."""

    bytes: int
    """Of its result; 0 for a view."""
    views: int | None = None
    """The operator whose result it shows."""
    inputs: tuple[int, ...] = ()
    """Inputs of the layer, by position, that are no saved tensors: parameters, masks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedClass:
    """A ``LayerClass``, and the memory of its operators."""

    key: str
    slots: tuple[Slot, ...]
    ops: tuple[LayerOp, ...]
    memory: tuple[OpMemory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A step that keeps everything, its layers and costs; a ``step_planner.KnownStep``."""

    name: str
    problem: Problem
    whole: WholeStep
    classes: tuple[RecordedClass, ...]
    layers: tuple[Layer, ...]
    costs: StepCosts
    token_granule: int = 128
    shares: tuple[float, ...] = ()
    waits_late: bool = True

    def step(self) -> MovableStep:
        """The step as the policies see it."""
        classes = (LayerClass(key=cls.key, slots=cls.slots, ops=cls.ops) for cls in self.classes)
        return MovableStep(
            problem=self.problem,
            classes={cls.key: cls for cls in classes},
            layers=self.layers,
            costs=self.costs,
            token_granule=self.token_granule,
            shares=self.shares,
            waits_late=self.waits_late,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPlan:
    """One question about a step, and the plan that answered it."""

    budget_bytes: int
    host_budget_bytes: int
    policy: str = "auto"
    exact: bool = False
    floor_bytes: int | None = None
    """The floor that was named, where nothing fits ``budget_bytes``."""
    step_s: float = 0.0
    bound_s: float = 0.0
    peak_bytes: int = 0
    arena_bytes: int = 0
    host_bytes: int = 0
    decisions: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What tells it from other questions about the same step."""
        limits = f"{self.budget_bytes} bytes, host {self.host_budget_bytes}"
        return f"{limits}, {self.policy}{', exact' if self.exact else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProblem:
    """A step and the questions about it."""

    step: RecordedStep
    plans: tuple[RecordedPlan, ...]


@dataclass(frozen=True, slots=True)
class OperatorRegions:
    """Makes recompute regions of operators' bytes; a ``recompute_library.RegionMaker``."""

    step: MovableStep
    memory: Mapping[str, Sequence[OpMemory]]

    def estimated(self, key: RecomputeKey) -> Estimated:
        """One line for each operator, in whose place views take none of their own."""
        cls, memory = self.step.classes[key.class_key], self.memory[key.class_key]
        closure = closure_of(cls, key.slots, key.passing)
        share = 1.0 if key.rows is None else key.rows / cls.slots[key.slots[0]].num_rows
        lines = {op: line for line, op in enumerate(closure)}
        makers = {op.slot: at for at, op in enumerate(cls.ops) if op.slot is not None}
        last = {source: line + 1 for op, line in lines.items() for source in cls.ops[op].inputs}
        ends: dict[int, int] = {}
        for op in closure:
            storage = _storage(memory, op)
            end = len(closure) if cls.ops[op].slot in key.slots else last.get(op, lines[op] + 1)
            ends[storage] = max(end, ends.get(storage, 0))
        owners = [op for op in closure if memory[op].views is None and memory[op].bytes]
        number = {op: index for index, op in enumerate(owners)}
        sources: dict[RegionInput, int] = {}
        for op in closure:
            for position in memory[op].inputs:
                sources[RegionInput(forward_input=position)] = lines[op] + 1
        read = {cls.ops[at].slot: end for at, end in last.items() if at not in lines}
        sources |= {RegionInput(slot=slot): end for slot, end in read.items() if slot is not None}
        outputs = []
        for slot in key.slots:
            storage = _storage(memory, makers[slot])
            outputs.append(RegionOutput(storage=Storage.ARENA, index=number[storage]))
        profile = RegionProfile(
            name=key.region,
            num_lines=len(closure),
            buffers=tuple(
                RegionBuffer(
                    name=f"b{index}",
                    size_bytes=align(math.ceil(memory[op].bytes * share)),
                    start=lines[op],
                    end=ends[op],
                )
                for op, index in number.items()
            ),
            input_ends=tuple(sources.values()),
            outputs=tuple(outputs),
            input_layouts=(None,) * len(sources),
        )
        return Estimated(profile, tuple(sources))

    def lowered(self, keys: Sequence[RecomputeKey]) -> Mapping[RecomputeKey, Lowered | str]:
        """Nothing: every region is known as it is."""
        raise AssertionError(f"{keys[0].region} is known")


def _storage(memory: Sequence[OpMemory], op: int) -> int:
    while (viewed := memory[op].views) is not None:
        op = viewed
    return op


class KnownRegions(RecomputeLibrary):
    """Recompute regions that are all lowered from the first."""

    def __call__(self, key: RecomputeKey) -> RecomputeRegion:
        region = super().__call__(key)
        if not region.is_lowered:
            region = self.regions[key] = replace(region, is_lowered=True)
            self.lowered.add(key.region)
        return region


@dataclass(slots=True)
class KnownRecord:
    """A recorded step as the planner asks for it; a ``step_planner.KnownStep``."""

    record: RecordedStep
    _step: MovableStep = field(init=False)
    _regions: KnownRegions = field(init=False)
    _searches: dict[tuple[int | None, bool], SearchMemory] = field(default_factory=dict)

    hardware = DEVICE
    device_type = "cpu"

    def __post_init__(self) -> None:
        self._step = self.record.step()
        memory = {cls.key: cls.memory for cls in self.record.classes}
        maker = OperatorRegions(self._step, memory)
        self._regions = KnownRegions(step=self._step, maker=maker)

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def whole(self) -> WholeStep:
        return self.record.whole

    def requested(self, request: PlanRequest) -> Problem:
        return self.record.problem

    def movable(self, problem: Problem, host_store: str) -> MovableStep:
        return self._step

    def library(self, host_store: str) -> RecomputeLibrary:
        return self._regions

    def compute_s(self) -> float:
        return math.fsum(map(self.record.costs.call_s, self.record.problem.calls))

    def whole_compute_s(self) -> float:
        return self.compute_s()

    def searches(self, host_budget_bytes: int | None, *, exact: bool) -> SearchMemory:
        return self._searches.setdefault((host_budget_bytes, exact), SearchMemory())

    def place(self, problem: PlacementProblem, *, solver: str, time_limit_s: float) -> Placement:
        return place(problem, solver=solver, time_limit_s=time_limit_s)

    def regions(self) -> Mapping[str, Any]:
        return {}

    def labels(self) -> Mapping[str, str | None]:
        return {cls.key: None for cls in self.record.classes}

    def leased_bytes(self) -> Mapping[str, int]:
        return {}

    def device_bytes(self) -> int:
        return DEVICE.memory_bytes

    def bytes_left(self) -> None:
        return None


def planned(known: KnownRecord, asked: RecordedPlan) -> PlannedStep:
    """The plan for what is ``asked``. Raises Infeasible: none fits."""
    config = MemoConfig(
        memory_budget=asked.budget_bytes,
        host_budget=asked.host_budget_bytes,
        policy=asked.policy,
        exact=asked.exact,
        comm_windows=known.record.waits_late,
        costs="roofline",
        cache=False,
    )
    shares = known.record.shares
    request = PlanRequest()
    if shares:
        joint = JointStep(graphs=(0,) * len(shares), fixed=FixedBytes(), shares=shares)
        request = PlanRequest(joint=joint)
    return plan_known(known, config, request)


def answer(known: KnownRecord, asked: RecordedPlan) -> RecordedPlan:
    """``asked`` with the numbers of its plan, or of the floor that is named."""
    blank = replace(asked, floor_bytes=None, step_s=0.0, bound_s=0.0, peak_bytes=0, decisions=())
    try:
        found = planned(known, asked)
    except Infeasible as error:
        return replace(blank, floor_bytes=error.floor_bytes)
    plan = found.plan
    assert plan.check.ok
    step_s = known.compute_s() if plan.step_s is None else plan.step_s
    return replace(
        blank,
        step_s=step_s,
        bound_s=plan.step_lower_bound_s or step_s,
        peak_bytes=plan.peak_bytes,
        arena_bytes=plan.arena_bytes,
        host_bytes=plan.host_bytes,
        decisions=tuple(
            f"{row.layer_class} {row.tensor} {row.decision} {row.token_fraction:g}"
            for row in plan.decisions
        ),
    )


def load() -> dict[str, RecordedProblem]:
    """All recorded problems, by the names of their steps."""
    return {name: problem_of(name) for name in contents()}


def problem_of(name: str) -> RecordedProblem:
    """One of them."""
    return restore(contents()[name], RecordedProblem, "problem")


@functools.cache
def contents() -> Mapping[str, Any]:
    """What the file holds, by the names of steps; JSON's own lists and mappings."""
    problems = json.loads(lzma.decompress(FILE.read_bytes()))
    return {problem["step"]["name"]: problem for problem in problems}


def save(problems: Sequence[RecordedProblem]) -> None:
    """Write ``problems`` in place of those that are there."""
    text = json.dumps([plain(problem) for problem in problems], separators=(",", ":"))
    FILE.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
