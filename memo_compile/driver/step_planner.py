"""Plans one captured step: lowers its regions, decides what moves under the budget, places it."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memo_runtime.pages import gives_pages_back

from memo_compile import shim
from memo_compile.analysis.regions import LoweredRegion, RegionGraph
from memo_compile.check.check_moves import Recomputation, recomputations_of
from memo_compile.check.prove import require_proved
from memo_compile.config import MemoConfig, local_world_size
from memo_compile.costs.bandwidth import copy_bandwidth
from memo_compile.costs.extrapolate import extrapolated_seconds
from memo_compile.costs.hardware import HardwareProfile, hardware_of
from memo_compile.costs.host import (
    HostMemory,
    default_file_budget_bytes,
    default_host_budget_bytes,
    host_memory,
)
from memo_compile.costs.measure_regions import measure_all
from memo_compile.costs.roofline import graph_seconds
from memo_compile.driver.decide import RecomputeLibrary, decide
from memo_compile.driver.decisions import moved_rows, saved_rows, step_notes
from memo_compile.driver.facts import profile_name
from memo_compile.driver.left_whole import UNEXPECTED, is_bug, say_dropped
from memo_compile.driver.movable_step import Movable, movable_step
from memo_compile.driver.stages import LoweredStep
from memo_compile.driver.user_outputs import held_bytes
from memo_compile.errors import (
    ConfigError,
    Infeasible,
    InvalidPlan,
    MemoError,
    UnsupportedGraph,
)
from memo_compile.planners.place_step import place_step, require_budget
from memo_compile.planners.policy import Choice
from memo_compile.reporting import state
from memo_compile.step.movable import MEASURED, MovableStep, StepCosts
from memo_compile.step.plans import Plan
from memo_compile.step.problem import FixedBytes, Problem
from memo_compile.step.residency import residency, step_constant_bytes
from memo_compile.units import format_bytes

log = logging.getLogger("memo")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A checked plan, the step program that it places, and the regions that it calls."""

    problem: Problem
    plan: Plan
    lowered: Mapping[str, LoweredRegion]
    graphs: Mapping[str, RegionGraph]


class StepPlanner:
    """Plans a step, and plans it again when gradients turn out to be kept between steps.

    With ``hardware`` nothing is measured: that device's declared figures count. Unless it
    ``may_run`` nothing is computed either, so that slices of rows are believed.
    """

    def __init__(
        self,
        step: LoweredStep,
        config: MemoConfig,
        hardware: HardwareProfile | None = None,
        *,
        may_run: bool = True,
    ) -> None:
        self.cut = step.cut
        self.forward, self.backward = step.cut.forward, step.cut.backward
        self.units, self.facts, self.name = step.cut.units, step.cut.facts, step.cut.name
        self.config, self.hardware, self.may_run = config, hardware, may_run
        self.graphs, self.lowered = step.cut.regions, step.regions
        self.problem, self.lowering_s = step.problem, step.lowering_s
        self.whole = step.whole
        self._movable: Movable | None = None
        self._library: RecomputeLibrary | None = None
        self.granted_step_bytes: int | None = None
        """What the device grants a step beside its parameters and other constants; None: unknown.
        Set where it refused more than that, which the user's budget does not know of."""
        self.granted_host_bytes: int | None = None
        """The same for host memory."""

    def plan(self, existing_gradient_bytes: int = 0, earlier_output_bytes: int = 0) -> PlannedStep:
        """The plan, with what exists before the step counted: gradients, results of earlier steps.

        Raises:
            Infeasible: the budget is below what any plan needs.
        """
        start = time.perf_counter()
        known = self.problem
        fixed = known.fixed
        gradients = max(fixed.gradients, existing_gradient_bytes + fixed.new_gradients)
        fixed = replace(fixed, gradients=gradients, earlier_outputs=earlier_output_bytes)
        self._set_problem(replace(known, fixed=fixed))
        try:
            planned = self._decide(self._budget_bytes())
        except Infeasible as error:
            self._set_problem(known)
            raise with_both_floors(error, fixed) from None
        plan = replace(
            planned.plan,
            planning_s=time.perf_counter() - start,
            dropping_saves_bytes=self._saved_by_dropping(planned),
        )
        return replace(planned, plan=plan)

    def _saved_by_dropping(self, planned: PlannedStep) -> int:
        problem, plan = planned.problem, planned.plan
        if not problem.keeps_outputs:
            return 0
        dropped = replace(problem, keeps_outputs=False, rebound_bytes=0, loss_bytes=0)
        needs = residency(
            dropped, plan.offsets, plan.arena_bytes, releases_pages=self._releases_pages()
        )
        return max(0, plan.peak_bytes - needs.peak_bytes)

    def _set_problem(self, problem: Problem) -> None:
        """Plan with other ordinary memory from now on; what moves and how stays known."""
        self.problem = problem
        if self._movable is not None:
            self._set_step(replace(self._movable.step, problem=problem))

    def _set_step(self, step: MovableStep) -> None:
        assert self._movable is not None, "a step is changed once it is known"
        self._movable = replace(self._movable, step=step)
        if self._library is not None:
            self._library.step = step

    def keep_outputs(self) -> None:
        """Count the forward's results to the end of the step from now on: the user holds them."""
        held = held_bytes(self.problem, self.forward.results)
        self._set_problem(replace(self.problem, keeps_outputs=True, rebound_bytes=held))

    def offload_to(self, host_store: str) -> None:
        """Plan with the copy speeds of another kind of host memory from now on."""
        self.config = replace(self.config, host_store=host_store)
        if self._movable is None:
            return
        step = self._movable.step
        self._set_step(replace(step, costs=replace(step.costs, **self._copy_speeds())))

    def _decide(self, budget_bytes: int | None) -> PlannedStep:
        if self.config.policy in ("auto", "save"):
            saved = self._place(self.problem)
            fits = budget_bytes is None or saved.peak_bytes <= budget_bytes
            if fits or self.config.policy == "save" or not self.movable().step.layers:
                require_budget(replace(saved, budget_bytes=self._declared_budget_bytes()))
                rows = saved_rows(self.problem, self.forward, self.units)
                return self._planned(self.problem, replace(saved, decisions=rows))
        try:
            choice = self._choose(budget_bytes)
        except (MemoError, *UNEXPECTED) as error:
            if not is_bug(error):
                raise
            # What is to move is a possibility: the step can keep everything.
            say_dropped(f"{self.name}: everything is kept, nothing is moved", error)
            return self._all_saved(budget_bytes)
        rows = moved_rows(self.movable().step, choice, self.units)
        for note in (*choice.notes, *step_notes(self.problem, rows, self.config)):
            state.add_note(note)
        placed = self._placed(choice)
        plan = replace(
            placed,
            decisions=rows,
            policy=choice.moves.policy,
            timeline=choice.timeline,
            frontier=tuple(
                replace(point, peak_bytes=placed.peak_bytes) if point.chosen else point
                for point in choice.frontier
            ),
            host_bytes=choice.problem.host_bytes,
        )
        return self._planned(choice.problem, plan)

    def _all_saved(self, budget_bytes: int | None) -> PlannedStep:
        """The step that keeps everything.

        Raises:
            Infeasible: it does not fit.
        """
        saved = replace(self._place(self.problem), budget_bytes=budget_bytes)
        require_budget(saved)
        rows = saved_rows(self.problem, self.forward, self.units)
        return self._planned(self.problem, replace(saved, decisions=rows))

    def _choose(self, budget_bytes: int | None) -> Choice[Plan]:
        try:
            return self._choose_within(budget_bytes)
        except Infeasible as error:
            declared = self._declared_budget_bytes()
            if error.floor_bytes is None or (declared is not None and error.floor_bytes > declared):
                raise
            note = f"the device may have too little memory left for a step: {error}"
            if state.add_note(note):
                log.warning("memo: %s", note)
            return self._choose_within(error.floor_bytes)

    def _choose_within(self, budget_bytes: int | None) -> Choice[Plan]:
        return decide(
            self.movable(),
            self.library(),
            self.config,
            budget_bytes=budget_bytes,
            host_budget_bytes=self._host_budget_bytes(),
            place=lambda problem: self._place(problem, solver="greedy"),
        )

    def _placed(self, choice: Choice[Plan]) -> Plan:
        """The chosen step placed with all effort; candidates were placed quickly."""
        best = self._place(choice.problem)
        return best if best.peak_bytes <= choice.plan.peak_bytes else choice.plan

    def _place(self, problem: Problem, solver: str | None = None) -> Plan:
        return place_step(
            problem,
            name=self.name,
            solver=solver or self.config.placement_solver,
            time_limit_s=self.config.placement_time_limit_s,
            lowering_s=self.lowering_s,
            releases_pages=self._releases_pages(),
        )

    def _releases_pages(self) -> bool:
        return self.runs_here() and gives_pages_back(self.facts.device)

    def _planned(self, problem: Problem, plan: Plan) -> PlannedStep:
        """``problem`` as planned, proved to be the original step plus moves."""
        library = self._library
        budget = self._declared_budget_bytes()
        if budget is not None and plan.peak_bytes > budget:
            raise InvalidPlan(f"plan {plan.name}: peak {plan.peak_bytes} > budget {budget}")
        require_proved(self.whole, self.problem, problem, self.recomputations(problem))
        return PlannedStep(
            problem=problem,
            plan=replace(plan, budget_bytes=budget),
            lowered={**self.lowered, **(library.lowered if library else {})},
            graphs={**self.graphs, **(library.lowered_graphs() if library else {})},
        )

    def recomputations(self, problem: Problem) -> Mapping[str, Recomputation]:
        """What the RECOMPUTE calls of ``problem`` make of what."""
        if problem is self.problem or self._library is None:
            return {}
        return recomputations_of(self.movable().step, problem, self._library.regions.values())

    def movable(self) -> Movable:
        """The step as layers with slots."""
        if self._movable is None:
            costs = self.costs()
            try:
                self._movable = self._layers(costs, slices_rows=True)
            except MemoError:
                raise
            except UNEXPECTED as error:
                say_dropped(f"{self.name}: layers are moved whole, not by rows", error)
                self._movable = self._layers(costs, slices_rows=False)
        return self._movable

    def _layers(self, costs: StepCosts, *, slices_rows: bool) -> Movable:
        return movable_step(
            self.forward,
            self.backward,
            self.problem,
            costs,
            num_units=self.units.num_units,
            profile=self._profile(),
            token_granule=self.config.token_granule,
            slices_rows=slices_rows,
        )

    def known_costs(self) -> StepCosts | None:
        """The seconds of regions and copies, where a decision needed them."""
        if self._movable is None:
            return None
        lowered = self._library.regions.values() if self._library else ()
        more = {one.key.region: one.seconds for one in lowered if one.exact}
        costs = self._movable.step.costs
        return replace(costs, region_s={**costs.region_s, **more})

    def library(self) -> RecomputeLibrary:
        """The step's recompute regions."""
        if self._library is None:
            movable = self.movable()
            self._library = RecomputeLibrary(
                step=movable.step,
                graphs=movable.graphs,
                config=self.config,
                measure=self._seconds,
                runner=self.cut.runner,
                may_run=self.may_run,
            )
        return self._library

    def costs(self) -> StepCosts:
        """Seconds of the regions and speed of the copies, measured or by roofline."""
        return StepCosts(
            region_s=dict(self._seconds(self.lowered, self.graphs)),
            **self._copy_speeds(),
            source=MEASURED if self._measures() else f"roofline: {self._profile().name}",
        )

    def _copy_speeds(self) -> dict[str, Any]:
        """The fields of ``StepCosts`` that tell how fast copies are."""
        slowest = self.config.copy_speeds()
        if not self._measures():
            link = self._profile()
            d2h, h2d, latency = link.d2h_bytes_per_s, link.h2d_bytes_per_s, 0.0
        else:
            with shim.real_tensors():
                device = self.facts.device
                measured = copy_bandwidth(device, self.config.host_kind(device.type))
            d2h, h2d = measured.d2h_bytes_per_s, measured.h2d_bytes_per_s
            latency = measured.latency_s
        return {
            "d2h_bytes_per_s": min(d2h, slowest[0] or d2h),
            "h2d_bytes_per_s": min(h2d, slowest[1] or h2d),
            "copy_latency_s": latency,
        }

    def runs_here(self) -> bool:
        """False for a step that is planned for another kind of device than its tensors lie on."""
        return self.hardware is None or self.hardware.name == self.facts.device.type

    def _measures(self) -> bool:
        return self.hardware is None and self.config.costs != "roofline"

    def _seconds(
        self, lowered: Mapping[str, LoweredRegion], graphs: Mapping[str, RegionGraph]
    ) -> Mapping[str, float]:
        if self._measures():
            try:
                with shim.real_tensors():
                    return measure_all(lowered, graphs, too_large=self._extrapolated)
            except UnsupportedGraph as error:
                if state.add_note(f"costs are computed, not measured: {error}"):
                    log.warning("memo: costs are computed, not measured: %s", error)
        return {key: graph_seconds(graphs[key].gm, self._profile()) for key in lowered}

    def _extrapolated(self, region: RegionGraph, reason: str) -> float:
        """Seconds of a region that does not fit whole."""
        seconds = extrapolated_seconds(region, self.config, self._profile())
        if state.add_note(f"{reason}: timed on an eighth and a quarter of its tokens"):
            log.info("memo: %s: timed on an eighth and a quarter of its tokens", reason)
        return seconds

    def _profile(self) -> HardwareProfile:
        return self.hardware or hardware_of(profile_name(self.facts.device))

    def _declared_budget_bytes(self) -> int | None:
        return self.config.budget_bytes(self._device_bytes())

    def _device_bytes(self) -> int | None:
        return self.hardware.memory_bytes if self.hardware else self.facts.device_bytes()

    def _budget_bytes(self) -> int | None:
        """The declared budget; without one, what the device has left. Not more than it grants."""
        bounds = [self._declared_budget_bytes()]
        if bounds[0] is None and self.hardware is None:
            bounds.append(self.facts.bytes_left())
        if self.granted_step_bytes is not None:
            bounds.append(step_constant_bytes(self.problem) + self.granted_step_bytes)
        return min((one for one in bounds if one is not None), default=None)

    def _host_budget_bytes(self) -> int | None:
        """What the host gives each live step: its part of the declared budget or of the rest.

        Raises:
            ConfigError: more was declared than the host has left.
        """
        memory = host_memory()
        declared = self.config.declared_host_budget_bytes(memory.total_bytes)
        if self.hardware is None:
            most = self._host_bytes_left(memory)
            if declared is not None and most is not None and declared > most:
                raise ConfigError(
                    f"host_budget: {format_bytes(declared)} is more than the {format_bytes(most)} "
                    "that this rank can have; lower it, or free host memory (with "
                    "host_store='file:DIR' disk space)"
                )
            declared = declared if declared is not None else most
        share = None if declared is None else declared // self.config.max_inflight
        bounds = (share, self.granted_host_bytes)
        return min((one for one in bounds if one is not None), default=None)

    def _host_bytes_left(self, memory: HostMemory) -> int | None:
        """This rank's share of the memory, or of the disk, that activations are offloaded to."""
        kind = self.config.host_kind(self.facts.device.type)
        if kind.startswith("file:"):
            return default_file_budget_bytes(kind.removeprefix("file:"), local_world_size())
        return default_host_budget_bytes(memory, local_world_size())


def with_both_floors(error: Infeasible, fixed: FixedBytes) -> Infeasible:
    """``error``, which also names the floor of a step that finds gradients from the one before.

    They are there from its beginning to its end, so that every plan needs that much more.
    """
    if error.floor_bytes is None or fixed.gradients > fixed.new_gradients:
        return error
    accumulating = format_bytes(error.floor_bytes + fixed.new_gradients)
    text = f"{error}; floor where .grad exists before the step (accumulation): {accumulating}"
    return Infeasible(text, floor_bytes=error.floor_bytes)
