"""Makes regions that recompute a layer's saved tensors, and the operators that price this.

A layer's *slots* are its input and the tensors that its forward saves for its backward. Slots that
are not kept can be recomputed from those that are, by a part of the layer's forward region.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import fx

from memo_compile.analysis.purity import (
    is_collective,
    is_known,
    is_random,
    is_repeatable,
    is_write,
    must_be_saved,
    runs_once,
    written_storages,
)
from memo_compile.analysis.regions import RegionGraph
from memo_compile.analysis.row_rules import RowDim
from memo_compile.analysis.rows import row_dims
from memo_compile.analysis.views import is_item, is_view, results_of, storage_of, viewed
from memo_compile.errors import UnsupportedGraph
from memo_compile.passes.extract import Extract, extract
from memo_compile.passes.slice_rows import slice_rows
from memo_compile.step.movable import LayerOp, RecomputeKey, RegionInput

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassGraph:
    """The forward region of a layer class, and which of its inputs and outputs are slots."""

    region: RegionGraph
    slot_of_output: Mapping[int, int]
    """Position -> slot."""
    slot_of_input: Mapping[int, int]
    num_rows: int
    row_seeds: Mapping[fx.Node, RowDim]
    """Inputs that carry rows, and operators that mix rows but have a result for each
    (``rows.attention_rows``); empty: no operator counts as row-wise."""
    changed_inputs: frozenset[int] = frozenset()
    """Positions of inputs that are overwritten before the backward: a batch norm's averages."""

    def at_slots(self, inputs: Sequence[T], outputs: Sequence[T]) -> list[T]:
        """Returns an item for each slot, given one for each input and output of the region."""
        input_slots = [inputs[position] for position in self.slot_of_input]
        return input_slots + [outputs[position] for position in self.slot_of_output]

    def changed(self) -> set[fx.Node]:
        """Returns storages overwritten before the backward, which nothing may recompute from."""
        placeholders = self.region.gm.graph.find_nodes(op="placeholder")
        changed = {placeholders[at] for at in self.changed_inputs}
        return changed | written_storages(self.region.gm.graph)

    def row_dims(self) -> dict[fx.Node, RowDim | None]:
        """Returns the dimensions of rows in the region (``rows.row_dims``); empty: no seeds."""
        if not self.row_seeds or self.num_rows < 2:
            return {}
        return row_dims(self.region.gm, self.row_seeds, self.num_rows)


def layer_ops(layer: ClassGraph, seconds_of: Callable[[fx.Node], float]) -> tuple[LayerOp, ...]:
    """Returns the layer's operators in an order that can run; inputs that are slots come first.

    A view is no operator of its own unless it is a slot: its readers depend on its source. An
    operator with several results is one operator with all the seconds, and one free operator for
    each result that is read, so that recomputing any of them costs the whole once.
    """
    graph = layer.region.gm.graph
    placeholders, outputs = graph.find_nodes(op="placeholder"), results_of(graph)
    inputs = {placeholders[at]: slot for at, slot in layer.slot_of_input.items()}
    slots = {outputs[at]: slot for at, slot in layer.slot_of_output.items()} | inputs
    row_wise = {node for node in layer.row_dims() if not _is_computed_seed(node, layer.row_seeds)}
    changed = layer.changed()
    ops: list[LayerOp] = []
    op_of: dict[fx.Node, int] = {}
    for node in (*inputs, *(node for node in graph.nodes if node.op == "call_function")):
        sources = {op_of[source] for source in node.all_input_nodes if source in op_of}
        if is_view(node) and node not in slots:
            if sources:
                op_of[node] = op_of[viewed(node)]
            continue
        is_free = node in inputs or is_item(node) or is_view(node)
        op_of[node] = len(ops)
        ops.append(
            LayerOp(
                name=node.name,
                seconds=0.0 if is_free else seconds_of(node),
                inputs=tuple(sorted(sources)),
                slot=slots.get(node),
                can_recompute=node not in inputs and _why_not_recomputed(node, changed) is None,
                row_wise=node in row_wise,
            )
        )
    return tuple(ops)


def _is_computed_seed(node: fx.Node, row_seeds: Mapping[fx.Node, RowDim]) -> bool:
    """True for a seed that is computed: its rows exist, but it mixes rows to make them."""
    return node in row_seeds and node.op != "placeholder"


def _why_not_recomputed(node: fx.Node, changed: Collection[fx.Node]) -> str | None:
    """Returns why ``node`` must not run again in the backward; None if it may."""
    if must_be_saved(node):
        return (
            "it is tagged MUST_SAVE: by the model's own checkpoint(), as the loss's gradient, or "
            "because it jumps where a last digit differs"
        )
    if is_item(node):
        node = node.all_input_nodes[0]
    if runs_once(node):
        return "it reads an input that the step overwrites"
    for operand in (node, *node.all_input_nodes):
        if storage_of(operand) in changed:
            return f"{storage_of(operand).name} is overwritten before the backward"
    if is_repeatable(node):
        return None
    if is_collective(node):
        return "it communicates with other ranks"
    if is_write(node):
        return "it writes into one of its arguments"
    if is_random(node):
        return "it draws random numbers"
    return "its effects are unknown" if not is_known(node) else "it is not pure"


def recompute_graph(
    layer: ClassGraph, key: RecomputeKey
) -> tuple[RegionGraph, tuple[RegionInput, ...]]:
    """Returns the smallest part of a layer's forward that makes ``key.slots``, and its inputs.

    Rewrite (slots: 0 = ``x``, 1 = ``a``, 2 = ``c``; ``key.slots`` = (2,)):
        def layer(x, w, v):            def part(w, a):     # forward input 1, slot 1
            a = mm(x, w)                   b = relu(a)
            b = relu(a)          ->        c = mm(b, w)
            c = mm(b, w)                   return c
            y = add(mm(c, v), x)
            return y, a, c

    All other slots can be read, because they are kept or reloaded, and end the part; those of
    ``key.passing`` are computed on the way. The part's inputs have the sizes and strides that the
    layer's own code sees, which the step program must give them. With ``key.rows`` the part is for
    the first rows only. Raises UnsupportedGraph: an operator in between may not be recomputed or
    does not keep rows apart.
    """
    region, outputs = layer.region, results_of(layer.region.gm.graph)
    node_of_slot = {slot: outputs[position] for position, slot in layer.slot_of_output.items()}
    for slot in key.slots:
        if slot not in node_of_slot:
            raise UnsupportedGraph(
                f"{key.region}: slot {slot} is no output of {region.name}; keep or offload it"
            )
    wanted = [node_of_slot[slot] for slot in key.slots]
    recomputed = {*key.slots, *key.passing}
    slot_of_kept = {node: slot for slot, node in node_of_slot.items() if slot not in recomputed}
    part = _part(layer, wanted, slot_of_kept, key.region)
    gm = part.gm if key.rows is None else _first_rows(layer, part, wanted, key)
    placeholders = region.gm.graph.find_nodes(op="placeholder")
    positions = {node: at for at, node in enumerate(placeholders)}
    slots = {placeholders[at]: slot for at, slot in layer.slot_of_input.items()} | slot_of_kept
    static = tuple(
        index
        for index, node in enumerate(part.inputs)
        if positions.get(node) in region.static_inputs
    )
    part_region = RegionGraph(
        name=re.sub(r"\W+", "_", key.region),
        gm=gm,
        external_outputs=frozenset(),
        static_inputs=static,
        is_backward=True,
        device=region.device,
    )
    inputs = (
        RegionInput(slot=slots[node])
        if node in slots
        else RegionInput(forward_input=positions[node])
        for node in part.inputs
    )
    return part_region, tuple(inputs)


def _part(
    layer: ClassGraph, wanted: Sequence[fx.Node], stops: Mapping[fx.Node, int], name: str
) -> Extract:
    """Returns the nodes that ``wanted`` needs, back to placeholders and ``stops``."""
    changed = layer.changed()
    part = extract(layer.region.gm, wanted, lambda node: node.op == "placeholder" or node in stops)
    for node in reversed(list(part.copies)[len(part.inputs) :]):
        checked = node.op == "call_function" and not is_item(node)  # items: their operator is
        reason = _why_not_recomputed(node, changed) if checked else None
        if reason is not None:
            raise UnsupportedGraph(
                f"{name}: {node.name} ({node.target}) may not be recomputed: {reason}; "
                "keep or offload what is made from it"
            )
    part.finish(wanted)
    return part


def _first_rows(
    layer: ClassGraph, part: Extract, wanted: Sequence[fx.Node], key: RecomputeKey
) -> fx.GraphModule:
    """Returns the part for rows ``[0, key.rows)``."""
    assert key.rows is not None
    dims = row_dims(layer.region.gm, layer.row_seeds, layer.num_rows)
    for node in wanted:
        if dims.get(node) is None:
            raise UnsupportedGraph(
                f"{key.region}: {node.name} ({node.target}) mixes rows or has none: "
                "recompute all of it, or none"
            )
    part_dims = {  # without seeds that the part computes: they mix rows, and are refused
        copy: dims[node]
        for node, copy in part.copies.items()
        if node in dims
        and (copy.op == "placeholder" or not _is_computed_seed(node, layer.row_seeds))
    }
    return slice_rows(part.gm, part_dims, key.rows, layer.num_rows)
