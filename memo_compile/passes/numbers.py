"""Puts numbers in place of the sizes that Dynamo hands over as symbols.

An integer that is no tensor's size, such as the longest of packed sequences, may stay open: it is
given in a tensor, which custom operators read while the step runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from memo_runtime.open_numbers import as_tensor, reading
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils._pytree import tree_leaves

from memo_compile.analysis.purity import is_known
from memo_compile.errors import UnsupportedGraph
from memo_compile.torch_private.symbols import free_symbols

OPEN_NUMBERS = "memo_open_numbers"
"""Key of a Dynamo graph's ``meta``: names of inputs that give an integer in a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutNumbers:
    """Puts the numbers of one shape in place of a Dynamo graph's inputs that are sizes or floats.

    Rewrite, with ``numbers`` = {0: 7, 2: None}:
        s77 = placeholder[L_x_size_0]    ->    x = placeholder[L_x]
        x = placeholder[L_x]                   n = placeholder[L_longest]: i64[1]
        n = placeholder[L_longest]             item = n.item()
        y = view(x, (s77, -1))                 y = view(x, (7, -1))
        z = packed_attention(y, n)             z = packed_attention(y, item)
    """

    numbers: Mapping[int, float | None]
    """Position of the placeholder -> its value; None: it stays open."""
    name: ClassVar[str] = "put-numbers"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        for position, number in self.numbers.items():
            node = placeholders[position]
            if number is None:
                _give_in_tensor(gm, node)
                continue
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


def _give_in_tensor(gm: fx.GraphModule, number: fx.Node) -> None:
    """Makes an integer among the inputs of ``gm`` a tensor, whose item is read."""
    inputs = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_before(inputs[-1].next):
        item = gm.graph.call_method("item", (number,))
    number.replace_all_uses_with(item, delete_user_cb=lambda user: user is not item)
    item.meta["example_value"] = number.meta["example_value"]
    number.meta["example_value"] = as_tensor(1)
    gm.meta.setdefault(OPEN_NUMBERS, set()).add(number.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOpenNumbers:
    """Lets custom operators read the integers that stay open in a joint graph.

    Rewrite:
        item = _local_scalar_dense(n)
        z = packed_attention(y, item)    ->    z = packed_attention.open_longest(y, n)

    Raises UnsupportedGraph, or ValueError: something else reads the number.
    """

    positions: tuple[int, ...]
    """Inputs that give an integer in a tensor."""
    name: ClassVar[str] = "read-open-numbers"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        inputs = gm.graph.find_nodes(op="placeholder")
        items = {item: inputs[at] for at in self.positions for item in inputs[at].users}
        for user in dict.fromkeys(user for item in items for user in item.users):
            _read(user, items)
        for item in items:
            gm.graph.erase_node(item)
        return PassResult(gm, bool(items))


def _read(user: fx.Node, items: Mapping[fx.Node, fx.Node]) -> None:
    """Gives ``user`` the tensors of ``items`` in place of their numbers."""
    is_wrapped = "auto_functionalized" in str(user.target)
    operator = user.args[0] if is_wrapped else user.target
    if not isinstance(operator, torch._ops.OpOverload) or is_known(user):
        raise UnsupportedGraph(f"{user.name} ({operator}) reads the value of an integer")
    order = () if is_wrapped else (argument.name for argument in operator._schema.arguments)
    given = [*zip(order, user.args, strict=False), *user.kwargs.items()]
    names = tuple(name for name, arg in given if isinstance(arg, fx.Node) and arg in items)
    numbers: list[fx.Node] = []
    fx.node.map_arg(given, lambda node: numbers.append(node) if node in items else None)
    if len(numbers) > len(names):
        raise UnsupportedGraph(f"{user.name} ({operator}) is given an integer in a list")
    reader = reading(operator, names)
    args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), lambda n: items.get(n, n))
    user.args = (reader, *args[1:]) if is_wrapped else args
    user.target = user.target if is_wrapped else reader


def open_positions(gm: fx.GraphModule, positions: Sequence[int]) -> tuple[int, ...]:
    """Returns those inputs of a Dynamo graph at ``positions`` that are symbols of no tensor's size.

    They may stay open. What else reads them shows when the graph is traced.
    """
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    values = [node.meta.get("example_value") for graph in graphs for node in graph.nodes]
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    sizes = free_symbols(tensors)
    inputs = gm.graph.find_nodes(op="placeholder")
    symbols = {at: free_symbols(inputs[at].meta.get("example_value")) for at in positions}
    return tuple(at for at, of in symbols.items() if len(of) == 1 and not of & sizes)
