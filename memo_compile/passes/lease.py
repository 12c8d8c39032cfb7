"""Takes saved activations out of autograd's hands: they stay in the frame, a handle travels."""

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from memo_runtime import ops
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils import _pytree as pytree

from memo_compile.analysis.joint_units import is_tangent
from memo_compile.analysis.views import is_tensor, results_of, storage_of

HANDLE = "memo_handle"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSaved:
    """A forward returns one handle in place of the activations that it saves.

    Rewrite, with ``num_fwd_outputs`` = 1:
        return loss, primal, mul, mm    ->    h = lease(mul, mm)
                                              return loss, primal, h

    Inputs and whatever shares storage with a user's output travel as before: the user may write
    into those, and only autograd's version counters notice. The handle is saved like them, through
    saved-tensor hooks: what drops or packs a saved tensor does so with the handle.
    """

    num_fwd_outputs: int
    """How many outputs are the user's; what follows is saved for the backward."""
    handle_value: torch.Tensor
    """The handle as a fake tensor."""
    name: ClassVar[str] = "lease-saved"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        output, results = gm.graph.output_node(), results_of(gm.graph)
        users: list[Any] = list(results[: self.num_fwd_outputs])
        saved: list[Any] = list(results[self.num_fwd_outputs :])
        visible = {storage_of(node) for node in users if isinstance(node, fx.Node)}
        leased = [
            node
            for node in saved
            if is_tensor(node) and node.op == "call_function" and storage_of(node) not in visible
        ]
        with gm.graph.inserting_before(output):
            handle = gm.graph.call_function(ops.lease, tuple(leased))
        handle.meta["val"] = self.handle_value
        kept = [node for node in saved if node not in set(leased)]
        tensors = [node for node in kept if _is_checked(node)]
        others = [node for node in kept if not _is_checked(node)]
        _set_outputs(output, [*users, *tensors, handle, *others])
        return PassResult(gm, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLeased:
    """A backward takes the handle and fetches by it what its forward has leased.

    Rewrite, with ``leased`` = ("mul", "mm"):
        (primal, mul, mm, tangent)    ->    (primal, h, tangent)
                                            mul = fetch(h, 0)
                                            mm  = fetch(h, 1)

    What the backward does not read is not fetched.
    """

    leased: tuple[str, ...]
    """The names of the values in the frame, in order: both halves know them by these."""
    handle_value: torch.Tensor
    """The handle as a fake tensor."""
    name: ClassVar[str] = "fetch-leased"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        graph = gm.graph
        placeholders = graph.find_nodes(op="placeholder")
        source = _handle_behind_saved(graph, placeholders)
        source.meta["val"] = self.handle_value
        first = next(node for node in graph.nodes if node.op != "placeholder")
        by_name = {node.name: node for node in placeholders}
        for index, name in enumerate(self.leased):
            old = by_name.get(name)
            if old is None:
                continue
            with graph.inserting_before(first):
                new = graph.call_function(ops.fetch, (source, index))
            new.meta.update(old.meta)
            old.replace_all_uses_with(new)
            graph.erase_node(old)
            new.name = name
        return PassResult(gm, True)


def leased_names(forward: fx.GraphModule) -> tuple[str, ...]:
    """What a forward behind ``LeaseSaved`` leaves in the frame, in order."""
    (lease,) = forward.graph.find_nodes(op="call_function", target=ops.lease)
    return tuple(node.name for node in lease.args if isinstance(node, fx.Node))


def is_given(node: fx.Node) -> bool:
    """True for what a half of the step has before its first operator runs."""
    return node.op in ("placeholder", "get_attr") or node.target is ops.fetch


def _is_checked(node: object) -> bool:
    """True for a saved tensor that autograd checks for writes; the handle is the last of those."""
    return is_tensor(node) and not node.meta.get("saved_tensor_with_no_vc_check", False)  # type: ignore[attr-defined]


def _set_outputs(output: fx.Node, values: list[Any]) -> None:
    before = list(pytree.arg_tree_leaves(*output.args))
    for key in ("desc", "output_stack_traces"):
        found = output.meta.get(key)
        if isinstance(found, list) and len(found) == len(before):
            known = {id(node): item for node, item in zip(before, found, strict=True)}
            output.meta[key] = [known.get(id(node), found[-1]) for node in values]
    output.args = (tuple(values),)


def _handle_behind_saved(graph: fx.Graph, placeholders: list[fx.Node]) -> fx.Node:
    """A new placeholder for the handle, behind the saved tensors that autograd checks."""
    saved = itertools.takewhile(lambda node: not is_tangent(node), placeholders)
    checked = [node for node in saved if _is_checked(node)]
    first = next(iter(graph.nodes))
    with graph.inserting_after(checked[-1]) if checked else graph.inserting_before(first):
        return graph.placeholder(HANDLE)
