"""A joint graph whose sizes are symbols, with numbers in their place.

Rewrite, with ``numbers`` = {"primals_1": 7}:
    primals_1, primals_2: f32[2, s77], tangents_1       primals_2: f32[2, 7], tangents_1
    mul  = primals_1 * 2                                view = view(primals_2, [14])
    view = view(primals_2, [mul])                 ->    return view, grad
    return view, None, grad

What computes a size is run, as eager would run it. Every value's size and strides are those of the
symbolic value at the numbers, and of a view also those that torch derives from its source.
"""

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
"""Key of ``node.meta``: what the symbols say of the node, a ``Said``."""

_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_NOT_KEPT = frozenset({"eager_input_vals", "tensor_meta", "example_value"})
"""Notes that hold sizes and that nothing behind AOTAutograd needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A node of a symbolic joint graph."""

    numbers: tuple[Any, ...]
    """The integers among its arguments, in order: numbers or expressions."""
    value: Any
    layout: Any
    """Of ``value``, as ``layout_of``."""
    text: str
    """Both in words: what is equal at some sizes only, has other words."""

    @staticmethod
    def of(node: fx.Node) -> "Said":
        """What is to be noted of ``node``."""
        numbers, value = _numbers(node), node.meta["val"]
        text = f"{numbers} {spec_of(value)}"
        numbers = tuple(None if n is None else plain(n) for n in numbers)
        return Said(numbers=numbers, value=value, layout=layout_of(value), text=text)


def is_number(value: Any) -> bool:
    """True for what may be a size; a truth value is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def with_numbers(value: Any, nodes: Mapping[fx.Node, fx.Node], number: Callable[[int], Any]) -> Any:
    """Arguments with other ``nodes``, and ``number`` of each number among them, in order."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return nodes[leaf]
        return number(leaf) if is_number(leaf) else leaf

    return fx.node.map_aggregate(value, changed)


def words_of(gm: fx.GraphModule) -> str:
    """What the symbols say of all nodes; empty for a graph without symbols."""
    notes = (node.meta.get(SIZES) for node in gm.graph.nodes)
    return "\n".join("" if said is None else said.text for said in notes).strip()


@dataclass(eq=False, kw_only=True)
class SymbolicJoint:
    """A joint graph, its symbols, and what is the same for all numbers."""

    gm: fx.GraphModule
    symbols: SizeSymbols
    num_fwd_outputs: int
    fakes: StaticFakes = field(default_factory=StaticFakes)
    _fixed: dict[fx.Node, Any] = field(default_factory=dict)
    """Values in which there is no symbol."""
    _said: dict[fx.Node, Said] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises UnsupportedGraph: it is of a kind that is not taken apart."""
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
        """The inputs that are numbers."""
        return list(filter(_is_number, self.gm.graph.find_nodes(op="placeholder")))

    def at(self, numbers: Mapping[str, int], symbols: tuple[int, ...]) -> fx.GraphModule:
        """A graph of its own, where the inputs that are sizes have ``numbers``, and are no more.

        Raises UnsupportedGraph: a value is not what the symbols say of it.
        """
        copying = _Copying(self, dict(numbers), self.symbols.at(symbols))
        for node in self.gm.graph.nodes:
            copying.copy(node)
        return fx_graphs.graph_module(self.gm, copying.graph)

    def inputs_of(self, gm: fx.GraphModule) -> tuple[list[Any], list[Any]]:
        """Inputs and incoming gradients of a graph that ``at`` made, as AOTAutograd gives them."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        values = [(node.meta["val"], is_tangent(node)) for node in placeholders]
        return [v for v, is_last in values if not is_last], [v for v, is_last in values if is_last]


def _numbers(node: fx.Node) -> tuple[Any, ...]:
    """As ``Said.numbers``; a float that is computed stands there as None."""
    found: list[Any] = []

    def look(value: Any) -> Any:
        if isinstance(value, fx.Node) and _is_number(value):
            value = value.meta["val"]
        if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
            found.append(value)
        elif isinstance(value, torch.SymFloat | torch.SymBool):
            found.append(None)
        return value

    fx.node.map_aggregate((node.args, node.kwargs), look)
    return tuple(found)


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), _NUMBERS)


class _Copying:
    def __init__(
        self, of: SymbolicJoint, given: Mapping[str, int], number: Callable[[Any], int]
    ) -> None:
        self.of, self.given, self.number = of, given, number
        self.graph = fx.Graph()
        self.made: dict[fx.Node, Any] = {}
        """Node -> its copy, or the number that it is."""

    def copy(self, node: fx.Node) -> None:
        if _is_number(node):
            self.made[node] = self._computed(node)
            return
        if node.op == "output":
            self._finish(node)
            return
        args, kwargs = self._mapped((node.args, node.kwargs))
        made = fx_graphs.like_node(self.graph, node, args, kwargs)
        made.meta.update((key, of) for key, of in node.meta.items() if key not in _NOT_KEPT)
        self.made[node] = made
        if "val" in node.meta:
            if node not in self.of._said:
                self.of._said[node] = Said.of(node)
            made.meta[SIZES] = self.of._said[node]
            made.meta["val"] = self._value(node, args, kwargs)

    def _mapped(self, value: Any) -> Any:
        return fx.node.map_aggregate(value, self._argument)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.made[value]
        if isinstance(value, torch.SymInt):
            return self.number(value)
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise UnsupportedGraph("an argument is a symbol, and no node")
        return value

    def _computed(self, node: fx.Node) -> Any:
        """The number that ``node`` is."""
        if node.op == "placeholder":
            return self.given[node.name]
        if node.op != "call_function":
            raise UnsupportedGraph(f"{node.name} is a number that {node.op} gives")
        args, kwargs = self._mapped((node.args, node.kwargs))
        args, kwargs = fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
        with self.of.fakes.mode:
            found = node.target(*args, **kwargs)  # type: ignore[operator]
        if type(found) not in (bool, int, float):
            raise UnsupportedGraph(f"{node.name} is no number that is known")
        return found

    def _value(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        before = node.meta["val"]
        if node in self.of._fixed:
            return self.of._fixed[node]
        if node.op == "call_function" and node.target is operator.getitem:
            source, at = args
            return source.meta["val"][at]
        if is_view(node):
            args, kwargs = fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
            with self.of.fakes.mode:
                found = node.target(*args, **kwargs)  # type: ignore[operator]
            self._require_equal(node, found, before)
        else:
            found = self.of.fakes.like(self.of._said[node].layout, self.number)
        if is_fixed(before) and (not is_view(node) or viewed(node) in self.of._fixed):
            self.of._fixed[node] = found
        return found

    def _layout(self, value: torch.Tensor) -> tuple[list[int], list[int]]:
        number = self.number
        return [number(n) for n in value.shape], [number(n) for n in value.stride()]

    def _require_equal(self, node: fx.Node, found: Any, before: Any) -> None:
        several = isinstance(found, tuple | list)
        for own, symbolic in zip(found, before, strict=True) if several else [(found, before)]:
            size, stride = self._layout(symbolic)
            steps = zip(size, own.stride(), stride, strict=True)
            if list(own.shape) != size or any(n > 1 and step != said for n, step, said in steps):
                raise UnsupportedGraph(f"{node.name} has another layout than its symbols say")

    def _finish(self, node: fx.Node) -> None:
        """Without results for inputs that are numbers; these need no gradient."""
        results, first = results_of(node.graph), self.of.num_fwd_outputs
        inputs = [n for n in node.graph.find_nodes(op="placeholder") if not is_tangent(n)]
        kept = [
            at for at in range(len(results)) if at < first or not _is_number(inputs[at - first])
        ]
        made = self.graph.output(self._mapped(tuple(results[at] for at in kept)))
        made.meta = dict(node.meta)
        for key in ("desc", "output_stack_traces"):
            notes = made.meta.get(key)
            if isinstance(notes, list | tuple) and len(notes) == len(results):
                made.meta[key] = type(notes)([notes[at] for at in kept])


def is_fixed(value: Any) -> bool:
    """True where sizes and strides are numbers."""
    if isinstance(value, tuple | list):
        return all(map(is_fixed, value))
    if not isinstance(value, torch.Tensor):
        return True
    numbers = [*value.shape, *value.stride(), value.storage_offset()]
    return all(isinstance(number, int) for number in numbers)
