"""Rewrites bodies: graphs that a Dynamo graph calls, for ``checkpoint()`` and marked regions.

A body is a graph module of its own, an attribute of the graph that calls it:

    body = get_attr[wrap_body_0]
    out  = tag_activation_checkpoint(body, x, w)

AOTAutograd handles all operators with bodies. Two things are in the way of a plan: a region that
``nested_compile_region`` marks stays a subgraph, in which no layers are found; and a number that
only a body reads is not seen by the passes that put numbers in place of symbols.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.passes.cut import unique_name
from memo_compile.passes.numbers import is_wrapped_float, put_instead
from memo_compile.passes.runner import GraphPass, PassRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineRegions:
    """Inlines regions that ``torch.compiler.nested_compile_region`` marks.

    Rewrite:
        region = get_attr[subgraph_0]  # x, w: return (tanh(x @ w),)
        call_0 = invoke_subgraph(region, "subgraph_0", x, w_0)
        y      = call_0[0]                                              y = tanh(x @ w_0)
        call_1 = invoke_subgraph(region, "subgraph_0", y, w_1)    ->    z = tanh(y @ w_1)
        z      = call_1[0]

    The mark says that regions are equal. It is not needed: equal layers are found by what they
    compute, and lowered once. With it Inductor computes wrong gradients (torch 2.13.0).
    """

    name: ClassVar[str] = "inline-regions"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        regions = gm.graph.find_nodes(
            op="call_function", target=torch.ops.higher_order.invoke_subgraph
        )
        for call in regions:
            _inline(gm, call)
        if regions:
            gm.delete_all_unused_submodules()
        return PassResult(gm, bool(regions))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOutside:
    """Reads a number that Dynamo wraps into a tensor where its body is called, not inside.

    Rewrite, with ``dynamic=True`` and an attribute of the module that is a float:
        eps  = placeholder[L_eps]                    eps  = placeholder[L_eps]
                                                     item = eps.item()
        out  = checkpoint(body, x, eps)        ->    out  = checkpoint(body, x, item)
        # body: return x + eps.item()                # body: return x + eps
    """

    name: ClassVar[str] = "read-outside"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite ``gm`` in place, and the bodies that it calls."""
        modified = False
        for node in gm.graph.find_nodes(op="get_attr"):
            body = getattr(gm, str(node.target), None)
            if isinstance(body, fx.GraphModule):
                modified |= _read_outside(gm, node, body)
        return PassResult(gm, modified)


def with_plain_bodies(gm: fx.GraphModule) -> fx.GraphModule:
    """Rewrites ``gm`` in place so that it has no marked regions, and its bodies read no numbers."""
    passes: tuple[GraphPass, ...] = (InlineRegions(), ReadOutside())
    for body in _innermost_first(gm):
        PassRunner().run(body, passes, stage="dynamo-bodies")
    return gm


def _innermost_first(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yields the bodies in ``gm``, each behind the bodies in it; last ``gm`` itself."""
    for child in gm.children():
        if isinstance(child, fx.GraphModule):
            yield from _innermost_first(child)
    yield gm


def _inline(gm: fx.GraphModule, call: fx.Node) -> None:
    """Puts the nodes of the region in place of its call."""
    region, _name, *operands = call.args
    body = getattr(gm, str(region.target))  # type: ignore[union-attr]
    copies = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copy = copies[node] = gm.graph.node_copy(node, copies.__getitem__)
            if "nn_module_stack" in call.meta:  # a body is traced at its first call only
                copy.meta["nn_module_stack"] = call.meta["nn_module_stack"]
            if node.op == "get_attr":
                copy.target = _with_attribute(gm, getattr(body, str(node.target)), str(node.target))
    results = fx.node.map_arg(body.graph.output_node().args[0], copies.__getitem__)
    for item in list(call.users):
        assert item.target is operator.getitem, "Dynamo takes the results of a region one by one"
        put_instead(item, results[item.args[1]])
    gm.graph.erase_node(call)
    if not region.users:  # type: ignore[union-attr]
        gm.graph.erase_node(region)  # type: ignore[arg-type]


def _with_attribute(gm: fx.GraphModule, value: Any, name: str) -> str:
    """Returns the attribute of ``gm`` that is ``value``; if none is, adds one like ``name``."""
    attributes = {**vars(gm), **gm._parameters, **gm._buffers, **gm._modules}
    for present, attribute in attributes.items():
        if attribute is value:
            return present
    name = unique_name(name, attributes, "_")
    setattr(gm, name, value)
    return name


def _read_outside(gm: fx.GraphModule, node: fx.Node, body: fx.GraphModule) -> bool:
    """Reads wrapped numbers in front of each call of ``body``, and passes them to the call.

    ``node`` is the attribute ``body``. A call has the operands behind its bodies; an
    ``autograd.Function`` has two bodies, the second of which takes other operands. Returns False,
    and changes nothing, if ``body`` reads no number or a call has other operands.
    """
    placeholders = body.graph.find_nodes(op="placeholder")
    numbers = [at for at, source in enumerate(placeholders) if is_wrapped_float(source)]
    operands_of = {call: _operands(gm, call) for call in node.users}
    if not numbers or any(len(args) != len(placeholders) for args in operands_of.values()):
        return False
    for at in numbers:
        reads = list(placeholders[at].users)
        value = reads[0].meta["example_value"]
        for call, operands in operands_of.items():
            with gm.graph.inserting_before(call):
                item = gm.graph.call_method("item", (operands[at],))
            item.meta["example_value"] = value
            call.update_arg(len(call.args) - len(operands) + at, item)
        placeholders[at].meta["example_value"] = value
        for read in reads:
            put_instead(read, placeholders[at])
    body.recompile()
    return True


def _operands(gm: fx.GraphModule, call: fx.Node) -> list[Any]:
    """Returns the arguments of ``call`` behind its bodies; empty: some are lists."""
    bodies = [at for at, value in enumerate(call.args) if _is_body(gm, value)]
    operands: list[Any] = list(call.args[bodies[-1] + 1 :]) if bodies else []
    return [] if any(isinstance(operand, list | tuple) for operand in operands) else operands


def _is_body(gm: fx.GraphModule, value: Any) -> bool:
    """True for an argument that is a graph, an attribute of ``gm``."""
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return False
    return isinstance(getattr(gm, str(value.target), None), fx.GraphModule)
