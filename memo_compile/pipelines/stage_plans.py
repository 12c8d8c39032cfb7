"""Plans stages of a model that never run, to learn each stage's seconds and bytes.

The graph of a stage's units is captured, lowered and planned with all microbatches in the order of
the rank's schedule, as the backend does it when the stage runs, but without what only a running
step shows. Seconds of a microbatch are those of its units, measured one by one, and on top what the
plan recomputes and waits for.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import fx

from memo_compile.config import MemoConfig
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.driver.facts import GraphFacts
from memo_compile.driver.joint_knowledge import JointKnowledge
from memo_compile.driver.knowledge import StepKnowledge
from memo_compile.driver.pipeline import first_request
from memo_compile.driver.stages import PlannedStep, PlanRequest
from memo_compile.driver.step_planner import plan_known, require_fast
from memo_compile.driver.tries import first_that_fits
from memo_compile.errors import Infeasible
from memo_compile.gpus import GpuFacts
from memo_compile.offline.plan_offline import TracedModel
from memo_compile.offline.step_record import tiling_of
from memo_compile.pipelines.loss_costs import LossCosts
from memo_compile.pipelines.model_units import ModelUnits
from memo_compile.pipelines.stage_orders import StageOrders
from memo_compile.step.joint_step import JointStep, num_user_results
from memo_compile.step.plans import Plan
from memo_compile.step.problem import FixedBytes, Interlude


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Seconds of a stage for one microbatch, and its plan."""

    seconds: float = math.inf
    """Forward and backward of a microbatch with recomputation and waits; infinite where no plan
    fits."""
    more_s: float = 0.0
    """The part of ``seconds`` that is recomputation and waits for copies."""
    floor_bytes: int | None = None
    """The smallest budget that a plan fits, where none fits this one."""
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
    """Content of a region -> seconds: equal regions of several stages are measured once."""
    _models: dict[tuple[str, ...], "_StageModel"] = field(default_factory=dict)
    """Signatures of neighbouring units -> their graph."""
    _costs: dict[tuple[Any, ...], StageCost] = field(default_factory=dict)
    """What a plan of a stage, or of a rank, depends on -> its cost."""
    _unit_s: dict[str, float] = field(default_factory=dict)
    """Signature of a unit -> its seconds."""
    _constants: dict[tuple[int, int], int] = field(default_factory=dict)
    """Range of units -> bytes of its parameters, gradients and optimizer state."""
    _received: dict[int, int] = field(default_factory=dict)
    """Unit -> bytes of a microbatch's activations that come in before it."""

    def budget_bytes(self) -> int | None:
        """The memory budget of each rank; None where none is given."""
        if self.hardware is not None:
            return self.config.budget_bytes(self.hardware.memory_bytes)
        return self.config.budget_bytes(self._model(0, 1).traced.facts().device_bytes())

    def unit_s(self, number: int) -> float:
        """Seconds of a unit's forward and backward without recomputation; the last has the loss."""
        unit = self.units.units[number]
        if unit.signature not in self._unit_s:
            config = self._whole(replace(self.config, memory_budget=None))
            lowered = self._model(number, number + 1).lowered(config)
            self._unit_s[unit.signature] = lowered.compute_s()
        is_last = number == len(self.units.units) - 1
        return self._unit_s[unit.signature] + (self.loss.seconds if is_last and self.loss else 0.0)

    def least_s(self, begin: int, end: int) -> float:
        """Seconds of units ``[begin, end)`` without recomputation."""
        return math.fsum(self.unit_s(number) for number in range(begin, end))

    def least_bytes(self, stage: int, begin: int, end: int) -> int:
        """Bytes that every plan of units ``[begin, end)`` needs.

        These are parameters, their gradients, optimizer state, and what torch's schedule keeps for
        all microbatches: what comes in from other ranks, and the last stage's results.
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
        """The cost of a rank that has several stages, with the units ``[begin, end)`` of each."""
        signatures = tuple(self.units.signature(begin, end) for begin, end in ranges)
        key = (signatures, self.orders.rank_order(rank), rank == self.orders.num_ranks - 1)

        def plan_rank() -> Plan:
            config = self._whole(self.config)
            chunks = [self._model(begin, end).lowered(config) for begin, end in ranges]
            joint_step = rank_step(chunks, self.orders, rank, self.loss)
            return plan_known(joint_step, config, PlanRequest()).plan

        return self._cost_once(key, plan_rank, ranges, self.orders.num_microbatches)

    def cost(self, stage: int, begin: int, end: int) -> StageCost:
        """The cost of stage number ``stage`` with units ``[begin, end)``."""
        order = self.orders.stage_order(stage)
        key = (self.units.signature(begin, end), order, self.orders.is_last(stage))
        count = 1 if self.orders.runs_one_by_one(stage) else self.orders.num_microbatches
        plan_stage = functools.partial(self._plan, stage, begin, end)
        return self._cost_once(key, plan_stage, ((begin, end),), count)

    def _cost_once(
        self,
        key: tuple[Any, ...],
        make_plan: Callable[[], Plan],
        ranges: tuple[tuple[int, int], ...],
        count: int,
    ) -> StageCost:
        """Returns the cost of one of ``count`` microbatches; plans it if ``key`` is a new one.

        ``ranges`` are the units ``[begin, end)`` of the stages that run in the plan.
        """
        if key in self._costs:
            return self._costs[key]
        try:
            plan, more_s = make_plan(), 0.0
        except Infeasible as error:
            return self._costs.setdefault(key, StageCost(floor_bytes=error.floor_bytes))
        if plan.step_s is not None and plan.compute_s is not None:
            more_s = max(0.0, plan.step_s - plan.compute_s) / count
        seconds = math.fsum(self.least_s(begin, end) for begin, end in ranges) + more_s
        self._costs[key] = StageCost(seconds=seconds, more_s=more_s, plan=plan)
        return self._costs[key]

    def _plan(self, stage: int, begin: int, end: int) -> Plan:
        """Plans a stage whole, or in tiles where it does not fit whole. Raises Infeasible."""
        model = self._model(begin, end)

        def plan_alone(step: StepKnowledge, options: MemoConfig) -> PlannedStep:
            """Plans one microbatch as a step; one that is slow in these tiles tries others."""
            planned = plan_known(step, options, first_request(step))
            require_fast(planned.plan, options, step)
            return planned

        def plan_together(step: StepKnowledge, options: MemoConfig) -> PlannedStep:
            """Plans all microbatches as one step, in the order of the schedule."""
            joint_step = rank_step([step], self.orders, stage, self.loss)
            return plan_known(joint_step, options, PlanRequest())

        if self.orders.runs_one_by_one(stage):
            count = self.orders.num_microbatches  # whose results torch's schedule keeps: held
            config = replace(self.config, microbatches=count, outputs="held")
            if count > 1:
                config = replace(config, gradients="accumulated")
            return model.first_that_fits(config, plan_alone)
        try:  # as a running stage, which is compiled in tiles where its joint step does not fit
            whole = self._whole(self.config)
            return plan_together(model.lowered(whole), whole).plan
        except Infeasible:
            if self.config.exact or self.config.token_tiles:  # no other tiles are allowed
                raise
        return model.first_that_fits(self.config, plan_together)

    def _whole(self, config: MemoConfig) -> MemoConfig:
        """``config`` without tiles, unless the user named a number of them."""
        return config if config.token_tiles is not None else replace(config, token_tiles=1)

    def _model(self, begin: int, end: int) -> "_StageModel":
        """The graph of units ``[begin, end)``, or an equal one."""
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
    """The graph of neighbouring units, lowered once in each tiling."""

    traced: TracedModel
    _lowered: dict[tuple[Any, ...], StepKnowledge] = field(default_factory=dict)

    def lowered(self, options: MemoConfig) -> StepKnowledge:
        """The step in the tiles that ``options`` name, and for their number of microbatches."""
        key = (*tiling_of(options), options.microbatches, options.memory_budget is None)
        if key not in self._lowered:
            self._lowered[key] = self.traced.lowered(options)
        return self._lowered[key]

    def first_that_fits(
        self, config: MemoConfig, plan: Callable[[StepKnowledge, MemoConfig], PlannedStep]
    ) -> Plan:
        """The plan in the first number of tiles that fits. Raises Infeasible: none fits."""
        traced, hardware = self.traced, self.traced.hardware

        def attempt(_: fx.GraphModule, options: MemoConfig) -> Plan:
            return plan(self.lowered(options), options).plan

        device_bytes = hardware.memory_bytes if hardware else None
        return first_that_fits(traced.gm, traced.facts(), config, attempt, device_bytes)


def rank_step(
    chunks: Sequence[StepKnowledge], orders: StageOrders, rank: int, loss: LossCosts | None
) -> JointKnowledge:
    """The microbatches of all stages of ``rank``, and what torch's schedule holds beside them.

    ``chunks`` are the stages' graphs, in the order of the model. Member ``chunk *
    num_microbatches + microbatch`` is one microbatch.
    """
    halves = _RankHalves(chunks, orders, rank)
    graphs = {id(chunk): chunk for chunk in chunks}  # equal stages are one graph
    numbers = {key: number for number, key in enumerate(graphs)}
    joint = JointStep(
        graphs=tuple(numbers[id(chunk)] for chunk in chunks for _ in range(halves.count)),
        fixed=_sum([halves.fixed(chunk) for chunk in range(len(chunks))]),
        gone=tuple(halves.gone()),
        passed=tuple(halves.passed()),
        interludes=tuple(halves.losses(loss)) if loss is not None else (),
        order=halves.order,
    )
    return JointKnowledge(graphs=list(graphs.values()), joint=joint)


def _sum(parts: Sequence[FixedBytes]) -> FixedBytes:
    """The sum of all fields but ``libraries``: what libraries keep exists once."""
    names = [field.name for field in fields(FixedBytes)]
    sums = {name: sum(getattr(part, name) for part in parts) for name in names}
    return FixedBytes(**{**sums, "libraries": max(part.libraries for part in parts)})


class _RankHalves:
    """The forward and backward halves of all microbatches of a rank, in the order they run."""

    def __init__(self, chunks: Sequence[StepKnowledge], orders: StageOrders, rank: int) -> None:
        self.chunks, self.count = chunks, orders.num_microbatches
        """The stages' graphs, in the order of the model, and how many microbatches each runs."""
        self.order = orders.rank_order(rank)
        self.half_of = {half: at for at, half in enumerate(self.order)}
        """(member, is_backward) -> index of that half in ``order``."""
        self.has_last = orders.is_last(rank + (len(chunks) - 1) * orders.num_ranks)
        """True for the rank of the model's last stage."""

    def _chunk(self, member: int) -> int:
        """The index in ``chunks`` of the stage that ``member`` is a microbatch of."""
        return member // self.count

    def _is_last(self, chunk: int) -> bool:
        """True for the stage whose results the loss reads."""
        return self.has_last and chunk == len(self.chunks) - 1

    def fixed(self, chunk: int) -> FixedBytes:
        """Bytes that the stage holds all the time: of each microbatch what comes in, too."""
        problem = self.chunks[chunk].lowered.problem
        received = 0 if self._is_last(chunk) else sum(problem.tangents.values())
        return replace(
            problem.fixed,
            inputs=self.count * (problem.fixed.inputs + received),
            gradients=problem.fixed.new_gradients,  # one set, which all microbatches add to
        )

    def passed(self) -> Iterator[tuple[int, int]]:
        """(half, number of a gradient) that comes from another rank, in a buffer that stays."""
        for at, (member, is_backward) in enumerate(self.order):
            chunk = self._chunk(member)
            if is_backward and not self._is_last(chunk):
                for number in range(len(self.chunks[chunk].lowered.problem.tangents)):
                    yield at, number

    def gone(self) -> Iterator[tuple[int, int, int]]:
        """(half, position of a result, half behind which it is freed), as of ``JointStep.gone``.

        A forward's results are kept to the end of its backward, those of the last stage to the end
        of the step. The first gradient of a parameter stays, later ones are added to it. A gradient
        that is sent to another rank is there while the next half runs.
        """
        last = len(self.order) - 1
        have_gradients: set[int] = set()  # chunks of which a backward has run
        for at, (member, is_backward) in enumerate(self.order):
            chunk = self._chunk(member)
            lowered = self.chunks[chunk].lowered
            forward, backward = lowered.problem.halves
            if not is_backward:
                until = self.half_of[member, True]
                stays = self._is_last(chunk) or until == last
                count = 0 if stays else num_user_results(forward, backward)
                yield from ((at, position, until) for position in range(count))
                continue
            inputs = lowered.cut.facts.inputs()
            for position, (value, result) in enumerate(zip(inputs, backward.results, strict=False)):
                is_parameter = isinstance(value, torch.nn.Parameter)
                until = at if is_parameter else at + 1
                stays = is_parameter and chunk not in have_gradients
                if result is not None and until < last and not stays:
                    yield at, position, until
            have_gradients.add(chunk)

    def losses(self, loss: LossCosts) -> Iterator[Interlude]:
        """Bytes of the losses between the halves.

        A loss runs forward behind the last stage's forward, and backward before its backward.
        """
        for at, (member, is_backward) in enumerate(self.order):
            most_bytes = left_bytes = 0
            previous, previous_is_backward = self.order[at - 1] if at else (0, True)
            if not previous_is_backward and self._is_last(self._chunk(previous)):
                most_bytes = max(loss.forward_bytes, loss.saved_bytes)
                left_bytes = loss.saved_bytes
            if is_backward and self._is_last(self._chunk(member)):
                most_bytes = max(most_bytes, left_bytes + loss.backward_bytes)
                left_bytes -= loss.saved_bytes
            if at and (most_bytes or left_bytes):
                most_bytes = max(most_bytes, left_bytes, 0)
                yield Interlude(half=at, most_bytes=most_bytes, left_bytes=left_bytes)
