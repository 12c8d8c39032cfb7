"""Finds the repeating layers of a forward graph by structure; module names only break ties."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from torch import fx

from memo_compile.analysis.module_paths import LayerPaths, Range
from memo_compile.analysis.repeats import Repeat, best_repeat
from memo_compile.analysis.structure import Tape, make_tape

_MIN_SHARE = 0.02
"""A class holds at least this share of the sequence: for less, a region of its own is not worth it.

3 dense layers of a mixture of experts with 61 layers (5 %) are a class."""

_MIN_SIMPLE_INSTANCES = 4
"""Units with a single matrix product are layers (of an MLP) from this many on; fewer are a head."""

_MIN_LIKENESS = 0.6
"""A single range is a layer if it shares at least so much of its operators with a known layer.

Local and global attention layers share nearly all; attention and its MLP less than half."""

_MIN_COMMON_SHARE = 0.5
"""Without module names, layers must begin with this share of the shorter one in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One range of the sequence: an instance of a layer class, or what lies between."""

    start: int
    end: int
    """Half-open range of positions in the sequence given to ``find_layers``."""
    class_key: str | None
    """Equal for isomorphic units; None for units that are no layers: prologue, epilogue."""
    instance: int
    """Index within the class, or among the units without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IsomorphicUnits:
    """A layer class: all units that are isomorphic."""

    class_key: str
    num_layers: int
    """Layers of the model in all units: units times period."""
    period: int
    """How many layers of the model a unit holds; 1 without modules."""
    module_path: str | None
    """Path of the module list that holds the layers, e.g. ``model.layers``."""
    units: tuple[int, ...]
    """Indices into ``LayerStructure.units``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStructure:
    """Units that cover the sequence completely, in order, and their classes by first unit."""

    units: tuple[Unit, ...]
    classes: tuple[IsomorphicUnits, ...]

    @property
    def num_covered(self) -> int:
        """Nodes that belong to a layer."""
        return sum(unit.end - unit.start for unit in self.units if unit.class_key is not None)


def find_layers(nodes: Sequence[fx.Node]) -> LayerStructure:
    """Returns the layers of ``nodes``, the call_function nodes of a joint graph's forward.

    The range of a unit is a function of its inputs that equals the function of every other unit of
    its class, node by node: same operators, constants, shapes, strides, dtypes and wiring.
    What counts as a layer, and why:

    * It has at least two instances, chained: a matrix product in each depends on one in the
      instance before. (The query, key and value projections of one layer repeat too, and so do
      the experts in a loop, but side by side.)
    * It holds a matrix product. A convolution is none: the blocks of a ResNet differ from stage to
      stage, have no token dimension, and repeat two to five times, so a ResNet has no layers.
    * It is not a part of a layer: a repeat inside of a repeat counts only when all its borders are
      as narrow as the outer one and the nodes that it leaves over look like a layer themselves.
      (Five local and one global attention layer are six layers; MLP, attention, MLP are one.)

    About quadratic in ``len(nodes)`` with a small constant: below a second for 10,000 nodes.
    """
    if not nodes:
        return LayerStructure(units=(), classes=())
    tape = make_tape(nodes)
    paths = LayerPaths(nodes)
    ranges = _find_ranges(tape, 0, len(nodes), paths)
    ranges += _stray_instances(tape, ranges)
    by_class = _group(tape, sorted(ranges))
    return _assemble(tape, by_class, paths)


def _find_ranges(tape: Tape, start: int, end: int, paths: LayerPaths) -> list[Range]:
    """Returns the layers in ``[start, end)``: of the best repeat, and of repeats beside it."""
    if tape.num_matmuls(start, end) < 2:
        return []
    repeat = best_repeat(tape, start, end, paths.begins_layer)
    if repeat is None:
        return []
    left = _find_ranges(tape, start, repeat.start, paths)
    right = _find_ranges(tape, repeat.end, end, paths)
    pieces = _split(tape, repeat, paths)
    shifts = (index * repeat.period for index in range(repeat.count))
    inner = [(low + shift, high + shift) for shift in shifts for low, high in pieces]
    return left + inner + right


def _split(tape: Tape, repeat: Repeat, paths: LayerPaths) -> list[Range]:
    """Returns the first instance of ``repeat``, cut into smaller layers if it holds any."""
    first = (repeat.start, repeat.start + repeat.period)
    for pieces in (
        _by_modules(repeat, paths),
        _by_inner_repeat(tape, first, paths),
        _by_common_beginning(tape, repeat, paths),
    ):
        cuts = [start for start, _ in pieces[1:]]
        is_narrow = all(_is_narrow(tape, cut, repeat) for cut in cuts)
        if cuts and is_narrow and all(tape.num_matmuls(*piece) for piece in pieces):
            return pieces
    return [first]


def _is_narrow(tape: Tape, cut: int, repeat: Repeat) -> bool:
    """True when no more bytes cross at ``cut`` than between the instances of ``repeat``.

    Counted one instance later, so that values of the first instance count as well, such as a
    residual that is added behind the cut.
    """
    return tape.border_bytes(cut + repeat.period, repeat.start) <= repeat.border_bytes


def _by_modules(repeat: Repeat, paths: LayerPaths) -> list[Range]:
    """Returns the first instance cut at module layers, if it holds several of them."""
    start, end = repeat.ranges()[0]
    owner = paths.owner(repeat.ranges())
    if owner.pattern is None or owner.period == 1:
        return []
    starts = paths.layer_starts(start, end, owner.pattern)
    return list(pairwise([start, *starts, end])) if len(starts) == owner.period - 1 else []


def _by_inner_repeat(tape: Tape, first: Range, paths: LayerPaths) -> list[Range]:
    """Returns repeats inside one instance and the ranges between, if these look like layers too."""
    inner = sorted(_find_ranges(tape, *first, paths))
    between = _complement(inner, *first) if inner else []
    if not all(_looks_like_layer(tape, piece, inner[0]) for piece in between):
        return []
    return sorted(inner + between)


def _by_common_beginning(tape: Tape, repeat: Repeat, paths: LayerPaths) -> list[Range]:
    """Returns the first instance cut where its beginning comes again, in models without modules.

    [attention, MLP, attention, experts] is cut into [attention, MLP] and [attention, experts]. The
    common beginning holds a matrix product and at least ``_MIN_COMMON_SHARE`` of the shorter piece
    (attention and the MLP behind it have only a norm in common), but not all of it: half of a layer
    that ends as it begins (MLP, attention, MLP) is no layer.
    """
    start, end = repeat.ranges()[0]
    if paths.owner(repeat.ranges()).path is not None:
        return []
    beginning = tape.canonical(start, end)
    starts = []
    num_common: dict[int, int] = {}
    for cut in range(start + 1, end):
        if tape.tokens[cut] != tape.tokens[start] or not _is_narrow(tape, cut, repeat):
            continue
        pairs = zip(beginning, tape.canonical(cut, end), strict=False)
        num_common[cut] = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if tape.num_matmuls(cut, cut + num_common[cut]):
            starts.append(cut)
    pieces = list(pairwise([start, *starts, end]))
    first_length = pieces[0][1] - start
    for low, high in pieces[1:]:
        shorter = min(high - low, first_length)
        if not _MIN_COMMON_SHARE * shorter <= num_common[low] < shorter:
            return []
    return pieces


def _complement(ranges: Sequence[Range], start: int, end: int) -> list[Range]:
    """Returns the gaps that sorted, disjoint ``ranges`` leave in ``[start, end)``."""
    edges = [start, *(edge for low, high in ranges for edge in (low, high)), end]
    return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]


def _looks_like_layer(tape: Tape, piece: Range, layer: Range) -> bool:
    """True when the operators of ``piece`` are nearly those of ``layer``."""
    piece_ops, layer_ops = (
        Counter(str(tape.nodes[position].target) for position in range(*where))
        for where in (piece, layer)
    )
    return (piece_ops & layer_ops).total() >= _MIN_LIKENESS * (piece_ops | layer_ops).total()


def _stray_instances(tape: Tape, ranges: Sequence[Range]) -> list[Range]:
    """Returns ranges outside of ``ranges`` isomorphic to one of them: single trailing layers."""
    strays: list[Range] = []
    templates = {tape.canonical(*where): where for where in ranges}
    for form, (start, end) in templates.items():
        occupied = sorted([*ranges, *strays])
        for low, high in _complement(occupied, 0, len(tape.nodes)):
            strays += _occurrences(tape, form, end - start, low, high)
    return strays


def _occurrences(
    tape: Tape, form: tuple[tuple[int, tuple[int, ...]], ...], length: int, low: int, high: int
) -> list[Range]:
    """Returns ranges of ``[low, high)`` with this canonical form, from the left."""
    tokens = [token for token, _ in form]
    places = []
    position = low
    while position + length <= high:
        matches = (
            tape.tokens[position] == tokens[0]
            and tape.tokens[position : position + length].tolist() == tokens
            and tape.canonical(position, position + length) == form
        )
        if matches:
            places.append((position, position + length))
        position += length if matches else 1
    return places


def _group(tape: Tape, ranges: Sequence[Range]) -> dict[str, list[Range]]:
    """Returns the ranges by class, without classes too small to be worth a region."""
    groups: dict[str, list[Range]] = {}
    for where in ranges:
        groups.setdefault(tape.digest(*where), []).append(where)
    return {key: members for key, members in groups.items() if _is_worthwhile(tape, members)}


def _is_worthwhile(tape: Tape, members: Sequence[Range]) -> bool:
    """True for a class of layers that are numerous and large enough to get regions."""
    start, end = members[0]
    num_matmuls = tape.num_matmuls(start, end)
    least = _MIN_SIMPLE_INSTANCES if num_matmuls == 1 else 2
    is_large = len(members) * (end - start) >= _MIN_SHARE * len(tape.nodes)
    return num_matmuls > 0 and len(members) >= least and is_large


def _assemble(tape: Tape, by_class: dict[str, list[Range]], paths: LayerPaths) -> LayerStructure:
    """Numbers the layers and the ranges between them, in order."""
    keys: dict[Range, str | None] = {
        where: key for key, members in by_class.items() for where in members
    }
    keys.update(dict.fromkeys(_complement(sorted(keys), 0, len(tape.nodes))))
    units: list[Unit] = []
    instances: dict[str | None, list[int]] = {}
    for start, end in sorted(keys):
        key = keys[start, end]
        indices_of_key = instances.setdefault(key, [])
        indices_of_key.append(len(units))
        units.append(Unit(start=start, end=end, class_key=key, instance=len(indices_of_key) - 1))
    owners = {key: paths.owner(members) for key, members in by_class.items()}
    classes = tuple(
        IsomorphicUnits(
            class_key=key,
            num_layers=len(indices) * owners[key].period,
            period=owners[key].period,
            module_path=owners[key].path,
            units=tuple(indices),
        )
        for key, indices in instances.items()
        if key is not None
    )
    return LayerStructure(units=tuple(units), classes=classes)
