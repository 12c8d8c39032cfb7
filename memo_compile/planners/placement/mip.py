"""The paper's program: dynamic storage allocation as a MIP, for a layer's worth of buffers.

Source: MEMO (arXiv 2407.12117), level 1 and 2 of its bi-level planning. Legend:

    M        height of the arena, minimised
    A_i      offset of buffer i, S_i its size
    z_ij     1 when i lies below j, for each pair that is live together

    fits     A_i + S_i <= M
    below    A_i + S_i <= A_j + (1 - z_ij) C,   A_j + S_j <= A_i + z_ij C     C = a known height
    bound    M >= the live-bytes lower bound
    twins    buffers with the same life, size and alignment lie in their given order

All quantities are in units of the common divisor of sizes, alignments and fixed offsets, so the
big-M stays small. A_i is an integer multiple of its alignment where that exceeds the unit.
"""

from dataclasses import dataclass

import numpy as np

from memo_compile.planners.placement.effort import SLOWER, Effort
from memo_compile.planners.placement.instance import FREE, Instance, Ints, Overlaps, find_overlaps
from memo_compile.planners.solver import Engine, Linear, LinearProgram, SolveStatus

MOST_PAIRS = 30_000
"""With more pairs the program is not even written down: it would not beat its warm start."""

NODES_PER_S, MOST_NODES = 50, 10**6
"""Nodes of the search tree that stand for a second of a quiet machine, and the most of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MipResult:
    """Offsets (N,) no higher than the start, and whether a lower height is proved impossible."""

    offsets: Ints
    status: SolveStatus


def mip_offsets(
    instance: Instance,
    start: Ints,
    bound: int,
    effort: Effort,
    *,
    engine: Engine = Engine.HIGHS,
    by_nodes: bool = False,
) -> MipResult:
    """Solves the program from the valid offsets ``start`` (N,); ``bound`` in bytes.

    Offsets are read as an order and sunk in exact integers, so that the solver's tolerances cannot
    make two buffers overlap. ``by_nodes`` bounds the search tree in the place of the clock.
    """
    overlaps = find_overlaps(instance)
    if len(overlaps.other) // 2 > MOST_PAIRS:
        return MipResult(offsets=start, status=SolveStatus.TIME_LIMIT)
    program, offsets = _program(instance, overlaps, start, bound)
    program.engine = engine
    if by_nodes:
        program.max_nodes = int(min(NODES_PER_S * effort.left_s, MOST_NODES))
    status = program.solve(effort.left_s * (SLOWER if by_nodes else 1))
    if not status.has_solution:
        return MipResult(offsets=start, status=status)
    low = np.array([program.value(offset) for offset in offsets])
    sunk = sink(instance, overlaps, np.lexsort((np.arange(len(low)), low)))
    claimed_height = round(program.value(program.objective)) * _unit(instance)
    if sunk is None or instance.height(sunk) > instance.height(start):
        return MipResult(offsets=start, status=SolveStatus.FEASIBLE)
    if instance.height(sunk) > claimed_height:  # the order does not prove what the solver did
        status = SolveStatus.FEASIBLE
    return MipResult(offsets=sunk, status=status)


def sink(instance: Instance, overlaps: Overlaps, order: Ints) -> Ints | None:
    """Offsets (N,) of buffers stacked in ``order`` (N,); None where a fixed one cannot stay."""
    offsets = np.where(instance.fixed == FREE, 0, instance.fixed)
    position = np.argsort(order)
    for item in order:
        low, align = int(offsets[item]), int(instance.align[item])
        if instance.fixed[item] != FREE and low > instance.fixed[item]:
            return None
        low = -(-low // align) * align
        offsets[item] = low
        near = overlaps.other[overlaps.start[item] : overlaps.start[item + 1]]
        above = near[position[near] > position[item]]
        offsets[above] = np.maximum(offsets[above], low + instance.size[item])
    return offsets


def _unit(instance: Instance) -> int:
    """Bytes: the common divisor of everything that an offset can be made of."""
    fixed = instance.fixed[instance.fixed != FREE]
    return int(np.gcd.reduce(np.concatenate((instance.size, instance.align, fixed)))) or 1


def _program(
    instance: Instance, overlaps: Overlaps, start: Ints, bound: int
) -> tuple[LinearProgram, list[Linear]]:
    """The program of this file's head, and its offsets in units."""
    unit = _unit(instance)
    cap = instance.height(start) // unit
    size = [int(s) // unit for s in instance.size]
    program = LinearProgram(gap=0.0, added_gap=0.5)
    height = program.variable(low=-(-bound // unit), high=cap)
    program.begin_at(height, cap)
    program.minimise(height)
    offsets = []
    for i in range(instance.num_buffers):
        step = int(instance.align[i]) // unit
        free = instance.fixed[i] == FREE
        low, high = (0, cap // step) if free else (instance.fixed[i] // instance.align[i],) * 2
        multiple = program.variable(low=int(low), high=int(high), is_integer=step > 1)
        program.begin_at(multiple, float(start[i] // instance.align[i]))
        offsets.append(multiple * step)
        program.require(offsets[i] + size[i] <= height)  # fits
    for i in range(instance.num_buffers):
        for j in overlaps.other[overlaps.start[i] : overlaps.start[i + 1]].tolist():
            if j < i:
                continue
            if _are_twins(instance, i, j):
                program.require(offsets[i] + size[i] <= offsets[j])  # twins
                continue
            is_below = program.choice()
            program.begin_at(is_below, float(start[i] < start[j]))
            program.require(offsets[i] + size[i] <= offsets[j] + cap * (1 - is_below))  # below
            program.require(offsets[j] + size[j] <= offsets[i] + cap * is_below)
    return program, offsets


def _are_twins(instance: Instance, i: int, j: int) -> bool:
    """True when swapping the two free buffers changes nothing."""
    a, b = instance.buffers[i], instance.buffers[j]
    return (
        (a.size, a.offset, b.offset) == (b.size, None, None)
        and instance.align[i] == instance.align[j]
        and a.segments() == b.segments()
    )
