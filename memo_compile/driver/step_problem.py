"""From two cuts and their lowered regions to the Problem of the whole step (policy SAVE)."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import fx

from memo_compile.analysis.joint_units import JointUnits, source_line
from memo_compile.analysis.module_paths import role_of
from memo_compile.analysis.regions import LoweredRegion, layout_of
from memo_compile.config import MemoConfig
from memo_compile.driver.facts import tangents
from memo_compile.driver.layer_weights import on_host_already, weights_of_layers
from memo_compile.driver.stages import CutStep
from memo_compile.driver.user_outputs import assume_held
from memo_compile.errors import UnsupportedGraph
from memo_compile.passes.cut import Cut, CutCall, CutInto
from memo_compile.step.problem import (
    Half,
    Into,
    LayerClassInfo,
    Phase,
    Problem,
    StepCall,
    Storage,
    TensorInfo,
)
from memo_compile.step.tilings import WholeStep


def step_problem(
    step: CutStep, lowered: Mapping[str, LoweredRegion], config: MemoConfig
) -> Problem:
    """Returns the step that keeps everything: its calls in order, its regions, its fixed memory."""
    forward, backward = step.forward, step.backward
    calls = tuple(
        _step_call(call, half.phase, step.units, lowered)
        for half in (forward, backward)
        for call in half.calls
    )
    outputs_bytes = sum(
        output.size_bytes
        for call in forward.calls
        for output in lowered[call.region].profile.outputs
        if output.storage is Storage.EXTERNAL
    )
    problem = Problem(
        regions={key: region.profile for key, region in lowered.items()},
        calls=calls,
        inputs=(*forward.constants, *forward.arguments, *backward.constants, *backward.arguments),
        halves=(_half(forward), _half(backward)),
        fixed=step.facts.fixed_bytes(
            outputs_bytes,
            config.optimizer_state_bytes_per_parameter,
            config.gradients,
            tunes=config.lowering == "inductor",
        ),
        tangents=tangents(backward.half_graph.graph.find_nodes(op="placeholder")),
        layer_classes=_layer_classes(step.units, calls),
        tensors={value: _tensor_info(forward.nodes[value]) for value in forward.leased},
        live_steps=config.max_inflight,
    )
    problem = _with_weights(problem, step, config)
    return assume_held(problem, forward.results, backward.half_graph.graph, config)


def _with_weights(problem: Problem, step: CutStep, config: MemoConfig) -> Problem:
    """``problem`` with the weights that lie on the host, or may where ``config`` asks for that."""
    on_host = on_host_already(step)
    if config.weights == "device" and not on_host:
        return problem
    weights = weights_of_layers(step, problem)
    if config.weights == "device":
        weights = {value: size for value, size in weights.items() if value in on_host}
    host_weights = tuple(value for value in weights if value in on_host)
    return replace(problem, layer_weights=weights, host_weights=host_weights)


def whole_step(step: CutStep) -> WholeStep:
    """Returns the step as its graphs say it, for the checker."""
    halves = (step.forward, step.backward)
    return WholeStep(
        calls=tuple(
            StepCall(
                name=call.name,
                region=call.region,
                phase=half.phase,
                inputs=call.inputs,
                outputs=call.outputs,
                reads=call.reads,
                kind=call.kind,
                waits_for=call.waits_for,
            )
            for half in halves
            for call in half.whole_calls
        ),
        halves=(_half(step.forward), _half(step.backward)),
        tilings={**step.forward.tilings, **step.backward.tilings},
    )


def _step_call(
    call: CutCall, phase: Phase, units: JointUnits, lowered: Mapping[str, LoweredRegion]
) -> StepCall:
    """Returns ``call`` of a half with the layer that it is of; a backward runs the last first."""
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
        into=tuple(_into(target, lowered[call.region]) for target in call.into),
        reads=call.reads,
        kind=call.kind,
        waits_for=call.waits_for,
    )


def _half(cut: Cut) -> Half:
    """Returns what autograd gives the half and what it returns."""
    placeholders = cut.half_graph.graph.find_nodes(op="placeholder")
    layouts = {
        **{name: layout_of(value) for name, value in cut.constants.items()},
        **{node.name: layout_of(node.meta.get("val")) for node in placeholders},
    }
    return Half(
        phase=cut.phase,
        constants=tuple(cut.constants),
        arguments=cut.arguments,
        results=cut.results,
        handle=cut.handle,
        layouts=tuple(layouts[name] for name in (*cut.constants, *cut.arguments)),
    )


def _into(target: CutInto, region: LoweredRegion) -> Into:
    """Where an output goes, by the buffer that lowering gave it."""
    output = region.profile.outputs[target.output]
    if output.storage is not Storage.ARENA or output.index is None:
        raise UnsupportedGraph(
            f"region {region.profile.name}: output {target.output} of a tile is no buffer of its "
            "own; set token_tiles=1"
        )
    return Into(buffer=output.index, value=target.value, offset_bytes=target.offset_bytes)


def _layer_classes(units: JointUnits, calls: Iterable[StepCall]) -> tuple[LayerClassInfo, ...]:
    """Returns the layer classes of the step as the report shows them."""
    regions: dict[str | None, set[str]] = {}
    for call in calls:
        regions.setdefault(call.layer_class, set()).add(call.region)
    return tuple(
        LayerClassInfo(
            num_layers=layer_class.num_layers,
            module_path=layer_class.module_path,
            period=layer_class.period,
            num_regions=len(regions.get(layer_class.class_key, ())),
        )
        for layer_class in units.structure.classes
    )


def _tensor_info(node: fx.Node) -> TensorInfo:
    """Returns what the report says of the saved activation that ``node`` makes."""
    value = node.meta["val"]
    return TensorInfo(
        shape=tuple(value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        op=str(node.target),
        source=source_line(node),
        role=role_of(node),
    )
