"""A training step of a GPT from its shape alone, as the policies see a captured one.

One sequence per device group, tensor parallel with sequence parallel: every activation is divided
over ``tp`` devices. The saved tensors of a layer are MEMO's 16 b s h: its input, norm, q, k, v,
attention and its log-sum-exp, residual, norm, fc1 (4), gelu (4). Matrix products and attention run
at a share of the peak FLOP/s, all else at a share of the memory bandwidth; communication is not
counted. The loss is computed on ``HEAD_TILES`` slices of the tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.models import ModelShape
from memo_compile.planners.move_rules import closure_of
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
from memo_compile.step.problem import (
    FixedBytes,
    LayerClassInfo,
    Phase,
    Problem,
    RegionBuffer,
    RegionOutput,
    RegionProfile,
    StepCall,
    Storage,
    align,
)
from memo_compile.step.simulate import peak_live_bytes

ELEMENT_BYTES = 2
HEAD_TILES = 16
"""Slices of the tokens whose logits exist at one time."""
OPTIMIZER_BYTES = 12
"""Per parameter: float32 master weight and two moments."""
GEMM_EFFICIENCY = 0.6
HBM_EFFICIENCY = 0.8
"""The shares of Kwai's paper for a layer of this kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is trained on what."""

    shape: ModelShape
    seq: int
    tp: int
    hardware: HardwareProfile
    copy_bytes_per_s: float

    def activation_bytes(self, units: float = 1.0) -> int:
        """Bytes of ``units`` x b s h on one device."""
        elements = self.seq * self.shape.hidden * units
        return align(round(elements * ELEMENT_BYTES / self.tp))

    def gemm_s(self, flops: float) -> float:
        """Seconds of a matrix product of all devices' ``flops``."""
        return flops / self.tp / (self.hardware.peak_flops_per_s * GEMM_EFFICIENCY)

    def memory_s(self, units: float) -> float:
        """Seconds to move ``units`` x b s h through memory."""
        return self.activation_bytes(units) / (self.hardware.hbm_bytes_per_s * HBM_EFFICIENCY)


@dataclass(frozen=True, slots=True)
class _Op:
    name: str
    units: float
    seconds: float
    inputs: tuple[str, ...]
    saved: bool = True
    row_wise: bool = True


def _forward_ops(setting: Setting) -> list[_Op]:
    """The operators of a layer's forward; the log-sum-exp has 4 bytes a head and token."""
    h, s, f = setting.shape.hidden, setting.seq, setting.shape.ffn
    wide = f / h
    square = setting.gemm_s(2.0 * s * h * h)
    lse = 4 * setting.shape.num_heads / (ELEMENT_BYTES * h)
    return [
        _Op("n1", 1, setting.memory_s(2), ("x",)),
        _Op("q", 1, square, ("n1",)),
        _Op("k", 1, square, ("n1",)),
        _Op("v", 1, square, ("n1",)),
        _Op("attention", 0, setting.gemm_s(2.0 * s * s * h), ("q", "k", "v"), False, False),
        _Op("o", 1, 0.0, ("attention",)),
        _Op("lse", lse, 0.0, ("attention",)),
        _Op("proj", 1, square, ("o",), False),
        _Op("x2", 1, setting.memory_s(3), ("x", "proj")),
        _Op("n2", 1, setting.memory_s(2), ("x2",)),
        _Op("fc1", wide, setting.gemm_s(2.0 * s * h * f), ("n2",)),
        _Op("gelu", wide, setting.memory_s(2 * wide), ("fc1",)),
        _Op("fc2", 1, setting.gemm_s(2.0 * s * h * f), ("gelu",), False),
        _Op("y", 1, setting.memory_s(3), ("x2", "fc2"), False),
    ]


ATTENTION = ("o", "lse")


def gpt_step(setting: Setting) -> MovableStep:
    """The step under policy SAVE."""
    ops = _forward_ops(setting)
    saved = ["x", *(op.name for op in ops if op.saved)]
    cls = _layer_class(setting, ops, saved)
    regions, seconds = _regions(setting, ops, saved)
    count = setting.shape.num_layers
    calls = [_call("prologue", "prologue", Phase.FORWARD, (), ("x.0",))]
    layers = []
    for i in range(count):
        values = tuple(f"{name}.{i}" for name in saved)
        calls.append(
            _call(f"layer@{i}", "layer", Phase.FORWARD, (values[0],), (f"x.{i + 1}", *values[1:]))
        )
        layers.append(
            Layer(
                class_key="layer",
                calls=(f"layer@{i}",),
                inputs=values[:1],
                backward=f"back@{i}",
                values=values,
            )
        )
    calls.append(_call("head", "head", Phase.FORWARD, (f"x.{count}",), ("loss",)))
    calls.append(
        _call("head_back", "head_back", Phase.BACKWARD, (f"x.{count}",), (f"g.{count}", "w.head"))
    )
    for i in reversed(range(count)):
        reads = (f"g.{i + 1}", *layers[i].values)
        calls.append(_call(f"back@{i}", "back", Phase.BACKWARD, reads, (f"g.{i}", f"w.{i}")))
    calls.append(_call("embed_back", "embed_back", Phase.BACKWARD, ("g.0",), ("w.embed",)))
    parameters = setting.shape.num_parameters // setting.tp
    problem = Problem(
        regions=regions,
        calls=tuple(calls),
        fixed=FixedBytes(
            parameters=ELEMENT_BYTES * parameters,
            gradients=ELEMENT_BYTES * parameters,
            new_gradients=ELEMENT_BYTES * parameters,
            optimizer_state=OPTIMIZER_BYTES * parameters,
        ),
        layer_classes=(
            LayerClassInfo(num_layers=count, module_path="layers.*", period=1, num_regions=2),
        ),
    )
    costs = StepCosts(
        region_s=seconds,
        d2h_bytes_per_s=setting.copy_bytes_per_s,
        h2d_bytes_per_s=setting.copy_bytes_per_s,
        copy_latency_s=10e-6,
        source=f"roofline: {setting.hardware.name}",
    )
    return MovableStep(problem=problem, classes={"layer": cls}, layers=tuple(layers), costs=costs)


def _call(
    name: str, region: str, phase: Phase, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> StepCall:
    return StepCall(
        name=name,
        region=region,
        phase=phase,
        inputs=inputs,
        outputs=outputs,
        layer_class="layer" if "@" in name else None,
        instance=int(name.partition("@")[2] or 0),
    )


def _layer_class(setting: Setting, ops: Sequence[_Op], saved: Sequence[str]) -> LayerClass:
    size = {op.name: setting.activation_bytes(op.units) for op in ops}
    size["x"] = setting.activation_bytes()
    slots = tuple(
        Slot(
            name=name,
            size_bytes=size[name],
            can_recompute=name != "x",
            is_input=name == "x",
            is_attention=name in ATTENTION,
            num_rows=setting.seq,
            row_bytes=size[name] // setting.seq,
        )
        for name in saved
    )
    index = {"x": 0, **{op.name: at for at, op in enumerate(ops, start=1)}}
    first = LayerOp(name="x", seconds=0.0, slot=0, can_recompute=False)
    others = (
        LayerOp(
            name=op.name,
            seconds=op.seconds,
            inputs=tuple(index[name] for name in op.inputs),
            slot=saved.index(op.name) if op.saved else None,
            row_wise=op.row_wise,
        )
        for op in ops
    )
    return LayerClass(key="layer", slots=slots, ops=(first, *others))


def _regions(
    setting: Setting, ops: Sequence[_Op], saved: Sequence[str]
) -> tuple[dict[str, RegionProfile], dict[str, float]]:
    """The six regions of the step and their seconds."""
    shape, unit = setting.shape, setting.activation_bytes()
    layer_s = sum(op.seconds for op in ops)
    head_s = setting.gemm_s(2.0 * setting.seq * shape.hidden * shape.vocab)
    logits = align(setting.seq * shape.vocab * 4 // setting.tp // HEAD_TILES)
    layer_w = ELEMENT_BYTES * shape.layer_parameters // setting.tp
    embed_w = ELEMENT_BYTES * shape.embedding_parameters // setting.tp
    found = [
        _profile("prologue", 1, [("x", unit, 0, 1)], (), ["x"]),
        _forward_profile(setting, ops, saved),
        _profile("head", 2, [("logits", logits, 0, 2)], (2,), [], (512,)),
        _profile(
            "head_back",
            2,
            [("logits", 2 * logits, 0, 2), ("g", unit, 0, 2)],
            (2,),
            ["g"],
            (embed_w,),
        ),
        _backward_profile(setting, saved, layer_w),
        _profile("embed_back", 1, [], (1,), [], (embed_w,)),
    ]
    seconds = {
        "prologue": setting.memory_s(2),
        "layer": layer_s,
        "head": head_s,
        "head_back": 2 * head_s,
        "back": 2 * layer_s,
        "embed_back": setting.memory_s(2),
    }
    return {profile.name: profile for profile in found}, seconds


def _profile(
    name: str,
    num_lines: int,
    buffers: Sequence[tuple[str, int, int, int]],
    input_ends: tuple[int, ...],
    outputs: Sequence[str],
    external: Sequence[int] = (),
) -> RegionProfile:
    names = [buffer[0] for buffer in buffers]
    return RegionProfile(
        name=name,
        num_lines=num_lines,
        buffers=tuple(
            RegionBuffer(name=label, size_bytes=size, start=start, end=end)
            for label, size, start, end in buffers
        ),
        input_ends=input_ends,
        outputs=(
            *(RegionOutput(storage=Storage.ARENA, index=names.index(output)) for output in outputs),
            *(RegionOutput(storage=Storage.EXTERNAL, size_bytes=size) for size in external),
        ),
    )


def _forward_profile(setting: Setting, ops: Sequence[_Op], saved: Sequence[str]) -> RegionProfile:
    last = {name: line + 1 for line, op in enumerate(ops) for name in op.inputs}
    outputs = ["y", *saved[1:]]
    buffers = [
        (
            op.name,
            setting.activation_bytes(op.units),
            line,
            len(ops) if op.name in outputs else last[op.name],
        )
        for line, op in enumerate(ops)
        if op.units
    ]
    return _profile("layer", len(ops), buffers, (last["x"],), outputs)


def _backward_profile(setting: Setting, saved: Sequence[str], weight_bytes: int) -> RegionProfile:
    """Backward of the MLP (lines 0-3), then of attention (4-7): gradients of what was computed."""
    wide = setting.shape.ffn / setting.shape.hidden
    size = setting.activation_bytes
    buffers = [
        ("d_gelu", size(wide), 0, 2),
        ("d_fc1", size(wide), 1, 3),
        ("d_n2", size(), 2, 4),
        ("d_x2", size(), 3, 8),
        ("d_o", size(), 4, 6),
        ("d_qkv", size(3), 5, 7),
        ("d_n1", size(), 6, 8),
        ("g", size(), 7, 8),
    ]
    ends = {
        "gelu": 1,
        "fc1": 2,
        "n2": 3,
        "x2": 4,
        "o": 6,
        "lse": 6,
        "q": 6,
        "k": 6,
        "v": 6,
        "n1": 7,
        "x": 8,
    }
    input_ends = (4, *(ends[name] for name in saved))
    return _profile("back", 8, buffers, input_ends, ["g"], (weight_bytes,))


@dataclass(frozen=True, slots=True)
class LivePlacement:
    """What ``choose`` asks of a placement, with the bytes alive as its height."""

    peak_bytes: int


def place_live(problem: Problem) -> LivePlacement:
    """A placement without loss."""
    return LivePlacement(peak_live_bytes(problem))


def recompute_of(step: MovableStep) -> Callable[[RecomputeKey], RecomputeRegion]:
    """Recompute regions of ``step``, one line for each operator that runs."""
    size = {buffer.name: buffer.size_bytes for buffer in step.problem.regions["layer"].buffers}

    def make(key: RecomputeKey) -> RecomputeRegion:
        cls = step.classes[key.class_key]
        closure = closure_of(cls, key.slots, key.passing)
        num_rows = max(cls.slots[slot].num_rows for slot in key.slots)
        share = 1.0 if key.rows is None else key.rows / num_rows
        line_of = {op: line for line, op in enumerate(closure)}
        last = {
            source: line + 1 for line, op in enumerate(closure) for source in cls.ops[op].inputs
        }
        end = len(closure)
        wanted = [op for op in closure if cls.ops[op].slot in key.slots]
        names = {op: cls.ops[op].name for op in closure}
        buffers = [
            (
                names[op],
                align(round(size[names[op]] * share)),
                line_of[op],
                end if op in wanted else max(last.get(op, 0), line_of[op] + 1),
            )
            for op in closure
            if names[op] in size
        ]
        reads = sorted(op for op in last if op not in line_of)
        slots = [slot for slot in (cls.ops[op].slot for op in reads) if slot is not None]
        by_slot = {cls.ops[op].slot: names[op] for op in wanted}
        return RecomputeRegion(
            key=key,
            profile=_profile(
                key.region,
                end,
                buffers,
                tuple(last[op] for op in reads),
                [by_slot[slot] for slot in key.slots],
            ),
            inputs=tuple(RegionInput(slot=slot) for slot in slots),
            seconds=share * sum(cls.ops[op].seconds for op in closure),
        )

    return make
