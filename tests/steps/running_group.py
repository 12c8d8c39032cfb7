"""A planned group of live steps, as a pipeline's microbatches, that can run with another plan."""

import dataclasses
import functools
from typing import Any

import torch
from memo_runtime.arena import arena_of
from memo_runtime.group_steps import GroupPlan, GroupStep
from memo_runtime.run_step import run_backward

from memo_compile.driver.bind import bind_group
from memo_compile.driver.joint_knowledge import JointKnowledge
from memo_compile.driver.plan_step import plan_step
from memo_compile.driver.stages import PlannedStep, PlanRequest
from memo_compile.driver.step_planner import StepPlanner
from memo_compile.step.joint_step import HalfOrder, JointStep
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
        graphs = (0,) * self.num_members
        return PlanRequest(joint=JointStep(graphs=graphs, fixed=FixedBytes(), order=self.order))

    @functools.cached_property
    def planner(self) -> StepPlanner:
        assert self.request.joint is not None
        known = JointKnowledge(graphs=[self.assembly.known], joint=self.request.joint)
        return StepPlanner.of(known, self.assembly.config, self.request)

    @functools.cached_property
    def planned(self) -> PlannedStep:
        own = self.assembly
        return plan_step(own.lowered, own.config, self.request, own.known)

    def unmoved(self, problem: Problem) -> Problem:
        return self.planner.problem

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
