"""Finds regions that were lowered before, in this process or in another.

Inductor's own cache of graphs holds a region's code. Memo also needs what it recorded while
Inductor wrote the code: buffers, their lifetimes and layouts. That is a JSON file of memo's, under
the key of the code in Inductor's cache, and used only with exactly that code.

The key has all that the code depends on: Inductor's own key of graph, inputs, settings and torch,
and memo's ``tag_of``. Code for another table of views would compute wrong gradients, so a record
that does not fit is not used: the region is lowered anew.
"""

import functools
import hashlib
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from memo_runtime import ops

from memo_compile.analysis.regions import AttentionLine, LoweredRegion, RegionGraph, ViewSpec
from memo_compile.analysis.views import results_of
from memo_compile.errors import InputError
from memo_compile.file_store import FileStore, code_digest, digest_of, say_unused
from memo_compile.lowering.workspace import Convolution
from memo_compile.passes.cut import content_of
from memo_compile.step.problem import Layout, RegionProfile, Storage, align
from memo_compile.step.serialise import plain, restore
from memo_compile.torch_private import compile_caches, inductor_api

log = logging.getLogger("memo")

_VIEW = re.compile(r"memo_current\.(?:views\[|poison\()(\d+)")
"""An entry of the table of views in generated code."""


@dataclass(slots=True)
class CacheCounts:
    """How many regions of this process were found, and how many Inductor lowered."""

    hits: int = 0
    misses: int = 0
    """Inductor had no code; now it has."""
    refused: int = 0
    """Inductor had code, and memo's record of it was missing or did not fit."""
    uncached: int = 0
    """The cache was off or failed, or holds no such graph."""

    @property
    def lowered(self) -> int:
        """How many regions Inductor lowered."""
        return self.misses + self.uncached


counts = CacheCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRecord:
    """Memo's record of a region's code."""

    code_sha256: str
    profile: RegionProfile
    """Of the first region that was lowered to the code, without its name."""
    views: tuple[Layout, ...]
    attention: tuple[AttentionLine, ...]


def tag_of(region: RegionGraph, convolutions: tuple[Convolution, ...], *, poison: bool) -> str:
    """Returns a digest of what code and profile depend on beside the graph that Inductor sees."""
    external = region.external_outputs
    contents = {
        "memo": code_digest(),
        "poison": poison,
        "external": sorted(external),
        "content": content_of(region.gm, external, region.static_inputs),
        "convolutions": list(map(repr, convolutions)),
        "in_place": [ops.writes_first(node.target) for node in region.gm.graph.nodes].count(True),
        "device": str(region.device),
        "is_backward": region.is_backward,
        "donated": region.donated,
        "rounded": [inductor_api.ROUNDED in node.meta for node in region.gm.graph.nodes],
        "threads": torch.get_num_threads(),
        "vectors": compile_caches.vector_instructions(region.device.type == "cpu"),
    }
    return f"memo-{digest_of(contents)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionCache:
    """Memo's records of the code in Inductor's cache."""

    store: FileStore

    def keep(self, region: RegionGraph, compiled: Any, lowered: LoweredRegion) -> None:
        """Writes the record of ``lowered``, whose code Inductor has just put into its cache."""
        code = compile_caches.generated_code(compiled)
        key = compile_caches.graph_cache_key(compiled)
        if code is None or key is None:
            counts.uncached += 1
            return
        counts.misses += 1
        record = CodeRecord(
            code_sha256=_digest(code),
            profile=replace(lowered.profile, name=""),
            views=tuple(map(_layout, lowered.views)),
            attention=lowered.attention,
        )
        try:
            _require_fits(record, region, code)
        except InputError as error:
            log.warning("memo: region %s is not remembered: %s", region.name, error)
            return
        self.store.write(_key(key), plain(record), variant=record.code_sha256[:16])

    def find(self, region: RegionGraph, compiled: Any) -> LoweredRegion | None:
        """Returns the lowered region of cached code; None: unusable, and dropped from the cache."""
        code = compile_caches.generated_code(compiled)
        key = compile_caches.graph_cache_key(compiled)
        assert code is not None, "what comes from the cache has code"
        assert key is not None, "what comes from the cache has a key"
        damaged = compile_caches.other_code(compiled)
        if damaged is not None:
            say_unused(damaged, "it is damaged")
        for record in self._records(key, region, code) if damaged is None else ():
            counts.hits += 1
            return LoweredRegion(
                profile=replace(record.profile, name=region.name),
                views=tuple(map(_view, record.views)),
                run=compiled,
                attention=record.attention,
            )
        counts.refused += 1
        compile_caches.forget(key, damaged)
        return None

    def _records(self, key: str, region: RegionGraph, code: str) -> Iterator[CodeRecord]:
        """Yields the usable records of exactly this code."""
        for body in self.store.read(_key(key)):
            try:
                record: CodeRecord = restore(body, CodeRecord, "region")
                if record.code_sha256 == _digest(code):
                    _require_fits(record, region, code)
                    yield record
            except InputError as error:
                log.warning("memo: what was remembered of a region is not used: %s", error)


@functools.cache
def say_broken(reason: str) -> None:
    """Says, once for each reason, that a region could not be lowered with the cache."""
    log.warning("memo: a region is lowered without the cache: %s", reason)


def _key(graph_key: str) -> Mapping[str, Any]:
    return {"kind": "region", "graph": graph_key}


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()


def _layout(view: ViewSpec) -> Layout:
    return Layout(
        dtype=str(view.dtype).removeprefix("torch."),
        item_bytes=view.dtype.itemsize,
        size=view.size,
        stride=view.stride,
    )


def _view(layout: Layout) -> ViewSpec:
    return ViewSpec(dtype=_dtype(layout), size=layout.size, stride=layout.stride)


def _dtype(layout: Layout) -> torch.dtype:
    """Returns the dtype of a layout. Raises InputError: there is none, or of another size."""
    dtype = getattr(torch, layout.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != layout.item_bytes:
        raise InputError(f"{layout.dtype} is no type of {layout.item_bytes} bytes")
    return dtype


def _require_fits(record: CodeRecord, region: RegionGraph, code: str) -> None:
    """Raises InputError where a record cannot be of this code, or of this region."""
    profile, views = record.profile, record.views
    used = max((int(number) for number in _VIEW.findall(code)), default=-1)
    if used >= len(views) or len(views) != len(profile.buffers):
        raise InputError(
            f"{len(views)} views and {len(profile.buffers)} buffers, and the code uses {used + 1}"
        )
    for view, buffer in zip(views, profile.buffers, strict=True):
        _dtype(view)
        if align(view.end * view.item_bytes) > buffer.size_bytes or buffer.end > profile.num_lines:
            raise InputError(f"buffer {buffer.name} does not hold {view}")
    inputs, results = len(region.example_inputs()), len(results_of(region.gm.graph))
    if (len(profile.input_ends), len(profile.outputs)) != (inputs, results):
        raise InputError(f"it is not of {inputs} inputs and {results} outputs")
    if any(not 0 <= at < inputs for at in profile.overwrites):
        raise InputError(f"it writes over inputs {profile.overwrites} of {inputs}")
    lengths = {Storage.ARENA: len(views), Storage.INPUT: inputs}
    for output in profile.outputs:
        length = lengths.get(output.storage)
        if length is not None and not (output.index is not None and 0 <= output.index < length):
            raise InputError(f"output {output} is not one of {length}")
