"""Plans a training step without running it: ``memo_compile.plan``.

The model is traced through Dynamo and AOTAutograd with memo's own partitioner, and goes through the
stages of the backend but the last. No kernel is compiled and nothing is computed: the tensors may
be fakes.
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
from memo_compile.driver.tries import first_that_fits, products_bytes, sizes_of
from memo_compile.errors import MemoError, UnsupportedGraph
from memo_compile.gpus import GpuFacts, target_of
from memo_compile.lowering.lower import lowered_once
from memo_compile.offline import cuda_operators
from memo_compile.offline.more_layers import MoreLayers, with_layers
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
"""A training step's useful FLOPs over those of its forward: two products for each of one."""


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
    config = offline_config(config, hardware)
    with tracing(model, args, kwargs, hardware=hardware, loss=loss, more=more) as traced:
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
    more: MoreLayers | None = None,
    runs: bool = False,
) -> "Iterator[TracedModel]":
    """The Dynamo graph of ``model``; inside it can be captured and lowered, without kernels.

    With ``runs`` there are kernels, and what is lowered can be timed.
    """
    step = _with_loss(model, loss)
    kernels = contextlib.nullcontext() if runs else _without_kernels(hardware)
    with torch.enable_grad(), kernels, lowered_once(), ExitStack() as stack:
        try:
            traced = stack.enter_context(dynamo.traced_whole(step, args, kwargs))
            if traced is None:
                raise UnsupportedGraph(NOTHING_TRAINS)
        except Exception as error:
            raise_bare(error)
        gm, examples = with_plain_bodies(traced[0]), traced[1]
        here = GraphFacts(examples).device.type
        gpu = target_of(hardware.name) if hardware is not None and here == "cpu" else None
        if gpu is not None:
            assert hardware is not None, "a target is given"
            cuda_operators.for_gpu(gm, gpu)
            stack.enter_context(lowering_for(gpu, hardware.memory_bytes))
        yield TracedModel(gm=gm, examples=examples, hardware=hardware, more=more, gpu=gpu)


@dataclass(kw_only=True)
class TracedModel:
    """A Dynamo graph, which is lowered in one tiling after another, each once."""

    gm: fx.GraphModule
    examples: Sequence[Any]
    hardware: HardwareProfile | None = None
    more: MoreLayers | None = None
    gpu: GpuFacts | None = None
    """The GPU that it is lowered for, though its tensors lie on the CPU."""
    figures: dict[str, float] | None = None
    """As ``StepKnowledge.figures``."""
    _captured: dict[int | None, CapturedStep] = field(default_factory=dict)
    """By what may be saved; all are cut from one joint graph."""
    _capture: StepCapture | None = None
    _planned: dict[Tiling, tuple[StepKnowledge, PlannedStep, OfflineStep]] = field(
        default_factory=dict
    )

    def facts(self) -> GraphFacts:
        """What is known of the graph's inputs."""
        return GraphFacts(self.examples, self.more.untraced if self.more else (), self.gpu)

    def sizes(self, config: MemoConfig) -> Sizes:
        """What the order of tiles is made of."""
        return sizes_of(products_bytes(self.gm), self.facts(), config)

    def attempt(self, graph: fx.GraphModule, options: MemoConfig) -> OfflineStep:
        """The plan in the tiles that ``options`` name. Raises TooSlow, Infeasible."""
        tiles = tiling_of(options)
        if tiles not in self._planned:
            known, made_first = fastest(
                self.lowered(options, graph),
                lambda own: planned_offline(own, options, offline_facts(own), first_request(own)),
            )
            self._planned[tiles] = known, *made_first
        known, planned, made = self._planned[tiles]
        require_fast(planned.plan, options, known)
        return made

    def lowered(self, options: MemoConfig, graph: fx.GraphModule | None = None) -> StepKnowledge:
        """The step in the tiles that ``options`` name, lowered."""
        captured = self.captured(options, graph)
        forward, backward = fx_graphs.copied(captured.forward), fx_graphs.copied(captured.backward)
        captured = replace(captured, forward=forward, backward=backward)
        step = cut_step(captured, options, lambda _: True)  # nothing may be computed to judge tiles
        if self.more is not None:
            step = with_layers(step, self.more.num_layers)
        device = step.facts.device.type
        hardware = self.hardware
        for_cuda = device == "cuda" or (hardware is not None and hardware.name != device)
        lowered = lower_step(step, options, for_cuda=for_cuda, hardware=hardware)
        return StepKnowledge(
            lowered=lowered,
            config=options,
            hardware=hardware,
            may_run=False,
            figures=self.figures,
        )

    def recorded(self, options: MemoConfig) -> tuple[StepRecord, RegionMaker]:
        """The step in the tiles that ``options`` name as a record, and what makes its regions."""
        try:
            known, captured = self.lowered(options), self.captured(options)
        except Exception as error:
            raise_bare(error)
        movable = known.movable(known.requested(first_request(known)), options.host_store)
        drops = options.drops_above()
        halves = known.lowered.cut.forward, known.lowered.cut.backward
        transients = tuple(_transients(*halves)) if (options.token_tiles or 1) > 1 else ()
        tiles = TilesRecord(
            tile_above=Threshold(bound_bytes=options.tile_above_bytes, sizes=transients),
            drop_above=Threshold(
                bound_bytes=drops or 0, sizes=() if drops is None else captured.droppable
            ),
        )
        record = StepRecord(
            tiles=tiles,
            problem=movable.problem,
            whole=known.whole,
            classes=tuple(
                ClassRecord(key=cls.key, slots=cls.slots, ops=cls.ops)
                for cls in movable.classes.values()
            ),
            layers=movable.layers,
            token_granule=movable.token_granule,
            facts=replace(offline_facts(known), lowering_s=0.0),
            whole_compute_s=known.whole_compute_s(),
            labels=known.labels(),
            leased_bytes=known.leased_bytes(),
            device_type=known.device_type,
        )
        return record, known.library(options.host_store).maker

    def captured(self, options: MemoConfig, graph: fx.GraphModule | None = None) -> CapturedStep:
        """The step before it is cut."""
        drops = self._drops_alike(options.drops_above())
        if drops not in self._captured:
            if self._capture is None:
                own = self.gm if graph is None else graph
                step, self._capture = _captured(own, self.facts(), self.examples, options)
            else:
                first = next(iter(self._captured.values()))
                step = self._capture.captured_again(first, options)
            self._captured[drops] = step
        return self._captured[drops]

    def _drops_alike(self, drops: int | None) -> int | None:
        """A bound under which the step was captured, and the same may be saved; else ``drops``."""
        for known, step in self._captured.items():
            if drops is not None and known is not None:
                pairs = ((size > drops, size > known) for size in step.droppable)
                if all(now == before for now, before in pairs):
                    return known
        return drops


def _transients(*halves: Cut) -> Iterator[int]:
    """What was compared with ``tile_above_bytes``: of every region as it was before any tiles."""
    for half in halves:
        called: dict[str, RegionGraph] = {
            call.region: half.whole_regions.get(call.region) or half.regions[call.region]
            for call in half.whole_calls
        }
        yield from (transient_bytes(region.gm) for region in called.values())


def _without_kernels(hardware: HardwareProfile | None) -> contextlib.AbstractContextManager[None]:
    plain = hardware is not None and hardware.name != "cpu"
    return kernels.without_kernels(without_vectors=plain)


def offline_facts(known: StepKnowledge) -> OfflineFacts:
    """What an answer says beside the plan."""
    step, host_store = known.lowered.cut, known.config.host_store
    forward_flops = sum(cost.flops for cost in _forward_costs(known))
    return OfflineFacts(
        costs=known.costs(host_store),
        model_flops=FORWARD_AND_BACKWARD * forward_flops,
        exact=known.is_exact(),
        tiled=(*step.forward.tilings, *step.backward.tilings),
        lowering_s=known.lowered.lowering_s,
    )


def _forward_costs(known: StepKnowledge) -> Iterator[NodeCost]:
    """What the operators of the forward cost, in all calls, but for gradients that it makes."""
    step = known.lowered.cut
    of_region: dict[str, list[NodeCost]] = {}
    for call in step.forward.calls:
        if call.region not in of_region:
            nodes = step.regions[call.region].gm.graph.nodes
            costs = [node_cost(node) for node in nodes if GRADIENT not in node.meta]
            of_region[call.region] = costs
        yield from of_region[call.region]


def _captured(
    graph: fx.GraphModule, facts: GraphFacts, examples: Sequence[Any], config: MemoConfig
) -> tuple[CapturedStep, StepCapture]:
    found: list[CapturedStep] = []

    def finish(step: CapturedStep | CutStep) -> None:
        assert isinstance(step, CapturedStep), "no step was cut before"
        found.append(step)

    capture = StepCapture(config, facts, next_graph_name(), finish, is_run=False)
    capture.run(graph, examples)
    if not found:
        raise UnsupportedGraph(NOTHING_TRAINS)
    return found[0], capture


def _with_loss(model: Callable[..., Any], loss: Callable[[Any], Any] | None) -> Callable[..., Any]:
    if loss is None:
        return model

    def step(*args: Any, **kwargs: Any) -> Any:
        return loss(model(*args, **kwargs))

    return step


def raise_bare(error: Exception) -> Never:
    """Raise the MemoError inside ``error``; a graph break becomes one; anything else as it is."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, MemoError):
            raise inner from None
        inner = getattr(inner, "inner_exception", None) or inner.__cause__
    broken = dynamo.graph_break(error)
    if broken is not None:
        raise UnsupportedGraph(f"the model does not trace into one graph: {broken}") from error
    raise error
