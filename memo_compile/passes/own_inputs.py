"""Copies some inputs into the frame, so that the backward does not read the inputs themselves.

The block before made the input of a block, in ordinary memory. If the backward reads it, autograd
saves it there, one for each block, and no plan can move it.

And a buffer may be written between the halves (a running average, a schedule). Eager code that only
saves values computed from the buffer is right then; so must be a backward that recomputes them.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.analysis.joint_units import forward_part, is_tangent, tangent_dependents
from memo_compile.analysis.purity import READS_OVERWRITTEN, is_token, overwritten
from memo_compile.analysis.views import bytes_of, is_view, makers_of

SMALL_SHARE = 8
"""A buffer is small if the forward makes a tensor that is this many times larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnInputs:
    """Copies inputs that other code made, and lets all readers read the copy.

    Rewrite, for an input ``x`` with an autograd history (tagged nodes are marked with !):
        norm = rms_norm(x)                       own  = clone(x)                 !
        y    = add(x, mlp(norm))          ->     norm = rms_norm(own)
        grad = mul(tangent, x)                   y    = add(own, mlp(norm))
                                                 grad = mul(tangent, own)

    The copy is saved like any other value of the step: it is kept, or moved to the host and back.
    It is tagged to run once, so that no backward reads ``x``. Lazily conjugated inputs are not
    copied: their readers were traced for the lazy bit, which a copy does not have.
    """

    positions: tuple[int, ...]
    """Inputs to copy, among ``inputs_of`` the graph."""
    changing: tuple[int, ...] = ()
    """Inputs that the program may write between the halves. They are copied, but for two kinds: if
    the program's own backward reads an input, autograd refuses a write; a large one, such as a
    table or a mask, is assumed to stay, and a backward that finds it written is refused."""
    name: ClassVar[str] = "own-inputs"
    is_required: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        inputs = inputs_of(gm.graph)
        written = overwritten(gm.graph)
        needed_by_backward = makers_of(tangent_dependents(gm.graph))
        modified = False
        first = next(node for node in gm.graph.nodes if node.op != "placeholder")
        changing = [inputs[at] for at in self.changing if _needs_copy(inputs[at], gm.graph)]
        sources = dict.fromkeys([*(inputs[at] for at in self.positions), *changing])
        for source in sources:
            readers = [user for user in source.users if user.op != "output"]
            is_unneeded = needed_by_backward.isdisjoint(readers)
            if source in written or source.meta["val"].is_conj() or is_unneeded:
                continue
            with gm.graph.inserting_before(first):
                copy = gm.graph.call_function(torch.ops.aten.clone.default, (source,))
            copy.meta = {
                "val": source.meta["val"].clone(),
                "partitioner_tag": "is_forward",
                READS_OVERWRITTEN: True,
            }
            for reader in readers:
                reader.replace_input_with(source, copy)
            modified = True
        return PassResult(gm, modified)


def inputs_of(graph: fx.Graph) -> list[fx.Node]:
    """Returns the inputs of a joint graph that are the program's: no gradients, no tokens."""
    inputs = graph.find_nodes(op="placeholder")
    return [node for node in inputs if not is_tangent(node) and not is_token(node)]


def written_between(examples: Any) -> tuple[int, ...]:
    """Returns the positions of the inputs that a program may write between forward and backward.

    They are floating-point tensors that are not trained: buffers. Packed weights are integers, and
    parameters, frozen ones too, belong to an optimizer, which runs after the backward.
    """
    return tuple(
        position
        for position, value in enumerate(examples)
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and not value.requires_grad
        and not isinstance(value, torch.nn.Parameter)
    )


def with_history(examples: Any) -> tuple[int, ...]:
    """Returns the positions of the inputs that other differentiable code made."""
    return tuple(
        position
        for position, value in enumerate(examples)
        if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf
    )


def is_copied(node: fx.Node) -> bool:
    """True for an input that only its copy reads."""
    return bool(node.users) and all(
        user.op == "output"
        or (READS_OVERWRITTEN in user.meta and user.target is torch.ops.aten.clone.default)
        for user in node.users
    )


def _needs_copy(source: fx.Node, graph: fx.Graph) -> bool:
    """True for a small input that the forward alone reads, also through views: see ``changing``."""
    forward = forward_part(graph)
    largest = max((bytes_of(node) for node in forward if node.op == "call_function"), default=0)
    if SMALL_SHARE * bytes_of(source) > largest:
        return False
    stack = list(source.users)
    while stack:
        reader = stack.pop()
        if reader not in forward:
            return False
        stack.extend(reader.users if is_view(reader) else ())
    return True
