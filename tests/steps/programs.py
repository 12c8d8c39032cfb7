"""Step programs of models on fake tensors: traced, partitioned and cut, never lowered."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._subclasses import FakeTensorMode

from memo_compile.backends.capture import StepCapture
from memo_compile.config import MemoConfig
from memo_compile.driver.facts import GraphFacts
from memo_compile.driver.pipeline import cut_step
from memo_compile.driver.stages import CapturedStep
from memo_compile.passes.cut import Cut
from memo_compile.torch_private import dynamo


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    forward: Cut
    backward: Cut

    def order(self) -> list[str]:
        """Regions in the order in which the step calls them."""
        return [call.region for call in (*self.forward.calls, *self.backward.calls)]

    @property
    def num_regions(self) -> int:
        return len(self.forward.regions) + len(self.backward.regions)


def step_programs(
    make: Callable[[], tuple[Callable[..., torch.Tensor], Sequence[torch.Tensor]]],
    **options: object,
) -> Programs:
    """The step programs of what ``make`` builds under FakeTensorMode: a function and its inputs."""
    config = MemoConfig(lowering="aten", **options)
    found: list[Programs] = []

    def finish(captured: CapturedStep) -> None:
        step = cut_step(captured, config, lambda _: True)
        found.append(Programs(forward=step.forward, backward=step.backward))

    torch._dynamo.reset()
    try:
        with FakeTensorMode():
            function, inputs = make()
            with dynamo.traced_whole(function, inputs, {}) as traced:
                gm, examples = traced
                facts = GraphFacts(examples)
                StepCapture(config, facts, "step", finish, is_run=False).run(gm, examples)
    finally:
        torch._dynamo.reset()
    return found[0]
