"""Cuts one half of the step into regions and writes the graph that calls them.

Rewrite (positions in brackets):
    a = embedding(w, ids)   [0]        x   = prologue(w, ids)
    b = mm(a, w1)           [1]        y   = layer_0(x, w1)
    c = relu(b)             [1]   ->   z   = layer_0(y, w2)
    d = mm(c, w2)           [2]        out = epilogue(z)
    e = relu(d)             [2]
    f = sum(e)              [3]

Only whole tensors cross a border, and they cross as their reader sees them: where a layer reads
``view(a, [2, 32, 64])`` and ``a`` is a matrix product of the epilogue, the region's input is that
view, made between the calls, so that the last layer's region is the same as the others'. Each
region makes views of the step's own inputs, expanded tensors and constants itself. Two regions with
the same text are one region, called twice; if sizes are those of a symbolic graph (``at_numbers``),
the texts must be equal at all sizes.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from memo_runtime import ops
from torch import fx

from memo_compile.analysis.purity import has_effect, is_constant, runs_once
from memo_compile.analysis.regions import RegionGraph, layout_of
from memo_compile.analysis.splittable import may_reuse_input, split_collectives
from memo_compile.analysis.structure import begins_at, op_name, spec_of
from memo_compile.analysis.views import (
    base_of,
    is_movable_view,
    is_tensor,
    makers_of,
    results_of,
    storage_of,
)
from memo_compile.passes.at_numbers import symbol_text
from memo_compile.passes.attention_cut import beside_attention
from memo_compile.passes.collective_cut import CutPiece, pieces
from memo_compile.passes.extract import copied
from memo_compile.passes.lease import HANDLE, is_given
from memo_compile.step.problem import CallKind, Layouts, Phase
from memo_compile.step.tilings import Tiling
from memo_compile.torch_private import fx_graphs

KERNEL_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CutInto:
    """An output that is written into an existing value, from byte ``offset_bytes`` of it on."""

    output: int
    value: str
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CutCall:
    """One call of a region, by names of values."""

    name: str
    region: str
    position: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reads: Layouts
    """The layout in which each input is read, counted from where its value begins."""
    into: tuple[CutInto, ...] = ()
    kind: CallKind = CallKind.RUN
    waits_for: str | None = None
    """COMM_WAIT: the name of the ISSUE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One half of the step: its regions, their calls in order, and the graph that calls them."""

    phase: Phase
    regions: Mapping[str, RegionGraph]
    calls: tuple[CutCall, ...]
    arguments: tuple[str, ...]
    """Values of the placeholders, in order; the handle is among a backward's."""
    results: tuple[str | None, ...]
    """Values that the half returns, in order."""
    leased: tuple[str, ...]
    """FORWARD: the values that stay in the frame, in order. BACKWARD: those fetched from it."""
    handle: str
    """The handle: a result of the forward's lease, an argument of the backward."""
    constants: Mapping[str, Any]
    """Tensors that are attributes of the graph's module (get_attr)."""
    half_graph: fx.GraphModule
    nodes: Mapping[str, fx.Node] = field(default_factory=dict)
    """Value -> the node that makes it, for reports."""
    layer_calls: tuple[CutCall, ...] = ()
    """One call for each position, as if there were no collectives and no tiles."""
    layer_regions: Mapping[str, RegionGraph] = field(default_factory=dict)
    """The regions of ``layer_calls`` that are not among ``regions``."""
    whole_calls: tuple[CutCall, ...] = ()
    """The calls before any region was cut into tiles."""
    tilings: Mapping[str, Tiling] = field(default_factory=dict)
    """Region -> how it runs in tiles, for the checker."""
    whole_regions: Mapping[str, RegionGraph] = field(default_factory=dict)
    """The regions that run in tiles, whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRequest:
    """A half's graph to cut, with the position of every node."""

    gm: fx.GraphModule
    positions: Mapping[fx.Node, int]
    phase: Phase
    static_inputs: frozenset[str]
    """Names of placeholders that are parameters or buffers."""
    device: torch.device
    names: Mapping[int, str]
    """Position -> name of its region in dumps, such as ``layer0_fwd``."""
    joins: bool = False
    """Collectives begin later if that saves memory, see ``collective_cut.pieces``."""
    by_heads: bool = False
    """Layers are cut beside their attention, which is to run in tiles of heads."""


def cut(request: CutRequest) -> Cut:
    """Cuts the half into regions and calls. Cost: linear in the size of the graph."""
    return _Cutter(request).run()


class _Cutter:
    """Cuts one half: its nodes into places (a call each), these into pieces at collectives."""

    def __init__(self, request: CutRequest) -> None:
        self.request = request
        self.graph = request.gm.graph
        self.prefix = "" if request.phase is Phase.FORWARD else "bwd:"
        """Of names of values, since both halves may have a node of one name."""
        self.results = results_of(self.graph)
        self.leases = self.graph.find_nodes(op="call_function", target=ops.lease)
        self.fetches = self.graph.find_nodes(op="call_function", target=ops.fetch)
        results = (n for n in self.results if isinstance(n, fx.Node) and n.target is not ops.lease)
        self.external = set(map(_storage_maker, results))
        """The makers of the storages of results, which lie in ordinary memory."""
        self.waits = split_collectives(self.graph.nodes)
        self.positions = _with_views_at_their_source(request)
        for issue, wait in self.waits.items():
            self.positions[wait] = self.positions[issue]

    def run(self) -> Cut:
        """Cuts at positions first, the places at their collectives and beside attention."""
        places = self._places()
        layers = _Calls(self, self.positions, places)
        layer_calls = layers.run()
        if not self.waits and not self.request.by_heads:
            return self._assemble(layer_calls, layers.regions)
        parts = self._parts(places, layers.handed_over)
        part_of = {node: at for at, part in enumerate(parts) for node in part.nodes}
        part_calls = _Calls(self, {**self.positions, **part_of}, parts)
        result = self._assemble(part_calls.run(), part_calls.regions)
        return replace(result, layer_calls=tuple(layer_calls), layer_regions=layers.regions)

    def _places(self) -> list["_Place"]:
        """Returns a place for each position, with its nodes."""
        nodes_at: dict[int, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if node.op == "call_function" and node.target not in (ops.lease, ops.fetch):
                nodes_at.setdefault(self.positions[node], []).append(node)
        names = self.request.names
        return [
            _Place(
                at=position,
                position=position,
                nodes=tuple(nodes_at[position]),
                base=names.get(position, "region"),
                name=f"{names.get(position, 'region')}@{position}",
            )
            for position in sorted(nodes_at)
        ]

    def _parts(self, places: Sequence["_Place"], handed_over: set[fx.Node]) -> list["_Place"]:
        """Returns the places, cut at their collectives; ``handed_over`` are results of places."""
        parts: list[_Place] = []
        for place in places:
            cut_pieces = self._pieces(place, handed_over)
            if len(cut_pieces) == 1:
                parts.append(replace(place, at=len(parts)))
                continue
            for number, piece in enumerate(cut_pieces):
                name = op_name(piece.nodes[0]) if piece.kind is CallKind.ISSUE else "part"
                name = "wait" if piece.kind is CallKind.COMM_WAIT else name
                part = _Place(
                    at=len(parts),
                    position=place.position,
                    nodes=piece.nodes,
                    base=f"{place.base}.{name}",
                    name=f"{place.name}.{number}",
                    kind=piece.kind,
                )
                parts.append(part)
        return parts

    def _pieces(self, place: "_Place", handed_over: set[fx.Node]) -> list[CutPiece]:
        """Returns the pieces of a place, in order."""
        request = self.request
        if self.waits.keys().isdisjoint(place.nodes):
            cut_pieces = [CutPiece(kind=place.kind, nodes=place.nodes)]
        else:
            cut_pieces = pieces(place.nodes, self.waits, handed_over, joins=request.joins)
        if not request.by_heads:
            return cut_pieces
        return [
            replace(piece, nodes=nodes)
            for piece in cut_pieces
            for nodes in beside_attention(piece.nodes, request.phase, request.static_inputs)
        ]

    def value(self, node: fx.Node) -> str:
        """Returns the step-wide name of the value that ``node`` makes."""
        return node.name if is_given(node) else self.prefix + node.name

    def _assemble(self, calls: list[CutCall], regions: Mapping[str, RegionGraph]) -> Cut:
        """Returns the cut half; ``calls`` stand for the layers' and the whole ones as well."""
        leased = [source for lease in self.leases for source in lease.all_input_nodes]
        placeholders = self.graph.find_nodes(op="placeholder")
        constants = {
            node.name: getattr(self.request.gm, str(node.target))
            for node in self.graph.find_nodes(op="get_attr")
            if is_tensor(node)
        }
        results = tuple(
            self.value(node) if isinstance(node, fx.Node) else None for node in self.results
        )
        return Cut(
            phase=self.request.phase,
            regions=regions,
            calls=tuple(calls),
            whole_calls=tuple(calls),
            layer_calls=tuple(calls),
            arguments=tuple(node.name for node in placeholders),
            results=results,
            leased=tuple(self.value(node) for node in leased or self.fetches),
            handle=self.value(self.leases[0]) if self.leases else HANDLE,
            constants=constants,
            half_graph=_half_graph(self, calls, results),
            nodes={self.value(n): n for n in self.graph.nodes if n.op == "call_function"},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The nodes that one call runs."""

    at: int
    """Its index among all places."""
    position: int
    """The position of the half that it belongs to."""
    nodes: tuple[fx.Node, ...]
    base: str
    """Name of its region."""
    name: str
    """Name of the call."""
    kind: CallKind = CallKind.RUN


class _Calls:
    """The calls of some places, and their distinct regions."""

    def __init__(
        self, cutter: _Cutter, positions: Mapping[fx.Node, int], places: Sequence[_Place]
    ) -> None:
        self.cutter = cutter
        self.request = cutter.request
        self.positions = positions
        self.places = places
        self.regions: dict[str, RegionGraph] = {}
        self.region_of_content: dict[str, str] = {}
        """Text of what a region is -> its name."""
        self.issues: dict[fx.Node, CutCall] = {}
        """Collective -> its call."""
        computing = [place for place in places if place.kind is CallKind.RUN]
        self.borders = {place: _Border(self, place) for place in computing}
        inputs = (node for border in self.borders.values() for node in border.inputs)
        self.handed_over = set(map(base_of, inputs))
        """Nodes whose values other places, collectives, the lease or the user read."""
        self.handed_over.update(node for lease in cutter.leases for node in lease.all_input_nodes)
        self.handed_over.update(node for node in cutter.results if isinstance(node, fx.Node))
        for place in places:
            if place.kind is CallKind.ISSUE:
                self.handed_over.add(base_of(place.nodes[0].all_input_nodes[0]))

    def run(self) -> list[CutCall]:
        """Returns the calls in order, without those whose results nobody reads."""
        makers = {
            CallKind.RUN: self._call,
            CallKind.ISSUE: self._issue,
            CallKind.COMM_WAIT: self._wait,
        }
        calls = (makers[place.kind](place) for place in self.places)
        return [call for call in calls if call is not None]

    def _call(self, place: _Place) -> CutCall | None:
        """Returns the call of a place that computes; None: nobody reads its results."""
        border = self.borders[place]
        outputs = [node for node in border.nodes if node in self.handed_over]
        effects = any(has_effect(node) for node in border.nodes)
        if not outputs and not effects:
            return None
        gm, inputs = border.extract(outputs)
        makers = enumerate(map(_storage_maker, outputs))
        external = frozenset(index for index, maker in makers if maker in self.cutter.external)
        return CutCall(
            name=place.name,
            region=self._region(place, gm, self._static(inputs), external),
            position=place.position,
            inputs=tuple(self.cutter.value(base_of(node)) for node in inputs),
            reads=tuple(layout_of(node.meta["val"]) for node in inputs),
            outputs=tuple(self.cutter.value(node) for node in outputs),
        )

    def _issue(self, place: _Place) -> CutCall:
        """Returns the call that begins a collective."""
        (issue,) = place.nodes
        (source,) = issue.all_input_nodes
        part = copied(self.request.gm, [source], [issue])
        part.finish([issue])
        is_external = self.cutter.waits[issue] in self.cutter.external
        external = frozenset([0] if is_external else [])
        in_place = not is_external and may_reuse_input(issue)
        call = CutCall(
            name=place.name,
            region=self._region(
                place, part.gm, self._static([source]), external, may_reuse_input=in_place
            ),
            position=place.position,
            inputs=(self.cutter.value(base_of(source)),),
            reads=(layout_of(source.meta["val"]),),
            outputs=(self.cutter.value(issue),),
            kind=CallKind.ISSUE,
        )
        self.issues[issue] = call
        return call

    def _wait(self, place: _Place) -> CutCall:
        """Returns the call that waits for a collective: it holds its output and its input."""
        (wait,) = place.nodes
        (issue,) = wait.all_input_nodes
        (source,) = issue.all_input_nodes
        part = copied(self.request.gm, [issue, source], [wait])
        part.finish([wait])
        issued = self.issues[issue]
        return CutCall(
            name=place.name,
            region=self._region(place, part.gm, ()),
            position=place.position,
            inputs=(*issued.outputs, *issued.inputs),
            reads=(layout_of(issue.meta["val"]), *issued.reads),
            outputs=(self.cutter.value(wait),),
            kind=CallKind.COMM_WAIT,
            waits_for=issued.name,
        )

    def _static(self, inputs: Sequence[fx.Node]) -> tuple[int, ...]:
        """Returns the positions of ``inputs`` that are parameters, buffers or constants."""
        static = self.request.static_inputs
        return tuple(
            index
            for index, node in enumerate(inputs)
            if node.name in static or node.op == "get_attr"
        )

    def _region(
        self,
        place: _Place,
        gm: fx.GraphModule,
        static: tuple[int, ...],
        external: frozenset[int] = frozenset(),
        *,
        may_reuse_input: bool = False,
    ) -> str:
        """Returns the name of the place's region, which is added if no other place has the same."""
        content = f"{content_of(gm, external, static)} {symbol_text(gm)}"
        if place.kind is not CallKind.RUN:
            content = f"{place.kind.value} {may_reuse_input} {content}"
        if content not in self.region_of_content:
            name = unique_name(place.base, self.regions, "_")
            self.region_of_content[content] = name
            self.regions[name] = RegionGraph(
                name=name,
                gm=gm,
                external_outputs=external,
                static_inputs=static,
                is_backward=self.request.phase is Phase.BACKWARD,
                device=self.request.device,
                kind=place.kind,
                may_reuse_input=may_reuse_input,
            )
        return self.region_of_content[content]


class _Border:
    """One place: its nodes, and the values that it reads from elsewhere."""

    def __init__(self, calls: _Calls, place: _Place) -> None:
        self.calls = calls
        self.at = place.at
        self.nodes = place.nodes
        self.inputs: dict[fx.Node, None] = {}
        for node in sorted(self.nodes, key=self._each_region_makes):
            for source in node.all_input_nodes:
                self._reach(source)

    def _each_region_makes(self, node: fx.Node) -> bool:
        """True for a constant or view that each region makes itself, directly before it reads it.

        The region that holds the node does so too, so that its order is that of the others.
        """
        if is_constant(node):
            return True
        if not is_movable_view(node) or is_given(node):
            return False
        base = base_of(node)
        is_expanded = node.meta["val"].numel() > base.meta["val"].numel()
        return is_expanded or is_given(base)

    def _reach(self, node: fx.Node) -> None:
        """Adds ``node`` to the inputs, or what it is made of where each region makes it anew."""
        if self._each_region_makes(node):
            for source in node.all_input_nodes:
                self._reach(source)
            return
        is_inside = self.calls.positions.get(node) == self.at and not is_given(node)
        is_submodule = node.op == "get_attr" and not is_tensor(node)
        if not is_inside and not is_submodule:
            self.inputs.setdefault(node)

    def extract(self, outputs: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node]]:
        """Returns the graph that makes ``outputs``, and its inputs in order of placeholders.

        It also has the place's effects. What nothing in it reads is left out.
        """
        inside = set(self.nodes)
        ends = {node for node in self.nodes if node in outputs or has_effect(node)}
        needed = makers_of(ends, lambda node: node in inside)
        nodes = [
            node
            for node in self.nodes
            if node in needed and (node in ends or not self._each_region_makes(node))
        ]
        part = copied(self.calls.request.gm, list(self.inputs), nodes)
        part.finish(outputs)
        used = [node for node in part.inputs if part.copies[node].users]
        for node in part.inputs:
            if node not in used:
                part.graph.erase_node(part.copies[node])
        return part.gm, used


def _with_views_at_their_source(request: CutRequest) -> dict[fx.Node, int]:
    """Returns the nodes' positions; a view that shows all of a computed tensor has its source's."""
    positions = dict(request.positions)
    for node in request.gm.graph.nodes:
        if node in positions and is_movable_view(node):
            source = node.all_input_nodes[0]
            if source in positions and source.target is not ops.fetch:
                positions[node] = positions[source]
    return positions


def _storage_maker(node: fx.Node) -> fx.Node:
    """Returns the node that made the storage of ``node``, through views and writes into it."""
    node = storage_of(node)
    while node.target is torch.ops.aten.copy_.default:
        node = storage_of(node.all_input_nodes[0])
    return node


def unique_name(base: str, names: Mapping[str, Any], separator: str) -> str:
    """Returns ``base``, or, if it is taken, with a number behind the ``separator``: ``base_2``."""
    numbered = (f"{base}{separator}{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([base], numbered) if name not in names)


def content_of(
    gm: fx.GraphModule, external: frozenset[int] = frozenset(), static: tuple[int, ...] = ()
) -> str:
    """Returns a text that is equal for two regions exactly if one lowering serves both."""
    names: dict[fx.Node, str] = {}
    text = [f"external {sorted(external)} static {static}"]
    for node in gm.graph.nodes:
        names[node] = f"v{len(names)}"
        args = fx.node.map_arg((node.args, node.kwargs), lambda source: names[source])
        target = _alignment(node) if node.op == "placeholder" else str(node.target)
        target += " once" if runs_once(node) else ""
        begin = begins_at(node)
        target += "" if begin is None else f" from {begin}"
        text.append(f"{node.op} {target} {args} {spec_of(node.meta.get('val'))}")
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def _alignment(placeholder: fx.Node) -> str:
    """Returns where an input begins, modulo 16 bytes: kernels are specialised on inputs at 0."""
    value = placeholder.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    return f"+{value.storage_offset() * value.element_size() % KERNEL_ALIGNMENT_BYTES}"


def _half_graph(
    cutter: _Cutter, calls: Sequence[CutCall], results: Sequence[str | None]
) -> fx.GraphModule:
    """Returns the half as a graph to print and read: fetches, calls as they run, the lease."""
    graph = fx.Graph()
    node_of: dict[str, fx.Node] = {}
    for node in cutter.graph.nodes:
        if node.op == "placeholder":
            node_of[node.name] = graph.placeholder(node.name)
            node_of[node.name].meta = dict(node.meta)
        elif node.op == "get_attr" and is_tensor(node):
            node_of[node.name] = graph.node_copy(node)
    for node in cutter.fetches:
        node_of[node.name] = graph.node_copy(node, lambda source: node_of[source.name])
    for call in calls:
        result = graph.call_function(
            region_call, (call.region, *(node_of[name] for name in call.inputs))
        )
        for index, name in enumerate(call.outputs):
            node_of[name] = graph.call_function(take, (result, index))
    for node in cutter.leases:
        sources = tuple(node_of[cutter.value(source)] for source in node.all_input_nodes)
        node_of[cutter.value(node)] = graph.call_function(ops.lease, sources)
    graph.output(tuple(None if name is None else node_of[name] for name in results))
    return fx_graphs.graph_module(cutter.request.gm, graph)


def region_call(region: str, *inputs: Any) -> Any:
    """Stands for a call of ``region`` in the half's graph; the runtime runs it."""
    raise AssertionError(f"region {region} is run by the runtime only")


def take(values: Any, index: int) -> Any:
    """Returns output ``index`` of a region call."""
    return values[index]
