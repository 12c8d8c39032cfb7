"""Which unit of the step (prologue, layer, epilogue) each node of the joint graph belongs to.

Forward nodes have the unit that layer detection found. A backward node shares ``seq_nr`` with the
forward operator whose gradient it is part of. What has neither (gradient sums, patterns that
Inductor replaced) goes where its inputs are.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from memo_runtime import ops
from torch import fx

from memo_compile.analysis.layers import LayerStructure, find_layers
from memo_compile.analysis.purity import in_flight, is_write
from memo_compile.analysis.segments import with_segments
from memo_compile.analysis.views import makers_of, storage_of
from memo_compile.step.problem import Phase

UNIT = "memo_unit"
"""Key of ``node.meta``: the index of the unit."""

SAVED = "memo_saved"
"""Key of ``node.meta``: true for a tensor that the forward saves (``passes.equal_cut``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointUnits:
    """The units of a joint graph. Tags are on the nodes, under UNIT."""

    structure: LayerStructure
    forward: tuple[fx.Node, ...]

    @property
    def num_units(self) -> int:
        """Prologue, layers, middles and epilogue together."""
        return len(self.structure.units)


def forward_nodes(joint: fx.GraphModule) -> tuple[fx.Node, ...]:
    """Returns the forward's call_function nodes in graph order, untagged ones that it reads too."""
    wanted = forward_part(joint.graph)
    return tuple(n for n in joint.graph.nodes if n in wanted and n.op == "call_function")


def forward_part(graph: fx.Graph) -> set[fx.Node]:
    """Returns all nodes that the forward of a joint graph computes or reads."""
    return makers_of(n for n in graph.nodes if n.meta.get("partitioner_tag") == "is_forward")


def saved_nodes(joint: fx.GraphModule) -> list[fx.Node]:
    """Returns the nodes that are tagged as saved, in graph order."""
    return [node for node in joint.graph.nodes if node.meta.get(SAVED)]


def tag_saved(joint: fx.GraphModule, saved: Collection[fx.Node]) -> bool:
    """Tags ``saved`` and nothing else as saved; returns False if that changes nothing."""
    before = saved_nodes(joint)
    for node in joint.graph.nodes:
        node.meta.pop(SAVED, None)
        if node in saved:
            node.meta[SAVED] = True
    return saved_nodes(joint) != before


def is_tangent(node: fx.Node) -> bool:
    """True for an incoming gradient; AOTAutograd names these placeholders ``tangents_N``."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def tag_units(joint: fx.GraphModule, *, segments: bool = False) -> JointUnits:
    """Writes each node's unit into its meta, if known; ``segments`` also cuts large non-layers."""
    forward = forward_nodes(joint)
    structure = find_layers(forward)
    if segments:
        structure = with_segments(forward, structure)
    unit_of_seq: dict[int, int] = {}
    for index, unit in enumerate(structure.units):
        for node in forward[unit.start : unit.end]:
            node.meta[UNIT] = index
            if (seq := node.meta.get("seq_nr")) is not None:
                unit_of_seq[seq] = index
    for node in forward:
        if node.target is torch.ops.prims.inductor_lookup_seed.default:
            # Its index differs from layer to layer; made beside the seeds, it becomes an input.
            node.meta[UNIT] = node.all_input_nodes[0].meta[UNIT]
    forward_set = set(forward)
    for node in joint.graph.nodes:
        seq = node.meta.get("seq_nr")
        if node.op == "call_function" and node not in forward_set and seq in unit_of_seq:
            node.meta[UNIT] = unit_of_seq[seq]
    return JointUnits(structure=structure, forward=forward)


def forward_positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Returns for each node of a forward graph the region that runs it; a unit is a region.

    A node never runs before its inputs; one without a unit runs as early as it can.
    """
    positions = _behind_inputs(graph, {node: node.meta.get(UNIT) for node in graph.nodes})
    _write_after_reads(graph, positions)
    return positions


def _write_after_reads(graph: fx.Graph, positions: dict[fx.Node, int]) -> None:
    """Moves writes into an input to the last region that reads its old value, in ``positions``."""
    last_read: dict[fx.Node, int] = {}
    for node, position in positions.items():
        for source in node.all_input_nodes:
            root = storage_of(source)
            last_read[root] = max(last_read.get(root, 0), position)
    for node in graph.nodes:
        if node in positions and is_write(node):
            positions[node] = max(positions[node], last_read[storage_of(node.all_input_nodes[0])])


def backward_positions(graph: fx.Graph, num_units: int) -> dict[fx.Node, int]:
    """Returns for each node of a backward graph the region that runs it: the units in reverse.

    Nodes that depend on no incoming gradient (mostly recomputed forward nodes) run where they are
    first read: no layer needs another layer's recomputation (see ``passes.equal_cut``). So does a
    collective that depends on none, but never behind the one that follows it in the graph.
    """
    in_backward = tangent_dependents(graph)
    wanted: dict[fx.Node, int | None] = {}
    for node in graph.nodes:
        if node in in_backward:
            unit = node.meta.get(UNIT)
            wanted[node] = None if unit is None else num_units - 1 - unit
    positions = _behind_inputs(graph, wanted)
    behind_collectives = _dependents(graph, lambda node: node in in_backward and in_flight(node))
    early = in_backward - (behind_collectives - _dependents(graph, is_tangent))
    next_collective = num_units - 1
    for node in reversed(graph.nodes):
        begins = node in in_backward and in_flight(node)
        if _runs(node) and node not in early:
            readers = [positions[user] for user in node.users if user in positions]
            positions[node] = min([*readers, next_collective if begins else num_units - 1])
        if begins:
            next_collective = positions[node]
    _write_after_reads(graph, positions)
    return positions


def region_names(units: JointUnits, phase: Phase) -> dict[int, str]:
    """Returns the regions' names by position: ``prologue_fwd``, ``layer0_fwd`` (of class 0)."""
    suffix = "fwd" if phase is Phase.FORWARD else "bwd"
    spans = units.structure.units
    classes = list(dict.fromkeys(span.class_key for span in spans if span.class_key is not None))
    names: dict[int, str] = {}
    for index, unit in enumerate(spans):
        position = index if phase is Phase.FORWARD else len(spans) - 1 - index
        if unit.class_key is not None:
            stem = f"layer{classes.index(unit.class_key)}"
        elif len(spans) == 1:
            stem = "step"
        elif index == 0:
            stem = "prologue"
        elif index == len(spans) - 1:
            stem = "epilogue"
        else:
            stem = "middle"
        names[position] = f"{stem}_{suffix}"
    return names


def tangent_dependents(graph: fx.Graph) -> set[fx.Node]:
    """Returns the placeholders of incoming gradients and all nodes computed from them.

    Operators that must run in the backward count as computed from them.
    """
    return _dependents(
        graph,
        lambda node: is_tangent(node) or node.meta.get("partitioner_tag") == "must_be_in_backward",
    )


def _dependents(graph: fx.Graph, is_root: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Returns the nodes for which ``is_root`` is true, and all that are computed from them."""
    dependents: set[fx.Node] = set()
    for node in graph.nodes:
        inherits = any(source in dependents for source in node.all_input_nodes)
        if node.op != "output" and (inherits or is_root(node)):
            dependents.add(node)
    return dependents


def _runs(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not ops.fetch


def _behind_inputs(graph: fx.Graph, wanted: dict[fx.Node, int | None]) -> dict[fx.Node, int]:
    """Returns the ``wanted`` positions (None: as early as possible), none before an input's.

    Collectives keep the graph's order, which is the program's: it is the same on all ranks,
    whatever each of them computes in between.
    """
    positions: dict[fx.Node, int] = {}
    last_collective = 0
    for node in graph.nodes:
        if node not in wanted or not _runs(node):
            continue
        floor = max((positions.get(source, 0) for source in node.all_input_nodes), default=0)
        position = max(floor, wanted[node] or 0)
        if in_flight(node):
            position = last_collective = max(position, last_collective)
        positions[node] = position
    return positions


def source_line(node: fx.Node) -> str | None:
    """Returns ``file:line`` of the user's code that made ``node``, from its stack trace."""
    places = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    return ":".join(places[-1]) if places else None
