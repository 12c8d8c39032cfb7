"""A step that is traced and cut once, and then runs as many options plan it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

import memo_compile
from memo_compile.backends import entry
from memo_compile.config import MemoConfig, resolve
from memo_compile.driver import pipeline
from memo_compile.driver.assemble import Assembly
from memo_compile.driver.pipeline import assemble_lowered
from memo_compile.driver.stages import CapturedStep, PlanRequest
from memo_compile.lowering.lower import lower_regions
from memo_compile.passes.tile_cut import RegionTiling
from memo_compile.reporting import state
from memo_compile.step.plans import ReportedPlan
from tests.numerics.training import Run, assert_planned

Options = Mapping[str, object]


class TracedStep:
    """Stands where the step's assembly stands, which is what torch's compiled function calls.

    Each run lowers, plans and binds the same regions by its own options. Tracing a small model
    takes ten times as long as that. The options that shape the regions, ``token_tiles`` and
    ``passes``, stay those of the first run. Another compilation's reset of Dynamo ends it.
    """

    def __init__(self, train: Callable[[Options], Run], options: Options) -> None:
        """``train`` compiles its model with the options that it is given, and trains it."""
        torch._dynamo.reset()
        state.reset()
        self._train, self._options = train, options
        with mock.patch.object(entry, "assemble", self._assembled):
            self.first = self._trained()
        self.assembly = self._assembly
        """Of the first run."""

    def _assembled(
        self,
        captured: CapturedStep,
        config: MemoConfig,
        accepts: Callable[[RegionTiling], bool],
        request: PlanRequest,
    ) -> "TracedStep":
        self._assembly = pipeline.assemble(captured, config, accepts, request)
        return self

    def run(self, options: Options) -> tuple[Run, ReportedPlan]:
        """A training run and its plan, which nothing is said against."""
        state.reset()
        self.retire()
        self._assembly = self._planned(resolve(options, None))
        state.add_plan(self.reported)
        return self._trained()

    def _trained(self) -> tuple[Run, ReportedPlan]:
        done = self._train(self._options)
        assert_planned(1)
        return done, memo_compile.report().plans[-1]

    def _planned(self, config: MemoConfig) -> Assembly:
        step = self.assembly.lowered.cut
        regions = lower_regions(step.regions.values(), config, step.runner)
        lowered = replace(self.assembly.lowered, regions=regions)
        return assemble_lowered(lowered, config, PlanRequest())

    def __getattr__(self, name: str) -> Any:
        """All else is the assembly's that runs now."""
        return getattr(self.__dict__["_assembly"], name)
