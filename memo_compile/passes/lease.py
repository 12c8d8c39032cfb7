"""Keeps saved activations in memo's frame of the arena: autograd saves a handle in their place."""

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from memo_runtime import ops
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.analysis.joint_units import is_tangent
from memo_compile.analysis.views import is_tensor, results_of, storage_of
from memo_compile.torch_private import fx_graphs

HANDLE = "memo_handle"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSaved:
    """Returns one handle from the forward in place of the activations that it saves.

    Rewrite, with ``num_fwd_outputs`` = 1:
        return loss, primal, mul, mm    ->    h = lease(mul, mm)
                                              return loss, primal, h

    Autograd still saves inputs, and values that share storage with a user's output: the user may
    write into those, and only autograd's version counters notice. It saves the handle like them,
    through saved-tensor hooks: a hook that drops or packs saved tensors does so with the handle.
    """

    num_fwd_outputs: int
    """How many outputs are the user's; those behind them are saved for the backward."""
    handle_value: torch.Tensor
    """The handle as a fake tensor."""
    name: ClassVar[str] = "lease-saved"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        output, results = gm.graph.output_node(), results_of(gm.graph)
        user_results: list[Any] = list(results[: self.num_fwd_outputs])
        saved: list[Any] = list(results[self.num_fwd_outputs :])
        visible = {storage_of(node) for node in user_results if isinstance(node, fx.Node)}
        leased = [
            node
            for node in saved
            if is_tensor(node) and node.op == "call_function" and storage_of(node) not in visible
        ]
        with gm.graph.inserting_before(output):
            handle = gm.graph.call_function(ops.lease, tuple(leased))
        handle.meta["val"] = self.handle_value
        saved_by_autograd = [node for node in saved if node not in set(leased)]
        checked = [node for node in saved_by_autograd if _is_checked(node)]
        unchecked = [node for node in saved_by_autograd if not _is_checked(node)]
        fx_graphs.set_results(output, [*user_results, *checked, handle, *unchecked])
        return PassResult(gm, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLeased:
    """Lets the backward take the handle, and fetch by it what its forward has leased.

    Rewrite, with ``leased`` = ("mul", "mm"):
        (primal, mul, mm, tangent)    ->    (primal, h, tangent)
                                            mul = fetch(h, 0)
                                            mm  = fetch(h, 1)

    Values that the backward does not read are not fetched.
    """

    leased: tuple[str, ...]
    """The names of the values in the frame, in order; both halves use the same names."""
    handle_value: torch.Tensor
    """The handle as a fake tensor."""
    name: ClassVar[str] = "fetch-leased"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        graph = gm.graph
        placeholders = graph.find_nodes(op="placeholder")
        handle = _handle_behind_saved(graph, placeholders)
        handle.meta["val"] = self.handle_value
        first = next(node for node in graph.nodes if node.op != "placeholder")
        by_name = {node.name: node for node in placeholders}
        for index, name in enumerate(self.leased):
            old = by_name.get(name)
            if old is None:
                continue
            with graph.inserting_before(first):
                new = graph.call_function(ops.fetch, (handle, index))
            new.meta.update(old.meta)
            old.replace_all_uses_with(new)
            graph.erase_node(old)
            new.name = name
        return PassResult(gm, True)


def leased_names(forward: fx.GraphModule) -> tuple[str, ...]:
    """Returns the names of the values that a forward has leased (``LeaseSaved``), in order."""
    (lease,) = forward.graph.find_nodes(op="call_function", target=ops.lease)
    return tuple(node.name for node in lease.args if isinstance(node, fx.Node))


def is_given(node: fx.Node) -> bool:
    """True for a node that a half has before its first operator runs: input, constant, fetch."""
    return node.op in ("placeholder", "get_attr") or node.target is ops.fetch


def _is_checked(node: object) -> bool:
    """True for a saved tensor that autograd checks for writes; the handle is the last of those."""
    return is_tensor(node) and not node.meta.get("saved_tensor_with_no_vc_check", False)  # type: ignore[attr-defined]


def _handle_behind_saved(graph: fx.Graph, placeholders: list[fx.Node]) -> fx.Node:
    """Adds a placeholder for the handle, behind the saved tensors that autograd checks."""
    saved = itertools.takewhile(lambda node: not is_tangent(node), placeholders)
    checked = [node for node in saved if _is_checked(node)]
    first = next(iter(graph.nodes))
    with graph.inserting_after(checked[-1]) if checked else graph.inserting_before(first):
        return graph.placeholder(HANDLE)
