"""Finds where in the module tree a node came from, as far as Dynamo says."""

import operator
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

_STEP = re.compile(r"[A-Za-z_]\w*|\d+")
"""One attribute or index of a path, as in ``L['self']._modules['layers']['0']`` or ``layers.0``."""

_HIDDEN = ("_modules", "__dict__")
"""Steps that Dynamo writes and a user does not, on the way to a module's children."""

_MODEL = {"fn": "model"}
"""Dynamo's name of a module that is compiled -> what users see of a model that is itself a list."""

_MIN_NODES_SHARE = 0.1
"""A module owns a unit if it has this share of its named nodes: borders may be a few nodes off."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Place:
    """One numbered module around a node: an entry of a module list."""

    depth: int
    """How many numbered modules are around this one, itself included."""
    path: str
    """Path of the list, an asterisk for the numbers on the way: ``stages.*.blocks``."""
    indices: tuple[int, ...]
    """The numbers on the way, and last the one in the list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The module list that holds the layers of a class."""

    path: str | None
    """Without the name of the variable that held the model, for users; None without modules."""
    period: int
    """Distinct layers per unit; 1 without modules."""
    pattern: str | None
    """``Place.path`` of the list, when its entries are the layers."""


class LayerPaths:
    """The numbered modules around each node of a sequence."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        paths = list(map(module_path, nodes))
        places_of = {path: _parse(path) for path in set(paths)}
        self._places = [places_of[path] for path in paths]

    def begins_layer(self, position: int) -> bool:
        """True where another numbered module begins; a node without module names begins none."""
        if not 0 < position < len(self._places):
            return False
        here = self._places[position]
        return bool(here) and here[0] != next(iter(self._places[position - 1]), None)

    def owner(self, members: Sequence[Range]) -> Owner:
        """Returns the outermost module list of which each member runs entries of its own.

        When all members run the same modules (weights shared by all layers): the innermost list
        of which they run one entry. When they come from several lists (two encoders): all of
        those, with a comma, provided that the period is the same.
        """
        places_of_members = [self._owning_places(*where) for where in members]
        list_owner = _owner(places_of_members)
        if list_owner.path is not None or not all(places_of_members):
            return list_owner
        by_list: dict[str, list[set[Place]]] = {}
        for places in places_of_members:
            by_list.setdefault(min(places).path, []).append(places)  # the outermost list
        owners = [_owner(group) for group in by_list.values()]
        paths = [owner.path for owner in owners if owner.path is not None]
        periods = {owner.period for owner in owners}
        if len(by_list) < 2 or len(paths) < len(owners) or len(periods) > 1:
            return list_owner
        return Owner(path=", ".join(paths), period=periods.pop(), pattern=None)

    def layer_starts(self, start: int, end: int, pattern: str) -> list[int]:
        """Returns positions after ``start`` where another entry of the list ``pattern`` begins."""
        starts = []
        last_indices: tuple[int, ...] | None = None
        for position in range(start, end):
            indices = next(
                (place.indices for place in self._places[position] if place.path == pattern), None
            )
            if indices is None or indices == last_indices:
                continue
            if last_indices is not None:
                starts.append(position)
            last_indices = indices
        return starts

    def _owning_places(self, start: int, end: int) -> set[Place]:
        """Returns the places with at least _MIN_NODES_SHARE of the range's named nodes."""
        counts = Counter(place for places in self._places[start:end] for place in places)
        named = sum(bool(places) for places in self._places[start:end])
        return {place for place, count in counts.items() if count >= _MIN_NODES_SHARE * named}


_PRODUCTS = ("mm", "addmm", "bmm", "linear", "convolution")
"""Operators whose result is named like the module that made it."""

_RESULTS = {"attention": ("output", "log-sum-exp"), "layer_norm": ("output", "mean", "rstd")}
"""A part of an operator's name -> its results in words."""


def role_of(node: fx.Node) -> str:
    """Returns the node's name for users, by its modules: ``mlp.up_proj``, ``attention output``."""
    path = ".".join(_inside_layer(node))
    source, index = node, 0
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        source, index = node.args[0], int(node.args[1])  # type: ignore[arg-type]
    name = getattr(source.target, "__name__", str(source.target)).partition(".")[0]
    for part, words in _RESULTS.items():
        if part in name and index < len(words):
            return f"{part if part == 'attention' else path or part} {words[index]}"
    if name in _PRODUCTS and path:
        return path
    return f"{path} {name}".strip()


def module_path(node: fx.Node) -> str:
    """Returns the innermost module around ``node``, as Dynamo writes it; empty: it says nothing."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(next((value[0] for value in reversed(stack.values())), ""))


def model_class(graphs: Iterable[fx.Graph]) -> str:
    """Returns the name of the class of the module around most of ``graphs``; empty: there is none.

    ``LlamaModel``, also where the compiled module is the LlamaForCausalLM around it.
    """
    nodes = (node for graph in graphs for node in graph.nodes)
    stacks = (node.meta.get("nn_module_stack") or {} for node in nodes)
    kinds = Counter(next(iter(stack.values()))[1] for stack in stacks if stack)
    kind = kinds.most_common(1)[0][0] if kinds else ""
    return str(getattr(kind, "__name__", kind)).rpartition(".")[2]


def modules_around(node: fx.Node) -> list[str]:
    """Returns the modules around ``node``, outermost first, as ``named_modules`` calls them.

    The node is of a graph whose function is a module.
    """
    stack = node.meta.get("nn_module_stack") or {}
    return [".".join(_steps(str(value[0]))[1:]) for value in stack.values()]


def _steps(path: str) -> list[str]:
    """Returns the attributes and indices of a path, beginning with the variable of the model."""
    steps = [step for step in _STEP.findall(path) if step not in _HIDDEN]
    return steps[1:] if steps[:1] in (["L"], ["G"]) else steps  # Dynamo's locals and globals


def _inside_layer(node: fx.Node) -> list[str]:
    """Returns the modules around ``node`` inside of the last numbered one, outermost first."""
    steps = [step for step in _STEP.findall(module_path(node)) if step not in _HIDDEN]
    numbered = [at for at, step in enumerate(steps) if step.isdigit()]
    return steps[numbered[-1] + 1 :] if numbered else []


def _owner(places: Sequence[set[Place]]) -> Owner:
    """Returns the list whose entries are the layers, given each layer's places.

    It is the outermost of which each layer runs entries of its own, else the innermost of which all
    layers run the same entry.
    """
    lists = sorted({(place.depth, place.path) for owned in places for place in owned})
    shared = None
    for _, pattern in lists:
        layers = [{place.indices for place in owned if place.path == pattern} for owned in places]
        if not all(layers):
            continue
        distinct = set.union(*layers)
        path = _readable(pattern, distinct)
        if len(distinct) >= len(places):
            period = len(distinct) // len(places)
            return Owner(path=path, period=period, pattern=pattern)
        if len(distinct) == 1:
            shared = Owner(path=path, period=1, pattern=None)
    return shared or Owner(path=None, period=1, pattern=None)


def _parse(path: str) -> tuple[Place, ...]:
    """Returns the numbered modules of a path as Dynamo writes it, outermost first."""
    steps = _steps(path)
    places: list[Place] = []
    indices: tuple[int, ...] = ()
    names: list[str] = []
    for step in steps:
        if step.isdigit():
            indices = (*indices, int(step))
            places.append(Place(depth=len(indices), path=".".join(names), indices=indices))
        names.append("*" if step.isdigit() else step)
    return tuple(places)


def _readable(pattern: str, entries: set[tuple[int, ...]]) -> str:
    """Returns ``pattern`` without its first name, with numbers that all entries share filled in.

    ``self.stages.*.blocks``, entries (1, 0) and (1, 1) -> ``stages.1.blocks``.
    """
    names = pattern.split(".")
    level = 0
    for position, name in enumerate(names):
        if name == "*":
            numbers = {indices[level] for indices in entries}
            level += 1
            if len(numbers) == 1:
                names[position] = str(numbers.pop())
    return ".".join(names[1:]) or _MODEL.get(names[0], names[0])
