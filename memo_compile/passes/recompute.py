"""From the forward region of a layer: what recomputing its saved tensors costs, and the regions.

A layer's *slots* are its input and the tensors that its forward leaves for its backward. Whatever
is not kept in memory can be recomputed from the slots that are, by a part of the forward.
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
    """Which inputs carry rows, and which operators mix rows but have a result for each
    (``rows.attention_rows``); without them no operator counts as row-wise."""
    changed_inputs: frozenset[int] = frozenset()
    """Positions of inputs that are overwritten before the backward: a batch norm's averages."""

    def at_slots(self, inputs: Sequence[T], outputs: Sequence[T]) -> list[T]:
        """What stands at each slot, in order, of what stands at the region's inputs and outputs."""
        found = [inputs[position] for position in self.slot_of_input]
        return found + [outputs[position] for position in self.slot_of_output]

    def changed(self) -> set[fx.Node]:
        """What does not hold in the backward what the region read: nothing is made of it again."""
        placeholders = self.region.gm.graph.find_nodes(op="placeholder")
        changed = {placeholders[at] for at in self.changed_inputs}
        return changed | written_storages(self.region.gm.graph)

    def row_dims(self) -> dict[fx.Node, RowDim | None]:
        """Where the region's values have their rows (``rows.row_dims``); empty without seeds."""
        if not self.row_seeds or self.num_rows < 2:
            return {}
        return row_dims(self.region.gm, self.row_seeds, self.num_rows)


def layer_ops(layer: ClassGraph, seconds_of: Callable[[fx.Node], float]) -> tuple[LayerOp, ...]:
    """The layer's operators in an order that can run; inputs that are slots come first.

    A view is no operator of its own unless it is a slot: what reads it depends on what it shows. An
    operator with several results is one operator with all the seconds, and one free operator for
    each result that is read, so that recomputing any of them costs the whole once.
    """
    graph = layer.region.gm.graph
    placeholders, outputs = graph.find_nodes(op="placeholder"), results_of(graph)
    inputs = {placeholders[at]: slot for at, slot in layer.slot_of_input.items()}
    slots = {outputs[at]: slot for at, slot in layer.slot_of_output.items()} | inputs
    row_wise = {node for node in layer.row_dims() if not _is_given(node, layer.row_seeds)}
    changed = layer.changed()
    ops: list[LayerOp] = []
    made_by: dict[fx.Node, int] = {}
    for node in (*inputs, *(node for node in graph.nodes if node.op == "call_function")):
        sources = {made_by[source] for source in node.all_input_nodes if source in made_by}
        if is_view(node) and node not in slots:
            if sources:
                made_by[node] = made_by[viewed(node)]
            continue
        is_free = node in inputs or is_item(node) or is_view(node)
        made_by[node] = len(ops)
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


def _is_given(node: fx.Node, row_seeds: Mapping[fx.Node, RowDim]) -> bool:
    """True for a seed that is computed: its rows exist, but it mixes rows to make them."""
    return node in row_seeds and node.op != "placeholder"


def _why_not_recomputed(node: fx.Node, changed: Collection[fx.Node]) -> str | None:
    """What forbids to run ``node`` a second time, in the backward; None when it may run."""
    if must_be_saved(node):
        return (
            "it is tagged MUST_SAVE: by the model's own checkpoint(), as the loss's gradient, or "
            "because it jumps where a last digit differs"
        )
    if is_item(node):
        node = node.all_input_nodes[0]
    if runs_once(node):
        return "it reads an input that the step overwrites"
    for read in (node, *node.all_input_nodes):
        if storage_of(read) in changed:
            return f"{storage_of(read).name} is overwritten before the backward"
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
    """The smallest part of a layer's forward that makes ``key.slots``, and where its inputs are.

    Rewrite (slots: 0 = ``x``, 1 = ``a``, 2 = ``c``; ``key.slots`` = (2,)):
        def layer(x, w, v):            def part(w, a):     # forward input 1, slot 1
            a = mm(x, w)                   b = relu(a)
            b = relu(a)          ->        c = mm(b, w)
            c = mm(b, w)                   return c
            y = add(mm(c, v), x)
            return y, a, c

    Every slot that is not made is there to be read, kept or reloaded; it cuts the graph, but those
    of ``key.passing`` are made on the way. Inputs have the size and strides that the region's own
    code sees, which the step program must give them. With ``key.rows`` all is for the first rows
    only. Raises UnsupportedGraph: an operator in between may not be recomputed or does not keep
    rows apart.
    """
    region, outputs = layer.region, results_of(layer.region.gm.graph)
    made_at = {slot: outputs[position] for position, slot in layer.slot_of_output.items()}
    for slot in key.slots:
        if slot not in made_at:
            raise UnsupportedGraph(
                f"{key.region}: slot {slot} is no output of {region.name}; keep or offload it"
            )
    wanted = [made_at[slot] for slot in key.slots]
    made_again = {*key.slots, *key.passing}
    kept = {node: slot for slot, node in made_at.items() if slot not in made_again}
    part = _part(layer, wanted, kept, key.region)
    gm = part.gm if key.rows is None else _first_rows(layer, part, wanted, key)
    placeholders = region.gm.graph.find_nodes(op="placeholder")
    positions = {node: at for at, node in enumerate(placeholders)}
    slots = {placeholders[at]: slot for at, slot in layer.slot_of_input.items()} | kept
    static = tuple(
        index
        for index, node in enumerate(part.inputs)
        if positions.get(node) in region.static_inputs
    )
    made = RegionGraph(
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
    return made, tuple(inputs)


def _part(
    layer: ClassGraph, wanted: Sequence[fx.Node], kept: Mapping[fx.Node, int], name: str
) -> Extract:
    """What ``wanted`` needs, ending at placeholders and at ``kept``."""
    changed = layer.changed()
    part = extract(layer.region.gm, wanted, lambda node: node.op == "placeholder" or node in kept)
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
    """The part for rows ``[0, key.rows)``."""
    assert key.rows is not None
    dims = row_dims(layer.region.gm, layer.row_seeds, layer.num_rows)
    for node in wanted:
        if dims.get(node) is None:
            raise UnsupportedGraph(
                f"{key.region}: {node.name} ({node.target}) mixes rows or has none: "
                "recompute all of it, or none"
            )
    own = {
        copy: dims[node]
        for node, copy in part.copies.items()
        if node in dims and (copy.op == "placeholder" or not _is_given(node, layer.row_seeds))
    }
    return slice_rows(part.gm, own, key.rows, layer.num_rows)
