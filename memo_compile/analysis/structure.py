"""Describes nodes apart from their names: tokens, wiring and canonical forms of node ranges."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from memo_compile.analysis.views import storage_of
from memo_compile.errors import UnsupportedGraph

_MATMULS = frozenset(
    "mm addmm bmm baddbmm _scaled_mm _int_mm _grouped_mm _scaled_grouped_mm".split()
)
"""Operators that multiply activations with weights or with each other, after decomposition.

A convolution is left out on purpose: see ``layers.find_layers``."""

GRADIENT = "memo_gradient"
"""Key of ``node.meta``: true for a part of a gradient that the forward makes."""

UNCUTTABLE_BYTES = 1 << 60
"""Price in bytes of a border between an operator and its getitem: a tuple cannot cross a border."""


def is_matmul(node: fx.Node) -> bool:
    """True for a matrix product or a forward attention kernel."""
    name = op_name(node)
    return name in _MATMULS or ("attention" in name and "backward" not in name)


def op_name(node: fx.Node) -> str:
    """Returns the operator's name without namespace and overload; empty for python functions."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    if isinstance(target, torch._ops.HigherOrderOperator):
        return str(target)
    return ""


def namespace(node: fx.Node) -> str:
    """Returns the namespace of the operator, such as ``aten``; empty for python functions."""
    return node.target.namespace if isinstance(node.target, torch._ops.OpOverload) else ""


def has_tag(node: fx.Node, tag: torch.Tag) -> bool:
    """True for an operator that torch has given ``tag``."""
    return isinstance(node.target, torch._ops.OpOverload) and tag in node.target.tags


def schema_of(node: fx.Node) -> torch._C.FunctionSchema:
    """Returns the schema of the operator that ``node`` calls."""
    assert isinstance(node.target, torch._ops.OpOverload), f"{node.name} has no schema"
    return node.target._schema


def argument(node: fx.Node, name: str) -> Any:
    """Returns the operator's argument ``name``, or its default; None: the schema lacks it."""
    if name in node.kwargs:
        return node.kwargs[name]
    for position, declared in enumerate(schema_of(node).arguments):
        if declared.name == name:
            return node.args[position] if position < len(node.args) else declared.default_value
    return None


STORAGE_OFFSET = "storage_offset"
"""The argument that counts elements from the start of a storage, as torch's schemas call it."""


def begins_at(node: fx.Node) -> int | None:
    """Returns where the result of ``as_strided`` begins, in elements from where its input begins.

    The operator's argument counts from the start of the storage, which in a step is the arena: if
    the input was traced 2 elements behind the start, ``storage_offset=0`` means -2. None for
    operators without that argument.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    offset = argument(node, STORAGE_OFFSET)
    if offset is None:
        return None
    return int(offset - node.all_input_nodes[0].meta["val"].storage_offset())


def spec_of(value: object) -> str:
    """Returns dtype, shape, strides and device of every tensor in ``value``, as text with symbols.

    ``value`` is a ``meta["val"]``: a (fake) tensor, a symbolic number, or a sequence of them.
    """
    if isinstance(value, torch.Tensor):
        layout = tuple(value.stride()) if value.layout is torch.strided else value.layout
        return f"{value.dtype}{tuple(value.shape)}{layout}{value.device}"
    if isinstance(value, (tuple, list)):
        return "[" + ";".join(spec_of(item) for item in value) + "]"
    return f"{type(value).__name__}:{value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """A sequence of nodes as arrays; a position is an index into the sequence."""

    nodes: tuple[fx.Node, ...]
    tokens: NDArray[np.int64]
    """(n,) numbers, equal for nodes with the same op, value, argument specs and constants."""
    texts: tuple[str, ...]
    """The text that each token stands for."""
    inputs: tuple[tuple[int, ...], ...]
    """Argument nodes in argument order: a position, or ``-1 - k`` for the k-th outside node."""
    last_use: NDArray[np.int64]
    """(n,) the last position that reads the value, -1 when nothing in the sequence does."""
    storage: NDArray[np.int64]
    """(n,) the position that made the value's storage, -1 when it was made outside."""
    storage_bytes: NDArray[np.int64]
    """(n,) bytes of the value made at the position."""
    matmuls_before: NDArray[np.int64]
    """(n + 1,) number of matrix products before each position."""

    def num_matmuls(self, start: int, end: int) -> int:
        """Returns the number of matrix products in ``[start, end)``."""
        return int(self.matmuls_before[end] - self.matmuls_before[start])

    def border_bytes(self, cut: int, origin: int) -> int:
        """Returns bytes made in ``[origin, cut)`` and read behind it; each storage once."""
        crossing = origin + np.flatnonzero(self.last_use[origin:cut] >= cut)
        storages = np.unique(self.storage[crossing])
        return int(self.storage_bytes[storages[storages >= origin]].sum())

    def broken_chains(self, cut: int, origin: int) -> int:
        """Counts edges across ``cut`` whose two ends Inductor would have fused (both pointwise)."""
        crossing = origin + np.flatnonzero(self.last_use[origin:cut] >= cut)
        edges = ((self.nodes[at], user) for at in crossing for user in self.nodes[at].users)
        pointwise = torch.Tag.pointwise
        return sum(has_tag(maker, pointwise) and has_tag(user, pointwise) for maker, user in edges)

    def canonical(self, start: int, end: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Returns (token, argument numbers) of each node of the range.

        Values of the range are numbered by position, its inputs by first use (-1, -2, ..). Ranges
        with equal forms are isomorphic: one function, called with other inputs.
        """
        outside: dict[int, int] = {}
        form = []
        for position in range(start, end):
            wires = tuple(
                source - start if source >= start else outside.setdefault(source, -1 - len(outside))
                for source in self.inputs[position]
            )
            form.append((int(self.tokens[position]), wires))
        return tuple(form)

    def digest(self, start: int, end: int) -> str:
        """Returns a hash of the canonical form, the same whatever the numbering of tokens."""
        lines = [f"{self.texts[token]}{wires}" for token, wires in self.canonical(start, end)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def feeds(self, start: int, middle: int, end: int) -> bool:
        """True when a matrix product in ``[middle, end)`` depends on one in ``[start, middle)``."""
        depends: set[int] = set()
        for position in range(start, end):
            is_product = bool(self.num_matmuls(position, position + 1))
            if any(source in depends for source in self.inputs[position]):
                if is_product and position >= middle:
                    return True
                depends.add(position)
            elif is_product and position < middle:
                depends.add(position)
        return False


def make_tape(nodes: Sequence[fx.Node]) -> Tape:
    """Describes every node of ``nodes`` by token, wiring and storage. Cost: linear."""
    position_of = {node: position for position, node in enumerate(nodes)}
    outside: dict[fx.Node, int] = {}
    writer = _Writer()
    inputs = []
    tokens = np.empty(len(nodes), dtype=np.int64)
    last_use = np.full(len(nodes), -1, dtype=np.int64)
    for position, node in enumerate(nodes):
        tokens[position], sources = writer.token(node)
        wires = []
        for source in sources:
            where = position_of.get(source)
            if where is None:
                where = -1 - outside.setdefault(source, len(outside))
            else:
                last_use[where] = position
            wires.append(where)
        inputs.append(tuple(wires))
    matmuls = np.array([is_matmul(node) for node in nodes], dtype=np.int64)
    return Tape(
        nodes=tuple(nodes),
        tokens=tokens,
        texts=tuple(writer.ids),
        inputs=tuple(inputs),
        last_use=last_use,
        storage=np.array([position_of.get(storage_of(node), -1) for node in nodes], dtype=np.int64),
        storage_bytes=np.array([_value_bytes(node) for node in nodes], dtype=np.int64),
        matmuls_before=np.concatenate(([0], np.cumsum(matmuls))).astype(np.int64),
    )


class _Writer:
    """Writes nodes as text, with specs in place of argument nodes, and numbers distinct texts."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self._specs: dict[fx.Node, str] = {}

    def token(self, node: fx.Node) -> tuple[int, list[fx.Node]]:
        """Returns the number of ``node``'s text, and its argument nodes, with repetitions."""
        sources: list[fx.Node] = []
        args = [self._write(arg, sources) for arg in node.args]
        if op_name(node) == "inductor_lookup_seed":
            args[1] = "<lifted>"  # says which seed a dropout reads, and differs from layer to layer
        kwargs = self._write(node.kwargs, sources)
        tag = node.meta.get("recompute", "")
        text = f"{node.target}({','.join(args)}|{kwargs})->{self._spec(node)}{tag}"
        return self.ids.setdefault(text, len(self.ids)), sources

    def _write(self, arg: object, sources: list[fx.Node]) -> str:
        """Returns an argument as text; its nodes, written by their specs, go to ``sources``."""
        if isinstance(arg, fx.Node):
            sources.append(arg)
            return f"<{self._spec(arg)}>"
        if isinstance(arg, (tuple, list)):
            return "[" + ",".join(self._write(item, sources) for item in arg) + "]"
        if isinstance(arg, slice):
            return "slice" + self._write((arg.start, arg.stop, arg.step), sources)
        if isinstance(arg, Mapping):
            items = (f"{key}:{self._write(value, sources)}" for key, value in arg.items())
            return "{" + ",".join(items) + "}"
        return repr(arg)

    def _spec(self, node: fx.Node) -> str:
        if node not in self._specs:
            self._specs[node] = _spec_of_node(node)
        return self._specs[node]


def _spec_of_node(node: fx.Node) -> str:
    """Returns the spec of the node's value; of a body, an attribute that is a graph, its code."""
    if node.op != "get_attr" or "val" in node.meta:
        return spec_of(node.meta.get("val"))
    attribute = getattr(node.graph.owning_module, str(node.target), None)
    if isinstance(attribute, fx.GraphModule):
        return f"graph:{attribute.code}"
    return f"attribute:{spec_of(attribute)}"


def _value_bytes(node: fx.Node) -> int:
    """Returns the bytes of the node's value; UNCUTTABLE_BYTES for a tuple."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return UNCUTTABLE_BYTES
    if not isinstance(value, torch.Tensor):
        return 0
    size = value.numel() * value.element_size()
    if isinstance(size, int):
        return size
    if size.node.hint is None:
        raise UnsupportedGraph(f"{node.name} has no size hint (its shape depends on data)")
    return int(size.node.hint)
