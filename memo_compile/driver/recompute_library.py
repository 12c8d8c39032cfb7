"""The recompute regions of a step, as the policies see them: by key, estimated, lowered or refused.

A ``RegionMaker`` makes them: from a layer's graph (``recompute_regions``), or from what an earlier
``memo plan`` recorded (``offline.step_record``). No torch here.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from memo_compile.driver.left_whole import UNEXPECTED, say_dropped
from memo_compile.errors import UnsupportedGraph, described
from memo_compile.planners.move_rules import recompute_seconds
from memo_compile.step.movable import MovableStep, RecomputeKey, RecomputeRegion, RegionInput
from memo_compile.step.problem import CallKind, Problem, RegionProfile

log = logging.getLogger("memo")


class Estimated(NamedTuple):
    """A recompute region before it is lowered."""

    profile: RegionProfile
    inputs: tuple[RegionInput, ...]


class Lowered(NamedTuple):
    """A recompute region that is lowered."""

    profile: RegionProfile
    seconds: float


class RegionMaker(Protocol):
    """Makes the recompute regions of one step."""

    def estimated(self, key: RecomputeKey) -> Estimated:
        """The region of ``key`` before it is lowered. Raises UnsupportedGraph: there is none."""
        ...

    def lowered(self, keys: Sequence[RecomputeKey]) -> Mapping[RecomputeKey, Lowered | str]:
        """Returns each of ``keys`` lowered, or why it cannot be used. All were estimated before."""
        ...


@dataclass(slots=True, kw_only=True)
class RecomputeLibrary:
    """The recompute regions of a step: estimated when first asked for, exact once lowered."""

    step: MovableStep
    maker: RegionMaker
    refused: dict[RecomputeKey, str] = field(default_factory=dict)
    """Regions that cannot be used, and why."""
    regions: dict[RecomputeKey, RecomputeRegion] = field(default_factory=dict)
    lowered: set[str] = field(default_factory=set)
    """Names of the regions that are lowered."""

    def __call__(self, key: RecomputeKey) -> RecomputeRegion:
        """Returns the region of ``key``. Raises UnsupportedGraph: there is none."""
        if key in self.refused:
            raise UnsupportedGraph(self.refused[key])
        if key not in self.regions:
            try:
                estimate = self.maker.estimated(key)
                self.regions[key] = RecomputeRegion(
                    key=key,
                    profile=estimate.profile,
                    inputs=estimate.inputs,
                    seconds=recompute_seconds(self.step, key),
                    is_lowered=False,
                )
            except UnsupportedGraph as error:
                self.refused[key] = str(error)
                raise
            except UNEXPECTED as error:  # other ways to save memory remain
                self._refuse(key, described(error))
                say_dropped(f"{key.region} is not made", error)
                raise UnsupportedGraph(self.refused[key]) from error
        return self.regions[key]

    def _refuse(self, key: RecomputeKey, reason: str) -> None:
        self.refused[key] = f"{key.region}: {reason}"
        self.regions.pop(key, None)

    def known_names(self) -> tuple[str, ...]:
        """Returns a key of the regions' state: which are lowered, and which refused."""
        refused = (f"no {key.region}" for key in self.refused)
        return *sorted(self.lowered), *sorted(refused)

    def known(self, key: RecomputeKey) -> RecomputeRegion:
        """Returns the lowered region of ``key``. Raises UnsupportedGraph: it is not lowered."""
        if key in self.refused or key.region not in self.lowered:
            raise UnsupportedGraph(f"{key.region} is not lowered yet")
        return self.regions[key]

    def lower(self, problem: Problem) -> bool:
        """Lowers the regions that ``problem`` recomputes with; False: all of them were lowered.

        One whose rows differ from the whole's, or that cannot be lowered, is refused instead.
        """
        called = {call.region for call in problem.calls if call.kind is CallKind.RECOMPUTE}
        missing = [
            key for key in self.regions if key.region in called and key.region not in self.lowered
        ]
        if not missing:
            return False
        log.info("memo: lowering %d recompute regions", len(missing))
        results = self.maker.lowered(missing)
        for key in missing:
            result = results[key]
            if isinstance(result, str):
                self._refuse(key, result)
                continue
            self.lowered.add(key.region)
            self.regions[key] = replace(
                self.regions[key], profile=result.profile, seconds=result.seconds, is_lowered=True
            )
        return True
