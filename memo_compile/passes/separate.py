"""Gives each result a storage of its own, where it has one in the user's program."""

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
    """No result at a position of ``own`` shares memory with an input or with another result.

    Two parameters that are added have one gradient; one of them may see it through a view. Whoever
    takes such gradients over as they are (autograd does, for a first ``.grad``) would add to both
    when it adds to one. Inductor's own passes also return ``y`` for ``y * ones``.

    Rewrite, with ``own`` = (0, 1):
        g = mm(x, t)                   g = mm(x, t)
        v = view(g, [8])          ->   v = view(g, [8])
        return g, v                    c = clone(v)
                                       return g, c

    Ranges of one storage that do not meet stay as they are: eager's ``cat`` gives its parts such
    gradients. Of what shares memory the first keeps it. What a forward saves for its backward may
    share memory with a result, as in eager: autograd's version counters guard it.
    """

    own: tuple[int, ...]
    """Positions of results that the user's program makes apart from all others."""
    num_results: int | None = None
    """How many results are the user's; the rest is saved for the backward. None: all are."""
    name: ClassVar[str] = "separate-results"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        output, results = gm.graph.output_node(), results_of(gm.graph)
        separated: list[Any] = list(results)
        own = set(self.own)
        users = results[: self.num_results]
        nodes = {at: result for at, result in enumerate(users) if isinstance(result, fx.Node)}
        taken: dict[fx.Node, list[fx.Node]] = {}  # by storage
        for at, other in nodes.items():
            if at not in own and is_tensor(other):
                taken.setdefault(storage_of(other), []).append(other)
        for at in self.own:
            node = nodes.get(at)
            if node is None or not is_tensor(node):
                continue
            root = storage_of(node)
            if is_given(root) or any(overlap(node, before) for before in taken.get(root, ())):
                separated[at] = _clone(node)
            else:
                taken.setdefault(root, []).append(node)
        if separated == list(results):
            return PassResult(gm, False)
        output.args = (tuple(separated),)
        return PassResult(gm, True)


def overlap(first: fx.Node, second: fx.Node) -> bool:
    """True for values in one storage that have a byte between their first and last in common."""
    if storage_of(first) is not storage_of(second):
        return False
    (a_start, a_end), (b_start, b_end) = _range(first.meta["val"]), _range(second.meta["val"])
    return a_start < b_end and b_start < a_end


def _range(value: torch.Tensor) -> tuple[int, int]:
    """From the first byte of ``value`` in its storage to the one behind its last."""
    start = int(value.storage_offset()) * value.element_size()
    return start, start + storage_bytes(value)


def _clone(node: fx.Node) -> fx.Node:
    """A copy made where ``node`` is: a later write into its memory is not in it."""
    graph = node.graph
    if node.op == "placeholder":
        place = graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder"))
    else:
        place = graph.inserting_after(node)
    with place:
        copied = graph.call_function(torch.ops.aten.clone.default, (node,))
    copied.meta = {**node.meta, "val": node.meta["val"].clone()}
    return copied
