"""Plans a training step without running it: ``memo_compile.plan``.

The model is traced through Dynamo and AOTAutograd with memo's own partitioner, cut and lowered as
the backend does it, but no kernel is compiled and nothing is computed: the tensors may be fakes.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Never

import torch
from torch import fx

from memo_compile import shim
from memo_compile.backends.capture import StepCompiler
from memo_compile.backends.entry import plan_graph
from memo_compile.config import MemoConfig, resolve
from memo_compile.costs.hardware import HardwareProfile, find_hardware
from memo_compile.costs.roofline import graph_cost
from memo_compile.driver.facts import GraphFacts
from memo_compile.driver.knowledge import StepKnowledge
from memo_compile.driver.pipeline import lower_step
from memo_compile.driver.plan_step import plan_step
from memo_compile.driver.stages import CutStep, PlanRequest
from memo_compile.errors import MemoError, UnsupportedGraph
from memo_compile.step.movable import StepCosts
from memo_compile.step.plans import Plan
from memo_compile.step.problem import Problem
from memo_compile.step.simulate import simulate

log = logging.getLogger("memo")

_PLAIN_LOOPS = {"cpp.simdlen": 1}
"""For another device than the CPU, whose kernels nobody will read: the same buffers, and a fifth
less time than vectorised loops; no C++ compiler is asked what the machine can do."""

FORWARD_AND_BACKWARD = 3
"""A training step's useful FLOPs over those of its forward: two products for each of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineStep:
    """A step that was planned and never ran."""

    problem: Problem
    plan: Plan
    """With its ``timeline``."""
    costs: StepCosts
    model_flops: int
    """Of forward and backward on one device, without those of recomputation."""
    exact: bool
    """True when the backend makes the same plan; False for another device than the tensors'."""


def plan(
    model: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    hardware: str | HardwareProfile | None = None,
    loss: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> Plan:
    """The plan of one training step of ``model(*args, **kwargs)``; nothing runs.

    Tensors may be real, or fakes of one ``FakeTensorMode``, which take no memory. ``options`` are
    those of ``torch.compile(..., backend="memo")``. Without ``hardware`` the plan is for the device
    that the tensors lie on, and equal to the one that the backend makes with
    ``costs="roofline"``. ``loss`` is applied to the model's result inside the step.

    Raises:
        UnsupportedGraph: the model does not trace into one graph, or nothing needs a gradient.
        Infeasible: no plan fits the budget; the message states the floor.
        ConfigError: an option is unknown or cannot be used.
    """
    profile = find_hardware(hardware) if isinstance(hardware, str) else hardware
    config = resolve(options, None)
    step = plan_step_offline(model, args, kwargs, config=config, hardware=profile, loss=loss)
    return step.plan


def plan_step_offline(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    config: MemoConfig,
    hardware: HardwareProfile | None = None,
    loss: Callable[[Any], Any] | None = None,
) -> OfflineStep:
    """What ``plan`` returns, with the problem and the costs behind it.

    Raises:
        MemoError: as ``plan``.
    """
    config = replace(config, costs="roofline")
    if hardware is not None and hardware.name != "cpu":
        config = replace(config, inductor_options={**config.inductor_options, **_PLAIN_LOOPS})
    planned: list[OfflineStep] = []

    def make(options: MemoConfig, facts: GraphFacts, name: str) -> StepCompiler:
        return _OfflineCompiler(options, facts, name, hardware, planned.append)

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Never:
        memory = hardware.memory_bytes if hardware else None
        plan_graph(gm, examples, config, make, device_bytes=memory)
        raise UnsupportedGraph("the backward of this graph was not compiled with its forward")

    with _fake_mode_of(model, args, kwargs), torch.enable_grad(), shim.without_kernels():
        try:
            shim.trace_whole(_with_loss(model, loss), backend, args, kwargs)
        except Exception as error:
            if not planned:
                _raise_bare(error)
    return planned[0]


class _PlannedSignal(Exception):
    """Ends the compilation, which has nothing more to do."""


class _OfflineCompiler(StepCompiler):
    """Plans a graph and ends its compilation."""

    may_run = False

    def __init__(
        self,
        config: MemoConfig,
        facts: GraphFacts,
        name: str,
        hardware: HardwareProfile | None,
        done: Callable[[OfflineStep], None],
    ) -> None:
        super().__init__(config, facts, name)
        self.hardware, self.done = hardware, done

    def inner(
        self, gm: fx.GraphModule, examples: Sequence[Any], **kwargs: Any
    ) -> Callable[..., Any]:
        """As the backend's, but a graph without a backward is refused."""
        if kwargs.get("is_inference"):
            raise UnsupportedGraph(
                "nothing in this step needs a gradient: give trainable parameters, or return a "
                "loss that depends on them"
            )
        return super().inner(gm, examples, **kwargs)

    def assemble(self, step: CutStep) -> Never:
        """Plan, hand the plan to ``done``, and end the compilation."""
        device = step.facts.device.type
        for_cuda = device == "cuda" or (self.hardware is not None and self.hardware.name != device)
        lowered = lower_step(step, self.config, for_cuda=for_cuda)
        known = StepKnowledge(
            lowered=lowered, config=self.config, hardware=self.hardware, may_run=False
        )
        planned = plan_step(lowered, self.config, PlanRequest(), known)
        costs = known.costs(self.config.host_store)
        made = planned.plan
        if made.timeline is None:
            made = replace(made, timeline=simulate(planned.problem, costs))
        forward_flops = sum(
            graph_cost(step.regions[call.region].gm).flops for call in step.forward.calls
        )
        self.done(
            OfflineStep(
                problem=planned.problem,
                plan=made,
                costs=costs,
                model_flops=FORWARD_AND_BACKWARD * forward_flops,
                exact=known.runs_here(),
            )
        )
        raise _PlannedSignal("planned; nothing is to be compiled")


def _with_loss(model: Callable[..., Any], loss: Callable[[Any], Any] | None) -> Callable[..., Any]:
    if loss is None:
        return model

    def step(*args: Any, **kwargs: Any) -> Any:
        return loss(model(*args, **kwargs))

    return step


def _fake_mode_of(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> contextlib.AbstractContextManager[Any]:
    """The mode of the fakes that are given, entered; nothing where all tensors are real."""
    tensors = [*args, *kwargs.values()]
    if isinstance(model, torch.nn.Module):
        tensors += [*model.parameters(), *model.buffers()]
    mode = shim.detect_fake_mode(tensors)
    return contextlib.nullcontext() if mode is None else mode


def _raise_bare(error: Exception) -> Never:
    """Raise the MemoError inside ``error``; a graph break becomes one; anything else as it is."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, MemoError):
            raise inner from None
        inner = getattr(inner, "inner_exception", None) or inner.__cause__
    broken = shim.graph_break(error)
    if broken is not None:
        raise UnsupportedGraph(f"the model does not trace into one graph: {broken}") from error
    raise error
