"""Estimates the seconds of a region too large to run by itself, from runs on fewer tokens.

    t = a L + b Q

L, Q: roofline seconds of the operators whose work grows in proportion to the tokens, and of those
whose work grows faster (attention). Runs on an eighth and on a quarter of the tokens give a and b:
how far from the roofline either kind is on this device. (MEMO, arXiv 2407.12117, section 4.1,
profiles such layers in unified memory instead.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from memo_compile.analysis.regions import RegionGraph
from memo_compile.config import MemoConfig
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.measure_regions import measure
from memo_compile.costs.roofline import node_seconds
from memo_compile.lowering.lower import lower_regions
from memo_compile.passes.runner import PassRunner
from memo_compile.passes.shorten import shorten
from memo_compile.torch_private import fx_graphs

PARTS = (8, 4)
"""A region is run with one eighth and with one quarter of its tokens."""

_IN_PROPORTION = 1.2
"""An operator grows faster than the tokens if its roofline seconds per token grow by more than this
factor from a quarter of the tokens to all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionWork:
    """Roofline seconds of a region, by how they grow with the tokens."""

    in_proportion_s: float
    faster_s: float


def extrapolated_seconds(
    region: RegionGraph,
    config: MemoConfig,
    profile: HardwareProfile,
    runner: PassRunner,
    room_bytes: int | None = None,
) -> float:
    """Returns the seconds of ``region`` at its full length, allocating ``room_bytes`` at most.

    Raises UnsupportedGraph: it cannot be cut to fewer tokens, or these do not fit either.
    """
    with fx_graphs.failing_fakes_unlogged():
        shorter = [shorten(region, part, runner) for part in PARTS]
    lowered = lower_regions(shorter, config, runner)
    seconds = [measure(lowered[graph.name], graph, room_bytes=room_bytes) for graph in shorter]
    faster = _which_grow_faster(region.gm, shorter[-1].gm, profile)
    works = [_work(graph.gm, faster, profile) for graph in (*shorter, region)]
    return extrapolate(works[:-1], seconds, works[-1])


def extrapolate(works: Sequence[RegionWork], seconds: Sequence[float], whole: RegionWork) -> float:
    """Returns ``a L + b Q`` of the whole region, with ``a`` and ``b`` from two shorter lengths.

    ``works`` and measured ``seconds`` are those of the two lengths. Where a factor would be
    negative, or nothing grows faster than the tokens, ``a = b``: that of the longer one.
    """
    (first, second), (first_s, second_s) = works, seconds
    determinant = first.in_proportion_s * second.faster_s - second.in_proportion_s * first.faster_s
    if determinant > 0:
        a = (first_s * second.faster_s - second_s * first.faster_s) / determinant
        b = (first.in_proportion_s * second_s - second.in_proportion_s * first_s) / determinant
        if a >= 0 and b >= 0:
            return a * whole.in_proportion_s + b * whole.faster_s
    return second_s * _total(whole) / _total(second) if _total(second) else second_s


def _total(work: RegionWork) -> float:
    return work.in_proportion_s + work.faster_s


def _which_grow_faster(
    whole: fx.GraphModule, part: fx.GraphModule, profile: HardwareProfile
) -> tuple[bool, ...]:
    """Says of each node whether its work grows faster than tokens; ``part`` has fewer of them."""
    return tuple(
        node_seconds(large, profile) > _IN_PROPORTION * PARTS[-1] * node_seconds(small, profile)
        for large, small in zip(whole.graph.nodes, part.graph.nodes, strict=True)
    )


def _work(gm: fx.GraphModule, faster: Sequence[bool], profile: HardwareProfile) -> RegionWork:
    """Returns the roofline seconds of ``gm``; ``faster`` says of each node whether it is of Q."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for node, is_faster in zip(gm.graph.nodes, faster, strict=True):
        seconds[is_faster].append(node_seconds(node, profile))
    return RegionWork(in_proportion_s=math.fsum(seconds[False]), faster_s=math.fsum(seconds[True]))
