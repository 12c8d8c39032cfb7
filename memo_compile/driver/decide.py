"""Decides what is kept, offloaded and recomputed, and lowers the regions that recompute.

The policies choose with estimates of recompute regions; what they choose is lowered. The choice
stands if it still fits with the lowered regions and is no slower (``frontier.confirmed``). Else the
policies choose again, with what is known by then, until they choose nothing but lowered regions.
"""

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from memo_compile.analysis.regions import LoweredRegion, RegionGraph
from memo_compile.config import MemoConfig
from memo_compile.costs.roofline import is_in_memory
from memo_compile.driver.left_whole import UNEXPECTED, say_dropped
from memo_compile.driver.movable_step import Movable
from memo_compile.driver.probe import believed, probe_rows
from memo_compile.errors import MemoError, UnsupportedGraph, described
from memo_compile.lowering.aten import estimate
from memo_compile.lowering.lower import lower_regions
from memo_compile.passes.recompute import recompute_graph
from memo_compile.passes.runner import PassRunner
from memo_compile.planners.move_rules import recompute_seconds
from memo_compile.planners.policy import Choice, choose
from memo_compile.planners.policy.candidates import SearchedMoves
from memo_compile.planners.policy.frontier import NothingFits, confirmed
from memo_compile.step.movable import RecomputeKey, RecomputeRegion, RegionInput
from memo_compile.step.plans import Plan
from memo_compile.step.problem import CallKind, Problem

log = logging.getLogger("memo")

LOWERED_ROUND = 5
"""In this round only lowered regions may be chosen. The others also use estimates, which are so
close that the first choice is nearly always confirmed. Where it is not, this round ends the search
with the best lowered step; if none fits, rounds with estimates follow."""


@dataclass(slots=True, kw_only=True)
class RecomputeLibrary:
    """The recompute regions of a step: estimated when first asked for, known once lowered."""

    movable: Movable
    config: MemoConfig
    measure: Callable[[Mapping[str, LoweredRegion], Mapping[str, RegionGraph]], Mapping[str, float]]
    """Seconds of every region by name."""
    runner: PassRunner
    may_run: bool = True
    """False where nothing may be computed while planning: slices of rows are believed then."""
    refused: dict[RecomputeKey, str] = field(default_factory=dict)
    """Regions that cannot be used, and why."""
    regions: dict[RecomputeKey, RecomputeRegion] = field(default_factory=dict)
    region_graphs: dict[RecomputeKey, RegionGraph] = field(default_factory=dict)
    lowered: dict[str, LoweredRegion] = field(default_factory=dict)

    def __call__(self, key: RecomputeKey) -> RecomputeRegion:
        """The region of ``key``. Raises UnsupportedGraph: there is none."""
        if key in self.refused:
            raise UnsupportedGraph(self.refused[key])
        if key not in self.regions:
            try:
                self.regions[key] = self._estimated(key)
            except UnsupportedGraph as error:
                self.refused[key] = str(error)
                raise
            except UNEXPECTED as error:  # other ways to save memory remain
                self._refuse(key, described(error))
                say_dropped(f"{key.region} is not made", error)
                raise UnsupportedGraph(self.refused[key]) from error
        return self.regions[key]

    def _refuse(self, key: RecomputeKey, reason: str) -> None:
        self.refused[key] = f"{key.region}: {reason}"
        self.regions.pop(key, None)

    def known(self, key: RecomputeKey) -> RecomputeRegion:
        """The region of ``key``. Raises UnsupportedGraph: it is not lowered."""
        if key in self.refused or key.region not in self.lowered:
            raise UnsupportedGraph(f"{key.region} is not lowered yet")
        return self.regions[key]

    def _graph(self, key: RecomputeKey) -> tuple[RegionGraph, tuple[RegionInput, ...]]:
        graph = self.movable.graphs[key.class_key]
        return self.runner.derive(
            "recompute",
            graph.region.gm,
            lambda: recompute_graph(graph, key),
            stage=key.region,
            graphs=lambda made: {made[0].name: made[0].gm},
        )

    def _estimated(self, key: RecomputeKey) -> RecomputeRegion:
        region, inputs = self._graph(key)
        self.region_graphs[key] = region
        fuses = self.config.lowering != "aten"
        return RecomputeRegion(
            key=key,
            profile=replace(
                estimate(region, in_registers) if fuses else estimate(region),
                name=key.region,
                input_layouts=region.input_layouts(),
                output_layouts=region.output_layouts(),
            ),
            inputs=inputs,
            seconds=recompute_seconds(self.movable.step, key),
            is_lowered=False,
        )

    def lower(self, problem: Problem) -> bool:
        """Lower what ``problem`` recomputes with; False when all of it was known already.

        What computes other rows than the whole, or cannot be lowered, is refused instead.
        """
        called = {call.region for call in problem.calls if call.kind is CallKind.RECOMPUTE}
        missing = [
            key for key in self.regions if key.region in called and key.region not in self.lowered
        ]
        if not missing:
            return False
        log.info("memo: lowering %d recompute regions", len(missing))
        kept = [key for key in missing if self._agrees(key)]
        graphs = {key.region: self.region_graphs[key] for key in kept}
        found = self._lowered(kept)
        seconds = self.measure(found, {name: graphs[name] for name in found})
        for key in kept:
            if key.region not in found:
                continue
            lowered = found[key.region]
            self.lowered[key.region] = lowered
            self.regions[key] = replace(
                self.regions[key],
                profile=replace(lowered.profile, name=key.region),
                seconds=seconds[key.region],
                is_lowered=True,
            )
        return True

    def _lowered(self, keys: Sequence[RecomputeKey]) -> dict[str, LoweredRegion]:
        """The regions of ``keys``; without those whose lowering fails."""
        graphs = [replace(self.region_graphs[key], name=key.region) for key in keys]
        try:
            return lower_regions(graphs, self.config, self.runner)
        except (MemoError, *UNEXPECTED) as together:
            found: dict[str, LoweredRegion] = {}
            for key, graph in zip(keys, graphs, strict=True):
                try:
                    found.update(lower_regions([graph], self.config, self.runner))
                except (MemoError, *UNEXPECTED) as error:
                    self._refuse(key, described(error))
                    say_dropped(f"{key.region} is not lowered", error)
            if len(found) == len(keys):
                say_dropped("recompute regions are lowered one by one", together)
            return found

    def _agrees(self, key: RecomputeKey) -> bool:
        """False for a slice of rows that computes something else than the whole's first rows."""
        if key.rows is None or not self.may_run:
            return True
        whole, _ = self._graph(replace(key, rows=None))
        probe = probe_rows(whole, self.region_graphs[key])
        agrees = believed(
            probe,
            differs=f"{key.region} is not used: its rows differ from the whole's",
            not_run=f"{key.region}: was not compared with the whole",
        )
        if not agrees:
            self._refuse(key, f"its rows differ from the whole's: {probe.reason}")
        return agrees

    def lowered_graphs(self) -> dict[str, RegionGraph]:
        """The graphs of the regions that were lowered."""
        graphs = self.region_graphs.items()
        return {key.region: graph for key, graph in graphs if key.region in self.lowered}


def in_registers(node: fx.Node) -> bool:
    """True for a value that Inductor makes in the kernel that reads it."""
    return node.op == "call_function" and not is_in_memory(node)


def decide(
    movable: Movable,
    library: RecomputeLibrary,
    config: MemoConfig,
    *,
    budget_bytes: int | None,
    host_budget_bytes: int | None,
    place: Callable[[Problem], Plan],
    wanted_s: float = math.inf,
) -> Choice:
    """The fastest step that fits, every region that it calls lowered.

    Raises:
        TooSlow: all plans are slower than ``config`` wants, or than ``wanted_s``.
        Infeasible: nothing fits; the message names the floor (of lowered regions) and its parts.
            All candidates near the budget were lowered by then, so that the named floor will fit.
    """
    searched, num_refused = SearchedMoves(), len(library.refused)
    for number in itertools.count(1):
        if len(library.refused) != num_refused:  # a plan found before may call what is refused now
            searched, num_refused = SearchedMoves(), len(library.refused)
        only_lowered = number == LOWERED_ROUND
        try:
            choice = choose(
                movable.step,
                budget_bytes=budget_bytes,
                host_budget_bytes=host_budget_bytes,
                policy=config.policy,
                alpha=config.alpha,
                exact=config.exact,
                recompute=library.known if only_lowered else library,
                place=place,
                searched=None if only_lowered else searched,
                max_step_s=config.max_step_s,
                wanted_s=wanted_s,
            )
        except NothingFits as error:
            if library.lower(error.problem) or only_lowered:
                continue
            if any([library.lower(problem) for problem in error.candidates_within_budget]):
                continue
            raise
        before = len(library.refused)
        if not library.lower(choice.problem):
            return choice
        if len(library.refused) != before:
            continue
        known = confirmed(
            choice, movable.step, budget_bytes=budget_bytes, recompute=library, place=place
        )
        if known is not None:
            return known
    raise AssertionError("every round lowers a region, and there are not so many")
