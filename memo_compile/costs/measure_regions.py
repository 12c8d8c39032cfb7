"""Measures lowered regions on this machine: each is run a few times on made-up inputs.

Inputs are small random numbers, and zeros where the dtype is whole: an index of zero is valid
everywhere. So work that depends on values (tokens per expert) differs from that in a step.
``run_once`` runs a region so that libraries allocate what they keep for its kernels.
"""

import contextlib
import mmap
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from memo_runtime.arena import FrameView, Slab, arena_of
from memo_runtime.current import current
from memo_runtime.pages import trim_heap
from torch import fx

from memo_compile.analysis.purity import has_token, is_check, is_collective
from memo_compile.analysis.random_states import is_read_on_host
from memo_compile.analysis.regions import LoweredRegion, RegionGraph, layout_elements, storage_bytes
from memo_compile.costs.host import host_memory
from memo_compile.errors import UnsupportedGraph
from memo_compile.planners.placement import Buffer, PlacementProblem, place
from memo_compile.reporting.compiling import say
from memo_compile.step.problem import ALIGNMENT_BYTES, CallKind, RegionProfile, align
from memo_compile.units import format_bytes

INPUT_SCALE = 0.02
"""Standard deviation of made-up inputs, as of freshly initialised weights: nothing overflows."""

ROOM = 0.9
"""A region is timed only if it takes at most this share of the free memory."""

_KERNEL_FAILURES = (RuntimeError, ValueError, IndexError, MemoryError)
"""Errors of a kernel that does not take the made-up numbers, or finds no memory. Any other error is
a fault of memo."""

Average = Callable[[Sequence[float]], float]
"""Makes one number of several timings."""


class TooLarge(UnsupportedGraph):
    """A region that does not fit into the memory that is free now, with all of its inputs."""


def measure_all(
    lowered: Mapping[str, LoweredRegion],
    graphs: Mapping[str, RegionGraph],
    *,
    repeats: int = 3,
    average: Average = statistics.median,
    too_large: Callable[[RegionGraph, str], float] | None = None,
    room_bytes: int | None = None,
) -> dict[str, float]:
    """Returns the seconds of every lowered region by name; frees memory between two regions.

    Collectives and their waits count as 0: they take no time of the computation. ``repeats`` and
    ``average`` as for ``measure``. ``too_large`` returns the seconds of a region that does not fit
    whole; it is given the reason. Raises UnsupportedGraph: a region cannot be run by itself; then
    none is measured, since measured and computed seconds do not compare.
    """
    seconds = {name: 0.0 for name in lowered if graphs[name].kind is not CallKind.RUN}
    computing = {name: region for name, region in lowered.items() if name not in seconds}
    for name in computing:
        _require_runs_alone(graphs[name])
    say(f"measuring {len(computing)} regions")
    for name, lowered_region in computing.items():
        graph, refusal = graphs[name], None
        try:
            seconds[name] = measure(
                lowered_region, graph, repeats=repeats, average=average, room_bytes=room_bytes
            )
        except TooLarge as error:
            if too_large is None:
                raise
            refusal = str(error)  # the error itself holds the tensors of the run that failed
        finally:
            _free(graph.device)
        if refusal is not None and too_large is not None:
            seconds[name] = too_large(graph, refusal)
            _free(graph.device)
    return seconds


def measure(
    lowered: LoweredRegion,
    region: RegionGraph,
    *,
    repeats: int = 3,
    average: Average = statistics.median,
    room_bytes: int | None = None,
) -> float:
    """Returns the average seconds of ``repeats`` runs of one region, after one run to warm up.

    The median ignores a disturbed run; a whole step does not: compare the mean with it. Inputs and
    frame are made for the call, so that writes into inputs are lost. Random number generators are
    as before. At most ``room_bytes`` are allocated.

    Raises:
        TooLarge: the region does not fit into the memory that is left.
        UnsupportedGraph: the region talks to other ranks, or a kernel failed.
    """
    _require_runs_alone(region)
    with _alone(lowered, region, _inputs, room_bytes) as run:
        timed = _cuda_s if region.device.type == "cuda" else _cpu_s
        run()
        return average([timed(run) for _ in range(repeats)])


def run_once(lowered: LoweredRegion, region: RegionGraph) -> None:
    """Runs the region on zeros, which take no memory on a CPU. Raises as ``measure``.

    A custom operator is refused too: where costs are computed, only the step itself calls it. Free
    frames give their pages back first, so that no more is in memory than in a step.
    """
    _require_runs_alone(region)
    custom = next(filter(_is_custom, region.gm.graph.nodes), None)
    if custom is not None:
        raise UnsupportedGraph(
            f"region {region.name} cannot run alone: {custom.target} is no operator of torch"
        )
    arena_of(region.device).release_pages()
    with _alone(lowered, region, _zeros_of) as run:
        run()
    _free(region.device)


@contextlib.contextmanager
def _alone(
    lowered: LoweredRegion,
    region: RegionGraph,
    inputs_of: Callable[[RegionGraph], Sequence[torch.Tensor]],
    room_bytes: int | None = None,
) -> Iterator[Callable[[], object]]:
    """Yields a function that runs the region, with inputs and a frame; raises as ``measure``."""
    _require_fits(lowered, region, room_bytes)
    try:
        with torch_as_before(region.device):
            inputs = inputs_of(region)
            with _frame(lowered, region.device):
                yield lambda: lowered.run(list(inputs))
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("\n")[0]
        raise TooLarge(f"region {region.name} does not fit to run alone: {reason}") from error
    except _KERNEL_FAILURES as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UnsupportedGraph(f"region {region.name} cannot run alone: {reason}") from error


def _require_runs_alone(region: RegionGraph) -> None:
    """Raises UnsupportedGraph for a region that may wait for other ranks, or has an effect.

    Other ranks do not measure at the same time. An effect is a print, or a custom operator that
    counts its calls.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    for node in region.gm.graph.nodes:
        if is_collective(node) or (distributed and _is_custom(node)):
            raise UnsupportedGraph(
                f"region {region.name} cannot run alone: {node.name} ({node.target}) talks to "
                "other ranks, or may"
            )
        if has_token(node) and not is_check(node):
            raise UnsupportedGraph(
                f"region {region.name} cannot run alone: {node.args[1]} has an effect, which only "
                "the step itself may have"
            )


def _is_custom(node: fx.Node) -> bool:
    """True for a custom operator, or one that torch has wrapped since it writes or has effects."""
    called = (node.target, *node.args) if node.op == "call_function" else ()
    operators = (target for target in called if isinstance(target, torch._ops.OpOverload))
    return any(operator.namespace not in ("aten", "prims", "memo") for operator in operators)


def _require_fits(lowered: LoweredRegion, region: RegionGraph, room_bytes: int | None) -> None:
    """Raises TooLarge where the system would kill the process, or a budget would be broken."""
    inputs = (value for value in region.example_inputs() if isinstance(value, torch.Tensor))
    needed = sum(align(storage_bytes(value)) for value in inputs)
    needed += _offsets(lowered.profile)[1]
    needed += sum(buffer.size_bytes for buffer in lowered.profile.outside)
    # Results in ordinary memory: a budget counts them to the byte, free memory has ROOM for them.
    outputs = sum(output.size_bytes for output in lowered.profile.outputs if output.same_as is None)
    if room_bytes is not None and needed + outputs > room_bytes:
        raise TooLarge(
            f"region {region.name} does not fit to run alone: {format_bytes(needed + outputs)} of "
            f"{format_bytes(max(0, room_bytes))} that the budget leaves"
        )
    free = _free_bytes(region.device)
    if free is not None and needed > ROOM * free:
        raise TooLarge(
            f"region {region.name} does not fit to run alone: {format_bytes(needed)} of "
            f"{format_bytes(free)} that are free"
        )


def _free_bytes(device: torch.device) -> int | None:
    """Returns the memory of the device that this process may still take; None: unknown."""
    if device.type != "cuda":
        return host_memory().usable_bytes
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free) + int(unused)


@contextlib.contextmanager
def torch_as_before(device: torch.device) -> Iterator[None]:
    """Inside, nothing is recorded for gradients; afterwards random states are as before."""
    on_cuda = device.type == "cuda"
    guard = torch.cuda.device(device) if on_cuda else contextlib.nullcontext()
    with guard:
        devices = [torch.cuda.current_device()] if on_cuda else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            yield


def _inputs(region: RegionGraph) -> list[torch.Tensor]:
    """Returns random tensors for the placeholders, with the strides that the region expects."""
    generators: dict[torch.device, torch.Generator] = {}
    inputs = []
    for value in _expected(region):
        if value.device not in generators:
            generators[value.device] = torch.Generator(value.device).manual_seed(0)
        inputs.append(_made_up(value, generators[value.device]))
    return inputs


def _zeros_of(region: RegionGraph) -> list[torch.Tensor]:
    """Returns zeros for the placeholders; on a CPU they take memory only where written."""
    return list(map(_zeros, _expected(region)))


def _zeros(value: torch.Tensor) -> torch.Tensor:
    """Returns zeros in the layout of the fake tensor ``value``."""
    num_elements = layout_elements(value)
    if value.device.type != "cpu" or not num_elements:
        flat = torch.zeros(num_elements, dtype=value.dtype, device=value.device)
    else:  # Linux maps one page of zeros for all pages that were never written
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, num_elements * value.dtype.itemsize, flags=flags)
        flat = torch.frombuffer(memory, dtype=value.dtype)
    return flat.as_strided(value.shape, value.stride())


def _expected(region: RegionGraph) -> Iterator[torch.Tensor]:
    """Yields the placeholders' fake tensors. Raises UnsupportedGraph: one is no tensor."""
    for node in region.gm.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            raise UnsupportedGraph(
                f"region {region.name} cannot run alone: its input {node.name} is no tensor but "
                f"{type(value).__name__}"
            )
        yield value.cpu() if is_read_on_host(node) else value


def _made_up(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns numbers in the layout of ``value``; where strides overlap they share elements."""
    num_elements = layout_elements(value)
    flat = torch.zeros(num_elements, dtype=value.dtype, device=value.device)
    if (flat.is_floating_point() or flat.is_complex()) and flat.element_size() > 1:
        flat.normal_(0.0, INPUT_SCALE, generator=generator)
    elif flat.is_floating_point():  # float8 types have no generator of their own
        wide = torch.empty(num_elements, device=value.device)
        flat.copy_(wide.normal_(0.0, INPUT_SCALE, generator=generator))
    return flat.as_strided(value.shape, value.stride())


@contextlib.contextmanager
def _frame(lowered: LoweredRegion, device: torch.device) -> Iterator[None]:
    """Inside, ``lowered.run`` finds its buffers, which lie in memory taken for this run."""
    offsets, size_bytes = _offsets(lowered.profile)
    slab = Slab(device, max(size_bytes, ALIGNMENT_BYTES))
    row = [
        FrameView(offset_bytes=offset, dtype=spec.dtype, size=spec.size, stride=spec.stride)
        for offset, spec in zip(offsets, lowered.views, strict=True)
    ]
    before = current.views, current.inputs
    current.views, current.inputs = slab.tables(0, [row])[0], {}
    try:
        yield
    finally:
        current.views, current.inputs = before


def _offsets(profile: RegionProfile) -> tuple[Sequence[int], int]:
    """Places the buffers; returns their offsets, and the bytes of all."""
    buffers = tuple(
        Buffer(id=str(index), lower=buffer.start, upper=buffer.end, size=buffer.size_bytes)
        for index, buffer in enumerate(profile.buffers)
    )
    placed = place(PlacementProblem(buffers=buffers, alignment=ALIGNMENT_BYTES), solver="greedy")
    return [placed.offsets[buffer.id] for buffer in buffers], placed.height_bytes


def _cpu_s(run: Callable[[], Any]) -> float:
    """Returns the seconds of ``run`` after a trim: as in a step, its results take new pages."""
    trim_heap()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _cuda_s(run: Callable[[], Any]) -> float:
    """Returns the seconds of ``run`` on the current GPU, by its own clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim_heap()
