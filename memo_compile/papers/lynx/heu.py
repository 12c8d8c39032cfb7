"""Lynx-HEU: what one layer of a stage keeps, and in which of five phases it recomputes the rest.

Source: Lynx (arXiv 2406.08756), equations 2 to 9, with the corrections that docs/many-gpus.md
argues. Symbols: S_i = output i is kept; R_ti = operator i (or a fraction of its tokens) is
recomputed in phase t; C, M = time and memory of an operator; Nl, Nb = layers of the stage and
micro-batches in flight. Phases 1, 2 are forward communications, 3, 4 those of the following
layer's backward, 5 is on demand. Inside the program times are in units of the longest operator
and memory in units of the budget.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from memo_compile.papers.lynx.fields import Number
from memo_compile.papers.lynx.lynx_instance import NUM_PHASES, NUM_WINDOWS, HeuInstance
from memo_compile.papers.lynx.lynx_replay import SPLIT_TOLERANCE, replay_heu
from memo_compile.papers.lynx.solution import (
    TIE_SLACK,
    Conflict,
    HeuSolution,
    Part,
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

ON_DEMAND = NUM_PHASES - 1
"""Index of the phase on the critical path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phases:
    """The program, its variables, and the linear forms that are minimised one after the other."""

    program: LinearProgram
    keep: list[Linear]
    recompute: list[list[Linear | int]]
    """``[phase][operator]``; the constant 0 where equation 6 or the last-stage rule forbids it."""
    critical_time: Linear
    recompute_time: Linear
    memory: Linear


def solve_heu(
    instance: HeuInstance,
    *,
    token_split: bool = False,
    break_ties: bool = True,
    time_limit_s: float = math.inf,
) -> HeuSolution:
    """Finds the least time on the critical path; then least recomputation, then least memory.

    ``token_split`` lets operators outside ``ops.whole`` be cut along their tokens; the plan with
    whole operators is returned where cutting them saves no time. Without ``break_ties`` the first
    optimum is returned. The solution has passed :func:`replay_heu`.
    """
    if everything := _keep_everything(instance):
        return everything
    deadline_s = time.monotonic() + time_limit_s
    whole = _solve_one(instance, False, break_ties, deadline_s)
    if not token_split or (whole.status.has_solution and whole.critical_time == 0):
        return whole
    split = _solve_one(instance, True, break_ties, deadline_s)
    return better_plan(whole, split)


def _solve_one(
    instance: HeuInstance, token_split: bool, break_ties: bool, deadline_s: float
) -> HeuSolution:
    """Returns the optimum of one of the two programs, with whole operators or with cut ones."""

    def attempt(budget: Number) -> HeuSolution:
        phases = _build(instance, token_split, budget)
        return _minimise(phases, instance, break_ties, deadline_s)

    return within_budget(instance.budget, attempt, lambda: _conflict(instance, token_split))


def memory_needed(instance: HeuInstance, *, token_split: bool = False) -> Number:
    """Returns the least budget under which ``instance`` has a plan, by the same program."""
    phases = _build(instance, token_split, None)
    phases.program.minimise(phases.memory)
    status = phases.program.solve()
    assert status is SolveStatus.OPTIMAL, f"memory floor: {status}"
    return _read(phases, instance, status).peak


def _keep_everything(instance: HeuInstance) -> HeuSolution | None:
    """Returns the plan without recomputation, if the budget allows it: no program is needed then.

    None also where a needed operator takes no time: recomputing it saves memory at equal time.
    """
    operators = zip(instance.ops.times[:-1], instance.need, strict=False)
    if any(is_needed and not seconds for seconds, is_needed in operators):
        return None
    keep, windows = (*instance.need[:-1], True), ((),) * NUM_PHASES
    solution = HeuSolution(status=SolveStatus.OPTIMAL, keep=keep, windows=windows)
    everything = _costed(instance, solution)
    return everything if everything.peak <= instance.budget else None


def _build(instance: HeuInstance, token_split: bool, budget: Number | None) -> _Phases:
    """Returns the program without objective; ``budget`` None leaves memory without a bound."""
    ops = instance.ops
    program = exact_program()
    keep = [program.choice() for _ in range(ops.count)]
    recompute = _recompute_variables(program, instance, token_split)
    program.require(keep[-1].equals(1))
    _add_availability(program, instance, keep, recompute)
    time_unit = float(max(*ops.times, 0)) or 1.0
    times = [t / time_unit for t in ops.times]
    for phase, limit in enumerate(instance.window_limits):
        load = weighted(times, recompute[phase])
        program.require(load <= limit / time_unit)  # equation 5
    memory_unit = float(max(instance.budget, *ops.sizes)) or 1.0
    memory = _memory(instance, keep, recompute, memory_unit)
    if budget is not None:
        program.require(memory <= float(budget) / memory_unit)  # equation 7
    return _Phases(
        program=program,
        keep=keep,
        recompute=recompute,
        critical_time=weighted(times, recompute[ON_DEMAND]),
        recompute_time=weighted(times * NUM_PHASES, [r for row in recompute for r in row]),
        memory=memory,
    )


def _recompute_variables(
    program: LinearProgram, instance: HeuInstance, token_split: bool
) -> list[list[Linear | int]]:
    """Returns R_ti, 0 for communications in windows (equation 6) and in windows of length 0."""
    ops, limits = instance.ops, (*instance.window_limits, math.inf)

    def variable(phase: int, i: int) -> Linear | int:
        """Returns R of operator ``i`` in ``phase``, counted from 0: a choice, a share, or 0."""
        is_barred = phase < NUM_WINDOWS and (i in ops.comm or limits[phase] == 0 < ops.times[i])
        if is_barred or (phase < 2 and not instance.forward_windows):  # 0 and 1 are forwards'
            return 0
        if token_split and i not in ops.whole:
            return add_share(program, ops.num_slices)
        return program.choice()

    return [[variable(phase, i) for i in range(ops.count)] for phase in range(NUM_PHASES)]


def _add_availability(
    program: LinearProgram,
    instance: HeuInstance,
    keep: list[Linear],
    recompute: list[list[Linear | int]],
) -> None:
    """Requires equations 3 (what backward reads is kept or recomputed once), 4 (inputs first).

    Fractions are prefixes of the tokens, so the same inequality states causality for them.
    """
    for i in range(instance.ops.count):
        recomputed = total([row[i] for row in recompute])
        program.require(recomputed + keep[i] <= 1)
        if instance.need[i]:
            program.require(recomputed + keep[i] >= 1)
        for phase in range(NUM_PHASES):
            made_by_now = total([row[i] for row in recompute[: phase + 1]])
            for j in instance.ops.deps[i]:
                input_by_now = total([keep[j], *(row[j] for row in recompute[: phase + 1])])
                program.require(made_by_now <= input_by_now)


def _memory(
    instance: HeuInstance, keep: list[Linear], recompute: list[list[Linear | int]], unit: float
) -> Linear:
    """Returns the left side of equation 7' in units of ``unit``.

    Kept outputs count in every layer and micro-batch in flight, what phases 1 and 2 rebuild in
    every layer of one micro-batch, what phases 3 to 5 rebuild in one layer.
    """
    layers = instance.num_layers
    copies = (layers * instance.num_batches, layers, layers, 1, 1, 1)
    weights = [count * (m / unit) for count in copies for m in instance.ops.sizes]
    rows: list[Sequence[Linear | int]] = [keep, *recompute]
    return weighted(weights, itertools.chain.from_iterable(rows)) + instance.static / unit


def _minimise(
    phases: _Phases, instance: HeuInstance, break_ties: bool, deadline_s: float
) -> HeuSolution:
    """Minimises the critical path, then each tie-break with the earlier goals held fixed."""
    best: HeuSolution | None = None
    status = SolveStatus.TIME_LIMIT
    program = phases.program
    goals = (phases.critical_time, phases.recompute_time, phases.memory)
    for goal in goals if break_ties else goals[:1]:
        program.minimise(goal)
        status = program.solve(deadline_s - time.monotonic())
        if not status.has_solution:
            break
        solution = _read(phases, instance, status)
        if best and exceeds(solution.critical_time, best.critical_time, SPLIT_TOLERANCE):
            break
        best = solution if best is None else dataclasses.replace(solution, status=best.status)
        # Of a peak above the budget, by rounding, ``within_budget`` tries a tighter one.
        if status is not SolveStatus.OPTIMAL or solution.peak > instance.budget:
            break
        program.require(goal <= program.value(goal) + TIE_SLACK)
    return best or HeuSolution(status=status)


def _read(phases: _Phases, instance: HeuInstance, status: SolveStatus) -> HeuSolution:
    """Returns what the solved variables hold, with exact times and peak, not yet judged."""
    keep = tuple(bool(phases.program.integer_value(s)) for s in phases.keep)
    slices = instance.ops.num_slices
    values = [[fraction_value(phases.program, r, slices) for r in row] for row in phases.recompute]
    windows = tuple(
        tuple(Part(op=i, fraction=x) for i, x in enumerate(row) if x > 0) for row in values
    )
    return _costed(instance, HeuSolution(status=status, keep=keep, windows=windows))


def _costed(instance: HeuInstance, solution: HeuSolution) -> HeuSolution:
    """Returns ``solution`` with its replay's cost; its peak may exceed the budget."""
    unbounded = dataclasses.replace(instance, budget=math.inf)
    cost = replay_heu(unbounded, solution.keep, solution.windows)
    return dataclasses.replace(solution, **dataclasses.asdict(cost))


def _conflict(instance: HeuInstance, token_split: bool) -> Conflict | None:
    """Finds the first part of equation 7' that alone exceeds the budget; None when all fits."""
    static, budget = instance.static, instance.budget
    layers, batches, output = instance.num_layers, instance.num_batches, instance.ops.sizes[-1]
    if static > budget:
        name, floor = "static", static
        message = f"static memory {static} > budget {budget}; raise the budget"
    elif exceeds(kept := static + layers * batches * output, budget):
        name, floor = "layer_outputs", kept
        message = (
            f"static {static} + layer outputs kept by {layers} layers x {batches} micro-batches "
            f"x {output} = {kept} > budget {budget}; raise the budget or use fewer layers"
        )
    elif exceeds(rebuilt := memory_needed(instance, token_split=token_split), budget):
        name, floor = "layer_rebuild", rebuilt
        message = (
            f"least memory of any plan {rebuilt} (static {static}, kept layer outputs "
            f"{kept - static}, rebuilding one layer {rebuilt - kept}) > budget {budget}; "
            "raise the budget or use fewer layers"
        )
    else:
        return None
    return Conflict(constraint=name, message=message, floor=floor, budget=budget)
