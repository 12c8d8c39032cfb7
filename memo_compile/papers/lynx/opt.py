"""Lynx-OPT: an optimal schedule of a small graph, with recomputation behind communications.

Source: Lynx (arXiv 2406.08756), Table 2, with the corrections that docs/many-gpus.md argues; the
memory recurrence is Checkmate's. Phase t computes operator t for the first time. Symbols: S_ti =
output i is resident when phase t starts; Rc_ti = operator i is computed in phase t before operator
t; Ro_ti = it is recomputed behind operator t, a communication; U_ti = memory while operator i of
phase t runs; F_tdi = output d is freed after operator i of phase t.

With a token split, Z_ti = operator i is recomputed in phase t partly behind the communication: a
first part of its tokens, Xc_ti, before operator t and the rest, Ro_ti, behind it.
"""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memo_compile.papers.lynx.fields import Number
from memo_compile.papers.lynx.lynx_instance import OptInstance
from memo_compile.papers.lynx.lynx_replay import SPLIT_TOLERANCE, replay_opt
from memo_compile.papers.lynx.solution import (
    TIE_SLACK,
    Conflict,
    OptSolution,
    add_share,
    better_plan,
    exceeds,
    fraction_value,
    within_budget,
)
from memo_compile.planners.solver import (
    Linear,
    LinearProgram,
    SolveStatus,
    exact_program,
    total,
    weighted,
)

Matrix = Any
"""An array of the program's variables, and of ints where an entry is fixed; or of their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Schedule:
    """The program and its matrices; row = phase, entries beyond the phase's operator are 0.

    S has one row more than there are phases: what must be resident at the end. Without a token
    split Xc is 0 and Z is Ro; else Z is 1 where Ro > 0.
    """

    program: LinearProgram
    resident: Matrix  # S
    critical: Matrix  # Rc
    started: Matrix  # Xc
    overlapped: Matrix  # Ro
    hidden: Matrix  # Z
    bound: Linear | float
    """Limit on memory, in units of ``memory_unit``: a number, or a variable to be minimised."""
    memory_unit: float
    time_unit: float


def solve_opt(
    instance: OptInstance, *, token_split: bool = False, time_limit_s: float = math.inf
) -> OptSolution:
    """Returns the schedule with the least critical time; then the least hidden recomputation.

    ``token_split`` lets operators outside ``ops.whole`` be cut along their tokens; the schedule
    with whole operators is returned where cutting saves no time. It has passed :func:`replay_opt`.
    The cost is exponential in the worst case: meant for up to a dozen operators.
    """
    if conflict := _working_set_conflict(instance):
        return OptSolution(status=SolveStatus.INFEASIBLE, conflict=conflict)
    if instance.ops.count == 1:  # nothing to decide
        return _judged(instance, SolveStatus.OPTIMAL, [[0]], [[1.0]], [[0.0]])
    deadline_s = time.monotonic() + time_limit_s
    whole = _solve_one(instance, False, deadline_s)
    if not token_split or not instance.ops.comm:
        return whole
    return better_plan(whole, _solve_one(instance, True, deadline_s))


def _solve_one(instance: OptInstance, token_split: bool, deadline_s: float) -> OptSolution:
    """Returns the optimum of one of the two programs, with whole operators or with cut ones."""

    def attempt(budget: Number) -> OptSolution:
        """Solves under ``budget``; ``within_budget`` tightens it where rounding breaks it."""
        schedule = _build(instance, token_split, budget)
        costs = [t / schedule.time_unit for t in instance.ops.times]
        rows = [*schedule.critical, *schedule.started]
        critical_time = weighted(costs * len(rows), [x for row in rows for x in row])
        schedule.program.minimise(critical_time)
        status = schedule.program.solve(deadline_s - time.monotonic())
        if not status.has_solution:
            return OptSolution(status=status)
        solution = _read(schedule, instance, status)
        if exceeds(solution.peak, instance.budget):  # by rounding: tried with a tighter budget
            return solution
        return _with_least_hidden(schedule, instance, solution, deadline_s)

    return within_budget(instance.budget, attempt, lambda: _floor_conflict(instance, token_split))


def _with_least_hidden(
    schedule: _Schedule, instance: OptInstance, solution: OptSolution, deadline_s: float
) -> OptSolution:
    """Returns a solution as fast as ``solution`` that hides the least recomputation.

    Hidden time is free, so without this an output is recomputed behind a communication although
    there is memory to keep it. ``solution`` itself where the engine finds nothing in time.
    """
    if solution.status is not SolveStatus.OPTIMAL or not any(solution.windows):
        return solution
    program, costs = schedule.program, [t / schedule.time_unit for t in instance.ops.times]
    as_fast = solution.critical_time / schedule.time_unit + TIE_SLACK
    program.require(program.objective <= as_fast)
    hidden = [x for row in schedule.overlapped for x in row]
    program.minimise(weighted(costs * instance.ops.count, hidden))
    if not program.solve(deadline_s - time.monotonic()).has_solution:
        return solution
    less_hidden = _read(schedule, instance, solution.status)
    slower = exceeds(less_hidden.critical_time, solution.critical_time, SPLIT_TOLERANCE)
    return solution if slower or exceeds(less_hidden.peak, instance.budget) else less_hidden


def _build(instance: OptInstance, token_split: bool, budget: Number | None) -> _Schedule:
    """Returns the program without objective; without a budget its bound is a variable to minimise.

    Cell (t, i) is operator i in phase t: a variable for i < t. Phase t computes operator t (D3).
    """
    program = exact_program()
    ops, num_ops = instance.ops, instance.ops.count
    memory_unit = float(max(budget or 0, *ops.sizes, instance.static)) or 1.0
    make_share = functools.partial(add_share, program, ops.num_slices)

    def matrix(cells: set[tuple[int, int]], make: Callable[[], Linear]) -> Matrix:
        variables = np.zeros((num_ops, num_ops), dtype=object)
        for cell in sorted(cells):
            variables[cell] = make()
        return variables

    # Where i may be kept or computed again, hidden behind t, and cut in two of which t hides one.
    earlier = {(t, i) for t in range(num_ops) for i in range(t)}
    can_hide = {(t, i) for t, i in earlier if t in ops.comm and i not in ops.comm}
    splittable = {(t, i) for t, i in can_hide if i not in ops.whole} if token_split else set()
    choice = program.choice
    hidden, resident, critical = (matrix(cells, choice) for cells in (can_hide, earlier, earlier))
    np.fill_diagonal(critical, 1)
    started, overlapped = matrix(splittable, make_share), matrix(splittable, make_share)
    for cell in earlier - splittable:
        overlapped[cell] = hidden[cell]
    schedule = _Schedule(
        program=program,
        resident=np.vstack([resident, np.array([int(kept) for kept in instance.keep], object)]),
        critical=critical,
        started=started,
        overlapped=overlapped,
        hidden=hidden,
        bound=program.variable() if budget is None else budget / memory_unit,
        memory_unit=memory_unit,
        time_unit=float(max(ops.times)) or 1.0,
    )
    for cell in sorted(splittable):
        program.require((started[cell] + overlapped[cell]).equals(hidden[cell]))
    for t in range(num_ops):
        _add_causality(schedule, instance, t)
        _add_memory(schedule, instance, t)
    return schedule


def _add_causality(schedule: _Schedule, instance: OptInstance, t: int) -> None:
    """Requires of phase ``t`` that what it computes and keeps is there to be read and kept.

    D1c: before operator t an operator reads what is resident or computed before it. D1o: behind
    operator t also what is recomputed there. D2: the next phase starts with nothing that this one
    neither had nor made. C2: what is hidden fits the communication. An output is made at most
    once, and never when it is resident: a second copy would cost time or memory for nothing.
    """
    require, ops = schedule.program.require, instance.ops
    resident, critical = schedule.resident[t], schedule.critical[t]
    started, hidden = schedule.started[t], schedule.hidden[t]
    for i in range(t + 1):
        for j in ops.deps[i]:
            ready = total([critical[j], resident[j]])
            require(total([critical[i]]) <= ready)
            if isinstance(hidden[i], int):  # no variable: operator i cannot be hidden in phase t
                continue
            require(started[i] <= ready + started[j])
            require(hidden[i] <= ready + hidden[j])
        available = total([resident[i], critical[i], hidden[i]])
        require(total([schedule.resident[t + 1][i]]) <= available)
        if i < t:
            require(available <= 1)
    if t in ops.comm:
        load = weighted([c / schedule.time_unit for c in ops.times], schedule.overlapped[t])
        require(load <= ops.times[t] / schedule.time_unit)


def _add_memory(schedule: _Schedule, instance: OptInstance, t: int) -> None:
    """Requires that U of phase ``t`` stays within the bound while each operator runs.

    Operator i adds its output, or the part of it that is made before operator t. While t
    communicates there are also all outputs that are made behind it.
    """
    ops, unit = instance.ops, schedule.memory_unit
    sizes = [m / unit for m in ops.sizes]
    freed = _freed_variables(schedule, instance, t)
    level = weighted(sizes, schedule.resident[t]) + instance.static / unit
    for i in range(t + 1):
        level = level + weighted([sizes[i]] * 2, [schedule.critical[t][i], schedule.started[t][i]])
        used = level + weighted(sizes, schedule.overlapped[t]) if i == t else level
        schedule.program.require(used <= schedule.bound)
        for d in (*ops.deps[i], i):
            if (d, i) in freed:
                level = level - sizes[d] * freed[d, i]


def _freed_variables(
    schedule: _Schedule, instance: OptInstance, t: int
) -> dict[tuple[int, int], Linear]:
    """Returns F of phase ``t``, by (output d, operator i after which it is freed), for i < t.

    An output is freed at most once, only if it is there, and not before its last reader of the
    phase; never when the next phase or anything behind the communication wants it. All of that is
    0 or 1 and freeing only ever helps, so F may stay continuous; stating each obstacle for all
    earlier operators at once cuts off fractional solutions that free one output several times.
    """
    program, critical = schedule.program, schedule.critical[t]
    freed: dict[tuple[int, int], Linear] = {}
    for d in range(t):
        readers = [i for i, row in enumerate(instance.ops.deps) if d in row]
        last_uses = [i for i in (d, *readers) if i < t]
        for i in last_uses:
            freed[d, i] = program.variable(high=1.0)
            program.require(freed[d, i] <= critical[i])
        num_frees = total([freed[d, i] for i in last_uses])
        program.require(num_frees <= total([schedule.resident[t][d], critical[d]]))
        hidden_readers = [schedule.hidden[t][j] for j in readers if j < t]
        for obstacle in (schedule.resident[t + 1][d], *hidden_readers):
            program.require(num_frees + obstacle <= 1)
        for j in readers:
            if j <= t:
                freed_before = total([freed[d, i] for i in last_uses if i < j])
                program.require(freed_before + critical[j] <= 1)
    return freed


def _read(schedule: _Schedule, instance: OptInstance, status: SolveStatus) -> OptSolution:
    """Returns the schedule that the solved variables hold, pruned, with its replay's cost."""
    value_of = functools.partial(fraction_value, schedule.program)
    values, slices = np.vectorize(value_of, otypes=[float]), instance.ops.num_slices
    resident = values(schedule.resident[:-1]).round().astype(int)
    whole, overlapped = values(schedule.critical), values(schedule.overlapped, slices)
    critical: Matrix = np.where(whole, whole, values(schedule.started, slices))
    _prune(instance, resident, critical, overlapped)
    matrices = [matrix.tolist() for matrix in (resident, critical, overlapped)]
    return _judged(replace(instance, budget=math.inf), status, *matrices)


def _judged(instance: OptInstance, status: SolveStatus, *matrices: list[list[Any]]) -> OptSolution:
    """Returns the schedule of ``matrices`` (S, Rc, Ro) with the cost that its replay counts."""
    resident, critical, overlapped = (tuple(map(tuple, matrix)) for matrix in matrices)
    cost = replay_opt(instance, resident, critical, overlapped)
    return OptSolution(
        status=status,
        resident=resident,
        critical=critical,
        overlapped=overlapped,
        critical_time=cost.critical_time,
        peak=cost.peak,
    )


def _prune(instance: OptInstance, resident: Matrix, critical: Matrix, overlapped: Matrix) -> None:
    """Removes, in place, what nothing reads: the solver has no reason to leave it out."""
    num_ops, deps = instance.ops.count, instance.ops.deps
    read_later = {i for i in range(num_ops) if instance.keep[i]}
    for t in reversed(range(num_ops)):
        reads = read_later | {t}
        for i in reversed(range(num_ops)):
            if i not in reads:
                critical[t][i] = overlapped[t][i] = resident[t][i] = 0
            if critical[t][i] or overlapped[t][i]:
                reads |= set(deps[i])
        read_later = {i for i in range(num_ops) if resident[t][i]}


def _working_set_conflict(instance: OptInstance) -> Conflict | None:
    """Finds what alone exceeds the budget: static memory, an operator's inputs, what is kept."""
    ops, static, budget = instance.ops, instance.static, instance.budget
    needs = [("static", f"static memory {static}", static)]
    for i, row in enumerate(ops.deps):
        need = static + ops.sizes[i] + sum(ops.sizes[j] for j in row)
        text = f"operator {i} with its inputs {list(row)} and static memory {static} needs {need}"
        needs.append((f"operator_{i}", text, need))
    kept = [i for i in range(ops.count) if instance.keep[i] or i == ops.count - 1]
    need = static + sum(ops.sizes[i] for i in kept)
    text = f"outputs {kept} that must stay with static memory {static}: {need}"
    needs.append(("keep", text, need))
    for constraint, text, need in needs:
        if exceeds(need, budget):
            message = f"{text} > budget {budget}; raise the budget"
            return Conflict(constraint=constraint, message=message, floor=need, budget=budget)
    return None


def _floor_conflict(instance: OptInstance, token_split: bool) -> Conflict:
    """Finds the first operator that no schedule reaches within the budget, and what it needs."""
    for count in range(2, instance.ops.count + 1):
        prefix = _prefix(instance, count)
        status = _build(prefix, token_split, instance.budget).program.solve()
        if status is not SolveStatus.INFEASIBLE:
            continue
        schedule = _build(prefix, token_split, None)
        schedule.program.minimise(total([schedule.bound]))
        status = schedule.program.solve()
        assert status is SolveStatus.OPTIMAL, f"memory floor: {status}"
        floor = _read(schedule, prefix, status).peak
        message = (
            f"no schedule reaches operator {count - 1} with less than {floor} "
            f"> budget {instance.budget}; raise the budget"
        )
        name = f"reach_operator_{count - 1}"
        return Conflict(constraint=name, message=message, floor=floor, budget=instance.budget)
    raise AssertionError("infeasible, but every operator can be reached within the budget")


def _prefix(instance: OptInstance, count: int) -> OptInstance:
    """Returns the first ``count`` operators, with nothing to keep unless these are all."""
    ops = instance.ops
    if count == ops.count:
        return instance
    return replace(
        instance,
        ops=replace(
            ops,
            times=ops.times[:count],
            sizes=ops.sizes[:count],
            deps=ops.deps[:count],
            comm=frozenset(i for i in ops.comm if i < count),
            whole=frozenset(i for i in ops.whole if i < count),
        ),
        keep=(False,) * count,
    )
