"""Moves what several layers share, but the first of them makes, before the layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.analysis.joint_units import forward_nodes
from memo_compile.analysis.layers import LayerStructure, find_layers
from memo_compile.analysis.purity import is_pure, is_random
from memo_compile.analysis.structure import argument, is_matmul, op_name
from memo_compile.analysis.views import makers_of

_MAX_ROUNDS = 3
"""Most rounds: each may uncover a class whose own shared values are moved in the next."""

_MAX_GUESSES = 24
"""Most distances that are tried if no layer is found: a model of two layers, one impure."""

_MAX_NODES_TO_GUESS = 3000
"""Longer sequences get no guess: they hold more than two layers, which are found without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoistInvariants:
    """The first layer is as like the others as it can be: what all read is made before them.

    Rewrite:
        layer 0: q0, k0, bias, attend(q0, k0, bias)      bias
        layer 1: q1, k1, attend(q1, k1, bias)        ->  layer 0: q0, k0, attend(q0, k0, bias)
                                                         layer 1: q1, k1, attend(q1, k1, bias)
    """

    name: ClassVar[str] = "hoist-invariants"
    is_required: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Reorder in place."""
        nodes = forward_nodes(gm)
        order = hoist_invariants(nodes)
        if order != nodes:
            apply_order(gm.graph, order)
        return PassResult(gm, order != nodes)


def hoist_invariants(nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Returns the same nodes, reordered.

    A model makes some values in its first layer and uses them in all: T5's relative bias, the
    seeds of all dropouts, a mask. They depend on no matrix product, hence on no earlier layer,
    and move to just before the run of layers that reads them.

    Nothing moves when that finds no more layers. Cost: a few times that of ``find_layers``.
    """
    order = list(nodes)
    structure = find_layers(order)
    for _ in range(_MAX_ROUNDS):
        better = _improve(order, structure)
        if better is None:
            break
        order, structure = better
    return tuple(order)


def apply_order(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Move the nodes of ``order`` in ``graph`` so that they follow each other as given.

    Other nodes keep their place; ``order`` must be topological. Linear.
    """
    later: fx.Node | None = None
    for node in reversed(order):
        if later is not None and not node < later:
            later.prepend(node)
        later = node


def _improve(
    order: list[fx.Node], structure: LayerStructure
) -> tuple[list[fx.Node], LayerStructure] | None:
    """Returns the order that lets layers cover most nodes, and its layers; None: none covers more.

    Each try moves some nodes, and what they are computed from, to the front; the best is kept.
    """
    reach = _reach(order)
    if structure.classes:
        far = _far_readers(reach, structure)
        tries = [far, far + _lone_tables(order, reach, structure)]
    else:
        tries = _guesses(reach) if len(order) <= _MAX_NODES_TO_GUESS else []
    best, most = None, structure.num_covered
    for chosen in tries:
        front = _with_sources(order, chosen)
        if front == order[: len(front)]:
            continue
        moved = set(front)
        others = [node for node in order if node not in moved]
        new_structure = find_layers(front + others)
        if new_structure.num_covered > most:
            best, most = _sink(front, others, new_structure), new_structure.num_covered
    return None if best is None else (best, find_layers(best))


def _reach(order: Sequence[fx.Node]) -> list[int]:
    """Returns how many positions behind each node its last reader stands; -1: it must not move.

    Random draws keep their order, so that the results stay those of the unchanged graph; a
    single tensor of seeds has no order to keep.
    """
    position_of = {node: position for position, node in enumerate(order)}
    seeds_move = sum(_draws(node) for node in order) <= 1
    fixed: set[fx.Node] = set()
    reach = []
    for position, node in enumerate(order):
        is_seeds = seeds_move and op_name(node) == "inductor_seeds"
        stays = is_matmul(node) or not (is_pure(node) or is_seeds)
        is_fixed = any(
            source in fixed or (source.op == "call_function" and source not in position_of)
            for source in node.all_input_nodes
        )
        if stays or is_fixed:
            fixed.add(node)
            reach.append(-1)
            continue
        readers = [position_of[user] for user in node.users if user in position_of]
        if_unread = position if node.users else position + len(order)  # dead: it may go anywhere
        reach.append(max(readers, default=if_unread) - position)
    return reach


def _draws(node: fx.Node) -> bool:
    """True when ``node`` advances the random generator; attention without dropout does not."""
    return is_random(node) and argument(node, "dropout_p") != 0.0


def _far_readers(reach: Sequence[int], structure: LayerStructure) -> list[int]:
    """Returns movable positions read a whole layer later: no value of a layer lives that long.

    The layer that counts is the one at the position, or the next one.
    """
    chosen: list[int] = []
    length = len(reach)
    for unit in reversed(structure.units):
        if unit.class_key is not None:
            length = unit.end - unit.start
        chosen += [i for i in range(unit.start, unit.end) if reach[i] >= length]
    return sorted(chosen)


def _lone_tables(
    order: Sequence[fx.Node], reach: Sequence[int], structure: LayerStructure
) -> list[int]:
    """Returns movable positions outside of layers that compute with what is made before the layers.

    The only global attention layer among local ones makes its own mask and rotary table, where
    the local ones share theirs. Views of weights and dropout masks belong to their layer.
    """
    first = next(unit.start for unit in structure.units if unit.class_key is not None)
    tables: set[fx.Node] = set()
    chosen = []
    for unit in structure.units:
        for position in range(unit.start, unit.end):
            node = order[position]
            is_dropout = op_name(node).startswith("inductor_")
            is_table = reach[position] >= 0 and not is_dropout
            from_table = any(source in tables for source in node.all_input_nodes)
            if is_table and (position < first or from_table):
                tables.add(node)
                if position >= first and unit.class_key is None:
                    chosen.append(position)
    return chosen


def _guesses(reach: Sequence[int]) -> list[list[int]]:
    """Returns sets of movable positions to try: with the farthest last reader, then ever more."""
    distances = sorted({distance for distance in reach if distance > 1}, reverse=True)
    return [
        [position for position, distance in enumerate(reach) if distance >= threshold]
        for threshold in distances[:_MAX_GUESSES]
    ]


def _with_sources(order: Sequence[fx.Node], chosen: Sequence[int]) -> list[fx.Node]:
    """Returns the nodes at positions ``chosen`` and all that they are computed from, in order."""
    inside = set(order)
    makers = makers_of((order[position] for position in chosen), lambda node: node in inside)
    return [node for node in order if node in makers]


def _sink(
    front: Sequence[fx.Node], others: Sequence[fx.Node], structure: LayerStructure
) -> list[fx.Node]:
    """Merges ``front`` into ``others``: each node just before the layers of its first reader.

    At the front of the graph they would live longer than needed: a decoder's bias through the
    encoder. ``structure`` is that of ``front + others``.
    """
    sequence = [*front, *others]
    place: dict[fx.Node, int] = {}  # where a reader is, or where its run of layers begins
    run_start: int | None = None
    for unit in structure.units:
        is_layer = unit.class_key is not None
        if is_layer and run_start is None:
            run_start = unit.start
        if not is_layer:
            run_start = None
        for position in range(max(unit.start, len(front)), unit.end):
            place[sequence[position]] = position if run_start is None else run_start
    moved_to: dict[int, list[fx.Node]] = {}
    for node in reversed(front):
        place[node] = min((place[u] for u in node.users if u in place), default=len(front))
        moved_to.setdefault(place[node], []).append(node)
    merged: list[fx.Node] = []
    for position in range(len(front), len(sequence)):
        merged += reversed(moved_to.get(position, []))
        merged.append(sequence[position])
    return merged
