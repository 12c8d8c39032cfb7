"""Puts numbers in place of the sizes that Dynamo hands over as symbols."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PutNumbers:
    """Puts the numbers of one shape in place of a Dynamo graph's inputs that are sizes or floats.

    Rewrite, with ``numbers`` = {0: 7}:
        s77 = placeholder[L_x_size_0]    ->    x = placeholder[L_x]
        x = placeholder[L_x]                   y = view(x, (7, -1))
        y = view(x, (s77, -1))
    """

    numbers: Mapping[int, float]
    """Position of the placeholder -> its value."""
    name: ClassVar[str] = "put-numbers"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        for position, number in self.numbers.items():
            node = placeholders[position]
            if isinstance(number, float):  # a wrapped one, which only ``item`` reads
                for item in list(node.users):
                    put_instead(item, number)
            put_instead(node, number)
        return PassResult(gm, bool(self.numbers))


def is_wrapped_float(node: fx.Node) -> bool:
    """True for a scalar tensor that only ``item`` reads, as a float whose value Dynamo knows."""
    values = [user.meta.get("example_value") for user in node.users]
    return bool(values) and all(
        user.target == "item" and isinstance(value, torch.SymFloat) and value.node.has_hint()
        for user, value in zip(node.users, values, strict=True)
    )


def put_instead(node: fx.Node, value: Any) -> None:
    """Puts ``value``, a number or another node, where ``node`` is read, and erases ``node``."""
    for user in list(node.users):
        user.args, user.kwargs = fx.node.map_arg(
            (user.args, user.kwargs), lambda arg: value if arg is node else arg
        )
    node.graph.erase_node(node)
