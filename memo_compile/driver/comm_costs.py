"""Finds out how long a step's collectives take: from a file, or measured while the first step runs.

Nothing extra is run. In the first step each collective is waited for as soon as it is issued, which
keeps the order among ranks, and its seconds are noted. All ranks of a group run that step together,
and begin the same collectives in it (``driver.agreement``). The order among different groups was
never compared: ranks that each wait in another group would wait for ever. So in a step with several
groups no wait is longer than ``PATIENCE_S``; then the step goes on as if it were not measured.

All ranks must plan with equal seconds. So the first rank that plans the step decides for all: what
its file says of a collective counts, or that it says nothing; later the seconds that the first rank
publishes count. They are kept for the next process, which uses them from its first step on.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memo_runtime.collectives import CollectiveTimes, TimedCollective

from memo_compile.analysis.regions import LoweredRegion
from memo_compile.config import MemoConfig, local_world_size
from memo_compile.costs.links import add_seconds, group_fingerprint, label, read_seconds
from memo_compile.driver.stages import LoweredStep
from memo_compile.file_store import FileStore, digest_of
from memo_compile.step.communication import comm_bytes
from memo_compile.step.problem import CallKind, Problem
from memo_compile.torch_private import distributed

NOTABLE = 0.25
"""A step is replanned where measured seconds change its communication by this share."""

PATIENCE_S = 5.0
"""No rank of a measured step is later than another by more seconds, compilation left out."""


@dataclass(slots=True, kw_only=True)
class CommCosts:
    """The seconds of one step's collectives. Empty: only the declared speed of the link counts."""

    calls: Sequence[tuple[str, TimedCollective]] = ()
    """Each collective of the step, in order: its region, and what identifies it."""
    declared_bytes_per_s: float = math.inf
    links: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Process group -> its fingerprint."""
    store: FileStore | None = None
    """The files that keep measured seconds; None: they are not kept."""
    times: CollectiveTimes | None = None
    """Measures collectives while a step runs; None: there is nothing to measure."""
    _measured_s: dict[TimedCollective, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, lowered: LoweredStep, config: MemoConfig, declared_bytes_per_s: float
    ) -> "CommCosts":
        """Reads kept seconds of the step's collectives, and prepares to measure the others."""
        calls = _collectives(lowered.problem, lowered.regions)
        groups = dict.fromkeys(timed.collective.group_name for _, timed in calls)
        costs = cls(
            calls=calls,
            declared_bytes_per_s=declared_bytes_per_s,
            links={group: _fingerprint(group, lowered, config) for group in groups},
            store=config.store(),
        )
        costs._read()
        missing = frozenset(timed for _, timed in calls) - costs._measured_s.keys()
        if missing and config.collective_schedule() == "normal":
            patience_s = PATIENCE_S if len(groups) > 1 else None
            costs.times = CollectiveTimes(wanted=missing, patience_s=patience_s)
        return costs

    def seconds(self) -> dict[str, float]:
        """Region -> seconds of its collective, where they are measured."""
        measured = self._measured_s
        return {region: measured[timed] for region, timed in self.calls if timed in measured}

    @property
    def are_measured(self) -> bool:
        """True once a step has measured all that is missing, until ``take``."""
        return self.times is not None and self.times.is_over

    def take(self) -> bool:
        """Uses what a step has measured; call it while no step of the graph is live.

        Returns True where the step's communication changes so much that another plan may be better.
        """
        times, before_s = self.times, self._step_s()
        if times is None:
            return False
        if times.is_over:
            self.times = None
        new_s = {timed: s for timed, s in times.least_s.items() if timed not in self._measured_s}
        if not new_s:
            return False
        self._measured_s |= self._of_first_rank(new_s, "measured")
        self._keep(new_s)
        changes = zip(before_s, self._step_s(), strict=True)
        return sum(abs(after - before) for before, after in changes) > NOTABLE * sum(before_s)

    def _step_s(self) -> list[float]:
        """Returns the seconds of each collective of the step, measured or by the declared speed."""
        declared = self.declared_bytes_per_s
        return [self._measured_s.get(timed, timed.num_bytes / declared) for _, timed in self.calls]

    def _read(self) -> None:
        """Reads the kept seconds, and takes over those of the first rank that plans the step.

        NaN stands for a collective of which it has none: then no rank uses any.
        """
        kept = {}
        for group, link in self.links.items():
            seconds = {} if self.store is None else read_seconds(self.store, link)
            for _, timed in self.calls:
                if timed.collective.group_name == group:
                    kept[timed] = seconds.get(label(timed), math.nan)
        agreed = self._of_first_rank(kept, "before")
        self._measured_s = {timed: seconds for timed, seconds in agreed.items() if seconds >= 0}

    def _of_first_rank(
        self, seconds_here: Mapping[TimedCollective, float], when: str
    ) -> dict[TimedCollective, float]:
        """Publishes ``seconds_here`` unless another rank was first; returns those of the first.

        They hold for this step only: of another step other ranks may have been first.
        """
        program = digest_of([label(timed) for _, timed in self.calls])
        places = {group: link["places"] for group, link in self.links.items()}
        first = distributed.job_store().setdefault
        agreed = {}
        for timed, seconds in seconds_here.items():
            name = f"{label(timed)} {places[timed.collective.group_name]}"
            agreed[timed] = float(first(f"memo/seconds/{when}/{program}/{name}", repr(seconds)))
        return agreed

    def _keep(self, measured: Iterable[TimedCollective]) -> None:
        """Writes the seconds of ``measured`` to the files."""
        if self.store is None:
            return
        by_group: dict[str, dict[str, float]] = {}
        for timed in measured:
            of_group = by_group.setdefault(timed.collective.group_name, {})
            of_group[label(timed)] = self._measured_s[timed]
        for group, by_label in by_group.items():
            add_seconds(self.store, self.links[group], by_label)


def _collectives(
    problem: Problem, regions: Mapping[str, LoweredRegion]
) -> list[tuple[str, TimedCollective]]:
    """Returns, per collective of ``problem``, in order, its region and what identifies it."""
    collectives = []
    for call in problem.calls:
        collective = regions[call.region].collective if call.kind is CallKind.ISSUE else None
        if collective is not None:
            layout = call.reads[0]
            assert layout is not None, f"{call.name} sends no tensor"
            timed = TimedCollective(collective, layout.dtype, comm_bytes(problem, call))
            collectives.append((call.region, timed))
    return collectives


def _fingerprint(group: str, lowered: LoweredStep, config: MemoConfig) -> dict[str, Any]:
    """Returns what the seconds of a group depend on; equal for groups that are placed alike."""
    ranks, per_host = distributed.ranks_of_group(group), local_world_size()
    first = ranks[0]
    return group_fingerprint(
        lowered.cut.facts.device,
        backend=distributed.backend_of_group(group),
        places=[[rank // per_host - first // per_host, rank - first] for rank in ranks],
        num_ranks=distributed.num_ranks(),
        link_bytes_per_s=config.comm_bytes_per_s,
    )
