"""Step programs of models on fake tensors: traced, partitioned and cut, never lowered."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode

from memo_compile import shim
from memo_compile.backends import capture
from memo_compile.backends.capture import StepCompiler
from memo_compile.config import MemoConfig
from memo_compile.driver.facts import GraphFacts
from memo_compile.driver.stages import CutStep
from memo_compile.passes.cut import Cut, step_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    forward: Cut
    backward: Cut

    def order(self) -> list[str]:
        """Regions in the order in which the step calls them."""
        return [*step_order(self.forward.program), *step_order(self.backward.program)]

    @property
    def num_regions(self) -> int:
        return len(self.forward.regions) + len(self.backward.regions)


class _CutError(Exception):
    """Carries nothing: both halves are cut, and nothing is to be lowered."""


def step_programs(
    make: Callable[[], tuple[Callable[..., torch.Tensor], Sequence[torch.Tensor]]],
    **options: object,
) -> Programs:
    """The step programs of what ``make`` builds under FakeTensorMode: a function and its inputs."""
    found: list[Programs] = []

    def stop(step: CutStep, *_: Any) -> None:
        found.append(Programs(forward=step.forward, backward=step.backward))
        raise _CutError

    def backend(gm, examples):
        config = MemoConfig(lowering="aten", **options)
        compiler = StepCompiler(config, GraphFacts(examples), "step")
        patches = {"custom_partitioner_fn": shim.partitioner(compiler.partition)}
        with shim.functorch_patch(
            force_non_lazy_backward_lowering=True, enable_autograd_cache=False
        ):
            return shim.compile_fx(
                gm,
                examples,
                inner_compile=shim.inner_compiler(compiler.inner),
                config_patches={**patches, "force_disable_caches": True},
            )

    torch._dynamo.reset()
    try:
        with mock.patch.object(capture, "assemble", stop), FakeTensorMode():
            function, inputs = make()
            torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    except Exception:
        if not found:
            raise
    finally:
        torch._dynamo.reset()
    return found[0]
