"""What plans of one lowered step share: seconds, layers, recompute regions. Each is found once.

Only the speed of copies depends on a request, so it is kept for each host store.
"""

import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from memo_runtime.pages import gives_pages_back

from memo_compile.analysis.regions import LoweredRegion, RegionGraph, layout_of
from memo_compile.check.check_moves import Recomputation, recomputations_of
from memo_compile.config import MemoConfig
from memo_compile.costs.bandwidth import copy_bandwidth
from memo_compile.costs.extrapolate import extrapolated_seconds
from memo_compile.costs.hardware import HardwareProfile, hardware_of
from memo_compile.costs.measure_regions import measure_all, run_once
from memo_compile.costs.roofline import graph_seconds
from memo_compile.driver.comm_costs import CommCosts
from memo_compile.driver.facts import flushed_bytes, profile_name
from memo_compile.driver.left_whole import UNEXPECTED, is_bug, say_dropped
from memo_compile.driver.movable_step import Movable, movable_step
from memo_compile.driver.recompute_library import RecomputeLibrary
from memo_compile.driver.recompute_regions import RecomputeGraphs
from memo_compile.driver.stages import LoweredStep, PlanRequest
from memo_compile.driver.user_outputs import held_bytes, outside_loss_bytes, own_gradients
from memo_compile.errors import MemoError, UnsupportedGraph, described
from memo_compile.file_store import digest_of
from memo_compile.planners.comm_windows import has_collectives, least_wait_s, whole_compute_s
from memo_compile.planners.placement import Placement, PlacementProblem, place
from memo_compile.reporting import state
from memo_compile.step.group import grouped, grouped_layers
from memo_compile.step.hand_over import ready_after
from memo_compile.step.movable import MEASURED, MovableStep, StepCosts
from memo_compile.step.problem import CallKind, Problem
from memo_compile.step.tilings import WholeStep
from memo_compile.torch_private import distributed, fx_graphs

log = logging.getLogger("memo")


def gradients_at_once(problem: Problem, existing: int) -> int:
    """Bytes of gradients where ``existing`` ones are kept beside those that backwards make.

    Of several live steps one makes its gradients while those of another wait in autograd.
    """
    waiting = problem.fixed.new_gradients if problem.live_steps > 1 else 0
    return max(problem.fixed.gradients, existing + waiting + problem.fixed.new_gradients)


def leaving_values(lowered: LoweredStep, positions: Iterable[int]) -> tuple[str, ...]:
    """The results of the backward at ``positions``, by name."""
    results = lowered.cut.backward.results
    return tuple(value for at in positions if (value := results[at]) is not None)


def requested_problem(lowered: LoweredStep, request: PlanRequest) -> Problem:
    """The step that keeps everything, with what exists beside it according to ``request``."""
    problem = lowered.problem
    if request.group is not None:
        problem = grouped(problem, request.group)
    if request.none_exist:
        problem = replace(problem, fixed=replace(problem.fixed, gradients=0))
    fixed = problem.fixed
    gradients = gradients_at_once(problem, request.existing_gradient_bytes)
    earlier = max(fixed.earlier_outputs, request.earlier_output_bytes)
    problem = replace(problem, fixed=replace(fixed, gradients=gradients, earlier_outputs=earlier))
    if request.group is not None:  # what the user does with results was seen
        return problem
    problem = replace(problem, leaving=leaving_values(lowered, request.leaving))
    if request.outside_loss:
        more = outside_loss_bytes(own_gradients(lowered.cut.backward.half_graph.graph))
        problem = replace(problem, loss_bytes=more)
    if not request.keeps_outputs:
        return problem
    held = held_bytes(problem, lowered.cut.forward.results)
    return replace(problem, keeps_outputs=True, rebound_bytes=held)


@dataclass(slots=True, kw_only=True)
class StepKnowledge:
    """What is known of one lowered step; found when it is first asked for."""

    lowered: LoweredStep
    config: MemoConfig
    """Its ``host_store`` is ignored: each question names its own."""
    hardware: HardwareProfile | None = None
    """The device whose declared figures count; where it is None, costs may be measured."""
    may_run: bool = True
    """False where nothing may be computed while planning: slices of rows are believed then."""
    figures: dict[str, float] | None = None
    """Seconds by what a region computes: of several steps that share what was measured. None: each
    region of this one is measured."""
    told_s: dict[str, float] = field(default_factory=dict)
    """Region -> seconds, of those that the rank has measured that has planned this step."""
    _movable: Movable | None = None
    """The layers of the step as it was lowered; ``movable`` adds what a request counts."""
    _library: RecomputeLibrary | None = None
    _maker: RecomputeGraphs | None = None
    _region_s: Mapping[str, float] | None = None
    _ran: dict[tuple[int, str], str] = field(default_factory=dict)
    """Number of intra-op threads and region that ran by itself -> why it could not, else empty."""
    _timed_in_part: set[str] = field(default_factory=set)
    """Regions that were timed on some of their tokens."""
    _copy_speeds: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """Host store -> the fields of ``StepCosts`` that tell how fast copies are."""
    _collectives: CommCosts | None = None

    @property
    def name(self) -> str:
        """What reports and dumps call the step."""
        return self.lowered.cut.name

    @property
    def whole(self) -> WholeStep:
        """The step before tiles and moves, for the checker."""
        return self.lowered.whole

    @property
    def device_type(self) -> str:
        """The kind of device that the tensors lie on."""
        return self.lowered.cut.facts.device.type

    def requested(self, request: PlanRequest) -> Problem:
        """The step that keeps everything, with what exists beside it according to ``request``."""
        device = self.lowered.cut.facts.device
        releases_pages = self.runs_here() and gives_pages_back(device)
        return replace(requested_problem(self.lowered, request), releases_pages=releases_pages)

    def labels(self) -> Mapping[str, str | None]:
        """Layer class -> the path of its modules, where it has one."""
        classes = self.lowered.cut.units.structure.classes
        return {found.class_key: found.module_path for found in classes}

    def leased_bytes(self) -> Mapping[str, int]:
        """Saved activation -> its own bytes."""
        forward = self.lowered.cut.forward
        return {value: forward.nodes[value].meta["val"].nbytes for value in forward.leased}

    def trained(self) -> frozenset[int]:
        """Inputs of the graph, by position, whose gradients leave while the backward runs.

        None where several steps are live: gradients of one may wait for those of another. None
        where an input of the user's goes on as a result.
        """
        ready = ready_after(self.lowered.problem)
        if ready is None or not self.config.early_gradients or self.config.max_inflight > 1:
            return frozenset()
        if self.lowered.cut.facts.ties_inputs:
            return frozenset()
        last = max(ready, default=0)
        results = self.lowered.cut.backward.results
        made = (at for at, value in enumerate(results) if value is not None)
        return frozenset(at for at in made if ready[at] < last)

    def movable(self, problem: Problem, host_store: str, num_members: int = 1) -> MovableStep:
        """``problem`` as layers with slots: the lowered step, with what a request adds to it."""
        step = self._layers_of_step(host_store).step
        layers = grouped_layers(step, num_members)
        return replace(
            step,
            problem=problem,
            layers=layers,
            costs=self.costs(host_store),
            waits_late=self.config.comm_windows,
        )

    def _layers_of_step(self, host_store: str) -> Movable:
        if self._movable is None:
            layers = functools.partial(
                movable_step,
                self.lowered,
                self.costs(host_store),
                profile=self.profile(),
                token_granule=self.config.token_granule,
            )
            try:
                self._movable = layers(slices_rows=True)
            except MemoError:
                raise
            except UNEXPECTED as error:
                name = self.lowered.cut.name
                say_dropped(f"{name}: layers are moved whole, not by rows", error)
                self._movable = layers(slices_rows=False)
        return self._movable

    def library(self, host_store: str) -> RecomputeLibrary:
        """The step's recompute regions."""
        if self._library is None:
            layers = self._layers_of_step(host_store)
            self._maker = RecomputeGraphs(
                graphs=layers.graphs,
                config=self.config,
                measure=self._seconds,
                runner=self.lowered.cut.runner,
                may_run=self.may_run,
            )
            self._library = RecomputeLibrary(step=layers.step, maker=self._maker)
        return self._library

    def searches(self, host_budget_bytes: int | None, *, exact: bool) -> None:
        """Nothing is kept: a step that runs is mostly planned once."""

    def place(self, problem: PlacementProblem, *, solver: str, time_limit_s: float) -> Placement:
        """Offsets for the buffers of ``problem``."""
        return place(problem, solver=solver, time_limit_s=time_limit_s)

    def regions(self) -> Mapping[str, LoweredRegion]:
        """The step's regions as code, and those that recompute, as far as they are lowered."""
        return {**self.lowered.regions, **(self._maker.code if self._maker else {})}

    def graphs(self) -> Mapping[str, RegionGraph]:
        """The graphs of ``regions``."""
        more = self._maker.lowered_graphs() if self._maker else {}
        return {**self.lowered.cut.regions, **more}

    def recomputations(
        self, moved: Problem, unmoved: Problem | None = None, num_members: int = 1
    ) -> Mapping[str, Recomputation]:
        """What each RECOMPUTE call of ``moved`` makes, and from what.

        ``unmoved`` is the group's step that keeps everything, where it is of several members.
        """
        if self._movable is None or self._library is None:
            return {}
        step = self._movable.step
        if unmoved is not None:
            step = replace(step, problem=unmoved, layers=grouped_layers(step, num_members))
        return recomputations_of(step, moved, self._library.regions.values())

    def costs(self, host_store: str) -> StepCosts:
        """Seconds of the regions and speed of the copies, measured or by roofline."""
        if host_store not in self._copy_speeds:
            self._copy_speeds[host_store] = self._speeds(host_store)
        return StepCosts(
            region_s=self._seconds_of_regions(),
            **self._copy_speeds[host_store],
            comm_bytes_per_s=self._comm_bytes_per_s(),
            collective_s=self.collectives.seconds() or None,
            comm_slowdown=self._comm_slowdown(),
            source=MEASURED if self._measures() else f"roofline: {self.profile().name}",
        )

    def _seconds_of_regions(self) -> Mapping[str, float]:
        """Seconds of the regions that were lowered at first; found when first asked for."""
        if self._region_s is None:
            self._region_s = dict(self._seconds(self.lowered.regions, self.lowered.cut.regions))
        return self._region_s

    def compute_s(self) -> float:
        """Seconds of the step that keeps everything."""
        seconds = self._seconds_of_regions()
        return math.fsum(seconds[call.region] for call in self.lowered.problem.calls)

    def whole_compute_s(self) -> float:
        """The same before any region ran in tiles; ``compute_s`` if that is less, or measured.

        What every plan waits for other ranks counts as well.
        """
        if self._measures():
            return self.compute_s() + least_wait_s(self.lowered.problem, self._plain_costs())
        region_s = {
            name: graph_seconds(region.gm, self.profile())
            for name, region in self.whole_regions().items()
        }
        return whole_compute_s(self.lowered.problem, self.whole, self._plain_costs(), region_s)

    def whole_regions(self) -> Mapping[str, RegionGraph]:
        """What runs in tiles, as it was before."""
        halves = self.lowered.cut.forward, self.lowered.cut.backward
        return {name: region for half in halves for name, region in half.whole_regions.items()}

    def _plain_costs(self) -> StepCosts:
        """Of computation and communication: nothing is copied."""
        return StepCosts(
            region_s=self._seconds_of_regions(),
            d2h_bytes_per_s=1.0,
            h2d_bytes_per_s=1.0,
            comm_bytes_per_s=self._comm_bytes_per_s(),
            collective_s=self.collectives.seconds() or None,
        )

    def known_costs(self, host_store: str) -> StepCosts | None:
        """``costs`` with those of recompute regions; None where no decision needed them."""
        if self._movable is None:
            return None
        costs = self.costs(host_store)
        lowered = self._library.regions.values() if self._library else ()
        more = {region.key.region: region.seconds for region in lowered if region.is_lowered}
        return replace(costs, region_s={**costs.region_s, **more})

    def _speeds(self, host_store: str) -> Mapping[str, float]:
        slowest = self.config.copy_speeds()
        if self._measures():
            speeds = self._measured_speeds(host_store)
        else:
            link = self.profile()
            speeds = {"d2h": link.d2h_bytes_per_s, "h2d": link.h2d_bytes_per_s, "latency": 0.0}
        return {
            "d2h_bytes_per_s": min(speeds["d2h"], slowest[0] or speeds["d2h"]),
            "h2d_bytes_per_s": min(speeds["h2d"], slowest[1] or speeds["h2d"]),
            "copy_latency_s": speeds["latency"],
        }

    def _measured_speeds(self, host_store: str) -> Mapping[str, float]:
        """Copies to the host and back."""
        device = self.lowered.cut.facts.device
        kind = replace(self.config, host_store=host_store).host_kind(device.type)
        with fx_graphs.real_tensors():
            speeds = copy_bandwidth(device, kind)
        return {
            "d2h": speeds.d2h_bytes_per_s,
            "h2d": speeds.h2d_bytes_per_s,
            "latency": speeds.latency_s,
        }

    def take_costs(self, costs: StepCosts, host_store: str) -> None:
        """From now on ``costs`` count, which another rank has measured of an equal step."""
        self.told_s |= costs.region_s
        self._region_s = None
        self._copy_speeds[host_store] = {
            "d2h_bytes_per_s": costs.d2h_bytes_per_s,
            "h2d_bytes_per_s": costs.h2d_bytes_per_s,
            "copy_latency_s": costs.copy_latency_s,
        }

    def _comm_bytes_per_s(self) -> float | None:
        """Speed of the link between ranks, as declared; None where the step does not use it.

        It counts where ``collectives`` has no seconds.
        """
        if not has_collectives(self.lowered.problem):
            return None
        declared = self.profile().link_bytes_per_s
        return min(declared, self.config.comm_bytes_per_s or declared)

    def _comm_slowdown(self) -> float:
        talks = has_collectives(self.lowered.problem)
        return self.profile().comm_slowdown if talks else 1.0

    @property
    def collectives(self) -> CommCosts:
        """What is known of the seconds of collectives; none where they are declared."""
        if self._collectives is None:
            declared, is_measured = self._comm_bytes_per_s(), self._measures() and self.is_shared()
            if declared is not None and is_measured:
                self._collectives = CommCosts.of(self.lowered, self.config, declared)
            else:
                self._collectives = CommCosts()
        return self._collectives

    def runs_here(self) -> bool:
        """False for a step that is planned for another kind of device than its tensors lie on."""
        return self.hardware is None or self.hardware.name == self.lowered.cut.facts.device.type

    def is_exact(self) -> bool:
        """True where the backend makes the same plan: the step was lowered for its own device."""
        return self.runs_here() or self.lowered.cut.facts.gpu is not None

    def gathering_again(self) -> "StepKnowledge | None":
        """The step that gathers weights again, with what is known here; None: it is no choice."""
        again = self.lowered.again
        if again is None:
            return None
        self._seconds_of_regions()
        lowered = replace(self.lowered, problem=again, again=None)
        return replace(self, lowered=lowered, told_s={}, _movable=None, _library=None, _maker=None)

    def profile(self) -> HardwareProfile:
        """The declared figures of the device that the step is planned for."""
        return self.hardware or hardware_of(profile_name(self.lowered.cut.facts.device))

    def bytes_left(self) -> int | None:
        """Device memory that this process holds or may still take; None where it is unknown."""
        return self.lowered.cut.facts.bytes_left()

    def device_bytes(self) -> int | None:
        """All memory of that device; None where it is unknown."""
        facts = self.lowered.cut.facts
        return self.hardware.memory_bytes if self.hardware else facts.device_bytes()

    def require_ran(self, names: Iterable[str]) -> Mapping[str, str]:
        """Each of the regions has run by itself, with as many threads as now, where that can be.

        Returns those that could not, and why.
        """
        num_threads = torch.get_num_threads()
        keys = {name: (num_threads, name) for name in names}
        for name in (name for name, key in keys.items() if key not in self._ran):
            self._ran[keys[name]] = self._try_alone(name)
        return {name: self._ran[key] for name, key in keys.items() if self._ran[key]}

    def _try_alone(self, name: str) -> str:
        """Run a region; why that failed, or nothing."""
        try:
            run_once(self.regions()[name], self.graphs()[name])
        except UnsupportedGraph as error:
            return str(error)
        except UNEXPECTED as error:
            say_dropped(f"region {name} does not run before the first step", error)
            return described(error)
        return ""

    def _measures(self) -> bool:
        return self.hardware is None and self.config.costs != "roofline"

    def _seconds(
        self, lowered: Mapping[str, LoweredRegion], graphs: Mapping[str, RegionGraph]
    ) -> Mapping[str, float]:
        if self._measures():
            try:
                return self._measured_seconds(lowered, graphs)
            except (UnsupportedGraph, *UNEXPECTED) as error:
                if not isinstance(error, UnsupportedGraph) and not is_bug(error):
                    raise
                say_dropped("costs are computed, as with costs='roofline', not measured", error)
        return {
            key: graph_seconds(graphs[key].gm, self.profile())
            if graphs[key].kind is CallKind.RUN
            else 0.0
            for key in lowered
        }

    def _measured_seconds(
        self, lowered: Mapping[str, LoweredRegion], graphs: Mapping[str, RegionGraph]
    ) -> Mapping[str, float]:
        """What this rank has measured, or the one that has planned. Raises as ``measure_all``."""

        def measured(names: Iterable[str]) -> Mapping[str, float]:
            with fx_graphs.real_tensors():
                seconds = measure_all(
                    {name: lowered[name] for name in names},
                    graphs,
                    too_large=self._extrapolated,
                    room_bytes=self._room_bytes(),
                )
            whole = seconds.keys() - self._timed_in_part
            self._ran |= {(torch.get_num_threads(), name): "" for name in whole}
            return seconds

        told = {name: self.told_s[name] for name in lowered if name in self.told_s}
        missing = [name for name in lowered if name not in told]
        if self.figures is None:
            return {**told, **measured(missing)}
        config, device = self.config, self.lowered.cut.facts.device
        options = sorted(config.inductor_options.items())
        around = [profile_name(device), config.lowering, config.mode, *options]
        keys = {name: _content_key(graphs[name], around) for name in missing}
        new = [name for name, key in keys.items() if key not in self.figures]
        self.figures |= {keys[name]: seconds for name, seconds in measured(new).items()}
        return {**told, **{name: self.figures[key] for name, key in keys.items()}}

    def is_shared(self) -> bool:
        """True where this step waits for other ranks, so that one plan suits all of them."""
        is_alone = distributed.num_ranks() < 2 or self.hardware is not None
        return not is_alone and has_collectives(self.lowered.problem)

    def _room_bytes(self) -> int | None:
        """What the budget leaves for a region that runs alone; None: nothing bounds it (CPU)."""
        budget, device = self.config.budget_bytes(self.device_bytes()), self.device_type
        if budget is None or device != "cuda":
            return None
        facts = self.lowered.cut.facts
        torch.mm(*2 * [torch.ones(1, 1, device=facts.device)])  # cuBLAS makes its workspace
        tuning_bytes = flushed_bytes(facts.device) if self.config.lowering == "inductor" else 0
        return budget - torch.cuda.memory_allocated(facts.device) - tuning_bytes

    def _extrapolated(self, region: RegionGraph, reason: str) -> float:
        """Seconds of a region that does not fit whole."""
        self._timed_in_part.add(region.name)
        seconds = extrapolated_seconds(
            region,
            self.config,
            self.profile(),
            self.lowered.cut.runner,
            room_bytes=self._room_bytes(),
        )
        note = f"{reason}: timed on an eighth and a quarter of its tokens"
        if state.add_note(note):
            log.info("memo: %s", note)
        return seconds


def _content_key(region: RegionGraph, around: Sequence[object]) -> str:
    """Stands for how long ``region`` takes where ``around`` is equal too.

    Numbers inside the graph are left out: which part of a vocabulary a stage has is one.
    """
    operators = [
        [getattr(node.target, "__name__", node.op), str(layout_of(node.meta.get("val")))]
        for node in region.gm.graph.nodes
    ]
    settings = [torch.get_num_threads(), region.op_by_op, [str(value) for value in around]]
    return digest_of([region.name, settings, operators])
