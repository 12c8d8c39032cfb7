"""A graph that runs: its forwards and backwards, by its own plan or as members of joint steps."""

import functools
from dataclasses import dataclass, field
from typing import Any

from memo_runtime.leases import leases
from memo_runtime.run_step import run_backward

from memo_compile.driver.assemble import Assembly
from memo_compile.driver.declared import stages_around
from memo_compile.driver.joint_steps import JointSteps
from memo_compile.driver.step_watch import SeenGraph
from memo_compile.step.joint_step import num_user_results
from memo_compile.torch_private import autograd


@dataclass(slots=True, eq=False, weakref_slot=True)
class StepPart:
    """The forwards and backwards of one graph.

    Two watchers see them. One sees this graph only: modules that share it, microbatches of a
    pipeline's stage, blocks that a checkpoint runs again. The other sees all graphs of the process
    that run under a budget, and all stages of a rank that has several. What that one has planned it
    runs; the rest runs as the first has planned it, or by the graph's own plan.
    """

    assembly: Assembly
    """What runs the graph's own plan."""
    alone: JointSteps = field(default_factory=JointSteps)
    """The joint steps of this graph only."""
    graph: SeenGraph = field(init=False)
    is_stage: bool = False
    """It is one of several stages of its rank in a pipeline."""

    def __post_init__(self) -> None:
        problem = self.assembly.lowered.problem
        forward, backward = problem.halves
        num_outputs = num_user_results(forward, backward)
        self.graph = SeenGraph(backward, num_outputs, problem.tangents)
        self.alone.add(self)
        of_all_graphs.add(self)

    def forward(self, args: list[Any]) -> list[Any]:
        """Runs a forward and returns its results; empties ``args``.

        The first watcher that has a joint plan for it runs it, else the graph's own plan does.
        Raises as ``Assembly.forward``.
        """
        stages = stages_around(args)
        self.is_stage, self.assembly.unplanned_request = stages.num_stages > 1, None
        entered = []
        for watcher in self._watchers():
            entry = watcher.begin_forward(self, args, stages)
            entered.append((watcher, entry))
            if entry.runs is not None:
                break
        _, last = entered[-1]
        runs = last.runs or functools.partial(self.assembly.forward, watched=last.is_watched)
        results = runs(args)
        for watcher, entry in reversed(entered):
            watcher.end_forward(self, entry, results)
        return results

    def backward(self, args: list[Any]) -> list[Any]:
        """Runs a backward by the plan of its forward; empties ``args``. Raises as ``forward``."""
        step = self.assembly.step
        lease = leases.find(args[step.backward.arguments.index(step.backward.handle)])
        lease_number = None if lease is None else lease.number
        is_member = lease is not None and lease.group is not None
        del lease  # it holds what the forward saved
        begun = [(each, each.begin_backward(lease_number, args)) for each in self._watchers()]
        if is_member:
            results = run_backward(step, args, keep_graph=autograd.keep_graph())
        else:
            is_watched = self.alone.may_be_step()  # the first step of a group
            results = self.assembly.backward(args, leaves_early=not is_watched)
        for watcher, entry in reversed(begun):
            watcher.end_backward(entry, results)
        return results

    def _watchers(self) -> tuple[JointSteps, ...]:
        """Returns who sees the half that begins; what they do is not the user's code any more."""
        if not self.is_stage and self.assembly.config.memory_budget is None:
            return (self.alone,)
        self.alone.end_interlude()
        return of_all_graphs, self.alone

    @property
    def runs_as_member(self) -> bool:
        """True where steps are members of a joint step: gradients leave when all are made."""
        return self in of_all_graphs.plans or self in self.alone.plans

    def retire(self) -> None:
        """Lets go of what is held for a model that is gone."""
        of_all_graphs.remove(self)
        self.alone.remove(self)
        self.assembly.retire()


of_all_graphs = JointSteps(is_of_all=True)
"""Sees all graphs that run under a budget, and all stages of a pipeline's rank."""
