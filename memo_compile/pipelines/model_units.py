"""A model's Dynamo graph as units that a pipeline may be cut between, and the graph of a few.

    embed, layers.0, layers.1, .., norm, head    ->    [embed] [layers.0] [layers.1] .. [norm, head]

A unit begins where a layer of the model's own list begins, or the first module behind the last
layer: there ``SplitPoint.BEGINNING`` cuts as well. The graph of several neighbouring units is what
Dynamo would hand over if they alone were compiled as a stage: what crosses its borders comes in as
an input, and goes out as a result.
"""

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
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
    """A range of the graph that stays together."""

    module: str
    """Where it begins, fully qualified; empty for the first."""
    modules: tuple[str, ...]
    """All that it runs: layers, and the outermost others that hold no layers."""
    is_layer: bool
    nodes: tuple[fx.Node, ...]
    signature: str
    """Equal for units that compute the same, of other numbers."""


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
        """Equal for ranges that compute the same; the first and the last unit are their own."""
        return tuple(unit.signature for unit in self.units[begin:end])

    def parameters(self, begin: int, end: int) -> list[torch.nn.Parameter]:
        """What units ``[begin, end)`` read, each once."""
        nodes = {node for unit in self.units[begin:end] for node in unit.nodes}
        return [
            value
            for node, value in self.given.items()
            if isinstance(value, torch.nn.Parameter) and not nodes.isdisjoint(node.users)
        ]

    def received_bytes(self, begin: int) -> int:
        """What units from ``begin`` on, or the user, read of those before and need gradients of."""
        before = {node for unit in self.units[:begin] for node in unit.nodes}
        crossing = (node for node in before if not before.issuperset(node.users))
        return sum(node.meta["example_value"].nbytes for node in crossing if _needs_gradient(node))

    def graph(self, begin: int, end: int) -> tuple[fx.GraphModule, list[Any]]:
        """The graph of units ``[begin, end)``, and examples of its inputs.

        Raises UnsupportedGraph: something else than a tensor crosses its borders.
        """
        inside = [node for unit in self.units[begin:end] for node in unit.nodes]
        own = set(inside)
        read = {source for node in inside for source in node.all_input_nodes} - own
        results = [node for node in inside if not own.issuperset(node.users)]
        for node in (*read, *results):
            _require_tensor(node)
        graph, made, examples = fx.Graph(), {}, []
        for node in self.gm.graph.nodes:
            if node in read and node.op != "get_attr":
                made[node] = _placeholder(graph, node)
                examples.append(self.given[node] if node in self.given else _leaf(node))
        for node in [*(node for node in read if node.op == "get_attr"), *inside]:
            args = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
            made[node] = fx_graphs.like_node(graph, node, *args)
            made[node].meta = dict(node.meta)
        graph.output(tuple(made[node] for node in results))
        return fx_graphs.like_dynamo(self.gm, graph), examples


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """An input of ``graph`` with the value of ``node``."""
    made = graph.placeholder(node.name)
    made.meta = dict(node.meta)
    if node.op != "placeholder":
        made.meta.pop("nn_module_stack", None)
    made._dynamo_source = getattr(node, "_dynamo_source", None)
    return made


def _leaf(node: fx.Node) -> torch.Tensor:
    """What a stage is sent in place of what ``node`` makes."""
    value = node.meta["example_value"]
    mode = fx_graphs.detect_fake_mode([value])
    assert mode is not None, "Dynamo's values are fakes"
    with mode:
        made = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
        return made.requires_grad_(value.requires_grad)


def _require_tensor(node: fx.Node) -> None:
    if node.op == "get_attr" or _is_tensor(node):
        return
    raise UnsupportedGraph(
        f"{node.name} ({node.target}) is no tensor, and would cross the border of a stage: compute "
        "it where it is used"
    )


def units_of(model: torch.nn.Module, gm: fx.GraphModule, examples: Sequence[Any]) -> ModelUnits:
    """The units of ``gm``, the Dynamo graph of ``model``.

    Raises:
        ConfigError: the model has no list of layers, at least two of one class, that run one after
            the other.
        UnsupportedGraph: nothing needs a gradient.
    """
    nodes = [node for node in gm.graph.nodes if node.op not in _NOT_RUN]
    known = {name: type(module) for name, module in model.named_modules()}
    chains = [[name for name in modules_around(node) if name in known] for node in nodes]
    entries = _entries(chains, known)
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


def _is_numbered(name: str) -> bool:
    return name.rpartition(".")[2].isdigit()


def _entries(chains: Sequence[Sequence[str]], known: Mapping[str, type]) -> dict[str, bool]:
    """The entries of the outermost lists that hold two modules of one class -> it is a layer.

    All modules of a ModuleList are, and of a Sequential those whose class comes twice.
    """
    lists: dict[str, dict[str, None]] = {}
    for chain in chains:
        for name in filter(_is_numbered, chain):
            lists.setdefault(name.rpartition(".")[0], {})[name] = None
    found: dict[str, bool] = {}
    for path, own in sorted(lists.items(), key=lambda item: item[0].count(".")):
        counts = Counter(known[name] for name in own)
        if max(counts.values()) < 2 or any(f"{path}.".startswith(f"{name}.") for name in found):
            continue
        is_chain = issubclass(known[path], torch.nn.Sequential)
        found.update({name: not is_chain or counts[known[name]] > 1 for name in own})
    return found


def _owners(chains: Sequence[Sequence[str]], entries: Set[str]) -> list[str | None]:
    """Per node the entry that runs it, or the outermost module that holds none."""
    around = {""}
    for name in entries:
        steps = name.split(".")
        around.update(".".join(steps[:length]) for length in range(1, len(steps)))
    found = []
    for chain in chains:
        entry = next((name for name in chain if name in entries), None)
        found.append(entry or next((name for name in chain if name not in around), None))
    return found


def _borders(owners: Sequence[str | None], entries: Set[str], first_trained: int) -> list[int]:
    """Where an entry begins, or the first module behind the last one; no module spans them.

    What comes before node ``first_trained`` needs no gradient, and cannot be a stage.
    """
    last = {owner: at for at, owner in enumerate(owners) if owner is not None}
    behind = 1 + max((at for owner, at in last.items() if owner in entries), default=len(owners))
    found, open_until, tail_begins = [], -1, False
    for at, owner in enumerate(owners):
        if owner is None:
            continue
        begins = owner in entries or (at >= behind and not tail_begins)
        tail_begins |= at >= behind
        if begins and at > max(open_until, first_trained):
            found.append(at)
        open_until = max(open_until, last[owner])
    return found


def _units(
    nodes: Sequence[fx.Node],
    owners: Sequence[str | None],
    borders: Sequence[int],
    entries: Mapping[str, bool],
) -> Iterator[ModelUnit]:
    """The ranges between borders; a part of a tuple goes where the tuple is made."""
    starts = borders if not any(owners[: borders[0]]) else [0, *borders]
    number_at = [0] * len(nodes)
    for number, start in enumerate(starts):
        if number:
            number_at[start:] = [number] * (len(nodes) - start)
    place = dict(zip(nodes, number_at, strict=True))
    for node in nodes:
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source in place and not _is_tensor(source):
            place[node] = place[source]
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else len(nodes)
        first = 0 if number == 0 else start
        own = tuple(node for node in nodes if place[node] == number)
        names = dict.fromkeys(name for name in owners[first:end] if name is not None)
        is_layer = any(entries.get(name, False) for name in names)
        yield ModelUnit(
            module=(owners[start] or "") if number else "",
            modules=tuple(names),
            is_layer=is_layer,
            nodes=own,
            signature=_signature(own),
        )


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _needs_gradient(node: fx.Node) -> bool:
    return _is_tensor(node) and node.meta["example_value"].requires_grad


def _signature(nodes: Sequence[fx.Node]) -> str:
    """Stands for what ``nodes`` compute: operators, wiring, shapes, and what leaves them."""
    own = {node: at for at, node in enumerate(nodes)}
    given: dict[fx.Node, int] = {}

    def name(node: fx.Node) -> str:
        if node in own:
            return f"%{own[node]}"
        number = given.setdefault(node, len(given))
        return f"${number}:{_spec(node)}"

    text = []
    for node in nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), name)
        leaves = not all(user in own for user in node.users)
        text.append(f"{node.op} {node.target} {arguments} -> {_spec(node)} {leaves}")
    return digest_of(text)


def _spec(node: fx.Node) -> str:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    trains = isinstance(value, torch.nn.Parameter), value.requires_grad
    return f"{value.dtype}{list(value.shape)}{list(value.stride())}{value.device}{trains}"


def _shared(
    model: torch.nn.Module, units: Sequence[ModelUnit], given: Mapping[fx.Node, Any]
) -> dict[str, tuple[str, ...]]:
    """Trained weight that several units read -> the modules at which these begin."""
    names = {id(own): name for name, own in model.named_parameters()}
    found = {}
    for node, value in given.items():
        if not isinstance(value, torch.nn.Parameter) or not value.requires_grad:
            continue
        readers = [unit for unit in units if not node.users.keys().isdisjoint(unit.nodes)]
        if len(readers) > 1:
            places = tuple(unit.modules[0] if unit.modules else "" for unit in readers)
            found[names.get(id(value), node.name)] = places
    return found
