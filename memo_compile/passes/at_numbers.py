"""Makes graphs at certain sizes from a joint graph whose sizes are symbols.

Rewrite, with ``numbers`` = {"primals_1": 7}:
    primals_1, primals_2: f32[2, s77], tangents_1       primals_2: f32[2, 7], tangents_1
    mul  = primals_1 * 2                                view = view(primals_2, [14])
    view = view(primals_2, [mul])                 ->    return view, grad
    return view, None, grad

Operators that compute a size are run, as eager would run them. The size and strides of every value
are those of the symbolic value at the numbers; those of a view must also be what torch derives from
its source.
"""

import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from memo_compile.analysis.joint_units import is_tangent
from memo_compile.analysis.structure import spec_of
from memo_compile.analysis.views import is_view, results_of, viewed
from memo_compile.errors import UnsupportedGraph
from memo_compile.torch_private import fx_graphs
from memo_compile.torch_private.symbols import SizeSymbols, StaticFakes, layout_of, plain

SIZES = "memo_sizes"
"""Key of ``node.meta``: the node's ``SymbolicNote``."""

_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_NOT_KEPT = frozenset({"eager_input_vals", "tensor_meta", "example_value"})
"""Keys of ``node.meta`` that hold symbolic sizes and that nothing behind AOTAutograd reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SymbolicNote:
    """A node of a symbolic joint graph: what is known of it at all sizes."""

    numbers: tuple[Any, ...]
    """The integers among its arguments, in order: numbers or expressions."""
    value: Any
    """Its ``meta["val"]``, with symbols."""
    layout: Any
    """``layout_of`` the value."""
    text: str
    """Numbers and value as text: it differs for nodes that are equal at some sizes only."""

    @staticmethod
    def of(node: fx.Node) -> "SymbolicNote":
        """Returns the note of ``node``."""
        numbers, value = numbers_in(node), node.meta["val"]
        text = f"{numbers} {spec_of(value)}"
        numbers = tuple(None if n is None else plain(n) for n in numbers)
        return SymbolicNote(numbers=numbers, value=value, layout=layout_of(value), text=text)


def is_number(value: Any) -> bool:
    """True for an integer, which may be a size; a bool may not."""
    return isinstance(value, int) and not isinstance(value, bool)


def with_numbers(value: Any, nodes: Mapping[fx.Node, fx.Node], number: Callable[[int], Any]) -> Any:
    """Returns arguments with other ``nodes``, and ``number`` of each integer among them."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return nodes[leaf]
        return number(leaf) if is_number(leaf) else leaf

    return fx.node.map_aggregate(value, changed)


def symbol_text(gm: fx.GraphModule) -> str:
    """Returns the texts of all nodes' notes; empty for a graph without symbols."""
    notes = (node.meta.get(SIZES) for node in gm.graph.nodes)
    return "\
".join("" if note is None else note.text for note in notes).strip()


@dataclass(eq=False, kw_only=True)
class SymbolicJoint:
    """A joint graph with symbolic sizes, from which ``at`` makes graphs at certain sizes."""

    gm: fx.GraphModule
    symbols: SizeSymbols
    num_fwd_outputs: int
    fakes: StaticFakes = field(default_factory=StaticFakes)
    _fixed: dict[fx.Node, Any] = field(default_factory=dict)
    """Values without a symbol, which are the same at all sizes."""
    _notes: dict[fx.Node, SymbolicNote] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises UnsupportedGraph: graphs of this kind are not made at other sizes."""
        graph = self.gm.graph
        inputs = [node for node in graph.find_nodes(op="placeholder") if not is_tangent(node)]
        results = results_of(graph)
        if any("primals" not in str(node.target) for node in inputs):
            raise UnsupportedGraph("it has inputs of torch's own")
        if len(results) != self.num_fwd_outputs + len(inputs):
            raise UnsupportedGraph("its backward returns more than gradients of its inputs")
        for node in graph.find_nodes(op="get_attr"):
            if not isinstance(getattr(self.gm, str(node.target), None), torch.Tensor):
                raise UnsupportedGraph("an operator in it is given a graph")

    @property
    def sizes(self) -> list[fx.Node]:
        """The inputs that are numbers, not tensors."""
        return list(filter(_is_number, self.gm.graph.find_nodes(op="placeholder")))

    def at(self, numbers: Mapping[str, int], symbols: tuple[int, ...]) -> fx.GraphModule:
        """Returns a new graph in which ``numbers`` stand in place of the inputs that are sizes.

        ``symbols`` are the values of ``self.symbols`` that belong to ``numbers``. Raises
        UnsupportedGraph: a value has another layout than its symbols say.
        """
        copier = _Copier(self, dict(numbers), self.symbols.at(symbols))
        for node in self.gm.graph.nodes:
            copier.copy(node)
        return fx_graphs.graph_module(self.gm, copier.graph)

    def inputs_of(self, gm: fx.GraphModule) -> tuple[list[Any], list[Any]]:
        """Returns inputs and incoming gradients of a graph that ``at`` made, for AOTAutograd."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        primals = [node.meta["val"] for node in placeholders if not is_tangent(node)]
        return primals, [node.meta["val"] for node in placeholders if is_tangent(node)]


def numbers_in(node: fx.Node) -> tuple[Any, ...]:
    """Returns ``SymbolicNote.numbers``; a float that is computed stands there as None."""
    numbers: list[Any] = []

    def collect(value: Any) -> Any:
        if isinstance(value, fx.Node) and _is_number(value):
            value = value.meta["val"]
        if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
            numbers.append(value)
        elif isinstance(value, torch.SymFloat | torch.SymBool):
            numbers.append(None)
        return value

    fx.node.map_aggregate((node.args, node.kwargs), collect)
    return tuple(numbers)


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), _NUMBERS)


class _Copier:
    """Copies a symbolic joint graph, with numbers in place of symbols."""

    def __init__(
        self, joint: SymbolicJoint, sizes: Mapping[str, int], evaluate: Callable[[Any], int]
    ) -> None:
        """``sizes`` are the inputs that are numbers, by name; ``evaluate`` is for symbols."""
        self.joint, self.sizes, self.evaluate = joint, sizes, evaluate
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, Any] = {}
        """Node -> its copy, or the number that it is."""

    def copy(self, node: fx.Node) -> None:
        """Adds a copy of ``node`` to the graph, or notes the number that it is."""
        if _is_number(node):
            self.copies[node] = self._computed(node)
            return
        if node.op == "output":
            self._finish(node)
            return
        args, kwargs = self._mapped((node.args, node.kwargs))
        copy = fx_graphs.like_node(self.graph, node, args, kwargs)
        copy.meta.update((key, note) for key, note in node.meta.items() if key not in _NOT_KEPT)
        self.copies[node] = copy
        if "val" in node.meta:
            if node not in self.joint._notes:
                self.joint._notes[node] = SymbolicNote.of(node)
            copy.meta[SIZES] = self.joint._notes[node]
            copy.meta["val"] = self._value(node, args, kwargs)

    def _mapped(self, value: Any) -> Any:
        """Returns arguments of the symbolic graph as arguments of the copy."""
        return fx.node.map_aggregate(value, self._argument)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.copies[value]
        if isinstance(value, torch.SymInt):
            return self.evaluate(value)
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise UnsupportedGraph("an argument is a symbol, and no node")
        return value

    def _computed(self, node: fx.Node) -> Any:
        """Returns the number that ``node``, a size or a computation with sizes, is."""
        if node.op == "placeholder":
            return self.sizes[node.name]
        if node.op != "call_function":
            raise UnsupportedGraph(f"{node.name} is a number that {node.op} gives")
        value = self._run(node, *self._mapped((node.args, node.kwargs)))
        if type(value) not in (bool, int, float):
            raise UnsupportedGraph(f"{node.name} is no number that is known")
        return value

    def _run(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Runs the operator of ``node`` on the values of the copied arguments."""
        args, kwargs = fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
        with self.joint.fakes.mode:
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def _value(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Returns the fake value of the copy of ``node``, which has these arguments.

        One that depends on no symbol, and is no view of one that does, is made once for all sizes.
        """
        symbolic, fixed = node.meta["val"], self.joint._fixed
        if node in fixed:
            return fixed[node]
        if node.op == "call_function" and node.target is operator.getitem:
            source, at = args
            return source.meta["val"][at]
        if is_view(node):
            value = self._run(node, args, kwargs)
            self._require_equal(node, value, symbolic)
        else:
            value = self.joint.fakes.like(self.joint._notes[node].layout, self.evaluate)
        if is_fixed(symbolic) and (not is_view(node) or viewed(node) in fixed):
            fixed[node] = value
        return value

    def _require_equal(self, node: fx.Node, value: Any, symbolic: Any) -> None:
        """Raises UnsupportedGraph unless ``value`` has the symbolic value's size and strides."""
        is_tuple = isinstance(value, tuple | list)
        for tensor, like in zip(value, symbolic, strict=True) if is_tuple else [(value, symbolic)]:
            size, stride = list(map(self.evaluate, like.shape)), map(self.evaluate, like.stride())
            dims = zip(size, tensor.stride(), stride, strict=True)
            if list(tensor.shape) != size or any(n > 1 and got != noted for n, got, noted in dims):
                raise UnsupportedGraph(f"{node.name} has another layout than its symbols say")

    def _finish(self, node: fx.Node) -> None:
        """Copies the results, without gradients of inputs that are numbers."""
        results, num_outputs = results_of(node.graph), self.joint.num_fwd_outputs
        inputs = [n for n in node.graph.find_nodes(op="placeholder") if not is_tangent(n)]
        is_kept = [True] * num_outputs + [not _is_number(source) for source in inputs]
        output = self.graph.output(self._mapped(tuple(itertools.compress(results, is_kept))))
        output.meta = dict(node.meta)
        for key in ("desc", "output_stack_traces"):
            notes = output.meta.get(key)
            if isinstance(notes, list | tuple) and len(notes) == len(results):
                output.meta[key] = type(notes)(itertools.compress(notes, is_kept))


def is_fixed(value: Any) -> bool:
    """True if all sizes and strides in ``value`` are numbers."""
    if isinstance(value, tuple | list):
        return all(map(is_fixed, value))
    if not isinstance(value, torch.Tensor):
        return True
    numbers = [*value.shape, *value.stride(), value.storage_offset()]
    return all(isinstance(number, int) for number in numbers)
