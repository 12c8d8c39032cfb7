"""The repeating layers of a forward graph, found by structure; module names only break ties."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from memo_compile.analysis.module_paths import LayerPaths
from memo_compile.analysis.repeats import Repeat, best_repeat
from memo_compile.analysis.structure import Tape, lifted_arg, make_tape

_MIN_SHARE = 0.02
"""Units of a class must hold this share of the sequence: below, a region costs more than it gives.

61 layers of a large mixture of experts still keep a class for its 3 dense ones (5 %)."""

_MIN_SIMPLE_INSTANCES = 4
"""A unit with a single matrix product is a layer of an MLP; two or three of them are a head."""

_MIN_LIKENESS = 0.6
"""Share of operators that a lone range must have in common with a layer to be one itself.

Local and global attention layers share all but a few; attention and its MLP less than half."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiftedScalar:
    """A number that differs between instances and must become an input of a shared region.

    Only the index of ``prims.inductor_lookup_seed`` is one: it says which of the step's seeds a
    dropout reads. Look the seed up outside of the region and hand in its value.
    """

    offset: int
    """Index of the node within its unit."""
    arg_index: int
    """Index of the number in ``node.args``."""
    value: int
    """The number in this unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One range of the sequence: an instance of a layer class, or a gap between instances."""

    start: int
    end: int
    """Half-open range of positions in the sequence given to ``find_layers``."""
    class_key: str | None
    """Equal for isomorphic units; None for a gap (prologue, middle, epilogue)."""
    layers_per_unit: int
    """Module layers in the unit (its period); 1 without modules."""
    module_path: str | None
    """Path of the module list that holds the layers, e.g. ``model.layers``."""
    instance: int
    """Index within the class, or among the gaps."""
    lifted: tuple[LiftedScalar, ...] = ()
    """Same offsets in every unit of a class; the values differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerClass:
    """All instances of one layer."""

    class_key: str
    num_layers: int
    """Layers of the model in all units together: units times period."""
    period: int
    module_path: str | None
    units: tuple[int, ...]
    """Indices into ``LayerStructure.units``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStructure:
    """Units that cover the sequence completely, in order, and their classes by first unit."""

    units: tuple[Unit, ...]
    classes: tuple[LayerClass, ...]

    @property
    def num_covered(self) -> int:
        """Nodes that belong to a layer."""
        return sum(unit.end - unit.start for unit in self.units if unit.class_key is not None)


def find_layers(nodes: Sequence[fx.Node]) -> LayerStructure:
    """The layers of ``nodes``, the call_function nodes of a joint graph's forward, in order.

    The range of a unit is a function of its inputs that equals the function of every other unit of
    its class, node by node: same operators, constants, shapes, strides, dtypes and wiring.
    What counts as a layer, and why:

    * It has at least two instances, chained: each reads a value of the one before. (The query, key
      and value projections of one layer repeat too, but side by side.)
    * It holds a matrix product. A convolution is none: the blocks of a ResNet differ from stage to
      stage, have no token dimension, and repeat two to five times, so a ResNet has no layers.
    * It is not a part of a layer: a repeat inside of a repeat counts only when all its borders are
      as narrow as the outer one and what it leaves over looks like a layer itself. (The loop over
      experts carries more than the residual stream across its borders; five local and one global
      attention layers are six layers.)

    About quadratic in ``len(nodes)`` with a small constant: below a second for 10,000 nodes.
    """
    if not nodes:
        return LayerStructure(units=(), classes=())
    tape = make_tape(nodes)
    paths = LayerPaths(nodes)
    ranges = _find_ranges(tape, 0, len(nodes), paths.begins_layer)
    ranges += _stray_instances(tape, ranges)
    by_class = _group(tape, sorted(ranges))
    return _assemble(tape, by_class, paths)


def _find_ranges(
    tape: Tape, start: int, end: int, prefers_cut: Callable[[int], bool]
) -> list[Range]:
    """Ranges of layers between ``start`` and ``end``: the best repeat, then what is beside it."""
    if tape.num_matmuls(start, end) < 2:
        return []
    repeat = best_repeat(tape, start, end, prefers_cut)
    if repeat is None:
        return []
    left = _find_ranges(tape, start, repeat.start, prefers_cut)
    right = _find_ranges(tape, repeat.end, end, prefers_cut)
    pieces = _split(tape, repeat, prefers_cut)
    shifts = (index * repeat.period for index in range(repeat.count))
    inner = [(low + shift, high + shift) for shift in shifts for low, high in pieces]
    return left + inner + right


def _split(tape: Tape, repeat: Repeat, prefers_cut: Callable[[int], bool]) -> list[Range]:
    """The first instance of ``repeat`` as smaller layers, or whole when it holds none."""
    first = (repeat.start, repeat.start + repeat.period)
    inner = sorted(_find_ranges(tape, *first, prefers_cut))
    if not inner:
        return [first]
    pieces = sorted(inner + _complement(inner, *first))
    cuts = [start for start, _ in pieces[1:]]
    if any(tape.border_bytes(cut, first[0]) > repeat.border_bytes for cut in cuts):
        return [first]
    for piece in pieces:
        if piece not in inner and not _looks_like_layer(tape, piece, inner[0]):
            return [first]
    return pieces


def _complement(ranges: Sequence[Range], start: int, end: int) -> list[Range]:
    """What sorted, disjoint ``ranges`` leave of ``[start, end)``."""
    edges = [start, *(edge for low, high in ranges for edge in (low, high)), end]
    return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]


def _looks_like_layer(tape: Tape, piece: Range, layer: Range) -> bool:
    """True when the operators of ``piece`` are nearly those of ``layer``."""
    mine, model = (
        Counter(str(tape.nodes[position].target) for position in range(*where))
        for where in (piece, layer)
    )
    return (mine & model).total() >= _MIN_LIKENESS * (mine | model).total()


def _stray_instances(tape: Tape, ranges: Sequence[Range]) -> list[Range]:
    """Ranges outside of ``ranges`` that are isomorphic to one of them: single trailing layers."""
    found: list[Range] = []
    templates = {tape.canonical(*where): where for where in ranges}
    for form, (start, end) in templates.items():
        taken = sorted([*ranges, *found])
        for low, high in _complement(taken, 0, len(tape.nodes)):
            found += _occurrences(tape, form, end - start, low, high)
    return found


def _occurrences(
    tape: Tape, form: tuple[tuple[int, tuple[int, ...]], ...], length: int, low: int, high: int
) -> list[Range]:
    tokens = [token for token, _ in form]
    found = []
    position = low
    while position + length <= high:
        matches = (
            tape.tokens[position] == tokens[0]
            and tape.tokens[position : position + length].tolist() == tokens
            and tape.canonical(position, position + length) == form
        )
        if matches:
            found.append((position, position + length))
        position += length if matches else 1
    return found


def _group(tape: Tape, ranges: Sequence[Range]) -> dict[str, list[Range]]:
    """Ranges by class, without the classes that are too small to be worth a region."""
    groups: dict[str, list[Range]] = {}
    for where in ranges:
        groups.setdefault(tape.digest(*where), []).append(where)
    return {key: members for key, members in groups.items() if _is_worthwhile(tape, members)}


def _is_worthwhile(tape: Tape, members: Sequence[Range]) -> bool:
    start, end = members[0]
    num_matmuls = tape.num_matmuls(start, end)
    if len(members) < 2 or num_matmuls == 0:
        return False
    if num_matmuls == 1 and len(members) < _MIN_SIMPLE_INSTANCES:
        return False
    return len(members) * (end - start) >= _MIN_SHARE * len(tape.nodes)


def _assemble(tape: Tape, by_class: dict[str, list[Range]], paths: LayerPaths) -> LayerStructure:
    keys: dict[Range, str | None] = {
        where: key for key, members in by_class.items() for where in members
    }
    for gap in _complement(sorted(keys), 0, len(tape.nodes)):
        keys[gap] = None
    owners = {key: paths.owner(members) for key, members in by_class.items()}
    instances: Counter[str | None] = Counter()
    units = []
    for where in sorted(keys):
        key = keys[where]
        owner = owners[key] if key is not None else None
        units.append(
            Unit(
                start=where[0],
                end=where[1],
                class_key=key,
                layers_per_unit=owner.period if owner else 1,
                module_path=owner.path if owner else None,
                instance=instances[key],
                lifted=_lifted(tape, where) if key is not None else (),
            )
        )
        instances[key] += 1
    return LayerStructure(units=tuple(units), classes=_classes(units))


def _lifted(tape: Tape, where: Range) -> tuple[LiftedScalar, ...]:
    found = []
    for position in range(*where):
        arg_index = lifted_arg(tape.nodes[position])
        if arg_index is not None:
            value = tape.nodes[position].args[arg_index]
            assert isinstance(value, int), f"seed index {value!r} of {tape.nodes[position]}"
            offset = position - where[0]
            found.append(LiftedScalar(offset=offset, arg_index=arg_index, value=value))
    return tuple(found)


def _classes(units: Sequence[Unit]) -> tuple[LayerClass, ...]:
    members: dict[str, list[int]] = {}
    for index, unit in enumerate(units):
        if unit.class_key is not None:
            members.setdefault(unit.class_key, []).append(index)
    return tuple(
        LayerClass(
            class_key=key,
            num_layers=len(indices) * units[indices[0]].layers_per_unit,
            period=units[indices[0]].layers_per_unit,
            module_path=units[indices[0]].module_path,
            units=tuple(indices),
        )
        for key, indices in members.items()
    )
