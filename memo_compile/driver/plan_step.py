"""Plans a lowered step for a request: decides what moves under the budget, places it, proves it.

Of ranks whose steps talk to each other and are equal the first to ask plans, and tells the others
its plan, with the costs that it has measured. They prove that it is a plan of their own step, and
run it. A rank whose step, options or memory are others plans by itself: the numbers are right all
the same, since no plan changes the order of collectives (``driver.agreement``).
"""

import base64
import json
import time
import zlib
from dataclasses import dataclass, replace
from typing import Self

from memo_compile.config import MemoConfig
from memo_compile.driver.agreement import JobRank, job_rank
from memo_compile.driver.knowledge import StepKnowledge
from memo_compile.driver.stages import LoweredStep, PlannedStep, PlanRequest
from memo_compile.driver.step_planner import StepPlanner, plan_known
from memo_compile.errors import Infeasible, MemoError, TooSlow
from memo_compile.file_store import digest_of
from memo_compile.reporting import state
from memo_compile.step.movable import Moves, StepCosts
from memo_compile.step.plans import Plan
from memo_compile.step.problem import Problem
from memo_compile.step.serialise import plain, restore

STILL_RIGHT = "The numbers of both are right, but one may wait for the other"


def plan_step(
    lowered: LoweredStep, config: MemoConfig, request: PlanRequest, known: StepKnowledge
) -> PlannedStep:
    """The checked plan; ``known`` keeps what can be reused. Raises Infeasible: no plan fits."""
    assert known.lowered is lowered, "what is known is known of this step"
    if not known.is_shared():
        return plan_known(known, config, request)
    rank, start_s = job_rank(), time.perf_counter()
    place, planner = rank.ask(_question(known, config, request))
    if planner == rank.rank:
        return _plan_for_others(known, config, request, rank, place)
    text = rank.answer_of(planner, place, config.ranks_timeout_s)
    told = _unpacked(text) if text is not None else ToldPlan()
    if told.costs is not None:
        known.take_costs(told.costs, request.applied_to(config).host_store)
    if told.refused is not None:
        raise told.refused.error(planner)
    if told.planned is None:
        return plan_known(known, config, request)
    try:
        planned = _as_told(known, config, request, told.planned)
    except MemoError as error:
        name = lowered.cut.name
        state.warn_once(f"{name}: planned otherwise than on rank {planner}: {error}. {STILL_RIGHT}")
        return plan_known(known, config, request)
    return replace(planned, planning_s=time.perf_counter() - start_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """An Infeasible, or a TooSlow where ``step_s`` is given."""

    text: str
    floor_bytes: int | None = None
    step_s: float | None = None
    is_bound: bool = False

    @classmethod
    def of(cls, error: Infeasible | TooSlow) -> Self:
        """What others are told of ``error``."""
        if isinstance(error, TooSlow):
            return cls(text=str(error), step_s=error.step_s, is_bound=error.is_bound)
        return cls(text=str(error), floor_bytes=error.floor_bytes)

    def error(self, rank: int) -> Infeasible | TooSlow:
        """The error that ``rank`` has told of."""
        text = f"{self.text} (as rank {rank} has found)"
        if self.step_s is not None:
            return TooSlow(text, step_s=self.step_s, is_bound=self.is_bound)
        return Infeasible(text, floor_bytes=self.floor_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and what its report says of it."""

    problem: Problem
    plan: Plan
    moves: Moves | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldPlan:
    """What a rank has planned, or why nothing fits; neither where it has failed otherwise."""

    planned: Planned | None = None
    refused: Refused | None = None
    costs: StepCosts | None = None


def _packed(told: ToldPlan) -> str:
    """``told`` as one short text: a plan as JSON has megabytes, and every rank asks for it."""
    return base64.b64encode(zlib.compress(json.dumps(plain(told)).encode())).decode()


def _unpacked(text: str) -> ToldPlan:
    content = json.loads(zlib.decompress(base64.b64decode(text)))
    told: ToldPlan = restore(content, ToldPlan, "plan of another rank")
    return told


def _question(known: StepKnowledge, config: MemoConfig, request: PlanRequest) -> str:
    """Stands for all that a plan depends on, but for what is measured and what memory is left.

    Where ranks offload to, and what each of them writes and says, changes no decision.
    """
    kind = request.applied_to(config).host_kind(known.device_type).partition(":")[0]
    apart = replace(config, host_store="auto", dump=None, debug=(), strict=False, cache=True)
    return digest_of(
        [
            plain(known.requested(request)),
            plain(replace(request, host_store=None)),
            plain(apart),
            kind,
            known.collectives.seconds(),
        ]
    )


def _plan_for_others(
    known: StepKnowledge, config: MemoConfig, request: PlanRequest, rank: JobRank, place: str
) -> PlannedStep:
    """The plan, which the others are told, or why there is none."""
    told, host_store = ToldPlan(), request.applied_to(config).host_store
    try:
        with state.noting() as notes:
            made = plan_known(known, config, request)
        planned = Planned(
            problem=made.problem, plan=made.plan, moves=made.moves, notes=tuple(notes)
        )
        told = ToldPlan(planned=planned, costs=known.known_costs(host_store))
        return made
    except (Infeasible, TooSlow) as error:
        told = ToldPlan(refused=Refused.of(error), costs=known.known_costs(host_store))
        raise
    finally:
        rank.answer(place, _packed(told))


def _as_told(
    known: StepKnowledge, config: MemoConfig, request: PlanRequest, told: Planned
) -> PlannedStep:
    """The plan of another rank, bound to this rank's step. Raises as ``StepPlanner.as_told``."""
    planner = StepPlanner(
        known=known,
        config=request.applied_to(config),
        request=request,
        problem=known.requested(request),
    )
    planned = planner.as_told(told.problem, told.plan, told.moves)
    for note in told.notes:
        state.add_note(note)
    return planned
