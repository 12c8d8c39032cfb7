"""Policy SAVE: what torch's min-cut would keep for the backward, cut equally in every layer.

Torch's partitioner sees one big graph and may cut two equal layers differently, or recompute a
layer's input from the layer before. A region is lowered once for all its layers.
"""

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import fx
from torch.utils import _pytree as pytree

from memo_compile.analysis.joint_units import (
    UNIT,
    JointUnits,
    backward_positions,
    forward_nodes,
    tangent_dependents,
)
from memo_compile.analysis.overwrites import overwritten, runs_once
from memo_compile.analysis.purity import is_constant, is_pure
from memo_compile.analysis.structure import op_name
from memo_compile.analysis.views import base_of, is_movable_view, is_tensor, storage_of

TILE_FACTOR = 2
"""A saved tensor this many times larger than its unit's input is cheaper to recompute, in tiles,
than to keep: logits, and what lies between the two products of an MLP."""


SAVED = "memo_saved"
"""Key of ``node.meta``: true for what the forward keeps for the backward."""


def saved_nodes(joint: fx.GraphModule) -> list[fx.Node]:
    """The nodes that are tagged as saved, in graph order."""
    return [node for node in joint.graph.nodes if node.meta.get(SAVED)]


def tag_saved(joint: fx.GraphModule, saved: Collection[fx.Node]) -> bool:
    """``saved`` and nothing else is tagged as saved; False when it was so before."""
    before = saved_nodes(joint)
    for node in joint.graph.nodes:
        node.meta.pop(SAVED, None)
        if node in saved:
            node.meta[SAVED] = True
    return saved_nodes(joint) != before


def whole_in_forward(names: Iterable[str], joint: fx.GraphModule) -> set[fx.Node]:
    """What to save for the nodes of these ``names``: whole tensors that the forward makes.

    A view is replaced by its tensor, and what the forward does not make by what it is made of,
    where that is no larger.
    """
    by_name = {node.name: node for node in joint.graph.nodes}
    forward = set(forward_nodes(joint))
    return {
        base_of(node)
        for name in names
        if name in by_name
        for node in _made_in_forward(by_name[name], forward)
    }


def equal_in_layers(units: JointUnits, chosen: set[fx.Node], *, for_tiles: bool) -> set[fx.Node]:
    """``chosen``, where each layer of a class keeps what the middle one of its class keeps.

    The first and the last have other neighbours, so that min-cut may treat them differently. With
    ``for_tiles`` what is much wider than its unit's input is left out, so that the backward
    recomputes it next to its readers, where ``passes.tiles`` can do both tile by tile.
    """
    if for_tiles:
        chosen = chosen - _wide(units)
    result = {node for node in chosen if node.op == "placeholder" or UNIT not in node.meta}
    spans, classes = units.structure.units, units.structure.classes
    middle_of = {cls.class_key: spans[cls.units[len(cls.units) // 2]] for cls in classes}
    for unit in spans:
        own = units.forward[unit.start : unit.end]
        if unit.class_key is None:
            result |= chosen.intersection(own)
            continue
        middle = middle_of[unit.class_key]
        pattern = units.forward[middle.start : middle.end]
        result |= {node for node, like in zip(own, pattern, strict=True) if like in chosen}
    return result


def sufficient(
    joint: fx.GraphModule, units: JointUnits, chosen: set[fx.Node], *, num_fwd_outputs: int
) -> set[fx.Node]:
    """``chosen``, completed to what every layer's backward can start from.

    Whatever a backward still needs from another unit is saved too, and so is every value that must
    not be computed twice (random numbers, collectives, custom operators, what reads an input that
    the step overwrites). Such an input, or a view of it, is never saved.
    """
    written = overwritten(joint.graph)
    saved = {node for node in chosen if storage_of(node) not in written}
    unit_of = _unit_of_every_node(joint, units)
    backward = tangent_dependents(joint.graph)
    seen: set[fx.Node] = set()
    stack = [(node, source) for node in backward for source in node.all_input_nodes]
    ends = pytree.arg_tree_leaves(*joint.graph.output_node().args)[num_fwd_outputs:]
    stack += [(node, node) for node in ends if isinstance(node, fx.Node)]
    while stack:
        reader, node = stack.pop()
        if node in backward or _is_available(reader, node, saved, unit_of) or node in seen:
            continue
        seen.add(node)
        stack.extend((node, source) for source in node.all_input_nodes)
    return saved


def _made_in_forward(node: fx.Node, forward: set[fx.Node]) -> list[fx.Node]:
    """``node``, or what it is made of where only the backward's formulas make it.

    ``rstd / n`` of a normalisation is such a node. Min-cut may keep it, but no layer's forward has
    it; without its ``rstd`` the backward would start from the layer's input, kept beside the rest.
    """
    if node.op != "call_function" or node in forward or UNIT not in node.meta:
        return [node]
    sources: list[fx.Node] = []
    for source in node.all_input_nodes:
        sources += _made_in_forward(source, forward)
    return sources if sum(map(_bytes, sources)) <= _bytes(node) else [node]


def _wide(units: JointUnits) -> set[fx.Node]:
    """Tensors at least TILE_FACTOR times as large as what their unit gets from the one before.

    Attention kernels do not come in tiles, so that what one reads or makes is not among them.
    """
    found = set()
    for index, unit in enumerate(units.structure.units):
        own = units.forward[unit.start : unit.end]
        inputs = [
            _bytes(source)
            for node in own
            for source in node.all_input_nodes
            if source.meta.get(UNIT) == index - 1
        ]
        limit = TILE_FACTOR * max(inputs, default=0)
        if limit == 0:
            continue
        found |= {node for node in own if _bytes(node) >= limit and not _near_attention(node)}
    return found


def _near_attention(node: fx.Node) -> bool:
    """True for what an attention kernel returns or reads, through views."""
    stack, seen = [node], set()
    while stack:
        reached = stack.pop()
        if reached in seen:
            continue
        seen.add(reached)
        if "attention" in op_name(reached):
            return True
        if reached is node or is_movable_view(reached) or op_name(reached) == "":
            stack.extend(reached.users)
    return any("attention" in op_name(source) for source in node.all_input_nodes)


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def _unit_of_every_node(joint: fx.GraphModule, units: JointUnits) -> dict[fx.Node, int]:
    """Node -> its unit: as tagged, else where the backward would run it."""
    last = units.num_units - 1
    found = {n: last - at for n, at in backward_positions(joint.graph, units.num_units).items()}
    found.update({node: node.meta[UNIT] for node in units.forward if UNIT in node.meta})
    return found


def _is_available(
    reader: fx.Node, node: fx.Node, saved: set[fx.Node], unit_of: Mapping[fx.Node, int]
) -> bool:
    """True when the backward has ``node`` without computing; saves it if it must not compute it."""
    base = base_of(node)
    if base.op == "placeholder":
        saved.add(base)
    if base in saved or base.op == "get_attr":
        return True
    if is_constant(base) or not is_tensor(base):
        return False
    crosses = reader in unit_of and unit_of.get(base, unit_of[reader]) != unit_of[reader]
    if crosses or not is_pure(base) or runs_once(base):
        saved.add(base)
        return True
    return False
