"""A GPT's step on one of several tensor parallel GPUs, with the figures of ``lynx_layers``.

A layer's forward is three calls with a reduction after the first and the second; its backward is
four with two. Values of layer i:

    forward   x -> [La] -> n1, qkv, o, y1 ~ r1 ; [Lb reads x, r1] -> x2, n2, fc1, gelu, y2 ~ r2
              [Lc reads x2, r2] -> next x
    backward  g -> [Ma reads gelu, fc1, n2] -> d2 ~ e2
              [Mb reads g, e2, x2, o, qkv, n1] -> h, d1 ~ e1
              [Mw: weights' gradients, beside e1] ; [Mc reads h, e1, x] -> next g

``~`` is an all_reduce in place. Where n1 and x2 come from is not recomputed: r1 is another's sum.
"""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.lynx import LINK_EFFICIENCY, describe_layer
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.models import ModelShape
from memo_compile.papers.layer_costs import BACKWARD_FACTOR, Efficiency
from memo_compile.step.movable import Layer, LayerClass, LayerOp, MovableStep, Slot, StepCosts
from memo_compile.step.problem import (
    CallKind,
    Layout,
    Phase,
    Problem,
    RegionOutput,
    RegionProfile,
    StepCall,
    Storage,
    align,
)
from tests.steps.movable import by_lines
from tests.steps.parts import call

OPERATORS = {
    "n1": ("norm1", ("x",)),
    "qkv": ("qkv", ("n1",)),
    "o": ("attention", ("qkv",)),
    "x2": ("residual1", ("x",)),
    "n2": ("norm2", ("x2",)),
    "fc1": ("ffn_in", ("n2",)),
    "gelu": ("activation", ("fc1",)),
}
"""What a layer saves beside its input -> the operator of ``describe_layer``, and what it reads."""

ROWS = (
    *("norm1", "qkv", "attention", "projection", "reduce1", "dropout1", "residual1", "norm2"),
    *("ffn_in", "activation", "ffn_out", "reduce2", "residual2"),
)
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
PIECES = {
    "La": ("norm1", "qkv", "attention", "projection"),
    "Lb": ("dropout1", "residual1", "norm2", "ffn_in", "activation", "ffn_out"),
    "Lc": ("residual2",),
}
"""The calls of a layer's forward, and the operators in them."""

EDGE_S = 1e-6
EFFICIENCY = Efficiency(gemm=0.5, hbm=0.8)
COPY_BYTES_PER_S = 20e9
SLOTS = ("x", *OPERATORS)
READ_FIRST = ("n2", "fc1", "gelu")
"""Slots that the first call of a layer's backward reads; the others are read by its fourth."""


def parallel_gpt(
    shape: ModelShape, *, seq: int, tp: int, hardware: HardwareProfile, num_layers: int
) -> MovableStep:
    """The step of one sequence; layers of ``shape``, of which there are ``num_layers``."""
    costs = describe_layer(
        shape, seq=seq, micro_batch=1, tp=tp, hardware=hardware, efficiency=EFFICIENCY
    )
    sizes = dict(zip(ROWS, map(align, map(int, costs.ops.sizes)), strict=True))
    saved = {"x": sizes["residual2"]}
    saved |= {name: sizes[operator] for name, (operator, _) in OPERATORS.items()}
    return parallel_step(
        saved,
        dict(zip(ROWS, map(float, costs.ops.times), strict=True)),
        num_rows=seq,
        num_layers=num_layers,
        copy_bytes_per_s=COPY_BYTES_PER_S,
        comm_bytes_per_s=hardware.link_bytes_per_s * LINK_EFFICIENCY / (2 * (tp - 1) / tp),
        comm_slowdown=hardware.comm_slowdown,
    )


def parallel_step(
    saved: Mapping[str, int],
    seconds: Mapping[str, float],
    *,
    num_rows: int,
    num_layers: int,
    copy_bytes_per_s: float,
    comm_bytes_per_s: float,
    comm_slowdown: float = 1.0,
    returns_sum: bool = False,
) -> MovableStep:
    """Layers that save so many bytes, by name, and whose operators (``ROWS``) take so long.

    With ``returns_sum`` the forward's result is the last reduction, which nothing computes with.
    """
    region_s = {name: sum(map(seconds.__getitem__, rows)) for name, rows in PIECES.items()}
    region_s |= {
        "Ma": BACKWARD_FACTOR * sum(seconds[row] for row in ("ffn_in", "activation", "ffn_out")),
        "Mb": seconds["norm2"] + BACKWARD_FACTOR * (seconds["attention"] + seconds["projection"]),
        "Mw": seconds["qkv"],
        "Mc": seconds["norm1"],
        **dict.fromkeys(("P", "H", "Hb", "Pb"), EDGE_S),
        **dict.fromkeys(("reduce", "arrived"), 0.0),
    }
    return MovableStep(
        problem=_problem(saved, num_layers, returns_sum=returns_sum),
        classes={"L": _layer_class(saved, seconds, num_rows)},
        layers=tuple(
            Layer(
                class_key="L",
                calls=tuple(f"{piece}@{i}" for piece in _pieces(i, num_layers, returns_sum)),
                inputs=(f"x.{i}",),
                backward=f"Ma@{i}",
                values=tuple(f"{name}.{i}" for name in SLOTS),
            )
            for i in range(num_layers)
        ),
        costs=StepCosts(
            region_s=region_s,
            d2h_bytes_per_s=copy_bytes_per_s,
            h2d_bytes_per_s=copy_bytes_per_s,
            comm_bytes_per_s=comm_bytes_per_s,
            comm_slowdown=comm_slowdown,
        ),
        token_granule=1 if num_rows < 128 else 128,
    )


def _layer_class(
    saved: Mapping[str, int], seconds: Mapping[str, float], num_rows: int
) -> LayerClass:
    slots = tuple(
        Slot(
            name=f"{name}.0",
            size_bytes=size_bytes,
            can_recompute=name not in ("x", "x2"),
            is_input=name == "x",
            is_attention=name == "o",
            num_rows=num_rows,
            row_bytes=size_bytes // num_rows,
            first_read=0 if name in READ_FIRST else 3,
        )
        for name, size_bytes in saved.items()
    )
    ops = [LayerOp(name="op_x", seconds=0.0, slot=0, can_recompute=False)]
    for slot, (name, (operator, reads)) in enumerate(OPERATORS.items(), start=1):
        op = LayerOp(
            name=f"op_{name}",
            seconds=seconds[operator],
            inputs=tuple(map(SLOTS.index, reads)),
            slot=slot,
            can_recompute=name != "x2",
            row_wise=name != "o",
        )
        ops.append(op)
    return LayerClass(key="L", slots=slots, ops=tuple(ops))


def _pieces(layer: int, num_layers: int, returns_sum: bool) -> Sequence[str]:
    ends_early = returns_sum and layer == num_layers - 1
    return tuple(PIECES)[:-1] if ends_early else tuple(PIECES)


def _problem(saved: Mapping[str, int], num_layers: int, *, returns_sum: bool) -> Problem:
    size = saved["x"]
    regions = {
        profile.name: profile
        for profile in (
            _lines("P", 1, 1, x=size),
            _lines("La", 4, 1, **{name: saved[name] for name in ("n1", "qkv", "o")}, y1=size),
            _lines(
                "Lb", 5, 2, **{name: saved[name] for name in ("x2", "n2", "fc1", "gelu")}, y2=size
            ),
            _lines("Lc", 1, 2, x=size),
            _lines("H", 1, 1, results=1),
            _lines("Hb", 1, 2, g=size),
            _lines("Ma", 2, 4, d2=size, results=1),
            _lines("Mb", 3, 6, h=size, dqkv=saved["qkv"], d1=size, results=1),
            _lines("Mw", 1, 2, results=1),
            _lines("Mc", 1, 3, g=size),
            _lines("Pb", 1, 1, results=1),
            _among_ranks("reduce", 1, size),
            _among_ranks("arrived", 2, size),
        )
    }
    forward = [piece for i in range(num_layers) for piece in _forward(i, size)]
    head = [call("H", "H", FORWARD, [f"x.{num_layers}"], ["loss"])]
    last = f"x.{num_layers}"
    if returns_sum:
        last, head = f"x.{num_layers - 1}", []
        del forward[-1]
    calls = [
        call("P", "P", FORWARD, ["in"], ["x.0"]),
        *forward,
        *head,
        call("Hb", "Hb", BACKWARD, ["tangent", last], [f"g.{num_layers}"]),
        *(piece for i in reversed(range(num_layers)) for piece in _backward(i, size)),
        call("Pb", "Pb", BACKWARD, ["g.0"], ["dwp"]),
    ]
    return Problem(regions=regions, calls=tuple(calls), inputs=("in", "tangent"))


def _forward(i: int, size: int) -> Iterator[StepCall]:
    made = [f"{name}.{i}" for name in ("n1", "qkv", "o", "y1")]
    yield _piece("La", i, FORWARD, [f"x.{i}"], made)
    yield from _reduced(i, FORWARD, "y1", "r1", size)
    made = [f"{name}.{i}" for name in ("x2", "n2", "fc1", "gelu", "y2")]
    yield _piece("Lb", i, FORWARD, [f"x.{i}", f"r1.{i}"], made)
    yield from _reduced(i, FORWARD, "y2", "r2", size)
    yield _piece("Lc", i, FORWARD, [f"x2.{i}", f"r2.{i}"], [f"x.{i + 1}"])


def _backward(i: int, size: int) -> Iterator[StepCall]:
    read = [f"g.{i + 1}", *(f"{name}.{i}" for name in ("gelu", "fc1", "n2"))]
    yield _piece("Ma", i, BACKWARD, read, [f"d2.{i}", f"dwa.{i}"])
    yield from _reduced(i, BACKWARD, "d2", "e2", size)
    read = [f"g.{i + 1}", *(f"{name}.{i}" for name in ("e2", "x2", "o", "qkv", "n1"))]
    yield _piece("Mb", i, BACKWARD, read, [f"{name}.{i}" for name in ("h", "dqkv", "d1", "dwb")])
    issue, wait = _reduced(i, BACKWARD, "d1", "e1", size)
    yield issue
    yield _piece("Mw", i, BACKWARD, [f"n1.{i}", f"dqkv.{i}"], [f"dww.{i}"])
    yield wait
    yield _piece("Mc", i, BACKWARD, [f"h.{i}", f"e1.{i}", f"x.{i}"], [f"g.{i}"])


def _piece(
    region: str, layer: int, phase: Phase, inputs: list[str], outputs: list[str]
) -> StepCall:
    return call(
        f"{region}@{layer}", region, phase, inputs, outputs, layer_class="L", instance=layer
    )


def _reduced(
    layer: int, phase: Phase, value: str, shown: str, size: int
) -> tuple[StepCall, StepCall]:
    """A reduction of ``value`` in its place, and its wait, which shows it under another name."""
    name, given, flying = f"reduce.{value}@{layer}", f"{value}.{layer}", f"{value}.flying.{layer}"
    more = {"layer_class": "L", "instance": layer}
    issue = call(
        name,
        "reduce",
        phase,
        [given],
        [flying],
        kind=CallKind.ISSUE,
        reads=(_layout(size),),
        **more,
    )
    wait = call(
        f"wait.{name}",
        "arrived",
        phase,
        [flying, given],
        [f"{shown}.{layer}"],
        kind=CallKind.COMM_WAIT,
        waits_for=name,
        **more,
    )
    return issue, wait


def _layout(size_bytes: int) -> Layout:
    return Layout(dtype="bfloat16", item_bytes=2, size=(size_bytes // 2,), stride=(1,))


def _lines(
    name: str, num_lines: int, num_inputs: int, results: int = 0, **made: int
) -> RegionProfile:
    transient = max(made.values(), default=512)
    return by_lines(name, num_lines, made, transient, num_inputs=num_inputs, num_external=results)


def _among_ranks(name: str, num_inputs: int, size: int) -> RegionProfile:
    return RegionProfile(
        name=name,
        num_lines=1,
        buffers=(),
        input_ends=(1,) * num_inputs,
        outputs=(RegionOutput(storage=Storage.INPUT, index=0),),
        output_layouts=(_layout(size),),
    )
