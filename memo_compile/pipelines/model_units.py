"""Divides a model's Dynamo graph into units that a pipeline may be cut between.

    embed, layers.0, layers.1, .., norm, head    ->    [embed] [layers.0] [layers.1] .. [norm, head]

A unit begins where a layer of the model's own list begins, or the first module behind the last
layer: there ``SplitPoint.BEGINNING`` cuts as well. The graph of several neighbouring units is what
Dynamo would hand over if they alone were compiled as a stage: what crosses its borders comes in as
an input, and goes out as a result.
"""

import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from memo_compile.analysis.module_paths import modules_around
from memo_compile.errors import ConfigError, UnsupportedGraph
from memo_compile.file_store import digest_of
from memo_compile.offline.plan_offline import NOTHING_TRAINS
from memo_compile.torch_private import fx_graphs

_NOT_RUN = ("placeholder", "get_attr", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUnit:
    """A range of the graph that is never cut: a layer, or what runs before or behind the layers."""

    module: str
    """The fully qualified name of the module at which it begins; empty for the first unit."""
    modules: tuple[str, ...]
    """All modules that it runs: layers, and the outermost others that hold no layers."""
    is_layer: bool
    nodes: tuple[fx.Node, ...]
    signature: str
    """Equal for units that compute the same with other weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUnits:
    """The units of a model, in the order in which they run."""

    gm: fx.GraphModule
    given: Mapping[fx.Node, Any]
    """Placeholder -> its example."""
    units: tuple[ModelUnit, ...]
    shared: Mapping[str, tuple[str, ...]]
    """Weight that several units read -> where these begin."""

    @property
    def num_layers(self) -> int:
        """How many units are layers."""
        return sum(unit.is_layer for unit in self.units)

    def signature(self, begin: int, end: int) -> tuple[str, ...]:
        """Equal for ranges of units that compute the same."""
        return tuple(unit.signature for unit in self.units[begin:end])

    def parameters(self, begin: int, end: int) -> list[torch.nn.Parameter]:
        """The parameters that units ``[begin, end)`` read, each once."""
        nodes = {node for unit in self.units[begin:end] for node in unit.nodes}
        return [
            value
            for node, value in self.given.items()
            if isinstance(value, torch.nn.Parameter) and not nodes.isdisjoint(node.users)
        ]

    def received_bytes(self, begin: int) -> int:
        """Bytes of the activations with gradients that cross the border before unit ``begin``."""
        before = {node for unit in self.units[:begin] for node in unit.nodes}
        crossing = (node for node in before if not before.issuperset(node.users))
        return sum(node.meta["example_value"].nbytes for node in crossing if _needs_gradient(node))

    def graph(self, begin: int, end: int) -> tuple[fx.GraphModule, list[Any]]:
        """The graph of units ``[begin, end)``, and examples of its inputs.

        Raises UnsupportedGraph: something else than a tensor crosses its borders.
        """
        inside = {node: None for unit in self.units[begin:end] for node in unit.nodes}
        inputs = {source for node in inside for source in node.all_input_nodes} - inside.keys()
        results = [node for node in inside if any(user not in inside for user in node.users)]
        for node in (*inputs, *results):
            _require_tensor(node)
        graph, copy_of, examples = fx.Graph(), {}, []
        for node in self.gm.graph.nodes:
            if node in inputs and node.op != "get_attr":
                copy_of[node] = _placeholder(graph, node)
                examples.append(self.given[node] if node in self.given else _leaf(node))
        constants = (node for node in inputs if node.op == "get_attr")  # copied, not given
        for node in (*constants, *inside):
            args = fx.node.map_arg((node.args, node.kwargs), copy_of.__getitem__)
            copy_of[node] = fx_graphs.like_node(graph, node, *args)
            copy_of[node].meta = dict(node.meta)
        graph.output(tuple(copy_of[node] for node in results))
        return fx_graphs.like_dynamo(self.gm, graph), examples


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """An input of ``graph`` with the value of ``node``."""
    placeholder = graph.placeholder(node.name)
    placeholder.meta = dict(node.meta)
    if node.op != "placeholder":  # made by another stage: no module of this graph runs it
        placeholder.meta.pop("nn_module_stack", None)
    placeholder._dynamo_source = getattr(node, "_dynamo_source", None)
    return placeholder


def _leaf(node: fx.Node) -> torch.Tensor:
    """An example of the tensor that a stage receives for the result of ``node``."""
    value = node.meta["example_value"]
    mode = fx_graphs.detect_fake_mode([value])
    assert mode is not None, "Dynamo's values are fakes"
    with mode:
        received = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
        return received.requires_grad_(value.requires_grad)


def _require_tensor(node: fx.Node) -> None:
    """Raises UnsupportedGraph for a value that no stage can send."""
    if node.op == "get_attr" or _is_tensor(node):
        return
    raise UnsupportedGraph(
        f"{node.name} ({node.target}) is no tensor, and would cross the border of a stage: compute "
        "it where it is used"
    )


def units_of(model: torch.nn.Module, gm: fx.GraphModule, examples: Sequence[Any]) -> ModelUnits:
    """Divides ``gm``, the Dynamo graph of ``model``, into units.

    Raises:
        ConfigError: the model has no list of layers, at least two of one class, that run one after
            the other.
        UnsupportedGraph: nothing needs a gradient.
    """
    nodes = [node for node in gm.graph.nodes if node.op not in _NOT_RUN]
    classes = {name: type(module) for name, module in model.named_modules()}
    chains = [[name for name in modules_around(node) if name in classes] for node in nodes]
    entries = _entries(chains, classes)
    owners = _owners(chains, entries.keys())
    trained = [at for at, node in enumerate(nodes) if _needs_gradient(node)]
    if not trained:
        raise UnsupportedGraph(NOTHING_TRAINS)
    borders = _borders(owners, entries.keys(), trained[0])
    units = tuple(_units(nodes, owners, borders, entries)) if borders else ()
    if sum(unit.is_layer for unit in units) < 2:
        raise ConfigError(
            f"pipeline_split: {type(model).__name__} runs no list of modules, two or more of them "
            "of one class, one after the other: there is nothing to cut between"
        )
    given = dict(zip(gm.graph.find_nodes(op="placeholder"), examples, strict=True))
    return ModelUnits(gm=gm, given=given, units=units, shared=_shared(model, units, given))


def _entries(chains: Sequence[Sequence[str]], classes: Mapping[str, type]) -> dict[str, bool]:
    """Entry of an outermost list that holds two modules of one class -> whether it is a layer.

    All modules of a ModuleList are layers; of a Sequential those whose class comes twice.
    ``chains`` are the modules around each node, ``classes`` those of all modules by name.
    """
    lists: dict[str, dict[str, None]] = {}
    for chain in chains:
        for name in chain:
            parent, _, number = name.rpartition(".")
            if number.isdigit():
                lists.setdefault(parent, {})[name] = None
    entries: dict[str, bool] = {}
    for path, names in sorted(lists.items(), key=lambda item: item[0].count(".")):
        counts = Counter(classes[name] for name in names)
        if max(counts.values()) < 2 or any(f"{path}.".startswith(f"{name}.") for name in entries):
            continue
        is_sequential = issubclass(classes[path], torch.nn.Sequential)
        entries.update({name: not is_sequential or counts[classes[name]] > 1 for name in names})
    return entries


def _owners(chains: Sequence[Sequence[str]], entries: Set[str]) -> list[str | None]:
    """For each node the entry that runs it, or the outermost module that holds no entry."""
    parents = {""}
    for name in entries:
        steps = name.split(".")
        parents.update(".".join(steps[:length]) for length in range(1, len(steps)))
    owners = []
    for chain in chains:
        entry = next((name for name in chain if name in entries), None)
        owners.append(entry or next((name for name in chain if name not in parents), None))
    return owners


def _borders(owners: Sequence[str | None], entries: Set[str], first_trained: int) -> list[int]:
    """Indices of the nodes at which units begin: with an entry, or behind the last entry.

    No module runs on both sides of a border. What comes before node ``first_trained`` needs no
    gradient, and cannot be a stage of its own.
    """
    last = {owner: at for at, owner in enumerate(owners) if owner is not None}
    tail = 1 + max((at for owner, at in last.items() if owner in entries), default=len(owners))
    borders, open_until, has_tail_begun = [], -1, False
    for at, owner in enumerate(owners):
        if owner is None:
            continue
        begins = owner in entries or (at >= tail and not has_tail_begun)
        has_tail_begun |= at >= tail
        if begins and at > max(open_until, first_trained):
            borders.append(at)
        open_until = max(open_until, last[owner])  # a module that has begun runs until there
    return borders


def _units(
    nodes: Sequence[fx.Node],
    owners: Sequence[str | None],
    borders: Sequence[int],
    entries: Mapping[str, bool],
) -> Iterator[ModelUnit]:
    """The units between borders. Parts of a tuple belong to the unit that makes the tuple."""
    # What runs before the first border is a unit only where a module does.
    starts = borders if not any(owners[: borders[0]]) else [0, *borders]
    unit_of = {node: max(0, bisect_right(starts, at) - 1) for at, node in enumerate(nodes)}
    for node in nodes:
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source in unit_of and not _is_tensor(source):
            unit_of[node] = unit_of[source]
    for number, (start, end) in enumerate(pairwise([*starts, len(nodes)])):
        first = start if number else 0
        unit_nodes = tuple(node for node in nodes if unit_of[node] == number)
        names = dict.fromkeys(name for name in owners[first:end] if name is not None)
        yield ModelUnit(
            module=(owners[start] or "") if number else "",
            modules=tuple(names),
            is_layer=any(entries.get(name, False) for name in names),
            nodes=unit_nodes,
            signature=_signature(unit_nodes),
        )


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _needs_gradient(node: fx.Node) -> bool:
    return _is_tensor(node) and node.meta["example_value"].requires_grad


def _signature(nodes: Sequence[fx.Node]) -> str:
    """A digest of what ``nodes`` compute: operators, wiring, shapes, and what leaves them."""
    index_of = {node: at for at, node in enumerate(nodes)}
    inputs: dict[fx.Node, int] = {}

    def name(node: fx.Node) -> str:
        if node in index_of:
            return f"%{index_of[node]}"
        number = inputs.setdefault(node, len(inputs))
        return f"${number}:{_spec(node)}"

    lines = []
    for node in nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), name)
        leaves = not all(user in index_of for user in node.users)
        lines.append(f"{node.op} {node.target} {arguments} -> {_spec(node)} {leaves}")
    return digest_of(lines)


def _spec(node: fx.Node) -> str:
    """What the value of ``node`` is, but for its numbers."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    trains = isinstance(value, torch.nn.Parameter), value.requires_grad
    return f"{value.dtype}{list(value.shape)}{list(value.stride())}{value.device}{trains}"


def _shared(
    model: torch.nn.Module, units: Sequence[ModelUnit], given: Mapping[fx.Node, Any]
) -> dict[str, tuple[str, ...]]:
    """Trained weight that several units read -> the modules at which these begin."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    shared = {}
    for node, value in given.items():
        if not isinstance(value, torch.nn.Parameter) or not value.requires_grad:
            continue
        readers = [unit for unit in units if not node.users.keys().isdisjoint(unit.nodes)]
        if len(readers) > 1:
            places = tuple(unit.modules[0] if unit.modules else "" for unit in readers)
            shared[names.get(id(value), node.name)] = places
    return shared
