"""The plans among which a budget chooses, each with its simulated step and its bytes.

The set does not depend on the budget, which makes the choice monotone (``frontier.py``).
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
    Program,
    program_before,
    program_of,
    simulated,
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
from memo_compile.planners.policy.named import (
    NAMED,
    QUANTA,
    NamedPlan,
    named_moves,
    steady_moves,
)
from memo_compile.planners.policy.slot_by_slot import slot_by_slot
from memo_compile.step.movable import Action, Layer, Mode, MovableStep, Moves, Schedule
from memo_compile.step.problem import Problem

log = logging.getLogger("memo")

WIDE = Schedule(layers=2, widen=1.0)
"""A copy may last two layers, so that layers with much to copy use others' time."""

NEXT = Schedule(layers=1, widen=1.0)
"""A copy may last until the next layer ends, as with MEMO's rotating buffers."""

ONCE = Schedule(layers=0, widen=1.0)
"""Nothing is in flight beside a call, until waits and reloads are moved to where bytes allow it."""

SPARES = (0.02, 0.06)
"""Shares of the peak that copies to the host leave free, for plans that cannot be placed without
holes, where the next plan may take half as long again (Llama-3-70B, tp 8, near its floor: three
gathered inputs of 2 GiB, and copies of 0.25 between; 0.02 costs 0.2 % of the step, 0.06 12 %)."""

COPY_PRICES = (0.2, 1.0)
"""Near the floor some of each copy stalls, the more the fewer bytes are free: greedy's plans for
``ONCE`` are made for several prices of a second of copying, and simulated."""

NEAR_FLOOR = 3
"""The last plans of each such sequence are simulated, of those that have a smaller peak than all
before; with more bytes others are faster."""

FULL, NEAR_FULL = 0.9, 16
"""Where they fill this share of the host, so many are: from there on they only recompute more, and
each takes much longer than the one before."""

GRIDS = {
    NEXT: (0.001, 0.05, 0.12, 0.3),
    WIDE: (0.05, 0.12, 0.22, 0.45),
    ONCE: (0.001, 0.02),
}
"""Per schedule the bounds in bytes at which the program is solved, from its floor (0) to save-all
(1). They are denser near the floor, where plans are slow and a byte is worth most."""

WIDER = (0.002, 0.004, 0.002, 0.002, 0.004, 0.01, 0.02, 0.04, 0.08, 0.2, 0.4)
"""A plan that copies stall is also tried with more bytes in flight: one time after the other by at
least this share of its peak, and by as much as it takes to give a copy more time."""

MOST = 2.0
"""And at most with this many times its peak."""

GRAIN = 1000
"""Such times are rounded up to this part of one. So a plan that just gives a copy more time still
does when its regions are lowered and a few bytes larger."""

STALLED = 0.001
"""A plan that stalls for at most this share of its step is left as it is."""

MAX_GREEDY = 20
"""Most plans of one greedy sequence that are simulated; they are spread evenly over it."""

MAX_BY_SLOT = 6
"""Likewise of those near the floor that are changed slot by slot."""

MAX_BY_SLOT_CALLS = 300_000
"""Most calls of all steps that are simulated for it together: some five seconds."""


def _spread_over(count: int, most: int) -> list[int]:
    """At most so many of the first ``count`` numbers, evenly; the first and the last of them."""
    num_taken = min(most, count)
    return sorted({(count - 1) * at // max(1, num_taken - 1) for at in range(num_taken)})


def _unbeaten(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those of which no other needs as few bytes and seconds, the fewest bytes first."""
    plans: list[Candidate] = []
    for plan in sorted(candidates, key=lambda plan: (plan.live_bytes, plan.cost_s)):
        if not plans or plan.cost_s < plans[-1].cost_s:
            plans.append(plan)
    return plans


def _spread_bytes(plans: Sequence[Candidate], most: int) -> list[Candidate]:
    """At most so many of ``plans``, which need ever more bytes: the last in each equal share."""
    if not plans:
        return []
    first, last = plans[0].live_bytes, plans[-1].live_bytes
    shares = [first + (last - first) * at // (most - 1) for at in range(most)]
    below = ([plan for plan in plans if plan.live_bytes <= share] for share in shares)
    return list(dict.fromkeys(small_plans[-1] for small_plans in below))


def _stalls(candidate: Candidate) -> bool:
    return candidate.timeline.stall_s > STALLED * candidate.timeline.step_s


@dataclass(slots=True, kw_only=True)
class SearchMemory:
    """What was found for one step, one bound on the host and one ``exact``: for every budget."""

    moves: dict[tuple[str, ...], tuple[Moves, ...]] = field(default_factory=dict)
    """By which search found them, and what was known of the step's regions then."""
    figures: dict[tuple[Moves, tuple[str, ...]], Figures] = field(default_factory=dict)
    """Of moves, and of which of the regions that they recompute with are estimated."""


@dataclass(slots=True, kw_only=True)
class SearchedMoves:
    """The moves that were found for one step; a later round simulates them with better costs."""

    memory: SearchMemory = field(default_factory=SearchMemory)
    regions: tuple[str, ...] = ()
    """What is known of the step's regions: those that are lowered, and those that are refused."""
    found: dict[str, tuple[Moves, ...]] = field(default_factory=dict)
    """By the searches that were asked in an earlier round."""

    def once(self, search: str, make: Callable[[], Iterable[Moves]]) -> tuple[Moves, ...]:
        """All that ``make`` finds, where the same ``search`` has not found it before."""
        if search not in self.found:
            key = search, *self.regions
            if key not in self.memory.moves:
                self.memory.moves[key] = tuple(dict.fromkeys(make()))
            self.found[search] = self.memory.moves[key]
        return self.found[search]


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateSource:
    """Makes the plans of one step: by searches that know no budget, each by its name."""

    step: MovableStep
    recompute: RecomputeOf
    host_budget_bytes: int | None = None
    exact: bool = False
    solver: bool = True
    searched: SearchedMoves = field(default_factory=SearchedMoves)
    _evaluations: dict[Moves, Candidate] = field(default_factory=dict)
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
        talks = facts_of(self.step).talks
        lynx = ["lynx-opt"] if solved and talks else []
        return (*self.quick, *solved, "named", "steady", "widened", *lynx)

    def moves(self, *searches: str) -> tuple[Moves, ...]:
        """What the ``searches`` find, before it is simulated."""
        all_moves: dict[Moves, None] = {}
        for search in searches:
            make = functools.partial(self._search, search)
            all_moves.update(dict.fromkeys(self.searched.once(search, make)))
        return tuple(all_moves)

    def _search(self, search: str) -> Iterable[Moves]:
        searches: dict[str, Callable[[], Iterable[Moves]]] = {
            "greedy": self._greedy_moves,
            "near floor": self._floor_moves,
            "filled": self._filled_moves,
            "program": self._milp_moves,
            "named": self._named_moves,
            "steady": lambda: steady_moves(self.step, self.recompute),
            "widened": self._widened_moves,
        }
        if search in LYNX:
            return lynx_moves(self.step, search, self.recompute)
        return searches[search]()

    def plans(self, *searches: str) -> list[Candidate]:
        """What the ``searches`` find, simulated."""
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
        """``candidate`` with copies to the host that leave a share of the peak free.

        Only where they have their time within the peak, so that as many bytes are alive.
        """
        moves = candidate.moves
        schedule = moves.schedule
        if schedule.widen != 1 or schedule.spare or not candidate.host_bytes:
            return []
        others = (replace(schedule, spare=spare) for spare in SPARES)
        return [self._evaluated(replace(moves, schedule=other)) for other in others]

    def _floor_moves(self) -> Iterator[Moves]:
        modes = layer_modes(self.step, self.recompute, exact=self.exact)
        near_floor = []
        for price in COPY_PRICES:
            model = build_model(self.step, modes, ONCE, price)
            near_floor += [model.moves(chosen, "greedy") for chosen in self._near_floor_of(model)]
        outside = (size for costs in modes for cost in costs for size in cost.recompute_outside)
        room = outside_room(self.step)
        least_room = min((room[at] for at in facts_of(self.step).backward_at), default=math.inf)
        raises = max(outside, default=0) > least_room
        yield from near_floor
        if raises:
            yield from self._slot_by_slot(near_floor, modes)

    def _slot_by_slot(
        self, near_floor: Iterable[Moves], modes: Sequence[Sequence[ModeCost]]
    ) -> Iterator[Moves]:
        """Some of ``near_floor`` that none beats, with slots moved otherwise."""
        starts = [
            *_spread_bytes(_unbeaten(self.valid(near_floor)), MAX_BY_SLOT),
            *(self._smallest_steady() if self.is_short else ()),
        ]
        best: Candidate | None = None
        left = MAX_BY_SLOT_CALLS // max(1, len(self.step.problem.calls))
        starts.sort(key=lambda plan: plan.live_bytes)
        for done, plan in enumerate(starts):
            most_bytes = plan.live_bytes
            start = plan if best is None else min(best, plan, key=self._cost)
            best, num_simulated = slot_by_slot(
                self.step,
                start,
                modes,
                functools.partial(self._perhaps_simulated, most_bytes),
                functools.partial(self._fits, most_bytes),
                left // (len(starts) - done),
            )
            left -= num_simulated
            yield best.moves
            if best.moves.schedule.widen > 1:  # what helps here may help with fewer bytes too
                yield replace(best.moves, schedule=replace(best.moves.schedule, widen=1.0))

    def _smallest_steady(self) -> list[Candidate]:
        """The plan of fewest bytes of those that are the same for all costs and fit the host.

        Where little may be copied, greedy's sequence may have no plan that is as small.
        """
        steady = (
            replace(plan.moves, policy="greedy", schedule=replace(plan.moves.schedule, widen=1.0))
            for plan in self.plans("steady")
        )
        fitting = [plan for plan in self.valid(steady) if self._has_host(plan)]
        return sorted(fitting, key=lambda plan: (plan.live_bytes, plan.cost_s))[:1]

    def _perhaps_simulated(self, most_bytes: int, moves: Moves, below_s: float) -> Candidate | None:
        """``moves`` simulated; None where they surely need more bytes, or cost ``below_s``."""
        with contextlib.suppress(InvalidPlan, UnsupportedGraph):
            if least_bytes(self.step, moves) <= most_bytes and self.least_s(moves) < below_s:
                return simulated(self.step, moves, self.recompute)
        return None

    def _fits(self, most_bytes: int, candidate: Candidate) -> bool:
        return candidate.live_bytes <= most_bytes and self._has_host(candidate)

    def _cost(self, candidate: Candidate) -> tuple[bool, float]:
        """What fits the host first."""
        return not self._has_host(candidate), candidate.cost_s

    def _has_host(self, candidate: Candidate) -> bool:
        most = self.host_budget_bytes
        return most is None or candidate.host_bytes <= most

    def _filled_moves(self) -> Iterator[Moves]:
        most = self.host_budget_bytes
        if most is None or not self.is_short:
            return
        models = [(model, self._spread(model)) for model in self._models((NEXT, WIDE)).values()]
        near = (build_model(self.step, self._modes(), ONCE, price) for price in COPY_PRICES)
        models += [(model, self._near_floor_of(model)) for model in near]
        for model, choices in models:
            for chosen in dict.fromkeys(refilled(model, chosen, most) for chosen in choices):
                yield model.moves(chosen, "greedy")

    @property
    def is_short(self) -> bool:
        """True where the host has no room for all that may be copied."""
        most = self.host_budget_bytes
        return most is not None and most < sum(map(self._copied_bytes, self.step.layers))

    def _modes(self) -> tuple[tuple[ModeCost, ...], ...]:
        """Per layer the modes that the program chooses from."""
        return layer_modes(self.step, self.recompute, exact=self.exact, fills_host=self.is_short)

    def _copied_bytes(self, layer: Layer) -> int:
        """What a layer copies that copies all it can."""
        slots = self.step.class_of(layer).slots
        return sum(slot.size_bytes for slot in slots if slot.can_offload)

    def _models(self, schedules: Iterable[Schedule]) -> dict[Schedule, StepModel]:
        modes = self._modes()
        return {schedule: build_model(self.step, modes, schedule) for schedule in schedules}

    def _named_moves(self) -> Iterator[Moves]:
        alphas = {"memo": QUANTA, "kwai": () if self.step.problem.has_one_turn else QUANTA}
        for policy in NAMED:
            for alpha in alphas.get(policy, (None,)):
                yield self.named_plan(policy, alpha).moves

    def _widened_moves(self) -> Iterator[Moves]:
        """Named plans with more time for their copies; MEMO's keep two rotating buffers."""
        for moves in self.moves("named", "steady"):
            if moves.policy != "memo" and any(mode.slots(Action.OFFLOAD) for mode in moves.modes):
                yield replace(moves, policy="widened", schedule=replace(moves.schedule, widen=1.0))

    def named(self, policy: str, alphas: Sequence[float | None] = (None,)) -> list[Candidate]:
        """The plan of a named policy, for each of ``alphas``. Raises InvalidPlan: it is none."""
        return [self._evaluated(self.named_plan(policy, alpha).moves) for alpha in alphas]

    def saved(self) -> list[Candidate]:
        """The plans that keep everything, cheapest first.

        Where weights are on the host their copies hide the better the more bytes are in flight.
        """
        if not self.step.problem.host_weights:
            return self.named("save")
        kept = replace(self.step.save_all(), schedule=ONCE)
        return sorted(self.valid([kept]), key=lambda plan: (plan.cost_s, plan.live_bytes))

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
                candidates += self._with_wider(moves)
            except InvalidPlan as error:
                log.warning("memo: a plan of policy %s is left out: %s", moves.policy, error)
        return candidates

    def _with_wider(self, moves: Moves) -> Iterator[Candidate]:
        program = functools.cache(lambda: program_before(self.step, moves, self.recompute))
        candidate = self._evaluated(moves, program=program)
        yield candidate
        if not moves.schedule.widen:
            return
        wider, times = candidate, 1.0
        for step_share in WIDER:
            if wider.next_times > MOST or not _stalls(wider):  # more bytes gain nothing
                return
            times = max(times + step_share, math.ceil(wider.next_times * GRAIN) / GRAIN)
            schedule = replace(moves.schedule, widen=times)
            wider = self._evaluated(replace(moves, schedule=schedule), program=program)
            yield wider

    def _evaluated(self, moves: Moves, program: Callable[[], Program] | None = None) -> Candidate:
        """``moves`` simulated, or with the figures that are known from another budget."""
        if moves not in self._evaluations:
            self._evaluations[moves] = self._known_or_simulated(moves, program)
        return self._evaluations[moves]

    def _known_or_simulated(self, moves: Moves, program: Callable[[], Program] | None) -> Candidate:
        key = moves, self._estimated(moves)
        figures = self.searched.memory.figures.get(key)
        if figures is None:
            candidate = simulated(self.step, moves, self.recompute, program)
            self.searched.memory.figures[key] = candidate.figures
            return candidate

        def make() -> Problem:
            return program_of(self.step, moves, self.recompute)[0]

        return Candidate(moves=moves, figures=figures, make=make)

    def _estimated(self, moves: Moves) -> tuple[str, ...]:
        """The regions of ``moves`` that are not lowered: what is known of a region changes then."""
        classes = (layer.class_key for layer in self.step.layers)
        pairs = dict.fromkeys(zip(classes, moves.modes, strict=False))
        keys = (recompute_keys(self.step.classes[class_key], mode) for class_key, mode in pairs)
        regions = {
            key.region
            for key in itertools.chain.from_iterable(keys)
            if not self.recompute(key).is_lowered
        }
        return tuple(sorted(regions))

    def _greedy_moves(self) -> Iterator[Moves]:
        modes = layer_modes(self.step, self.recompute, exact=self.exact)
        for schedule in (NEXT, WIDE):
            model = build_model(self.step, modes, schedule)
            for chosen in self._spread(model):
                yield model.moves(chosen, "greedy")

    def _spread(self, model: StepModel) -> Iterator[tuple[int, ...]]:
        """Plans of greedy's sequence, spread evenly over it."""
        sequence = greedy_sequence(model, host_budget_bytes=self.host_budget_bytes)
        for number in _spread_over(len(sequence), MAX_GREEDY):
            yield sequence[number]

    def _near_floor_of(self, model: StepModel) -> Iterator[tuple[int, ...]]:
        """The last plans of greedy's sequence; of each some with other modes of the last layer."""
        sequence = greedy_sequence(model, host_budget_bytes=self.host_budget_bytes)
        most = self.host_budget_bytes
        if most is not None and model.host_bytes(sequence[-1]) > FULL * most:
            yield from sequence[-NEAR_FULL:]
            return
        smaller = list(ever_smaller(model, sequence))[-NEAR_FLOOR - 1 :]
        for (above, _), (_, small) in itertools.pairwise([smaller[0], *smaller]):
            yield small
            for other in last_layer_kept(model, small, above):
                if most is None or model.host_bytes(other) <= most:
                    yield other

    def _milp_moves(self) -> Iterator[Moves]:
        """The program's answers, floor to save-all; solving frees the GIL, hence threads."""
        models = self._models(GRIDS)
        top = models[NEXT].peak_bytes([0] * models[NEXT].num_layers)
        with ThreadPoolExecutor(max_workers=len(GRIDS)) as pool:
            solved = [
                pool.submit(self._solved, models[schedule], top, shares)
                for schedule, shares in GRIDS.items()
            ]
            for answer in solved:
                yield from answer.result()

    def _solved(self, model: StepModel, top: int, shares: Sequence[float]) -> list[Moves]:
        """One schedule's answers at each of ``shares`` between its floor and ``top`` bytes."""
        host_bytes = self.host_budget_bytes
        lowest = lowest_peak(model, host_budget_bytes=host_bytes)
        if not lowest.status.has_solution:
            return []
        floor = model.peak_bytes(lowest.chosen)
        solutions = []
        for share in shares:
            bound_bytes = int(floor + share * (top - floor))
            solution = solve_modes(model, bound_bytes=bound_bytes, host_budget_bytes=host_bytes)
            chosen = solution.chosen if solution.status.has_solution else lowest.chosen
            solutions.append(model.moves(chosen, "program"))
        return solutions
