"""Lowers a region by Inductor: each of its allocations becomes a view at a planned offset.

Each region goes through ``compile_fx_inner`` once, with a wrapper class whose one override,
``run_wrapper_ir_passes``, sees the allocation lines after fusion and ordering. It records sizes
and lifetimes and replaces

    buf3 = empty_strided_cpu((64, 32), (32, 1), torch.float32)   ->   buf3 = memo_current.views[2]

so that the same code serves every layer of a class, each call with a table of its own.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from memo_compile.analysis.regions import LoweredRegion, RegionGraph
from memo_compile.analysis.views import is_view, results_of, storage_of
from memo_compile.errors import described
from memo_compile.lowering import aten, region_cache
from memo_compile.lowering.lines import LineScan
from memo_compile.lowering.region_cache import RegionCache, say_broken, tag_of
from memo_compile.lowering.workspace import Convolution, convolution_of
from memo_compile.step.problem import Layouts, Storage
from memo_compile.torch_private import autograd, compile_caches, fx_graphs, inductor_api, kernels


@dataclasses.dataclass
class _Recorder:
    """Carries a region into the wrapper class and its profile out of it."""

    region: RegionGraph
    poison: bool
    convolutions: tuple[Convolution, ...]
    layouts: Layouts = ()
    """The traced layouts of the region's results: Inductor rewrites its graph."""
    evaluate: Callable[[Any], int] | None = None
    """Evaluates symbolic sizes, where the graph's first input is a size."""
    scan: LineScan | None = None


_recorders: list[_Recorder] = []
"""The region being lowered, on top. Inductor builds the wrapper object itself, without arguments;
lowering holds torch's compile lock, so that a plain stack is enough."""


class ArenaWrapper(inductor_api.PythonWrapperCodegen):
    """Inductor's Python wrapper with its buffers taken from the current call's table of views."""

    supports_caching = False

    @staticmethod
    def create(
        is_subgraph: bool,
        subgraph_name: str | None,
        parent_wrapper: Any,
        partition_signatures: Any = None,
    ) -> Any:
        """Returns the wrapper of a graph; subgraphs of higher-order operators stay unplanned."""
        if is_subgraph:
            return inductor_api.SubgraphPythonWrapperCodegen(
                subgraph_name or "", parent_wrapper, partition_signatures
            )
        return ArenaWrapper()

    def run_wrapper_ir_passes(self, is_inference: bool) -> None:
        """Replaces Inductor's own buffer reuse by the plan."""
        recorder = _recorders[-1]
        self.header.writeline("from memo_runtime.current import current as memo_current")
        self.header.writeline("from memo_runtime.pages import own_mapping as memo_own_mapping")
        scan = LineScan(self, recorder.region, recorder.convolutions, recorder.evaluate)
        self.lines = list(scan.rewrite(poison=recorder.poison))
        recorder.scan = scan


class CachedArenaWrapper(ArenaWrapper):
    """The same, with Inductor's cache allowed: where it has the code no wrapper is made."""

    supports_caching = True


@contextlib.contextmanager
def _arena_codegen(recorder: _Recorder, wrapper: type[ArenaWrapper]) -> Iterator[None]:
    """Inductor generates code through ``wrapper`` inside this context."""
    codegens = inductor_api.device_codegens()
    patched = {
        device: dataclasses.replace(codegen, wrapper_codegen=wrapper)
        for device, codegen in codegens.items()
        if device in ("cpu", "cuda")
    }
    before = {device: codegens[device] for device in patched}
    _recorders.append(recorder)
    codegens.update(patched)
    try:
        yield
    finally:
        codegens.update(before)
        _recorders.pop()


INDUCTOR_SETTINGS: dict[str, Any] = {
    "allow_buffer_reuse": False,
    "graph_partition": False,
    **inductor_api.NO_GRAPH_CACHE,
    "cpp_wrapper": False,
    "memory_planning": False,
    "triton.cudagraphs": False,
}
"""The plan decides about reuse. A partitioned graph would bypass the wrapper class. So does a
cached one: it is used only where ``RegionCache`` has the profile that the class recorded."""


@contextlib.contextmanager
def session(settings: Mapping[str, Any]) -> Iterator[None]:
    """Regions are lowered inside; their kernels compile in the background until it ends.

    ``settings`` are the user's for Inductor; memo's own win.
    """
    with (
        inductor_api.inductor_patch({**settings, **INDUCTOR_SETTINGS}),
        autograd.functorch_patch(bundled_autograd_cache=False),  # with it Inductor caches no graph
        kernels.quick_strides(),
        kernels.kernels_in_background(),
    ):
        yield


def lower(
    region: RegionGraph, *, poison: bool = False, cache: RegionCache | None = None
) -> LoweredRegion:
    """Compiles ``region`` by Inductor, its buffers in the arena; or takes it from ``cache``.

    Call it inside a ``session``. Raises UnsupportedGraph: an output does not keep the strides it
    was traced with, for which the next region was made.
    """
    convolutions = tuple(filter(None, map(convolution_of, region.gm.graph.nodes)))
    layouts = region.output_layouts()
    recorder = _Recorder(region=region, poison=poison, convolutions=convolutions, layouts=layouts)
    cache_error = ""
    try:
        cached = None if cache is None else _with_cache(recorder, cache)
    except Exception as error:  # of the cache, or of the region: then it fails below too
        cached, cache_error = None, described(error)
    if cached is not None:
        return cached
    lowered = _lowered(recorder, _compiled(recorder, ArenaWrapper))
    region_cache.counts.uncached += 1
    if cache_error:
        say_broken(cache_error)
    return lowered


def given_away(lowered: LoweredRegion, region: RegionGraph) -> set[int]:
    """Returns the positions of inputs over which the code has written results for the user.

    The user would then hold memory of the arena; such an input must not be donated.
    """
    results = [lowered.profile.outputs[at] for at in region.external_outputs]
    inputs = {result.index for result in results if result.storage is Storage.INPUT}
    return {*lowered.profile.overwrites}.intersection(inputs)


def lower_symbolic(
    region: RegionGraph, evaluate: Callable[[Any], int], *, poison: bool
) -> tuple[LineScan, Callable[[list[Any]], Any]] | None:
    """Compiles a region whose first input is a size; None: it has no kernels.

    ``evaluate`` is for symbolic sizes. To get the profile and views of the code at another size,
    set the scan's ``evaluate`` to another function. Call it inside a ``session``.
    """
    recorder = _Recorder(region=region, poison=poison, convolutions=(), evaluate=evaluate)
    compiled = _compiled(recorder, ArenaWrapper)
    region_cache.counts.uncached += 1
    return None if recorder.scan is None else (recorder.scan, compiled)


CACHED_TRIES = 2
"""``RegionCache.find`` drops unusable code, so that the second try compiles the region anew, unless
another process has put its own there meanwhile."""


def _with_cache(recorder: _Recorder, cache: RegionCache) -> LoweredRegion | None:
    """Returns the region from Inductor's cache, or compiles it into the cache; None: unusable."""
    region = recorder.region
    tag = tag_of(region, recorder.convolutions, poison=recorder.poison)
    for _ in range(CACHED_TRIES):
        copied = replace(region, gm=fx_graphs.copied(region.gm))  # Inductor rewrites the graph
        attempt = replace(recorder, region=copied)
        with compile_caches.graph_cache(tag):
            compiled = _compiled(attempt, CachedArenaWrapper)
        # With a scan Inductor has compiled it just now; a region without kernels has no code, and
        # ``keep`` only counts it.
        if attempt.scan is not None or compile_caches.generated_code(compiled) is None:
            lowered = _lowered(attempt, compiled)
            cache.keep(region, compiled, lowered)
            return lowered
        if (cached := cache.find(region, compiled)) is not None:
            return cached
    return None


def _compiled(recorder: _Recorder, wrapper: type[ArenaWrapper]) -> Any:
    """Compiles the recorder's region, or finds it in the cache; then ``scan`` stays None."""
    region = recorder.region
    examples = region.example_inputs()
    results = results_of(region.gm.graph)
    region.gm.graph.output_node().meta["user_visible_output_idxs"] = [
        index for index, value in enumerate(results) if isinstance(value, torch.fx.Node)
    ]
    for value in results:
        if isinstance(value, torch.fx.Node) and is_view(value):
            # Of a view Inductor keeps the order of strides only.
            inductor_api.keep_strides(storage_of(value))
    rounds = any(inductor_api.ROUNDED in node.meta for node in region.gm.graph.nodes)
    with (
        autograd.own_tracing_context(examples),
        _arena_codegen(recorder, wrapper),
        inductor_api.donating(region.donated),
        kernels.rounded_on_load() if rounds else contextlib.nullcontext(),
    ):
        return inductor_api.compile_fx_inner(
            region.gm,
            examples,
            static_input_idxs=region.static_inputs,
            is_backward=region.is_backward,
        )


def _lowered(recorder: _Recorder, compiled: Any) -> LoweredRegion:
    """Returns what was just compiled, with the profile that the wrapper class has recorded."""
    scan = recorder.scan
    if scan is None:  # a region without kernels: Inductor returns its forward as it is
        return aten.lower(recorder.region)
    scan.require_traced_strides(recorder.layouts)
    views, attention = tuple(scan.views), tuple(scan.attention)
    return LoweredRegion(profile=scan.profile(), views=views, run=compiled, attention=attention)
