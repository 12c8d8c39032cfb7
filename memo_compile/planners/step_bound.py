"""How fast a step can be under a budget at best: a bound that no plan of memo goes below.

At one point p of the step the bytes above the budget must be somewhere else, whatever the plan:
copied to the host before p and back after it, or not made yet. One linear program for each point,
over fractions of tensors, and the largest answer counts. It knows nothing of schedules, modes,
placement or layers as wholes, so it is never above the time of a plan.

Among ranks a second bound counts where it is larger: the computation with every wait for a
collective as late as its first reader, as if memory were free, and what computation loses beside
collectives (``comm_windows.least_of``). Recomputation and copies may hide in those waits, so that
the two do not add up, but for the forward's with the windows below, and for what an operator that
cannot be split takes beyond all collectives that may be in flight beside it.

What is not on the device at p and read before a later point q of the backward must come back
between the two, so that for points p, q, r, ... of the backward the seconds of such windows add up.
What is read first must come first (``bound_windows``), and a window with points in it has the same
decisions at all of them (``bound_stages``). Where few bytes are free windows take more than a
single point, and count. The forward has such windows too: what is made between p and q and has no
room at q must have left by then. A recomputation takes its seconds once: they count in the windows
of one half of the step, or of the other. In the forward its waits are at least the least ``u`` of
the program below for one of its points, whatever is recomputed. A third sum counts the copies of
both halves, which are the same ones (``both_waits_s``).

Nothing is copied back or made again twice. So what a recomputation reads stays on the device until
the backward reads it too; where there is no room for it, no plan recomputes the slot, or not both
the slot and what it is made from. An operator may allocate its result beside an arena that stays,
which has the most of such memory beside it all the time: plans are told apart by the recomputation
that adds most to it, and the best kind counts. All its plans have that much less for the arena.

Symbols, for each class of layers with n layers whose slot s is not in use at p:

    y[s], x[s]    layers whose slot s is offloaded, recomputed: x + y <= n
    z[o]          layers that run operator o a second time: z[maker of s] >= x[s], and for each
                  input i of o: z[i] >= z[o] - (layers that have i at hand)
    before, after seconds of computation in which a copy can run before p, and after it
    u, v          seconds for which the step stands still before p, and after it

    minimise      u + v + R,   R = sum z[o] seconds[o]
    bytes         sum size[s] (x[s] + y[s]) >= alive[p] - budget
    out, back     sum d2h[s] y[s] <= before + u,    sum h2d[s] y[s] <= after + v
    host          sum size[s] y[s] <= host budget

``before`` and ``after`` hold R as well where p lies in the backward.
"""

import functools
import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from memo_compile.errors import ConfigError
from memo_compile.planners import solver
from memo_compile.planners.bound_never import Never, never_again
from memo_compile.planners.bound_parts import (
    Life,
    lives_of,
    minimum_s,
    off_bytes,
    require_operators,
    size_of,
    slot_variables,
    unit_of_s,
)
from memo_compile.planners.bound_windows import (
    Away,
    backward_waits_s,
    both_waits_s,
    forward_waits_s,
)
from memo_compile.planners.comm_windows import Least, least_of_step
from memo_compile.planners.move_rules import StepFacts, closure_of, facts_of, recompute_seconds
from memo_compile.planners.policy.model import least_alive
from memo_compile.planners.solver import weighted
from memo_compile.step.movable import MovableStep, RecomputeRegion

MAX_POINTS = 16
"""Most linear programs that are solved for one bound; each takes milliseconds."""


def step_lower_bound_s(
    step: MovableStep,
    *,
    budget_bytes: int | None,
    host_budget_bytes: int | None = None,
    regions: Collection[RecomputeRegion] = (),
) -> float:
    """As of ``StepBound``, asked once."""
    bound = StepBound(
        step=step,
        budget_bytes=budget_bytes,
        host_budget_bytes=host_budget_bytes,
        regions=tuple(regions),
    )
    return bound.seconds()


@dataclass(frozen=True, kw_only=True)
class StepBound:
    """Seconds that every plan of ``step`` within the budgets takes at least."""

    step: MovableStep
    budget_bytes: int | None
    host_budget_bytes: int | None = None
    regions: tuple[RecomputeRegion, ...] = ()
    """Recomputations whose seconds are known: where one is faster than its operators together, each
    of these is taken to be as much faster."""

    def seconds(self, *, rough: bool = False, enough_s: float = math.inf) -> float:
        """The bound. What was found for it is kept for the next time.

        With ``rough`` fewer windows are looked at, and likewise where they make it ``enough_s``.
        Without a solver, or a budget, it is the computation alone, with what it waits for other
        ranks. Infinite where no plan can be.
        """
        at_least_s = self._beside(_NOTHING)
        if at_least_s >= enough_s:
            return at_least_s
        try:
            return self._least_s(rough=rough, enough_s=enough_s)
        except ConfigError:  # no engine on this machine
            return at_least_s

    @functools.cached_property
    def _facts(self) -> StepFacts:
        return facts_of(self.step)

    @functools.cached_property
    def _alone(self) -> Least | None:
        """With as much memory as there may be; None where nobody is talked to."""
        return least_of_step(self.step) if self._facts.talks else None

    def _beside(self, found: "_Found") -> float:
        """All seconds of the step, where that is ``found``."""
        alone, facts = self._alone, self._facts
        if alone is None:
            return sum(facts.call_s) + found.beyond_s(0.0)
        waits_s = max(0.0, alone.forward_s - facts.halves_s[0])
        at_least_s = sum(facts.call_s) + found.beyond_s(waits_s)
        return max(alone.step_s + found.unhidden_s, at_least_s)

    @functools.cached_property
    def _kinds(self) -> "tuple[_Kind, ...]":
        in_flight_s = self._alone.in_flight_s if self._alone else math.inf
        regions, budgets = self.regions, (self.budget_bytes, self.host_budget_bytes)
        return tuple(_kinds_of(self.step, self._facts, *budgets, regions, in_flight_s))

    def _least_s(self, *, rough: bool, enough_s: float) -> float:
        """What plans take of the kind that takes least.

        What all take is found with few windows first, with all where it may be the least.
        """
        if not self._kinds:
            return self._beside(_NOTHING)
        found = [(self._of_kind(at, False), at, rough) for at in range(len(self._kinds))]
        heapq.heapify(found)
        while True:
            least_s, at, is_all = found[0]
            if is_all or least_s >= enough_s or least_s == math.inf:
                return least_s
            heapq.heapreplace(found, (self._of_kind(at, True), at, True))

    def _of_kind(self, at: int, in_stages: bool) -> float:
        if (at, in_stages) not in self._known:
            found = self._kinds[at].found(in_stages=in_stages)
            self._known[at, in_stages] = self._beside(found)
        return self._known[at, in_stages]

    @functools.cached_property
    def _known(self) -> dict[tuple[int, bool], float]:
        """By the number of a kind, and by whether all windows were looked at."""
        return {}


class _Found(NamedTuple):
    """Seconds beyond computation that a step takes at least, in plans of one kind."""

    halves_s: tuple[tuple[float, float], ...]
    """In the forward, which waits for copies to the host, and in the backward, which waits for
    copies back: with recomputation counted in one of them, and in the other."""
    whole_s: float
    """Of the worst single point, or of both halves together."""
    unhidden_s: float
    """Of recomputation that no wait for other ranks hides."""

    def beyond_s(self, waits_s: float) -> float:
        """All of them, where the forward waits so long for other ranks."""
        halves = (max(waits_s, forward_s) + backward_s for forward_s, backward_s in self.halves_s)
        return max(self.whole_s, waits_s, *halves)


_NOTHING = _Found((), 0.0, 0.0)


class _Kind(NamedTuple):
    """What keeping the budgets takes in plans of one kind."""

    points: Sequence["_Added"]
    away: Away

    def found(self, *, in_stages: bool) -> _Found:
        """What the worst point takes, and the windows."""
        most = _Added(
            *(max(kind) for kind in zip(_Added(0.0, 0.0, 0.0), *self.points, strict=True))
        )
        if most.step_s == math.inf:
            return _Found((), math.inf, 0.0)
        halves_s = tuple(
            (
                max(most.forward_s, forward_waits_s(self.away, counts=counts)),
                backward_waits_s(self.away, counts=not counts, in_stages=in_stages),
            )
            for counts in (False, True)
        )
        whole_s = max(most.step_s, both_waits_s(self.away, in_stages=in_stages))
        return _Found(halves_s, whole_s, most.unhidden_s)


def _kinds_of(
    step: MovableStep,
    facts: StepFacts,
    budget_bytes: int | None,
    host_budget_bytes: int | None,
    regions: Collection[RecomputeRegion],
    in_flight_s: float,
) -> Iterator[_Kind]:
    """The kinds of plans; none where a bound knows of nothing but computation.

    Collectives of ``in_flight_s`` may hide a recomputation.
    """
    if budget_bytes is None or not step.problem.has_one_turn:  # in pipelines: of compute alone
        return
    alive, beginning = least_alive(step)
    excess, begin_excess = alive - budget_bytes, beginning - budget_bytes
    lives, discounts = list(lives_of(step, facts)), _discounts(step, regions)
    once = {life.value: life for life in reversed(lives)}  # the first layer moves what two share
    moved = [life for life in once.values() if size_of(step, life)]
    spare = off_bytes(step, moved, len(facts.call_s)) - excess
    hosts = host_budget_bytes, discounts, in_flight_s
    for never in never_again(step, moved, spare, regions):
        missing = excess + never.raised_bytes
        points = [
            _added_s(step, _point(facts, lives, never, at), int(missing[at]), *hosts)
            for at in _points(missing, facts.first_backward)
        ]
        if begin_excess + never.raised_bytes > 0:
            point = _point(facts, lives, never, facts.first_backward, is_begun=False)
            points.append(_added_s(step, point, begin_excess + never.raised_bytes, *hosts))
        free = np.maximum(0, spare - never.raised_bytes)
        yield _Kind(points, Away(step, facts, moved, free, never, discounts, {}, {}))


def _points(excess: Any, first_backward: int) -> list[int]:
    """Calls at which bytes are above the budget: the worst, and some spread over the step."""
    above = np.flatnonzero(excess > 0)
    if not len(above):
        return []
    spread = np.linspace(0, len(above) - 1, min(len(above), MAX_POINTS // 2)).astype(int)
    worst = above[np.argsort(-excess[above], kind="stable")][: MAX_POINTS // 2]
    near = above[np.argsort(abs(above - first_backward), kind="stable")][:2]
    return sorted({*above[spread].tolist(), *worst.tolist(), *near.tolist()})


def _discounts(
    step: MovableStep, regions: Collection[RecomputeRegion]
) -> dict[tuple[str, int], float]:
    """(class, operator) -> the least share of its seconds that it takes in a known region.

    A region takes its share of its operators' seconds, which is at least the sum of theirs by the
    least share of each.
    """
    found: dict[tuple[str, int], float] = {}
    for region in regions:
        key = region.key
        seconds = recompute_seconds(step, key)
        share = min(1.0, region.seconds / seconds) if seconds > 0 else 1.0
        for op in closure_of(step.classes[key.class_key], key.slots, key.passing):
            found[key.class_key, op] = min(share, found.get((key.class_key, op), 1.0))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """What may be off the device during one call, and the time around it."""

    num_off: "_Counts"
    """Layers that hold a slot and do not need it all through the call."""
    num_again: "_Counts"
    """Those of them that may recompute it."""
    before_s: float
    after_s: float
    in_backward: bool


_Counts = Mapping[str, Mapping[int, int]]
"""Class -> slot -> how many of its layers."""


def _point(
    facts: StepFacts, lives: Sequence[Life], never: Never, at: int, *, is_begun: bool = True
) -> _Point:
    """The point in a call; without ``is_begun`` before it."""
    off = [life for life in lives if life.may_be_off(at if is_begun else at - 0.5)]
    seconds = facts.call_s
    return _Point(
        num_off=_counted(off),
        num_again=_counted(life for life in off if (life.layer, life.slot) not in never.alone),
        before_s=sum(seconds[min(life.made for life in off) + 1 : at]) if off else 0.0,
        after_s=sum(seconds[at + is_begun : max(life.read for life in off)]) if off else 0.0,
        in_backward=at >= facts.first_backward,
    )


def _counted(lives: Iterable[Life]) -> _Counts:
    found: dict[str, Counter[int]] = {}
    for life in lives:
        found.setdefault(life.class_key, Counter())[life.slot] += 1
    return found


class _Added(NamedTuple):
    """Seconds beyond computation that a point takes at least."""

    forward_s: float
    """In the forward alone, whatever is recomputed."""
    step_s: float
    unhidden_s: float
    """Of operators that cannot be split: what they take beyond the collectives in flight."""


def _added_s(
    step: MovableStep,
    point: _Point,
    excess_bytes: int,
    host_budget_bytes: int | None,
    discounts: Mapping[tuple[str, int], float],
    in_flight_s: float,
) -> _Added:
    """The seconds beyond computation that the point's linear program finds."""
    model = solver.make_model("bound of a step")
    stalls = [model.add_var(name=name) for name in ("u", "v")]
    moved: list[tuple[int, Any, Any]] = []
    runs: list[tuple[float, Any]] = []
    unhidden: list[tuple[float, Any]] = []
    unit_s = unit_of_s(step)
    for class_key, num_off in point.num_off.items():
        cls = step.classes[class_key]
        x, y = slot_variables(model, cls, num_off, point.num_again.get(class_key, {}))
        for op, seconds, run in require_operators(model, cls, max(num_off.values()), x):
            least_s = seconds * discounts.get((class_key, op), 1.0)
            runs.append((least_s / unit_s, run))
            if least_s > in_flight_s and not cls.ops[op].row_wise:
                unhidden.append(((least_s - in_flight_s) / unit_s, run))
        moved += [(cls.slots[slot].size_bytes, x.get(slot, 0), y.get(slot, 0)) for slot in x | y]
    again = weighted([seconds for seconds, _ in runs], [run for _, run in runs])
    sizes = [size_bytes for size_bytes, _, _ in moved]
    offloaded = [y for _, _, y in moved]
    off = weighted(sizes, offloaded) + weighted(sizes, [x for _, x, _ in moved])
    model.add_constr(off >= float(excess_bytes), "bytes")
    rates = (step.costs.d2h_bytes_per_s, step.costs.h2d_bytes_per_s)
    for stall, seconds, rate, may_recompute in zip(
        stalls, (point.before_s, point.after_s), rates, (point.in_backward, True), strict=True
    ):
        if seconds == math.inf:
            continue
        room = seconds / unit_s + stall + (again if may_recompute else 0.0)
        copied = weighted([size / rate / unit_s for size in sizes], offloaded)
        model.add_constr(copied <= room)
    if host_budget_bytes is not None:
        model.add_constr(weighted(sizes, offloaded) <= float(host_budget_bytes), "host")
    step_s = minimum_s(model, stalls[0] + stalls[1] + again, unit_s)
    is_open = 0 < step_s < math.inf
    in_forward = is_open and not point.in_backward
    forward_s = minimum_s(model, stalls[0] + 0.0, unit_s) if in_forward else 0.0
    beyond = weighted(*zip(*unhidden, strict=True)) if unhidden and is_open else None
    return _Added(forward_s, step_s, 0.0 if beyond is None else minimum_s(model, beyond, unit_s))
