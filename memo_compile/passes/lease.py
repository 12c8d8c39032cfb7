"""Takes saved activations out of autograd's hands: they stay in the frame, a handle travels."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from memo_runtime import ops
from torch import fx
from torch.utils import _pytree as pytree

from memo_compile.analysis.joint_units import is_tangent
from memo_compile.analysis.views import is_tensor, storage_of

HANDLE = "memo_handle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """The two graphs that go back to AOTAutograd, and what stays in the frame between them."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    leased: tuple[str, ...]


def lease_saved(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    handle_value: torch.Tensor,
) -> Halves:
    """Replace the saved activations between two halves by one handle, in place.

    Rewrite:
        forward:  return loss, primal, mul, mm     forward:  h = lease(mul, mm)
                                                             return loss, primal, h
        backward: (primal, mul, mm, tangent)    -> backward: (primal, h, tangent)
                                                             mul = fetch(h, 0); mm = fetch(h, 1)

    Inputs and whatever shares storage with a user's output travel as before: the user may write
    into those, and only autograd's version counters notice.
    """
    output = forward.graph.find_nodes(op="output")[0]
    outputs = list(output.args[0])
    visible = {storage_of(node) for node in outputs[:num_fwd_outputs] if isinstance(node, fx.Node)}
    leased = [
        node
        for node in outputs[num_fwd_outputs:]
        if is_tensor(node) and node.op == "call_function" and storage_of(node) not in visible
    ]
    with forward.graph.inserting_before(output):
        handle = forward.graph.call_function(ops.lease, tuple(leased))
    handle.meta["val"] = handle_value
    handle.meta["saved_tensor_with_no_vc_check"] = True
    kept = [node for node in outputs[num_fwd_outputs:] if node not in set(leased)]
    tensors = [node for node in kept if _is_plain_saved(node)]
    others = [node for node in kept if not _is_plain_saved(node)]
    _set_outputs(output, [*outputs[:num_fwd_outputs], *tensors, handle, *others])
    _fetch_in_backward(backward, [node.name for node in leased], handle)
    return Halves(
        forward=_refresh(forward),
        backward=_refresh(backward),
        leased=tuple(node.name for node in leased),
    )


def _is_plain_saved(node: object) -> bool:
    """True for a saved tensor that autograd checks for writes; the handle comes after those."""
    return is_tensor(node) and not node.meta.get("saved_tensor_with_no_vc_check", False)  # type: ignore[attr-defined]


def _set_outputs(output: fx.Node, values: list[Any]) -> None:
    before = list(pytree.arg_tree_leaves(*output.args))
    for key in ("desc", "output_stack_traces"):
        found = output.meta.get(key)
        if isinstance(found, list) and len(found) == len(before):
            known = {id(node): item for node, item in zip(before, found, strict=True)}
            output.meta[key] = [known.get(id(node), found[-1]) for node in values]
    output.args = (tuple(values),)


def _fetch_in_backward(backward: fx.GraphModule, names: list[str], handle: fx.Node) -> None:
    """Swap the placeholders ``names`` for fetches from a new placeholder behind saved tensors."""
    graph = backward.graph
    placeholders = graph.find_nodes(op="placeholder")
    saved = list(itertools.takewhile(lambda node: not is_tangent(node), placeholders))
    anchor = next((node for node in reversed(saved) if _is_plain_saved(node)), None)
    if anchor is not None:
        context = graph.inserting_after(anchor)
    else:
        context = graph.inserting_before(next(iter(graph.nodes)))
    with context:
        source = graph.placeholder(HANDLE)
    source.meta.update(handle.meta)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    by_name = {node.name: node for node in placeholders}
    for index, name in enumerate(names):
        old = by_name.get(name)
        if old is None:
            continue
        with graph.inserting_before(first):
            new = graph.call_function(ops.fetch, (source, index))
        new.meta.update(old.meta)
        old.replace_all_uses_with(new)
        graph.erase_node(old)
        new.name = name  # both halves know a saved value by the name of the node that makes it


def _refresh(gm: fx.GraphModule) -> fx.GraphModule:
    gm.graph.lint()
    gm.recompile()
    return gm
