"""The one interface to all placement solvers.

`auto` is greedy, then canonical search of the large buffers alone, then greedy's repair, then
canonical search of all, then the integer program where few buffers are left open. The paper plans a
layer's transients first and then the step; on training steps that is slower, never lower, and up to
12 % higher where offload and recompute make every layer a peak (docs/placement.md).
"""

import time
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np

from memo_compile.errors import ConfigError
from memo_compile.planners.placement import kernel
from memo_compile.planners.placement.compiled import has_numba
from memo_compile.planners.placement.effort import Effort
from memo_compile.planners.placement.greedy import ORDERS, greedy_offsets, repaired_offsets
from memo_compile.planners.placement.instance import FREE, Instance, Ints, build_instance
from memo_compile.planners.placement.mip import mip_offsets
from memo_compile.planners.placement.placement_problem import Placement, PlacementProblem
from memo_compile.planners.placement.portfolio import Searcher
from memo_compile.planners.solver import Engine, SolveStatus, require_engine

_MANY_BUFFERS = 1500
"""With more buffers `auto` takes a placement that is good enough, as it always does for steps."""
_GOOD_ENOUGH = 10_000
"""For training steps and many buffers `auto` stops one part in so many above the bound. The rest is
padding of single buffers; closing it can take as long as everything before, and an order that does
may hold the arena's end longer (GPT-2, 8 layers: 5e-6 of the arena cost 6 % of the step's physical
peak)."""
_HUGE = 10_000
"""With more buffers a greedy order takes a second or more, so `auto` begins with that by load: on
GPT-2, Gemma and T5 with 80 layers that by length misses the bound by 0.05 to 1.6 %."""
_REPAIR_SHARE = 0.5
"""Share of the time for repairing what greedy found, where the search may do better; with more than
`_HUGE` buffers that gets all."""
_SMALL_SHARE = 0.01
"""Small are the buffers that together never take more than this share of the bound. Where a large
one ends between multiples of the others' sizes for their sake, the holes are of no use (GPT 7B, tp
4, near its floor: 1.11 to 1.36 of the bound in a second, and 1.00 to 1.13 with the large first)."""
_LARGE_SHARE = 0.75
"""Share of the time for that."""
_MIP_MOST_BUFFERS = 60
"""Up to this many buffers `auto` lets the MIP try what the search left open."""
_EXPLAIN_S = 10.0
"""Seconds for leaving buffers out of what is said not to fit."""
_PROOF_NODES = 20_000
"""Most nodes of one search that tries to prove that fewer buffers do not fit either."""
_SEARCH_SHARE = 0.7
"""Share of the time that `auto` gives to the search where the MIP may follow."""


class Solver(Enum):
    """How offsets are found; the values are those of the command line."""

    AUTO = "auto"
    GREEDY = "greedy"
    MIP = "mip"
    SEARCH = "search"
    CBC = "cbc"
    GUROBI = "gurobi"


_ENGINES = {Solver.MIP: Engine.HIGHS, Solver.CBC: Engine.CBC, Solver.GUROBI: Engine.GUROBI}
"""What solves the integer program."""


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """The best offsets so far, what is proved, and what is sought."""

    instance: Instance
    target: int
    """Bytes sought: the capacity, else the lower bound."""
    enough: int
    """Bytes, at least the target, at which the work ends."""
    offsets: Ints
    bound: int
    """Bytes that every placement needs."""
    solver: str

    @property
    def height(self) -> int:
        """Bytes that the offsets take."""
        return self.instance.height(self.offsets)


def place(
    problem: PlacementProblem,
    *,
    solver: str = "auto",
    time_limit_s: float = 10.0,
    use_numba: bool | None = None,
) -> Placement:
    """Offsets for every buffer of ``problem``, as low as ``solver`` finds them with the effort.

    With a capacity it stops at the first placement that fits, else at the lower bound. A slow
    solver never fails the planning: what greedy found stands. ``time_limit_s`` are seconds of a
    quiet machine, counted by the work that is done (``effort``), so that a busy one gives the same
    answer; only the integer program goes by the clock, where it is asked for: ``mip`` (by HiGHS),
    ``cbc``, ``gurobi``. The first greedy placement always completes. ``use_numba`` is the search's:
    None chooses by what is installed and by size. Raises ConfigError: an unknown ``solver``, one
    that is not installed, or a negative limit.
    """
    try:
        chosen = Solver(solver)
    except ValueError:
        solvers = ", ".join(member.value for member in Solver)
        raise ConfigError(f"solver: expected one of {solvers}, got {solver!r}") from None
    if chosen in _ENGINES:
        require_engine(_ENGINES[chosen])
    if not time_limit_s >= 0:
        raise ConfigError(f"time_limit_s: expected at least 0 seconds, got {time_limit_s}")
    begin = time.perf_counter()
    instance, capacity = build_instance(problem), problem.capacity
    bound = _round_up(instance.lower_bound(), step_bytes(instance))
    if capacity is not None and bound > capacity:
        worst = int(np.argmax(instance.section_bounds()))
        alive = (instance.span_lower <= worst) & (worst < instance.span_upper)
        names = [instance.buffers[at].id for at in dict.fromkeys(instance.owner[alive])]
        return _infeasible(bound, _conflict(problem, names, by_search=False), "bound", begin)
    answer = _solve(instance, bound, Effort(time_limit_s), chosen, use_numba)
    if capacity is not None and answer.bound > capacity:
        names = [buffer.id for buffer in instance.buffers]
        conflict = _conflict(problem, names, by_search=True)
        return _infeasible(answer.bound, conflict, answer.solver, begin)
    return _feasible(answer, begin)


def step_bytes(instance: Instance) -> int:
    """Bytes between heights that can occur: all are sums of sizes, alignments, fixed offsets."""
    fixed = instance.fixed[instance.fixed != FREE]
    parts = np.concatenate((instance.size, instance.align[instance.align > 1], fixed))
    return int(np.gcd.reduce(parts)) if len(parts) else 1


def _solve(
    instance: Instance, bound: int, effort: Effort, solver: Solver, use_numba: bool | None
) -> _Answer:
    """Greedy first, then what ``solver`` asks for, until the target is reached."""
    problem, is_auto = instance.problem, solver is Solver.AUTO
    target = enough = bound if problem.capacity is None else problem.capacity
    if is_auto and problem.capacity is None:
        is_step = any(buffer.block is not None for buffer in problem.buffers)
        is_large = instance.num_buffers > _MANY_BUFFERS
        enough += target // _GOOD_ENOUGH if is_step or is_large else 0
    is_huge = is_auto and instance.num_buffers > _HUGE
    orders = {"load": ORDERS["load"], **ORDERS} if is_huge else ORDERS
    offsets = greedy_offsets(instance, enough, effort, orders)
    answer = _Answer(instance, target, enough, offsets, bound, "greedy")
    if solver is Solver.GREEDY or answer.height <= enough:
        return answer
    if is_auto and not is_huge and has_numba():
        answer = _large_first(answer, effort.part(_LARGE_SHARE * effort.left_s), use_numba)
        if answer.height <= enough:
            return answer
    if is_auto:
        share = 1.0 if is_huge else _REPAIR_SHARE
        effort_part = effort.part(share * effort.left_s)
        offsets = repaired_offsets(answer.instance, answer.offsets, answer.enough, effort_part)
        answer = replace(answer, offsets=offsets)
        if answer.height <= enough:
            return answer
    if solver in _ENGINES:
        return _mip(answer, effort, _ENGINES[solver])
    tries_mip = is_auto and instance.num_buffers <= _MIP_MOST_BUFFERS
    share = _SEARCH_SHARE if tries_mip else 1.0
    answer = _search(answer, effort.part(share * effort.left_s), use_numba)
    if tries_mip and answer.bound <= target < answer.height:
        answer = _mip(answer, effort, by_nodes=True)
    return answer


def _large_first(answer: _Answer, effort: Effort, use_numba: bool | None) -> _Answer:
    """The large buffers by a search of their own, and the small ones where they leave room.

    Small ones that stand out are searched with the large ones the next time.
    """
    whole = answer.instance
    if (whole.fixed != FREE).any():
        return answer
    large = whole.size > _largest_small(whole, int(_SMALL_SHARE * answer.bound))
    while large.any() and not large.all() and answer.height > answer.enough and not effort.is_over:
        placed_part = _of_part(answer, large, effort, use_numba)
        fixed = whole.fixed.copy()
        fixed[large] = placed_part.offsets
        filled = greedy_offsets(replace(whole, fixed=fixed), answer.enough, effort)
        if whole.height(filled) < answer.height:
            answer = replace(answer, offsets=filled, solver=placed_part.solver)
        stand_out = filled + whole.size > max(placed_part.height, answer.enough)
        if placed_part.height > placed_part.enough or not stand_out.any():
            break
        large |= stand_out
    return answer


def _of_part(answer: _Answer, part: Any, effort: Effort, use_numba: bool | None) -> _Answer:
    """Offsets for some of the buffers, ``part`` (N,) of bools, by greedy and search."""
    problem = answer.instance.problem
    ids = [answer.instance.buffers[at].id for at in np.flatnonzero(part)]
    instance = build_instance(problem, ids)
    bound = _round_up(instance.lower_bound(), step_bytes(instance))
    target = bound if problem.capacity is None else answer.target
    enough = target + answer.enough - answer.target
    offsets = greedy_offsets(instance, enough, effort)
    part_answer = replace(
        answer, instance=instance, target=target, enough=enough, offsets=offsets, bound=bound
    )
    return part_answer if part_answer.height <= enough else _search(part_answer, effort, use_numba)


def _largest_small(instance: Instance, most_bytes: int) -> int:
    """The largest size such that all buffers up to it never take more than ``most_bytes``."""
    largest, sizes = 0, np.unique(instance.size)
    while len(sizes):
        middle = len(sizes) // 2
        small = np.where(instance.size <= sizes[middle], instance.size, 0)
        if instance.loads(small).max() <= most_bytes:
            largest, sizes = int(sizes[middle]), sizes[middle + 1 :]
        else:
            sizes = sizes[:middle]
    return largest


def _mip(
    answer: _Answer, effort: Effort, engine: Engine = Engine.HIGHS, *, by_nodes: bool = False
) -> _Answer:
    """``answer`` or lower offsets by the integer program, begun at those of ``answer``."""
    result = mip_offsets(
        answer.instance, answer.offsets, answer.bound, effort, engine=engine, by_nodes=by_nodes
    )
    improved = replace(answer, offsets=result.offsets, solver="mip")
    if result.status is SolveStatus.OPTIMAL:
        return replace(improved, bound=improved.height)
    return improved if improved.height < answer.height else answer


def _search(answer: _Answer, effort: Effort, use_numba: bool | None) -> _Answer:
    """Narrows the gap between bound and height: at the target first, then in between.

    A capacity that no run reaches within its turn is raised halfway to the best height; a proof
    raises the bound; a success lowers the height, and the target gets its turn again.
    """
    if effort.is_over:  # no searcher: its tables are quadratic, and it may have to compile
        return answer
    searcher = Searcher(answer.instance, use_numba)  # which compiles, once for a machine
    effort.restart_clock()
    if not searcher.is_practical:
        return answer
    step, is_bounded = step_bytes(answer.instance), answer.instance.problem.capacity is not None
    capacity = target = answer.target
    turn = 0
    while answer.bound <= target and answer.height > max(answer.enough, target):
        if effort.is_over:
            break
        last_chance = capacity + step >= answer.height and turn > 0
        runs = 0 if is_bounded or last_chance else 6 + 2 * turn  # 0: as many as the effort allows
        outcome, offsets = searcher.decide(capacity, effort, runs)
        if outcome == kernel.FOUND:
            answer = replace(answer, offsets=offsets, solver="search")
            capacity, turn = target, turn + 1
        elif outcome == kernel.EXHAUSTED:
            answer = replace(answer, bound=_round_up(capacity + 1, step))
            target = target if is_bounded else max(target, answer.bound)
            capacity = max(capacity, target)
        elif not len(offsets):
            break
        else:
            middle = (capacity + answer.height) // 2
            raised = max(answer.bound, middle // step * step)
            # Every third turn is the target's.
            capacity = target if raised <= capacity or turn % 3 == 2 else raised
            turn += 1
    return answer


def _feasible(answer: _Answer, begin_s: float) -> Placement:
    """``answer`` as a placement, which may exceed the capacity (TIME_LIMIT)."""
    problem = answer.instance.problem
    status = SolveStatus.FEASIBLE
    if problem.capacity is not None and answer.height > problem.capacity:
        status = SolveStatus.TIME_LIMIT
    elif answer.height <= answer.bound:
        status = SolveStatus.OPTIMAL
    # The fixed offsets of empty buffers count in the height like all others.
    empty = max((b.offset or 0 for b in problem.buffers if b.size == 0), default=0)
    return Placement(
        offsets=MappingProxyType(answer.instance.offsets(answer.offsets)),
        height_bytes=max(answer.height, empty),
        lower_bound_bytes=answer.bound,
        status=status,
        seconds=time.perf_counter() - begin_s,
        solver=answer.solver,
    )


def _conflict(problem: PlacementProblem, names: list[str], *, by_search: bool) -> tuple[str, ...]:
    """The ids of few of the buffers ``names``, which do not fit the capacity together.

    Buffers are left out, the smallest first, as long as the rest is proved not to fit: by its
    bytes, or by a short search. There is always a proof of the answer, which may not be the least.
    """
    assert problem.capacity is not None, "a conflict is one with a capacity"
    size = {buffer.id: buffer.size for buffer in problem.buffers}
    kept = sorted(names, key=size.__getitem__)
    chunk, until_s = max(len(kept) // 2, 1), time.perf_counter() + _EXPLAIN_S
    while True:
        at = 0
        while at < len(kept) and time.perf_counter() < until_s:
            rest = kept[:at] + kept[at + chunk :]
            instance = build_instance(problem, rest)
            fits = instance.lower_bound() <= problem.capacity
            if fits and by_search and rest:
                searcher = Searcher(instance, use_numba=False)
                rank = next(searcher.ranks())
                outcome, _ = searcher.run(problem.capacity, rank, _PROOF_NODES, jump=False)
                fits = outcome != kernel.EXHAUSTED
            kept, at = (kept, at + chunk) if fits else (rest, at)
        if chunk == 1 or time.perf_counter() >= until_s:
            return tuple(sorted(kept))
        chunk = max(chunk // 2, 1)


def _infeasible(bound: int, conflict: tuple[str, ...], solver: str, begin_s: float) -> Placement:
    """The proof that nothing fits: the buffers ``conflict``, by which solver."""
    return Placement(
        offsets=MappingProxyType({}),
        height_bytes=0,
        lower_bound_bytes=bound,
        status=SolveStatus.INFEASIBLE,
        seconds=time.perf_counter() - begin_s,
        solver=solver,
        conflict=conflict,
    )


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
