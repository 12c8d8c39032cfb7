"""The way of a training step, from what torch captured to what runs. Read this file first.

    CapturedStep   two graphs of AOTAutograd, the layers in them        (``backends.capture``)
      cut_step     -> CutStep: regions, and the calls of each half
      lower_step   -> LoweredStep: each region as code, the step that keeps everything
      plan_step    -> PlannedStep: what moves, where every buffer lies  (``driver.plan_step``)
      bind_step    -> StepPlan: what the runtime runs                   (``driver.bind``)

``assemble`` goes all the way. ``memo_compile.plan`` stops before the last stage.
``plan_step`` answers a PlanRequest. It and ``bind_step`` are repeated for another request when the
device refuses memory, or the user keeps what the plan took to be gone (``driver.assemble``); where
that fits in other tiles only, the graph is compiled anew (``backends.retile``).
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from torch import fx

from memo_compile.analysis.joint_units import backward_positions, forward_positions, region_names
from memo_compile.config import MemoConfig
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.driver.assemble import Assembly
from memo_compile.driver.assumed import explained_for_block, is_part_of_sharded
from memo_compile.driver.bind import bind_step
from memo_compile.driver.declared import stages_around
from memo_compile.driver.donation import with_donations, wrongly_taken
from memo_compile.driver.gradient_watch import GradientWatch
from memo_compile.driver.knowledge import StepKnowledge
from memo_compile.driver.layer_weights import move_to_host
from memo_compile.driver.left_whole import say_dropped
from memo_compile.driver.pinned_early import pinned_early
from memo_compile.driver.plan_step import plan_step
from memo_compile.driver.stages import CapturedStep, CutStep, LoweredStep, PlannedStep, PlanRequest
from memo_compile.driver.step_planner import require_fast
from memo_compile.driver.step_problem import step_problem, whole_step
from memo_compile.errors import Infeasible, InvalidPlan, MemoError, TooSlow
from memo_compile.lowering import collective_profile
from memo_compile.lowering.lower import lower_regions
from memo_compile.lowering.workspace import with_workspaces
from memo_compile.passes.accumulate import AccumulateInPlace
from memo_compile.passes.cut import Cut, CutRequest, cut
from memo_compile.passes.effect_tokens import TokensApart
from memo_compile.passes.separate import SeparateResults
from memo_compile.passes.tile_cut import RegionTiling, tile_cut
from memo_compile.planners.gather_again import instead
from memo_compile.reporting import state
from memo_compile.step.plans import Plan
from memo_compile.step.problem import Phase

T = TypeVar("T")


def assemble(
    captured: CapturedStep | CutStep,
    config: MemoConfig,
    accepts: Callable[[RegionTiling], bool],
    request: PlanRequest,
) -> Assembly:
    """Takes a step through all stages, and has its memory granted; a cut one from there on.

    Raises:
        Infeasible: no plan fits the budget; nothing has run.
        TooSlow: other tiles are to be tried.
        ArenaError, HostStoreError: as ``Assembly.reserve``.
    """
    step = captured if isinstance(captured, CutStep) else cut_step(captured, config, accepts)
    with pinned_early(step, config):
        lowered = lower_step(step, config, for_cuda=step.facts.device.type == "cuda")
        return assemble_lowered(lowered, config, request)


def assemble_lowered(lowered: LoweredStep, config: MemoConfig, request: PlanRequest) -> Assembly:
    """Plans and binds a lowered step, the last two stages of ``assemble``; raises as that."""
    is_part = stages_around(lowered.cut.facts.inputs()).num_stages > 0
    if is_part or request.joint is not None:
        lowered, config = _weights_where_they_are(lowered, config)
    knowledge = StepKnowledge(lowered=lowered, config=config)
    gradients = GradientWatch(knowledge.trained())
    graph_request, graph_config = replace(request, joint=None, may_be_part=False), config
    if request.joint is not None:  # the group obeys the budget; by itself runs what is beyond it
        graph_config = replace(config.at_any_speed(), memory_budget=None)
        knowledge = knowledge.gathering_again() or knowledge
    first_plan = _part_at_first if is_part else _planned_at_first
    try:
        knowledge, (planned, graph_request) = fastest(
            knowledge, lambda variant: first_plan(variant, graph_config, graph_request, gradients)
        )
    except Infeasible as error:
        if graph_request != PlanRequest() or request.joint is not None:  # a later plan's request
            raise error from None
        if not (request.may_be_part and is_part_of_sharded(lowered)):
            raise explained_for_block(error, graph_config, knowledge) from None
        is_part = True
        knowledge, (planned, graph_request) = fastest(
            knowledge,
            lambda variant: _part_at_first(variant, graph_config, graph_request, gradients),
        )
    lowered, cut = knowledge.lowered, knowledge.lowered.cut
    joint = None if request.joint is None else plan_step(lowered, config, request, knowledge)
    if joint is None and not is_part:
        require_fast(planned.plan, config, knowledge)
    if planned.problem.host_weights:
        move_to_host(cut, planned.problem.host_weights, config)
    assembly = Assembly(
        lowered=lowered,
        config=config.at_any_speed(),
        known=knowledge,
        request=graph_request,
        planned=planned,
        step=bind_step(planned, cut, request.applied_to(config)),
        gradients=gradients,
        joint=joint,
    )
    assembly.reserve()
    return assembly


def _weights_where_they_are(
    lowered: LoweredStep, config: MemoConfig
) -> tuple[LoweredStep, MemoConfig]:
    """Returns step and options without moves of weights: it is planned together with others."""
    if config.weights != "device":
        state.add_note(
            "weights stay on the device: a graph that is planned together with others of its step "
            "does not move any"
        )
    problem = replace(lowered.problem, layer_weights={}, host_weights=())
    return replace(lowered, problem=problem), replace(config, weights="device")


def fastest(
    knowledge: StepKnowledge, planned: Callable[[StepKnowledge], tuple[PlannedStep, T]]
) -> tuple[StepKnowledge, tuple[PlannedStep, T]]:
    """Plans a step that keeps gathered weights, and one that gathers them again, by ``planned``.

    Returns the faster of the two. Raises TooSlow, Infeasible, InvalidPlan: both fail; with the
    smaller floor.
    """
    if knowledge.lowered.again is None:
        return knowledge, planned(knowledge)
    plans: list[tuple[StepKnowledge, tuple[PlannedStep, T]]] = []
    failed: list[TooSlow | Infeasible | InvalidPlan] = []
    variant: StepKnowledge | None = knowledge
    while variant is not None:
        try:
            plans.append((variant, planned(variant)))
        except (TooSlow, Infeasible, InvalidPlan) as error:
            if isinstance(error, InvalidPlan):
                is_first = variant is knowledge
                does = "keeps gathered weights" if is_first else "gathers weights again"
                say_dropped(f"{variant.name}: the step that {does} is left out", error)
            failed.append(error)
        variant = variant.gathering_again()
    if not plans:
        raise min(failed, key=_floor_first)
    return min(plans, key=lambda pair: _step_seconds(pair[0], pair[1][0].plan))


def _step_seconds(knowledge: StepKnowledge, plan: Plan) -> float:
    """Returns the seconds of the step by ``plan``; one without any keeps all, and waits nowhere."""
    seconds = plan.compute_s if plan.step_s is None else plan.step_s
    return knowledge.compute_s() if seconds is None else seconds


def _floor_first(error: MemoError) -> float:
    """Returns the floor that ``error`` names, to sort by: a TooSlow has a plan, so first."""
    if isinstance(error, InvalidPlan):
        return math.inf
    floor_bytes = error.floor_bytes if isinstance(error, Infeasible) else 0
    return math.inf if floor_bytes is None else floor_bytes


def first_request(knowledge: StepKnowledge) -> PlanRequest:
    """Returns what is to be expected of a step that has not run."""
    return PlanRequest(leaving=_leaving_at_first(knowledge, GradientWatch(knowledge.trained())))


def _leaving_at_first(knowledge: StepKnowledge, gradients: GradientWatch) -> tuple[int, ...]:
    """Returns the inputs, by position, whose gradients will be gone once autograd has them."""
    cut = knowledge.lowered.cut
    inputs = cut.facts.inputs()
    if len(inputs) != len(cut.backward.results):  # layers were copied: those traced stand for all
        return gradients.all_leaving(inputs)
    return gradients.leaving(inputs, expected=knowledge.config.gradients)


def _part_at_first(
    knowledge: StepKnowledge, config: MemoConfig, request: PlanRequest, gradients: GradientWatch
) -> tuple[PlannedStep, PlanRequest]:
    """As ``_planned_at_first``, for a part of a step that is planned whole later; refuses nothing.

    That is one microbatch of a pipeline's stage, or a block of a sharded model, while the first
    step is watched. It is planned within the budget, else at its floor, else without a bound. Its
    plan names no budget: that of all parts keeps it, or names a floor.
    """

    def within(bound: float | str | None) -> tuple[PlannedStep, PlanRequest]:
        bounded = replace(config.at_any_speed(), memory_budget=bound)
        planned, planned_for = _planned_at_first(knowledge, bounded, request, gradients)
        return replace(planned, plan=replace(planned.plan, budget_bytes=None)), planned_for

    try:
        return within(config.memory_budget)
    except Infeasible as error:
        floor_bytes = error.floor_bytes
    if floor_bytes is not None:
        with contextlib.suppress(Infeasible):
            return within(floor_bytes)
    return within(None)


def _planned_at_first(
    knowledge: StepKnowledge, config: MemoConfig, request: PlanRequest, gradients: GradientWatch
) -> tuple[PlannedStep, PlanRequest]:
    """Returns a step's first plan, and ``request`` with what is to be expected of gradients.

    Hooks are taken to use gradients up where each parameter has one and nothing else fits: that
    they do not shows in the first step, before it breaks the budget.
    """
    leaving = request.leaving or _leaving_at_first(knowledge, gradients)
    request = replace(request, leaving=leaving)
    try:
        return plan_step(knowledge.lowered, config, request, knowledge), request
    except Infeasible:
        cut = knowledge.lowered.cut
        inputs = cut.facts.inputs()
        has_all_inputs = len(inputs) == len(cut.backward.results)  # else layers were copied
        used_up = gradients.may_be_used_up(inputs) if has_all_inputs else ()
        if set(used_up) <= set(leaving):
            raise
    request = replace(request, leaving=used_up)
    planned = plan_step(knowledge.lowered, config, request, knowledge)
    gradients.used_up = frozenset(used_up)
    state.add_note(
        "the plan counts on hooks that use gradients up while the backward runs "
        "(register_post_accumulate_grad_hook), and is made anew where they do not"
    )
    return planned, request


def cut_step(
    step: CapturedStep, config: MemoConfig, accepts: Callable[[RegionTiling], bool]
) -> CutStep:
    """Cuts both halves into regions and their calls, wide chains in tiles if ``accepts`` agrees."""
    tiles, above_bytes = config.token_tiles or 1, config.attempt.tile_above_bytes

    def tiled(whole: Cut) -> Cut:
        return tile_cut(
            whole,
            tiles,
            step.runner,
            accepts,
            say_dropped,
            above_bytes=above_bytes,
            by_heads=config.attempt.by_heads,
        )

    settings = {"joins": tiles > 1, "by_heads": config.attempt.by_heads}
    with state.noting() as notes:
        forward = tiled(_cut_forward(step, settings))
        backward = tiled(_cut_backward(step, settings))
    return CutStep(
        name=step.name,
        forward=forward,
        backward=backward,
        units=step.units,
        facts=step.facts,
        runner=step.runner,
        notes=tuple(notes),
    )


def lower_step(
    step: CutStep, config: MemoConfig, *, for_cuda: bool, hardware: HardwareProfile | None = None
) -> LoweredStep:
    """Lowers each distinct region once, and makes the problem of the step that keeps all.

    ``hardware`` is the device that is planned for, where the tensors lie on another.
    """
    start = time.perf_counter()
    graphs = with_donations(step)
    regions = lower_regions(graphs.values(), config, step.runner)
    if wrong := wrongly_taken(step_problem(step, regions, config)):
        undonated = [replace(graphs[name], donated=()) for name in wrong]
        regions |= lower_regions(undonated, config, step.runner)
    if for_cuda:
        regions = with_workspaces(regions, step.regions)
    problem = step_problem(step, regions, config)
    if overwritten := collective_profile.overwriting(problem):
        regions |= {
            name: collective_profile.apart(regions[name], graphs[name]) for name in overwritten
        }
        problem = step_problem(step, regions, config)
    again = None
    if config.memory_budget is not None:
        device_bytes = hardware.memory_bytes if hardware else step.facts.device_bytes()
        again = instead(problem, config.budget_bytes(device_bytes))
    return LoweredStep(
        cut=step,
        regions=regions,
        problem=problem,
        lowering_s=time.perf_counter() - start,
        whole=whole_step(step),
        again=again,
    )


def _cut_forward(step: CapturedStep, settings: Mapping[str, bool]) -> Cut:
    apart = SeparateResults(own_results=step.own_results, num_results=step.num_results)
    gm = step.runner.run(step.forward, [apart], stage="forward")
    return _cut_half(step, gm, forward_positions(gm.graph), Phase.FORWARD, settings)


def _cut_backward(step: CapturedStep, settings: Mapping[str, bool]) -> Cut:
    """Cuts the backward, in which no two gradients overlap; ``settings`` of a CutRequest."""
    num_units = step.units.num_units
    (gradients,) = step.backward.graph.output_node().args
    assert isinstance(gradients, list | tuple), "a backward returns a tuple"
    apart = SeparateResults(own_results=tuple(range(len(gradients))))
    in_place = AccumulateInPlace(num_units=num_units)
    gm = step.runner.run(step.backward, [apart, in_place], stage="backward")
    positions = backward_positions(gm.graph, num_units)
    return _cut_half(step, gm, positions, Phase.BACKWARD, settings)


def _cut_half(
    step: CapturedStep,
    gm: fx.GraphModule,
    positions: Mapping[fx.Node, int],
    phase: Phase,
    settings: Mapping[str, bool],
) -> Cut:
    """Cuts a half into regions: ``positions`` say of each node in which unit's turn it runs."""
    gm = step.runner.run(gm, [TokensApart()], stage=phase.value)
    request = CutRequest(
        gm=gm,
        positions=positions,
        phase=phase,
        static_inputs=step.facts.static_names,
        device=step.facts.device,
        names=region_names(step.units, phase),
        **settings,
    )
    return step.runner.derive(
        "cut",
        gm,
        lambda: cut(request),
        stage=phase.value,
        graphs=lambda made: {
            "program": made.half_graph,
            **{name: region.gm for name, region in made.regions.items()},
        },
    )
