"""Which operators may be merged or recomputed: no effect, no randomness, no communication."""

import operator
from collections.abc import Iterator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from memo_compile.analysis.structure import argument, op_name

_RANDOM_PRIMS = ("inductor_seeds", "inductor_seed")
"""Inductor's random numbers are pure functions of a seed; only drawing the seeds is random."""


def is_random(node: fx.Node) -> bool:
    """True when running ``node`` twice gives two different values."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target.namespace == "prims" and target._schema.name.split("::")[-1] in _RANDOM_PRIMS:
        return True
    return torch.Tag.nondeterministic_seeded in target.tags


def is_collective(node: fx.Node) -> bool:
    """True for an operator that talks to other ranks, or waits for one."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace in (
        "_c10d_functional",
        "c10d_functional",
        "_dtensor",
        "c10d",
    )


def is_wait(node: fx.Node) -> bool:
    """True for the operator after which a collective's result may be read."""
    target = node.target
    return is_collective(node) and getattr(target, "_opname", "") == "wait_tensor"


def in_flight(node: fx.Node) -> bool:
    """True for what a functional collective returns, alone or in a list.

    Others may still write it, and read the collective's input, until it has been waited for.
    """
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and in_flight(source)
    target = node.target
    functional = isinstance(target, torch._ops.OpOverload) and target.namespace.endswith(
        "c10d_functional"
    )
    return functional and not is_wait(node) and not is_write(node)


def is_known(node: fx.Node) -> bool:
    """True for operators of torch itself; a custom operator's effects are unknown."""
    target = node.target
    if target is operator.getitem:
        return True
    return isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")


def is_pure(node: fx.Node) -> bool:
    """True when ``node`` may be recomputed, or merged with an equal one, without a difference."""
    if node.op != "call_function" or not is_known(node):
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_pure(source)
    assert isinstance(node.target, torch._ops.OpOverload)
    mutates = node.target._schema.is_mutable
    return not mutates and not is_random(node) and not is_collective(node)


def must_be_saved(node: fx.Node) -> bool:
    """True where the model's own checkpoint(), or a pass, forbids to recompute ``node``."""
    return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE


def is_repeatable(node: fx.Node) -> bool:
    """True for an operator that gives the same each time: pure ones, and attention without dropout.

    Attention kernels are declared random whatever their dropout is.
    """
    if node.target is operator.getitem:
        return is_repeatable(node.all_input_nodes[0])
    target = node.target
    is_attention = op_name(node).startswith("_scaled_dot_product")
    if is_attention and isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return not argument(node, "dropout_p")
    return is_pure(node)


def is_constant(node: fx.Node) -> bool:
    """True for a pure operator without tensor inputs: cheaper to recompute than to pass on."""
    return is_pure(node) and not node.all_input_nodes


def is_write(node: fx.Node) -> bool:
    """True for an operator that writes into one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def written_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that the writing operator ``node`` writes into."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, declared in enumerate(node.target._schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(declared.name)
        if declared.alias_info is not None and declared.alias_info.is_write:
            several = given if isinstance(given, list | tuple) else (given,)
            yield from (value for value in several if isinstance(value, fx.Node))
