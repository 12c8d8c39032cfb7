"""Where a plan may recompute, some inputs are read through a copy that the frame keeps.

What autograd hands to a block was made by the block before, in ordinary memory. If the backward
reads it, autograd keeps it there, one for each block, where no plan can move it.

And a buffer may be written between the halves (a running average, a schedule). Eager code that only
keeps what it computed of the buffer trains then; so must a backward that computes it again.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.analysis.joint_units import forward_part, is_tangent, tangent_dependents
from memo_compile.analysis.purity import READS_OVERWRITTEN, is_token, overwritten
from memo_compile.analysis.views import bytes_of, is_view

SMALL_SHARE = 8
"""A buffer is small if the forward makes a tensor that is this many times larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnInputs:
    """Inputs that other code made are copied first, and nothing reads them but the copy.

    Rewrite, for an input ``x`` with a history (tagged nodes are marked with !):
        norm = rms_norm(x)                       own  = clone(x)                 !
        y    = add(x, mlp(norm))          ->     norm = rms_norm(own)
        grad = mul(tangent, x)                   y    = add(own, mlp(norm))
                                                 grad = mul(tangent, own)

    The copy is saved like any other value of the step: it is kept, or moved to the host and back.
    It is tagged to run once, so that no backward asks for ``x``. Lazily conjugated inputs stay:
    what reads them was traced for the lazy bit, which a copy does not have.
    """

    positions: tuple[int, ...]
    """Which inputs, among ``inputs_of`` the graph."""
    changing: tuple[int, ...] = ()
    """Which inputs the program may write between the halves. One that the program's own backward
    reads needs no copy: autograd refuses that it is written. Nor has a large one a copy, such as a
    table or a mask: that it stays is assumed, and a backward that finds it written is refused."""
    name: ClassVar[str] = "own-inputs"
    is_required: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        inputs = inputs_of(gm.graph)
        written, backward = overwritten(gm.graph), tangent_dependents(gm.graph)
        modified = False
        first = next(node for node in gm.graph.nodes if node.op != "placeholder")
        changing = [inputs[at] for at in self.changing if _may_change(inputs[at], gm.graph)]
        sources = dict.fromkeys([*(inputs[at] for at in self.positions), *changing])
        for source in sources:
            readers = [user for user in source.users if user.op != "output"]
            if source in written or source.meta["val"].is_conj() or not _reaches(readers, backward):
                continue
            with gm.graph.inserting_before(first):
                own = gm.graph.call_function(torch.ops.aten.clone.default, (source,))
            own.meta = {
                "val": source.meta["val"].clone(),
                "partitioner_tag": "is_forward",
                READS_OVERWRITTEN: True,
            }
            for reader in readers:
                reader.replace_input_with(source, own)
            modified = True
        return PassResult(gm, modified)


def inputs_of(graph: fx.Graph) -> list[fx.Node]:
    """Inputs of a joint graph that the program gives: no gradients, no tokens of AOTAutograd's."""
    inputs = graph.find_nodes(op="placeholder")
    return [node for node in inputs if not is_tangent(node) and not is_token(node)]


def written_between(examples: Any) -> tuple[int, ...]:
    """Positions of the inputs that a program may write between forward and backward.

    These are its floating-point tensors that are not trained: buffers. Packed weights are integers,
    and parameters, frozen ones too, belong to an optimizer, which runs after the backward.
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
    """Positions of the inputs that other differentiable code made."""
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


def _may_change(source: fx.Node, graph: fx.Graph) -> bool:
    """True for a small input that the forward alone reads, be it through views."""
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


def _reaches(readers: list[fx.Node], backward: set[fx.Node]) -> bool:
    """True where the input, or what is made of it, is read by the backward."""
    seen: set[fx.Node] = set()
    stack = list(readers)
    while stack:
        node = stack.pop()
        if node in backward:
            return True
        if node not in seen:
            seen.add(node)
            stack.extend(node.users)
    return False
