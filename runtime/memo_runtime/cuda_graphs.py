"""CUDA graphs: what a half gives to the device is captured once, and then launched as a whole.

The first step of a plan runs call by call, because libraries and Triton make things at first use.
The second one is captured and replayed, later ones are replayed. A replay uses the addresses of the
capture, so memo sees to it that what lies there is right:

* the frame and the host frame stay where they are, and so do parameters, as a rule;
* an input that has moved (a batch) is copied into memory of the graph before each replay;
* results lie in memory of the graph, which the next replay overwrites: the user gets copies.

Streams that copy fork off the captured stream, and join it before the half ends: a copy that the
forward begins has ended when the backward begins. What cannot be captured runs call by call.
"""

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memo_runtime.copies import CopyEngine, CopySchedule, Lane, Ticket
from memo_runtime.current import current
from memo_runtime.instructions import InputView, IssueCollective, RunCall, Running, viewed
from memo_runtime.leases import Lease, StepCounters
from memo_runtime.operator_modes import shows_to_modes
from memo_runtime.stream_order import StreamOrder

MOST_MOVES = 4
"""In so many steps inputs may move, or numbers change; after one more a half runs call by call."""
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Bytes of an element -> a type: the kernel that copies many tensors does not know all types."""
_HOST_FRAME = -1
"""In place of the register of an input; nothing can be copied into memory of the graph for it."""
_ENDED = Ticket(Lane.D2H, torch.empty(0), torch.empty(0), finished=True)
"""In place of the ticket of a copy that has been waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphUse:
    """How the steps of a plan use CUDA graphs."""

    most_bytes: float
    """All graphs of the device may hold so much memory, beside what is planned."""
    say: Callable[[str], object]
    """Called with a sentence for each half: it is a graph, or why it runs call by call."""
    clean_up: Callable[[torch.device, Any], None]
    """Called with device and pool after a capture failed: torch leaves the pool open."""


class _DeviceGraphs:
    """What all graphs of a device share.

    They run one after another, whatever their streams and threads are, because torch has one place
    in which it tells the random numbers of all graphs their seed, and one workspace for their
    products.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()
        """Held while a graph is captured, and while one is launched."""
        self.stream = torch.cuda.Stream(device)
        self.order = StreamOrder(device)
        self.alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        """Graphs that may be replayed."""
        self.broken: list[torch.cuda.CUDAGraph] = []
        """Graphs whose capture has failed: torch goes on asking them what they own."""

    @contextlib.contextmanager
    def capturing(
        self, use: GraphUse, graph: torch.cuda.CUDAGraph, beside: torch.cuda.CUDAGraph | None
    ) -> Iterator[None]:
        """What is launched inside goes into ``graph``, and does not run. Raises what CUDA refuses.

        It shares its memory with ``beside``, which never runs at the same time. Python's collector
        ends no step inside: its waits would be captured too.
        """
        pool = torch.cuda.graph_pool_handle() if beside is None else beside.pool()
        with self.lock, torch.cuda.stream(self.stream):
            torch.cuda.empty_cache()  # a capture cannot take memory from torch's cache
            is_collecting = gc.isenabled()
            gc.disable()
            self.order.begin()
            is_open = True
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    yield
                finally:
                    graph.capture_end()
                    is_open = False
                self.order.end()
                self.alive.add(graph)
            except BaseException:
                if is_open:  # CUDA has refused it: torch takes nothing more into this pool, and
                    use.clean_up(self.device, pool)
                    self.broken.append(graph)
                    self.alive.clear()  # random numbers have another state
                raise
            finally:
                if is_collecting:
                    gc.enable()

    def held_bytes(self) -> int:
        """Returns what the graphs that may be replayed have taken of the device."""
        pools = {graph.pool() for graph in list(self.alive)}
        parts = (part for pool in pools for part in torch.cuda.memory_snapshot(pool))
        return sum(part["total_size"] for part in parts)

    def launch(self, graph: torch.cuda.CUDAGraph) -> None:
        """Launches ``graph`` on the current stream, behind all others."""
        with self.lock:
            self.order.begin()
            graph.replay()
            self.order.end()


_graphs_of = functools.cache(_DeviceGraphs)


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfGraph:
    """A captured half."""

    graph: torch.cuda.CUDAGraph
    shared: _DeviceGraphs
    copies: Mapping[int, torch.Tensor]
    """Register of an input that moves -> the memory that a replay copies it into."""
    left_values: Mapping[int, Any]
    """Register -> what the half leaves there, in memory of the graph or in the frame."""
    views: Mapping[int, InputView]
    """Register -> the view that the half leaves there of an argument, whose register comes first in
    it: the graph keeps no memory of arguments."""
    results: tuple[int, ...]
    """The registers of ``left_values`` whose values go to the user."""
    tickets: frozenset[int]
    """The numbers of the copies that the half begins."""
    shown: Mapping[int, tuple[torch.Tensor, int]]
    """What ``Lease.shown`` holds when the half has run."""
    counted: StepCounters

    @property
    def is_alive(self) -> bool:
        """False where a capture has failed since this one."""
        return self.graph in self.shared.alive

    @torch.no_grad()
    def replay(self, running: Running) -> dict[int, torch.Tensor]:
        """Launches the half, and leaves in the environment what it makes.

        Returns the results, by register, as copies in ordinary memory.
        """
        env, lease = running.env, running.lease
        _wait_for_copies(lease)
        _copy_all(self.copies.values(), [env[register] for register in self.copies])
        self.shared.launch(self.graph)
        for register, value in self.left_values.items():
            env[register] = value
        for register, view in self.views.items():
            env[register] = viewed(env[view[0]], view)
        lease.tickets.update(dict.fromkeys(self.tickets, _ENDED))
        lease.shown.update(self.shown)
        running.counted += self.counted
        copies = {register: _memory_like(env[register]) for register in self.results}
        _copy_all(copies.values(), [env[register] for register in self.results])
        return copies


@dataclass(slots=True, kw_only=True)
class HalfInSlab:
    """One half of one plan in one slab: where its inputs lay, and its graph, if it has one now."""

    graph: HalfGraph | None = None
    last_inputs: dict[int, Any] | None = None
    """Register -> the address of the input, or what is no tensor, in the last step."""
    moving: set[int] = field(default_factory=set)
    """Registers of the tensors that have lain at several addresses."""
    num_moves: int = 0
    """Steps in which another input moved, or what is no tensor changed."""
    is_refused: bool = False

    def require_capturable(self, half: Any) -> None:
        """Raises RuntimeError: a graph would not do what ``half`` does."""
        if half.barred:
            raise RuntimeError(half.barred)
        if self.num_moves > MOST_MOVES:
            raise RuntimeError(f"inputs moved, or numbers changed, in {self.num_moves} steps")
        if any(isinstance(call, IssueCollective) for call in half.calls):
            raise RuntimeError("it talks to other ranks")
        if self.moving.intersection(half.written):
            raise RuntimeError("it writes into an input that moves")

    def fits(self, registers: Sequence[int], running: Running) -> bool:
        """True where the inputs lie where they lay; notes those that do not. True at first."""
        values = {register: running.env[register] for register in registers}
        host = running.lease.host
        values[_HOST_FRAME] = None if host is None else host.bytes(1).data_ptr()
        inputs = {
            at: value.data_ptr() if isinstance(value, torch.Tensor) else value
            for at, value in values.items()
        }
        last_inputs, self.last_inputs = self.last_inputs or inputs, inputs
        moved = {at for at, value in inputs.items() if value != last_inputs[at]} - self.moving
        self.moving.update(at for at in moved if isinstance(values[at], torch.Tensor))
        self.num_moves += bool(moved)
        return not moved


def graph_of(plan: Any, half: Any, running: Running, *, is_member: bool) -> HalfGraph | None:
    """Returns the graph of ``half`` (a RunHalf of the StepPlan ``plan``), captured now if need be.

    None: it runs call by call, as a member of a group does. Behind a forward that is captured anew
    the backward is captured anew, because what is saved for it may lie elsewhere.
    """
    use, graphs = plan.graphs, running.lease.slab.graphs
    if use is None or shows_to_modes():
        return None
    is_backward = half is plan.backward
    state = graphs.setdefault((plan.key, is_backward), HalfInSlab())
    registers = [each for each in half.arguments if each != half.handle]
    registers += half.leased if is_backward else ()
    is_first = state.last_inputs is None
    if state.is_refused:
        return None
    if state.fits(registers, running) and state.graph is not None and state.graph.is_alive:
        return state.graph
    state.graph = None
    if is_first:
        return None
    if not is_backward:
        graphs.pop((plan.key, True), None)
    name = "backward" if is_backward else "forward"
    try:
        if is_member:
            raise RuntimeError("several graphs run as one step")
        for register in registers:
            _require_capturable(running.env[register])
        state.require_capturable(half)
        graph = _capture(plan, half, running, state.moving)
        # Results that leave one by one are planned as they leave: now they are there at once.
        held_bytes = graph.shared.held_bytes()
        held_bytes += sum(graph.left_values[register].nbytes for register in graph.results)
        if held_bytes > use.most_bytes:
            raise RuntimeError(f"graphs take {held_bytes} B, more than memory_budget leaves")
        state.graph = graph
        use.say(f"the {name} is a CUDA graph")
    except Exception as error:
        state.is_refused = True
        use.say(f"the {name} runs call by call: {(str(error) or repr(error)).splitlines()[0]}")
    return state.graph


def _require_capturable(value: Any) -> None:
    """Raises RuntimeError for a tensor that a replay cannot make, or cannot copy.

    A replay makes nothing on the host. It copies bytes, which are not the numbers of a tensor that
    is conjugated or negated where it is read.
    """
    if not isinstance(value, torch.Tensor):
        return
    if value.device.type != "cuda":
        raise RuntimeError("the host makes some of its values")
    if value.is_conj() or value.is_neg():
        raise RuntimeError("some of its values are conjugated or negated where they are read")


@torch.no_grad()
def _capture(plan: Any, half: Any, running: Running, moving: set[int]) -> HalfGraph:
    """Captures ``half``; nothing of it runs. Raises what its calls, or CUDA, do not allow."""
    lease, given, shared = running.lease, running.env, _graphs_of(running.lease.slab.device)
    inside = replace(
        lease,  # its copies get streams of their own: those of other steps must not be captured
        engine=CopyEngine(shared.device, CopySchedule(plan.schedule)),
        tickets=dict.fromkeys(lease.tickets, _ENDED),  # as a replay waits for them
        shown=dict(lease.shown),
    )
    captured = replace(running, lease=inside, env=list(given), counted=StepCounters())
    env, graph = captured.env, torch.cuda.CUDAGraph()
    graphs = (state.graph for state in lease.slab.graphs.values())
    beside = next((each.graph for each in graphs if each is not None and each.is_alive), None)
    try:
        with shared.capturing(plan.graphs, graph, beside):
            copies = {register: _memory_like(given[register]) for register in moving}
            for register, copy in copies.items():
                env[register] = copy
            for call in half.calls:
                call.execute(captured)
                for register in call.outputs if isinstance(call, RunCall) else ():
                    _require_capturable(env[register])
            _wait_for_copies(inside)
    finally:
        current.views, current.inputs = (), {}
    kept = {each for each in half.results if each is not None}
    kept.update(half.leased if half is plan.forward else ())
    kept -= {half.handle, *half.arguments}  # these are in the environment already
    stay = set(half.arguments) - copies.keys() - {half.handle}
    argument_at = {_memory(given[each]): each for each in stay if _memory(given[each])}
    left_values, views = {register: env[register] for register in kept}, {}
    for register in [each for each in kept if _memory(env[each]) in argument_at]:
        value, argument = left_values.pop(register), argument_at[_memory(env[register])]
        if value.dtype != given[argument].dtype:
            raise RuntimeError("an input is read as another type")
        offset = value.storage_offset() - given[argument].storage_offset()
        views[register] = (argument, tuple(value.size()), value.stride(), int(offset))
    tensors = (at for at, value in left_values.items() if isinstance(value, torch.Tensor))
    return HalfGraph(
        graph=graph,
        shared=shared,
        copies=copies,
        left_values=left_values,
        views=views,
        results=tuple(each for each in tensors if each in half.results),
        tickets=frozenset(inside.tickets.keys() - lease.tickets.keys()),
        shown=inside.shown,
        counted=captured.counted,
    )


def _memory(value: Any) -> int:
    """Returns the address of the memory of a tensor; 0 of an empty one, and of what is none."""
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else 0


def _memory_like(value: torch.Tensor) -> torch.Tensor:
    """Returns new memory in the layout of ``value``."""
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def _extent(value: torch.Tensor) -> torch.Tensor:
    """Returns the elements from the first to the last of ``value`` in memory, in one dimension.

    As a type of their size that every kernel knows.
    """
    pairs = zip(value.size(), value.stride(), strict=True)
    length = sum((n - 1) * step for n, step in pairs) + 1 if value.numel() else 0
    return value.as_strided((length,), (1,)).view(_OF_SIZE[value.element_size()])


def _copy_all(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    """Copies tensors to others of the same layout, many of one size of element by one kernel."""
    by_size: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        to, of = by_size.setdefault(source.element_size(), ([], []))
        to.append(_extent(target))
        of.append(_extent(source))
    for to, of in by_size.values():
        torch._foreach_copy_(to, of)


def _wait_for_copies(lease: Lease) -> None:
    """Lets the current stream wait for all copies of the step that have begun."""
    for number in list(lease.tickets):
        lease.wait(number)
