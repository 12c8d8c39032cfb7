"""Synthetic steps whose layers may move their saved values, for tests of moves and of policies.

A prologue P, ``num_layers`` layers L and a head H. A layer reads x and leaves four values:

    x -> [L] -> next x, a (attention), b = norm(x), c = fc(b) (rows), d = act(c) (rows)

Its backward reads the next gradient, x, a, b, c and d. Slots are x, a, b, c, d, in this order.
"""

from collections.abc import Callable
from dataclasses import replace

from memo_compile.movable import (
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
from memo_compile.planners.moves import recompute_closure, recompute_seconds
from memo_compile.problem import (
    FixedBytes,
    OutputSlot,
    Phase,
    Problem,
    RegionBuffer,
    RegionProfile,
    StepCall,
    Storage,
    align,
)

KIB = 1024
NUM_ROWS = 8
ROW_BYTES = {"x": KIB, "a": KIB, "b": KIB, "c": 4 * KIB, "d": 4 * KIB}
SLOTS = tuple(ROW_BYTES)
OP_SECONDS = {"x": 0.0, "a": 0.4, "b": 0.05, "c": 0.3, "d": 0.05}
FORWARD_S, BACKWARD_S = 1.0, 2.0
ARENA = Storage.ARENA


def movable_step(
    num_layers: int,
    *,
    scale: int = 1,
    bytes_per_s: float = 16 * KIB,
    copy_latency_s: float = 0.0,
    token_granule: int = 1,
    transient_bytes: int = 2 * KIB,
) -> MovableStep:
    """A step of ``num_layers`` equal layers; sizes are ``scale`` times those of ROW_BYTES."""
    sizes = {name: scale * NUM_ROWS * size for name, size in ROW_BYTES.items()}
    costs = StepCosts(
        region_s={"P": 0.5, "L": FORWARD_S, "H": 0.5, "Hb": 0.5, "Lb": BACKWARD_S, "Pb": 0.5},
        d2h_bytes_per_s=bytes_per_s * scale,
        h2d_bytes_per_s=bytes_per_s * scale,
        copy_latency_s=copy_latency_s,
    )
    layers = tuple(
        Layer(
            class_key="L",
            forward=f"L@{i}",
            backward=f"Lb@{i}",
            values=tuple(f"{slot}{i}" for slot in SLOTS),
        )
        for i in range(num_layers)
    )
    return MovableStep(
        problem=_problem(num_layers, sizes, transient_bytes),
        classes={"L": _layer_class(sizes, scale)},
        layers=layers,
        costs=costs,
        token_granule=token_granule,
    )


def _layer_class(sizes: dict[str, int], scale: int) -> LayerClass:
    reads = {"x": (), "a": (0,), "b": (0,), "c": (2,), "d": (3,)}
    return LayerClass(
        key="L",
        slots=tuple(
            Slot(
                name=f"{name}0",
                size_bytes=sizes[name],
                can_recompute=name in "bcd",
                is_input=name == "x",
                is_attention=name == "a",
                num_rows=NUM_ROWS,
                row_bytes=scale * ROW_BYTES[name],
            )
            for name in SLOTS
        ),
        ops=tuple(
            LayerOp(
                name=f"op_{name}",
                seconds=OP_SECONDS[name],
                output_bytes=sizes[name],
                inputs=reads[name],
                slot=index,
                can_recompute=name in "bcd",
                row_wise=name != "a",
            )
            for index, name in enumerate(SLOTS)
        ),
    )


def _problem(num_layers: int, sizes: dict[str, int], transient_bytes: int) -> Problem:
    transient = align(transient_bytes)
    saved = {name: sizes[name] for name in ("x", "a", "b", "c", "d")}
    regions = {
        "P": region("P", 1, {"x": sizes["x"]}, transient, num_inputs=1),
        "L": region("L", 5, saved, transient, num_inputs=1),
        "H": region("H", 1, {}, transient, num_inputs=1, external=("loss",)),
        "Hb": region("Hb", 1, {"g": sizes["x"]}, transient, num_inputs=2),
        "Lb": region("Lb", 4, {"g": sizes["x"]}, transient, num_inputs=6, external=("dw",)),
        "Pb": region("Pb", 1, {}, transient, num_inputs=1, external=("dw",)),
    }
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    calls = [call("P", "P", forward, ("in",), ("x0",))]
    for i in range(num_layers):
        made = (f"x{i + 1}", *(f"{name}{i}" for name in "abcd"))
        calls.append(call(f"L@{i}", "L", forward, (f"x{i}",), made, i))
    last = num_layers
    calls.append(call("H", "H", forward, (f"x{last}",), ("loss",)))
    calls.append(call("Hb", "Hb", backward, ("tangent", f"x{last}"), (f"g{last}",)))
    for i in reversed(range(num_layers)):
        read = (f"g{i + 1}", *(f"{name}{i}" for name in SLOTS))
        calls.append(call(f"Lb@{i}", "Lb", backward, read, (f"g{i}", f"dw{i}"), i))
    calls.append(call("Pb", "Pb", backward, ("g0",), ("dwp",)))
    return Problem(
        regions=regions,
        calls=tuple(calls),
        inputs=("in", "tangent"),
        fixed=FixedBytes(parameters=64 * KIB, gradients=64 * KIB, new_gradients=64 * KIB),
    )


def region(
    name: str,
    num_lines: int,
    arena: dict[str, int],
    transient_bytes: int,
    *,
    num_inputs: int,
    external: tuple[str, ...] = (),
) -> RegionProfile:
    """A region with one transient and one arena buffer for each of ``arena``, made line by line."""
    buffers = [RegionBuffer(name="t", size_bytes=transient_bytes, start=0, end=num_lines)]
    slots = []
    for at, (buffer, size_bytes) in enumerate(arena.items()):
        start = min(at, num_lines - 1)
        buffers.append(
            RegionBuffer(name=buffer, size_bytes=align(size_bytes), start=start, end=num_lines)
        )
        slots.append(OutputSlot(storage=ARENA, index=at + 1))
    slots += [OutputSlot(storage=Storage.EXTERNAL, size_bytes=KIB) for _ in external]
    return RegionProfile(
        name=name,
        num_lines=num_lines,
        buffers=tuple(buffers),
        input_ends=(num_lines,) * num_inputs,
        outputs=tuple(slots),
    )


def call(
    name: str,
    region: str,
    phase: Phase,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    instance: int | None = None,
) -> StepCall:
    return StepCall(
        name=name,
        region=region,
        phase=phase,
        inputs=inputs,
        outputs=outputs,
        layer_class=None if instance is None else "L",
        instance=instance or 0,
    )


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
    others = [slot for slot in range(len(cls.slots)) if slot not in key.slots]
    ops = recompute_closure(cls, key.slots, others)
    sources = {cls.ops[source].slot for op in ops for source in cls.ops[op].inputs}
    read = sorted(slot for slot in sources if slot is not None and slot not in key.slots)
    sizes = {
        cls.slots[slot].name: cls.slots[slot].size_bytes
        if key.rows is None
        else key.rows * cls.slots[slot].row_bytes
        for slot in key.slots
    }
    return RecomputeRegion(
        key=key,
        profile=region(key.region, len(ops), sizes, 512, num_inputs=len(read)),
        inputs=tuple(
            RegionInput(forward_input=0) if cls.slots[slot].is_input else RegionInput(slot=slot)
            for slot in read
        ),
        seconds=recompute_seconds(step, key),
    )


def costs_of(step: MovableStep, *regions: RecomputeRegion) -> StepCosts:
    """The step's costs and the seconds of ``regions``."""
    more = {one.key.region: one.seconds for one in regions}
    return replace(step.costs, region_s={**step.costs.region_s, **more})
