"""The fastest step under a bound in bytes, as a mixed-integer program over the whole step.

Symbols: layer i of n takes mode m: x[i,m] in {0, 1}. d[i,m], h[i,m], r[i,m]: seconds of its copies
out, copies back and recomputation. t[c]: when call c starts (stalls lie between calls); out[i] and
back[i]: when layer i's copies to and from the host have ended. mem[p]: bytes at point p when all is
saved; delta[i,m,p]: what mode m adds there (mostly less than 0).

    min  t[end] + COPY_WEIGHT * sum x[i,m] (d[i,m] + h[i,m])
                + TIE_WEIGHT * sum x[i,m] i / n, over the modes m that move something

Named constraints:
    one       every layer takes exactly one mode: sum_m x[i,m] = 1.
    bytes     no point of the step is above the bound: mem[p] + sum x[i,m] delta[i,m,p] <= bound.
    host      the host has room for what is copied: sum x[i,m] host[i,m] <= host budget.
    order     calls run one after the other: t[c+1] >= t[c] + (recompute before c) + seconds[c].
    out       a copy out begins after its forward: out[i] >= t[f(i)] + seconds[f(i)] + sum x d.
    out_lane  and after those of earlier layers: out[i] >= out[i-1] + sum x d.
    freed     the bytes of layer i are needed again from call freed(i) on: t[freed(i)] >= out[i].
    back      a copy back begins when it is issued: back[i] >= t[reload(i)] + sum x h.
    back_lane and after those of later layers: back[i] >= back[i+1] + sum x h.
    ready     the backward reads what came back: t[b(i)] >= back[i].
    ways      a class recomputes in few ways: x[i,m] <= y[keys(m)], sum y <= MAX_WAYS.

Times are minimised, so they take the values that replaying the lanes would give them. Layers of one
class in a row are bound into at most ``NUM_BUNDLES`` bundles that take one mode. The last two
layers stay single, because they are the first that are worth keeping.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from memo_compile.planners.policy.cheapest_first import MAX_WAYS
from memo_compile.planners.policy.model import COPY_WEIGHT, StepModel
from memo_compile.planners.policy.modes import ModeCost
from memo_compile.planners.solver import Linear, LinearProgram, SolveStatus, total, weighted

NUM_BUNDLES = 10
"""Most bundles of a run of equal layers: 120 binaries. 14 took twice as long and saved 0.02 %."""

SINGLE_LAYERS = 2
"""Layers at the end of a run that are bundles of their own, since they are kept first."""

GAP = 0.03
"""The search for a point of the frontier stops at a solution that is this share from the optimum,
counted in the seconds that are added to the save-all step."""

ADDED_GAP = 4e-4
"""It also stops at this distance from the optimum, as a share of the whole step."""

MAX_NODES = 50
"""Most nodes of the search tree. Most solves end earlier; where many layers are equally good,
proving the last thousandth would take 10 s."""

TIE_WEIGHT = 1e-6
"""Moving layer i costs i / n of this share of the step, so that of equal layers the first move."""

FLOOR_GAP = 1e-4
"""``GAP`` of the search for the smallest peak, as a share of it: 1 MiB of 10 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MilpSolution:
    """What a solve gave; ``chosen`` is empty without a solution."""

    status: SolveStatus
    chosen: tuple[int, ...] = ()
    """Per layer, the index of its mode."""


def solve_modes(
    model: StepModel, *, bound_bytes: int, host_budget_bytes: int | None = None, gap: float = GAP
) -> MilpSolution:
    """Modes of the fastest step within ``bound_bytes``; always the same."""
    program = _Program(model, gap)
    if not program.require_bytes(bound_bytes):
        return MilpSolution(status=SolveStatus.INFEASIBLE)
    program.require_host(host_budget_bytes)
    program.require_times()
    return program.solve()


def lowest_peak(model: StepModel, *, host_budget_bytes: int | None = None) -> MilpSolution:
    """The modes with the smallest peak, whatever they cost in time."""
    program = _Program(model, FLOOR_GAP)
    program.minimise_bytes()
    program.require_host(host_budget_bytes)
    return program.solve()


def make_bundles(model: StepModel, num_bundles: int = NUM_BUNDLES) -> list[tuple[int, ...]]:
    """Layers that take the same mode: runs of one class, cut into about equal parts."""
    runs: list[list[int]] = []
    for layer in range(model.num_layers):
        if runs and model.modes[runs[-1][0]] is model.modes[layer]:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    bundles: list[tuple[int, ...]] = []
    for run in runs:
        if len(run) <= num_bundles:
            bundles += [(layer,) for layer in run]
            continue
        body, tail = run[:-SINGLE_LAYERS], run[-SINGLE_LAYERS:]
        parts = num_bundles - SINGLE_LAYERS
        cuts = [len(body) * part // parts for part in range(parts + 1)]
        bundles += [tuple(body[low:high]) for low, high in itertools.pairwise(cuts)]
        bundles += [(layer,) for layer in tail]
    return bundles


class _Program:
    """The program being built; its units are the save-all step's seconds and its peak's bytes."""

    def __init__(self, model: StepModel, gap: float) -> None:
        self.model = model
        self.bundles = bundles = make_bundles(model)
        self.bundle_of = {layer: at for at, bundle in enumerate(bundles) for layer in bundle}
        self.deltas = [sum(model.deltas[layer] for layer in bundle) for bundle in bundles]
        """Per bundle an array (modes, points): what a mode of all its layers adds."""
        self.unit_s = sum(model.facts.call_s) or 1.0
        self.unit_bytes = float(max(model.base_bytes)) or 1.0
        self.program = LinearProgram(gap=gap, added_gap=min(gap, ADDED_GAP), max_nodes=MAX_NODES)
        self.x = [[self.program.choice() for _ in model.modes[bundle[0]]] for bundle in bundles]
        """Per bundle and mode the variable x."""
        for variables in self.x:  # one
            self.program.require(total(variables).equals(1))
        self._require_few_ways()

    def _require_few_ways(self) -> None:
        """Adds constraint ``ways``."""
        ways_of_classes: dict[str, dict[Any, list[Linear]]] = {}
        for at, bundle in enumerate(self.bundles):
            ways = ways_of_classes.setdefault(self.model.class_keys[bundle[0]], {})
            for variable, mode in zip(self.x[at], self.model.modes[bundle[0]], strict=True):
                if mode.keys:
                    ways.setdefault(mode.keys, []).append(variable)
        for ways in ways_of_classes.values():
            if len(ways) <= MAX_WAYS:
                continue
            is_used = []  # y
            for variables in ways.values():
                is_used.append(self.program.choice())
                for variable in variables:
                    self.program.require(variable <= is_used[-1])
            self.program.require(total(is_used) <= MAX_WAYS)

    def require_bytes(self, bound_bytes: int) -> bool:
        """Adds constraint ``bytes`` where it can bind; False when a point can never obey it."""
        if self._least_peak() > bound_bytes:
            return False
        for terms, base in self._byte_rows(bound_bytes):
            self.program.require(terms <= bound_bytes / self.unit_bytes - base)
        return True

    def minimise_bytes(self) -> None:
        """Adds constraint ``bytes`` with the bound as a variable, and that as the objective."""
        peak = self.program.variable()
        for terms, base in self._byte_rows(self._least_peak() - 1):
            self.program.require(terms - peak <= -base)
        self.program.minimise(peak)

    def _least_peak(self) -> int:
        """The highest point where each, by itself, has the fewest bytes of all choices."""
        fewest = sum(deltas.min(axis=0) for deltas in self.deltas)
        return int((self.model.base_bytes + fewest).max())

    def _byte_rows(self, bound_bytes: int) -> Iterator[tuple[Linear, float]]:
        """(sum x delta, base) of the points that can exceed the bound, in units.

        A point is left out when another one has at least its bytes whatever is chosen.
        """
        most = self.model.base_bytes + sum(deltas.max(axis=0) for deltas in self.deltas)
        points = np.flatnonzero(most > bound_bytes)
        points = points[np.argsort(-most[points], kind="stable")]
        weights = np.concatenate([deltas[:, points] for deltas in self.deltas]).T
        bases = self.model.base_bytes[points]
        kept: list[int] = []
        variables = list(itertools.chain.from_iterable(self.x))
        for row in range(len(points)):
            above = bases[kept] >= bases[row]
            if (above & (weights[kept] >= weights[row]).all(axis=1)).any():
                continue
            kept.append(row)
            nonzero = np.flatnonzero(weights[row])
            in_units = (float(weights[row, at]) / self.unit_bytes for at in nonzero)
            terms = weighted(in_units, (variables[at] for at in nonzero))
            yield terms, float(bases[row]) / self.unit_bytes

    def require_host(self, host_budget_bytes: int | None) -> None:
        """Adds constraint ``host``, where there is a budget."""
        if host_budget_bytes is None:
            return
        weights = (
            len(bundle) * mode.host_bytes / self.unit_bytes
            for bundle in self.bundles
            for mode in self.model.modes[bundle[0]]
        )
        copied = weighted(weights, itertools.chain.from_iterable(self.x))
        self.program.require(copied <= host_budget_bytes / self.unit_bytes)

    def _seconds(self, layer: int, seconds_of: Callable[[ModeCost], float]) -> Linear:
        """``sum_m x[i,m]`` times d, h or r, in units."""
        scaled = [seconds_of(mode) / self.unit_s for mode in self.model.modes[layer]]
        return weighted(scaled, self.x[self.bundle_of[layer]])

    def require_times(self) -> None:
        """Adds the times and the objective."""
        model, require = self.model, self.program.require
        layers = range(model.num_layers)
        start = [self.program.variable() for _ in range(len(model.facts.call_s) + 1)]
        out_end = [self.program.variable() for _ in layers]
        back_end = [self.program.variable() for _ in layers]
        call_s = [seconds / self.unit_s for seconds in model.facts.call_s]
        out_s = [self._seconds(i, lambda mode: mode.d2h_s(model.costs)) for i in layers]
        back_s = [self._seconds(i, lambda mode: mode.h2d_s(model.costs)) for i in layers]
        for call, seconds in enumerate(call_s):  # order
            # With a recomputation, t[c] is when it begins: `ready` then also waits before it.
            recomputing = [i for i in layers if model.facts.backward_at[i] == call]
            again_s = total([self._seconds(i, lambda mode: mode.recompute_s) for i in recomputing])
            require(start[call + 1] >= start[call] + again_s + seconds)
        for i in layers:
            forward = model.facts.forward_at[i]
            require(out_end[i] >= start[forward] + call_s[forward] + out_s[i])  # out
            require(start[model.freed_at[i]] >= out_end[i])  # freed
            require(back_end[i] >= start[model.reload_at[i]] + back_s[i])  # back
            require(start[model.facts.backward_at[i]] >= back_end[i])  # ready
            if i:
                require(out_end[i] >= out_end[i - 1] + out_s[i])  # out_lane
                require(back_end[i - 1] >= back_end[i] + back_s[i - 1])  # back_lane
        ties = [
            TIE_WEIGHT * max(bundle) / model.num_layers * variable
            for at, bundle in enumerate(self.bundles)
            for variable in self.x[at][1:]
        ]
        copies = [COPY_WEIGHT * copy_s for copy_s in (*out_s, *back_s)]
        self.program.minimise(total([start[-1], -sum(call_s), *copies, *ties]))

    def solve(self) -> MilpSolution:
        """The modes of the solution, and how the solve ended."""
        status = self.program.solve()
        if not status.has_solution:
            return MilpSolution(status=status)
        taken = [
            next(m for m, variable in enumerate(row) if self.program.integer_value(variable) == 1)
            for row in self.x
        ]
        chosen = tuple(taken[self.bundle_of[layer]] for layer in range(self.model.num_layers))
        return MilpSolution(status=status, chosen=chosen)
