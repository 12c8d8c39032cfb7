"""Gives each result a storage of its own, if it has one in the user's program."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.analysis.regions import storage_bytes
from memo_compile.analysis.views import is_tensor, results_of, storage_of
from memo_compile.passes.lease import is_given


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateResults:
    """Clones results at ``own_results`` that share memory with an input or another result.

    Two parameters that are added have one gradient; one of them may see it through a view. If
    autograd takes both as ``.grad`` without a copy, adding to one would add to the other.
    Inductor's own passes also return ``y`` for ``y * ones``.

    Rewrite, with ``own_results`` = (0, 1):
        g = mm(x, t)                   g = mm(x, t)
        v = view(g, [8])          ->   v = view(g, [8])
        return g, v                    c = clone(v)
                                       return g, c

    Results that do not overlap in one storage stay as they are: eager's ``cat`` gives its parts
    such gradients. Of several that overlap the first keeps the memory. A tensor that a forward
    saves may share memory with a result, as in eager: autograd's version counters guard it.
    """

    own_results: tuple[int, ...]
    """Positions of results that have a storage of their own in the user's program."""
    num_results: int | None = None
    """How many results are the user's; the others are saved for the backward. None: all are."""
    name: ClassVar[str] = "separate-results"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        output, results = gm.graph.output_node(), results_of(gm.graph)
        separated: list[Any] = list(results)
        positions = set(self.own_results)
        user_results = enumerate(results[: self.num_results])
        nodes = {at: result for at, result in user_results if isinstance(result, fx.Node)}
        values_in: dict[fx.Node, list[fx.Node]] = {}  # storage -> results that stay in it
        for at, node in nodes.items():
            if at not in positions and is_tensor(node):
                values_in.setdefault(storage_of(node), []).append(node)
        for at in self.own_results:
            result = nodes.get(at)
            if result is None or not is_tensor(result):
                continue
            root = storage_of(result)
            if is_given(root) or any(overlap(result, other) for other in values_in.get(root, ())):
                separated[at] = _clone(result)
            else:
                values_in.setdefault(root, []).append(result)
        if separated == list(results):
            return PassResult(gm, False)
        output.args = (tuple(separated),)
        return PassResult(gm, True)


def overlap(first: fx.Node, second: fx.Node) -> bool:
    """True for values in one storage whose ranges from first to last byte overlap."""
    if storage_of(first) is not storage_of(second):
        return False
    (a_start, a_end), (b_start, b_end) = _range(first.meta["val"]), _range(second.meta["val"])
    return a_start < b_end and b_start < a_end


def _range(value: torch.Tensor) -> tuple[int, int]:
    """Returns the first byte of ``value`` in its storage, and the one behind its last."""
    start = int(value.storage_offset()) * value.element_size()
    return start, start + storage_bytes(value)


def _clone(node: fx.Node) -> fx.Node:
    """Copies ``node`` directly behind it, so that later writes into its memory do not count."""
    graph = node.graph
    if node.op == "placeholder":
        place = graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder"))
    else:
        place = graph.inserting_after(node)
    with place:
        copied = graph.call_function(torch.ops.aten.clone.default, (node,))
    copied.meta = {**node.meta, "val": node.meta["val"].clone()}
    return copied
