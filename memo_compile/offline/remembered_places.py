"""Placements that ``memo plan`` made before, found again by the buffers that they are of."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from memo_compile.errors import MemoError
from memo_compile.file_store import FileStore, digest_of
from memo_compile.planners.placement import Placement, PlacementProblem, place
from memo_compile.planners.placement.validate import check_placement
from memo_compile.planners.solver import SolveStatus
from memo_compile.step.serialise import plain, restore

log = logging.getLogger("memo")

WORTH_S = 0.1
"""A placement that took less is made again sooner than it is read and checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRecord:
    """A ``Placement``, its offsets in the order of the problem's buffers."""

    offsets: tuple[int, ...]
    height_bytes: int
    lower_bound_bytes: int
    status: SolveStatus
    solver: str


@dataclass(slots=True, kw_only=True)
class RememberedPlaces:
    """Places buffers as ``placement.place`` does, the same ones once."""

    store: FileStore | None
    code: str
    """What stands for the code that places."""
    _known: dict[str, Placement] = field(default_factory=dict)

    def __call__(self, problem: PlacementProblem, *, solver: str, time_limit_s: float) -> Placement:
        """The placement that was made first under the same limit, which bounds seconds."""
        asked = {"problem": plain(problem), "solver": solver, "time_limit_s": time_limit_s}
        key = {"kind": "placement", "code": self.code, "asked": digest_of(asked)}
        name = digest_of(key)
        if name not in self._known:
            self._known[name] = self._found(problem, key) or self._made(
                problem, key, solver=solver, time_limit_s=time_limit_s
            )
        return self._known[name]

    def _found(self, problem: PlacementProblem, key: Mapping[str, Any]) -> Placement | None:
        for body in () if self.store is None else self.store.read(key):
            try:
                record: PlacementRecord = restore(body, PlacementRecord, "placement")
                found = _placement(problem, record)
                check_placement(problem, found, capacity=False)
                return found
            except (MemoError, ValueError) as error:
                log.warning("memo: a remembered placement is not used: %s", error)
        return None

    def _made(self, problem: PlacementProblem, key: Mapping[str, Any], **limits: Any) -> Placement:
        made = place(problem, **limits)
        is_some = made.status is not SolveStatus.INFEASIBLE
        if self.store is not None and made.seconds >= WORTH_S and is_some:
            record = PlacementRecord(
                offsets=tuple(made.offsets[buffer.id] for buffer in problem.buffers),
                height_bytes=made.height_bytes,
                lower_bound_bytes=made.lower_bound_bytes,
                status=made.status,
                solver=made.solver,
            )
            self.store.write(key, plain(record))
        return made


def _placement(problem: PlacementProblem, record: PlacementRecord) -> Placement:
    ids = [buffer.id for buffer in problem.buffers]
    return Placement(
        offsets=MappingProxyType(dict(zip(ids, record.offsets, strict=True))),
        height_bytes=record.height_bytes,
        lower_bound_bytes=record.lower_bound_bytes,
        status=record.status,
        seconds=0.0,
        solver=record.solver,
    )
