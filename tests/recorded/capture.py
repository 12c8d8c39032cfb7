"""Steps as they reach the planner, as data: of traced models, of models that run, and made ones."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import fx

from benchmarks.hf_shapes import causal
from memo_compile.analysis.views import bytes_of, is_item, is_view, results_of, viewed
from memo_compile.config import resolve
from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import find_model
from memo_compile.driver.joint_knowledge import JointKnowledge
from memo_compile.driver.knowledge import StepKnowledge
from memo_compile.driver.step_planner import KnownStep, StepPlanner
from memo_compile.errors import Infeasible
from memo_compile.offline.plan_offline import plan_step_offline
from memo_compile.offline.shapes.transformer import Degrees, first_stage
from memo_compile.passes.recompute import ClassGraph
from memo_compile.step.joint_step import in_graph
from memo_compile.step.movable import LayerClass, LayerOp, MovableStep
from memo_compile.step.problem import Problem
from memo_compile.step.tilings import WholeStep
from memo_compile.torch_private.fx_graphs import fake_mode
from memo_compile.torch_private.model_of_fakes import model_of_fakes
from tests.recorded.problems import OpMemory, RecordedClass, RecordedStep


def op_memory(layer: ClassGraph, cls: LayerClass) -> tuple[OpMemory, ...]:
    """What each operator of ``cls`` allocates, from the graph that it was read off."""
    graph = layer.region.gm.graph
    placeholders = graph.find_nodes(op="placeholder")
    position = {node: at for at, node in enumerate(placeholders)}
    slots = layer.at_slots(placeholders, results_of(graph))
    index = {op.name: at for at, op in enumerate(cls.ops)}
    nodes = {node.name: node for node in graph.nodes}

    def shown(node: fx.Node) -> fx.Node:
        while node.name not in index and is_view(node):
            node = viewed(node)
        return node

    found = []
    for op in cls.ops:
        node = nodes[op.name]
        sources = [shown(source) for source in node.all_input_nodes]
        inputs = {position[own] for own in sources if own in position and own not in slots}
        views = index.get(shown(viewed(node)).name) if is_view(node) else None
        has_items = any(is_item(user) for user in node.users)
        made = not has_items and (node.op != "placeholder") and not is_view(node)
        found.append(
            OpMemory(bytes=bytes_of(node) if made else 0, views=views, inputs=tuple(sorted(inputs)))
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Graphs:
    """The graphs behind layer classes."""

    host_store: str

    def of(self, known: KnownStep, class_key: str) -> ClassGraph:
        """The forward of the layers of ``class_key``."""
        if isinstance(known, JointKnowledge):
            graph, name = in_graph(class_key)
            return self.of(known.graphs[graph], name)
        assert isinstance(known, StepKnowledge), "a step that was traced"
        return known.class_graphs(self.host_store)[class_key]


def recorded_step(planner: StepPlanner, name: str) -> RecordedStep:
    """What ``planner`` plans, as data."""
    step, known = planner.step, planner.known
    graphs = _Graphs(planner.config.host_store)
    classes = (
        RecordedClass(
            key=key, slots=cls.slots, ops=cls.ops, memory=op_memory(graphs.of(known, key), cls)
        )
        for key, cls in step.classes.items()
    )
    return of_movable(step, name, tuple(classes), whole=known.whole)


def of_movable(
    step: MovableStep, name: str, classes: tuple[RecordedClass, ...], **more: Any
) -> RecordedStep:
    return RecordedStep(
        name=name,
        problem=step.problem,
        classes=classes,
        layers=step.layers,
        costs=step.costs,
        token_granule=step.token_granule,
        shares=step.shares,
        waits_late=step.waits_late,
        **more,
    )


@contextlib.contextmanager
def captured(name: str) -> Iterator[list[RecordedStep]]:
    """Every step that moves something and is planned within is recorded."""
    found: list[RecordedStep] = []
    decide = StepPlanner.decide

    def recording(planner: StepPlanner) -> Any:
        if planner.step.layers:
            found.append(recorded_step(planner, name))
        return decide(planner)

    with mock.patch.object(StepPlanner, "decide", recording):
        yield found


def with_plain_reads(problem: Problem) -> Problem:
    """``problem``, which says nothing of layouts, with reads of which nothing is known."""
    regions = {
        name: replace(region, input_layouts=(None,) * len(region.input_ends))
        for name, region in problem.regions.items()
    }
    calls = (replace(call, reads=(None,) * len(call.inputs)) for call in problem.calls)
    return replace(problem, regions=regions, calls=tuple(calls))


def synthetic(step: MovableStep, name: str) -> RecordedStep:
    """A step that no graph is behind: what its regions allocate for a tensor its operators do."""
    step = replace(step, problem=with_plain_reads(step.problem))
    used = {layer.class_key for layer in step.layers}
    allocated = {
        buffer.name: buffer.size_bytes
        for region in step.problem.regions.values()
        for buffer in region.buffers
    }

    def memory(cls: LayerClass, op: LayerOp) -> OpMemory:
        slot_bytes = 0 if op.slot is None else cls.slots[op.slot].size_bytes
        return OpMemory(bytes=slot_bytes or allocated.get(op.name, 0))

    classes = (
        RecordedClass(
            key=key,
            slots=cls.slots,
            ops=cls.ops,
            memory=tuple(memory(cls, op) for op in cls.ops),
        )
        for key, cls in step.classes.items()
        if key in used
    )
    whole = WholeStep(calls=step.problem.calls, halves=step.problem.halves)
    return of_movable(step, name, tuple(classes), whole=whole)


@dataclass(frozen=True, slots=True)
class Traced:
    """A named transformer with fewer layers."""

    model: str
    seq: int
    hardware: str
    tiles: int = 1
    tp: int = 1
    cp: int = 1
    layers: int = 4

    @property
    def name(self) -> str:
        on = f"tp {self.tp} cp {self.cp}, {self.hardware}, {self.tiles} tiles"
        return f"{self.model} of {self.layers}, {self.seq} tokens, {on}"

    def steps(self) -> list[RecordedStep]:
        shape = replace(find_model(self.model), num_layers=self.layers)
        with captured(self.name) as found, fake_mode():
            model, inputs = first_stage(
                shape,
                Degrees(tp=self.tp, cp=self.cp),
                seq=self.seq,
                batch=1,
                dtype=torch.bfloat16,
            )
            planned_offline(model, inputs, {}, self.hardware, self.tiles)
        return found[-1:]


@dataclass(frozen=True, slots=True)
class HuggingFace:
    """A model of transformers, on fakes."""

    kind: str
    seq: int
    hardware: str
    tiles: int
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.seq} tokens, {self.hardware}, {self.tiles} tiles"

    def steps(self) -> list[RecordedStep]:
        from transformers import AutoConfig

        with model_of_fakes():
            config = AutoConfig.for_model(self.kind, **self.config)
            model, inputs = causal(config, self.seq, 1, torch.bfloat16)
        with captured(self.name) as found:
            planned_offline(model, (), inputs, self.hardware, self.tiles)
        return found[-1:]


def planned_offline(model: Any, args: Any, kwargs: Any, hardware: str, tiles: int) -> None:
    """Plan ``model`` for its floor; it never runs."""
    options = {"lowering": "aten", "token_tiles": tiles, "memory_budget": "1"}
    config = resolve(options, None)
    with contextlib.suppress(Infeasible):
        profile = find_hardware(hardware)
        plan_step_offline(model, args, kwargs, config=config, hardware=profile)


@dataclass(frozen=True, slots=True)
class Run:
    """Steps of a model that runs here; the one of most calls, of those that are planned last."""

    name: str
    train: Callable[[], None]

    def steps(self) -> list[RecordedStep]:
        with captured(self.name) as found:
            self.train()
        return sorted(found, key=lambda step: len(step.problem.calls))[-1:]


@dataclass(frozen=True, slots=True)
class Made:
    """A step from its shape alone."""

    name: str
    make: Callable[[], MovableStep]

    def steps(self) -> list[RecordedStep]:
        return [synthetic(self.make(), self.name)]
