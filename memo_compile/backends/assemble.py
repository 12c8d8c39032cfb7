"""Lowers the regions of a step, plans it, and puts together what the runtime executes."""

import itertools
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from memo_runtime.arena import FrameView, arena_of
from memo_runtime.pages import gives_pages_back
from memo_runtime.step import RunCall, RunHalf, StepPlan, run_backward, run_forward
from torch import fx

from memo_compile.analysis.units import JointUnits, source_line
from memo_compile.backends import shim
from memo_compile.backends.facts import GraphFacts
from memo_compile.backends.lowering import lower_regions
from memo_compile.config import MemoConfig
from memo_compile.passes.cut import Cut, CutCall
from memo_compile.planners.step import plan_step
from memo_compile.plans import Decision, Plan
from memo_compile.problem import (
    LayerClassInfo,
    Phase,
    Problem,
    StepCall,
    Storage,
    TensorInfo,
    arena_buffers,
    call_starts,
)
from memo_compile.regions import LoweredRegion
from memo_compile.reporting import state

_keys = itertools.count(1)


@dataclass(slots=True, kw_only=True)
class Assembly:
    """A planned step that runs."""

    problem: Problem
    plan: Plan
    step: StepPlan
    facts: GraphFacts

    def forward(self, args: list[Any]) -> list[Any]:
        """The forward's results; empties ``args``."""
        self._count_existing_gradients()
        return run_forward(self.step, args)

    def _count_existing_gradients(self) -> None:
        """Raise the plan's peak when gradients are kept between steps: they are then there twice.

        At compile time there are none yet, and nobody knows whether the user will keep them.
        """
        fixed = self.plan.fixed
        more = self.facts.existing_gradient_bytes() + fixed.new_gradients - fixed.gradients
        if more > 0:
            plan = replace(
                self.plan,
                fixed=replace(fixed, gradients=fixed.gradients + more),
                peak_bytes=self.plan.peak_bytes + more,
            )
            state.replace_plan(self.plan, plan)
            self.plan = plan

    def backward(self, args: list[Any]) -> list[Any]:
        """The backward's results; empties ``args``."""
        return run_backward(self.step, args, keep_graph=shim.keep_graph())

    def retire(self) -> None:
        """Drop the views that the device's arena holds for this plan."""
        arena_of(self.step.device).forget(self.step.key)


def assemble(
    forward: Cut,
    backward: Cut,
    units: JointUnits,
    facts: GraphFacts,
    config: MemoConfig,
    name: str,
) -> Assembly:
    """Lower each distinct region once, plan the step, bind it to the runtime."""
    start = time.perf_counter()
    lowered = lower_regions((*forward.regions.values(), *backward.regions.values()), config)
    lowering_s = time.perf_counter() - start
    problem = _problem(forward, backward, lowered, units, facts)
    plan = plan_step(
        problem,
        name=name,
        solver=config.placement_solver,
        time_limit_s=config.placement_time_limit_s,
        lowering_s=lowering_s,
        decisions=_decisions(forward, units, problem),
        budget_bytes=config.budget_bytes(facts.device_bytes()),
        releases_pages=gives_pages_back(facts.device),
    )
    step = StepPlan(
        key=next(_keys),
        device=facts.device,
        arena_bytes=plan.arena_bytes,
        table=_frame_table(problem, plan, lowered),
        forward=_bind(forward, problem, plan, lowered, config, first_call=0),
        backward=_bind(backward, problem, plan, lowered, config, first_call=len(forward.calls)),
        max_inflight=config.max_inflight,
        poison="poison" in config.debug,
    )
    return Assembly(problem=problem, plan=plan, step=step, facts=facts)


def _problem(
    forward: Cut,
    backward: Cut,
    lowered: Mapping[str, LoweredRegion],
    units: JointUnits,
    facts: GraphFacts,
) -> Problem:
    calls = [
        *(_step_call(call, Phase.FORWARD, units) for call in forward.calls),
        *(_step_call(call, Phase.BACKWARD, units) for call in backward.calls),
    ]
    outputs_bytes = sum(
        slot.size_bytes
        for call in forward.calls
        for slot in lowered[call.region].profile.outputs
        if slot.storage is Storage.EXTERNAL
    )
    facts.read_backward(backward.program.graph.find_nodes(op="placeholder"))
    return Problem(
        regions={key: region.profile for key, region in lowered.items()},
        calls=tuple(calls),
        inputs=(*forward.constants, *forward.arguments, *backward.constants, *backward.arguments),
        fixed=facts.fixed_bytes(outputs_bytes),
        layer_classes=_layer_classes(units, calls),
        tensors={value: _tensor_info(forward.nodes[value]) for value in forward.leased},
    )


def _step_call(call: CutCall, phase: Phase, units: JointUnits) -> StepCall:
    index = call.position if phase is Phase.FORWARD else units.num_units - 1 - call.position
    unit = units.structure.units[index]
    return StepCall(
        name=call.name,
        region=call.region,
        phase=phase,
        inputs=call.inputs,
        outputs=call.outputs,
        layer_class=unit.class_key,
        instance=unit.instance,
    )


def _layer_classes(units: JointUnits, calls: Iterable[StepCall]) -> tuple[LayerClassInfo, ...]:
    regions: dict[str | None, set[str]] = {}
    for call in calls:
        regions.setdefault(call.layer_class, set()).add(call.region)
    return tuple(
        LayerClassInfo(
            num_layers=one.num_layers,
            module_path=one.module_path,
            period=one.period,
            num_regions=len(regions.get(one.class_key, ())),
        )
        for one in units.structure.classes
    )


def _tensor_info(node: fx.Node) -> TensorInfo:
    value = node.meta["val"]
    return TensorInfo(
        shape=tuple(value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        op=str(node.target),
        source=source_line(node),
    )


def _decisions(forward: Cut, units: JointUnits, problem: Problem) -> tuple[Decision, ...]:
    """One row per saved tensor of a layer class, read off the class's first layer."""
    leased = set(forward.leased)
    labels = {one.class_key: one.module_path for one in units.structure.classes}
    rows = []
    for call in problem.calls:
        if call.phase is not Phase.FORWARD or call.instance or call.layer_class is None:
            continue
        for value in call.outputs:
            if value not in leased:
                continue
            info, tensor = problem.tensors[value], forward.nodes[value].meta["val"]
            rows.append(
                Decision(
                    tensor=f"{value} {list(info.shape)}",
                    layer_class=labels.get(call.layer_class) or call.region,
                    bytes=tensor.numel() * tensor.element_size(),
                    decision="SAVE",
                    token_fraction=1.0,
                    reason="read by the layer's backward; min-cut keeps it",
                    source=info.source,
                )
            )
    return tuple(rows)


def _frame_table(
    problem: Problem, plan: Plan, lowered: Mapping[str, LoweredRegion]
) -> list[list[FrameView]]:
    table = []
    for call in problem.calls:
        region = lowered[call.region]
        row = []
        for buffer, spec in zip(region.profile.buffers, region.views, strict=True):
            row.append(
                FrameView(
                    offset_bytes=plan.offsets[f"{call.name}/{buffer.name}"],
                    dtype=spec.dtype,
                    size=spec.size,
                    stride=spec.stride,
                )
            )
        table.append(row)
    return table


def _bind(
    half: Cut,
    problem: Problem,
    plan: Plan,
    lowered: Mapping[str, LoweredRegion],
    config: MemoConfig,
    *,
    first_call: int,
) -> RunHalf:
    """The half with values replaced by slots of its environment."""
    names = [*half.constants, *half.arguments, *half.leased]
    names += [value for call in half.calls for value in (*call.inputs, *call.outputs)]
    names += [half.handle, *(value for value in half.results if value is not None)]
    slots = {value: index for index, value in enumerate(dict.fromkeys(names))}
    last = {value: index for index, call in enumerate(half.calls) for value in call.inputs}
    kept = {*half.results, *(half.leased if half.phase is Phase.FORWARD else ())}
    dying = _dying_inputs(problem, plan) if "poison" in config.debug else {}
    arena_values = _arena_values(problem)
    calls = []
    for index, call in enumerate(half.calls):
        region = lowered[call.region]
        dead = {v for v in (*call.inputs, *call.outputs) if last.get(v, -1) <= index} - kept
        calls.append(
            RunCall(
                run=region.run,
                views=tuple((at, *view) for at, view in sorted(call.views.items())),
                resident_bytes=plan.resident_bytes[first_call + index],
                table=first_call + index,
                inputs=tuple(slots[value] for value in call.inputs),
                outputs=tuple(slots[value] for value in call.outputs),
                drop=tuple(slots[value] for value in call.inputs if value in dead),
                unread=tuple(slots[value] for value in call.outputs if value in dead),
                copies=tuple(_unsafe_outputs(call, region, half, arena_values)),
                dying=tuple(dying.get(first_call + index, ())),
            )
        )
    return RunHalf(
        num_slots=len(slots),
        constants=tuple((slots[key], value) for key, value in half.constants.items()),
        arguments=tuple(slots[value] for value in half.arguments),
        calls=tuple(calls),
        results=tuple(None if value is None else slots[value] for value in half.results),
        leased=tuple(slots[value] for value in half.leased),
        handle=slots[half.handle],
    )


def _arena_values(problem: Problem) -> set[str]:
    """Values whose storage lies in the arena, aliases included."""
    found: set[str] = set()
    for call in problem.calls:
        for slot, value in zip(problem.regions[call.region].outputs, call.outputs, strict=True):
            alias = slot.storage is Storage.INPUT and slot.index is not None
            if slot.storage is Storage.ARENA or (alias and call.inputs[slot.index] in found):  # type: ignore[index]
                found.add(value)
    return found


def _unsafe_outputs(
    call: CutCall, region: LoweredRegion, half: Cut, arena_values: set[str]
) -> Iterable[int]:
    """Outputs that the user receives although their storage lies in the arena."""
    for position, value in enumerate(call.outputs):
        if value in half.results and value in arena_values:
            yield position


def _dying_inputs(problem: Problem, plan: Plan) -> dict[int, list[tuple[int, int, int]]]:
    """Call -> (input, offset, bytes) of the crossing buffers whose life ends inside that call."""
    starts = call_starts(problem)
    ends = {one.id: (one.end, one.size_bytes) for one in arena_buffers(problem)}
    owner: dict[str, str] = {}
    dying: dict[int, list[tuple[int, int, int]]] = {}
    for index, call in enumerate(problem.calls):
        region = problem.regions[call.region]
        for position, value in enumerate(call.inputs):
            end, size = ends.get(owner.get(value, ""), (-1, 0))
            if end == starts[index] + region.input_ends[position]:
                dying.setdefault(index, []).append((position, plan.offsets[owner[value]], size))
        for slot, value in zip(region.outputs, call.outputs, strict=True):
            if slot.storage is Storage.ARENA and slot.index is not None:
                owner[value] = f"{call.name}/{region.buffers[slot.index].name}"
            elif slot.storage is Storage.INPUT and slot.index is not None:
                source = owner.get(call.inputs[slot.index])
                if source is not None:
                    owner[value] = source
    return dying
