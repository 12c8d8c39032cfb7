"""Synthetic steps whose layers may move their saved values, for tests of moves and of policies.

A prologue P, ``num_layers`` layers L and a head H. A layer reads x and leaves four values:

    x -> [L] -> next x, a (attention), b = norm(x), c = fc(b) (rows), d = act(c) (rows)

Its backward reads the next gradient, x, a, b, c and d. Slots are x, a, b, c, d, in this order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from memo_compile.planners.move_rules import closure_of, recompute_seconds
from memo_compile.step.movable import (
    Layer,
    LayerClass,
    LayerOp,
    MovableStep,
    RecomputeKey,
    RecomputeRegion,
    RegionInput,
    Slot,
    StepCosts,
)
from memo_compile.step.problem import FixedBytes, Phase, Problem, RegionProfile, StepCall, align
from memo_compile.step.simulate import peak_live_bytes
from tests.steps.parts import KIB, arena, buffer, call, external, region

NUM_ROWS = 8
ROW_BYTES = {"x": KIB, "a": KIB, "b": KIB, "c": 4 * KIB, "d": 4 * KIB}
SLOTS = tuple(ROW_BYTES)
READS = {"x": (), "a": ("x",), "b": ("x",), "c": ("b",), "d": ("c",)}
OP_SECONDS = {"x": 0.0, "a": 0.4, "b": 0.05, "c": 0.3, "d": 0.05}
FORWARD_S, BACKWARD_S = 1.0, 2.0


def movable_step(
    num_layers: int,
    *,
    scale: int = 1,
    bytes_per_s: float = 16 * KIB,
    copy_latency_s: float = 0.0,
    token_granule: int = 1,
    transient_bytes: int = 2 * KIB,
    reads_early: bool = False,
) -> MovableStep:
    """A step of ``num_layers`` equal layers; sizes are ``scale`` times those of ROW_BYTES.

    With ``reads_early`` a forward reads its input in its first line only.
    """
    kind = LayerKind(
        reads=READS,
        sizes={name: scale * NUM_ROWS * size for name, size in ROW_BYTES.items()},
        seconds=OP_SECONDS,
        num_rows=NUM_ROWS,
        kept=frozenset("xa"),
        attention="a",
    )
    costs = StepCosts(
        region_s={"P": 0.5, "L": FORWARD_S, "H": 0.5, "Hb": 0.5, "Lb": BACKWARD_S, "Pb": 0.5},
        d2h_bytes_per_s=bytes_per_s * scale,
        h2d_bytes_per_s=bytes_per_s * scale,
        copy_latency_s=copy_latency_s,
    )
    step = repeated(kind, num_layers, costs, transient_bytes)
    fixed = FixedBytes(parameters=64 * KIB, gradients=64 * KIB, new_gradients=64 * KIB)
    problem = replace(step.problem, fixed=fixed)
    if reads_early:
        early = {name: replace(problem.regions[name], input_ends=(1,)) for name in ("L", "H")}
        problem = replace(problem, regions={**problem.regions, **early})
    return replace(step, problem=problem, token_granule=token_granule)


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What a layer leaves for its backward: its input first, then what it makes."""

    reads: Mapping[str, tuple[str, ...]]
    """Value -> what making it reads."""
    sizes: Mapping[str, int]
    seconds: Mapping[str, float]
    num_rows: int
    kept: frozenset[str]
    """What cannot be made again."""
    attention: str
    dot: str = ""
    """Between a value's name and the number of its layer."""


def repeated(
    kind: LayerKind, num_layers: int, costs: StepCosts, transient_bytes: int
) -> MovableStep:
    """A prologue, equal layers and a head, forward and backward."""
    layers = tuple(
        Layer(
            class_key="L",
            calls=(f"L@{i}",),
            inputs=(f"{next(iter(kind.reads))}{kind.dot}{i}",),
            backward=f"Lb@{i}",
            values=tuple(f"{name}{kind.dot}{i}" for name in kind.reads),
        )
        for i in range(num_layers)
    )
    return MovableStep(
        problem=_problem(kind, num_layers, transient_bytes),
        classes={"L": _layer_class(kind)},
        layers=layers,
        costs=costs,
    )


def _layer_class(kind: LayerKind) -> LayerClass:
    names = list(kind.reads)
    slots = tuple(
        Slot(
            name=f"{name}{kind.dot}0",
            size_bytes=kind.sizes[name],
            can_recompute=name not in kind.kept,
            is_input=name == names[0],
            is_attention=name == kind.attention,
            num_rows=kind.num_rows,
            row_bytes=kind.sizes[name] // kind.num_rows,
        )
        for name in names
    )
    ops = tuple(
        LayerOp(
            name=f"op_{name}",
            seconds=kind.seconds[name],
            inputs=tuple(map(names.index, reads)),
            slot=slot,
            can_recompute=name not in kind.kept,
            row_wise=name != kind.attention,
        )
        for slot, (name, reads) in enumerate(kind.reads.items())
    )
    return LayerClass(key="L", slots=slots, ops=ops)


def _problem(kind: LayerKind, num_layers: int, transient_bytes: int) -> Problem:
    transient, dot, sizes = align(transient_bytes), kind.dot, kind.sizes
    first, *made = kind.reads
    grad, num_saved = {"g": sizes[first]}, len(kind.reads)
    regions = (
        by_lines("P", 1, {first: sizes[first]}, transient, num_inputs=1),
        by_lines("L", num_saved, sizes, transient, num_inputs=1),
        by_lines("H", 1, {}, transient, num_inputs=1, num_external=1),
        by_lines("Hb", 1, grad, transient, num_inputs=2),
        by_lines("Lb", 4, grad, transient, num_inputs=1 + num_saved, num_external=1),
        by_lines("Pb", 1, {}, transient, num_inputs=1, num_external=1),
    )
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    calls = [call("P", "P", forward, ["in"], [f"{first}{dot}0"])]
    for i in range(num_layers):
        outputs = [f"{first}{dot}{i + 1}", *(f"{name}{dot}{i}" for name in made)]
        calls.append(layer_call("L", i, forward, [f"{first}{dot}{i}"], outputs))
    top = f"{first}{dot}{num_layers}"
    calls.append(call("H", "H", forward, [top], ["loss"]))
    calls.append(call("Hb", "Hb", backward, ["tangent", top], [f"g{dot}{num_layers}"]))
    for i in reversed(range(num_layers)):
        read = [f"g{dot}{i + 1}", *(f"{name}{dot}{i}" for name in kind.reads)]
        calls.append(layer_call("Lb", i, backward, read, [f"g{dot}{i}", f"dw{dot}{i}"]))
    calls.append(call("Pb", "Pb", backward, [f"g{dot}0"], ["dwp"]))
    return Problem(
        regions={profile.name: profile for profile in regions},
        calls=tuple(calls),
        inputs=("in", "tangent"),
    )


def by_lines(
    name: str,
    num_lines: int,
    made: Mapping[str, int],
    transient_bytes: int,
    *,
    num_inputs: int,
    num_external: int = 0,
) -> RegionProfile:
    """A region with one transient and one arena buffer for each of ``made``, line by line."""
    buffers = [buffer("t", transient_bytes, 0, num_lines)]
    buffers += [
        buffer(key, align(size_bytes), min(line, num_lines - 1), num_lines)
        for line, (key, size_bytes) in enumerate(made.items())
    ]
    outputs = [arena(index) for index in range(1, len(buffers))] + [external(KIB)] * num_external
    return region(name, buffers, (num_lines,) * num_inputs, outputs, num_lines)


def layer_call(
    region: str, layer: int, phase: Phase, inputs: Sequence[str], outputs: Sequence[str]
) -> StepCall:
    """The pass of one layer of class L."""
    name = f"{region}@{layer}"
    return call(name, region, phase, inputs, outputs, layer_class="L", instance=layer)


def recomputer(step: MovableStep) -> Callable[[RecomputeKey], RecomputeRegion]:
    """Regions that make slots again, read off the operators of the step's classes."""
    known: dict[RecomputeKey, RecomputeRegion] = {}

    def recompute(key: RecomputeKey) -> RecomputeRegion:
        if key not in known:
            known[key] = _recompute_region(step, key)
        return known[key]

    return recompute


def _recompute_region(step: MovableStep, key: RecomputeKey) -> RecomputeRegion:
    cls = step.classes[key.class_key]
    ops, made = closure_of(cls, key.slots, key.passing), {None, *key.slots, *key.passing}
    sources = {cls.ops[source].slot for op in ops for source in cls.ops[op].inputs}
    read = sorted(slot for slot in sources.difference(made) if slot is not None)
    sizes = {
        cls.slots[slot].name: cls.slots[slot].size_bytes
        if key.rows is None
        else key.rows * cls.slots[slot].row_bytes
        for slot in key.slots
    }
    return RecomputeRegion(
        key=key,
        profile=by_lines(key.region, len(ops), sizes, 512, num_inputs=len(read)),
        inputs=tuple(
            RegionInput(forward_input=0) if cls.slots[slot].is_input else RegionInput(slot=slot)
            for slot in read
        ),
        seconds=recompute_seconds(step, key),
    )


def costs_of(step: MovableStep, *regions: RecomputeRegion) -> StepCosts:
    """The step's costs and the seconds of ``regions``."""
    more = {region.key.region: region.seconds for region in regions}
    return replace(step.costs, region_s={**step.costs.region_s, **more})


def with_regions(costs: StepCosts, region_s: Mapping[str, float]) -> StepCosts:
    """``costs`` that know these regions too."""
    return replace(costs, region_s={**costs.region_s, **region_s})


class Live:
    """A placement without loss."""

    def __init__(self, problem: Problem) -> None:
        self.peak_bytes = peak_live_bytes(problem)
