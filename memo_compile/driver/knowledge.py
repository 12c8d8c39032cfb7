"""Computes and caches what all plans of one lowered step need: seconds, layers, recompute regions.

Only the speed of copies depends on a request, so it is cached per host store.
"""

import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from memo_runtime.pages import gives_pages_back

from memo_compile.analysis.regions import LoweredRegion, RegionGraph, layout_of
from memo_compile.config import MemoConfig
from memo_compile.costs.bandwidth import copy_bandwidth
from memo_compile.costs.extrapolate import extrapolated_seconds
from memo_compile.costs.hardware import HardwareProfile, hardware_of
from memo_compile.costs.host import missing_store
from memo_compile.costs.measure_regions import measure_all, run_once
from memo_compile.costs.roofline import graph_seconds
from memo_compile.driver.comm_costs import CommCosts
from memo_compile.driver.facts import flushed_bytes, profile_name
from memo_compile.driver.left_whole import UNEXPECTED, is_bug, say_dropped
from memo_compile.driver.movable_step import Movable, movable_step
from memo_compile.driver.recompute_library import RecomputeLibrary
from memo_compile.driver.recompute_regions import RecomputeGraphs
from memo_compile.driver.stages import LoweredStep, PlanRequest
from memo_compile.driver.user_outputs import held_bytes, outside_loss_bytes, result_gradients
from memo_compile.errors import MemoError, UnsupportedGraph, described
from memo_compile.file_store import digest_of
from memo_compile.planners.least_seconds import least_wait_s, whole_compute_s
from memo_compile.planners.placement import Placement, PlacementProblem, place
from memo_compile.reporting import state
from memo_compile.step.communication import has_collectives
from memo_compile.step.hand_over import ready_after
from memo_compile.step.movable import MEASURED, MovableStep, StepCosts
from memo_compile.step.problem import CallKind, Problem
from memo_compile.step.tilings import WholeStep
from memo_compile.torch_private import distributed, fx_graphs

log = logging.getLogger("memo")


def gradients_at_once(problem: Problem, existing: int) -> int:
    """Returns the most bytes of gradients that exist at one time, ``existing`` ones kept.

    With several live steps, one makes its gradients while those of another wait in autograd.
    """
    waiting = problem.fixed.new_gradients if problem.live_steps > 1 else 0
    return max(problem.fixed.gradients, existing + waiting + problem.fixed.new_gradients)


def leaving_values(lowered: LoweredStep, positions: Iterable[int]) -> tuple[str, ...]:
    """Returns the names of the backward's results at ``positions``."""
    results = lowered.cut.backward.results
    return tuple(value for at in positions if (value := results[at]) is not None)


def requested_problem(lowered: LoweredStep, request: PlanRequest) -> Problem:
    """Returns the step that keeps everything, with what ``request`` says exists beside it."""
    problem = lowered.problem
    if request.none_exist:
        problem = replace(problem, fixed=replace(problem.fixed, gradients=0))
    gradients = gradients_at_once(problem, request.existing_gradient_bytes)
    earlier = max(problem.fixed.earlier_outputs, request.earlier_output_bytes)
    fixed = replace(problem.fixed, gradients=gradients, earlier_outputs=earlier)
    problem = replace(problem, fixed=fixed, leaving=leaving_values(lowered, request.leaving))
    if request.outside_loss:
        gradients_of_results = result_gradients(lowered.cut.backward.half_graph.graph)
        problem = replace(problem, loss_bytes=outside_loss_bytes(gradients_of_results))
    if not request.keeps_outputs:
        return problem
    held = held_bytes(problem, lowered.cut.forward.results)
    return replace(problem, keeps_outputs=True, rebound_bytes=held)


@dataclass(slots=True, kw_only=True)
class StepKnowledge:
    """Seconds, layers and recompute regions of one lowered step, each computed on first use."""

    lowered: LoweredStep
    config: MemoConfig
    """Its ``host_store`` is ignored: each method is told one."""
    hardware: HardwareProfile | None = None
    """The device that is planned for by its declared figures; None: the tensors' own device, on
    which costs may be measured."""
    may_run: bool = True
    """False where nothing may be computed while planning: slices of rows are believed then."""
    figures: dict[str, float] | None = None
    """Measured seconds by what a region computes, shared by several steps; None: each region of
    this one is measured."""
    told_s: dict[str, float] = field(default_factory=dict)
    """Region -> seconds that another rank has measured, the one that has planned this step."""
    _movable: Movable | None = None
    """The layers of the step as it was lowered; ``movable`` adds what a request counts."""
    _library: RecomputeLibrary | None = None
    _maker: RecomputeGraphs | None = None
    _region_s: Mapping[str, float] | None = None
    _ran: dict[tuple[int, str], str] = field(default_factory=dict)
    """(number of intra-op threads, region that ran by itself) -> why it failed, or ""."""
    _timed_in_part: set[str] = field(default_factory=set)
    """Regions that were timed on a part of their tokens only."""
    _copy_speeds: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """Host store -> the fields of ``StepCosts`` that say how fast copies are."""
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
        problem = requested_problem(self.lowered, request)
        return replace(problem, releases_pages=self.releases_pages())

    def releases_pages(self) -> bool:
        """True where a step that runs here gives single pages of its arena back."""
        return self.runs_here() and gives_pages_back(self.lowered.cut.facts.device)

    def labels(self) -> Mapping[str, str | None]:
        """Layer class -> the path of its modules, where it has one."""
        classes = self.lowered.cut.units.structure.classes
        return {layer_class.class_key: layer_class.module_path for layer_class in classes}

    def leased_bytes(self) -> Mapping[str, int]:
        """Saved activation -> its own bytes."""
        forward = self.lowered.cut.forward
        return {value: forward.nodes[value].meta["val"].nbytes for value in forward.leased}

    def trained(self) -> frozenset[int]:
        """Returns the graph's inputs, by position, whose gradients leave while the backward runs.

        Empty where several steps are live (gradients of one may wait for those of another), and
        where a result is one of the user's inputs.
        """
        ready = ready_after(self.lowered.problem)
        if ready is None or not self.config.early_gradients or self.config.max_inflight > 1:
            return frozenset()
        if self.lowered.cut.facts.ties_inputs:
            return frozenset()
        last = max(ready, default=0)
        results = self.lowered.cut.backward.results
        return frozenset(
            at for at, value in enumerate(results) if value is not None and ready[at] < last
        )

    def movable(self, problem: Problem, host_store: str) -> MovableStep:
        """Returns ``problem`` as layers with slots (saved tensors that may move)."""
        return replace(
            self._layers_of_step(host_store).step,
            problem=problem,
            costs=self.costs(host_store),
            waits_late=self.config.comm_windows,
        )

    def _layers_of_step(self, host_store: str) -> Movable:
        """Returns the layers of the step as it was lowered; whole ones if rows cannot be split."""
        if self._movable is None:
            make_layers = functools.partial(
                movable_step,
                self.lowered,
                self.costs(host_store),
                profile=self.profile(),
                token_granule=self.config.token_granule,
            )
            try:
                self._movable = make_layers(slices_rows=True)
            except MemoError:
                raise
            except UNEXPECTED as error:
                say_dropped(f"{self.name}: layers are moved whole, not by rows", error)
                self._movable = make_layers(slices_rows=False)
        return self._movable

    def library(self, host_store: str) -> RecomputeLibrary:
        """Returns the step's recompute regions."""
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
        """Returns None, no memory of searches: a step that runs is mostly planned once."""

    def place(self, problem: PlacementProblem, *, solver: str, time_limit_s: float) -> Placement:
        """Returns offsets for the buffers of ``problem``."""
        return place(problem, solver=solver, time_limit_s=time_limit_s)

    def regions(self) -> Mapping[str, LoweredRegion]:
        """Returns the step's regions as code, and the recompute regions lowered so far."""
        return {**self.lowered.regions, **(self._maker.code if self._maker else {})}

    def graphs(self) -> Mapping[str, RegionGraph]:
        """Returns the graphs of ``regions``."""
        recomputing = self._maker.lowered_graphs() if self._maker else {}
        return {**self.lowered.cut.regions, **recomputing}

    def costs(self, host_store: str) -> StepCosts:
        """Returns the seconds of regions and the speed of copies, measured or by roofline."""
        if host_store not in self._copy_speeds:
            self._copy_speeds[host_store] = self._speeds(host_store)
        return StepCosts(
            region_s=self._seconds_of_regions(),
            **self._copy_speeds[host_store],
            comm_bytes_per_s=self._comm_bytes_per_s(),
            collective_s=self.collectives.seconds() or None,
            comm_slowdown=self.profile().comm_slowdown if self._talks() else 1.0,
            source=MEASURED if self._measures() else f"roofline: {self.profile().name}",
        )

    def _seconds_of_regions(self) -> Mapping[str, float]:
        """Returns the seconds of the step's regions, without recompute regions."""
        if self._region_s is None:
            self._region_s = dict(self._seconds(self.lowered.regions, self.lowered.cut.regions))
        return self._region_s

    def compute_s(self) -> float:
        """Returns the seconds of the step that keeps everything."""
        seconds = self._seconds_of_regions()
        return math.fsum(seconds[call.region] for call in self.lowered.problem.calls)

    def whole_compute_s(self) -> float:
        """Seconds of the step before any region ran in tiles, with what every plan waits for ranks.

        ``compute_s`` in its place where that is less, and where regions are measured: the whole
        ones are not lowered.
        """
        if self._measures():
            return self.compute_s() + least_wait_s(self.lowered.problem, self._plain_costs())
        region_s = {
            name: graph_seconds(region.gm, self.profile())
            for name, region in self.whole_regions().items()
        }
        return whole_compute_s(self.lowered.problem, self.whole, self._plain_costs(), region_s)

    def whole_regions(self) -> Mapping[str, RegionGraph]:
        """Returns the regions that run in tiles, as they were whole, by name."""
        halves = self.lowered.cut.forward, self.lowered.cut.backward
        return {name: region for half in halves for name, region in half.whole_regions.items()}

    def _plain_costs(self) -> StepCosts:
        """Returns the costs of computation and communication, for a step that copies nothing."""
        return StepCosts(
            region_s=self._seconds_of_regions(),
            d2h_bytes_per_s=1.0,
            h2d_bytes_per_s=1.0,
            comm_bytes_per_s=self._comm_bytes_per_s(),
            collective_s=self.collectives.seconds() or None,
        )

    def known_costs(self, host_store: str) -> StepCosts | None:
        """Returns ``costs`` with those of recompute regions; None: no decision needed any yet."""
        if self._movable is None:
            return None
        costs = self.costs(host_store)
        regions = self._library.regions.values() if self._library else ()
        recompute_s = {each.key.region: each.seconds for each in regions if each.is_lowered}
        return replace(costs, region_s={**costs.region_s, **recompute_s})

    def _speeds(self, host_store: str) -> Mapping[str, float]:
        """Returns the fields of ``StepCosts`` that say how fast copies are.

        They are measured, or declared of the device, and never above those of the options.
        """
        most_d2h, most_h2d = self.config.copy_speeds()
        if self._measures():
            device = self.lowered.cut.facts.device
            if missing_store(host_store):
                host_store = "auto"  # no plan copies there: it has no speed
            kind = replace(self.config, host_store=host_store).host_kind(device.type)
            with fx_graphs.real_tensors():
                measured = copy_bandwidth(device, kind)
            d2h, h2d = measured.d2h_bytes_per_s, measured.h2d_bytes_per_s
            latency_s = measured.latency_s
        else:
            declared = self.profile()
            d2h, h2d, latency_s = declared.d2h_bytes_per_s, declared.h2d_bytes_per_s, 0.0
        return {
            "d2h_bytes_per_s": min(d2h, most_d2h or d2h),
            "h2d_bytes_per_s": min(h2d, most_h2d or h2d),
            "copy_latency_s": latency_s,
        }

    def take_costs(self, costs: StepCosts, host_store: str) -> None:
        """Uses ``costs`` from now on, which another rank has measured of an equal step."""
        self.told_s |= costs.region_s
        self._region_s = None
        self._copy_speeds[host_store] = {
            "d2h_bytes_per_s": costs.d2h_bytes_per_s,
            "h2d_bytes_per_s": costs.h2d_bytes_per_s,
            "copy_latency_s": costs.copy_latency_s,
        }

    def _comm_bytes_per_s(self) -> float | None:
        """Returns the declared speed of the link between ranks; None: the step does not use it.

        It counts for collectives whose seconds are not measured.
        """
        if not self._talks():
            return None
        declared = self.profile().link_bytes_per_s
        return min(declared, self.config.comm_bytes_per_s or declared)

    def _talks(self) -> bool:
        return has_collectives(self.lowered.problem)

    @property
    def collectives(self) -> CommCosts:
        """Measured seconds of collectives; empty where only declared figures count."""
        if self._collectives is None:
            declared = self._comm_bytes_per_s()
            if declared is not None and self._measures() and self.is_shared():
                self._collectives = CommCosts.of(self.lowered, self.config, declared)
            else:
                self._collectives = CommCosts()
        return self._collectives

    def collective_s(self) -> Mapping[str, float]:
        """Region -> seconds of its collective, where they are known."""
        return self.collectives.seconds()

    def runs_here(self) -> bool:
        """False for a step that is planned for another kind of device than its tensors lie on."""
        return self.hardware is None or self.hardware.name == self.lowered.cut.facts.device.type

    def is_exact(self) -> bool:
        """True where the backend makes the same plan: the step was lowered for its own device."""
        return self.runs_here() or self.lowered.cut.facts.gpu is not None

    def gathering_again(self) -> "StepKnowledge | None":
        """Returns what is known of the step whose backward gathers weights again; None: no such.

        Measured seconds are shared with it; layers are not.
        """
        gathering = self.lowered.again
        if gathering is None:
            return None
        self._seconds_of_regions()  # cached, so that the copy has them too
        lowered = replace(self.lowered, problem=gathering, again=None)
        return replace(self, lowered=lowered, told_s={}, _movable=None, _library=None, _maker=None)

    def profile(self) -> HardwareProfile:
        """Returns the declared figures of the device that the step is planned for."""
        return self.hardware or hardware_of(profile_name(self.lowered.cut.facts.device))

    def bytes_left(self) -> int | None:
        """Device memory that this process holds or may still take; None where it is unknown."""
        return self.lowered.cut.facts.bytes_left()

    def device_bytes(self) -> int | None:
        """Returns all memory of that device; None where it is unknown."""
        facts = self.lowered.cut.facts
        return self.hardware.memory_bytes if self.hardware else facts.device_bytes()

    def require_ran(self, names: Iterable[str]) -> Mapping[str, str]:
        """Runs each region by itself, unless it has run with as many intra-op threads before.

        So libraries allocate what they keep for its kernels. Returns the regions that failed, and
        why.
        """
        num_threads = torch.get_num_threads()
        keys = {name: (num_threads, name) for name in names}
        for name in (name for name, key in keys.items() if key not in self._ran):
            self._ran[keys[name]] = self._try_alone(name)
        return {name: self._ran[key] for name, key in keys.items() if self._ran[key]}

    def _try_alone(self, name: str) -> str:
        """Runs a region by itself; returns why that failed, or ""."""
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
        """Returns the seconds of ``lowered``, measured or by roofline."""
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
        """Returns seconds that another rank has told, that ``figures`` has, or measured now.

        Raises as ``measure_all``.
        """

        def measure(names: Iterable[str]) -> Mapping[str, float]:
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

        told_s = {name: self.told_s[name] for name in lowered if name in self.told_s}
        missing = [name for name in lowered if name not in told_s]
        if self.figures is None:
            return {**told_s, **measure(missing)}
        config, device = self.config, self.lowered.cut.facts.device
        options = sorted(config.inductor_options.items())
        settings = [profile_name(device), config.lowering, config.mode, *options]
        keys = {name: _content_key(graphs[name], settings) for name in missing}
        unmeasured = [name for name, key in keys.items() if key not in self.figures]
        self.figures |= {keys[name]: seconds for name, seconds in measure(unmeasured).items()}
        return {**told_s, **{name: self.figures[key] for name, key in keys.items()}}

    def is_shared(self) -> bool:
        """True where this step waits for other ranks, so that all of them should run one plan."""
        return distributed.num_ranks() > 1 and self.hardware is None and self._talks()

    def _room_bytes(self) -> int | None:
        """Returns the bytes that the budget leaves for a region that runs alone; None: no bound."""
        budget, device = self.config.budget_bytes(self.device_bytes()), self.device_type
        if budget is None or device != "cuda":
            return None
        facts = self.lowered.cut.facts
        torch.mm(*2 * [torch.ones(1, 1, device=facts.device)])  # cuBLAS makes its workspace
        tuning_bytes = flushed_bytes(facts.device) if self.config.lowering == "inductor" else 0
        return budget - torch.cuda.memory_allocated(facts.device) - tuning_bytes

    def _extrapolated(self, region: RegionGraph, reason: str) -> float:
        """Estimates the seconds of a region that is too large to be timed whole."""
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


def _content_key(region: RegionGraph, settings: Sequence[object]) -> str:
    """Returns a digest of what decides how long ``region`` takes under ``settings``.

    Numbers inside the graph are left out: which part of a vocabulary a stage has is one.
    """
    operators = [
        [getattr(node.target, "__name__", node.op), str(layout_of(node.meta.get("val")))]
        for node in region.gm.graph.nodes
    ]
    all_settings = [torch.get_num_threads(), region.op_by_op, [str(value) for value in settings]]
    return digest_of([region.name, all_settings, operators])
