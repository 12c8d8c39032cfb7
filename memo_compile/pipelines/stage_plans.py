"""What a stage takes, by its own plan: its units' graph with all microbatches of its rank's order.

The graph is captured, lowered and planned as the backend does it when the stage runs, but for what
only a step shows. Seconds of a microbatch are those of its units, measured one by one, and what the
plan recomputes and waits for on top.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from memo_compile.config import MemoConfig
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.driver.facts import GraphFacts
from memo_compile.driver.knowledge import StepKnowledge
from memo_compile.driver.piece_knowledge import PieceKnowledge
from memo_compile.driver.pipeline import first_request
from memo_compile.driver.stages import PlannedStep, PlanRequest
from memo_compile.driver.step_planner import plan_known, require_fast
from memo_compile.driver.tries import first_that_fits
from memo_compile.errors import Infeasible
from memo_compile.gpus import GpuFacts
from memo_compile.offline.plan_offline import TracedModel
from memo_compile.pipelines.loss_costs import LossCosts
from memo_compile.pipelines.model_units import ModelUnits
from memo_compile.pipelines.rank_groups import rank_group
from memo_compile.pipelines.stage_orders import StageOrders
from memo_compile.step.plans import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """What a stage takes of its rank, for one microbatch and at its most."""

    seconds: float = math.inf
    """Forward and backward of a microbatch with what is recomputed and waited for; infinite: no
    plan fits."""
    more_s: float = 0.0
    """Of these, recomputation and waits for copies."""
    floor_bytes: int | None = None
    """The smallest budget that fits, where ``seconds`` are infinite."""
    plan: Plan | None = None

    @property
    def fits(self) -> bool:
        """True where there is a plan."""
        return self.plan is not None


@dataclass(kw_only=True)
class StagePlans:
    """Plans of stages of one model, each made once."""

    units: ModelUnits
    orders: StageOrders
    config: MemoConfig
    hardware: HardwareProfile | None
    gpu: GpuFacts | None = None
    loss: LossCosts | None = None
    figures: dict[str, float] = field(default_factory=dict)
    """Seconds by what a region computes: regions of several stages are measured once."""
    _models: dict[tuple[str, ...], "_StageModel"] = field(default_factory=dict)
    _costs: dict[tuple[Any, ...], StageCost] = field(default_factory=dict)
    _unit_s: dict[str, float] = field(default_factory=dict)
    _constants: dict[tuple[int, int], int] = field(default_factory=dict)
    _received: dict[int, int] = field(default_factory=dict)

    def budget_bytes(self) -> int | None:
        """The bound of each rank; None: no one was declared."""
        hardware = self.hardware
        total = (
            hardware.memory_bytes if hardware else self._model(0, 1).traced.facts().device_bytes()
        )
        return self.config.budget_bytes(total)

    def unit_s(self, number: int) -> float:
        """Seconds of a unit's forward and backward, nothing recomputed; the last with the loss."""
        unit = self.units.units[number]
        if unit.signature not in self._unit_s:
            config = self._whole(replace(self.config, memory_budget=None))
            known = self._model(number, number + 1).lowered(None, config)
            self._unit_s[unit.signature] = known.compute_s()
        is_last = number == len(self.units.units) - 1
        return self._unit_s[unit.signature] + (self.loss.seconds if is_last and self.loss else 0.0)

    def least_s(self, begin: int, end: int) -> float:
        """Seconds of units ``[begin, end)``, nothing recomputed."""
        return math.fsum(self.unit_s(number) for number in range(begin, end))

    def least_bytes(self, stage: int, begin: int, end: int) -> int:
        """What no plan avoids: parameters, their gradients, optimizer state, and what torch keeps.

        That is what comes in from other ranks, for all microbatches, and the last stage's results.
        """
        if (begin, end) not in self._constants:
            facts = GraphFacts(self.units.parameters(begin, end), gpu=self.gpu)
            state = self.config.optimizer_state_bytes_per_parameter
            self._constants[begin, end] = facts.constant_bytes(state)
        for border in (begin, end):
            if border not in self._received:
                self._received[border] = self.units.received_bytes(border)
        crossing = self._received[begin] + self._received[end]
        return self._constants[begin, end] + self.orders.num_microbatches * crossing

    def rank_cost(self, rank: int, ranges: tuple[tuple[int, int], ...]) -> StageCost:
        """A rank that has several stages, each with units ``[begin, end)`` of ``ranges``."""
        signatures = tuple(self.units.signature(*own) for own in ranges)
        key = (signatures, self.orders.rank_order(rank), rank == self.orders.num_ranks - 1)
        if key not in self._costs:
            self._costs[key] = self._rank_cost(rank, ranges)
        return self._costs[key]

    def _rank_cost(self, rank: int, ranges: tuple[tuple[int, int], ...]) -> StageCost:
        config, count = self._whole(self.config), self.orders.num_microbatches
        chunks = [self._model(*own).lowered(None, config) for own in ranges]
        graphs = {id(known): known for known in chunks}  # equal stages are one graph
        number_of = {key: number for number, key in enumerate(graphs)}
        known = PieceKnowledge(
            graphs=list(graphs.values()),
            members=[number_of[id(chunk)] for chunk in chunks for _ in range(count)],
            group=rank_group(chunks, self.orders, rank, self.loss),
        )
        try:
            plan = plan_known(known, config, PlanRequest()).plan
        except Infeasible as error:
            return StageCost(floor_bytes=error.floor_bytes)
        return self._of_plan(plan, math.fsum(self.least_s(*own) for own in ranges), count)

    def cost(self, stage: int, begin: int, end: int) -> StageCost:
        """Stage number ``stage`` with units ``[begin, end)``."""
        order = self.orders.stage_order(stage)
        key = (self.units.signature(begin, end), order, self.orders.is_last(stage))
        if key not in self._costs:
            self._costs[key] = self._cost(stage, begin, end)
        return self._costs[key]

    def _cost(self, stage: int, begin: int, end: int) -> StageCost:
        try:
            plan = self._plan(stage, begin, end)
        except Infeasible as error:
            return StageCost(floor_bytes=error.floor_bytes)
        count = 1 if self.orders.runs_one_by_one(stage) else self.orders.num_microbatches
        return self._of_plan(plan, self.least_s(begin, end), count)

    @staticmethod
    def _of_plan(plan: Plan, least_s: float, count: int) -> StageCost:
        """Seconds of a microbatch by the plan of ``count``."""
        more_s = 0.0
        if plan.step_s is not None and plan.compute_s is not None:
            more_s = max(0.0, plan.step_s - plan.compute_s) / count
        return StageCost(seconds=least_s + more_s, more_s=more_s, plan=plan)

    def _plan(self, stage: int, begin: int, end: int) -> Plan:
        """Whole, or in tiles where it does not fit whole. Raises Infeasible: it fits in none."""
        model = self._model(begin, end)
        if self.orders.runs_one_by_one(stage):
            count = self.orders.num_microbatches
            config = replace(self.config, microbatches=count, outputs="held")
            if count > 1:
                config = replace(config, gradients="accumulated")
            return model.first_that_fits(config, self._one_by_one)

        def grouped(known: StepKnowledge, options: MemoConfig) -> PlannedStep:
            group = rank_group([known], self.orders, stage, self.loss)
            return plan_known(known, options, PlanRequest(group=group))

        try:
            whole = self._whole(self.config)
            return grouped(model.lowered(None, whole), whole).plan
        except Infeasible:
            if self.config.exact or self.config.token_tiles:
                raise
        return model.first_that_fits(self.config, grouped)

    @staticmethod
    def _one_by_one(known: StepKnowledge, options: MemoConfig) -> PlannedStep:
        planned = plan_known(known, options, first_request(known))
        require_fast(planned.plan, options, known)
        return planned

    def _whole(self, config: MemoConfig) -> MemoConfig:
        """``config`` without tiles, but for those that the user asked for."""
        return config if config.token_tiles is not None else replace(config, token_tiles=1)

    def _model(self, begin: int, end: int) -> "_StageModel":
        key = self.units.signature(begin, end)
        if key not in self._models:
            gm, examples = self.units.graph(begin, end)
            traced = TracedModel(
                gm=gm,
                examples=examples,
                hardware=self.hardware,
                gpu=self.gpu,
                figures=self.figures,
            )
            self._models[key] = _StageModel(traced=traced)
        return self._models[key]


@dataclass(kw_only=True)
class _StageModel:
    """The graph of some units, lowered once in each tiling."""

    traced: TracedModel
    _known: dict[tuple[Any, ...], StepKnowledge] = field(default_factory=dict)

    def lowered(self, graph: fx.GraphModule | None, options: MemoConfig) -> StepKnowledge:
        """The step in the tiles that ``options`` name, and for their number of microbatches."""
        tiles = options.token_tiles, options.tile_above_bytes, options.drops_above()
        key = (*tiles, options.microbatches, options.memory_budget is None)
        if key not in self._known:
            self._known[key] = self.traced.lowered(options, graph)
        return self._known[key]

    def first_that_fits(
        self, config: MemoConfig, plan: Callable[[StepKnowledge, MemoConfig], PlannedStep]
    ) -> Plan:
        """What ``plan`` makes in the first tiles that suit it. Raises Infeasible: none do."""
        hardware = self.traced.hardware

        def attempt(graph: fx.GraphModule, options: MemoConfig) -> Plan:
            return plan(self.lowered(graph, options), options).plan

        return first_that_fits(
            self.traced.gm,
            self.traced.facts(),
            config,
            attempt,
            hardware.memory_bytes if hardware else None,
        )
