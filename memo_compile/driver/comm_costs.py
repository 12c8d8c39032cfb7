"""How long a step's collectives take: remembered, or measured as its first step runs.

Nothing is run for it. In the first step each collective ends inside its issue, which changes the
order among ranks no more than to wait at once does, and its seconds are noted. All ranks of a group
run that step together, and begin the same collectives in it (``driver.agreement``). Nobody has
compared the order among different groups, and ranks of which each waits in another one would wait
for ever. So in a step that talks in several groups nobody waits for longer than ``PATIENCE_S``:
then the step goes on as if it were not measured.

Ranks plan alike, before and after: what the first of them to plan a step knows of a collective
counts for all, that nobody knows it included; so do the seconds that the first has measured. They
are kept for the next process, which plans with them from its first step on.
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
"""A step is planned again where measured seconds change its communication by this share."""

PATIENCE_S = 5.0
"""Longer than a rank of a measured step comes later than another, its compilation left out."""


@dataclass(slots=True, kw_only=True)
class CommCosts:
    """What is known of the seconds of one step's collectives. Empty: all of them are declared."""

    calls: Sequence[tuple[str, TimedCollective]] = ()
    """Of each collective of the step, in order, its region and what it begins."""
    declared_bytes_per_s: float = math.inf
    links: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Process group -> its fingerprint."""
    store: FileStore | None = None
    """Where seconds are remembered; None: nowhere."""
    times: CollectiveTimes | None = None
    """Measures those that nobody knew, while steps run; None: nothing is to be measured."""
    _known_s: dict[TimedCollective, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, lowered: LoweredStep, config: MemoConfig, declared_bytes_per_s: float
    ) -> "CommCosts":
        """What the ranks know when the first of them asks; the rest is to be measured."""
        calls = _collectives(lowered.problem, lowered.regions)
        groups = dict.fromkeys(timed.collective.group_name for _, timed in calls)
        costs = cls(
            calls=calls,
            declared_bytes_per_s=declared_bytes_per_s,
            links={group: _fingerprint(group, lowered, config) for group in groups},
            store=config.store(),
        )
        costs._ask()
        wanted = frozenset(timed for _, timed in calls) - costs._known_s.keys()
        if wanted and config.collective_schedule() == "normal":
            patience_s = PATIENCE_S if len(groups) > 1 else None
            costs.times = CollectiveTimes(wanted=wanted, patience_s=patience_s)
        return costs

    def seconds(self) -> dict[str, float]:
        """Region -> seconds of its collective, where they are known."""
        known = self._known_s
        return {region: known[timed] for region, timed in self.calls if timed in known}

    @property
    def are_measured(self) -> bool:
        """True where all that is to be measured was, and ``take`` has not taken it."""
        return self.times is not None and self.times.is_over

    def take(self) -> bool:
        """What was measured counts from now on. To be called while no step of the graph is live.

        True where it changes the step's communication so much that another plan may be better.
        """
        times, before_s = self.times, self._step_s()
        if times is None:
            return False
        if times.is_over:
            self.times = None
        own = {timed: s for timed, s in times.least_s.items() if timed not in self._known_s}
        if not own:
            return False
        self._known_s |= self._told(own, "measured")
        self._remember(own)
        changes = zip(before_s, self._step_s(), strict=True)
        return sum(abs(after - before) for before, after in changes) > NOTABLE * sum(before_s)

    def _step_s(self) -> list[float]:
        """Seconds of each collective of the step, by what is known now."""
        declared = self.declared_bytes_per_s
        return [self._known_s.get(timed, timed.num_bytes / declared) for _, timed in self.calls]

    def _ask(self) -> None:
        """Learn with what all ranks plan this step: what the first of them remembers, or nothing.

        Not a number stands for what it does not know, on all ranks.
        """
        own = {}
        for group, link in self.links.items():
            seconds = {} if self.store is None else read_seconds(self.store, link)
            for timed in self._of_group(group):
                own[timed] = seconds.get(label(timed), math.nan)
        told = self._told(own, "before")
        self._known_s = {timed: seconds for timed, seconds in told.items() if seconds >= 0}

    def _told(
        self, own: Mapping[TimedCollective, float], when: str
    ) -> dict[TimedCollective, float]:
        """The seconds that count on all ranks: ``own``, unless another rank was first.

        They are of one program: what another one knows by now may not be known on all ranks.
        """
        program = digest_of([label(timed) for _, timed in self.calls])
        places = {group: link["places"] for group, link in self.links.items()}
        first = distributed.job_store().setdefault
        told = {}
        for timed, seconds in own.items():
            name = f"{label(timed)} {places[timed.collective.group_name]}"
            told[timed] = float(first(f"memo/seconds/{when}/{program}/{name}", repr(seconds)))
        return told

    def _remember(self, measured: Iterable[TimedCollective]) -> None:
        if self.store is None:
            return
        by_group: dict[str, dict[str, float]] = {}
        for timed in measured:
            own = by_group.setdefault(timed.collective.group_name, {})
            own[label(timed)] = self._known_s[timed]
        for group, by_label in by_group.items():
            add_seconds(self.store, self.links[group], by_label)

    def _of_group(self, group: str) -> set[TimedCollective]:
        return {timed for _, timed in self.calls if timed.collective.group_name == group}


def _collectives(
    problem: Problem, regions: Mapping[str, LoweredRegion]
) -> list[tuple[str, TimedCollective]]:
    """Of each collective of ``problem``, in order, its region and what the runtime times of it."""
    found = []
    for call in problem.calls:
        collective = regions[call.region].collective if call.kind is CallKind.ISSUE else None
        if collective is not None:
            layout = call.reads[0]
            assert layout is not None, f"{call.name} sends no tensor"
            timed = TimedCollective(collective, layout.dtype, comm_bytes(problem, call))
            found.append((call.region, timed))
    return found


def _fingerprint(group: str, lowered: LoweredStep, config: MemoConfig) -> dict[str, Any]:
    """What the seconds of a group's collectives hold for: also for groups that lie as it does."""
    ranks, per_host = distributed.ranks_of_group(group), local_world_size()
    first = ranks[0]
    return group_fingerprint(
        lowered.cut.facts.device,
        backend=distributed.backend_of_group(group),
        places=[[rank // per_host - first // per_host, rank - first] for rank in ranks],
        num_ranks=distributed.num_ranks(),
        link_bytes_per_s=config.comm_bytes_per_s,
    )
