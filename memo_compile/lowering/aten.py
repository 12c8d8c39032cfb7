"""Lowers a region op by op: the portable reference against which the Inductor lowering is tested.

Views run as views. An operator with an ``out=`` overload writes straight into its planned buffer.
Any other allocates its result in ordinary memory (memory outside); the result is read there if that
takes no more memory than copies would, and is copied into its buffer otherwise. A collective's
result stays where it was allocated until it has been waited for, and so does what it reads.
"""

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from memo_runtime.current import current
from memo_runtime.pages import MIN_OWN_MAPPING_BYTES, own_mapping, trim_heap
from torch import fx

from memo_compile.analysis.purity import in_flight, is_collective, is_wait, is_write
from memo_compile.analysis.random_states import is_random_state
from memo_compile.analysis.regions import (
    AttentionLine,
    LoweredRegion,
    RegionGraph,
    counted_once,
    storage_bytes,
    view_spec,
)
from memo_compile.analysis.structure import STORAGE_OFFSET, begins_at, make_tape, schema_of
from memo_compile.analysis.views import is_tensor, is_view, results_of, storage_of
from memo_compile.lowering.eager_ops import runnable
from memo_compile.lowering.workspace import (
    attention_bytes,
    called_operator,
    cast_workspace,
    convolution_workspace,
    fourier_workspace,
    is_attention,
    is_fourier,
    pooling_workspace,
    random_workspace,
)
from memo_compile.step.problem import (
    OutsideBuffer,
    RegionBuffer,
    RegionOutput,
    RegionProfile,
    Storage,
    align,
)
from memo_compile.torch_private import fx_graphs

_WORKSPACES = (
    convolution_workspace,
    pooling_workspace,
    fourier_workspace,
    cast_workspace,
    random_workspace,
)

_WRITES_OUT: dict[str, bool] = {}
"""An operator and the layouts of its arguments, as text -> whether its ``out=`` takes them."""

_TAKE_OUT = (torch.ops.aten.addmm.dtype, torch.ops.aten.baddbmm.dtype)
"""Operators whose ``out=`` works, though torch 2.13 fails on it with fakes (pytorch#163880)."""


def _never(_: fx.Node) -> bool:
    return False


def lower(region: RegionGraph, *, poison: bool = False) -> LoweredRegion:
    """Returns ``region`` as a list of operator calls on planned buffers."""
    return _AtenRegion(region, poison=poison).lowered()


def interpret(gm: fx.GraphModule, change: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
    """Returns ``gm`` as a function that runs op by op in ordinary memory.

    It is boxed: takes a list of arguments and empties it. ``change`` maps operators' arguments.
    """

    class _Interpreter(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if change is not None:
                args, kwargs = fx.node.map_aggregate((args, kwargs), change)
            return runnable(target)(*args, **kwargs)

    def run(args: list[Any]) -> Any:
        inputs = list(args)
        args.clear()
        with torch.no_grad():
            return _Interpreter(gm).run(*inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _AtenRegion:
    """A region op by op. A line is the index of a node among ``nodes``."""

    def __init__(
        self, region: RegionGraph, *, poison: bool, in_registers: Callable[[fx.Node], bool] = _never
    ) -> None:
        self.region = region
        self.poison = poison
        self.in_registers = in_registers
        self.nodes = list(region.gm.graph.nodes)
        self.inputs = region.gm.graph.find_nodes(op="placeholder")
        self.outputs = results_of(region.gm.graph)
        self.line = {node: number for number, node in enumerate(self.nodes)}
        self.last_use = self._last_uses()
        self.dropped = self._dropped()
        self.external = region.external_storages()
        self.kept = {storage_of(node) for node in self.outputs if isinstance(node, fx.Node)}
        """Storages that outlive the region."""
        self.writes_out = {
            node: self._writes_out(node) for node in filter(self._is_placed, self.nodes)
        }
        """Result -> True if its operator writes into a given buffer; else it allocates."""
        self.workspaces = tuple(self._workspaces())
        self.outside = {n: self._until_copied(n) for n, out in self.writes_out.items() if not out}
        """Results that their operators put into ordinary memory, and that memory."""
        self.unplaced = self._unplaced()
        large = (out for out in self.outside.values() if out.size_bytes >= MIN_OWN_MAPPING_BYTES)
        self.trims = {out.end - 1 for out in large if region.device.type == "cpu"}
        """Lines after which the heap is trimmed."""
        placed = (node for node in self.writes_out if node not in self.unplaced)
        self.buffers = {node: self._buffer(node) for node in placed}
        self.index = {node: index for index, node in enumerate(self.buffers)}
        self.mapped = {node for node in self.external if self._is_mapped(node)}
        begins = ((node, begins_at(node)) for node in self.nodes)
        self.begins = {node: begin for node, begin in begins if begin is not None}

    def _last_uses(self) -> dict[fx.Node, int]:
        """Returns, per storage, the last line that reads it, through views, tuples, registers."""
        last: dict[fx.Node, int] = {}
        for node in reversed(self.nodes):
            line = self.line[node]
            if self.in_registers(node):  # made where it is read
                line = max(line, last.get(storage_of(node), line))
            for root in map(storage_of, _read_by(node)):
                last[root] = max(line, last.get(root, line))
        return last

    def _dropped(self) -> dict[int, list[fx.Node]]:
        """Returns, per line, the values that no later line takes; their storage may live on."""
        last: dict[fx.Node, int] = {}
        for node in self.nodes:
            last.update(dict.fromkeys((node, *_read_by(node)), self.line[node]))
        dropped: dict[int, list[fx.Node]] = {}
        for node, line in last.items():
            dropped.setdefault(line, []).append(node)
        return dropped

    def _is_placed(self, node: fx.Node) -> bool:
        """True for a result that gets a buffer in the arena."""
        if not _is_new(node) or node in self.external or is_random_state(node):
            return False
        if self.in_registers(node) and node not in self.kept:
            return False
        if in_flight(node) and node not in self.kept:
            return False  # its wait's result is placed
        value = node.meta["val"]
        return value.device.type == self.region.device.type and value.numel() > 0

    def _buffer(self, node: fx.Node) -> RegionBuffer:
        """Returns the buffer of a result, from the line that makes it to its last reader's."""
        size_bytes = align(storage_bytes(node.meta["val"]))
        start = self.line[node if is_wait(node) else _maker(node)]
        end = self._end(node, self.line[node])
        return RegionBuffer(name=node.name, size_bytes=size_bytes, start=start, end=end)

    def _end(self, node: fx.Node, if_unread: int) -> int:
        """Returns the line after the last that reads the node's storage, or ``if_unread + 1``."""
        return len(self.nodes) if node in self.kept else self.last_use.get(node, if_unread) + 1

    def _unplaced(self) -> set[fx.Node]:
        """Chooses results that are read in ordinary memory and not copied, the largest first.

        Only as many as keep the peak of memory outside as low as if all were copied.
        """
        outside_bytes = np.zeros(len(self.nodes) + 1, dtype=np.int64)  # by line
        for buffer in (*self.outside.values(), *self.workspaces):
            outside_bytes[buffer.start : buffer.end] += buffer.size_bytes
        outside_bytes[:-1] += [attention_bytes(node) for node in self.nodes]
        peak_bytes, unplaced = outside_bytes.max(), set()
        for node, buffer in sorted(self.outside.items(), key=lambda item: -item[1].size_bytes):
            end = self._end(node, self.line[node])
            fits = (outside_bytes[buffer.end : end] + buffer.size_bytes <= peak_bytes).all()
            if fits and node not in self.kept and not is_collective(node):
                outside_bytes[buffer.end : end] += buffer.size_bytes
                self.outside[node] = replace(buffer, end=end)
                unplaced.add(node)
        return unplaced

    def _until_copied(self, node: fx.Node) -> OutsideBuffer:
        """Returns the ordinary memory of a result until it is copied to its buffer."""
        kind, size_bytes = str(_maker(node).target), align(storage_bytes(node.meta["val"]))
        start, end = self.line[_maker(node)], self.line[node] + 1
        return OutsideBuffer(kind=kind, size_bytes=size_bytes, start=start, end=end)

    def _workspaces(self) -> Iterator[OutsideBuffer]:
        """Yields the memory that kernels allocate for themselves."""
        for line, node in enumerate(self.nodes):
            if not self.in_registers(node):
                workspaces = (workspace_of(node, line) for workspace_of in _WORKSPACES)
                yield from (workspace for workspace in workspaces if workspace is not None)

    def lowered(self) -> LoweredRegion:
        """Returns the region's profile, and the function that runs it."""
        profile = RegionProfile(
            name=self.region.name,
            num_lines=len(self.nodes),
            buffers=tuple(self.buffers.values()),
            input_ends=tuple(self._end(node, -1) for node in self.inputs),
            outputs=counted_once(itertools.starmap(self._region_output, enumerate(self.outputs))),
            outside=(*self.outside.values(), *self.workspaces),
        )
        views = tuple(view_spec(node.meta["val"]) for node in self.buffers)
        called = ((called_operator(node), line) for line, node in enumerate(self.nodes))
        attention = tuple(AttentionLine(name, line) for name, line in called if is_attention(name))
        return LoweredRegion(profile=profile, views=views, run=self._run, attention=attention)

    def _region_output(self, index: int, node: Any) -> tuple[fx.Node | None, RegionOutput]:
        """Returns the node that made the output's storage, and where that lies."""
        if not isinstance(node, fx.Node):
            return None, RegionOutput(storage=Storage.NONE)
        root = storage_of(node)
        if root in self.buffers:
            return root, RegionOutput(storage=Storage.ARENA, index=self.index[root])
        source = root.all_input_nodes[0] if is_write(root) else root  # a write returns its input
        if source.op == "placeholder":
            return root, RegionOutput(storage=Storage.INPUT, index=self.inputs.index(source))
        size = align(storage_bytes(root.meta["val"])) if is_tensor(root) else 0
        if index in self.region.external_outputs:
            start = self.line[_maker(root)]
            return root, RegionOutput(storage=Storage.EXTERNAL, size_bytes=size, start=start)
        return root, RegionOutput(storage=Storage.OUTSIDE, size_bytes=size)

    def _is_mapped(self, node: fx.Node) -> bool:
        """True for the user's results of a forward on the CPU: they get a mapping of their own.

        In the heap their pages would stay when the user has dropped them.
        """
        if self.region.is_backward or self.region.device.type != "cpu" or not _is_new(node):
            return False
        return node.meta["val"].device.type == "cpu" and self._writes_out(node)

    def _writes_out(self, node: fx.Node) -> bool:
        """True when the operator's ``out=`` overload takes its arguments, tried on fakes."""
        if _out_overload(node) is None or runnable(node.target) is not node.target:
            return False
        values = [source.meta.get("val") for source in node.all_input_nodes]
        mode = fx_graphs.detect_fake_mode([*values, node.meta["val"]])
        if mode is None:
            return False
        if node.target in _TAKE_OUT:
            return True
        (text,) = make_tape((node,)).texts
        if text not in _WRITES_OUT:
            with mode:
                _WRITES_OUT[text] = _takes_out(node)
        return _WRITES_OUT[text]

    def _run(self, args: list[Any]) -> list[Any]:
        """Runs the operators in order on the views of the current call; drops what is read last."""
        env: dict[fx.Node, Any] = dict(zip(self.inputs, args, strict=True))
        args.clear()
        views = current.views
        with torch.no_grad():
            for node in self.nodes[:-1]:
                if node.op == "get_attr":
                    env[node] = getattr(self.region.gm, str(node.target))
                elif node.op == "call_function":
                    env[node] = self._call(node, env, views)
                self._poison_dead(node)
                for dead in self.dropped.get(self.line[node], ()):
                    env.pop(dead, None)
                if self.line[node] in self.trims:
                    trim_heap()  # or the next such result may lie beside the hole of this one
            self._poison_dead(self.nodes[-1])
        return [env[output] if isinstance(output, fx.Node) else output for output in self.outputs]

    def _call(
        self, node: fx.Node, env: Mapping[fx.Node, Any], views: Sequence[torch.Tensor]
    ) -> Any:
        """Runs one operator, and returns its result where it was planned to lie."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: env[source])
        if node in self.begins:
            args, kwargs = _from_arena(node, self.begins[node], args, kwargs)
        if node in self.mapped:
            spec = view_spec(node.meta["val"])
            target = own_mapping(spec.size, spec.stride, spec.dtype)
            _write_out(node, args, kwargs, target)
            return target
        if node in self.unplaced:
            return _as_traced(runnable(node.target)(*args, **kwargs), node.meta["val"])
        if node not in self.index:  # a view, a write, the user's result, a collective in flight
            return runnable(node.target)(*args, **kwargs)
        view = views[self.index[node]]
        if in_flight(node):  # leaves the region, and a copy of it cannot be waited for
            wait = torch.ops._c10d_functional.wait_tensor.default
            return view.copy_(wait(runnable(node.target)(*args, **kwargs)))
        if self.writes_out[node]:
            _write_out(node, args, kwargs, _in_place(args, view))
        else:
            view.copy_(runnable(node.target)(*args, **kwargs))
        return view

    def _poison_dead(self, node: fx.Node) -> None:
        """In poison mode, overwrites what is dead after the line of ``node``."""
        if not self.poison:
            return
        number = self.line[node]
        for source in (node, *_read_by(node)):
            root = storage_of(source)
            dead = self.last_use.get(root, self.line[root]) <= number
            if not dead or root in self.kept:
                continue
            if root in self.buffers:
                current.poison(self.index[root])
            elif root.op == "placeholder" and node.op != "placeholder":
                current.input_done(self.inputs.index(root))


def _from_arena(
    node: fx.Node, begin: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with a storage offset ``begin`` elements behind that of the first."""
    names = [declared.name for declared in schema_of(node).arguments]
    by_name = {**dict(zip(names, args, strict=False)), **kwargs}
    source = by_name.pop(names[0])
    return (source,), {**by_name, STORAGE_OFFSET: source.storage_offset() + begin}


def _as_traced(result: torch.Tensor, traced: torch.Tensor) -> torch.Tensor:
    """Returns ``result``, copied where its strides are not the traced ones that views count on."""
    if result.stride() == traced.stride():
        return result
    return result.new_empty_strided(traced.size(), traced.stride()).copy_(result)


def _maker(node: fx.Node) -> fx.Node:
    """Returns what makes ``node``: itself, the operator of its tuple, the collective it awaits."""
    if is_wait(node):
        awaited = storage_of(node.all_input_nodes[0])
        return _maker(awaited) if in_flight(awaited) else node
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _is_new(node: fx.Node) -> bool:
    """True for an operator whose result is one tensor in memory of its own."""
    is_new = node.op == "call_function" and not is_view(node) and not is_write(node)
    return is_new and is_tensor(node)


def _read_by(node: fx.Node) -> list[fx.Node]:
    """Returns the inputs of ``node``; of a wait also those of its collective, read until then."""
    if not is_wait(node):
        return node.all_input_nodes
    return [*node.all_input_nodes, *_maker(node).all_input_nodes]


def _out_overload(node: fx.Node) -> torch._ops.OpOverload | None:
    """Returns the ``out=`` overload of the operator, for one result; None: none, or it allocates.

    Overloads that torch generates (tag ``generated``) allocate inside and copy. So do those of
    Fourier transforms.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    if is_fourier(node):
        return None
    packet = target.overloadpacket
    name = "out" if target._overloadname == "default" else f"{target._overloadname}_out"
    overloads = packet.overloads()
    # sum.dim_IntList has sum.IntList_out, div.Tensor_mode has div.out_mode.
    out_names = (name for name in overloads if "out" in name.split("_"))
    for candidate in (name, "out", *out_names):
        if candidate in overloads:
            overload = getattr(packet, candidate)
            plain = len(overload._schema.returns) == 1 and torch.Tag.generated not in overload.tags
            same_arguments = _positional(target) == _positional(overload)
            if plain and same_arguments and not _lost_keywords(node, overload):
                return overload
    return None


_OF_RESULT = frozenset(("dtype", "layout", "device", "pin_memory", "memory_format"))
"""Keywords that describe the result: with ``out=`` the given tensor does."""


def _lost_keywords(node: fx.Node, out: torch._ops.OpOverload) -> set[str]:
    """Returns keywords of ``node`` that ``out`` lacks: ``div.out`` has no ``rounding_mode``."""
    keywords = {name for name, value in node.kwargs.items() if value is not None}
    return keywords - _OF_RESULT - {arg.name for arg in out._schema.arguments}


def _positional(operator: torch._ops.OpOverload) -> list[tuple[str, str]]:
    """Returns names and types of the positional arguments."""
    return [(arg.name, str(arg.type)) for arg in operator._schema.arguments if not arg.kwarg_only]


def _takes_out(node: fx.Node) -> bool:
    """True if the ``out=`` overload accepts the traced layout on fakes, and keeps it."""
    fake = node.meta["val"]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    target = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device=fake.device)
    try:
        result = _write_out(node, args, kwargs, target)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool(result.shape == fake.shape and result.stride() == fake.stride())


def _write_out(node: fx.Node, args: Any, kwargs: Mapping[str, Any], target: torch.Tensor) -> Any:
    """Runs the ``out=`` overload on ``target``, with the keywords that it has.

    ``empty_like.out`` declares a ``memory_format`` and refuses it: ``target`` has the traced one.
    """
    out = _out_overload(node)
    assert out is not None, f"{node.name}: an out= overload that was there is gone"
    names = {arg.name for arg in out._schema.arguments} - {"memory_format"}
    name = next(arg.name for arg in out._schema.arguments if arg.is_out)
    return out(*args, **{key: kwargs[key] for key in kwargs if key in names}, **{name: target})


def _in_place(args: tuple[Any, ...], view: torch.Tensor) -> torch.Tensor:
    """Returns the first argument if it is the same tensor as ``view``, else ``view``.

    Given another object, even of the same memory, ``addmm`` would copy it.
    """
    first = args[0] if args else None
    if isinstance(first, torch.Tensor) and first.data_ptr() == view.data_ptr():
        alike = first.dtype == view.dtype and first.size() == view.size()
        return first if alike and first.stride() == view.stride() else view
    return view


def estimate(
    region: RegionGraph, in_registers: Callable[[fx.Node], bool] = _never
) -> RegionProfile:
    """Estimates the profile of ``region``, for choosing what to lower; nothing runs.

    ``in_registers`` is True for a value that is never in memory, because its maker is fused with
    its reader; without it the region runs op by op. Inductor needs more where a kernel is given
    room for results that nothing reads. Cost: 1 to 20 ms, for the fakes.
    """
    return _AtenRegion(region, poison=False, in_registers=in_registers).lowered().profile
