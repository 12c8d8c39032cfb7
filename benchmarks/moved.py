"""A captured step whose saved activations are offloaded and recomputed, as another Problem.

Which tensors move is drawn at random from a seed, by class (every layer alike, as plans decide it)
or for each layer anew. The last layers keep theirs. In the order of calls:

    forward:   ... fwd(k) | fwd(k+1) | d2h(k): the offloaded tensors of k die here ...
    backward:  ... h2d(k): they live again | bwd(k+1) | recompute(k): forward of k anew | bwd(k) ...

``recompute(k)`` has the transients of the forward and makes only what is recomputed. Copies are
calls of one line, so that what they hold lies on the step's one time axis.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from memo_compile.step.problem import (
    Phase,
    Problem,
    RegionBuffer,
    RegionOutput,
    RegionProfile,
    StepCall,
    Storage,
)

OFFLOADED = 0.5
"""Part of the tensors that leave the device."""
RECOMPUTED = 0.5
"""Part of what only its own layer reads that is made again; drawn first."""
LAST_KEPT = 2
"""Layers at the end whose tensors stay; at most half of all."""
NOTHING = RegionOutput(storage=Storage.NONE)


def moved_step(problem: Problem, seed: int, *, by_layer: bool = False) -> Problem:
    """``problem`` with random tensors offloaded and recomputed; by class unless ``by_layer``."""
    return _offload(_recompute(problem, seed, by_layer), seed, by_layer)


def _recompute(problem: Problem, seed: int, by_layer: bool) -> Problem:
    roots, layers = _roots(problem), _moving(problem)
    forward_readers = _readers(problem, Phase.FORWARD, roots)
    backward_readers = _readers(problem, Phase.BACKWARD, roots)
    regions, before = dict(problem.regions), {}
    for call in layers:
        own = _backward_of(problem, call)
        recomputed = []
        for output, value in zip(problem.regions[call.region].outputs, call.outputs, strict=True):
            private = output.storage is Storage.ARENA and value not in forward_readers
            private = private and backward_readers.get(value) == [own]
            if private and _drawn("recompute", seed, call, output, by_layer) < RECOMPUTED:
                recomputed.append(value)
        if recomputed:
            region = _part(problem.regions[call.region], call, recomputed)
            regions[region.name] = region
            before[own] = replace(
                call,
                name=f"recompute.{call.name}",
                region=region.name,
                phase=Phase.BACKWARD,
                outputs=tuple(_recomputed(v) if v in recomputed else "" for v in call.outputs),
            )
    calls = []
    for index, call in enumerate(problem.calls):
        if index in before:
            extra = before[index]
            made = {name for name in extra.outputs if name}
            calls.append(extra)
            inputs = (_recomputed(v) if _recomputed(v) in made else v for v in call.inputs)
            call = replace(call, inputs=tuple(inputs))
        calls.append(call)
    return replace(problem, regions=regions, calls=tuple(calls))


def _recomputed(value: str) -> str:
    return f"recomputed.{value}"


def _part(region: RegionProfile, call: StepCall, wanted: Sequence[str]) -> RegionProfile:
    """``region`` that makes only the outputs ``wanted``: no buffers for its other outputs."""
    made = dict(zip(call.outputs, region.outputs, strict=True))
    chosen = {made[value].index for value in wanted}
    crossing = set(region.outputs_of_buffers())
    kept = [i for i in range(len(region.buffers)) if i not in crossing or i in chosen]
    place = {old: new for new, old in enumerate(kept)}
    outputs = tuple(
        replace(output, index=place[output.index])
        if value in wanted and output.index is not None
        else NOTHING
        for value, output in made.items()
    )
    positions = ".".join(str(i) for i, output in enumerate(outputs) if output is not NOTHING)
    return replace(
        region,
        name=f"{region.name}.recompute.{positions}",
        buffers=tuple(region.buffers[i] for i in kept),
        outputs=outputs,
    )


def _offload(problem: Problem, seed: int, by_layer: bool) -> Problem:
    """Inserts the copies; backward calls read what was reloaded."""
    calls = list(problem.calls)
    roots = _roots(problem)
    readers = _readers(problem, Phase.BACKWARD, roots)
    after: dict[int, list[str]] = {}
    reloads: dict[int, list[tuple[str, int]]] = {}
    back: dict[str, str] = {}
    index_of = {call.name: index for index, call in enumerate(calls)}
    for call in _moving(problem):
        region = problem.regions[call.region]
        for output, value in zip(region.outputs, call.outputs, strict=True):
            first = output.storage is Storage.ARENA and roots[value] == value and value in readers
            if not first or _drawn("offload", seed, call, output, by_layer) >= OFFLOADED:
                continue
            assert output.index is not None
            back[value] = f"reloaded.{value}"
            after.setdefault(index_of[call.name] + 1, []).append(value)
            at = _one_before(calls, readers[value][0])
            size = region.buffers[output.index].size_bytes
            reloads.setdefault(at, []).append((back[value], size))
    regions, out = dict(problem.regions), []
    for index, call in enumerate(calls):
        if index in reloads:
            profile, extra = _reload_call(reloads[index], index)
            regions[profile.name] = profile
            out.append(extra)
        if call.phase is Phase.BACKWARD:
            inputs = (back.get(roots.get(value, value), value) for value in call.inputs)
            call = replace(call, inputs=tuple(inputs))
        out.append(call)
        if index in after:
            profile, extra = _copy_out_call(after[index], index)
            regions[profile.name] = profile
            out.append(extra)
    return replace(problem, regions=regions, calls=tuple(out))


def _one_before(calls: Sequence[StepCall], reader: int) -> int:
    """Index of the pass of the backward that runs before the pass in which ``reader`` lies."""
    at = reader - 1
    while calls[at].name.startswith("recompute.") and calls[at].phase is Phase.BACKWARD:
        at -= 1
    return at if calls[at].phase is Phase.BACKWARD else reader


def _reload_call(made: Sequence[tuple[str, int]], index: int) -> tuple[RegionProfile, StepCall]:
    buffers = tuple(
        RegionBuffer(name=f"in{i}", size_bytes=size, start=0, end=1)
        for i, (_, size) in enumerate(made)
    )
    profile = RegionProfile(
        name=f"h2d.{index}",
        num_lines=1,
        buffers=buffers,
        input_ends=(),
        outputs=tuple(RegionOutput(storage=Storage.ARENA, index=i) for i in range(len(made))),
    )
    names = tuple(name for name, _ in made)
    call = StepCall(
        name=profile.name, region=profile.name, phase=Phase.BACKWARD, inputs=(), outputs=names
    )
    return profile, call


def _copy_out_call(values: Sequence[str], index: int) -> tuple[RegionProfile, StepCall]:
    ends = (1,) * len(values)
    profile = RegionProfile(
        name=f"d2h.{index}", num_lines=1, buffers=(), input_ends=ends, outputs=()
    )
    inputs = tuple(values)
    call = StepCall(
        name=profile.name, region=profile.name, phase=Phase.FORWARD, inputs=inputs, outputs=()
    )
    return profile, call


def _moving(problem: Problem) -> list[StepCall]:
    """The forward calls of all layers but the last, in order."""
    forward = [c for c in problem.calls if c.layer_class and c.phase is Phase.FORWARD]
    return forward[: -min(LAST_KEPT, len(forward) // 2) or None]


def _backward_of(problem: Problem, layer: StepCall) -> int:
    key = (layer.layer_class, layer.instance)
    return next(
        index
        for index, call in enumerate(problem.calls)
        if call.phase is Phase.BACKWARD and (call.layer_class, call.instance) == key
    )


def _roots(problem: Problem) -> Mapping[str, str]:
    """Value -> the first value that has the same storage, through views and shared buffers."""
    roots: dict[str, str] = {}
    for call in problem.calls:
        region = problem.regions[call.region]
        owner: dict[int | None, str] = {}
        for output, value in zip(region.outputs, call.outputs, strict=True):
            roots[value] = value
            if output.storage is Storage.INPUT and output.index is not None:
                source = call.inputs[output.index]
                roots[value] = roots.get(source, source)
            elif output.storage is Storage.ARENA:
                roots[value] = owner.setdefault(output.index, value)
    return roots


def _readers(problem: Problem, phase: Phase, roots: Mapping[str, str]) -> dict[str, list[int]]:
    """Storage, as its first value -> indices of the calls of ``phase`` that read it."""
    found: dict[str, list[int]] = {}
    for index, call in enumerate(problem.calls):
        if call.phase is phase:
            for value in dict.fromkeys(roots.get(value, value) for value in call.inputs):
                found.setdefault(value, []).append(index)
    return found


def _drawn(what: str, seed: int, call: StepCall, output: RegionOutput, by_layer: bool) -> float:
    """A number in [0, 1) for one tensor: the same for equal arguments, in every process."""
    where = call.name if by_layer else call.region
    return random.Random(f"{what} {seed} {where} {output.index}").random()
