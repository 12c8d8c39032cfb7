"""What is to be planned, as pure data: regions, the calls of one step, and every buffer's life.

A *region* is a piece of the step that is lowered once. Its profile says, line by line of its
generated code, which buffers it allocates and when each dies. A *call* runs a region on values.
The calls of the forward and then of the backward, in order, make one step; laying their lines end
to end gives the time axis on which :func:`arena_buffers` expands every buffer's lifetime.

No torch here: a Problem is saved as JSON, planned, checked and replayed on any machine.
"""

import enum
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from memo_compile.errors import InputError

ALIGNMENT_BYTES = 512
"""Every offset in the arena is a multiple of this, as CUDA's allocator promises to kernels."""


LEFT_OUT = {"left_out": True}
"""Metadata of a field that is written to JSON only if it is not the default: few steps have it."""


class Phase(enum.Enum):
    """Which of autograd's two calls runs a region."""

    FORWARD = "forward"
    BACKWARD = "backward"


class CallKind(enum.Enum):
    """What a call of the step program does."""

    RUN = "run"
    """A region of the forward or of the backward."""
    RECOMPUTE = "recompute"
    """A region that recomputes saved activations, before the backward that reads them."""
    OFFLOAD = "offload"
    """A copy from the device to the host begins. It reads its one input until a WAIT names it."""
    RELOAD = "reload"
    """A copy from the host begins; its output's buffer is born here. It brings what an OFFLOAD has
    copied there, or the weight that is its input: one of ``Problem.host_weights``."""
    WAIT = "wait"
    """The compute lane goes on when the copy that ``waits_for`` names has ended. It reads its one
    input, the value that is copied, so that its bytes stay untouched until here."""
    ISSUE = "issue"
    """A collective begins: it reads its one input and writes its one output, and may do so until
    the COMM_WAIT that names it. The output may lie in the input's place."""
    COMM_WAIT = "comm_wait"
    """The compute lane goes on when the collective that ``waits_for`` names has ended. Its inputs
    are that collective's output and input; its output is the former, which may now be read."""


class Storage(enum.Enum):
    """Where the storage of a region's output lies."""

    ARENA = "arena"
    EXTERNAL = "external"
    """Ordinary memory: the user keeps it (loss, gradients, mutated buffers)."""
    INPUT = "input"
    """The output is one of the region's inputs, or a view of it."""
    OUTSIDE = "outside"
    """Ordinary memory because the kernel allocates its own result and it was not copied in."""
    NONE = "none"
    """Not a tensor."""


def align(size_bytes: int) -> int:
    """Returns ``size_bytes`` rounded up to a multiple of ALIGNMENT_BYTES."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a tensor's numbers lie in memory. ``size``, ``stride`` and ``offset`` are in elements.

    A value begins at its own first element; ``offset`` counts from there.
    """

    dtype: str
    item_bytes: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    def __post_init__(self) -> None:
        if len(self.size) != len(self.stride) or self.item_bytes < 1:
            raise InputError(f"layout: expected one stride for each dimension, got {self}")

    @property
    def num_elements(self) -> int:
        """How many elements the tensor has."""
        return math.prod(self.size)

    @property
    def end(self) -> int:
        """Index of the element behind the last one of the tensor, from where the value begins."""
        if 0 in self.size:
            return self.offset
        spans = ((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return self.offset + sum(spans) + 1

    def part(self, dim: int, start: int, length: int) -> "Layout":
        """Returns the layout of entries ``[start, start + length)`` of dimension ``dim``."""
        return replace(
            self,
            size=(*self.size[:dim], length, *self.size[dim + 1 :]),
            offset=self.offset + start * self.stride[dim],
        )

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.size)} with strides {list(self.stride)} from {self.offset}"


Layouts = tuple[Layout | None, ...]
"""Layouts of a call's or a region's values by position; None for what is no tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionBuffer:
    """One arena buffer of a region: its size and its life in lines, ``[start, end)``."""

    name: str
    size_bytes: int
    """A multiple of ALIGNMENT_BYTES."""
    start: int
    end: int

    def __post_init__(self) -> None:
        if self.size_bytes < 0 or self.size_bytes % ALIGNMENT_BYTES:
            raise InputError(
                f"buffer {self.name}: expected a size in multiples of {ALIGNMENT_BYTES} B, "
                f"got {self.size_bytes}"
            )
        if not 0 <= self.start < self.end:
            raise InputError(
                f"buffer {self.name}: expected 0 <= start < end, got [{self.start}, {self.end})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideBuffer:
    """Memory that a kernel of the region allocates itself, outside the arena."""

    kind: str
    """The operator, e.g. ``aten.convolution``."""
    size_bytes: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionOutput:
    """Where one output of a region lies."""

    storage: Storage
    index: int | None = None
    """ARENA: the index in ``buffers``; INPUT: the index of the input; else None."""
    size_bytes: int = 0
    """EXTERNAL and OUTSIDE: bytes of ordinary memory."""
    start: int = 0
    """EXTERNAL: the line that allocates it."""
    same_as: int | None = None
    """EXTERNAL and OUTSIDE: the earlier output whose storage this is, and where its bytes count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionProfile:
    """The memory of a lowered region: its arena buffers and memory outside, line by line."""

    name: str
    num_lines: int
    buffers: tuple[RegionBuffer, ...]
    input_ends: tuple[int, ...]
    """Per input the first line after its last use; 0 for an unused input."""
    outputs: tuple[RegionOutput, ...]
    outside: tuple[OutsideBuffer, ...] = ()
    input_layouts: Layouts = ()
    """Layouts that the code expects; empty for copies, and where no code is known."""
    output_layouts: Layouts = ()
    overwrites: tuple[int, ...] = field(default=(), metadata=LEFT_OUT)
    """Positions of inputs that the code overwrites with its results."""

    def outputs_of_buffers(self) -> dict[int, list[int]]:
        """Returns for each buffer that holds outputs their positions, by the buffer's index."""
        positions: dict[int, list[int]] = {}
        for position, output in enumerate(self.outputs):
            if output.storage is Storage.ARENA and output.index is not None:
                positions.setdefault(output.index, []).append(position)
        return positions

    @property
    def shares_storage(self) -> bool:
        """True where an output has the storage of an input, or of an earlier output."""
        return any(o.same_as is not None or o.storage is Storage.INPUT for o in self.outputs)

    def most_bytes(self, *, own_outputs: bool = True) -> int:
        """Returns the most bytes of buffers at one line; ``own_outputs``: those of outputs too."""
        outputs = self.outputs_of_buffers()
        events: list[tuple[int, int]] = []
        for index, buffer in enumerate(self.buffers):
            if own_outputs or index not in outputs:
                end = self.num_lines if index in outputs else buffer.end
                events += [(buffer.start, buffer.size_bytes), (end, -buffer.size_bytes)]
        return max(running_sums(events).values(), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Which bytes of a value's storage an OFFLOAD or RELOAD moves, and where the host holds them.

    OFFLOAD: the value is the call's input; RELOAD: the call's output. Byte ``start_bytes`` of the
    storage is byte ``host_offset`` of the step's host frame; of a weight on the host, byte
    ``host_offset`` of the weight.
    """

    start_bytes: int
    end_bytes: int
    host_offset: int

    def __post_init__(self) -> None:
        if not 0 <= self.start_bytes < self.end_bytes or self.host_offset < 0:
            raise InputError(f"copy: expected 0 <= start < end and a host offset, got {self}")

    @property
    def num_bytes(self) -> int:
        """How many bytes move."""
        return self.end_bytes - self.start_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Into:
    """A buffer of a call that has no place of its own in the arena: it lies inside another value.

    The call writes bytes ``[offset_bytes, offset_bytes + size)`` of ``value``'s storage, which
    lives at least to the end of the call. ``value`` may lie in ordinary memory.
    """

    buffer: int
    """Index in the region's ``buffers``."""
    value: str
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """One call of the step: which values it reads and which it makes.

    A copy or a wait runs no code. Its ``region`` is one of ``copy_regions`` and has one line on the
    step's time axis, so that lifetimes of copied values need no rules of their own.
    """

    name: str
    region: str
    phase: Phase
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    layer_class: str | None = None
    """The class of the layer that it is part of; None for prologue, middle and epilogue."""
    instance: int = 0
    """Which layer of its class."""
    member: int = 0
    """Which live step of a group this belongs to; 0 where there is one."""
    kind: CallKind = CallKind.RUN
    copy: Copy | None = None
    """OFFLOAD and RELOAD: the bytes that move."""
    waits_for: str | None = None
    """WAIT: the name of the copy's call; COMM_WAIT: that of the ISSUE."""
    into: tuple[Into, ...] = ()
    reads: Layouts = ()
    """The layout in which the call reads each input, from where the value begins. Empty for a copy
    or a wait, which takes bytes, and where no code is known."""

    @property
    def half(self) -> tuple[Phase, int]:
        """The half that runs it, by phase and member; a copy may be issued in an earlier one."""
        return self.phase, self.member

    @property
    def touched(self) -> tuple[str, ...]:
        """The values whose bytes it reads or writes into, but for its outputs."""
        return (*self.inputs, *(target.value for target in self.into))

    def value_around(self, buffer: int | None) -> str | None:
        """Returns the value in which ``buffer`` lies; None if it has a place of its own."""
        return next((target.value for target in self.into if target.buffer == buffer), None)

    def into_buffers(self) -> frozenset[int]:
        """Returns the indices of the region's buffers that lie inside other values."""
        return frozenset(target.buffer for target in self.into) if self.into else frozenset()


COPY_REGION = "memo.copy"
"""The region of every OFFLOAD and WAIT: one line that reads one input."""

_COPY_PROFILE = RegionProfile(
    name=COPY_REGION, num_lines=1, buffers=(), input_ends=(1,), outputs=()
)


def copy_regions(
    reload_sizes: Iterable[int], weight_sizes: Iterable[int] = ()
) -> dict[str, RegionProfile]:
    """Returns the regions of copies and waits by name.

    RELOADs have one for each size in bytes, and another one where they bring weights.
    """
    return {
        COPY_REGION: _COPY_PROFILE,
        **{reload_region(size): _reload_profile(size) for size in reload_sizes},
        **{weight_region(size): _weight_profile(size) for size in weight_sizes},
    }


@functools.cache
def _reload_profile(size_bytes: int) -> RegionProfile:
    """Returns the same object for each size, because ``CallTables`` finds profiles by their id."""
    return RegionProfile(
        name=reload_region(size_bytes),
        num_lines=1,
        buffers=(RegionBuffer(name="data", size_bytes=size_bytes, start=0, end=1),),
        input_ends=(),
        outputs=(RegionOutput(storage=Storage.ARENA, index=0),),
    )


@functools.cache
def _weight_profile(size_bytes: int) -> RegionProfile:
    return replace(_reload_profile(size_bytes), name=weight_region(size_bytes), input_ends=(1,))


def reload_region(size_bytes: int) -> str:
    """Returns the name of the region of RELOADs of ``size_bytes``."""
    return f"memo.reload.{size_bytes}"


def weight_region(size_bytes: int) -> str:
    """Returns the name of the region of RELOADs that bring weights of ``size_bytes``."""
    return f"memo.weight.{size_bytes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """What autograd gives one half of the step, and what the half returns, by names of values.

    A group, which plans several live steps of one graph as one, has two halves for each member.
    """

    phase: Phase
    constants: tuple[str, ...]
    """Tensors that the graph carries itself."""
    arguments: tuple[str, ...]
    """Names of the arguments in order; those of a backward include the handle."""
    results: tuple[str | None, ...]
    handle: str
    """The value that stands for all saved tensors: the forward makes it, the backward gets it."""
    layouts: Layouts
    """Layouts of the constants, and behind them of the arguments."""
    member: int = 0

    def given(self) -> dict[str, Layout | None]:
        """Returns the layouts of the half's constants and arguments, by value."""
        return dict(zip((*self.constants, *self.arguments), self.layouts, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Interlude:
    """Ordinary memory that the user's own code took before a half of a group, as measured."""

    half: int
    """Index in ``Problem.halves`` of the half that follows; the number of halves for the end."""
    most_bytes: int
    """The most at one time, above what was there when the half before had ended."""
    left_bytes: int
    """How much of it stays (gradients of other modules), to the end of the step or until a later
    interlude frees it; below 0 in an interlude that frees more than it leaves."""

    def __post_init__(self) -> None:
        if self.half < 1 or not max(0, self.left_bytes) <= self.most_bytes:
            raise InputError(f"interlude: expected a half before it and left <= most, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """What a saved activation is, for the report: shape, dtype, operator and the user's line."""

    shape: tuple[int, ...]
    dtype: str
    op: str
    source: str | None = None
    """``file:line`` of the user's code that made it."""
    role: str = ""
    """Its name for the user, by the module that made it: ``mlp.up_proj``, ``attention output``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerClassInfo:
    """One class of repeating layers, as the report shows it."""

    num_layers: int
    """How many layers the class has."""
    module_path: str | None
    """Where the model holds them, such as ``model.layers``; None: not known."""
    period: int
    """How many modules make a layer."""
    num_regions: int
    """How many regions a layer is, forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedBytes:
    """Device memory of the step that lies outside the arena, in bytes."""

    parameters: int = 0
    """Those that the step reads, each storage once, but for those on the host."""
    buffers: int = 0
    """The model's, not the arena's."""
    gradients: int = 0
    """Those of this backward, and those that exist already where gradients are accumulated."""
    optimizer_state: int = 0
    """What the optimizer keeps, or will keep once it has made its first step."""
    inputs: int = 0
    """Graph inputs and incoming gradients."""
    outputs: int = 0
    """The forward's results."""
    new_gradients: int = 0
    """The part of ``gradients`` that this backward makes."""
    earlier_outputs: int = 0
    """Results of earlier steps that the user holds during this one."""
    libraries: int = 0
    """CUDA: cuBLAS's workspace, and what Inductor takes to tune a kernel."""
    state_on_host: int = 0
    """Optimizer state on the host: no device memory."""
    gradients_on_host: int = field(default=0, metadata=LEFT_OUT)
    """Gradients that go to the host as they are made: no device memory."""
    parameters_on_host: int = field(default=0, metadata=LEFT_OUT)
    """Parameters on the host: no device memory either."""
    update: int = 0
    """What the optimizer borrows at least when the backward has ended, where its state is on the
    host: state on its way, and temporary results."""

    @property
    def on_host(self) -> int:
        """Training state on the host, which is no device memory."""
        return self.state_on_host + self.gradients_on_host + self.parameters_on_host


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A whole step to be planned: region profiles, the calls in order, and memory that is fixed."""

    regions: Mapping[str, RegionProfile]
    calls: tuple[StepCall, ...]
    inputs: tuple[str, ...] = ()
    """Values that the step is given: parameters, graph inputs, tangents, constants."""
    halves: tuple[Half, ...] = ()
    """The forward and the backward, of a group those of all members, in the order in which they
    run; empty for a step that only stands on paper."""
    fixed: FixedBytes = field(default_factory=FixedBytes)
    layer_classes: tuple[LayerClassInfo, ...] = ()
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)
    """Facts about values that live in the arena across calls, by value name."""
    host_bytes: int = 0
    """Size of the step's host frame, into which OFFLOADs copy."""
    tangents: Mapping[str, int] = field(default_factory=dict)
    """Bytes of incoming gradients by value: they exist from the start of the backward that gets
    them to their last read."""
    held_until: Mapping[str, int] = field(default_factory=dict)
    """Groups: result -> index of the half at whose end it is freed; others: the step's end."""
    interludes: tuple[Interlude, ...] = ()
    """Groups: the user's code between the halves."""
    keeps_outputs: bool = False
    """True when the user holds what the forward returned until the step has ended. Else it is freed
    when the forward ends, or where the backward last reads it."""
    rebound_bytes: int = 0
    """Results of the previous step that exist until this forward has ended: in a loop with
    ``out = model(x)``, ``out`` still refers to them while the model runs."""
    loss_bytes: int = 0
    """What a loss that is computed outside the graph is taken to hold, besides results and their
    gradients, when the backward begins."""
    leaving: tuple[str, ...] = ()
    """Results of the backward that are freed once autograd has them, because they are added to
    existing gradients, or hooks use them up."""
    live_steps: int = 1
    """max_inflight: forwards that may wait for their backwards, each with its own frame."""
    releases_pages: bool = False
    """True where the device takes single pages of the arena back, so that the arena shrinks as
    ordinary memory grows. Else the whole arena stays."""
    layer_weights: Mapping[str, int] = field(default_factory=dict, metadata=LEFT_OUT)
    """Bytes of weights that only layers read, by value: they may lie on the host. Empty where that
    was not asked for."""
    host_weights: tuple[str, ...] = field(default=(), metadata=LEFT_OUT)
    """Those that do. A call reads one where a RELOAD has brought it, never from there."""

    @functools.cached_property
    def first_backward(self) -> int:
        """Index of the first call of the backward; the number of calls where there is none."""
        for at, call in enumerate(self.calls):
            if call.phase is Phase.BACKWARD:
                return at
        return len(self.calls)

    @functools.cached_property
    def has_one_turn(self) -> bool:
        """True where no forward runs once a backward has begun. Not so in most pipelines."""
        return all(call.phase is Phase.BACKWARD for call in self.calls[self.first_backward :])

    def made_by(self, call: StepCall) -> Iterator[tuple[RegionOutput, str]]:
        """Returns the outputs of ``call``: each output of its region with the name of the value."""
        return zip(self.regions[call.region].outputs, call.outputs, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaBuffer:
    """One buffer of the step on the step's time axis, ``[start, end)`` in lines."""

    id: str
    call: int
    """Index of the call that makes it."""
    index: int
    """Index in the region's ``buffers``."""
    start: int
    end: int
    size_bytes: int
    transient: bool
    """True when it is born and dead inside one call."""


def call_starts(problem: Problem) -> tuple[int, ...]:
    """Returns the first line of every call on the step's time axis, and behind them its end."""
    lines = {name: region.num_lines + 1 for name, region in problem.regions.items()}
    return tuple(itertools.accumulate((lines[call.region] for call in problem.calls), initial=0))


def arena_buffers(problem: Problem) -> tuple[ArenaBuffer, ...]:
    """Returns every arena buffer with its lifetime, which ends with its last reader."""
    starts = call_starts(problem)
    last_read = last_reads(problem, starts)
    outputs = {name: region.outputs_of_buffers() for name, region in problem.regions.items()}
    buffers = []
    for index, call in enumerate(problem.calls):
        region, crossing = problem.regions[call.region], outputs[call.region]
        inside_others = call.into_buffers()
        for position, buffer in enumerate(region.buffers):
            if position in inside_others:
                continue
            end = starts[index] + buffer.end
            if position in crossing:
                reads = [last_read.get(call.outputs[output], 0) for output in crossing[position]]
                end = max([end, starts[index] + region.num_lines, *reads])
            buffers.append(
                ArenaBuffer(
                    id=f"{call.name}/{buffer.name}",
                    call=index,
                    index=position,
                    start=starts[index] + buffer.start,
                    end=end,
                    size_bytes=buffer.size_bytes,
                    transient=position not in crossing,
                )
            )
    return tuple(buffers)


class ArenaValue(NamedTuple):
    """A value whose buffer has a place of its own in the arena."""

    value: str
    id: str
    """Name of the buffer."""
    call: int
    """Index of the call."""
    buffer: int
    """Index in the region's ``buffers``."""
    size_bytes: int


def arena_values(problem: Problem) -> Iterator[ArenaValue]:
    """Yields the values that calls make in the arena, in order; several may share a buffer."""
    for at, call in enumerate(problem.calls):
        buffers, inside_others = problem.regions[call.region].buffers, call.into_buffers()
        for output, value in problem.made_by(call):
            index = output.index
            if output.storage is Storage.ARENA and index is not None and index not in inside_others:
                buffer = buffers[index]
                yield ArenaValue(value, f"{call.name}/{buffer.name}", at, index, buffer.size_bytes)


def aliases(problem: Problem) -> dict[str, str]:
    """Returns for each output that is an input, or a view of one, the value first made there."""
    base_of: dict[str, str] = {}
    for call in problem.calls:
        for output, value in problem.made_by(call):
            if output.storage is Storage.INPUT and output.index is not None:
                viewed = call.inputs[output.index]
                base_of[value] = base_of.get(viewed, viewed)
    return base_of


def last_reads(problem: Problem, starts: tuple[int, ...]) -> dict[str, int]:
    """Returns for each value the line after its last read, reads of its aliases included.

    An output whose storage is an input (Storage.INPUT) makes the input's storage live as long
    as the output, and one that shares an earlier output's storage makes that output's; walking
    the calls backwards settles chains of such aliases in one go.
    """
    last: dict[str, int] = {}
    sharing = {name for name, region in problem.regions.items() if region.shares_storage}
    for index in reversed(range(len(problem.calls))):
        call, start = problem.calls[index], starts[index]
        region = problem.regions[call.region]
        for end, value in zip(region.input_ends, call.inputs, strict=True):
            if start + end > last.get(value, 0):
                last[value] = start + end
        for into in call.into:
            last[into.value] = max(last.get(into.value, 0), starts[index] + region.num_lines)
        for output, value in problem.made_by(call) if call.region in sharing else ():
            if output.same_as is not None:
                first = call.outputs[output.same_as]
                last[first] = max(last.get(first, 0), last.get(value, 0))
            if output.storage is Storage.INPUT and output.index is not None:
                source = call.inputs[output.index]
                alive = max(last.get(value, 0), starts[index] + region.num_lines)
                last[source] = max(last.get(source, 0), alive)
    return last


def live_bytes(buffers: Iterable[ArenaBuffer]) -> dict[int, int]:
    """Returns the bytes alive from each line on at which their sum changes, by line."""
    return running_sums(
        event
        for buffer in buffers
        for event in ((buffer.start, buffer.size_bytes), (buffer.end, -buffer.size_bytes))
    )


def running_sums(events: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Returns for each line of ``events``, (line, change), the sum of the changes up to it."""
    change: dict[int, int] = {}
    for line, size_bytes in events:
        change[line] = change.get(line, 0) + size_bytes
    lines = sorted(change)
    return dict(zip(lines, itertools.accumulate(change[line] for line in lines), strict=True))
