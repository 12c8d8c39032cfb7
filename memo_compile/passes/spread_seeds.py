"""Makes dropout's seeds, each a tensor of one number, by one kernel for all."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from memo_runtime.ops import spread
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.analysis.views import results_of
from memo_compile.passes.extract import call_like

_aten = torch.ops.aten

FEWEST = 2
"""For a single seed nothing is gained: it is one kernel either way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadSeeds:
    """Fills the buffers of all seeds that leave a region by one operator.

    Else each is a kernel of its own: three for each layer of GPT-2, before the first layer.

    Rewrite:
        a = lookup_seed(seeds, 1)           p = empty_strided([1]); q = empty_strided([1])
        b = lookup_seed(seeds, 2)     ->    spread(p, q, seeds, [1, 2])
        return a, b                         return view(p, []), view(q, [])
    """

    external_outputs: frozenset[int]
    """Positions of results that go to the user, and are left as they are."""
    name: ClassVar[str] = "spread-seeds"
    is_required: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        results = results_of(gm.graph)
        leaving = {node for at, node in enumerate(results) if at not in self.external_outputs}
        lookups_of: dict[fx.Node, list[fx.Node]] = {}
        for node in gm.graph.nodes:
            if node.target is torch.ops.prims.inductor_lookup_seed.default and node in leaving:
                lookups_of.setdefault(node.args[0], []).append(node)
        spread_lookups = {
            seeds: nodes for seeds, nodes in lookups_of.items() if len(nodes) >= FEWEST
        }
        for seeds, nodes in spread_lookups.items():
            _spread(seeds, nodes)
        return PassResult(gm, bool(spread_lookups))


def _spread(seeds: fx.Node, lookups: list[fx.Node]) -> None:
    """Replaces ``lookups`` of seeds, of shape [], by views of buffers that one operator fills."""
    graph = seeds.graph
    with graph.inserting_before(lookups[0]):
        buffers = [_empty(graph, node.meta["val"]) for node in lookups]
        numbers = [node.args[1] for node in lookups]
        call = graph.call_function(spread(len(lookups)), (*buffers, seeds, numbers))
        call.meta["val"] = None
        views = [graph.call_function(_aten.view.default, (buffer, [])) for buffer in buffers]
    for node, view in zip(lookups, views, strict=True):
        view.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(view)
        graph.erase_node(node)


def _empty(graph: fx.Graph, value: torch.Tensor) -> fx.Node:
    """Adds an empty tensor of shape [1]: for one of shape [] Inductor launches a kernel."""
    settings, empty = {"dtype": value.dtype, "device": value.device}, value.reshape(1)
    return call_like(graph, _aten.empty_strided.default, ([1], [1]), settings, like=empty)
