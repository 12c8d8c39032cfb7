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

from memo_compile import shim
from memo_compile.analysis.structure import GRADIENT
from memo_compile.backends.capture import StepCapture, next_graph_name
from memo_compile.config import MemoConfig, resolve
from memo_compile.costs.hardware import HardwareProfile, find_hardware
from memo_compile.costs.roofline import node_cost
from memo_compile.driver.facts import GraphFacts
from memo_compile.driver.knowledge import StepKnowledge
from memo_compile.driver.pipeline import cut_step, first_request, lower_step
from memo_compile.driver.stages import CapturedStep, CutStep, PlannedStep
from memo_compile.driver.step_planner import require_fast
from memo_compile.driver.tile_order import Sizes
from memo_compile.driver.tries import first_that_fits, sizes_of
from memo_compile.errors import MemoError, UnsupportedGraph
from memo_compile.offline.more_layers import MoreLayers, with_layers
from memo_compile.offline.offline_step import (
    OfflineFacts,
    OfflineStep,
    offline_config,
    planned_offline,
)
from memo_compile.reporting import state
from memo_compile.step.plans import ReportedPlan

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
) -> "Iterator[TracedModel]":
    """The Dynamo graph of ``model``; inside it can be captured and lowered, without kernels."""
    step = _with_loss(model, loss)
    plain = hardware is not None and hardware.name != "cpu"
    with torch.enable_grad(), shim.without_kernels(without_vectors=plain), ExitStack() as stack:
        try:
            traced = stack.enter_context(shim.traced_whole(step, args, kwargs))
            if traced is None:
                raise UnsupportedGraph(NOTHING_TRAINS)
        except Exception as error:
            raise_bare(error)
        yield TracedModel(*traced, hardware=hardware, more=more)


Tiling = tuple[int | None, ...]
"""How a graph is tried: tiles, above which bytes, and what may be saved."""


@dataclass
class TracedModel:
    """A Dynamo graph that is lowered in one tiling after another, each once."""

    gm: fx.GraphModule
    examples: Sequence[Any]
    hardware: HardwareProfile | None = None
    more: MoreLayers | None = None
    _captured: dict[int | None, CapturedStep] = field(default_factory=dict)
    """By what may be saved; the first was traced, the others are cut from its joint graph."""
    _capture: StepCapture | None = None
    _planned: dict[Tiling, tuple[StepKnowledge, PlannedStep, OfflineStep]] = field(
        default_factory=dict
    )

    def facts(self) -> GraphFacts:
        """What is known of the graph's inputs."""
        return GraphFacts(self.examples, self.more.untraced if self.more else ())

    def sizes(self, config: MemoConfig) -> Sizes:
        """What the order of tiles is made of."""
        return sizes_of(self.gm, self.facts(), config)

    def attempt(self, graph: fx.GraphModule, options: MemoConfig) -> OfflineStep:
        """The plan in the tiles that ``options`` name. Raises TooSlow, Infeasible."""
        tiles = options.token_tiles, options.tile_above_bytes, options.drops_above()
        if tiles not in self._planned:
            known = self.lowered(options, graph)
            facts, request = offline_facts(known), first_request(known)
            self._planned[tiles] = known, *planned_offline(known, options, facts, request)
        known, planned, made = self._planned[tiles]
        require_fast(planned.plan, options, known)
        return made

    def lowered(self, options: MemoConfig, graph: fx.GraphModule | None = None) -> StepKnowledge:
        """The step in the tiles that ``options`` name, lowered."""
        captured = self.captured(options, graph)
        forward, backward = shim.copied(captured.forward), shim.copied(captured.backward)
        captured = replace(captured, forward=forward, backward=backward)
        step = cut_step(captured, options, lambda _: True)  # nothing may be computed to judge tiles
        if self.more is not None:
            step = with_layers(step, self.more.num_layers)
        device = step.facts.device.type
        hardware = self.hardware
        for_cuda = device == "cuda" or (hardware is not None and hardware.name != device)
        lowered = lower_step(step, options, for_cuda=for_cuda)
        return StepKnowledge(lowered=lowered, config=options, hardware=hardware, may_run=False)

    def captured(self, options: MemoConfig, graph: fx.GraphModule | None = None) -> CapturedStep:
        """The step before it is cut."""
        drops = options.drops_above()
        if drops not in self._captured:
            if self._capture is None:
                graph = shim.copied(self.gm) if graph is None else graph
                step, self._capture = _captured(graph, self.facts(), self.examples, options)
            else:
                first = next(iter(self._captured.values()))
                step = self._capture.captured_again(first, options)
            self._captured[drops] = step
        return self._captured[drops]


def offline_facts(known: StepKnowledge) -> OfflineFacts:
    """What an answer says beside the plan."""
    step, host_store = known.lowered.cut, known.config.host_store
    forward_flops = sum(
        node_cost(node).flops
        for call in step.forward.calls
        for node in step.regions[call.region].gm.graph.nodes
        if GRADIENT not in node.meta
    )
    return OfflineFacts(
        costs=known.costs(host_store),
        model_flops=FORWARD_AND_BACKWARD * forward_flops,
        exact=known.runs_here(),
        tiled=[*step.forward.tilings, *step.backward.tilings],
        lowering_s=known.lowered.lowering_s,
    )


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
    broken = shim.graph_break(error)
    if broken is not None:
        raise UnsupportedGraph(f"the model does not trace into one graph: {broken}") from error
    raise error
