"""Whether graphs that are live together may be planned as one step, or need not be."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memo_compile.config import MemoConfig
from memo_compile.step.residency import waiting_step_bytes

if TYPE_CHECKING:
    from memo_compile.driver.part import StepPart


def are_alike(parts: Sequence["StepPart"]) -> bool:
    """True for graphs on one device whose options ask for the same."""
    assemblies = [part.assembly for part in {*parts}]
    first = _without_tiles(assemblies[0].config)
    devices = {assembly.step.device for assembly in assemblies}
    return len(devices) == 1 and all(_without_tiles(each.config) == first for each in assemblies)


def _without_tiles(config: MemoConfig) -> MemoConfig:
    """Returns ``config`` without options that graphs of one step need not share."""
    config = config.at_any_speed()
    return replace(config, token_tiles=None).trying(tile_above_bytes=0, drop_above_bytes=0)


def fit_separately(parts: Sequence["StepPart"], keys: Sequence[int | None]) -> bool:
    """True where the graphs' own plans have room for each other, in any order.

    They are one model at several lengths, of which max_inflight may be live together: with more of
    them, no plan has room. ``keys`` tell the modules apart.
    """
    assemblies = [part.assembly for part in parts]
    constants = {(each.plan.fixed.parameters, each.plan.fixed.new_gradients) for each in assemblies}
    if len({*keys}) != 1 or None in keys or len(constants) != 1:
        return False
    budget = assemblies[0].plan.budget_bytes
    if budget is None or any(each.step.max_inflight < len(assemblies) for each in assemblies):
        return False
    frames = [waiting_step_bytes(each.problem, each.plan.arena_bytes) for each in assemblies]
    return all(
        each.plan.peak_bytes - each.step.max_inflight * frame_bytes + sum(frames) <= budget
        for each, frame_bytes in zip(assemblies, frames, strict=True)
    )
