"""Reads Inductor's wrapper lines: on which line each buffer is allocated, reused, aliased, freed.

The line classes (AllocateLine, FreeIfNotReusedLine, ReuseLine, ReinterpretLine, FreeLine,
ExternKernelAllocLine, MultiOutputLine) have the same fields in torch 2.11 to 2.13.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from memo_compile.analysis.random_states import is_random_state
from memo_compile.analysis.regions import AttentionLine, RegionGraph, ViewSpec, counted_once
from memo_compile.analysis.views import results_of
from memo_compile.errors import UnsupportedGraph
from memo_compile.lowering.workspace import (
    CAST,
    CONVOLUTION,
    Convolution,
    at_line,
    cast_bytes,
    convolution_bytes,
    is_attention,
    is_convolution,
)
from memo_compile.step.problem import (
    Layouts,
    OutsideBuffer,
    RegionBuffer,
    RegionOutput,
    RegionProfile,
    Storage,
    align,
)
from memo_compile.torch_private import inductor_api


class _Groups:
    """Union-find over buffer names that share one storage."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def root(self, name: str) -> str:
        while (parent := self._parent.get(name, name)) != name:
            name = parent
        return name

    def join(self, child: str, parent: str) -> None:
        child, parent = self.root(child), self.root(parent)
        if child != parent:
            self._parent[child] = parent


class LineScan:
    """One pass over a region's wrapper lines. A buffer never freed lives to the region's end."""

    def __init__(
        self,
        wrapper: Any,
        region: RegionGraph,
        convolutions: Sequence[Convolution],
        evaluate: Callable[[Any], int] | None = None,
    ) -> None:
        """``convolutions`` are those of the region's graph; ``evaluate`` is for symbolic sizes."""
        self._wrapper = wrapper
        self._has_symbol = evaluate is not None
        self.evaluate: Callable[[Any], int] = evaluate or int
        self._region = region
        self._convolutions = convolutions
        self.graph = inductor_api.current_graph()
        self._lines: list[Any] = list(wrapper.lines)
        self._groups = _Groups()
        self._births: dict[str, tuple[int, Any]] = {}
        """Buffer that Inductor allocates -> the line of that, its node."""
        self._frees: dict[str, int] = {}
        """Buffer -> the line that frees it."""
        self._handed_over: set[str] = set()
        """Names whose memory another name has taken over."""
        self._outside: dict[str, tuple[int, Any, str]] = {}
        """Result of an extern kernel -> the line that allocates it, its node, its kind."""
        self._named: dict[str, int] = {}
        """Result of an extern kernel -> the line that gives it this name."""
        self._copied: list[tuple[int, Sequence[Any], str]] = []
        """Line, the nodes whose bytes are taken beside the arena while it runs, kind."""
        self._workspaces: list[OutsideBuffer] = []
        self.attention: list[AttentionLine] = []
        self._called_at: dict[str, int] = {}
        """Extern kernel -> its line: all that it returns exists from then on."""
        self._tuple_of: dict[str, str] = {}
        """One of several results of an extern kernel -> the tuple of all."""
        self._arena: dict[str, int] = {}
        """Buffer in the arena -> its index in the table of views."""
        self._read_lines()
        names = self.graph.get_output_names()
        self._outputs = {self._groups.root(name) for name in names}
        self._external = {self._groups.root(names[at]) for at in region.external_outputs}
        self._on_host = {
            self._groups.root(names[at])
            for at, result in enumerate(results_of(region.gm.graph))
            if isinstance(result, fx.Node) and is_random_state(result)
        }
        self._choose_arena()

    @property
    def _strides(self) -> list[tuple[int, ...] | None]:
        """The strides that Inductor has chosen for each result."""
        chosen = inductor_api.chosen_strides(self.graph)
        return [None if s is None else tuple(map(self.evaluate, s)) for s in chosen]

    def _removed(self, name: str) -> bool:
        return name in self.graph.removed_buffers

    def _read_lines(self) -> None:
        """Notes what each line does to buffers: in the tables above."""
        for number, line in enumerate(self._lines):
            if isinstance(line, inductor_api.AllocateLine):
                self._births.setdefault(line.node.get_name(), (number, line.node))
            elif isinstance(line, inductor_api.ReuseLine | inductor_api.ReinterpretLine):
                self._groups.join(line.reused_as.get_name(), line.node.get_name())
                if isinstance(line, inductor_api.ReuseLine) and line.delete_old:
                    self._handed_over.add(line.node.get_name())
            elif isinstance(line, inductor_api.FreeIfNotReusedLine | inductor_api.FreeLine):
                self._frees[line.node.get_name()] = number
            elif isinstance(line, inductor_api.ExternKernelAllocLine):
                self._read_extern(number, line.node)
            elif isinstance(line, inductor_api.MultiOutputLine):
                self._read_multi_output(number, line)
            elif isinstance(getattr(line, "node", None), inductor_api.ScatterFallback):
                self._read_scatter(number, line.node)

    def _read_scatter(self, number: int, node: Any) -> None:
        """Notes what torch's own scatter on a CPU allocates for itself while its line runs."""
        written = node.inputs[0]
        numbers = math.prod(map(self.evaluate, written.get_size()))
        averages = node.kwargs.get("reduce") == "mean" and len(node.inputs) > 2
        averaged = math.prod(map(self.evaluate, node.inputs[2].get_size())) if averages else 0
        size_bytes = cast_bytes(_kernel_name(node), written.get_dtype(), numbers, averaged)
        if size_bytes and self._region.device.type == "cpu":
            self._workspaces.append(at_line(CAST, size_bytes, number))

    def _read_extern(self, number: int, node: Any) -> None:
        """Notes what an extern kernel, called on line ``number``, allocates, copies or aliases."""
        name, kind = node.get_name(), _kernel_name(node)
        self._called_at[name] = number
        if is_attention(operator := inductor_api.called_operator(node)):
            self.attention.append(AttentionLine(operator, number))
        written = [self.graph.get_buffer(buffer) for buffer in inductor_api.written_buffers(node)]
        self._read_convolution(number, node, written)
        # Copied results exist beside the buffers that they are copied to.
        if inductor_api.copies_results(node):
            self._copied.append((number, written[inductor_api.writes_first(node) :], kind))
            return
        aliased = node.get_inputs_that_alias_output()
        for source in aliased:
            self._groups.join(name, source)
        if not aliased and not inductor_api.has_multi_output_layout(node):
            self._outside[name] = (number, node, kind)
            self._named[name] = number

    def _read_convolution(self, number: int, node: Any, written: Sequence[Any]) -> None:
        """Notes what a convolution on a CPU allocates for itself while its line runs."""
        name = _kernel_name(node)
        if not is_convolution(name) or self._region.device.type != "cpu":
            return
        operands = node.inputs[len(written) :]  # behind the buffers that are written
        is_backward = "backward" in name
        if not is_backward:
            operands = [*written, node][:1] + operands[:2]  # a backward's begin with a gradient
        result, source, weight = (tuple(map(int, item.get_size())) for item in operands[:3])
        plain = Convolution(
            result=result,
            source=source,
            weight=weight,
            item_bytes=operands[1].get_dtype().itemsize,
            is_backward=is_backward,
        )
        # The kernel does not show groups and strides; the graph's convolutions of these shapes do.
        alike = [traced for traced in self._convolutions if traced.key == plain.key] or [plain]
        size_bytes = max(map(convolution_bytes, alike))
        self._workspaces.append(at_line(CONVOLUTION, size_bytes, number))

    def _read_multi_output(self, number: int, line: Any) -> None:
        """Notes the line that takes one result out of the tuple of an extern kernel."""
        node = self.graph.name_to_buffer.get(line.result_name)
        source = self.graph.name_to_buffer.get(line.arg_name)
        if node is None or source is None or not inductor_api.is_tensor_buffer(node):
            return
        aliased = source.get_inputs_that_alias_output()
        for name in aliased:
            self._groups.join(line.result_name, name)
        if not aliased:
            start = self._called_at.get(line.arg_name, number)
            self._outside[line.result_name] = (start, node, _kernel_name(source))
            self._named[line.result_name] = number
            self._tuple_of[line.result_name] = line.arg_name

    def _size_bytes(self, node: Any) -> int:
        """Returns the bytes of the storage of ``node``, aligned."""
        elements = self.graph.get_allocation_storage_size(node)
        try:
            return align(self.evaluate(elements) * node.get_dtype().itemsize)
        except TypeError as error:
            raise UnsupportedGraph(
                f"region {self._region.name}: the size of {node.get_name()} depends on data"
            ) from error

    def _ends(self) -> dict[str, int]:
        """Returns, per root of a group, the line after its storage's last use."""
        members: dict[str, list[str]] = {}
        names = [*self._births, *self._outside, *self.graph.graph_inputs, *self._frees]
        names += list(self._groups._parent)
        for name in dict.fromkeys(names):
            members.setdefault(self._groups.root(name), []).append(name)
        ends = {}
        for root, group in members.items():
            owners = [n for n in group if n not in self._handed_over and not self._removed(n)]
            frees = [self._frees[name] for name in owners if name in self._frees]
            all_freed = owners and len(frees) == len(owners)
            ends[root] = max(frees) + 1 if all_freed else len(self._lines)
        return ends

    def _choose_arena(self) -> None:
        """Chooses the buffers of the arena: static, on the region's device, no result of the user.

        A result that an extern kernel allocates is copied into a buffer where it leaves the region,
        so that it is a saved tensor like any other. Random states stay where the kernel put them.
        """
        leaving = (name for name in self._named if name in self._outputs - self._on_host)
        for name in (*self._births, *leaving):
            node = self._node(name)
            device = node.get_device()
            fits = device is not None and device.type == self._region.device.type
            is_root = self._groups.root(name) == name and name not in self._external
            if fits and is_root and not self._removed(name) and self._is_static(node):
                self._arena[name] = len(self._arena)

    def _node(self, name: str) -> Any:
        """Returns Inductor's node of a buffer, allocated here or by an extern kernel."""
        return self._births[name][1] if name in self._births else self._outside[name][1]

    def _first_write(self, name: str) -> int:
        """Returns the line from which on a buffer of the arena holds a value."""
        return self._births[name][0] if name in self._births else self._named[name]

    def _is_static(self, node: Any) -> bool:
        """True where the node's size and strides are numbers, or depend on the one symbol."""
        return self._has_symbol or inductor_api.is_static(node)

    @property
    def views(self) -> list[ViewSpec]:
        """The layouts of the arena's buffers."""
        return [
            ViewSpec(
                dtype=node.get_dtype(),
                size=tuple(map(self.evaluate, node.get_size())),
                stride=tuple(map(self.evaluate, node.get_stride())),
            )
            for node in map(self._node, self._arena)
        ]

    def require_traced_strides(self, layouts: Layouts) -> None:
        """Raises UnsupportedGraph: a result has other strides than traced (``layouts``).

        The next region's code was made for the traced strides.
        """
        for at, (layout, strides) in enumerate(zip(layouts, self._strides, strict=True)):
            if layout is None or strides is None or 0 in layout.size:
                continue
            pairs = zip(layout.size, layout.stride, strides, strict=True)
            if any(size > 1 and traced != chosen for size, traced, chosen in pairs):
                raise UnsupportedGraph(
                    f"region {self._region.name}: Inductor gives result {at} the strides {strides} "
                    f"where {layout.stride} were traced"
                )

    def _user_results(self) -> set[str]:
        """Returns the buffers of a forward region that are results for the user, on a CPU."""
        if self._region.is_backward or self._region.device.type != "cpu":
            return set()
        return {
            name
            for name, (_, node) in self._births.items()
            if name in self._external and node.get_device().type == "cpu" and self._is_static(node)
        }

    def rewrite(self, *, poison: bool) -> Iterator[Any]:
        """Yields the lines with views of the arena for allocations, and with poison on demand."""
        ends = self._ends()
        dying: dict[int, list[str]] = {}  # line -> buffers that it reads last
        for name in self._arena:
            if poison and name not in self._outputs:
                dying.setdefault(ends[name] - 1, []).append(name)
        inputs = self._inputs()
        results = self._user_results()
        copied = {self._named[name]: name for name in self._arena if name in self._named}
        for number, line in enumerate(self._lines):
            yield self._replaced(line, results)
            if number in copied:  # a result that its kernel has allocated elsewhere
                name = copied[number]
                yield f"{name} = memo_current.views[{self._arena[name]}].copy_({name})"
            for name in dying.get(number, ()):
                yield f"memo_current.poison({self._arena[name]})"
            freed = line.node.get_name() if isinstance(line, inductor_api.FreeLine) else None
            if poison and freed in inputs:
                position = inputs.index(freed)
                yield f"memo_current.input_done({position})"

    def _replaced(self, line: Any, results: set[str]) -> Any:
        """Returns ``line``, or what stands in its place: a view of the arena, or a mapping.

        ``results`` are buffers of the user, whose pages go back when the user drops them.
        """
        plans = isinstance(line, inductor_api.MemoryPlanningLine)
        if not plans or isinstance(line, inductor_api.NullLine):
            return line
        name = line.node.get_name()
        if self._removed(name):  # a fused kernel makes no such buffer
            return inductor_api.NullLine(self._wrapper)
        if isinstance(line, inductor_api.AllocateLine) and name in self._arena:
            return f"{name} = memo_current.views[{self._arena[name]}]"
        if isinstance(line, inductor_api.AllocateLine) and name in results:
            to_text = self._wrapper.codegen_python_shape_tuple
            size, stride = to_text(line.node.get_size()), to_text(line.node.get_stride())
            return f"{name} = memo_own_mapping({size}, {stride}, {line.node.get_dtype()})"
        return line

    def _inputs(self) -> list[str]:
        """Names of the inputs that are tensors."""
        return list(self.graph.graph_input_names)[int(self._has_symbol) :]

    def profile(self) -> RegionProfile:
        """Returns the region's buffers, outputs and memory outside, with lifetimes in lines."""
        ends = self._ends()
        buffers = tuple(
            RegionBuffer(
                name=name,
                size_bytes=self._size_bytes(self._node(name)),
                start=self._first_write(name),
                end=max(ends[name], self._first_write(name) + 1),
            )
            for name in self._arena
        )
        inputs = self._inputs()
        return RegionProfile(
            name=self._region.name,
            num_lines=len(self._lines),
            buffers=buffers,
            input_ends=tuple(ends[self._groups.root(name)] for name in inputs),
            outputs=counted_once(
                itertools.starmap(self._region_output, enumerate(self.graph.get_output_names()))
            ),
            outside=tuple(self._outside_buffers(ends)),
            overwrites=self._overwrites(),
        )

    def _overwrites(self) -> tuple[int, ...]:
        """Returns the inputs over which a kernel writes its result."""
        overwritten = (
            line.node.get_name() for line in self._lines if isinstance(line, inductor_api.ReuseLine)
        )
        roots, inputs = set(map(self._groups.root, overwritten)), self._inputs()
        return tuple(at for at, name in enumerate(inputs) if name in roots)

    def _region_output(self, index: int, name: str) -> tuple[str, RegionOutput]:
        """Returns the root of the output's storage, and where that lies."""
        root, inputs = self._groups.root(name), self._inputs()
        if root in self._arena:
            return root, RegionOutput(storage=Storage.ARENA, index=self._arena[root])
        if root in inputs:
            return root, RegionOutput(storage=Storage.INPUT, index=inputs.index(root))
        if root not in self._births and root not in self._outside:
            return root, RegionOutput(storage=Storage.NONE)
        size = self._size_bytes(self.graph.name_to_buffer[root])
        if index not in self._region.external_outputs:
            return root, RegionOutput(storage=Storage.OUTSIDE, size_bytes=size)
        start = self._births[root][0] if root in self._births else self._outside[root][0]
        return root, RegionOutput(storage=Storage.EXTERNAL, size_bytes=size, start=start)

    def _outside_buffers(self, ends: dict[str, int]) -> Iterator[OutsideBuffer]:
        """Yields memory outside: workspaces, results of extern kernels, other devices' buffers."""
        yield from self._workspaces
        for start, written, kind in self._copied:
            yield at_line(kind, sum(map(self._size_bytes, written)), start)
        for name, (start, node, kind) in self._outside.items():
            root, size_bytes = self._groups.root(name), self._size_bytes(node)
            end = max(ends[root], start + 1)
            if name in self._arena:  # until it was copied, and its tuple is dropped
                freed = self._frees.get(self._tuple_of.get(name, ""), self._named[name])
                end = max(freed, self._named[name]) + 1
            if (name in self._arena or root not in self._outputs) and size_bytes:
                yield OutsideBuffer(kind=kind, size_bytes=size_bytes, start=start, end=end)
        for name, (start, node) in self._births.items():
            root = self._groups.root(name)
            is_outside = name not in self._arena and root == name and root not in self._outputs
            if is_outside and not self._removed(name) and self._is_static(node):
                size, end = self._size_bytes(node), max(ends[root], start + 1)
                yield OutsideBuffer(kind="other device", size_bytes=size, start=start, end=end)


def _kernel_name(node: Any) -> str:
    name = node.get_kernel_name() if hasattr(node, "get_kernel_name") else None
    return (name or type(node).__name__).removeprefix("torch.ops.")
