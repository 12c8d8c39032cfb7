"""Writes a graph of fake tensors as plain data, and makes the graph from that data.

    add = aten.add.Tensor(mul, 2)      <->      {"name": "add", "op": "call_function",
    meta["val"]: f32[4, 8]                       "target": "aten.add.Tensor", "args": ["tuple",
                                                 [["node", "mul"], 2]], "value": ["tensor", ...]}

Nothing of a graph is lost: one that holds anything else (a tensor of its own, a graph, a symbol, a
custom operator, a note that is no plain value) is refused. Reading runs nothing but torch's own
rules for views, and refuses sizes of views that these do not confirm.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from memo_runtime import ops
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from memo_compile.analysis.joint_units import source_line
from memo_compile.analysis.module_paths import module_path
from memo_compile.analysis.regions import RegionGraph
from memo_compile.analysis.structure import spec_of
from memo_compile.analysis.views import is_view
from memo_compile.errors import InputError, UnsupportedGraph
from memo_compile.passes.cut import region_call, take
from memo_compile.step.problem import CallKind
from memo_compile.torch_private import fx_graphs
from memo_compile.torch_private.symbols import StaticFakes

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "lease": ops.lease,
    "fetch": ops.fetch,
    "region call": region_call,
    "take": take,
}
"""Functions that a node may call beside torch's own operators."""

_NAMESPACES = ("aten", "prims")
"""Operators of other namespaces may change their meaning without changing their name."""

_ENUMS = {kind: getattr(torch, kind) for kind in ("dtype", "layout", "memory_format")}
"""Kinds of arguments that are written by their name in torch: ``torch.float32``."""

_NOT_WRITTEN = frozenset(
    (
        "val tensor_meta stack_trace nn_module_stack fwd_nn_module_stack source_fn_stack seq_nr "
        "fwd_source_fn_stack original_aten from_node desc eager_input_vals output_stack_traces "
        "torch_fn annotation example_value dynamo_flat_name_to_original_fqn"
    ).split()
)
"""Keys of ``node.meta`` that nothing reads after the cut; ``val`` is written by itself."""

_RECOMPUTE, _SOURCE, _MODULES = "recompute", "stack_trace", "nn_module_stack"
"""Keys of ``node.meta`` that are written as a policy's name, one line, one path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One node, by the names of those before it."""

    name: str
    op: str
    target: str
    args: Any
    kwargs: Any
    value: Any = None
    """``meta["val"]``; None: the node has none."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """The rest of its ``meta``, as far as it is read after the cut."""

    def alone(self) -> "NodeRecord":
        """Returns the record without the node's arguments."""
        return replace(self, args=["tuple", []], kwargs=["mapping", {}])


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionGraphRecord:
    """A ``RegionGraph`` as plain data."""

    name: str
    nodes: tuple[NodeRecord, ...]
    external_outputs: tuple[int, ...]
    static_inputs: tuple[int, ...]
    is_backward: bool
    device: str
    kind: CallKind
    may_reuse_input: bool
    op_by_op: bool


def region_record(region: RegionGraph) -> RegionGraphRecord:
    """Returns ``region`` as data. Raises UnsupportedGraph: it holds what cannot be written."""
    fields = fields_like(region, RegionGraphRecord)
    external = tuple(sorted(region.external_outputs))
    fields |= {"device": str(region.device), "external_outputs": external}
    return RegionGraphRecord(**fields, nodes=graph_record(region.gm))


def region_of_record(record: RegionGraphRecord, fakes: StaticFakes) -> RegionGraph:
    """Returns the region of ``record``. Raises InputError: it is no record of a region."""
    fields = fields_like(record, RegionGraph)
    external = frozenset(record.external_outputs)
    fields |= {"device": _named("device", record.device), "external_outputs": external}
    return RegionGraph(**fields, gm=graph_of_record(record.nodes, fakes))


def fields_like(value: Any, kind: Any) -> dict[str, Any]:
    """Returns the fields of ``value`` that the dataclass ``kind`` has too."""
    names = (field.name for field in dataclasses.fields(kind))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def graph_record(gm: fx.GraphModule) -> tuple[NodeRecord, ...]:
    """Returns ``gm`` as data. Raises UnsupportedGraph: it holds what cannot be written."""
    return tuple(map(node_record, gm.graph.nodes))


def node_record(node: fx.Node) -> NodeRecord:
    """Returns the record of ``node``. Raises UnsupportedGraph: it holds what cannot be written."""
    return NodeRecord(
        name=node.name,
        op=node.op,
        target=_target(node),
        args=_written(node.args),
        kwargs=_written(node.kwargs),
        value=_value_written(node.meta["val"]) if "val" in node.meta else None,
        notes=_notes(node),
    )


def _target(node: fx.Node) -> str:
    """Returns the name of what ``node`` calls, or of its placeholder."""
    if node.op in ("placeholder", "output"):
        return str(node.target)
    if node.op != "call_function":
        raise UnsupportedGraph(f"{node.name} is a {node.op}")
    function_name = next(
        (name for name, function in _FUNCTIONS.items() if function is node.target), None
    )
    if function_name is not None:
        return function_name
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _NAMESPACES:
        return str(node.target)
    raise UnsupportedGraph(f"{node.name} calls {node.target}")


def _notes(node: fx.Node) -> dict[str, Any]:
    """Returns the node's ``meta``, in the form in which it is written, without ``_NOT_WRITTEN``."""
    notes: dict[str, Any] = {}
    for key, note in node.meta.items():
        if key in (_SOURCE, _MODULES):
            continue
        if key == _RECOMPUTE:
            notes[key] = note.name
        elif key not in _NOT_WRITTEN:
            if not isinstance(note, bool | int | float | str | None):
                raise UnsupportedGraph(f"{node.name} notes {key}: {type(note).__name__}")
            notes[str(key)] = note
    if (line := source_line(node)) is not None:
        notes[_SOURCE] = line
    if path := module_path(node):
        notes[_MODULES] = path
    return notes


def _meta_of_notes(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a node's ``meta`` from its notes (``_notes``)."""
    meta = dict(notes)
    if _RECOMPUTE in meta:
        meta[_RECOMPUTE] = CheckpointPolicy[meta[_RECOMPUTE]]
    if _SOURCE in meta:
        file, _, line = meta[_SOURCE].rpartition(":")
        meta[_SOURCE] = f'File "{file}", line {line}'
    if _MODULES in meta:
        meta[_MODULES] = {"": (meta[_MODULES], "")}
    return meta


def _written(value: Any) -> Any:
    """Returns an argument as JSON: plain values as they are, all else as ``[kind, content]``."""
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, fx.Node):
        return ["node", value.name]
    if type(value) is str:
        return ["text", value]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_written(item) for item in value]]
    if isinstance(value, Mapping):
        return ["mapping", {str(key): _written(item) for key, item in value.items()}]
    if isinstance(value, slice):
        return ["slice", [_written(part) for part in (value.start, value.stop, value.step)]]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    for kind, enum_type in _ENUMS.items():
        if isinstance(value, enum_type):
            return [kind, str(value).removeprefix("torch.")]
    raise UnsupportedGraph(f"an argument is a {type(value).__name__}")


def _value_written(value: Any) -> Any:
    """Returns a node's ``meta["val"]`` as JSON."""
    if value is None or type(value) in (bool, int, float):
        return ["constant", value]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_value_written(item) for item in value]]
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        raise UnsupportedGraph(f"a value is a {type(value).__name__}")
    numbers = [*value.shape, *value.stride(), value.storage_offset()]
    if value.dtype.is_complex or not all(type(number) is int for number in numbers):
        raise UnsupportedGraph(f"a value is {value.dtype} of {tuple(value.shape)}")
    dtype = str(value.dtype).removeprefix("torch.")
    layout = [list(value.shape), list(value.stride()), value.storage_offset()]
    return ["tensor", dtype, str(value.device), *layout]


def graph_of_record(nodes: tuple[NodeRecord, ...], fakes: StaticFakes) -> fx.GraphModule:
    """Returns the graph of these records, its values in the mode of ``fakes``.

    Raises InputError: they are no graph, or torch's rules give a view another layout.
    """
    graph = fx.Graph()
    by_name: dict[str, fx.Node] = {}
    for record in nodes:
        if record.name in by_name:
            raise InputError(f"two nodes are called {record.name}")
        by_name[record.name] = node = add_node(graph, record, by_name, fakes)
        if "val" in node.meta:
            node.meta["val"] = _derived(node, fakes)
    if not nodes or nodes[-1].op != "output":
        raise InputError("it does not end in its results")
    return fx_graphs.graph_module(torch.nn.Module(), graph)


def add_node(
    graph: fx.Graph, record: NodeRecord, by_name: Mapping[str, fx.Node], fakes: StaticFakes
) -> fx.Node:
    """Adds the node of ``record`` to the end of ``graph``, with the recorded value.

    ``by_name`` are the nodes before it. Raises InputError: the record does not fit into this graph.
    """
    args, kwargs = _read(record.args, by_name), _read(record.kwargs, by_name)
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise InputError(f"{record.name} has no arguments")
    target: Any = record.target
    if record.op == "call_function":
        target = _function(record.target)
    elif record.op not in ("placeholder", "output"):
        raise InputError(f"{record.name} is a {record.op}")
    node = graph.create_node(record.op, target, args, kwargs, record.name)
    node.name = record.name
    node.meta = _meta_of_notes(record.notes)
    if record.value is not None:
        node.meta["val"] = _value_read(record.value, fakes)
    return node


def _derived(node: fx.Node, fakes: StaticFakes) -> Any:
    """Returns the value of ``node``; of a view or an item what torch derives from its source."""
    value = node.meta["val"]
    if node.target is operator.getitem:
        source, at = node.args
        derived = source.meta["val"][at]  # type: ignore[union-attr]
    elif is_view(node):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
        assert isinstance(node.target, torch._ops.OpOverload), "views are torch's operators"
        derived = fakes.derived(node.target, args, kwargs)
    else:
        return value
    if spec_of(derived) != spec_of(value):
        raise InputError(f"{node.name} is {spec_of(value)}, and by its source {spec_of(derived)}")
    return derived


def _function(text: str) -> Any:
    """Returns what a node calls, by the name that ``_target`` wrote."""
    if text in _FUNCTIONS:
        return _FUNCTIONS[text]
    namespace, _, qualified_name = text.partition(".")
    name, _, overload = qualified_name.partition(".")
    if namespace in _NAMESPACES and name.isidentifier() and overload.isidentifier():
        packet = getattr(getattr(torch.ops, namespace), name, None)
        target = getattr(packet, overload, None)
        if isinstance(target, torch._ops.OpOverload):
            return target
    raise InputError(f"{text} is no operator of torch")


def _read(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
    """Returns an argument from its JSON (``_written``)."""
    if value is None or type(value) in (bool, int, float):
        return value
    match value:
        case ["node", str() as name] if name in nodes:
            return nodes[name]
        case ["text", str() as text]:
            return text
        case ["list", list() as items]:
            return [_read(item, nodes) for item in items]
        case ["tuple", list() as items]:
            return tuple(_read(item, nodes) for item in items)
        case ["mapping", dict() as items]:
            return {key: _read(item, nodes) for key, item in items.items()}
        case ["slice", [start, stop, step]]:
            return slice(_read(start, nodes), _read(stop, nodes), _read(step, nodes))
        case [str() as kind, str() as name]:
            return _named(kind, name)
    raise InputError(f"{value!r:.60} is no argument")


def _named(kind: str, name: str) -> Any:
    """Returns torch's value called ``name``: a dtype, a layout, a memory format, a device."""
    if kind == "device":
        try:
            return torch.device(name)
        except RuntimeError as error:
            raise InputError(f"{name} is no device") from error
    value = getattr(torch, name, None)
    if kind not in _ENUMS or not isinstance(value, _ENUMS[kind]):
        raise InputError(f"{name} is no {kind} of torch")
    return value


def _value_read(value: Any, fakes: StaticFakes) -> Any:
    """Returns a node's value from its JSON (``_value_written``)."""
    match value:
        case ["constant", None | bool() | int() | float() as constant]:
            return constant
        case ["list", list() as items]:
            return [_value_read(item, fakes) for item in items]
        case ["tuple", list() as items]:
            return tuple(_value_read(item, fakes) for item in items)
        case ["tensor", str() as dtype, str() as device, list() as size, list() as stride, start]:
            numbers = [*size, *stride, start]
            if len(size) == len(stride) and all(type(n) is int and n >= 0 for n in numbers):
                kind, place = _named("dtype", dtype), _named("device", device)
                return fakes.empty(size, stride, start, dtype=kind, device=place)
    raise InputError(f"{value!r:.60} is no value")
