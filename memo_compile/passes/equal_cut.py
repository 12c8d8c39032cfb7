"""Tags the tensors that the forward saves for the backward, in three passes.

    SaveMinCut     what torch's own partitioner would save
    EqualCut       the same tensors in every layer of a class
    SufficientCut  all tensors that a layer's backward needs from other units

Torch's partitioner sees one big graph and may cut two equal layers differently, or recompute a
layer's input from the layer before. But a region is lowered once for all its layers.

The halves are cut out of the joint graph by these tags (``partitioner.extract_halves``).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils import _pytree as pytree

from memo_compile.analysis.frozen import frozen_inputs, made_of_frozen
from memo_compile.analysis.joint_units import (
    UNIT,
    JointUnits,
    backward_positions,
    forward_nodes,
    saved_nodes,
    tag_saved,
    tangent_dependents,
)
from memo_compile.analysis.purity import (
    is_constant,
    is_pure,
    is_repeatable,
    must_be_saved,
    overwritten,
    runs_once,
)
from memo_compile.analysis.row_rules import is_attention
from memo_compile.analysis.structure import argument, op_name
from memo_compile.analysis.tile_chains import projections
from memo_compile.analysis.views import (
    base_of,
    bytes_of,
    is_item,
    is_movable_view,
    is_tensor,
    makers_of,
    storage_of,
)
from memo_compile.passes.own_inputs import inputs_of, is_copied
from memo_compile.torch_private import partitioner

Chosen = dict[tuple[str, ...], list[str]]
"""Names of a joint graph's nodes -> those that torch's partitioner chose to save."""

TILE_FACTOR = 2
"""A saved tensor so many times larger than its unit's input is cheaper to recompute, in tiles,
than to keep: logits, and what lies between the two products of an MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveMinCut:
    """Tags the tensors that torch's min-cut partitioner saves, as whole tensors of the forward.

    Rewrite:
        relu = relu(mm)                ->    relu = relu(mm)  # saved
        t = permute(relu, [1, 0])            t = permute(relu, [1, 0])

    A view is replaced by its tensor, and a node of the backward by the forward's nodes behind it.
    """

    joint_inputs: Any
    """The inputs that AOTAutograd gives to a partitioner."""
    num_fwd_outputs: int
    static_inputs: Sequence[int] | None
    """Positions of parameters and buffers, as AOTAutograd gives them."""
    chosen: Chosen | None = None
    """Cache: what was chosen for this graph at other sizes, to choose the same."""
    name: ClassVar[str] = "save-min-cut"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Tag in place."""
        graph_names = tuple(node.name for node in gm.graph.nodes)
        cache: Chosen = {} if self.chosen is None else self.chosen
        if graph_names not in cache:
            cache[graph_names] = self._names(gm)
        saved_names, forward = set(cache[graph_names]), set(forward_nodes(gm))
        chosen = {
            base_of(maker)
            for node in gm.graph.nodes
            if node.name in saved_names
            for maker in _made_in_forward(node, forward)
        }
        return PassResult(gm, tag_saved(gm, chosen))

    def _names(self, gm: fx.GraphModule) -> list[str]:
        """Returns the names of the nodes that torch would save."""
        static = self.static_inputs
        return partitioner.min_cut_saved_names(
            gm,
            self.joint_inputs,
            num_fwd_outputs=self.num_fwd_outputs,
            static_lifetime_input_indices=None if static is None else list(static),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualCut:
    """Lets every layer of a class save what the middle one saves, so that one region serves all.

    Rewrite:
        layer 0: a0 = mm(x0), b0 = relu(a0)  # saved     layer 0: a0 = mm(x0)  # saved, b0
        layer 1: a1 = mm(x1)  # saved, b1            ->  layer 1: a1 = mm(x1)  # saved, b1
        layer 2: a2 = mm(x2)  # saved, b2                layer 2: a2 = mm(x2)  # saved, b2

    Min-cut may treat the first and the last otherwise, because they have other neighbours.
    """

    units: JointUnits
    drops_above: int | None
    """A tensor is not saved if it and its gradient take more bytes than this, and it is much wider
    than its unit's input: the backward recomputes it next to its readers, where both can run tile
    by tile. None: all may be saved."""
    drops_heads: bool = False
    """Nothing between an attention's projections is saved: it runs in tiles of heads, which the
    backward recomputes."""
    name: ClassVar[str] = "equal-cut"
    is_required: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Tag in place."""
        units, saved = self.units, set(saved_nodes(gm))
        above = self.drops_above
        if above is not None:
            saved -= {node for node in _droppable(units, saved) if 2 * bytes_of(node) > above}
        if self.drops_heads:
            saved -= _of_heads(units, saved)
        chosen = {node for node in saved if node.op == "placeholder" or UNIT not in node.meta}
        spans, classes = units.structure.units, units.structure.classes
        middle_of = {cls.class_key: spans[cls.units[len(cls.units) // 2]] for cls in classes}
        for unit in spans:
            nodes = units.forward[unit.start : unit.end]
            if unit.class_key is None:
                chosen |= saved.intersection(nodes)
                continue
            middle = middle_of[unit.class_key]
            pattern = units.forward[middle.start : middle.end]
            chosen |= {node for node, model in zip(nodes, pattern, strict=True) if model in saved}
        return PassResult(gm, tag_saved(gm, chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class SufficientCut:
    """Saves what a backward must not recompute: values of other units, or that must run once.

    Rewrite:
        x1 = add(x0, b0)                  ->    x1 = add(x0, b0)  # saved
        backward of layer 1 reads x1            backward of layer 1 reads x1

    Random numbers, collectives, custom operators, operators that jump (``keep_jumps``) and readers
    of an input that the step overwrites run once. Such an input, or a view of it, is never saved.

    Values that depend on frozen weights alone (``analysis.frozen``) are not saved either, because
    the backward computes them again; nor is anything that the program's own backward computes.
    """

    units: JointUnits
    num_fwd_outputs: int
    static_inputs: tuple[int, ...] = ()
    """Positions of the inputs that are parameters and buffers."""
    changing_inputs: tuple[int, ...] = ()
    """Positions of the inputs that the program may write between the halves."""
    name: ClassVar[str] = "sufficient-cut"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Tag in place."""
        written = overwritten(gm.graph)
        frozen = frozen_inputs(gm.graph, self.static_inputs, self.num_fwd_outputs) - written
        inputs = inputs_of(gm.graph)
        changing = {inputs[at] for at in self.changing_inputs}
        remade = made_of_frozen(gm.graph, frozen, changing)
        saved = {
            node
            for node in set(saved_nodes(gm)) - remade
            if storage_of(node) not in written and not is_copied(storage_of(node))
        }
        forward, unit_of = set(self.units.forward), _unit_of_every_node(gm, self.units)
        cut = _Cut(saved=saved, forward=forward, remade=remade, unit_of=unit_of)
        # From what depends on gradients back to what the backward must get: the rest it recomputes.
        backward = tangent_dependents(gm.graph)
        visited: set[fx.Node] = set()
        stack = [(node, source) for node in backward for source in node.all_input_nodes]
        ends = pytree.arg_tree_leaves(*gm.graph.output_node().args)[self.num_fwd_outputs :]
        stack += [(node, node) for node in ends if isinstance(node, fx.Node)]  # gradients
        while stack:
            reader, node = stack.pop()
            if node in backward or cut.need_not_compute(node, reader) or node in visited:
                continue
            visited.add(node)
            stack.extend((node, source) for source in node.all_input_nodes)
        return PassResult(gm, tag_saved(gm, cut.saved))


def _made_in_forward(node: fx.Node, forward: set[fx.Node]) -> set[fx.Node]:
    """Returns ``node``, or, if only the backward computes it, the forward's nodes behind it.

    ``rstd / n`` of a normalisation is such a node, and a weight that an autograd.Function
    dequantises in its backward. Min-cut may save it, but no layer's forward has it.
    """

    def in_backward(maker: fx.Node) -> bool:
        return maker.op == "call_function" and maker not in forward

    return {maker for maker in makers_of([node], in_backward) if not in_backward(maker)}


def dropped_sizes(gm: fx.GraphModule, units: JointUnits) -> tuple[int, ...]:
    """Returns the sizes in ``gm`` that ``EqualCut`` compares with ``drops_above``, each once."""
    return tuple(sorted({2 * bytes_of(node) for node in _droppable(units, saved_nodes(gm))}))


def _droppable(units: JointUnits, saved: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns those of ``saved`` that are wide and may be recomputed instead."""
    wide = _wide(units)
    return {node for node in saved if node in wide and not must_be_saved(node)}


def _of_heads(units: JointUnits, saved: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns those of ``saved`` that stand between a projection and attention, or come from it.

    Attention with dropout is not repeated, nor what its unit shares with others (rotary tables).
    """
    of_heads: set[fx.Node] = set()
    for node in filter(is_attention, units.forward):
        if is_repeatable(node):
            operands = (argument(node, name) for name in ("query", "key", "value"))
            makers = set().union(*map(projections, operands))
            own_makers = {each for each in makers if each.meta.get(UNIT) == node.meta.get(UNIT)}
            of_heads |= own_makers | set(node.users)
    return {node for node in saved if node in of_heads and not must_be_saved(node)}


def _wide(units: JointUnits) -> set[fx.Node]:
    """Returns tensors TILE_FACTOR times their unit's input or more, none next to attention."""
    wide = set()
    for index, unit in enumerate(units.structure.units):
        nodes = units.forward[unit.start : unit.end]
        sources = (source for node in nodes for source in node.all_input_nodes)
        inputs = (source for source in sources if source.meta.get(UNIT) == index - 1)
        limit_bytes = TILE_FACTOR * max(map(bytes_of, inputs), default=0)
        if limit_bytes:
            large = (node for node in nodes if bytes_of(node) >= limit_bytes)
            wide |= {node for node in large if not near_attention(node)}
    return wide


def near_attention(node: fx.Node) -> bool:
    """True for an input of attention, also through views and items, and for its direct result."""
    stack, visited = [node], set()
    while stack:
        candidate = stack.pop()
        if candidate in visited:
            continue
        visited.add(candidate)
        if "attention" in op_name(candidate):
            return True
        if candidate is node or is_movable_view(candidate) or op_name(candidate) == "":  # getitem
            stack.extend(candidate.users)
    return any("attention" in op_name(source) for source in node.all_input_nodes)


def _unit_of_every_node(joint: fx.GraphModule, units: JointUnits) -> dict[fx.Node, int]:
    """Returns each node's unit: as tagged, else the one whose backward would run it."""
    last = units.num_units - 1
    unit_of = {n: last - at for n, at in backward_positions(joint.graph, units.num_units).items()}
    unit_of.update({node: node.meta[UNIT] for node in units.forward if UNIT in node.meta})
    return unit_of


def _is_made_again(node: fx.Node) -> bool:
    """True where a backward may compute ``node`` again: pure operators, attention by its rule."""
    maker = node.all_input_nodes[0] if is_item(node) else node
    return is_pure(node) or (is_attention(maker) and is_repeatable(maker))


@dataclass(slots=True, kw_only=True)
class _Cut:
    """The tensors of the forward that the backward gets."""

    saved: set[fx.Node]
    forward: set[fx.Node]
    remade: set[fx.Node]
    """Values that depend on frozen weights alone, which the backward computes again."""
    unit_of: Mapping[fx.Node, int]

    def need_not_compute(self, node: fx.Node, reader: fx.Node) -> bool:
        """True if the backward gets ``node`` for ``reader``: an input, an attribute, or saved.

        Saves it if the backward must not compute it: it belongs to another unit than ``reader``,
        must run once, or is tagged as saved.
        """
        base = base_of(node)
        if base.op == "placeholder":
            self.saved.add(base)
        if base in self.saved or base.op == "get_attr":
            return True
        if is_constant(base) or not is_tensor(base):
            return False
        if runs_once(base):
            self.saved.add(base)
            return True
        if base not in self.forward:
            return False
        unit = self.unit_of.get(reader)
        crosses = unit is not None and self.unit_of.get(base, unit) != unit
        if crosses or must_be_saved(base) or not (_is_made_again(base) or base in self.remade):
            self.saved.add(base)
            return True
        return False
