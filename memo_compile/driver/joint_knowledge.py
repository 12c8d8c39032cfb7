"""What a plan of a joint step is made of: what is known of each graph, under names of their own.

Nothing is lowered or timed anew: regions, layers and recompute regions are those of the graphs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memo_compile.analysis.regions import LoweredRegion
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.driver.knowledge import StepKnowledge, gradients_at_once
from memo_compile.driver.recompute_library import Estimated, Lowered, RecomputeLibrary, RegionMaker
from memo_compile.driver.stages import PlanRequest
from memo_compile.planners.placement import Placement, PlacementProblem
from memo_compile.step.joint_step import (
    JointStep,
    in_graph,
    joint_costs,
    joint_layers,
    joint_problem,
    joint_whole,
    member_name,
    renamed,
)
from memo_compile.step.movable import MovableStep, RecomputeKey, StepCosts
from memo_compile.step.problem import Problem
from memo_compile.step.tilings import WholeStep


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionsOfGraphs:
    """Makes the recompute regions of several graphs; a ``recompute_library.RegionMaker``."""

    makers: Sequence[RegionMaker]
    """Of each graph."""

    def estimated(self, key: RecomputeKey) -> Estimated:
        """The region of ``key`` before it is lowered. Raises UnsupportedGraph: there is none."""
        graph, name = in_graph(key.class_key)
        estimate = self.makers[graph].estimated(replace(key, class_key=name))
        return estimate._replace(profile=replace(estimate.profile, name=key.region))

    def lowered(self, keys: Sequence[RecomputeKey]) -> Mapping[RecomputeKey, Lowered | str]:
        """Returns each of ``keys`` lowered, or why it cannot be used. All were estimated before."""
        results: dict[RecomputeKey, Lowered | str] = {}
        named = {key: in_graph(key.class_key) for key in keys}
        for number, maker in enumerate(self.makers):
            keys_in_graph = {
                key: replace(key, class_key=name)
                for key, (graph, name) in named.items()
                if graph == number
            }
            results_in_graph = maker.lowered(list(keys_in_graph.values()))
            for key, key_in_graph in keys_in_graph.items():
                results[key] = result = results_in_graph[key_in_graph]
                if not isinstance(result, str):
                    profile = replace(result.profile, name=key.region)
                    results[key] = result._replace(profile=profile)
        return results


@dataclass(slots=True, kw_only=True)
class JointKnowledge:
    """A joint step of ``graphs``; a ``step_planner.KnownStep``."""

    graphs: Sequence[StepKnowledge]
    joint: JointStep
    """The members, and what lies between and around them."""
    _library: RecomputeLibrary | None = None

    def _members(self) -> Iterator[StepKnowledge]:
        return (self.graphs[graph] for graph in self.joint.graphs)

    @property
    def name(self) -> str:
        """What reports call the step."""
        return "+".join(graph.name for graph in self.graphs)

    @property
    def whole(self) -> WholeStep:
        """The step before tiles and moves, for the checker."""
        return joint_whole([graph.whole for graph in self.graphs], self.joint)

    @property
    def hardware(self) -> HardwareProfile | None:
        """The device that is planned for; None: the one that the tensors lie on."""
        return self.graphs[0].hardware

    @property
    def device_type(self) -> str:
        """The kind of device that the tensors lie on."""
        return self.graphs[0].device_type

    def requested(self, request: PlanRequest) -> Problem:
        """Returns the step that keeps everything, with the gradients of earlier steps."""
        problem = joint_problem([graph.lowered.problem for graph in self.graphs], self.joint)
        gradients = gradients_at_once(problem, request.existing_gradient_bytes)
        return replace(
            problem,
            fixed=replace(problem.fixed, gradients=gradients),
            releases_pages=self.graphs[0].releases_pages(),
        )

    def movable(self, problem: Problem, host_store: str) -> MovableStep:
        """Returns ``problem`` as layers with slots."""
        steps = [graph.movable(graph.lowered.problem, host_store) for graph in self.graphs]
        return joint_layers(steps, self.joint, problem, joint_costs([step.costs for step in steps]))

    def library(self, host_store: str) -> RecomputeLibrary:
        """Returns the step's recompute regions: of a single graph those of all its plans."""
        libraries = [graph.library(host_store) for graph in self.graphs]
        if len(libraries) == 1:
            return libraries[0]
        if self._library is None:
            maker = RegionsOfGraphs(makers=[library.maker for library in libraries])
            step = self.movable(self.requested(PlanRequest()), host_store)
            self._library = RecomputeLibrary(step=step, maker=maker)
        return self._library

    def searches(self, host_budget_bytes: int | None, *, exact: bool) -> None:
        """Nothing is kept: a step that runs is mostly planned once."""

    def place(self, problem: PlacementProblem, *, solver: str, time_limit_s: float) -> Placement:
        """Offsets for the buffers of ``problem``."""
        return self.graphs[0].place(problem, solver=solver, time_limit_s=time_limit_s)

    def compute_s(self) -> float:
        """Returns the seconds of the step that keeps everything."""
        return math.fsum(graph.compute_s() for graph in self._members())

    def whole_compute_s(self) -> float:
        """Returns the seconds of the step before any region ran in tiles."""
        return math.fsum(graph.whole_compute_s() for graph in self._members())

    def regions(self) -> Mapping[str, LoweredRegion]:
        """Returns the regions of all graphs as code."""
        return renamed(graph.regions() for graph in self.graphs)

    def labels(self) -> Mapping[str, str | None]:
        """Layer class -> the path of its modules, where it has one."""
        return renamed(graph.labels() for graph in self.graphs)

    def leased_bytes(self) -> Mapping[str, int]:
        """Saved activation -> its own bytes."""
        return {
            member_name(name, member): size
            for member, graph in enumerate(self._members())
            for name, size in graph.leased_bytes().items()
        }

    def device_bytes(self) -> int | None:
        """Returns all memory of the device that is planned for; None where it is unknown."""
        return self.graphs[0].device_bytes()

    def bytes_left(self) -> int | None:
        """Memory of the tensors' device that this process may still take; None: unknown."""
        return self.graphs[0].bytes_left()

    def is_shared(self) -> bool:
        """True where a graph waits for other ranks, so that one plan suits all of them."""
        return any(graph.is_shared() for graph in self.graphs)

    def collective_s(self) -> Mapping[str, float]:
        """Region -> seconds of its collective, where they are known."""
        return renamed(graph.collective_s() for graph in self.graphs)

    def known_costs(self, host_store: str) -> StepCosts | None:
        """Returns the seconds of all regions; None where no decision needed them."""
        costs = [graph.known_costs(host_store) for graph in self.graphs]
        known_costs = [of_graph for of_graph in costs if of_graph is not None]
        return joint_costs(known_costs) if len(known_costs) == len(costs) else None

    def take_costs(self, costs: StepCosts, host_store: str) -> None:
        """From now on ``costs`` count, which another rank has measured of an equal step."""
        for number, graph in enumerate(self.graphs):
            named = ((in_graph(name), seconds) for name, seconds in costs.region_s.items())
            region_s = {region.name: s for region, s in named if region.graph == number}
            graph.take_costs(replace(costs, region_s=region_s), host_store)
