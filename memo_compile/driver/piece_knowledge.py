"""What a plan of several graphs' step is made of: what is known of each graph, under joined names.

A ``step_planner.KnownStep``. Nothing is lowered or timed anew: regions, layers and recompute
regions are those of the graphs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from memo_compile.analysis.regions import LoweredRegion
from memo_compile.check.check_moves import Recomputation, recomputations_of
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.driver.knowledge import StepKnowledge, gradients_at_once
from memo_compile.driver.recompute_library import (
    Estimated,
    Lowered,
    RecomputeLibrary,
    RegionMaker,
)
from memo_compile.driver.stages import PlanRequest
from memo_compile.planners.placement import Placement, PlacementProblem
from memo_compile.step.group import Group, own_name
from memo_compile.step.joined import (
    in_graph,
    joined_costs,
    joined_problem,
    joined_step,
    joined_whole,
    renamed,
)
from memo_compile.step.movable import MovableStep, RecomputeKey
from memo_compile.step.problem import Problem
from memo_compile.step.tilings import WholeStep


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRegions:
    """Makes the recompute regions of several graphs; a ``recompute_library.RegionMaker``."""

    graphs: Sequence[StepKnowledge]
    host_store: str

    def estimated(self, key: RecomputeKey) -> Estimated:
        """The region of ``key`` before it is lowered. Raises UnsupportedGraph: there is none."""
        graph, own = self._own(key)
        found = self._maker(graph).estimated(own)
        return found._replace(profile=replace(found.profile, name=key.region))

    def lowered(self, keys: Sequence[RecomputeKey]) -> Mapping[RecomputeKey, Lowered | str]:
        """Each of ``keys`` lowered, or why it cannot be used. All were estimated before."""
        by_graph: dict[int, dict[RecomputeKey, RecomputeKey]] = {}
        for key in keys:
            graph, own = self._own(key)
            by_graph.setdefault(graph, {})[own] = key
        found: dict[RecomputeKey, Lowered | str] = {}
        for graph, joined in by_graph.items():
            for own, made in self._maker(graph).lowered(list(joined)).items():
                key = joined[own]
                if not isinstance(made, str):
                    made = made._replace(profile=replace(made.profile, name=key.region))
                found[key] = made
        return found

    def _maker(self, graph: int) -> RegionMaker:
        return self.graphs[graph].library(self.host_store).maker

    def _own(self, key: RecomputeKey) -> tuple[int, RecomputeKey]:
        graph, name = in_graph(key.class_key)
        return graph, replace(key, class_key=name)


@dataclass(slots=True, kw_only=True)
class PieceKnowledge:
    """The step of ``members``, each a live step of one of ``graphs``."""

    graphs: Sequence[StepKnowledge]
    members: Sequence[int]
    """Per member the index of its graph."""
    group: Group
    """What lies between and around the members."""
    _library: RecomputeLibrary | None = field(default=None)

    @property
    def name(self) -> str:
        """What reports call the step."""
        return "+".join(graph.name for graph in self.graphs)

    @property
    def whole(self) -> WholeStep:
        """The step before tiles and moves, for the checker."""
        wholes = [graph.whole for graph in self.graphs]
        return joined_whole(wholes, self.members, self.group.order)

    @property
    def hardware(self) -> HardwareProfile | None:
        """The device that is planned for; None: the one that the tensors lie on."""
        return self.graphs[0].hardware

    @property
    def device_type(self) -> str:
        """The kind of device that the tensors lie on."""
        return self.graphs[0].device_type

    def requested(self, request: PlanRequest) -> Problem:
        """The step that keeps everything, with the gradients of earlier steps."""
        problem = joined_problem(
            [graph.lowered.problem for graph in self.graphs], self.members, self.group
        )
        gradients = gradients_at_once(problem, request.existing_gradient_bytes)
        releases = self.graphs[0].requested(PlanRequest()).releases_pages
        return replace(
            problem,
            fixed=replace(problem.fixed, gradients=gradients),
            releases_pages=releases,
        )

    def movable(self, problem: Problem, host_store: str, num_members: int = 1) -> MovableStep:
        """``problem`` as layers with slots."""
        own = [graph.movable(graph.lowered.problem, host_store) for graph in self.graphs]
        costs = joined_costs([graph.costs(host_store) for graph in self.graphs])
        return joined_step(own, self.members, problem, costs)

    def library(self, host_store: str) -> RecomputeLibrary:
        """The step's recompute regions."""
        if self._library is None:
            step = self.movable(self.requested(PlanRequest()), host_store)
            maker = JoinedRegions(graphs=self.graphs, host_store=host_store)
            self._library = RecomputeLibrary(step=step, maker=maker)
        return self._library

    def searches(self, host_budget_bytes: int | None, *, exact: bool) -> None:
        """Nothing is kept: a step that runs is mostly planned once."""

    def place(self, problem: PlacementProblem, *, solver: str, time_limit_s: float) -> Placement:
        """Offsets for the buffers of ``problem``."""
        return self.graphs[0].place(problem, solver=solver, time_limit_s=time_limit_s)

    def compute_s(self) -> float:
        """Seconds of the step that keeps everything."""
        return math.fsum(self.graphs[graph].compute_s() for graph in self.members)

    def whole_compute_s(self) -> float:
        """The same before any region ran in tiles, where that is known."""
        return math.fsum(self.graphs[graph].whole_compute_s() for graph in self.members)

    def recomputations(
        self, moved: Problem, unmoved: Problem | None = None, num_members: int = 1
    ) -> Mapping[str, Recomputation]:
        """What each RECOMPUTE call of ``moved`` makes, and from what."""
        if self._library is None or unmoved is None:
            return {}
        step = replace(self._library.step, problem=unmoved)
        return recomputations_of(step, moved, self._library.regions.values())

    def regions(self) -> Mapping[str, LoweredRegion]:
        """The regions of all graphs as code."""
        return renamed(graph.regions() for graph in self.graphs)

    def labels(self) -> Mapping[str, str | None]:
        """Layer class -> the path of its modules, where it has one."""
        return renamed(graph.labels() for graph in self.graphs)

    def leased_bytes(self) -> Mapping[str, int]:
        """Saved activation -> its own bytes."""
        return {
            own_name(name, member): size
            for member, graph in enumerate(self.members)
            for name, size in self.graphs[graph].leased_bytes().items()
        }

    def device_bytes(self) -> int | None:
        """All memory of the device that is planned for; None where it is unknown."""
        return self.graphs[0].device_bytes()

    def bytes_left(self) -> int | None:
        """Memory of the tensors' device that this process may still take; None: unknown."""
        return self.graphs[0].bytes_left()
