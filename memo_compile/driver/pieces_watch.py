"""What is seen of a step of several graphs, and whether their own plans fit beside each other."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from memo_compile.config import MemoConfig
from memo_compile.driver.step_watch import SeenGraph, StepWatch
from memo_compile.step.group import nested_order, num_user_results
from memo_compile.step.residency import waiting_step_bytes

if TYPE_CHECKING:
    from memo_compile.driver.assemble import Assembly
    from memo_compile.driver.pieces import Piece


@dataclass(slots=True, eq=False)
class PiecesWatch(StepWatch):
    """What was seen of all graphs since no step of any was live."""

    pieces: list["Piece"] = field(default_factory=list)
    """Per forward its graph."""

    def graph_of(self, number: int) -> SeenGraph:
        """The graph of forward ``number``."""
        problem = self.pieces[number].assembly.lowered.problem
        forward, backward = problem.halves
        return SeenGraph(backward, num_user_results(forward, backward), problem.tangents)

    def is_step(self) -> bool:
        """True for several graphs, and their backwards in the opposite order.

        In a pipeline in any order.
        """
        count = self.num_members
        is_whole = self.has_run() and count >= self.num_forwards
        if not self.is_pipeline:
            is_whole = self.order == nested_order(count)
        configs = [piece.assembly.config for piece in self.pieces]
        devices = {piece.assembly.step.device for piece in self.pieces}
        alike = all(_alike(config, configs[0]) for config in configs) and len(devices) == 1
        return count > 1 and is_whole and alike and not self.is_mixed

    def fits_apart(self) -> bool:
        """True where the graphs' own plans have room for each other, in any order.

        They are one model at several lengths, of which max_inflight may be live together.
        """
        assemblies = [piece.assembly for piece in self.pieces]
        fixed = {(own.plan.fixed.parameters, own.plan.fixed.new_gradients) for own in assemblies}
        is_one_model = len({*self.keys}) == len(fixed) == 1 and None not in self.keys
        return is_one_model and not self.is_pipeline and fit_together(assemblies)


def _alike(first: MemoConfig, second: MemoConfig) -> bool:
    """True for options that ask for the same; which tiles a graph runs in is its own affair."""
    first, second = (
        replace(config.at_any_speed(), token_tiles=None, tile_above_bytes=0, drop_above_bytes=0)
        for config in (first, second)
    )
    return first == second


def fit_together(assemblies: Sequence["Assembly"]) -> bool:
    """True where each may run beside all others, by plans of their own, within the budget.

    Of each ``max_inflight`` may be live: with more of them together, no plan has room.
    """
    budget = assemblies[0].plan.budget_bytes
    if budget is None or any(own.step.max_inflight < len(assemblies) for own in assemblies):
        return False
    waiting = [waiting_step_bytes(own.problem, own.plan.arena_bytes) for own in assemblies]
    return all(
        own.plan.peak_bytes - own.step.max_inflight * its_frame + sum(waiting) <= budget
        for own, its_frame in zip(assemblies, waiting, strict=True)
    )
