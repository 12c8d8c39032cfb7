"""Which operators may be merged or recomputed: no effect, no randomness, no communication.

It also finds the inputs of a joint graph that the step overwrites.
"""

import operator
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from memo_compile.analysis.structure import argument, has_tag, namespace, op_name, schema_of
from memo_compile.analysis.views import is_item, results_of, storage_of
from memo_compile.errors import ConfigError

Operator = TypeVar("Operator")

_OF_TORCH = ("aten", "prims")

_RANDOM_PRIMS = ("inductor_seeds", "inductor_seed")
"""Inductor's random numbers are pure functions of a seed; only drawing the seeds is random."""

_FLASH_FORWARDS = ("_flash_attn_forward", "_flash_attn_varlen_forward")

_CHECKS = frozenset(
    "aten::_assert_async aten::_assert_scalar aten::_assert_tensor_metadata "
    "aten::_linalg_check_errors".split()
)

_declared: set[str] = set()
"""Custom operators that are declared pure, as ``namespace::name``."""

READS_OVERWRITTEN = "memo_reads_overwritten"
"""Key of ``node.meta``: the operator reads an input that is overwritten, so that it runs once."""


def register_recomputable(op: Operator) -> Operator:
    """Declares a custom operator pure, so that plans may recompute its results.

    memo cannot see what an operator of ``torch.library`` does, and runs it once. A pure one gives
    the same bits for the same inputs, and does nothing else: no random numbers, no communication,
    no state. ``op`` may be one of ``torch.ops``; it is returned, for use as a decorator.

    Raises ConfigError: it is no custom operator, or says itself that it writes or draws.
    """
    overload = getattr(op, "_opoverload", op)
    if isinstance(overload, torch._ops.OpOverloadPacket):
        overload = getattr(overload, overload.overloads()[0])
    if not isinstance(overload, torch._ops.OpOverload) or overload.namespace in _OF_TORCH:
        raise ConfigError(f"register_recomputable: expected a custom operator, got {op!r}")
    is_seeded = torch.Tag.nondeterministic_seeded in overload.tags
    if overload._schema.is_mutable or is_seeded:
        does = "draws random numbers" if is_seeded else "writes into its arguments"
        raise ConfigError(f"register_recomputable: {overload} {does}, and is not pure")
    _declared.add(overload._schema.name)
    return op


def is_declared(node: fx.Node) -> bool:
    """True for a custom operator that the program has declared pure."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _declared


def is_random(node: fx.Node) -> bool:
    """True when running ``node`` twice gives two different values."""
    draws_seeds = namespace(node) == "prims" and op_name(node) in _RANDOM_PRIMS
    return draws_seeds or has_tag(node, torch.Tag.nondeterministic_seeded)


def is_collective(node: fx.Node) -> bool:
    """True for an operator that talks to other ranks, or waits for one."""
    return namespace(node) in ("_c10d_functional", "c10d_functional", "_dtensor", "c10d")


def is_wait(node: fx.Node) -> bool:
    """True for the operator after which a collective's result may be read."""
    return is_collective(node) and op_name(node) == "wait_tensor"


def in_flight(node: fx.Node) -> bool:
    """True for the result of a functional collective, and for an element of its list of results.

    Until it was waited for, the collective may still write it, and read its input.
    """
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and in_flight(source)
    functional = namespace(node).endswith("c10d_functional")
    return functional and not is_wait(node) and not is_write(node)


def only_orders(node: fx.Node) -> bool:
    """True for an operator that returns its first input and only waits for the second."""
    return (namespace(node), op_name(node)) == ("memo_shapes", "behind")


def is_known(node: fx.Node) -> bool:
    """True for operators of torch itself, whose effects are known; not so a custom operator's."""
    return node.target is operator.getitem or namespace(node) in _OF_TORCH


def is_pure(node: fx.Node) -> bool:
    """True when ``node`` may be recomputed, or merged with an equal one, with the same result."""
    if node.op != "call_function" or not is_known(node):
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_pure(source)
    return not is_write(node) and not is_random(node)


def must_be_saved(node: fx.Node) -> bool:
    """True where the model's own checkpoint(), or a pass, forbids to recompute ``node``.

    An operator with several results runs once if one of them must be saved.
    """
    makers = [node, *node.all_input_nodes] if is_item(node) else [node]
    return any(maker.meta.get("recompute") is CheckpointPolicy.MUST_SAVE for maker in makers)


def is_repeatable(node: fx.Node) -> bool:
    """True for an operator with the same result each time: pure and declared ones, some attention.

    Attention kernels are declared random whatever their dropout is, and repeat without it. Those of
    the package flash-attn are custom operators whose effects are known.
    """
    if node.target is operator.getitem:
        return is_repeatable(node.all_input_nodes[0])
    if namespace(node) == "aten" and op_name(node).startswith("_scaled_dot_product"):
        return not argument(node, "dropout_p")
    if namespace(node) == "flash_attn" and op_name(node) in _FLASH_FORWARDS:
        return not argument(node, "dropout_p")
    return is_pure(node) or is_declared(node)


def is_constant(node: fx.Node) -> bool:
    """True for a pure operator without tensor inputs: cheaper to recompute than to save."""
    return is_pure(node) and not node.all_input_nodes


def is_write(node: fx.Node) -> bool:
    """True for an operator that writes into one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def has_token(node: fx.Node) -> bool:
    """True for an operator with an effect that AOTAutograd keeps in order by tokens."""
    return node.op == "call_function" and node.target is torch.ops.higher_order.with_effects


def is_token(node: fx.Node) -> bool:
    """True for a token: an input of the graph, or a result of an operator with an effect."""
    if node.op == "placeholder":
        return bool(node.users) and all(
            has_token(user) and user.args[0] is node for user in node.users
        )
    if node.target is not operator.getitem or node.args[1] != 0:
        return False
    return isinstance(node.args[0], fx.Node) and has_token(node.args[0])


def has_effect(node: fx.Node) -> bool:
    """True for an operator that must run even if its result is unused: it writes, prints, ..."""
    if node.op != "call_function" or is_collective(node):
        return False
    return is_write(node) or has_token(node) or node.is_impure(impure_random=False)


def is_check(node: fx.Node) -> bool:
    """True for an operator of torch that raises if a value is wrong, and does nothing else.

    Of all operators with an effect only these may run twice, or in another order.
    """
    called: object = node.args[1] if has_token(node) else node.target
    return isinstance(called, torch._ops.OpOverload) and called._schema.name in _CHECKS


def gives_other_memory(node: fx.Node) -> bool:
    """True for ``set_`` with a computed tensor: its input keeps that tensor's memory for good."""
    if node.op != "call_function" or (namespace(node), op_name(node)) != ("aten", "set_"):
        return False
    return any(storage_of(source).op != "placeholder" for source in node.all_input_nodes[1:])


def written_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the arguments that the writing operator ``node`` writes into."""
    for declared in schema_of(node).arguments:
        if declared.alias_info is not None and declared.alias_info.is_write:
            argument_value = argument(node, declared.name)
            values = (
                argument_value if isinstance(argument_value, list | tuple) else (argument_value,)
            )
            yield from (target for target in values if isinstance(target, fx.Node))


def overwritten(graph: fx.Graph) -> set[fx.Node]:
    """Returns inputs of a joint graph that the step writes: in the graph, or from its results."""
    targets = written_storages(graph) | set(_written_by_the_caller(graph))
    return {node for node in targets if node.op == "placeholder"}


def ties_inputs(graph: fx.Graph, num_results: int) -> bool:
    """True for a joint graph that writes into, or returns a view of, an input with a gradient.

    AOTAutograd must then get the caller's own tensor, not a copy, because its autograd history goes
    on. True as well where AOTAutograd does not describe the graph's results.
    """
    results = results_of(graph)
    if results and graph.output_node().meta.get("desc") is None:
        return True
    tied = overwritten(graph)
    tied |= {storage_of(node) for node in results[:num_results] if isinstance(node, fx.Node)}
    inputs = [node for node in graph.find_nodes(op="placeholder") if not is_token(node)]
    # the last inputs are incoming gradients and have no result
    gradients = zip(inputs, results[num_results:], strict=False)
    return any(node in tied and gradient is not None for node, gradient in gradients)


def written_storages(graph: fx.Graph) -> set[fx.Node]:
    """Returns the makers of all storages that an operator of ``graph`` writes into."""
    writes = filter(is_write, graph.nodes)
    return {storage_of(target) for node in writes for target in written_arguments(node)}


def _written_by_the_caller(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yields inputs whose new value is a result: AOTAutograd describes both (2.11, 2.13)."""
    described: dict[Any, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        if node.meta.get("desc") is not None:
            described[node.meta["desc"]] = node
    for description in graph.output_node().meta.get("desc") or ():
        source = described.get(getattr(description, "mutated_input", None))
        if source is not None:
            yield source


def runs_once(node: fx.Node) -> bool:
    """True for an operator that reads an overwritten input, and for an item of its results."""
    makers = node.all_input_nodes if is_item(node) else [node]
    return any(READS_OVERWRITTEN in maker.meta for maker in makers)
