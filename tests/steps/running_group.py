"""A planned group of live steps, as a pipeline's microbatches, that can run with another plan."""

import dataclasses
import functools
from typing import Any

import torch
from memo_runtime.arena import arena_of
from memo_runtime.group_steps import GroupPlan, GroupStep
from memo_runtime.run_step import run_backward

from memo_compile.check.check_plan import check
from memo_compile.check.prove import prove
from memo_compile.driver.bind import bind_group
from memo_compile.driver.knowledge import requested_problem
from memo_compile.driver.plan_step import plan_step
from memo_compile.driver.stages import PlannedStep, PlanRequest
from memo_compile.step.group import Group, HalfOrder, grouped_whole
from memo_compile.step.plans import Plan
from memo_compile.step.problem import FixedBytes, Problem
from tests.steps.running import CPU, Ready, copied_all

DEBUG = {"normal": (), "early": ("copies-early",), "late": ("copies-late",)}


def half_order(text: str) -> HalfOrder:
    """``F0 F1 B0 ..`` as the members' halves."""
    return tuple((int(half[1:]), half[0] == "B") for half in text.split())


@dataclasses.dataclass(kw_only=True)
class GroupReady(Ready):
    """Several live steps of one graph in a given order, each with numbers of its own."""

    order: HalfOrder

    @classmethod
    def of(cls, step: Ready, order: HalfOrder) -> "GroupReady":
        """``step``, which is one live step, as a group."""
        fields = (field.name for field in dataclasses.fields(Ready))
        return cls(**{name: getattr(step, name) for name in fields}, order=order)

    @property
    def num_members(self) -> int:
        return len(self.order) // 2

    @property
    def request(self) -> PlanRequest:
        group = Group(num_members=self.num_members, fixed=FixedBytes(), order=self.order)
        return PlanRequest(group=group)

    @property
    def planned(self) -> PlannedStep:
        return self._planned

    @functools.cached_property
    def _planned(self) -> PlannedStep:
        known = self.assembly.known
        return plan_step(self.lowered, self.assembly.config, self.request, known)

    def unmoved(self, problem: Problem) -> Problem:
        return requested_problem(self.lowered, self.request)

    def complaints(self, problem: Problem, plan: Plan) -> tuple[str, ...]:
        verdict = check(problem, plan)
        if not verdict.ok:
            return verdict.problems
        unmoved, count = self.unmoved(problem), self.num_members
        again = self.assembly.known.recomputations(problem, unmoved, count)
        whole = grouped_whole(self.lowered.whole, count, self.order)
        return prove(whole, unmoved, problem, again).problems

    def numbers(self, problem: Problem, plan: Plan, schedule: str = "normal") -> list[Any]:
        planned = dataclasses.replace(self.planned, problem=problem, plan=plan)
        config = dataclasses.replace(self.assembly.config, debug=("poison", *DEBUG[schedule]))
        bound = bind_group(planned, [self.lowered.cut] * self.num_members, config)
        step = bound.begin()
        try:
            return self._numbers(bound, step)
        finally:
            step.frame.release()
            arena_of(CPU).forget(bound.members[0].key)

    def _numbers(self, bound: GroupPlan, step: GroupStep) -> list[Any]:
        forward, backward = self.lowered.problem.halves
        live: dict[int, dict[Any, Any]] = {}
        found: list[Any] = []
        for member, is_backward in self.order:
            if not is_backward:
                args = self._args(member)
                results = step.forward(member, list(args))
                made = dict(zip(forward.results, results, strict=True))
                found += [
                    value for name, value in made.items() if name not in (None, forward.handle)
                ]
                known = {**dict(zip(forward.arguments, args, strict=True)), **made}
                live[member] = {**known, backward.handle: made[forward.handle]}
                del results, made, known
                continue
            known = live.pop(member)
            arriving = [
                known.get(name, given)
                for name, given in zip(backward.arguments, self.backward_args, strict=True)
            ]
            found += run_backward(bound.members[member], arriving, keep_graph=False)
        return found

    def _args(self, member: int) -> list[Any]:
        """What the recorded forward was given; whole numbers, which are words, are others."""
        return [
            value.roll(7 * member, -1)
            if isinstance(value, torch.Tensor) and not value.is_floating_point()
            else value
            for value in copied_all(self.forward_args)
        ]
