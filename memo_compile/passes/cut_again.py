"""A half that was cut at some sizes, cut again at others: the same calls of the same regions.

The nodes of its regions note what the symbols of the joint graph say of them (``at_numbers``). With
other numbers in the place of the symbols, each region is what cutting at those sizes gives, where
the decisions on the way are the same. That is not taken for granted: ``is_same`` compares with a
step that went all the way.
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
from memo_compile.passes.at_numbers import SIZES, Said, is_fixed, is_number, with_numbers, words_of
from memo_compile.passes.cut import Cut, CutCall, content_of
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
    """Of each saved value what the symbols say."""

    def __post_init__(self) -> None:
        """Raises UnsupportedGraph: there is more to it than calls of regions.

        Or a number in it is no function of the sizes that is known.
        """
        cut = self.cut
        if cut.tilings or cut.whole_calls != cut.calls or cut.layer_calls != cut.calls:
            raise UnsupportedGraph("regions run in tiles, or are cut at collectives")
        for call in cut.calls:
            if call.kind is not CallKind.RUN or call.into or call.reads != self._reads(call):
                raise UnsupportedGraph(f"call {call.name} is not by its region alone")
        ends = {cut.nodes[name] for name in cut.results if name is not None and name in cut.nodes}
        for first, second in itertools.combinations(ends, 2):
            if storage_of(first) is storage_of(second) and not overlap(first, second):
                raise UnsupportedGraph("results are parts of one value, apart at these sizes")
        _require_beginnings(cut.regions)
        number = self.symbols.at(self.numbers)
        self._regions = {
            name: _Template(of.gm, self.fakes, number) for name, of in cut.regions.items()
        }
        self._half = _Template(cut.half_graph, self.fakes, number)
        names = cut.leased if cut.phase is Phase.FORWARD else ()
        saved = {name: cut.nodes[name] for name in names if name in cut.nodes}
        self._saved = {name: _layout_of_saved(node, number) for name, node in saved.items()}

    def _reads(self, call: CutCall) -> Any:
        return self.cut.regions[call.region].input_layouts()

    def at(self, numbers: tuple[int, ...]) -> Cut:
        """The half at ``numbers``.

        Raises:
            UnsupportedGraph: a region is given what begins inside of a value.
            Exception: torch's own, where an operator refuses the sizes.
        """
        number, cut = self.symbols.at(numbers), self.cut
        regions = {
            name: replace(cut.regions[name], gm=template.at(number))
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
            half_graph=self._half.at(number),
            nodes=self._saved_at(number),
        )

    def _saved_at(self, number: Callable[[Any], int]) -> dict[str, fx.Node]:
        """Saved values by themselves: their layouts, and where they come from."""
        graph = fx.Graph()
        found = {}
        for name, layout in self._saved.items():
            node = self.cut.nodes[name]
            made = graph.create_node("call_function", node.target, (), {}, node.name)
            if node.target is operator.getitem:
                source, at = node.args
                assert isinstance(source, fx.Node), "an element of what a node makes"
                made.args = (graph.create_node(source.op, source.target, (), {}, source.name), at)
            made.meta = {**node.meta, "val": self.fakes.like(layout, number)}
            found[name] = made
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSizes:
    """Sizes of a symbolic graph at which nothing was cut yet, beside those at which it was."""

    symbols: SizeSymbols
    fakes: StaticFakes
    numbers: tuple[int, ...]
    """Those at which it was cut."""
    others: tuple[int, ...]

    @classmethod
    def of(
        cls,
        symbols: SizeSymbols,
        fakes: StaticFakes,
        numbers: tuple[int, ...],
        sizes: Sequence[Any],
    ) -> "OtherSizes | None":
        """The nearest at which all that torch assumes holds; None: there are none.

        What differs in a region is then a function of one of the inputs' ``sizes``: the largest,
        which mostly is the one that varies, and those that equal it.
        """
        near = (symbols.near(numbers, more, sizes) for more in _MORE)
        admitted = (others for others in near if symbols.admits(*others) and others != numbers)
        found = next(admitted, None)
        if found is None:
            return None
        return cls(symbols=symbols, fakes=fakes, numbers=numbers, others=found)

    def again(self, gm: fx.GraphModule) -> fx.GraphModule:
        """A region's graph at the other sizes.

        Raises:
            UnsupportedGraph: a number in it is no function of the sizes that is known.
            Exception: torch's own, where an operator refuses the sizes.
        """
        template = _Template(gm, self.fakes, self.symbols.at(self.numbers))
        return template.at(self.symbols.at(self.others))


_MORE = (1, 2, 8, 64)
"""What is added to a size for another: a model may ask for multiples."""


def _require_beginnings(regions: Mapping[str, RegionGraph]) -> None:
    """Raises UnsupportedGraph: a region is given what begins inside of a value.

    Calls say in which layout they read, and count that from the value's beginning.
    """
    for region in regions.values():
        for value in region.example_inputs():
            if isinstance(value, torch.Tensor) and value.storage_offset() != 0:
                raise UnsupportedGraph("an input of a region begins inside of a value")


def is_same(first: Cut, second: Cut) -> bool:
    """True for halves with the same calls of the same regions, number by number."""
    return (
        first.calls == second.calls
        and first.arguments == second.arguments
        and first.results == second.results
        and first.leased == second.leased
        and first.handle == second.handle
        and first.tilings == second.tilings
        and _constants(first) == _constants(second)
        and _inputs(first.half_graph) == _inputs(second.half_graph)
        and first.regions.keys() == second.regions.keys()
        and all(_is_same_region(of, second.regions[name]) for name, of in first.regions.items())
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
    contents = (content_of(of.gm, of.external_outputs, of.static_inputs) for of in (first, second))
    words = [words_of(of.gm) for of in (first, second)]
    kinds = ((of.is_backward, of.kind, of.op_by_op, of.device) for of in (first, second))
    is_like = next(contents) == next(contents) and next(kinds) == next(kinds)
    return is_like and words[0] == words[1]


class _Way(Enum):
    """How a node's value is found at other sizes."""

    STAYS = auto()
    ELEMENT = auto()
    """It is one of those of its source."""
    SAID = auto()
    """The symbols say it."""
    VIEW = auto()
    """They say how it lies in its source."""
    DERIVED = auto()
    """Torch's operator is asked."""


class _Kept(NamedTuple):
    """A node, and what changes with the sizes."""

    node: fx.Node
    way: _Way
    layout: Any
    """What the symbols say of its value."""
    numbers: tuple[Any, ...]
    """What they say of the numbers among its arguments; empty: these stay."""


class _Template:
    """A graph at some sizes, from which it is made at others, its values as torch derives them."""

    def __init__(
        self, gm: fx.GraphModule, fakes: StaticFakes, number: Callable[[Any], int]
    ) -> None:
        """``number`` evaluates the symbols at the sizes of ``gm``.

        Raises UnsupportedGraph: a number in it is no function of the sizes that is known.
        """
        self._gm, self._fakes, self._number = gm, fakes, number
        self._nodes = [self._kept(node) for node in gm.graph.nodes]

    def at(self, number: Callable[[Any], int]) -> fx.GraphModule:
        """The graph at the sizes for which ``number`` evaluates the symbols.

        Raises Exception: torch's own, where an operator refuses the sizes.
        """
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        for kept in self._nodes:
            new = fx_graphs.like_node(graph, kept.node, *_arguments(kept, made, number))
            new.meta.update(kept.node.meta)
            made[kept.node] = new
            if kept.way is not _Way.STAYS:
                new.meta["val"] = self._value(kept, new, number)
        return fx_graphs.graph_module(self._gm, graph)

    def _value(self, kept: _Kept, new: fx.Node, number: Callable[[Any], int]) -> Any:
        if kept.way is _Way.SAID:
            return self._fakes.like(kept.layout, number)
        if kept.way is _Way.VIEW:
            return self._fakes.view(viewed(new).meta["val"], kept.layout, number)
        if kept.way is _Way.ELEMENT:
            source, at = new.args
            return source.meta["val"][at]  # type: ignore[union-attr]
        args, kwargs = fx.node.map_arg((new.args, new.kwargs), lambda of: of.meta["val"])
        with self._fakes.mode:
            return new.target(*args, **kwargs)  # type: ignore[operator]

    def _kept(self, node: fx.Node) -> _Kept:
        said = self._said(node)
        way = self._way(node, said)
        layout = None if said is None else said.layout
        return _Kept(node=node, way=way, layout=layout, numbers=self._numbers(node, said))

    def _said(self, node: fx.Node) -> Said | None:
        """What is noted of ``node``, where it is true of it still: passes copy notes."""
        said = node.meta.get(SIZES)
        if said is None:
            return None
        if not is_given(node):  # an input notes what made it elsewhere
            if None in said.numbers:
                raise UnsupportedGraph(f"{node.name} has a float that depends on sizes")
            if [*map(self._number, said.numbers)] != _numbers(node):
                return None
        return said if _is_like(said.value, node.meta.get("val"), self._number) else None

    def _numbers(self, node: fx.Node, said: Said | None) -> tuple[Any, ...]:
        """As ``_Kept.numbers``."""
        value = node.meta.get("val")
        is_number = isinstance(value, torch.Tensor) and not value.dim()
        if is_given(node) or (said is None and ("val" not in node.meta or is_number)):
            return ()
        if said is not None:
            return said.numbers
        if _numbers(node):
            raise UnsupportedGraph(f"{node.name} has a number that no symbol says")
        return ()

    def _way(self, node: fx.Node, said: Said | None) -> _Way:
        if "val" not in node.meta:
            return _Way.STAYS
        if node.target is operator.getitem:
            return _Way.ELEMENT
        if is_given(node) and said is None:
            if isinstance(node.meta["val"], torch.Tensor) and node.name != HANDLE:
                raise UnsupportedGraph(f"{node.name} is a value that no symbol says")
            return _Way.STAYS
        if said is not None and not (node.op == "call_function" and is_view(node)):
            return _Way.STAYS if is_fixed(said.value) else _Way.SAID
        if node.op != "call_function":
            return _Way.STAYS
        if said is not None and _is_plain_view(said.value, viewed(node).meta["val"]):
            return _Way.VIEW
        return _Way.DERIVED


def _arguments(kept: _Kept, made: Mapping[fx.Node, fx.Node], number: Callable[[Any], int]) -> Any:
    """Its arguments, with nodes of the new graph, and other numbers."""
    given = (kept.node.args, kept.node.kwargs)
    if not kept.numbers:
        return fx.node.map_arg(given, made.__getitem__)
    numbers = map(number, kept.numbers)
    return with_numbers(given, made, lambda _: next(numbers))


def _is_plain_view(said: Any, source: Any) -> bool:
    """True for elements of ``source`` in the layout that the symbols say.

    The stride of a dimension of one element is any number: then torch is asked.
    """
    if not isinstance(said, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    is_seen_alike = said.dtype is source.dtype and not (said.is_conj() or said.is_neg())
    return is_seen_alike and not any(isinstance(n, int) and n == 1 for n in said.shape)


def _numbers(node: fx.Node) -> list[int]:
    """Those among its arguments, in order."""
    found: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), lambda value: found.append(value))
    return list(filter(is_number, found))


def _is_like(said: Any, value: Any, number: Callable[[Any], int]) -> bool:
    """True where ``value`` is what the symbols say."""
    if isinstance(said, tuple | list):
        several = isinstance(value, tuple | list) and len(value) == len(said)
        return several and all(_is_like(*pair, number) for pair in zip(said, value, strict=True))
    if not isinstance(said, torch.Tensor):
        return not isinstance(value, torch.Tensor)
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == said.dtype
        and value.device == said.device
        and [*map(number, said.shape)] == [*value.shape]
        and [*map(number, said.stride())] == [*value.stride()]
    )


def _layout_of_saved(node: fx.Node, number: Callable[[Any], int]) -> Any:
    """What the symbols say of a value, which ``number`` evaluates as it is."""
    said = node.meta.get(SIZES)
    if said is None or not _is_like(said.value, node.meta["val"], number):
        raise UnsupportedGraph(f"{node.name} is saved, and no symbol says how large it is")
    return said.layout
