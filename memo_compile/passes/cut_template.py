"""Makes a half that was cut at some sizes at others: the same calls of the same regions.

The nodes of its regions have notes of what they are at all sizes (``at_numbers``). With other
numbers in place of the symbols, a region is what cutting at those sizes gives, if all decisions on
the way are the same. That is checked: ``is_same`` compares with a half that was cut at those sizes.
"""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import fx

from memo_compile.analysis.regions import RegionGraph
from memo_compile.analysis.structure import spec_of
from memo_compile.analysis.views import is_view, storage_of, viewed
from memo_compile.errors import UnsupportedGraph
from memo_compile.passes.at_numbers import (
    SIZES,
    SymbolicNote,
    is_fixed,
    numbers_in,
    symbol_text,
    with_numbers,
)
from memo_compile.passes.cut import Cut, content_of
from memo_compile.passes.lease import HANDLE, is_given
from memo_compile.passes.separate import overlap
from memo_compile.step.problem import CallKind, Phase
from memo_compile.torch_private import fx_graphs
from memo_compile.torch_private.symbols import SizeSymbols, StaticFakes


@dataclass(eq=False, slots=True, kw_only=True)
class CutTemplate:
    """A half at some sizes of a symbolic graph, from which it is made at others."""

    cut: Cut
    symbols: SizeSymbols
    fakes: StaticFakes
    numbers: tuple[int, ...]
    """The sizes at which it was cut."""
    _regions: dict[str, "_Template"] = field(init=False)
    _half: "_Template" = field(init=False)
    _saved: dict[str, Any] = field(init=False)
    """Saved value -> its layout with symbols."""

    def __post_init__(self) -> None:
        """Raises UnsupportedGraph: not only plain calls of regions, or a number is unknown."""
        cut = self.cut
        if cut.tilings or cut.whole_calls != cut.calls or cut.layer_calls != cut.calls:
            raise UnsupportedGraph("regions run in tiles, or are cut at collectives")
        for call in cut.calls:
            layouts = cut.regions[call.region].input_layouts()
            if call.kind is not CallKind.RUN or call.into or call.reads != layouts:
                raise UnsupportedGraph(f"call {call.name} is not by its region alone")
        ends = {cut.nodes[name] for name in cut.results if name is not None and name in cut.nodes}
        for first, second in itertools.combinations(ends, 2):
            if storage_of(first) is storage_of(second) and not overlap(first, second):
                raise UnsupportedGraph("results are parts of one value, apart at these sizes")
        _require_beginnings(cut.regions)
        evaluate = self.symbols.at(self.numbers)
        self._regions = {
            name: _Template(region.gm, self.fakes, evaluate) for name, region in cut.regions.items()
        }
        self._half = _Template(cut.half_graph, self.fakes, evaluate)
        names = cut.leased if cut.phase is Phase.FORWARD else ()
        saved = {name: cut.nodes[name] for name in names if name in cut.nodes}
        self._saved = {name: _layout_of_saved(node, evaluate) for name, node in saved.items()}

    def at(self, numbers: tuple[int, ...]) -> Cut:
        """Returns the half at the sizes ``numbers``.

        Raises:
            UnsupportedGraph: an input of a region begins inside of a value.
            Exception: torch's own, if an operator refuses the sizes.
        """
        evaluate, cut = self.symbols.at(numbers), self.cut
        regions = {
            name: replace(cut.regions[name], gm=template.at(evaluate))
            for name, template in self._regions.items()
        }
        _require_beginnings(regions)
        layouts = {name: region.input_layouts() for name, region in regions.items()}
        calls = tuple(replace(call, reads=layouts[call.region]) for call in cut.calls)
        return replace(
            cut,
            regions=regions,
            calls=calls,
            whole_calls=calls,
            layer_calls=calls,
            half_graph=self._half.at(evaluate),
            nodes=self._saved_at(evaluate),
        )

    def _saved_at(self, evaluate: Callable[[Any], int]) -> dict[str, fx.Node]:
        """Returns nodes without inputs that have the saved values' layouts and notes."""
        graph = fx.Graph()
        nodes = {}
        for name, layout in self._saved.items():
            node = self.cut.nodes[name]
            copy = graph.create_node("call_function", node.target, (), {}, node.name)
            if node.target is operator.getitem:
                source, at = node.args  # of an item ``views.is_view`` also asks for the maker
                assert isinstance(source, fx.Node), "an element of a node's tuple"
                copy.args = (graph.create_node(source.op, source.target, (), {}, source.name), at)
            copy.meta = {**node.meta, "val": self.fakes.like(layout, evaluate)}
            nodes[name] = copy
        return nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSizes:
    """Other sizes of a symbolic graph than those at which it was cut."""

    symbols: SizeSymbols
    fakes: StaticFakes
    numbers: tuple[int, ...]
    """The sizes at which it was cut."""
    others: tuple[int, ...]

    @classmethod
    def of(
        cls,
        symbols: SizeSymbols,
        fakes: StaticFakes,
        numbers: tuple[int, ...],
        sizes: Sequence[Any],
    ) -> "OtherSizes | None":
        """Returns the nearest larger sizes that torch's guards admit; None: there are none.

        ``numbers`` are the sizes at which it was cut, ``sizes`` those of the inputs, with symbols.
        Only the largest of these, which mostly is the one that varies, and its equals change.
        """
        near = (symbols.near(numbers, increase, sizes) for increase in _INCREASES)
        admitted = (larger for larger in near if symbols.admits(*larger) and larger != numbers)
        others = next(admitted, None)
        if others is None:
            return None
        return cls(symbols=symbols, fakes=fakes, numbers=numbers, others=others)

    def graph(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Returns a region's graph at the other sizes.

        Raises:
            UnsupportedGraph: a number in it is no known function of the sizes.
            Exception: torch's own, if an operator refuses the sizes.
        """
        template = _Template(gm, self.fakes, self.symbols.at(self.numbers))
        return template.at(self.symbols.at(self.others))


_INCREASES = (1, 2, 8, 64)
"""What is added to a size, tried in this order: a model may require multiples."""


def _require_beginnings(regions: Mapping[str, RegionGraph]) -> None:
    """Raises UnsupportedGraph: an input of a region begins inside of a value."""
    for region in regions.values():
        for value in region.example_inputs():
            if isinstance(value, torch.Tensor) and value.storage_offset() != 0:
                raise UnsupportedGraph("an input of a region begins inside of a value")


def is_same(first: Cut, second: Cut) -> bool:
    """True for halves with the same calls of the same regions, all numbers included."""
    fields = ("calls", "arguments", "results", "leased", "handle", "tilings")
    return (
        all(getattr(first, name) == getattr(second, name) for name in fields)
        and _constants(first) == _constants(second)
        and _inputs(first.half_graph) == _inputs(second.half_graph)
        and first.regions.keys() == second.regions.keys()
        and all(
            _is_same_region(region, second.regions[name]) for name, region in first.regions.items()
        )
        and all(
            spec_of(first.nodes[name].meta["val"]) == spec_of(second.nodes[name].meta["val"])
            for name in first.leased
            if first.phase is Phase.FORWARD
        )
    )


def _constants(cut: Cut) -> dict[str, int]:
    return {name: id(value) for name, value in cut.constants.items()}


def _inputs(half: fx.GraphModule) -> list[tuple[str, str]]:
    placeholders = half.graph.find_nodes(op="placeholder")
    return [(node.name, spec_of(node.meta.get("val"))) for node in placeholders]


def _is_same_region(first: RegionGraph, second: RegionGraph) -> bool:
    """True for regions that do and are lowered to the same; their names may differ."""

    def identity(region: RegionGraph) -> tuple[object, ...]:
        kind = (region.is_backward, region.kind, region.op_by_op, region.device)
        content = content_of(region.gm, region.external_outputs, region.static_inputs)
        return kind, content, symbol_text(region.gm)

    return identity(first) == identity(second)


class _Way(Enum):
    """How a node's value at other sizes is found."""

    STAYS = auto()
    ELEMENT = auto()
    """It is an element of its source's tuple."""
    NOTED = auto()
    """Its note says size and strides with symbols."""
    VIEW = auto()
    """Its note says which elements of its source it shows."""
    DERIVED = auto()
    """Torch's operator is run on fakes."""


class _SizedNode(NamedTuple):
    """A node, and how it depends on the sizes."""

    node: fx.Node
    way: _Way
    layout: Any
    """Layout of its value with symbols."""
    numbers: tuple[Any, ...]
    """The integers among its arguments, with symbols; empty: they stay."""


class _Template:
    """A graph at some sizes, from which ``at`` makes it at others."""

    def __init__(
        self, gm: fx.GraphModule, fakes: StaticFakes, evaluate: Callable[[Any], int]
    ) -> None:
        """``evaluate`` gives the values of symbols at the sizes of ``gm``.

        Raises UnsupportedGraph: a number in it is no known function of the sizes.
        """
        self._gm, self._fakes, self._evaluate = gm, fakes, evaluate
        self._nodes = [self._sized(node) for node in gm.graph.nodes]

    def at(self, evaluate: Callable[[Any], int]) -> fx.GraphModule:
        """Returns the graph at the sizes that ``evaluate`` gives symbols. Torch may raise."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for sized in self._nodes:
            copy = fx_graphs.like_node(graph, sized.node, *_arguments(sized, copies, evaluate))
            copy.meta.update(sized.node.meta)
            copies[sized.node] = copy
            if sized.way is not _Way.STAYS:
                copy.meta["val"] = self._value(sized, copy, evaluate)
        return fx_graphs.graph_module(self._gm, graph)

    def _value(self, sized: _SizedNode, copy: fx.Node, evaluate: Callable[[Any], int]) -> Any:
        """Returns the value of ``copy``, which has its arguments already."""
        if sized.way is _Way.NOTED:
            return self._fakes.like(sized.layout, evaluate)
        if sized.way is _Way.VIEW:
            return self._fakes.view(viewed(copy).meta["val"], sized.layout, evaluate)
        if sized.way is _Way.ELEMENT:
            source, at = copy.args
            return source.meta["val"][at]  # type: ignore[union-attr]
        arguments = (copy.args, copy.kwargs)
        args, kwargs = fx.node.map_arg(arguments, lambda source: source.meta["val"])
        with self._fakes.mode:
            return copy.target(*args, **kwargs)  # type: ignore[operator]

    def _sized(self, node: fx.Node) -> _SizedNode:
        """Returns how ``node`` depends on the sizes."""
        note = self._valid_note(node)
        layout = None if note is None else note.layout
        return _SizedNode(node, self._way(node, note), layout, self._numbers(node, note))

    def _valid_note(self, node: fx.Node) -> SymbolicNote | None:
        """Returns the note of ``node`` if it holds for it: passes copy notes to other nodes."""
        note = node.meta.get(SIZES)
        if note is None:
            return None
        if not is_given(node):  # the note of an input has the arguments of its maker elsewhere
            if None in note.numbers:
                raise UnsupportedGraph(f"{node.name} has a float that depends on sizes")
            if tuple(map(self._evaluate, note.numbers)) != numbers_in(node):
                return None
        return note if _is_like(note.value, node.meta.get("val"), self._evaluate) else None

    def _numbers(self, node: fx.Node, note: SymbolicNote | None) -> tuple[Any, ...]:
        """Returns ``_SizedNode.numbers``; those of a scalar that a pass has added stay."""
        value = node.meta.get("val")
        is_number = isinstance(value, torch.Tensor) and not value.dim()
        if is_given(node) or (note is None and ("val" not in node.meta or is_number)):
            return ()
        if note is not None:
            return note.numbers
        if numbers_in(node):
            raise UnsupportedGraph(f"{node.name} has a number that no symbol says")
        return ()

    def _way(self, node: fx.Node, note: SymbolicNote | None) -> _Way:
        """Returns how the node's value follows; ``note`` is its valid note."""
        if "val" not in node.meta:
            return _Way.STAYS
        if node.target is operator.getitem:
            return _Way.ELEMENT
        if is_given(node) and note is None:
            if isinstance(node.meta["val"], torch.Tensor) and node.name != HANDLE:
                raise UnsupportedGraph(f"{node.name} is a value that no symbol says")
            return _Way.STAYS
        if note is not None and not (node.op == "call_function" and is_view(node)):
            return _Way.STAYS if is_fixed(note.value) else _Way.NOTED
        if node.op != "call_function":
            return _Way.STAYS
        if note is not None and _is_plain_view(note.value, viewed(node).meta["val"]):
            return _Way.VIEW
        return _Way.DERIVED


def _arguments(
    sized: _SizedNode, copies: Mapping[fx.Node, fx.Node], evaluate: Callable[[Any], int]
) -> Any:
    """Returns the node's arguments at other sizes, with nodes of the new graph."""
    arguments = (sized.node.args, sized.node.kwargs)
    if not sized.numbers:
        return fx.node.map_arg(arguments, copies.__getitem__)
    numbers = map(evaluate, sized.numbers)
    return with_numbers(arguments, copies, lambda _: next(numbers))


def _is_plain_view(symbolic: Any, source: Any) -> bool:
    """True for a view that is some elements of ``source`` in the noted layout.

    A dimension of one element may have any stride, so that torch must derive it.
    """
    if not isinstance(symbolic, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    is_plain = symbolic.dtype is source.dtype and not (symbolic.is_conj() or symbolic.is_neg())
    return is_plain and not any(isinstance(n, int) and n == 1 for n in symbolic.shape)


def _is_like(symbolic: Any, value: Any, evaluate: Callable[[Any], int]) -> bool:
    """True if ``value`` is ``symbolic`` at the sizes that ``evaluate`` gives symbols."""
    if isinstance(symbolic, tuple | list):
        several = isinstance(value, tuple | list) and len(value) == len(symbolic)
        return several and all(
            _is_like(*pair, evaluate) for pair in zip(symbolic, value, strict=True)
        )
    if not isinstance(symbolic, torch.Tensor):
        return not isinstance(value, torch.Tensor)
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == symbolic.dtype
        and value.device == symbolic.device
        and [*map(evaluate, symbolic.shape)] == [*value.shape]
        and [*map(evaluate, symbolic.stride())] == [*value.stride()]
    )


def _layout_of_saved(node: fx.Node, evaluate: Callable[[Any], int]) -> Any:
    """Returns the layout of a saved value with symbols. Raises UnsupportedGraph: no note has it."""
    note = node.meta.get(SIZES)
    if note is None or not _is_like(note.value, node.meta["val"], evaluate):
        raise UnsupportedGraph(f"{node.name} is saved, and no symbol says how large it is")
    return note.layout
