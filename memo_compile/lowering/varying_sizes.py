"""Lowers regions that differ in one size only once, with that size as a symbol.

When a graph is compiled for another length, its regions differ in numbers only: sizes, strides, and
integers among arguments. Comparing two such regions gives each number as a formula of the length n:
a * n, a * n * n, or a * n + c. With a symbol for n in these places the region goes through Inductor
once, and later lengths need no lowering. A graph that was traced with symbols shows its regions at
another length beforehand; otherwise a region is lowered for its first length alone.

Code that is wrong for a length would compute wrong gradients. So formulas are proved for each
length: the region is cut anew, and the symbolic graph at that length must have all of its numbers,
in arguments and in each value's size and strides as torch's own rules derive them. What torch and
Inductor assumed of the symbol (guards) must hold too. Else the region is lowered by itself.
"""

import contextlib
import hashlib
import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from memo_compile.analysis.purity import runs_once
from memo_compile.analysis.regions import LoweredRegion, RegionGraph
from memo_compile.analysis.structure import op_name
from memo_compile.errors import UnsupportedGraph, described
from memo_compile.lowering import inductor
from memo_compile.lowering.lines import LineScan
from memo_compile.lowering.workspace import convolution_of
from memo_compile.passes.at_numbers import is_number, with_numbers
from memo_compile.passes.cut import KERNEL_ALIGNMENT_BYTES
from memo_compile.passes.cut_template import OtherSizes
from memo_compile.reporting import state
from memo_compile.torch_private import fx_graphs
from memo_compile.torch_private.symbols import SizeSymbols, plain

log = logging.getLogger("memo")

MAX_KNOWN = 4
"""Most regions and symbolic codes that are kept for one text; the oldest goes."""

MAX_REFUSALS = 2
"""Failed symbolic lowerings of a text before no more are tried. Torch may take a length that equals
another size for that size; with the next length it may work."""

SMALLEST = 2
"""Torch assumes that a size which varies is at least this: 1 broadcasts, 0 is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """``square * n * n + scale * n + constant`` of the size ``n``."""

    square: int = 0
    scale: int = 0
    constant: int = 0

    def at(self, n: Any) -> Any:
        """Returns the formula's value; ``n`` is a number or a symbol."""
        if not self.square and not self.scale:
            return self.constant
        return self.square * n * n + self.scale * n + self.constant


def formula(first: int, second: int, base: tuple[int, int]) -> Formula | None:
    """Returns the simplest formula that is ``first`` and ``second`` at the two sizes ``base``."""
    if first == second:
        return Formula(constant=first)
    n, m = base
    if first % n == 0 and second % m == 0 and first // n == second // m:
        return Formula(scale=first // n)
    if first % (n * n) == 0 and second % (m * m) == 0 and first // (n * n) == second // (m * m):
        return Formula(square=first // (n * n))
    scale, remainder = divmod(second - first, m - n)
    return None if remainder else Formula(scale=scale, constant=first - scale * n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A region's graph as a text without its numbers, and the numbers in order."""

    text: str
    arguments: tuple[int, ...]
    layouts: tuple[Any, ...]
    """Sizes and strides of all values."""


def written(gm: fx.GraphModule) -> Written:
    """Takes ``gm`` apart. Raises UnsupportedGraph: it holds graphs or tensors of its own."""
    names: dict[fx.Node, str] = {}
    arguments: list[int] = []
    layouts: list[Any] = []
    lines = []

    def word(value: Any) -> str:
        """Returns an argument as text; a number, which is noted, as #."""
        if isinstance(value, fx.Node):
            return names[value]
        if is_number(value):
            arguments.append(value)
            return "#"
        return repr(value)

    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise UnsupportedGraph(f"{node.op} {node.target}")
        if "as_strided" in op_name(node):
            raise UnsupportedGraph("an operator counts from the start of its input's memory")
        names[node] = f"v{len(names)}"
        target = _start(node) if node.op == "placeholder" else str(node.target)
        once = " once" if runs_once(node) else ""
        is_input = node.op == "placeholder"
        words = "" if is_input else fx.node.map_aggregate((node.args, node.kwargs), word)
        lines.append(f"{node.op} {target}{once} {words} {_value(node.meta.get('val'), layouts)}")
    return Written(text="\n".join(lines), arguments=tuple(arguments), layouts=tuple(layouts))


def _value(value: Any, layouts: list[Any]) -> str:
    """Returns ``value`` as text without its sizes and strides, which go to ``layouts``."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise UnsupportedGraph(f"a value is {value.layout}")
        layouts += [*value.shape, *value.stride()]
        return f"{value.dtype} {value.dim()} {value.device}"
    if isinstance(value, tuple | list):
        return f"[{';'.join(_value(item, layouts) for item in value)}]"
    return repr(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RegionAt:
    """A region at some sizes of the graph."""

    numbers: tuple[float, ...]
    written: Written


@dataclass(slots=True, kw_only=True)
class _Code:
    """A region's code for all lengths that its guards admit."""

    symbol: SizeSymbols
    position: int
    """The position of the symbol's size among the graph's sizes."""
    arguments: tuple[Formula, ...]
    layouts: tuple[Any, ...]
    scan: LineScan
    compiled: Callable[[list[Any]], Any]

    def serves(self, region: Written, n: int) -> bool:
        """True where the symbolic graph is ``region`` when the symbol is ``n``."""
        symbol = self.symbol
        return _equal(symbol, self.arguments, self.layouts, region, n) and symbol.admits(n)

    def lowered(self, name: str, n: int) -> LoweredRegion:
        """Returns the code for size ``n``, which becomes its first input."""
        self.scan.evaluate = self.symbol.at((n,))
        profile, compiled = replace(self.scan.profile(), name=name), self.compiled
        views, attention = tuple(self.scan.views), tuple(self.scan.attention)

        def run(args: list[Any]) -> Any:
            args.insert(0, n)
            return compiled(args)

        return LoweredRegion(profile=profile, views=views, run=run, attention=attention)


def _equal(
    symbol: SizeSymbols,
    arguments: Sequence[Formula],
    layouts: Sequence[Any],
    region: Written,
    n: int,
) -> bool:
    """True where the symbolic numbers at ``n`` are those of ``region``."""
    at_n = tuple(formula.at(n) for formula in arguments), tuple(map(symbol.at((n,)), layouts))
    return at_n == (region.arguments, region.layouts)


@dataclass(slots=True)
class VaryingCounts:
    """How the regions of graphs that are compiled for several lengths were lowered."""

    reused: int = 0
    symbolic: int = 0
    """Lowered with a symbol."""
    alone: int = 0
    """Lowered for one length: the first, or one that no symbolic code serves."""


@dataclass(eq=False)
class VaryingRegions:
    """The regions of one graph, which is compiled for one combination of sizes after another."""

    counts: VaryingCounts = field(default_factory=VaryingCounts)
    others: OtherSizes | None = None
    """Sizes for which nothing was compiled yet, of a graph that was traced with symbols."""
    _numbers: tuple[float, ...] = ()
    """The graph's sizes that it is compiled for now."""
    _lowered_alone: dict[str, list[_RegionAt]] = field(default_factory=dict)
    _codes: dict[str, list[_Code]] = field(default_factory=dict)
    _refusals: Counter[str] = field(default_factory=Counter)
    """How often torch could not lower a text with a symbol."""

    @property
    def num_lowered(self) -> int:
        """How many regions were lowered and not reused."""
        return self.counts.symbolic + self.counts.alone

    def lower(
        self,
        region: RegionGraph,
        *,
        poison: bool,
        alone: Callable[[], LoweredRegion],
        at_others: Callable[[OtherSizes], fx.GraphModule],
    ) -> LoweredRegion:
        """Lowers ``region`` by code with a symbol that is there, by new one, or by ``alone``.

        New code is made from the region at two sizes: the present ones, and others at which it was
        lowered before, or for which ``at_others`` returns its graph. ``alone`` is for one size.
        """
        try:
            region_text = written(region.gm)
        except UnsupportedGraph as error:
            log.debug("memo: region %s is of its sizes only: %s", region.name, error)
            self.counts.alone += 1
            return alone()
        key = _code_key(region, region_text, poison)
        codes = self._codes.setdefault(key, [])
        for code in codes:
            n = self._numbers[code.position]  # a size; another of the numbers may be a float
            if isinstance(n, int) and n >= SMALLEST and code.serves(region_text, n):
                self.counts.reused += 1
                return code.lowered(region.name, n)
        same_regions = self._lowered_alone.setdefault(key, [])
        if not same_regions and self.others is not None:
            same_regions += self._at_other_sizes(region_text, self.others, at_others)
        for other in same_regions if self._refusals[key] < MAX_REFUSALS else ():
            new_code = self._symbolic(region, region_text, other, key, poison=poison)
            if new_code is not None:
                self.counts.symbolic += 1
                codes[:] = [*codes, new_code][-MAX_KNOWN:]
                return new_code.lowered(region.name, int(self._numbers[new_code.position]))
        self.counts.alone += 1
        present = _RegionAt(numbers=self._numbers, written=region_text)
        same_regions[:] = [*same_regions, present][-MAX_KNOWN:]
        return alone()

    def _at_other_sizes(
        self,
        region_text: Written,
        others: OtherSizes,
        at_others: Callable[[OtherSizes], fx.GraphModule],
    ) -> list[_RegionAt]:
        """Returns the region at other sizes; empty where that fails, or is another region."""
        try:
            other = written(at_others(others))
        except Exception as error:  # of torch at other sizes: then the next length tells
            log.debug("memo: a region is of its sizes only so far: %s", described(error))
            return []
        same = other.text == region_text.text
        return [_RegionAt(numbers=others.others, written=other)] if same else []

    def _symbolic(
        self, region: RegionGraph, region_text: Written, other: _RegionAt, key: str, *, poison: bool
    ) -> _Code | None:
        """Lowers with a symbol for the size that differs from ``other``; None: it cannot."""
        changed = _changed_size(other.numbers, self._numbers)
        if changed is None or any(map(convolution_of, region.gm.graph.nodes)):
            return None
        base = (int(other.numbers[changed]), int(self._numbers[changed]))
        pairs = zip(other.written.arguments, region_text.arguments, strict=True)
        arguments = [formula(*pair, base) for pair in pairs]
        pairs = zip(other.written.layouts, region_text.layouts, strict=True)
        layouts = [formula(*pair, base) for pair in pairs]
        if None in arguments or None in layouts or region_text.layouts == other.written.layouts:
            return None
        formulas = tuple(argument for argument in arguments if argument is not None)
        try:
            return self._lowered(
                region, region_text, other, changed, formulas, layouts, poison=poison
            )
        except Exception as error:  # of torch with a symbol: the region is lowered for itself
            self._refusals[key] += 1
            note = f"region {region.name} is lowered anew for each length: {described(error)}"
            if state.add_note(note):
                log.info("memo: %s", note)
            return None

    def _lowered(
        self,
        region: RegionGraph,
        region_text: Written,
        other: _RegionAt,
        changed: int,
        arguments: tuple[Formula, ...],
        layouts: Sequence[Formula | None],
        *,
        poison: bool,
    ) -> _Code:
        """Lowers the region with a symbol for the graph's size at position ``changed``.

        Raises UnsupportedGraph: the symbolic graph is not that of both lengths.
        """
        first, n = int(other.numbers[changed]), int(self._numbers[changed])
        symbol = SizeSymbols([n])
        rewritten = _WithSymbol(region.gm, symbol, arguments, layouts)
        symbolic_layouts = tuple(rewritten.layouts)
        if not _equal(symbol, arguments, symbolic_layouts, region_text, n):
            raise UnsupportedGraph("with a symbol it has other values")
        if not _equal(symbol, arguments, symbolic_layouts, other.written, first):
            raise UnsupportedGraph("its numbers are no function of the length")
        static = tuple(at + 1 for at in region.static_inputs)
        symbolic_region = replace(region, gm=rewritten.gm, static_inputs=static)
        with symbol.tracing():
            lowered = inductor.lower_symbolic(symbolic_region, symbol.at((n,)), poison=poison)
        if lowered is None:
            raise UnsupportedGraph("it has no kernels")
        scan, compiled = lowered
        if not symbol.admits(n) or not symbol.was_used_by(scan.graph):
            raise UnsupportedGraph("torch has taken the length for a constant")
        scan.require_traced_strides(region.output_layouts())
        return _Code(
            symbol=symbol,
            position=changed,
            arguments=arguments,
            layouts=tuple(map(plain, symbolic_layouts)),
            scan=scan,
            compiled=compiled,
        )


def _code_key(region: RegionGraph, region_text: Written, poison: bool) -> str:
    """Returns a digest of all that code for ``region`` depends on, but for its numbers."""
    sets = (sorted(region.external_outputs), region.static_inputs)
    settings = (region.is_backward, str(region.device), poison, torch.get_num_threads())
    contents = (region_text.text, *sets, *settings)
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def _changed_size(before: Sequence[float], now: Sequence[float]) -> int | None:
    """Returns the first position of a number that differs, if all others are formulas of it.

    (8, 16, 0.5) and (12, 24, 0.5) -> 0. None where they are not, or where one is no size.
    """
    if len(before) != len(now):
        return None
    pairs = list(zip(before, now, strict=True))
    changed = [at for at, (first, second) in enumerate(pairs) if first != second]
    if any(not isinstance(n, int) or n < SMALLEST for at in changed for n in pairs[at]):
        return None
    sizes = [(int(first), int(second)) for first, second in (pairs[at] for at in changed)]
    formulas = [formula(*pair, sizes[0]) for pair in sizes]
    return None if not formulas or None in formulas else changed[0]


class _WithSymbol:
    """Rewrites a region's graph: a size is its first input, and ``arguments`` are formulas of it.

    Inputs have the sizes and strides of ``layouts``. Those of all other values come from torch's
    rules; all are in the attribute ``layouts``, to be compared.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        symbol: SizeSymbols,
        arguments: Sequence[Formula],
        layouts: Sequence[Formula | None],
    ) -> None:
        self._symbol, self._arguments = symbol, iter(arguments)
        self._graph = fx.Graph()
        self._size = self._graph.placeholder("memo_size")
        self._size.meta["val"] = symbol.values[0]
        self._nodes: dict[fx.Node, fx.Node] = {}
        self._numbers: dict[Formula, fx.Node] = {}
        self.layouts: list[Any] = []
        remaining = iter(layouts)
        for node in gm.graph.nodes:
            old_layout: list[Any] = []  # to count the formulas of this node
            _value(node.meta.get("val"), old_layout)
            value = self._copied(node, [next(remaining) for _ in old_layout])
            _value(value, self.layouts)
        self.gm = fx_graphs.graph_module(gm, self._graph)

    def _copied(self, node: fx.Node, layout: Sequence[Formula | None]) -> Any:
        """Copies ``node``, and returns the value of the copy."""
        value = None
        if node.op == "placeholder":
            new = self._graph.placeholder(str(node.target))
            value = _fake(node.meta["val"], self._symbol, layout)
        elif node.op == "output":
            new = self._graph.output(self._with_formulas(node.args[0]))
        else:
            args, kwargs = self._with_formulas(node.args), self._with_formulas(node.kwargs)
            new = self._graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            args, kwargs = fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
            with self._symbol.mode:
                value = node.target(*args, **kwargs)  # type: ignore[operator]
        self._nodes[node] = new
        new.name = node.name
        new.meta = {key: note for key, note in node.meta.items() if key != "eager_input_vals"}
        new.meta["val"] = value
        return value

    def _with_formulas(self, value: Any) -> Any:
        """Returns arguments with nodes of the new graph, and formulas in place of numbers."""
        return with_numbers(value, self._nodes, lambda _: self._number(next(self._arguments)))

    def _number(self, term: Formula) -> Any:
        """Returns the constant that the formula is, or the one node that computes it."""
        if not term.square and not term.scale:
            return term.constant
        if term not in self._numbers:
            self._numbers[term] = self._computed(term)
        return self._numbers[term]

    def _computed(self, term: Formula) -> fx.Node:
        """Adds the nodes that compute the formula; returns the last."""
        summands: list[fx.Node] = []
        if term.square:
            squared = self._call(operator.mul, self._size, self._size)
            summands.append(self._times(squared, term.square))
        if term.scale:
            summands.append(self._times(self._size, term.scale))
        total = summands[0] if len(summands) == 1 else self._call(operator.add, *summands)
        return self._call(operator.add, total, term.constant) if term.constant else total

    def _times(self, node: fx.Node, factor: int) -> fx.Node:
        return node if factor == 1 else self._call(operator.mul, node, factor)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self._graph.call_function(target, args)
        node.name = f"memo_size_{len(self._graph.nodes)}"
        values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
        node.meta["val"] = target(*values)
        return node


def _start(placeholder: fx.Node) -> str:
    """Says where an input begins, as far as code depends on it."""
    value = placeholder.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise UnsupportedGraph("an input is no tensor")
    return f"+{_misaligned(value)}"


def _misaligned(value: torch.Tensor) -> int:
    """Returns how many elements a value begins behind an address that kernels take as aligned."""
    return int(value.storage_offset()) * value.itemsize % KERNEL_ALIGNMENT_BYTES // value.itemsize


def _fake(value: torch.Tensor, symbol: SizeSymbols, layout: Sequence[Formula | None]) -> Any:
    """Returns a placeholder's value with a symbolic layout, aligned as it was."""
    numbers = [number.at(symbol.values[0]) for number in layout if number is not None]
    size, stride = numbers[: value.dim()], numbers[value.dim() :]
    start = _misaligned(value)
    with symbol.mode:
        if not start:
            return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
        last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        base = torch.empty(start + last + 1, dtype=value.dtype, device=value.device)
        return base.as_strided(size, stride, start)


_current: list[VaryingRegions] = []
"""The regions of the graph that is being compiled, on top. Lowering holds torch's lock."""


def current() -> VaryingRegions | None:
    """Returns the regions of the graph that is being compiled; None: its sizes do not vary."""
    return _current[-1] if _current else None


@contextlib.contextmanager
def varying(regions: VaryingRegions, numbers: Sequence[float]) -> Iterator[None]:
    """Inside, the graph of ``regions`` is compiled for ``numbers``."""
    regions._numbers = tuple(numbers)
    _current.append(regions)
    try:
        yield
    finally:
        _current.pop()


@contextlib.contextmanager
def foreseeing(others: OtherSizes | None) -> Iterator[None]:
    """Inside, regions of the graph that is being compiled can be derived at ``others`` too."""
    regions = current()
    if regions is not None:
        regions.others = others
    try:
        yield
    finally:
        if regions is not None:
            regions.others = None
