"""What each stage of ``driver.pipeline`` hands to the next."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memo_compile.config import MemoConfig
from memo_compile.step.joint_step import JointStep
from memo_compile.step.movable import Moves
from memo_compile.step.plans import Plan
from memo_compile.step.problem import Phase, Problem
from memo_compile.step.tilings import WholeStep

if TYPE_CHECKING:
    from torch import fx

    from memo_compile.analysis.joint_units import JointUnits
    from memo_compile.analysis.regions import LoweredRegion, RegionGraph
    from memo_compile.driver.facts import GraphFacts
    from memo_compile.passes.cut import Cut
    from memo_compile.passes.runner import PassRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """Forward and backward as AOTAutograd hands them to memo, and what the joint graph told."""

    name: str
    forward: "fx.GraphModule"
    backward: "fx.GraphModule"
    units: "JointUnits"
    facts: "GraphFacts"
    num_results: int
    """How many results the forward has; behind them it returns what autograd keeps."""
    own_results: tuple[int, ...]
    """Positions of the forward's results that alias nothing in the user's program."""
    droppable: tuple[int, ...]
    """Bytes that were compared with ``Try.drop_above_bytes``; only those above it count."""
    runner: "PassRunner"
    """Runs what is still to be done to graphs of this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutStep:
    """Both halves as regions, and the calls of them in order."""

    name: str
    forward: "Cut"
    backward: "Cut"
    units: "JointUnits"
    facts: "GraphFacts"
    runner: "PassRunner"
    """The runner of the captured step."""
    notes: tuple[str, ...] = ()
    """What the report said while it was cut."""

    @property
    def regions(self) -> "Mapping[str, RegionGraph]":
        """The distinct regions of both halves, by name."""
        return {**self.forward.regions, **self.backward.regions}

    def half(self, phase: Phase) -> "Cut":
        """Returns the half of ``phase``."""
        return self.forward if phase is Phase.FORWARD else self.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredStep:
    """Every region as code, and the step that keeps everything (policy SAVE)."""

    cut: CutStep
    regions: "Mapping[str, LoweredRegion]"
    problem: Problem
    whole: WholeStep
    """The step as its graphs say it, for the checker."""
    lowering_s: float
    again: "Problem | None" = None
    """The problem where the backward gathers weights again: under a budget that ``problem``, which
    keeps them, does not hold as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a plan must count that neither the graph nor the options say.

    The first plan of a step knows of nothing. What is found out while it is bound and while it runs
    changes the request, and the step is planned again.
    """

    existing_gradient_bytes: int = 0
    """Gradients kept from steps before, beside those that this step's backward makes."""
    none_exist: bool = False
    """True where it was seen that none exist, whatever the option ``gradients`` expects."""
    leaving: tuple[int, ...] = ()
    """Results of the backward, by position, that are gone once autograd has them."""
    earlier_output_bytes: int = 0
    """Results of earlier steps that the user holds during this one."""
    keeps_outputs: bool = False
    """True once the forward's results were found held when their backward had ended."""
    outside_loss: bool = False
    """True once a loss was seen that is computed outside though the graph returns one."""
    host_store: str | None = None
    """The host store to use instead of the one that the options name."""
    granted_step_bytes: int | None = None
    """Bytes that a step may take beside its parameters and other constants, after the device has
    refused more; None: nothing was refused."""
    joint: JointStep | None = None
    """The joint step that is planned; None: one forward and its backward by themselves."""
    granted_host_bytes: int | None = None
    """Bytes of host memory that a step may take, after more was refused; None: none was."""
    may_be_part: bool = False
    """The step has not run, and may turn out to be a part of one that is planned whole."""

    @property
    def shares(self) -> tuple[float, ...]:
        """Per member the share of its saved bytes that goes to the host; empty: nobody said."""
        return () if self.joint is None else self.joint.shares

    def applied_to(self, config: MemoConfig) -> MemoConfig:
        """Returns ``config`` with the host memory that this request names."""
        return config if self.host_store is None else replace(config, host_store=self.host_store)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A checked plan, the step program that it places, and the regions that it calls."""

    problem: Problem
    plan: Plan
    lowered: "Mapping[str, LoweredRegion]"
    moves: Moves | None = None
    """The decisions; None: everything is kept."""
    planning_s: float = 0.0
    """Seconds that ``plan_step`` took."""
