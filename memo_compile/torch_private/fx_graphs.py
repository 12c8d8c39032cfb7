"""Private torch APIs of graphs and of the fake tensors in them. Read in torch 2.11.0 and 2.13.0."""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

from memo_compile.torch_private.patches import replaced


def graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Returns ``graph`` as a module with the attributes of ``root``.

    Its code is written when it is first called: mostly nodes are run one by one, or lowered.
    """
    return _LazyGraphModule(root, graph)


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of ``gm``, to be rewritten; names and Dynamo's notes are kept."""
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        args = fx.node.map_arg((node.args, node.kwargs), nodes.__getitem__)
        copy = nodes[node] = like_node(graph, node, *args)
        copy.meta.update(node.meta)
        if node.op == "placeholder" and hasattr(node, "_dynamo_source"):
            copy._dynamo_source = node._dynamo_source  # where Dynamo found the input
    return like_dynamo(gm, graph)


def like_dynamo(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Returns ``graph`` as a module with the attributes of ``gm``, and Dynamo's notes."""
    module = graph_module(gm, graph)
    module.meta.update(gm.meta)
    for name in ("_param_name_to_source", "_backend_id"):  # read by AOTAutograd, 2.11 and 2.13
        if hasattr(gm, name):
            setattr(module, name, getattr(gm, name))
    return module


def like_node(graph: fx.Graph, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    """Appends a node to ``graph`` that is like ``node``, with these arguments.

    Arguments are set afterwards, past torch's checks, which take most of the time of a copy:
    ``create_node`` searches them for raw symbols, and each attribute that is set updates the
    graph's table of targets (2.13).
    """
    copy = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    if copy.name != node.name:
        copy.name = node.name
    for name, value in (("args", args), ("kwargs", kwargs)):
        if value:
            object.__setattr__(copy, name, value)
    return copy


def wrong_fake(node: fx.Node) -> str:
    """Says why the fake results of ``node`` are wrong; empty: nothing is known.

    CPU attention of float64 returns its log-sum-exp in float64. Torch 2.11 says float32, and a
    planned buffer of that type would lose half of it; 2.13 says float64.
    """
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    if node.target is attention:
        out, lse = node.meta["val"]
        if out.dtype is torch.float64 and lse.dtype is not torch.float64:
            return f"torch {torch.__version__} takes the log-sum-exp of {out.dtype} for {lse.dtype}"
    return ""


real_tensors = unset_fake_temporarily
"""Inside, tensors are real, although a compilation on fakes is going on."""


def fake_mode(*, real_inputs: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Tensors made inside take no memory; with ``real_inputs`` real ones may be mixed in."""
    return torch._subclasses.FakeTensorMode(allow_non_fake_inputs=real_inputs)


def failing_fakes_unlogged() -> contextlib.AbstractContextManager[None]:
    """Operators may refuse the shapes of fakes inside; torch logs each with a traceback."""
    return replaced(logging.getLogger("torch._subclasses.fake_tensor"), disabled=True)


def set_results(output: fx.Node, values: Sequence[Any]) -> None:
    """Lets a graph return ``values``; torch's notes of the results stay with those that stay."""
    before = list(pytree.arg_tree_leaves(*output.args))
    for key in ("desc", "output_stack_traces"):
        notes = output.meta.get(key)
        if isinstance(notes, list) and len(notes) == len(before):
            note_of = {id(node): item for node, item in zip(before, notes, strict=True)}
            output.meta[key] = [note_of.get(id(node), notes[-1]) for node in values]
    output.args = (tuple(values),)
