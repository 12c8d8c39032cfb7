"""What each stage of ``driver.pipeline`` hands to the next."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from memo_compile.analysis.joint_units import JointUnits
from memo_compile.analysis.regions import LoweredRegion, RegionGraph
from memo_compile.driver.facts import GraphFacts
from memo_compile.passes.cut import Cut
from memo_compile.passes.runner import PassRunner
from memo_compile.step.problem import Problem
from memo_compile.step.tilings import WholeStep


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """Forward and backward as AOTAutograd hands them to memo, and what the joint graph told."""

    name: str
    forward: fx.GraphModule
    backward: fx.GraphModule
    units: JointUnits
    facts: GraphFacts
    num_results: int
    """Of the forward; behind them it returns what autograd keeps for the backward."""
    own_results: tuple[int, ...]
    """Positions of the forward's results that alias nothing in the user's program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutStep:
    """Both halves as regions, and the calls of them in order."""

    name: str
    forward: Cut
    backward: Cut
    units: JointUnits
    facts: GraphFacts
    runner: PassRunner
    """Runs what is still to be done to graphs of this step."""

    @property
    def regions(self) -> Mapping[str, RegionGraph]:
        """The distinct regions of both halves, by name."""
        return {**self.forward.regions, **self.backward.regions}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredStep:
    """Every region as code, and the step that keeps everything (policy SAVE)."""

    cut: CutStep
    regions: Mapping[str, LoweredRegion]
    problem: Problem
    whole: WholeStep
    """The step as its graphs say it, for the checker."""
    lowering_s: float
