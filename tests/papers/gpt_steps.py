"""A GPT's step as the policies see it, with the sizes and seconds of ``planners.layer_costs``.

``num_layers`` layers L, then the head H; a layer reads x and leaves n1, q, k, v, o, x2, n2, fc1,
gelu for its backward, which also reads x.
"""

from memo_compile.movable import Layer, LayerClass, LayerOp, MovableStep, Slot, StepCosts
from memo_compile.planners.layer_costs import layer_tensors
from memo_compile.planners.mfu import Rates, Training, layer_times
from memo_compile.problem import Phase, Problem, StepCall
from tests.unit.movable_steps import call, region

READS = {
    "x": (),
    "n1": ("x",),
    "q": ("n1",),
    "k": ("n1",),
    "v": ("n1",),
    "o": ("q", "k", "v"),
    "x2": ("x", "o"),
    "n2": ("x2",),
    "fc1": ("n2",),
    "gelu": ("fc1",),
}
"""Tensor -> what makes it reads."""

NAMES = tuple(READS)
TRANSIENT_BYTES = 512
EDGE_S = 1e-9
"""Of the calls before and after the layers: nothing hides there."""


def gpt_step(training: Training, rates: Rates, num_layers: int) -> MovableStep:
    """The step of one device; attention mixes tokens, all else is row by row."""
    tokens = int(training.tokens_per_device)
    tensors = {one.name: one for one in layer_tensors(training.shape, training.seq)}
    assert tuple(tensors) == NAMES
    sizes = {name: tensors[name].bytes_per_token * tokens for name in NAMES}
    seconds = {
        name: tensors[name].seconds_per_token(rates.hardware, rates.efficiency) * tokens
        for name in NAMES
    }
    times = layer_times(training, rates)
    region_s = {name: EDGE_S for name in ("P", "H", "Hb", "Pb")}
    region_s |= {"L": times.forward_s, "Lb": times.backward_s}
    return MovableStep(
        problem=_problem(num_layers, sizes),
        classes={"L": _layer_class(sizes, seconds, tokens)},
        layers=tuple(
            Layer(
                class_key="L",
                forward=f"L@{i}",
                backward=f"Lb@{i}",
                values=tuple(f"{name}.{i}" for name in NAMES),
            )
            for i in range(num_layers)
        ),
        costs=StepCosts(
            region_s=region_s,
            d2h_bytes_per_s=rates.copy_bytes_per_s,
            h2d_bytes_per_s=rates.copy_bytes_per_s,
        ),
    )


def _layer_class(sizes: dict[str, int], seconds: dict[str, float], tokens: int) -> LayerClass:
    slots = tuple(
        Slot(
            name=f"{name}.0",
            size_bytes=sizes[name],
            can_recompute=name != "x",
            is_input=name == "x",
            is_attention=name == "o",
            num_rows=tokens,
            row_bytes=sizes[name] // tokens,
        )
        for name in NAMES
    )
    ops = tuple(
        LayerOp(
            name=f"op_{name}",
            seconds=seconds[name],
            output_bytes=sizes[name],
            inputs=tuple(map(NAMES.index, reads)),
            slot=index,
            can_recompute=name != "x",
            row_wise=name != "o",
        )
        for index, (name, reads) in enumerate(READS.items())
    )
    return LayerClass(key="L", slots=slots, ops=ops)


def _problem(num_layers: int, sizes: dict[str, int]) -> Problem:
    own = {name: sizes[name] for name in NAMES if name != "x"}
    saved = {"y": sizes["x"], **own}
    transient = TRANSIENT_BYTES
    regions = {
        "P": region("P", 1, {"x": sizes["x"]}, transient, num_inputs=1),
        "L": region("L", len(saved), saved, transient, num_inputs=1),
        "H": region("H", 1, {}, transient, num_inputs=1, external=("loss",)),
        "Hb": region("Hb", 1, {"g": sizes["x"]}, transient, num_inputs=2),
        "Lb": region(
            "Lb", 4, {"g": sizes["x"]}, transient, num_inputs=1 + len(NAMES), external=("dw",)
        ),
        "Pb": region("Pb", 1, {}, transient, num_inputs=1, external=("dw",)),
    }
    return Problem(regions=regions, calls=_calls(num_layers, own), inputs=("ids", "tangent"))


def _calls(num_layers: int, own: dict[str, int]) -> tuple[StepCall, ...]:
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    calls = [call("P", "P", forward, ("ids",), ("x.0",))]
    for i in range(num_layers):
        made = (f"x.{i + 1}", *(f"{name}.{i}" for name in own))
        calls.append(call(f"L@{i}", "L", forward, (f"x.{i}",), made, i))
    top = f"x.{num_layers}"
    calls.append(call("H", "H", forward, (top,), ("loss",)))
    calls.append(call("Hb", "Hb", backward, ("tangent", top), (f"g.{num_layers}",)))
    for i in reversed(range(num_layers)):
        read = (f"g.{i + 1}", *(f"{name}.{i}" for name in NAMES))
        calls.append(call(f"Lb@{i}", "Lb", backward, read, (f"g.{i}", f"dw.{i}"), i))
    calls.append(call("Pb", "Pb", backward, ("g.0",), ("dw.in",)))
    return tuple(calls)
