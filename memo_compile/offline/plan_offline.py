"""Plans a training step without running it: ``memo_compile.plan``.

The model is traced through Dynamo and AOTAutograd with memo's own partitioner, and goes through all
stages of the backend but the last, which binds the plan to memory. No kernel is compiled and
nothing is computed: the tensors may be fakes.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Never

import torch
from torch import fx

from memo_compile.analysis.regions import RegionGraph
from memo_compile.analysis.structure import GRADIENT
from memo_compile.analysis.tile_chains import transient_bytes
from memo_compile.backends.capture import StepCapture, next_graph_name
from memo_compile.config import MemoConfig, resolve
from memo_compile.costs.hardware import HardwareProfile, find_hardware
from memo_compile.costs.roofline import node_cost
from memo_compile.costs.work import NodeCost
from memo_compile.driver.facts import GraphFacts
from memo_compile.driver.knowledge import StepKnowledge
from memo_compile.driver.pipeline import cut_step, fastest, first_request, lower_step
from memo_compile.driver.recompute_library import RegionMaker
from memo_compile.driver.stages import CapturedStep, CutStep, PlannedStep
from memo_compile.driver.step_planner import require_fast
from memo_compile.driver.tile_order import Sizes
from memo_compile.driver.tries import first_that_fits, sizes_of
from memo_compile.errors import MemoError, UnsupportedGraph
from memo_compile.gpus import GpuFacts, target_of
from memo_compile.lowering.lower import lowered_once
from memo_compile.offline import cuda_operators
from memo_compile.offline.longer_model import LongerModel, with_layers
from memo_compile.offline.offline_step import (
    OfflineFacts,
    OfflineStep,
    offline_config,
    planned_offline,
)
from memo_compile.offline.step_record import (
    ClassRecord,
    StepRecord,
    Threshold,
    TilesRecord,
    Tiling,
    tiling_of,
)
from memo_compile.passes.bodies import with_plain_bodies
from memo_compile.passes.cut import Cut
from memo_compile.reporting import state
from memo_compile.step.plans import ReportedPlan
from memo_compile.torch_private import dynamo, fx_graphs, kernels
from memo_compile.torch_private.absent_gpu import lowering_for

NOTHING_TRAINS = (
    "nothing in this step needs a gradient: give trainable parameters, or return a loss that "
    "depends on them"
)

FORWARD_AND_BACKWARD = 3
"""A training step's useful FLOPs over those of its forward: a product has two in the backward."""

OF_FROZEN = 2
"""The same where weights are frozen, which need no gradients."""


def plan(
    model: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    hardware: str | HardwareProfile | None = None,
    loss: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> ReportedPlan:
    """Plans one training step of ``model(*args, **kwargs)``; nothing runs.

    Tensors may be real, or fakes of one ``FakeTensorMode``, which take no memory. ``options`` are
    those of ``torch.compile(..., backend="memo")``. Without ``hardware`` the plan is for the device
    that the tensors lie on, and equal to the one that the backend makes with
    ``costs="roofline"``. ``loss`` is applied to the model's result inside the step. Notes in
    ``report().notes`` name what the plan runs in slices of rows, which nothing has compared with
    the whole.

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
    longer_model: LongerModel | None = None,
) -> OfflineStep:
    """Returns the plan that ``plan`` does, with the problem and the costs behind it.

    With ``longer_model`` the step is that of a model with more layers like ``model``'s. Raises as
    ``plan``, and NotUniform: those layers differ in how they are wired.
    """
    config = offline_config(config, hardware)
    with tracing(
        model, args, kwargs, hardware=hardware, loss=loss, longer_model=longer_model
    ) as traced:
        try:
            device_bytes = hardware.memory_bytes if hardware else None
            facts = traced.facts()
            return first_that_fits(traced.gm, facts, config, traced.attempt, device_bytes)
        except Exception as error:
            raise_bare(error)


@contextlib.contextmanager
def tracing(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    hardware: HardwareProfile | None,
    loss: Callable[[Any], Any] | None = None,
    longer_model: LongerModel | None = None,
    runs: bool = False,
) -> "Iterator[TracedModel]":
    """Traces ``model`` with Dynamo; inside the block its graph can be captured and lowered.

    Kernels are compiled only with ``runs``, so that lowered regions can be timed.
    """
    step = _with_loss(model, loss)
    with torch.enable_grad(), lowered_once(), ExitStack() as stack:
        if not runs:  # plain loops do for a device that is not here
            is_other_device = hardware is not None and hardware.name != "cpu"
            stack.enter_context(kernels.without_kernels(without_vectors=is_other_device))
        try:
            traced = stack.enter_context(dynamo.traced_whole(step, args, kwargs))
            if traced is None:
                raise UnsupportedGraph(NOTHING_TRAINS)
        except Exception as error:
            raise_bare(error)
        gm, examples = with_plain_bodies(traced[0]), traced[1]
        is_on_cpu = GraphFacts(examples).device.type == "cpu"
        gpu = target_of(hardware.name) if hardware is not None and is_on_cpu else None
        if hardware is not None and gpu is not None:
            cuda_operators.for_gpu(gm, gpu)
            stack.enter_context(lowering_for(gpu, hardware.memory_bytes))
        yield TracedModel(
            gm=gm, examples=examples, hardware=hardware, longer_model=longer_model, gpu=gpu
        )


@dataclass(kw_only=True)
class TracedModel:
    """A Dynamo graph that is lowered in several tilings, in each of them once."""

    gm: fx.GraphModule
    examples: Sequence[Any]
    hardware: HardwareProfile | None = None
    longer_model: LongerModel | None = None
    gpu: GpuFacts | None = None
    """The GPU that the graph is lowered for although its tensors lie on the CPU."""
    figures: dict[str, float] | None = None
    """As ``StepKnowledge.figures``."""
    _captured: dict[tuple[int | None, bool], CapturedStep] = field(default_factory=dict)
    """Bound on the bytes of saved tensors, whether attention runs by heads -> the halves that were
    cut from the one joint graph."""
    _capture: StepCapture | None = None
    _planned: dict[Tiling, tuple[StepKnowledge, PlannedStep, OfflineStep]] = field(
        default_factory=dict
    )

    def facts(self) -> GraphFacts:
        """Returns parameters, inputs and device of the graph."""
        untraced = self.longer_model.untraced if self.longer_model else ()
        return GraphFacts(self.examples, untraced, self.gpu)

    def sizes(self, config: MemoConfig) -> Sizes:
        """Returns the sizes that decide in which order numbers of tiles are tried."""
        return sizes_of(self.gm, self.facts(), config)

    def attempt(self, graph: fx.GraphModule, options: MemoConfig) -> OfflineStep:
        """Returns the plan in the tiles that ``options`` name. Raises TooSlow, Infeasible.

        Each tiling is planned once: else attempts differ only in how slow a plan they accept.
        """
        tiling = tiling_of(options)
        if tiling not in self._planned:
            step, plans = fastest(
                self.lowered(options, graph),
                lambda step: planned_offline(
                    step, options, offline_facts(step), first_request(step)
                ),
            )
            self._planned[tiling] = step, *plans
        step, planned, offline_step = self._planned[tiling]
        require_fast(planned.plan, options, step)
        return offline_step

    def lowered(self, options: MemoConfig, graph: fx.GraphModule | None = None) -> StepKnowledge:
        """Returns the step in the tiles that ``options`` name, lowered."""
        captured = self.captured(options, graph)
        # Cutting changes the halves, which other tilings are cut from.
        forward, backward = fx_graphs.copied(captured.forward), fx_graphs.copied(captured.backward)
        captured = replace(captured, forward=forward, backward=backward)
        step = cut_step(captured, options, lambda _: True)  # nothing may be computed to judge tiles
        if self.longer_model is not None:
            step = with_layers(step, self.longer_model.num_layers)
        device, hardware = step.facts.device.type, self.hardware
        for_cuda = device == "cuda" or (hardware is not None and hardware.name != device)
        lowered = lower_step(step, options, for_cuda=for_cuda, hardware=hardware)
        return StepKnowledge(
            lowered=lowered, config=options, hardware=hardware, may_run=False, figures=self.figures
        )

    def recorded(self, options: MemoConfig) -> tuple[StepRecord, RegionMaker]:
        """Returns the step in the tiles of ``options`` as a record, and its maker of regions."""
        try:
            step, captured = self.lowered(options), self.captured(options)
        except Exception as error:
            raise_bare(error)
        movable = step.movable(step.requested(first_request(step)), options.host_store)
        drops_bytes = options.drops_above()
        halves = step.lowered.cut.forward, step.lowered.cut.backward
        transients = tuple(_transients(*halves)) if (options.token_tiles or 1) > 1 else ()
        droppable = () if drops_bytes is None else captured.droppable
        tiles = TilesRecord(
            tile_above=Threshold(bound_bytes=options.attempt.tile_above_bytes, sizes=transients),
            drop_above=Threshold(bound_bytes=drops_bytes or 0, sizes=droppable),
        )
        record = StepRecord(
            tiles=tiles,
            problem=movable.problem,
            whole=step.whole,
            classes=tuple(
                ClassRecord(key=cls.key, slots=cls.slots, ops=cls.ops)
                for cls in movable.classes.values()
            ),
            layers=movable.layers,
            token_granule=movable.token_granule,
            facts=replace(offline_facts(step), lowering_s=0.0),
            whole_compute_s=step.whole_compute_s(),
            labels=step.labels(),
            leased_bytes=step.leased_bytes(),
            device_type=step.device_type,
        )
        return record, step.library(options.host_store).maker

    def captured(self, options: MemoConfig, graph: fx.GraphModule | None = None) -> CapturedStep:
        """Returns forward and backward as graphs, before they are cut into regions.

        ``options`` bound the bytes of a tensor that may be saved. The model is captured once, from
        ``graph`` or ``self.gm``; for another bound its joint graph is divided into halves again.
        """
        by_heads = options.attempt.by_heads
        key = self._equivalent_bound(options.drops_above(), by_heads), by_heads
        if key not in self._captured:
            if self._capture is None:
                traced = self.gm if graph is None else graph
                step, self._capture = _captured(traced, self.facts(), self.examples, options)
            else:
                first = next(iter(self._captured.values()))
                step = self._capture.captured_again(first, options)
            self._captured[key] = step
        return self._captured[key]

    def _equivalent_bound(self, bound_bytes: int | None, by_heads: bool) -> int | None:
        """Returns a captured step's bound that lets the same tensors be saved; else this one."""
        for (captured_bytes, of_heads), step in self._captured.items():
            if bound_bytes is not None and captured_bytes is not None and of_heads == by_heads:
                sizes = step.droppable
                if all((size > bound_bytes) == (size > captured_bytes) for size in sizes):
                    return captured_bytes
        return bound_bytes


def _transients(*halves: Cut) -> Iterator[int]:
    """Yields transient bytes of each region before tiles; ``tile_above_bytes`` bounds them."""
    for half in halves:
        regions: dict[str, RegionGraph] = {
            call.region: half.whole_regions.get(call.region) or half.regions[call.region]
            for call in half.whole_calls
        }
        yield from (transient_bytes(region.gm) for region in regions.values())


def offline_facts(step: StepKnowledge) -> OfflineFacts:
    """Returns costs and counts of a lowered step that answers need beside its plan."""
    cut = step.lowered.cut
    factor = FORWARD_AND_BACKWARD if cut.facts.trains_most() else OF_FROZEN
    return OfflineFacts(
        costs=step.costs(step.config.host_store),
        model_flops=factor * sum(cost.flops for cost in _forward_costs(cut)),
        exact=step.is_exact(),
        tiled=(*cut.forward.tilings, *cut.backward.tilings),
        lowering_s=step.lowered.lowering_s,
    )


def _forward_costs(step: CutStep) -> Iterator[NodeCost]:
    """Yields the cost of each operator in each call of the forward, but for those of gradients."""
    region_costs: dict[str, list[NodeCost]] = {}
    for call in step.forward.calls:
        if call.region not in region_costs:
            nodes = step.regions[call.region].gm.graph.nodes
            costs = [node_cost(node) for node in nodes if GRADIENT not in node.meta]
            region_costs[call.region] = costs
        yield from region_costs[call.region]


def _captured(
    graph: fx.GraphModule, facts: GraphFacts, examples: Sequence[Any], config: MemoConfig
) -> tuple[CapturedStep, StepCapture]:
    """Runs ``graph`` through AOTAutograd. Raises UnsupportedGraph: nothing in it is trained."""
    steps: list[CapturedStep] = []

    def finish(step: CapturedStep | CutStep) -> None:
        assert isinstance(step, CapturedStep), "no step was cut before"
        steps.append(step)

    capture = StepCapture(config, facts, next_graph_name(), finish, is_run=False)
    capture.run(graph, examples)
    if not steps:
        raise UnsupportedGraph(NOTHING_TRAINS)
    return steps[0], capture


def _with_loss(model: Callable[..., Any], loss: Callable[[Any], Any] | None) -> Callable[..., Any]:
    """Returns a function that applies ``loss`` to the result of ``model``."""
    if loss is None:
        return model

    def step(*args: Any, **kwargs: Any) -> Any:
        return loss(model(*args, **kwargs))

    return step


def raise_bare(error: Exception) -> Never:
    """Raises the MemoError that ``error`` wraps, or UnsupportedGraph for a graph break.

    Any other ``error`` is raised as it is.
    """
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, MemoError):
            raise inner from None
        inner = getattr(inner, "inner_exception", None) or inner.__cause__
    graph_break = dynamo.graph_break(error)
    if graph_break is not None:
        raise UnsupportedGraph(f"the model does not trace into one graph: {graph_break}") from error
    raise error
