"""A half that was cut at some sizes, cut again at others: the same calls of the same regions.

The nodes of its regions note what the symbols of the joint graph say of them (``at_numbers``). With
other numbers in the place of the symbols, each region is what cutting at those sizes gives, where
the decisions on the way are the same. That is not taken for granted: ``is_same`` compares with a
step that went all the way.
"""

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from memo_compile import shim
from memo_compile.analysis.regions import RegionGraph
from memo_compile.analysis.structure import spec_of
from memo_compile.analysis.views import is_view, storage_of, viewed
from memo_compile.errors import UnsupportedGraph
from memo_compile.passes.at_numbers import SIZES, Said, is_fixed, words_of
from memo_compile.passes.cut import Cut, CutCall, content_of
from memo_compile.passes.lease import HANDLE, is_given
from memo_compile.passes.separate import overlap
from memo_compile.shim_symbols import SizeSymbols, StaticFakes
from memo_compile.step.problem import CallKind, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTemplate:
    """A half at some sizes of a symbolic graph, from which it is made at others."""

    cut: Cut
    symbols: SizeSymbols
    fakes: StaticFakes
    numbers: tuple[int, ...]
    """The sizes at which it was cut."""

    def __post_init__(self) -> None:
        """Raises UnsupportedGraph: there is more to it than calls of regions."""
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

    def _reads(self, call: CutCall) -> Any:
        return self.cut.regions[call.region].input_layouts()

    def at(self, numbers: tuple[int, ...]) -> Cut:
        """The half at ``numbers``.

        Raises:
            UnsupportedGraph: a number in it is no function of the sizes that is known.
            Exception: torch's own, where an operator refuses the sizes.
        """
        number, before = self.symbols.at(numbers), self.symbols.at(self.numbers)

        def again(gm: fx.GraphModule) -> fx.GraphModule:
            return _Again(gm, self.fakes, before, number).gm

        cut = self.cut
        regions = {name: replace(of, gm=again(of.gm)) for name, of in cut.regions.items()}
        _require_beginnings(regions)
        layouts = {name: region.input_layouts() for name, region in regions.items()}
        calls = tuple(replace(call, reads=layouts[call.region]) for call in cut.calls)
        saved = set(cut.leased) & cut.nodes.keys() if cut.phase is Phase.FORWARD else ()
        nodes = {name: _node_again(cut.nodes[name], self.fakes, before, number) for name in saved}
        return replace(
            cut,
            regions=regions,
            calls=calls,
            whole_calls=calls,
            layer_calls=calls,
            half_graph=again(cut.half_graph),
            nodes=nodes,
        )


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
        return _Again(
            gm, self.fakes, self.symbols.at(self.numbers), self.symbols.at(self.others)
        ).gm


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


class _Again:
    """A graph with other numbers, its values as torch derives them."""

    def __init__(
        self,
        gm: fx.GraphModule,
        fakes: StaticFakes,
        before: Callable[[Any], int],
        number: Callable[[Any], int],
    ) -> None:
        self.fakes, self.before, self.number = fakes, before, number
        self.made: dict[fx.Node, fx.Node] = {}
        graph = fx.Graph()
        for node in gm.graph.nodes:
            said = self._said(node)
            made = shim.like_node(graph, node, *self._arguments(node, said))
            made.meta = dict(node.meta)
            self.made[node] = made
            if "val" in node.meta:
                made.meta["val"] = self._value(node, made, said)
        self.gm = shim.graph_module(gm, graph)

    def _said(self, node: fx.Node) -> Said | None:
        """What is noted of ``node``, where it is true of it still: passes copy notes."""
        said = node.meta.get(SIZES)
        if said is None:
            return None
        if not is_given(node):  # an input notes what made it elsewhere
            own = [n for n in _leaves(node) if isinstance(n, int) and not isinstance(n, bool)]
            if None in said.numbers:
                raise UnsupportedGraph(f"{node.name} has a float that depends on sizes")
            if [*map(self.before, said.numbers)] != own:
                return None
        return said if _is_like(said.value, node.meta.get("val"), self.before) else None

    def _arguments(self, node: fx.Node, said: Said | None) -> Any:
        value = node.meta.get("val")
        is_number = isinstance(value, torch.Tensor) and not value.dim()
        stays = is_given(node) or (said is None and ("val" not in node.meta or is_number))
        numbers = map(self.number, () if said is None or is_given(node) else said.numbers)

        def changed(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return self.made[value]
            if stays or not isinstance(value, int) or isinstance(value, bool):
                return value
            if said is None:
                raise UnsupportedGraph(f"{node.name} has a number that no symbol says")
            return next(numbers)

        return fx.node.map_aggregate((node.args, node.kwargs), changed)

    def _value(self, node: fx.Node, made: fx.Node, said: Said | None) -> Any:
        value = node.meta["val"]
        if node.target is operator.getitem:
            source, at = made.args
            return source.meta["val"][at]  # type: ignore[union-attr]
        if is_given(node) and said is None:
            if isinstance(value, torch.Tensor) and node.name != HANDLE:
                raise UnsupportedGraph(f"{node.name} is a value that no symbol says")
            return value
        if said is not None and not (node.op == "call_function" and is_view(node)):
            return value if is_fixed(said.value) else self.fakes.like(said.value, self.number)
        if node.op != "call_function":
            return value
        if said is not None and _is_plain_view(said.value, viewed(made).meta["val"]):
            return self.fakes.view(viewed(made).meta["val"], said.value, self.number)
        args, kwargs = fx.node.map_arg((made.args, made.kwargs), lambda of: of.meta["val"])
        with self.fakes.mode:
            return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_plain_view(said: Any, source: Any) -> bool:
    """True for elements of ``source`` in the layout that the symbols say.

    The stride of a dimension of one element is any number: then torch is asked.
    """
    if not isinstance(said, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    is_seen_alike = said.dtype is source.dtype and not (said.is_conj() or said.is_neg())
    return is_seen_alike and not any(isinstance(n, int) and n == 1 for n in said.shape)


def _leaves(node: fx.Node) -> Iterator[Any]:
    found: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), lambda value: found.append(value))
    return iter(found)


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


def _node_again(
    node: fx.Node,
    fakes: StaticFakes,
    before: Callable[[Any], int],
    number: Callable[[Any], int],
) -> fx.Node:
    """A node by itself, for what is read of a saved value: its layout, and where it comes from."""
    graph = fx.Graph()
    made = graph.create_node("call_function", node.target, (), {}, node.name)
    if node.target is operator.getitem:
        source, at = node.args
        assert isinstance(source, fx.Node), "an element of what a node makes"
        made.args = (graph.create_node(source.op, source.target, (), {}, source.name), at)
    said = node.meta.get(SIZES)
    if said is None or not _is_like(said.value, node.meta["val"], before):
        raise UnsupportedGraph(f"{node.name} is saved, and no symbol says how large it is")
    made.meta = {**node.meta, "val": fakes.like(said.value, number)}
    return made
