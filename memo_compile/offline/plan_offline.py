"""Plans a training step without running it: ``memo_compile.plan``.

The model is traced through Dynamo and AOTAutograd with memo's own partitioner, and goes through the
stages of the backend but the last. No kernel is compiled and nothing is computed: the tensors may
be fakes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Never

import torch
from torch import fx

from memo_compile import shim
from memo_compile.analysis.structure import GRADIENT
from memo_compile.backends.capture import StepCapture, next_graph_name
from memo_compile.config import MemoConfig, resolve
from memo_compile.costs.hardware import HardwareProfile, find_hardware
from memo_compile.costs.roofline import node_cost
from memo_compile.driver.facts import GraphFacts
from memo_compile.driver.knowledge import StepKnowledge
from memo_compile.driver.pipeline import cut_step, lower_step
from memo_compile.driver.plan_step import plan_step
from memo_compile.driver.report_rows import recomputes_slices
from memo_compile.driver.stages import CapturedStep, CutStep, PlanRequest
from memo_compile.driver.step_planner import require_fast
from memo_compile.driver.tries import first_that_fits
from memo_compile.errors import MemoError, UnsupportedGraph
from memo_compile.offline.more_layers import MoreLayers, with_layers
from memo_compile.reporting import state
from memo_compile.step.movable import StepCosts
from memo_compile.step.plans import Observed, Plan, ReportedPlan
from memo_compile.step.problem import Problem
from memo_compile.step.simulate import simulate

_PLAIN_LOOPS = {"cpp.simdlen": 1}
"""Inductor's settings for another device than the CPU, whose kernels nobody runs: plain loops have
the same buffers, take a fifth less time to make, and need no C++ compiler to ask."""

NOTHING_TRAINS = (
    "nothing in this step needs a gradient: give trainable parameters, or return a loss that "
    "depends on them"
)

NOT_COMPARED = (
    "{}: not compared with the whole. That is done before a step runs; nothing is computed for a "
    "plan, which believes the rules about operators"
)

FORWARD_AND_BACKWARD = 3
"""A training step's useful FLOPs over those of its forward: two products for each of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineStep:
    """A step that was planned and never ran."""

    problem: Problem
    plan: ReportedPlan
    """The plan, with its ``timeline``."""
    costs: StepCosts
    model_flops: int
    """FLOPs of forward and backward on one device, without those of recomputation."""
    exact: bool
    """True when the backend makes the same plan; False for another device than the tensors'."""
    notes: tuple[str, ...] = ()
    """What is not known of the plan because nothing ran."""


def plan(
    model: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    hardware: str | HardwareProfile | None = None,
    loss: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> ReportedPlan:
    """The plan of one training step of ``model(*args, **kwargs)``; nothing runs.

    Tensors may be real, or fakes of one ``FakeTensorMode``, which take no memory. ``options`` are
    those of ``torch.compile(..., backend="memo")``. Without ``hardware`` the plan is for the device
    that the tensors lie on, and equal to the one that the backend makes with
    ``costs="roofline"``. ``loss`` is applied to the model's result inside the step. What it
    runs in slices of rows, which nothing has compared with the whole, is in ``report().notes``.

    Raises:
        UnsupportedGraph: the model does not trace into one graph, or nothing needs a gradient.
        Infeasible: no plan fits the budget; the message states the floor.
        ConfigError: an option is unknown or cannot be used.
    """
    profile = find_hardware(hardware) if isinstance(hardware, str) else hardware
    config = resolve(options, None)
    step = plan_step_offline(model, args, kwargs, config=config, hardware=profile, loss=loss)
    for note in step.notes:
        state.add_note(note)
    return step.plan


def plan_step_offline(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    config: MemoConfig,
    hardware: HardwareProfile | None = None,
    loss: Callable[[Any], Any] | None = None,
    more: MoreLayers | None = None,
) -> OfflineStep:
    """What ``plan`` returns, with the problem and the costs behind it.

    With ``more`` the step is that of a model with more layers of the kind that ``model`` has.

    Raises:
        MemoError: as ``plan``.
        NotUniform: ``more`` is given, and the layers differ in how they are wired.
    """
    config = replace(config, costs="roofline")
    if hardware is not None and hardware.name != "cpu":
        config = replace(config, inductor_options={**config.inductor_options, **_PLAIN_LOOPS})
    step = _with_loss(model, loss)
    with torch.enable_grad(), shim.without_kernels():
        try:
            with shim.traced_whole(step, args, kwargs) as traced:
                if traced is None:
                    raise UnsupportedGraph(NOTHING_TRAINS)
                return _planned_graph(*traced, config, hardware, more)
        except Exception as error:
            _raise_bare(error)


def _planned_graph(
    gm: fx.GraphModule,
    examples: Sequence[Any],
    config: MemoConfig,
    hardware: HardwareProfile | None,
    more: MoreLayers | None,
) -> OfflineStep:
    """The plan of a Dynamo graph, in tiles of tokens where it does not fit whole."""
    untraced = more.untraced if more else ()
    captured: dict[int | None, CapturedStep] = {}
    planned: dict[tuple[int | None, ...], tuple[OfflineStep, Callable[[MemoConfig], None]]] = {}

    def attempt(graph: fx.GraphModule, options: MemoConfig) -> OfflineStep:
        drops = options.drops_above()
        if drops not in captured:
            captured[drops] = _captured(graph, GraphFacts(examples, untraced), examples, options)
        tiles = options.token_tiles, options.tile_above_bytes, drops
        if tiles not in planned:
            step = captured[drops]
            forward, backward = shim.copied(step.forward), shim.copied(step.backward)
            step = replace(step, forward=forward, backward=backward)
            planned[tiles] = _planned_step(step, options, hardware, more)
        made, require = planned[tiles]
        require(options)
        return made

    device_bytes = hardware.memory_bytes if hardware else None
    return first_that_fits(gm, GraphFacts(examples, untraced), config, attempt, device_bytes)


def _captured(
    graph: fx.GraphModule, facts: GraphFacts, examples: Sequence[Any], config: MemoConfig
) -> CapturedStep:
    found: list[CapturedStep] = []
    capture = StepCapture(config, facts, next_graph_name(), found.append, is_run=False)
    capture.run(graph, examples)
    if not found:
        raise UnsupportedGraph(NOTHING_TRAINS)
    return found[0]


def _planned_step(
    captured: CapturedStep,
    config: MemoConfig,
    hardware: HardwareProfile | None,
    more: MoreLayers | None,
) -> tuple[OfflineStep, Callable[[MemoConfig], None]]:
    """A captured step through all stages but the last, and what refuses a slow one."""
    step = cut_step(captured, config, lambda _: True)  # nothing may be computed to judge tiles
    if more is not None:
        step = with_layers(step, more.num_layers)
    device = step.facts.device.type
    for_cuda = device == "cuda" or (hardware is not None and hardware.name != device)
    lowered = lower_step(step, config, for_cuda=for_cuda)
    known = StepKnowledge(lowered=lowered, config=config, hardware=hardware, may_run=False)
    planned = plan_step(lowered, config, PlanRequest(), known)
    costs = known.costs(config.host_store)
    made = planned.plan
    timeline = made.timeline
    if timeline is None:  # everything is kept: no step is faster
        timeline = simulate(planned.problem, costs)
        step_s = timeline.step_s
        made = replace(made, timeline=timeline, step_lower_bound_s=step_s, compute_s=step_s)
    observed = Observed(
        planning_s=planned.planning_s,
        lowering_s=lowered.lowering_s,
        stall_s=timeline.stall_s,
    )
    forward_flops = sum(
        node_cost(node).flops
        for call in step.forward.calls
        for node in step.regions[call.region].gm.graph.nodes
        if GRADIENT not in node.meta
    )
    whole_compute_s = known.whole_compute_s(config.host_store)
    found = OfflineStep(
        problem=planned.problem,
        plan=ReportedPlan.of(made, observed),
        costs=costs,
        model_flops=FORWARD_AND_BACKWARD * forward_flops,
        exact=known.runs_here(),
        notes=tuple(_not_compared(step, planned.plan)),
    )
    return found, lambda options: require_fast(planned.plan, options, whole_compute_s)


def _not_compared(step: CutStep, plan: Plan) -> Iterator[str]:
    """What runs in slices of rows because rules say so."""
    tiled = [*step.forward.tilings, *step.backward.tilings]
    if tiled:
        yield NOT_COMPARED.format(f"tiles of {', '.join(tiled)}")
    if recomputes_slices(plan.decisions):
        yield NOT_COMPARED.format("recomputations of a part of the tokens")


def _with_loss(model: Callable[..., Any], loss: Callable[[Any], Any] | None) -> Callable[..., Any]:
    if loss is None:
        return model

    def step(*args: Any, **kwargs: Any) -> Any:
        return loss(model(*args, **kwargs))

    return step


def _raise_bare(error: Exception) -> Never:
    """Raise the MemoError inside ``error``; a graph break becomes one; anything else as it is."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, MemoError):
            raise inner from None
        inner = getattr(inner, "inner_exception", None) or inner.__cause__
    broken = shim.graph_break(error)
    if broken is not None:
        raise UnsupportedGraph(f"the model does not trace into one graph: {broken}") from error
    raise error
