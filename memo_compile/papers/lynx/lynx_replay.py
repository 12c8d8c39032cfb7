"""Executes a plan of either program step by step: an independent judge of memory and causality.

Nothing here knows the programs. A layer plan is run on a stage with its micro-batches, a schedule
is run operator by operator; each raises InvalidPlan with the step at which the plan breaks, and
returns times and peak counted on the way.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from memo_compile.errors import InvalidPlan
from memo_compile.papers.lynx.fields import Number
from memo_compile.papers.lynx.lynx_instance import NUM_PHASES, NUM_WINDOWS, HeuInstance, OptInstance
from memo_compile.papers.lynx.solution import Part, exceeds

SPLIT_TOLERANCE = 1e-6
"""Fractions of tokens may be wrong by this much rounding: a hundredth of a token of 10,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What executing a plan cost."""

    critical_time: Number
    peak: Number
    recompute_time: Number = 0
    """Seconds of recomputation, for a layer plan."""


def replay_heu(
    instance: HeuInstance, keep: Sequence[bool], windows: Sequence[Sequence[Part]]
) -> Replayed:
    """Recomputes one layer phase by phase, then fills and drains a stage with such layers.

    Raises InvalidPlan: an input is missing, a window overflows, a communication or a kept output is
    recomputed, something that backward reads is absent, or the budget is exceeded.
    """
    ops = instance.ops
    if len(keep) != ops.count or len(windows) != NUM_PHASES:
        raise InvalidPlan(f"replay: expected {ops.count} operators and {NUM_PHASES} phases")
    if not keep[-1]:
        raise InvalidPlan("replay: the layer's output is not kept")
    progress = [1.0 if kept else 0.0 for kept in keep]  # part of each output that is there
    loads = [_run_phase(instance, t, parts, progress) for t, parts in enumerate(windows)]
    for i, needed in enumerate(instance.need):
        if needed and progress[i] < 1 - SPLIT_TOLERANCE:
            raise InvalidPlan(f"replay: backward reads operator {i}, present: {progress[i]:.6g}")
    peak = _stage_peak(instance, keep, windows)
    if exceeds(peak, instance.budget):
        raise InvalidPlan(f"replay: peak {peak} exceeds the budget {instance.budget}")
    return Replayed(critical_time=loads[-1], recompute_time=sum(loads), peak=peak)


def _run_phase(
    instance: HeuInstance, phase: int, parts: Sequence[Part], progress: list[float]
) -> Number:
    """Recomputes ``parts`` in operator order, advances ``progress``, returns the time it takes."""
    ops, where = instance.ops, f"replay: phase {phase + 1}"
    load: Number = 0
    for part in sorted(parts, key=lambda part: part.op):
        i = part.op
        if phase < NUM_WINDOWS and i in ops.comm:
            raise InvalidPlan(f"{where}: recomputes communication {i} inside a window")
        if part.fraction < 1 and i in ops.whole:
            raise InvalidPlan(f"{where}: cuts operator {i}, which mixes tokens")
        progress[i] += part.fraction
        if progress[i] > 1 + SPLIT_TOLERANCE:
            raise InvalidPlan(f"{where}: operator {i} is kept or recomputed already")
        for j in ops.deps[i]:
            needed = 1.0 if i in ops.whole else progress[i]
            if progress[j] < needed - SPLIT_TOLERANCE:
                raise InvalidPlan(f"{where}: operator {i} reads operator {j}, which is absent")
        load += _amount(ops.times[i], part.fraction)
    limit = instance.window_limits[phase] if phase < NUM_WINDOWS else load
    if parts and phase < 2 and not instance.forward_windows:
        raise InvalidPlan(f"{where}: the last stage has no forward windows")
    if exceeds(load, limit, SPLIT_TOLERANCE):
        raise InvalidPlan(f"{where}: {load} of work in a window of {limit}")
    return load


def _stage_peak(
    instance: HeuInstance, keep: Sequence[bool], windows: Sequence[Sequence[Part]]
) -> Number:
    """Returns the most memory while the stage fills with micro-batches and rebuilds a layer.

    Before the first backward every layer of that micro-batch has what phases 1 and 2 rebuilt;
    the backward of one layer then adds what phases 3, 4 and 5 rebuild for it, and only then
    anything is freed.
    """
    sizes = instance.ops.sizes
    kept = sum(size for size, is_kept in zip(sizes, keep, strict=True) if is_kept)
    filled = instance.static + instance.num_batches * instance.num_layers * kept
    early = [_amount(sizes[part.op], part.fraction) for phase in windows[:2] for part in phase]
    late = [_amount(sizes[part.op], part.fraction) for phase in windows[2:] for part in phase]
    return filled + instance.num_layers * sum(early) + sum(late)


def _amount(whole: Number, fraction: float) -> Number:
    return whole if fraction == 1 else whole * fraction


def replay_opt(
    instance: OptInstance,
    resident: Sequence[Sequence[int]],
    critical: Sequence[Sequence[float]],
    overlapped: Sequence[Sequence[float]],
) -> Replayed:
    """Executes the schedule phase by phase with a set of live outputs.

    An output is dropped as soon as the next phase does not list it and nothing later in this phase
    reads it; what a communication hides, and whatever that reads, stays until the phase ends.
    Raises InvalidPlan: an input is absent, a window overflows, something resident was never made, a
    required output is missing at the end, or the budget is exceeded.
    """
    rows = (*resident[: instance.ops.count], instance.keep)
    resident_sets = [{i for i, is_resident in enumerate(row) if is_resident} for row in rows]
    critical_time: Number = 0
    live: set[int] = set()
    peak = instance.static
    for t, (start, keep_next) in enumerate(itertools.pairwise(resident_sets)):
        if not start <= live:
            raise InvalidPlan(f"replay: phase {t} starts with {min(start - live)}, never made")
        phase = _Phase(instance, t, start, keep_next, critical[t], overlapped[t])
        phase.run()
        live = phase.live & keep_next
        peak = max(peak, phase.peak)
        critical_time += phase.critical_time
    if missing := resident_sets[-1] - live:
        raise InvalidPlan(f"replay: operator {min(missing)} is not resident at the end")
    if exceeds(peak, instance.budget):
        raise InvalidPlan(f"replay: peak {peak} exceeds the budget {instance.budget}")
    return Replayed(critical_time=critical_time, peak=peak)


class _Phase:
    """One phase in execution: runs its critical operators in order, then its window.

    There is a phase for each operator: phase ``index`` computes operator ``index`` for the first
    time, and may recompute operators before it. Where that operator communicates, it is a window.
    ``start`` are the outputs that are there when it begins, ``keep_next`` those that the next phase
    lists; ``critical`` and ``overlapped`` are the phase's rows of Rc and Ro.
    """

    def __init__(
        self,
        instance: OptInstance,
        index: int,
        start: set[int],
        keep_next: set[int],
        critical: Sequence[float],
        overlapped: Sequence[float],
    ) -> None:
        self.ops, self.index, self.live = instance.ops, index, set(start)
        self.critical, self.overlapped = critical, overlapped
        self.window = {i for i, x in enumerate(overlapped) if x > 0}
        # Outputs that stay to the phase's end, whatever reads them.
        self.held = keep_next.union(*((i, *self.ops.deps[i]) for i in self.window))
        self.memory = instance.static + sum(self.ops.sizes[i] for i in start)
        self.peak: Number = self.memory
        self.progress = [1.0 if i in start else 0.0 for i in range(self.ops.count)]
        self.critical_time: Number = 0

    def run(self) -> None:
        """Runs the phase to its end. Raises InvalidPlan."""
        where = f"replay: phase {self.index}"
        if self.critical[self.index] != 1:
            raise InvalidPlan(f"{where}: does not compute its own operator")
        for i in [i for i, x in enumerate(self.critical) if x > 0]:
            if i > self.index:
                raise InvalidPlan(f"{where}: computes the later operator {i}")
            self._compute(i, self.critical[i], where)
            self.critical_time += _amount(self.ops.times[i], self.critical[i])
            if i != self.index:
                self._drop_dead(i)
        self._run_window(where)
        self._drop_dead(self.index)

    def _compute(self, i: int, fraction: float, where: str) -> None:
        """Makes ``fraction`` of operator ``i``'s output. Raises InvalidPlan: an input is absent."""
        self.progress[i] += fraction
        if self.progress[i] > 1 + SPLIT_TOLERANCE:
            raise InvalidPlan(f"{where}: operator {i} is computed twice")
        if fraction < 1 and i in self.ops.whole:
            raise InvalidPlan(f"{where}: cuts operator {i}, which mixes tokens")
        for j in self.ops.deps[i]:
            if j not in self.live or self.progress[j] < self.progress[i] - SPLIT_TOLERANCE:
                raise InvalidPlan(f"{where}: operator {i} reads operator {j}, which is absent")
        self.live.add(i)
        self.memory += _amount(self.ops.sizes[i], fraction)
        self.peak = max(self.peak, self.memory)

    def _run_window(self, where: str) -> None:
        """Computes what the phase's communication hides, while its own output is still live."""
        if self.window and self.index not in self.ops.comm:
            raise InvalidPlan(f"{where}: overlaps without a communication")
        load: Number = 0
        for i in sorted(self.window):
            # The network is taken, and later operators have not run yet.
            if i in self.ops.comm or i >= self.index:
                raise InvalidPlan(f"{where}: operator {i} cannot be recomputed in this window")
            self._compute(i, self.overlapped[i], where)
            load += _amount(self.ops.times[i], self.overlapped[i])
            if self.progress[i] < 1 - SPLIT_TOLERANCE:
                raise InvalidPlan(f"{where}: operator {i} is left incomplete")
        limit = self.ops.times[self.index]
        if exceeds(load, limit, SPLIT_TOLERANCE):
            raise InvalidPlan(f"{where}: {load} of work behind a communication of {limit}")

    def _drop_dead(self, i: int) -> None:
        """Frees what operator ``i`` read, and ``i`` itself, where nothing will read it again."""
        later = {k for k, x in enumerate(self.critical) if x > 0 and k > i}
        reads_later = {j for k in later for j in self.ops.deps[k]}
        for j in {i, *self.ops.deps[i]} & self.live:
            if j not in self.held and j not in reads_later:
                self.live.remove(j)
                self.memory -= self.ops.sizes[j]
