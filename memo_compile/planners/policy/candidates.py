"""The plans among which a budget chooses, each with its simulated step and its bytes.

The set does not depend on the budget, so that a smaller one never gives a larger peak
(``frontier.py``). In a plan bytes are *in flight* between where a copy begins and where it is
waited for.
"""

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from memo_compile.errors import InvalidPlan, UnsupportedGraph
from memo_compile.planners.move_rules import RecomputeOf, facts_of, recompute_keys
from memo_compile.planners.policy.candidate import (
    Candidate,
    Figures,
    UntimedProgram,
    program_of,
    simulated,
    untimed_program,
)
from memo_compile.planners.policy.cheapest_first import greedy_sequence, refilled
from memo_compile.planners.policy.lynx_policies import LYNX, lynx_moves
from memo_compile.planners.policy.milp import lowest_peak, solve_modes
from memo_compile.planners.policy.model import (
    StepModel,
    build_model,
    ever_smaller,
    last_layer_kept,
    least_bytes,
    least_cost_s,
)
from memo_compile.planners.policy.modes import ModeCost, layer_modes, outside_room
from memo_compile.planners.policy.named import NAMED, QUANTA, NamedPlan, named_moves, steady_moves
from memo_compile.planners.policy.slot_by_slot import slot_by_slot
from memo_compile.step.movable import Action, Layer, Mode, MovableStep, Moves, Schedule
from memo_compile.step.problem import Problem

log = logging.getLogger("memo")

TWO_LAYERS = Schedule(layers=2, widen=1.0)
"""A copy may last two layers, so that layers with much to copy use others' time."""

ONE_LAYER = Schedule(layers=1, widen=1.0)
"""A copy may last until the next layer ends, as with MEMO's rotating buffers."""

NO_LAYER = Schedule(layers=0, widen=1.0)
"""Nothing is in flight beside a call, until waits and reloads are moved to where bytes allow it."""

SPARE_SHARES = (0.02, 0.06)
"""Shares of the peak that copies to the host leave free in spared plans: for those that cannot be
placed without holes, where the next plan may take half as long again (Llama-3-70B, tp 8, near its
floor: gathered inputs of 2 GiB, and copies of 0.25 between; 0.02 costs 0.2 %, 0.06 12 %)."""

COPY_PRICES = (0.2, 1.0)
"""Near the floor some of each copy stalls, the more the fewer bytes are free: greedy's plans for
``NO_LAYER`` are made for several prices of a second of copying, and simulated."""

MAX_NEAR_FLOOR = 3
"""So many last plans of each such sequence are simulated, of those that have a smaller peak than
all before; with more bytes other plans are faster."""

FULL_HOST, MAX_FULL_HOST = 0.9, 16
"""Where a sequence fills this share of the host, so many of its last plans are simulated instead:
from there on they only recompute more, and each takes much longer than the one before."""

BOUND_SHARES = {
    ONE_LAYER: (0.001, 0.05, 0.12, 0.3),
    TWO_LAYERS: (0.05, 0.12, 0.22, 0.45),
    NO_LAYER: (0.001, 0.02),
}
"""Per schedule the bounds in bytes at which the program is solved, from its floor (0) to save-all
(1). They are denser near the floor, where plans are slow and a byte is worth most."""

IN_FLIGHT_STEPS = (0.002, 0.004, 0.002, 0.002, 0.004, 0.01, 0.02, 0.04, 0.08, 0.2, 0.4)
"""A plan that stalls for its copies is also tried with more bytes in flight, one step after the
other: by at least this share of its peak, and by as much as it takes to give a copy more time."""

MOST_IN_FLIGHT = 2.0
"""And at most with this many times its peak."""

IN_FLIGHT_GRAIN = 1000
"""``Schedule.widen`` is rounded up to a multiple of one part in so many. So a plan that just gives
a copy more time still does when its regions are lowered and a few bytes larger."""

STALLED_SHARE = 0.001
"""A plan that stalls for at most this share of its step is not tried with more in flight."""

MAX_GREEDY = 20
"""Most plans of one greedy sequence that are simulated; they are spread evenly over it."""

MAX_BY_SLOT = 6
"""Most plans near the floor that are changed slot by slot."""

MAX_BY_SLOT_CALLS = 300_000
"""Most calls of all steps that are simulated for that together: some five seconds."""


def _spread_over(count: int, most: int) -> list[int]:
    """At most ``most`` of the first ``count`` numbers, evenly: 3 of 9 are 0, 4, 8."""
    num_taken = min(most, count)
    return sorted({(count - 1) * at // max(1, num_taken - 1) for at in range(num_taken)})


def _unbeaten(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The plans that no other beats in bytes and in cost, the fewest bytes first."""
    plans: list[Candidate] = []
    for plan in sorted(candidates, key=lambda plan: (plan.live_bytes, plan.cost_s)):
        if not plans or plan.cost_s < plans[-1].cost_s:
            plans.append(plan)
    return plans


def _spread_over_bytes(plans: Sequence[Candidate], most: int) -> list[Candidate]:
    """At most ``most`` of ``plans``, which ascend in bytes, evenly over the range of bytes."""
    if not plans:
        return []
    first, last = plans[0].live_bytes, plans[-1].live_bytes
    bounds = [first + (last - first) * at // (most - 1) for at in range(most)]
    within = ([plan for plan in plans if plan.live_bytes <= bound] for bound in bounds)
    return list(dict.fromkeys(small_plans[-1] for small_plans in within))


def _stalls(candidate: Candidate) -> bool:
    return candidate.timeline.stall_s > STALLED_SHARE * candidate.timeline.step_s


@dataclass(slots=True, kw_only=True)
class SearchMemory:
    """What searches of one step gave, for all budgets; of one bound on the host, one ``exact``."""

    moves: dict[tuple[str, ...], tuple[Moves, ...]] = field(default_factory=dict)
    """(search, then the names of ``DecisionMemory.regions``) -> the moves that it gave."""
    figures: dict[tuple[Moves, tuple[str, ...]], Figures] = field(default_factory=dict)
    """(moves, those of their recompute regions that are estimated) -> their figures."""


@dataclass(slots=True, kw_only=True)
class DecisionMemory:
    """What searches gave during one decision: its later rounds, which know more costs, reuse it."""

    of_step: SearchMemory = field(default_factory=SearchMemory)
    """Lives longer: decisions for other budgets share it."""
    regions: tuple[str, ...] = ()
    """The names of the step's regions that are lowered or refused by now."""
    moves: dict[str, tuple[Moves, ...]] = field(default_factory=dict)
    """Search -> the moves that it gave in an earlier round."""

    def once(self, search: str, make: Callable[[], Iterable[Moves]]) -> tuple[Moves, ...]:
        """The moves of ``search``, made once in a decision, and once while ``regions`` stay so."""
        if search not in self.moves:
            key = search, *self.regions
            if key not in self.of_step.moves:
                self.of_step.moves[key] = tuple(dict.fromkeys(make()))
            self.moves[search] = self.of_step.moves[key]
        return self.moves[search]


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateSource:
    """Makes the plans of one step, by searches that know no budget; each has a name."""

    step: MovableStep
    recompute: RecomputeOf
    host_budget_bytes: int | None = None
    exact: bool = False
    """True: no layer recomputes a part of its rows."""
    solver: bool = True
    """False: the integer program is not asked."""
    memory: DecisionMemory = field(default_factory=DecisionMemory)
    _candidates: dict[Moves, Candidate] = field(default_factory=dict)
    _least_bytes: dict[Moves, int] = field(default_factory=dict)
    _least_costs: dict[tuple[Mode, ...], float] = field(default_factory=dict)

    @property
    def quick(self) -> tuple[str, ...]:
        """The searches that need no solver."""
        talks = facts_of(self.step).talks  # then no choice is slower than Lynx's
        return ("greedy", "near floor", "filled", *(["lynx-heu"] if talks else []))

    @property
    def all(self) -> tuple[str, ...]:
        """All searches."""
        solved = ["program"] if self.solver and self.step.layers else []
        lynx = ["lynx-opt"] if solved and facts_of(self.step).talks else []
        return (*self.quick, *solved, "named", "steady", "widened", *lynx)

    def moves(self, *searches: str) -> tuple[Moves, ...]:
        """The moves that ``searches`` give, before they are simulated."""
        all_moves: dict[Moves, None] = {}
        for search in searches:
            make = functools.partial(self._search, search)
            all_moves.update(dict.fromkeys(self.memory.once(search, make)))
        return tuple(all_moves)

    def _search(self, search: str) -> Iterable[Moves]:
        """The moves that the search of that name gives."""
        searches: dict[str, Callable[[], Iterable[Moves]]] = {
            "greedy": self._greedy_moves,
            "near floor": self._floor_moves,
            "filled": self._filled_moves,
            "program": self._program_moves,
            "named": self._named_moves,
            "steady": lambda: steady_moves(self.step, self.recompute),
            "widened": self._widened_moves,
        }
        if search in LYNX:
            return lynx_moves(self.step, search, self.recompute)
        return searches[search]()

    def plans(self, *searches: str) -> list[Candidate]:
        """The candidates of the moves that ``searches`` give."""
        return self.valid(self.moves(*searches))

    def least_bytes(self, moves: Moves) -> int:
        """What the plans of ``moves`` have alive at least."""
        if moves not in self._least_bytes:
            self._least_bytes[moves] = least_bytes(self.step, moves)
        return self._least_bytes[moves]

    def least_s(self, moves: Moves) -> float:
        """What the plans of ``moves`` cost at least."""
        key = moves.modes
        if key not in self._least_costs:
            self._least_costs[key] = least_cost_s(self.step, moves, self.recompute)
        return self._least_costs[key]

    def spared(self, candidate: Candidate) -> list[Candidate]:
        """The spared plans of ``candidate``: its copies to the host leave a share of the peak free.

        Only where copies have their time within the peak, so that as many bytes are alive.
        """
        moves, schedule = candidate.moves, candidate.moves.schedule
        if schedule.widen != 1 or schedule.spare or not candidate.host_bytes:
            return []
        others = (replace(schedule, spare=spare) for spare in SPARE_SHARES)
        return [self._candidate_of(replace(moves, schedule=other)) for other in others]

    def _floor_moves(self) -> Iterator[Moves]:
        """Search ``near floor``: the last plans of greedy, changed slot by slot where that helps.

        It does where regions allocate more beside the arena than there is room for in the backward.
        """
        modes = layer_modes(self.step, self.recompute, exact=self.exact)
        near_floor = []
        for price in COPY_PRICES:
            model = build_model(self.step, modes, NO_LAYER, price)
            near_floor += [model.moves(chosen, "greedy") for chosen in self._near_floor_of(model)]
        outside = (size for costs in modes for cost in costs for size in cost.recompute_outside)
        room = outside_room(self.step)
        least_room = min((room[at] for at in facts_of(self.step).backward_at), default=math.inf)
        yield from near_floor
        if max(outside, default=0) > least_room:
            yield from self._slot_by_slot(near_floor, modes)

    def _slot_by_slot(
        self, near_floor: Iterable[Moves], modes: Sequence[Sequence[ModeCost]]
    ) -> Iterator[Moves]:
        """Up to ``MAX_BY_SLOT`` unbeaten plans of ``near_floor``, made faster slot by slot.

        The changed plan may have no more bytes alive than the plan had. Those of fewest bytes come
        first: where the result for one is cheaper than the next plan, the next search starts from
        it. Each gets an equal share of the simulations that are left.
        """
        starts = [
            *_spread_over_bytes(_unbeaten(self.valid(near_floor)), MAX_BY_SLOT),
            *(self._smallest_steady() if self.host_is_short else ()),
        ]
        best: Candidate | None = None
        num_left = MAX_BY_SLOT_CALLS // max(1, len(self.step.problem.calls))
        starts.sort(key=lambda plan: plan.live_bytes)
        for num_done, plan in enumerate(starts):
            most_bytes = plan.live_bytes
            start = plan if best is None else min(best, plan, key=self._host_then_cost)
            best, num_simulated = slot_by_slot(
                self.step,
                start,
                modes,
                functools.partial(self._simulated_if_better, most_bytes),
                functools.partial(self._fits, most_bytes),
                num_left // (len(starts) - num_done),
            )
            num_left -= num_simulated
            yield best.moves
            if best.moves.schedule.widen > 1:  # what helps here may help with fewer bytes too
                yield replace(best.moves, schedule=replace(best.moves.schedule, widen=1.0))

    def _smallest_steady(self) -> list[Candidate]:
        """The steady plan of fewest bytes that fits the host; at most one.

        Where little may be copied, greedy's sequence may have no plan that is as small.
        """
        steady = (
            replace(plan.moves, policy="greedy", schedule=replace(plan.moves.schedule, widen=1.0))
            for plan in self.plans("steady")
        )
        fitting = [plan for plan in self.valid(steady) if self._has_host(plan)]
        return sorted(fitting, key=lambda plan: (plan.live_bytes, plan.cost_s))[:1]

    def _simulated_if_better(
        self, most_bytes: int, moves: Moves, below_s: float
    ) -> Candidate | None:
        """``moves`` simulated; None where they surely need more bytes, or cost ``below_s``."""
        with contextlib.suppress(InvalidPlan, UnsupportedGraph):
            if least_bytes(self.step, moves) <= most_bytes and self.least_s(moves) < below_s:
                return simulated(self.step, moves, self.recompute)
        return None

    def _fits(self, most_bytes: int, candidate: Candidate) -> bool:
        return candidate.live_bytes <= most_bytes and self._has_host(candidate)

    def _host_then_cost(self, candidate: Candidate) -> tuple[bool, float]:
        """The order of plans in which those that fit the host come first, the cheapest first."""
        return not self._has_host(candidate), candidate.cost_s

    def _has_host(self, candidate: Candidate) -> bool:
        most_bytes = self.host_budget_bytes
        return most_bytes is None or candidate.host_bytes <= most_bytes

    def _filled_moves(self) -> Iterator[Moves]:
        """Search ``filled``: greedy's plans, with layers that fill the rest of a short host."""
        most_bytes = self.host_budget_bytes
        if most_bytes is None or not self.host_is_short:
            return
        by_schedule = self._models((ONE_LAYER, TWO_LAYERS))
        models = [(model, self._spread_choices(model)) for model in by_schedule.values()]
        priced = (build_model(self.step, self._modes(), NO_LAYER, price) for price in COPY_PRICES)
        models += [(model, self._near_floor_of(model)) for model in priced]
        for model, choices in models:
            for chosen in dict.fromkeys(refilled(model, chosen, most_bytes) for chosen in choices):
                yield model.moves(chosen, "greedy")

    @property
    def host_is_short(self) -> bool:
        """True where the host has no room for all that may be copied."""
        most = self.host_budget_bytes
        return most is not None and most < sum(map(self._copyable_bytes, self.step.layers))

    def _modes(self) -> tuple[tuple[ModeCost, ...], ...]:
        """Per layer the modes that the integer program and search ``filled`` choose from."""
        fills_host = self.host_is_short
        return layer_modes(self.step, self.recompute, exact=self.exact, fills_host=fills_host)

    def _copyable_bytes(self, layer: Layer) -> int:
        """Bytes of the slots of a layer that may be copied."""
        slots = self.step.class_of(layer).slots
        return sum(slot.size_bytes for slot in slots if slot.can_offload)

    def _models(self, schedules: Iterable[Schedule]) -> dict[Schedule, StepModel]:
        modes = self._modes()
        return {schedule: build_model(self.step, modes, schedule) for schedule in schedules}

    def _named_moves(self) -> Iterator[Moves]:
        """Search ``named``: the papers' policies, with each alpha that they may have."""
        alphas = {"memo": QUANTA, "kwai": () if self.step.problem.has_one_turn else QUANTA}
        for policy in NAMED:
            for alpha in alphas.get(policy, (None,)):
                yield self.named_plan(policy, alpha).moves

    def _widened_moves(self) -> Iterator[Moves]:
        """Search ``widened``: named plans with more time for copies; MEMO's keep their schedule."""
        for moves in self.moves("named", "steady"):
            if moves.policy != "memo" and any(mode.slots(Action.OFFLOAD) for mode in moves.modes):
                yield replace(moves, policy="widened", schedule=replace(moves.schedule, widen=1.0))

    def named(self, policy: str, alphas: Sequence[float | None] = (None,)) -> list[Candidate]:
        """The plan of a named policy, for each of ``alphas``. Raises InvalidPlan: it is none."""
        return [self._candidate_of(self.named_plan(policy, alpha).moves) for alpha in alphas]

    def saved(self) -> list[Candidate]:
        """The plan that keeps everything; cheapest first several, where copies of weights stall."""
        if not self.step.problem.host_weights:
            return self.named("save")
        save_all = replace(self.step.save_all(), schedule=NO_LAYER)
        return sorted(self.valid([save_all]), key=lambda plan: (plan.cost_s, plan.live_bytes))

    def named_plan(self, policy: str, alpha: float | None = None) -> NamedPlan:
        """The decisions of a named policy, and what it could not do."""
        return named_moves(
            self.step,
            policy,
            self.recompute,
            alpha=alpha,
            host_budget_bytes=self.host_budget_bytes,
            exact=self.exact,
        )

    def valid(self, all_moves: Iterable[Moves]) -> list[Candidate]:
        """Their candidates; moves that make no program are left out, with a warning."""
        candidates: list[Candidate] = []
        for moves in all_moves:
            try:
                candidates += self._with_more_in_flight(moves)
            except InvalidPlan as error:
                log.warning("memo: a plan of policy %s is left out: %s", moves.policy, error)
        return candidates

    def _with_more_in_flight(self, moves: Moves) -> Iterator[Candidate]:
        """The candidate of ``moves``; while the last one stalls, another with more in flight."""
        untimed = functools.cache(lambda: untimed_program(self.step, moves, self.recompute))
        candidate = self._candidate_of(moves, untimed)
        yield candidate
        if not moves.schedule.widen:
            return
        widen = 1.0
        for step_share in IN_FLIGHT_STEPS:
            if candidate.next_widen > MOST_IN_FLIGHT or not _stalls(candidate):
                return  # more bytes gain nothing
            next_widen = math.ceil(candidate.next_widen * IN_FLIGHT_GRAIN) / IN_FLIGHT_GRAIN
            widen = max(widen + step_share, next_widen)
            schedule = replace(moves.schedule, widen=widen)
            candidate = self._candidate_of(replace(moves, schedule=schedule), untimed)
            yield candidate

    def _candidate_of(
        self, moves: Moves, untimed: Callable[[], UntimedProgram] | None = None
    ) -> Candidate:
        """``moves`` simulated, or with the figures that a decision for another budget gave."""
        if moves in self._candidates:
            return self._candidates[moves]
        key = moves, self._estimated_regions(moves)
        figures = self.memory.of_step.figures.get(key)
        if figures is None:
            candidate = simulated(self.step, moves, self.recompute, untimed)
            self.memory.of_step.figures[key] = candidate.figures
        else:
            make = functools.partial(self._program_of, moves)
            candidate = Candidate(moves=moves, make=make, **vars(figures))
        self._candidates[moves] = candidate
        return candidate

    def _program_of(self, moves: Moves) -> Problem:
        return program_of(self.step, moves, self.recompute)[0]

    def _estimated_regions(self, moves: Moves) -> tuple[str, ...]:
        """The recompute regions of ``moves`` that are not lowered: their costs will change."""
        classes = (layer.class_key for layer in self.step.layers)
        pairs = dict.fromkeys(zip(classes, moves.modes, strict=False))
        keys = (recompute_keys(self.step.classes[class_key], mode) for class_key, mode in pairs)
        all_keys = itertools.chain.from_iterable(keys)
        return tuple(sorted({key.region for key in all_keys if not self.recompute(key).is_lowered}))

    def _greedy_moves(self) -> Iterator[Moves]:
        """Search ``greedy``: plans of the greedy sequences of two schedules."""
        modes = layer_modes(self.step, self.recompute, exact=self.exact)
        for schedule in (ONE_LAYER, TWO_LAYERS):
            model = build_model(self.step, modes, schedule)
            for chosen in self._spread_choices(model):
                yield model.moves(chosen, "greedy")

    def _spread_choices(self, model: StepModel) -> Iterator[tuple[int, ...]]:
        """Modes of layers by number, from ``model``'s greedy sequence, evenly over it."""
        sequence = greedy_sequence(model, host_budget_bytes=self.host_budget_bytes)
        for number in _spread_over(len(sequence), MAX_GREEDY):
            yield sequence[number]

    def _near_floor_of(self, model: StepModel) -> Iterator[tuple[int, ...]]:
        """The last plans of ``model``'s greedy sequence, with other modes of the last layer too."""
        most_bytes = self.host_budget_bytes
        sequence = greedy_sequence(model, host_budget_bytes=most_bytes)
        if most_bytes is not None and model.host_bytes(sequence[-1]) > FULL_HOST * most_bytes:
            yield from sequence[-MAX_FULL_HOST:]  # whatever their peaks
            return
        smaller = list(ever_smaller(model, sequence))[-MAX_NEAR_FLOOR - 1 :]
        for (peak_before, _), (_, chosen) in itertools.pairwise([smaller[0], *smaller]):
            yield chosen
            for other in last_layer_kept(model, chosen, peak_before):
                if most_bytes is None or model.host_bytes(other) <= most_bytes:
                    yield other

    def _program_moves(self) -> Iterator[Moves]:
        """Search ``program``: the integer program's answers. Solving frees the GIL: threads."""
        models = self._models(BOUND_SHARES)
        save_bytes = models[ONE_LAYER].peak_bytes([0] * models[ONE_LAYER].num_layers)
        with ThreadPoolExecutor(max_workers=len(BOUND_SHARES)) as pool:
            solved = [
                pool.submit(self._solved, models[schedule], save_bytes, shares)
                for schedule, shares in BOUND_SHARES.items()
            ]
            for answer in solved:
                yield from answer.result()

    def _solved(self, model: StepModel, save_bytes: int, shares: Sequence[float]) -> list[Moves]:
        """Answers of one schedule, bounded at ``shares`` between its floor and ``save_bytes``."""
        host_bytes = self.host_budget_bytes
        lowest = lowest_peak(model, host_budget_bytes=host_bytes)
        if not lowest.status.has_solution:
            return []
        floor = model.peak_bytes(lowest.chosen)
        solutions = []
        for share in shares:
            bound_bytes = int(floor + share * (save_bytes - floor))
            solution = solve_modes(model, bound_bytes=bound_bytes, host_budget_bytes=host_bytes)
            chosen = solution.chosen if solution.status.has_solution else lowest.chosen
            solutions.append(model.moves(chosen, "program"))
        return solutions
