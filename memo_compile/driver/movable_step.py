"""A captured step as layers whose saved tensors may move: ``movable.MovableStep`` from two cuts.

The forward of every unit is a layer; calls of the same region whose saved outputs and inputs stand
at the same positions are one class. A layer in tiles is still one layer, of the region that it is
without them, so that what its tiles leave can be recomputed. A layer may move a tensor that lies in
the arena under one name, that no later layer's forward reads, and that a backward reads. Everything
else stays, and so does what layers that are alike share.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from memo_compile.analysis.purity import is_write, must_be_saved
from memo_compile.analysis.regions import RegionGraph
from memo_compile.analysis.row_rules import RowDim
from memo_compile.analysis.rows import attention_rows, row_layout
from memo_compile.analysis.structure import op_name
from memo_compile.analysis.views import results_of, storage_of
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.roofline import node_seconds
from memo_compile.driver.stages import LoweredStep
from memo_compile.passes.cut import Cut, CutCall, unique_name
from memo_compile.passes.recompute import ClassGraph, layer_ops
from memo_compile.planners.begin_order import gathers_of
from memo_compile.planners.gather_again import values_again
from memo_compile.reporting import state
from memo_compile.step.communication import handed_on, value_sizes
from memo_compile.step.movable import (
    Action,
    Layer,
    LayerClass,
    LayerOp,
    MovableStep,
    Slot,
    StepCosts,
)
from memo_compile.step.policy_rules import decision_of, has_rules
from memo_compile.step.problem import Problem, aliases, arena_values

_PINNED = {"keep": Action.SAVE, "offload": Action.OFFLOAD, "recompute": Action.RECOMPUTE}

MIN_MOVE_BYTES = 1024
"""Tensors of fewer bytes are kept: a copy costs its latency and frees at most one page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Movable:
    """The step for the policies, and the graphs behind its classes."""

    step: MovableStep
    graphs: Mapping[str, ClassGraph]


def movable_step(
    lowered: LoweredStep,
    costs: StepCosts,
    *,
    profile: HardwareProfile,
    token_granule: int,
    slices_rows: bool,
) -> Movable:
    """Returns the layers of a step; without ``slices_rows`` no tensor is split along its rows."""
    return _Builder(lowered, costs, profile, slices_rows).build(token_granule)


class _Builder:
    """Makes layers of a lowered step; what its fields say of values holds in the whole step."""

    def __init__(
        self, lowered: LoweredStep, costs: StepCosts, profile: HardwareProfile, slices_rows: bool
    ) -> None:
        forward, backward, problem = lowered.cut.forward, lowered.cut.backward, lowered.problem
        self.slices_rows = slices_rows
        self.forward = forward
        self.problem = problem
        self.costs = costs
        self.profile = profile
        last = lowered.cut.units.num_units - 1
        self.backward_of = {  # the first of several at one position
            last - call.position: call.name for call in reversed(backward.calls)
        }
        self.index = index = {call.name: at for at, call in enumerate(problem.calls)}
        self.calls: dict[int, list[str]] = {}
        """Position -> the calls of the forward there, in order; several for a region in tiles."""
        for call in forward.calls:
            self.calls.setdefault(call.position, []).append(call.name)
        self.region_at = {call.position: call.region for call in forward.layer_calls}
        self.first_at = {position: index[names[0]] for position, names in self.calls.items()}
        self.sizes = _arena_sizes(problem)
        self.readers: dict[str, set[int]] = {}
        """Value -> positions of the forward calls that read it."""
        for call in forward.calls:
            for value in call.inputs:
                self.readers.setdefault(value, set()).add(call.position)
        backward_calls = problem.calls[problem.first_backward :]
        self.read_later: dict[str, int] = {}
        """Value -> the first call of the backward that reads it."""
        for at, later in enumerate(backward_calls, start=problem.first_backward):
            for value in later.touched:
                self.read_later.setdefault(value, at)
        self._chosen: dict[str, frozenset[int]] = {}
        """Region -> positions of integers that follow from what it chooses."""
        self.again = values_again(problem)
        """Gathered weight -> its name where the backward gathers it again."""
        gathers = gathers_of(problem).values()
        self.gathered = {value for gather in gathers for value in gather.wait.outputs}
        self.user_values = {value for value in forward.results if value is not None}
        self.made_at = {value: call.position for call in forward.calls for value in call.outputs}
        self.written = {*_written(forward), *_written(backward)}
        position_of = {index[call.name]: call.position for call in forward.calls}
        self.filled = {
            into.value: at
            for at, call in enumerate(problem.calls)
            for into in call.into
            if position_of.get(at, -1) != self.made_at.get(into.value, -2)
        }
        """Value -> the last call of another layer that writes into it: its maker alone cannot
        recompute it."""

    def build(self, token_granule: int) -> Movable:
        """Returns the layers that have slots; those of equal region and slots are one class."""
        keys: dict[tuple[str, tuple[int, ...], tuple[int, ...], frozenset[int]], str] = {}
        classes: dict[str, LayerClass] = {}
        graphs: dict[str, ClassGraph] = {}
        layers = []
        for call in self.forward.layer_calls:
            backward = self.backward_of.get(call.position)
            inputs, outputs = self._input_slots(call), self._output_slots(call)
            if backward is None or not (inputs or outputs):
                continue
            signature = (call.region, inputs, outputs, self._changed(call))
            if signature not in keys:
                keys[signature] = unique_name(call.region, classes, "#")
                graph = graphs[keys[signature]] = self._graph(call, inputs, outputs)
                classes[keys[signature]] = self._class(keys[signature], call, graph)
            key = keys[signature]
            values = graphs[key].at_slots(call.inputs, call.outputs)
            layer = Layer(
                class_key=key,
                calls=tuple(self.calls[call.position]),
                inputs=call.inputs,
                backward=backward,
                values=tuple(self.again.get(value, value) for value in values),
            )
            layers.append(layer)
        step = MovableStep(
            problem=self.problem,
            classes=classes,
            layers=tuple(layers),
            costs=self.costs,
            token_granule=token_granule,
        )
        return Movable(step=step, graphs=graphs)

    def _input_slots(self, call: CutCall) -> tuple[int, ...]:
        """Positions of inputs that another call made, which no later call reads in the forward."""
        position_of: dict[str, int] = {}
        for position, value in enumerate(call.inputs):
            if self._may_move(value) and self._last_reader(value) == call.position:
                position_of.setdefault(value, position)
        return tuple(position_of.values())

    def _last_reader(self, value: str) -> int | None:
        """Returns the last position at which the forward reads ``value``, its maker's excepted.

        None where calls of one region share it (a mask): its bytes would be free for a short time,
        and the last of the layers, which are alike, would be a class of its own.
        """
        positions = self._other_readers(value)
        regions = {self.region_at.get(position) for position in positions}
        return max(positions, default=None) if len(regions) == len(positions) else None

    def _other_readers(self, value: str) -> set[int]:
        """Returns the positions of the forward calls that read ``value``, without its maker's."""
        return self.readers.get(value, set()) - {self.made_at.get(value, -1)}

    def _output_slots(self, call: CutCall) -> tuple[int, ...]:
        """Positions of outputs that are left for the backward and that no later call reads."""
        return tuple(at for at, value in enumerate(call.outputs) if self._is_slot(call, value))

    def _is_slot(self, call: CutCall, value: str) -> bool:
        """True for an output that may move, or that the backward needs to recompute others."""
        if value in self.again:
            return True
        if value not in self.read_later:
            return False
        is_movable = self._may_move(value) or value in self.gathered & self.sizes.keys()
        return (is_movable and not self._other_readers(value)) or self._is_at_hand(call, value)

    def _is_at_hand(self, call: CutCall, value: str) -> bool:
        """True for a few integers that stay, and that recomputation reads: each expert's rows."""
        if not 0 < self.sizes.get(value, 0) < MIN_MOVE_BYTES or value in self.user_values:
            return False
        region = self._region(call)
        if region.name not in self._chosen:
            self._chosen[region.name] = _made_of_choices(region.gm.graph)
        return value in call.outputs and call.outputs.index(value) in self._chosen[region.name]

    def _may_move(self, value: str) -> bool:
        return self.sizes.get(value, 0) >= MIN_MOVE_BYTES and value not in self.user_values

    def _graph(
        self, call: CutCall, inputs: tuple[int, ...], outputs: tuple[int, ...]
    ) -> ClassGraph:
        """Returns the forward of ``call``'s class, with slots at these positions, and its rows."""
        region = self._region(call)
        placeholders = region.gm.graph.find_nodes(op="placeholder")
        seeds, num_rows = {}, 1
        for position in inputs if self.slices_rows else ():
            rows = _rows_of(placeholders[position].meta["val"])
            if rows is not None and num_rows in (1, rows[1]):
                seeds[placeholders[position]], num_rows = rows
        if seeds and num_rows > 1:
            seeds.update(attention_rows(region.gm, seeds, num_rows))
        return ClassGraph(
            region=region,
            slot_of_input={position: slot for slot, position in enumerate(inputs)},
            slot_of_output={at: slot for slot, at in enumerate(outputs, start=len(inputs))},
            num_rows=num_rows,
            row_seeds=seeds,
            changed_inputs=self._changed(call),
        )

    def _region(self, call: CutCall) -> RegionGraph:
        """Returns what ``call`` runs, as it is without tiles, collectives included."""
        name, cut = call.region, self.forward
        return cut.layer_regions.get(name) or cut.whole_regions.get(name) or cut.regions[name]

    def _class(self, key: str, call: CutCall, graph: ClassGraph) -> LayerClass:
        """Returns the class ``key`` of layers like ``call``: its slots, and what each may do."""
        seconds = self._seconds(call, graph.region)
        ops = layer_ops(graph, lambda node: seconds[node])
        region = graph.region.gm.graph
        nodes = graph.at_slots(region.find_nodes(op="placeholder"), results_of(region))
        dims = graph.row_dims()
        recomputable = _recomputable_slots(ops)
        slots = []
        values = graph.at_slots(call.inputs, call.outputs)
        first = self.index[self.backward_of[call.position]]
        for slot, (value, node) in enumerate(zip(values, nodes, strict=True)):
            dim = dims.get(node)
            row_bytes = None if dim is None else row_layout(node.meta["val"], dim, graph.num_rows)
            can_offload = value not in self.again and self._may_move(value)
            can_recompute = (
                slot in recomputable
                and value in self.read_later
                and value not in self.filled
                and not self._is_at_hand(call, value)
            )
            decision = self._decision(value, can_offload, can_recompute)
            slots.append(
                Slot(
                    name=self.again.get(value, value),
                    size_bytes=0 if value in self.again else self.sizes[value],
                    can_offload=can_offload and decision in (None, "offload"),
                    can_recompute=can_recompute and decision in (None, "recompute"),
                    pinned=None if decision is None else _PINNED[decision],
                    is_input=slot < len(graph.slot_of_input),
                    is_attention=_is_attention(node),
                    num_rows=graph.num_rows if row_bytes else 1,
                    row_bytes=row_bytes or 0,
                    first_read=max(0, self.read_later.get(value, first) - first),
                )
            )
        return LayerClass(key=key, slots=tuple(slots), ops=ops)

    def _decision(self, value: str, can_offload: bool, can_recompute: bool) -> str | None:
        """Returns what the user's rules say of ``value``, if its layer can do that."""
        if not has_rules() or value not in self.problem.tensors or value not in self.sizes:
            return None
        info = self.problem.tensors[value]
        decision = decision_of(info, self.sizes[value])
        if {"offload": can_offload, "recompute": can_recompute}.get(decision or "", True):
            return decision
        tensor = f"{info.role or info.op} {list(info.shape)}"
        state.add_note(
            f"policy_rule: the plan decides about {tensor}: its layer cannot {decision} it"
        )
        return None

    def _changed(self, call: CutCall) -> frozenset[int]:
        """Positions of inputs of ``call`` that hold something else when the backward runs."""
        first = self.first_at[call.position]
        return frozenset(
            at
            for at, value in enumerate(call.inputs)
            if value in self.written or self.filled.get(value, first) > first
        )

    def _seconds(self, call: CutCall, region: RegionGraph) -> dict[fx.Node, float]:
        """Returns seconds of each node by roofline, scaled to add up to those of the calls."""
        nodes = [node for node in region.gm.graph.nodes if node.op == "call_function"]
        seconds = {node: node_seconds(node, self.profile) for node in nodes}
        total = sum(seconds.values())
        first, count = self.first_at[call.position], len(self.calls[call.position])
        calls_s = sum(map(self.costs.call_s, self.problem.calls[first : first + count]))
        scale = calls_s / total if total > 0 else 0.0
        return {node: node_s * scale for node, node_s in seconds.items()}


def _arena_sizes(problem: Problem) -> dict[str, int]:
    """Value -> bytes of its buffer, for values that alone own an arena buffer in the forward.

    What a collective has left is owned by the value that its wait shows.
    """
    of_forward = [value for value in arena_values(problem) if value.call < problem.first_backward]
    num_values = Counter(value.id for value in of_forward)
    owner_of = {value.value: value.value for value in of_forward if num_values[value.id] == 1}
    """First value in a buffer -> the value that owns it; "": several do."""
    sizes, roots, in_flight = value_sizes(problem), aliases(problem), handed_on(problem)
    for value, root in roots.items():
        if root in owner_of and value not in in_flight:
            is_first = owner_of[root] == root and root in in_flight
            owner_of[root] = value if is_first and value in sizes else ""
    return {value: sizes[value] for value in owner_of.values() if value}


def _written(cut: Cut) -> Iterator[str]:
    """Yields values that a region of ``cut`` overwrites (a buffer's new state, say)."""
    for call in cut.calls:
        placeholders = cut.regions[call.region].gm.graph.find_nodes(op="placeholder")
        position = {node: at for at, node in enumerate(placeholders)}
        for node in cut.regions[call.region].gm.graph.nodes:
            root = storage_of(node.all_input_nodes[0]) if is_write(node) else None
            if root in position:
                yield call.inputs[position[root]]


def _rows_of(value: torch.Tensor) -> tuple[RowDim, int] | None:
    """Returns the outermost dimension that can be split (batch; tokens if B is 1), and its size."""
    if not value.is_floating_point():
        return None
    for dim, size in enumerate(value.shape[:-1]):
        if size > 1:
            return RowDim(dim=dim, factor=1), int(size)
    return None


def _made_of_choices(graph: fx.Graph) -> frozenset[int]:
    """Positions of a region's integers that are made of what runs once: a router's choices."""
    chosen: set[fx.Node] = set()
    for node in graph.nodes:
        if must_be_saved(node) or not chosen.isdisjoint(node.all_input_nodes):
            chosen.add(node)
    return frozenset(
        at
        for at, node in enumerate(results_of(graph))
        if node in chosen and _is_integer(node.meta.get("val"))
    )


def _is_integer(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
        return False
    return not (value.is_floating_point() or value.is_complex())


def _is_attention(node: fx.Node) -> bool:
    """True for what an attention kernel returns."""
    root = storage_of(node)
    sources = [root, *root.all_input_nodes] if op_name(root) == "" else [root]
    return any("attention" in op_name(source) for source in sources)


def _recomputable_slots(ops: tuple[LayerOp, ...]) -> set[int]:
    """Slots that can be made from other slots of the layer and from what is always there."""
    available: list[bool] = []
    slots = set()
    for op in ops:
        from_inputs = op.can_recompute and all(available[index] for index in op.inputs)
        if from_inputs and op.slot is not None:
            slots.add(op.slot)
        available.append(from_inputs or op.slot is not None)
    return slots
