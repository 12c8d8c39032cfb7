"""Policy SAVE chooses what the forward keeps for the backward: three passes that tag, and no more.

    SaveMinCut     what torch's own partitioner would keep
    EqualCut       the same in every layer of a class
    SufficientCut  all that a layer's backward starts from

Torch's partitioner sees one big graph and may cut two equal layers differently, or recompute a
layer's input from the layer before. A region is lowered once for all its layers.

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
    must_be_saved,
    overwritten,
    runs_once,
)
from memo_compile.analysis.structure import op_name
from memo_compile.analysis.views import (
    base_of,
    bytes_of,
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
"""A saved tensor this many times larger than its unit's input is cheaper to recompute, in tiles,
than to keep: logits, and what lies between the two products of an MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveMinCut:
    """Tags what torch's min-cut partitioner keeps, as whole tensors of the forward.

    Rewrite:
        relu = relu(mm)                ->    relu = relu(mm)  # saved
        t = permute(relu, [1, 0])            t = permute(relu, [1, 0])

    A view is replaced by its tensor, and what the forward does not make by what it is made of.
    """

    joint_inputs: Any
    """The inputs that AOTAutograd gives to a partitioner."""
    num_fwd_outputs: int
    static_inputs: Sequence[int] | None
    """Positions of parameters and buffers, as AOTAutograd gives them."""
    chosen: Chosen | None = None
    """What was chosen of this graph at other sizes, which is chosen again."""
    name: ClassVar[str] = "save-min-cut"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Tag in place."""
        nodes, known = tuple(node.name for node in gm.graph.nodes), self.chosen
        names = None if known is None else known.get(nodes)
        if names is None:
            names = self._names(gm)
        if known is not None:
            known[nodes] = names
        by_name = {node.name: node for node in gm.graph.nodes}
        forward = set(forward_nodes(gm))
        chosen = {
            base_of(node)
            for name in names
            if name in by_name
            for node in _made_in_forward(by_name[name], forward)
        }
        return PassResult(gm, tag_saved(gm, chosen))

    def _names(self, gm: fx.GraphModule) -> list[str]:
        """Of the nodes that torch would save."""
        static = self.static_inputs
        return partitioner.min_cut_saved_names(
            gm,
            self.joint_inputs,
            num_fwd_outputs=self.num_fwd_outputs,
            static_lifetime_input_indices=None if static is None else list(static),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualCut:
    """Every layer of a class keeps what the middle one keeps, so that one region serves them all.

    Rewrite:
        layer 0: a0 = mm(x0), b0 = relu(a0)  # saved     layer 0: a0 = mm(x0)  # saved, b0
        layer 1: a1 = mm(x1)  # saved, b1            ->  layer 1: a1 = mm(x1)  # saved, b1
        layer 2: a2 = mm(x2)  # saved, b2                layer 2: a2 = mm(x2)  # saved, b2

    The first and the last have other neighbours, so that min-cut may treat them differently.
    """

    units: JointUnits
    drops_above: int | None
    """Where a value and its gradient take more bytes, and it is much wider than its unit's input,
    it is not saved (None: all may be): the backward recomputes it next to its readers, where both
    can run tile by tile."""
    name: ClassVar[str] = "equal-cut"
    is_required: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Tag in place."""
        units, saved = self.units, set(saved_nodes(gm))
        above = self.drops_above
        if above is not None:
            saved -= {node for node in _droppable(units, saved) if 2 * bytes_of(node) > above}
        chosen = {node for node in saved if node.op == "placeholder" or UNIT not in node.meta}
        spans, classes = units.structure.units, units.structure.classes
        middle_of = {cls.class_key: spans[cls.units[len(cls.units) // 2]] for cls in classes}
        for unit in spans:
            own = units.forward[unit.start : unit.end]
            if unit.class_key is None:
                chosen |= saved.intersection(own)
                continue
            middle = middle_of[unit.class_key]
            pattern = units.forward[middle.start : middle.end]
            chosen |= {node for node, like in zip(own, pattern, strict=True) if like in saved}
        return PassResult(gm, tag_saved(gm, chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class SufficientCut:
    """No layer's backward recomputes what another unit made, or what must not be made twice.

    Rewrite:
        x1 = add(x0, b0)                  ->    x1 = add(x0, b0)  # saved
        backward of layer 1 reads x1            backward of layer 1 reads x1

    Not to be made twice are random numbers, collectives, custom operators, what jumps
    (``keep_jumps``), and what reads an input that the step overwrites. Such an input, or a view of
    it, is never saved.

    Nor is what a layer makes of frozen weights alone (``analysis.frozen``), which its backward
    makes again; nor what the program's own backward computes, be it a custom operator.
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
            for node in saved_nodes(gm)
            if storage_of(node) not in written
            and not is_copied(storage_of(node))
            and node not in remade
        }
        cut = _Cut(
            saved=saved,
            forward=set(self.units.forward),
            remade=remade,
            unit_of=_unit_of_every_node(gm, self.units),
        )
        backward = tangent_dependents(gm.graph)
        seen: set[fx.Node] = set()
        stack = [(node, source) for node in backward for source in node.all_input_nodes]
        ends = pytree.arg_tree_leaves(*gm.graph.output_node().args)[self.num_fwd_outputs :]
        stack += [(node, node) for node in ends if isinstance(node, fx.Node)]
        while stack:
            reader, node = stack.pop()
            if node in backward or cut.has(node, reader) or node in seen:
                continue
            seen.add(node)
            stack.extend((node, source) for source in node.all_input_nodes)
        return PassResult(gm, tag_saved(gm, cut.saved))


def _made_in_forward(node: fx.Node, forward: set[fx.Node]) -> set[fx.Node]:
    """``node``, or what it is made of where only the backward makes it.

    ``rstd / n`` of a normalisation is such a node, and a weight that an autograd.Function
    dequantises in its backward. Min-cut may keep it, but no layer's forward has it.
    """

    def is_made_later(made: fx.Node) -> bool:
        return made.op == "call_function" and made not in forward

    return {made for made in makers_of([node], is_made_later) if not is_made_later(made)}


def dropped_sizes(gm: fx.GraphModule, units: JointUnits) -> tuple[int, ...]:
    """What ``EqualCut`` compares with ``drops_above`` in ``gm``, each size once."""
    return tuple(sorted({2 * bytes_of(node) for node in _droppable(units, saved_nodes(gm))}))


def _droppable(units: JointUnits, saved: Iterable[fx.Node]) -> set[fx.Node]:
    """What of ``saved`` may be recomputed instead where it is too wide."""
    wide = _wide(units)
    return {node for node in saved if node in wide and not must_be_saved(node)}


def _wide(units: JointUnits) -> set[fx.Node]:
    """Tensors at least TILE_FACTOR times as large as what their unit gets from the one before.

    Attention kernels do not come in tiles, so that what one reads or makes is not among them.
    """
    found = set()
    for index, unit in enumerate(units.structure.units):
        own = units.forward[unit.start : unit.end]
        inputs = [
            bytes_of(source)
            for node in own
            for source in node.all_input_nodes
            if source.meta.get(UNIT) == index - 1
        ]
        limit = TILE_FACTOR * max(inputs, default=0)
        if limit:
            found |= {node for node in own if bytes_of(node) >= limit and not _near_attention(node)}
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


def _unit_of_every_node(joint: fx.GraphModule, units: JointUnits) -> dict[fx.Node, int]:
    """Node -> its unit: as tagged, else where the backward would run it."""
    last = units.num_units - 1
    found = {n: last - at for n, at in backward_positions(joint.graph, units.num_units).items()}
    found.update({node: node.meta[UNIT] for node in units.forward if UNIT in node.meta})
    return found


@dataclass(slots=True, kw_only=True)
class _Cut:
    """What the backward has of the forward."""

    saved: set[fx.Node]
    forward: set[fx.Node]
    remade: set[fx.Node]
    """What is made of frozen weights."""
    unit_of: Mapping[fx.Node, int]

    def has(self, node: fx.Node, reader: fx.Node) -> bool:
        """True when ``reader`` has ``node`` at hand; saves it if it must not compute it."""
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
        if crosses or must_be_saved(base) or not (is_pure(base) or base in self.remade):
            self.saved.add(base)
            return True
        return False
