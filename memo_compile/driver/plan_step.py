"""Plans a lowered step for a request: decides what moves under the budget, places it, proves it.

Ranks that talk to each other and have equal steps run one plan. The first rank that asks makes it,
and sends it to the others with the costs that it has measured; they prove that it is a plan of
their step, and run it. A rank whose step, options or memory differ plans by itself: its numbers are
right all the same, since no plan changes the order of collectives (``driver.agreement``).
"""

import base64
import json
import time
import zlib
from dataclasses import dataclass, replace
from typing import Self

from memo_compile.config import MemoConfig
from memo_compile.driver.agreement import JobRank, job_rank
from memo_compile.driver.joint_knowledge import JointKnowledge
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


SharedStep = StepKnowledge | JointKnowledge
"""A step that ranks may plan for each other."""


def plan_step(
    lowered: LoweredStep, config: MemoConfig, request: PlanRequest, knowledge: StepKnowledge
) -> PlannedStep:
    """Returns a checked plan for ``request``: this rank's, or the one that an equal rank has made.

    ``knowledge`` caches what later plans of ``lowered`` use again (measured seconds, recompute
    regions). Raises Infeasible: no plan fits.
    """
    assert knowledge.lowered is lowered, "``knowledge`` is of another step"
    if request.joint is None:
        return plan_shared(knowledge, config, request)
    return plan_shared(JointKnowledge(graphs=[knowledge], joint=request.joint), config, request)


def plan_shared(knowledge: SharedStep, config: MemoConfig, request: PlanRequest) -> PlannedStep:
    """As ``plan_step``, of a step of one graph or of several."""
    if not knowledge.is_shared():
        return plan_known(knowledge, config, request)
    rank, start_s = job_rank(), time.perf_counter()
    key, planner = rank.ask(_question(knowledge, config, request))
    if planner == rank.rank:
        return _plan_for_all_ranks(knowledge, config, request, rank, key)
    text = rank.answer_of(planner, key, config.ranks_timeout_s)
    answer = _unpacked(text) if text is not None else RankAnswer()
    if answer.costs is not None:
        knowledge.take_costs(answer.costs, request.applied_to(config).host_store)
    if answer.refusal is not None:
        raise answer.refusal.error(planner)
    if answer.plan is None:  # the planner failed, or has ended
        return plan_known(knowledge, config, request)
    try:
        planned = _adopted(knowledge, config, request, answer.plan)
    except MemoError as error:
        state.warn_once(
            f"{knowledge.name}: planned otherwise than on rank {planner}: {error}. {STILL_RIGHT}"
        )
        return plan_known(knowledge, config, request)
    return replace(planned, planning_s=time.perf_counter() - start_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRefusal:
    """Why the planning rank has no plan: an Infeasible, or a TooSlow where ``step_s`` is given."""

    text: str
    floor_bytes: int | None = None
    step_s: float | None = None
    is_bound: bool = False

    @classmethod
    def of(cls, error: Infeasible | TooSlow) -> Self:
        """Returns ``error`` as data for the other ranks."""
        if isinstance(error, TooSlow):
            return cls(text=str(error), step_s=error.step_s, is_bound=error.is_bound)
        return cls(text=str(error), floor_bytes=error.floor_bytes)

    def error(self, rank: int) -> Infeasible | TooSlow:
        """Returns the error that ``rank`` has sent."""
        text = f"{self.text} (as rank {rank} has found)"
        if self.step_s is not None:
            return TooSlow(text, step_s=self.step_s, is_bound=self.is_bound)
        return Infeasible(text, floor_bytes=self.floor_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPlan:
    """A plan for the other ranks, with the notes for their reports."""

    problem: Problem
    plan: Plan
    moves: Moves | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAnswer:
    """What the planning rank sends: a plan, or a refusal; neither where planning itself failed."""

    plan: SentPlan | None = None
    refusal: SentRefusal | None = None
    costs: StepCosts | None = None


def _packed(answer: RankAnswer) -> str:
    """Compresses ``answer``: a plan as JSON has megabytes, and every rank reads it."""
    return base64.b64encode(zlib.compress(json.dumps(plain(answer)).encode())).decode()


def _unpacked(text: str) -> RankAnswer:
    content = json.loads(zlib.decompress(base64.b64decode(text)))
    answer: RankAnswer = restore(content, RankAnswer, "plan of another rank")
    return answer


def _question(knowledge: SharedStep, config: MemoConfig, request: PlanRequest) -> str:
    """Returns a digest of what a plan depends on: ranks with equal digests run one plan.

    Left out are measured seconds and free memory, which differ on equal ranks, and the options that
    change no decision: where ranks offload to, and what each of them writes.
    """
    host_kind = request.applied_to(config).host_kind(knowledge.device_type).partition(":")[0]
    deciding = replace(config, host_store="auto", dump=None, debug=(), strict=False, cache=True)
    return digest_of(
        [
            plain(knowledge.requested(request)),
            plain(replace(request, host_store=None)),
            plain(deciding),
            host_kind,
            knowledge.collective_s(),
        ]
    )


def _plan_for_all_ranks(
    knowledge: SharedStep, config: MemoConfig, request: PlanRequest, rank: JobRank, key: str
) -> PlannedStep:
    """Plans the step here, and sends the plan, or why there is none, to the ranks that wait."""
    answer, host_store = RankAnswer(), request.applied_to(config).host_store
    try:
        with state.noting() as notes:
            step = plan_known(knowledge, config, request)
        plan = SentPlan(problem=step.problem, plan=step.plan, moves=step.moves, notes=tuple(notes))
        answer = RankAnswer(plan=plan, costs=knowledge.known_costs(host_store))
        return step
    except (Infeasible, TooSlow) as error:
        refusal = SentRefusal.of(error)
        answer = RankAnswer(refusal=refusal, costs=knowledge.known_costs(host_store))
        raise
    finally:
        rank.answer(key, _packed(answer))


def _adopted(
    knowledge: SharedStep, config: MemoConfig, request: PlanRequest, sent: SentPlan
) -> PlannedStep:
    """Returns the plan of another rank for this rank's step. Raises as ``StepPlanner.as_told``."""
    planner = StepPlanner.of(knowledge, config, request)
    planned = planner.as_told(sent.problem, sent.plan, sent.moves)
    for note in sent.notes:
        state.add_note(note)
    return planned
