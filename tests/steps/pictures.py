"""Steps worth drawing: layers that save, offload and recompute, with a timeline and a frontier.

forward of layer k:   x(k) -> attn(k), mlp(k), up(k), x(k + 1), and scratch
attn(k) goes to the host and comes back; mlp(k) is made again; up(k) and x(k) stay.
The last layers keep everything.
"""

import dataclasses
import functools
from collections.abc import Iterator

from memo_compile.planners.place_step import place_step
from memo_compile.step.plans import Decision, FrontierPoint, Plan, Span, Timeline
from memo_compile.step.problem import (
    COPY_REGION,
    CallKind,
    Copy,
    FixedBytes,
    LayerClassInfo,
    Phase,
    Problem,
    RegionBuffer,
    RegionProfile,
    StepCall,
    TensorInfo,
    copy_regions,
    reload_region,
)
from tests.steps.parts import MIB, arena, buffer, call, external, region

ATTN, MLP, UP, X = 24 * MIB, 48 * MIB, 32 * MIB, 16 * MIB
LINES = 60
SECONDS = {
    "fwd": 0.010,
    "bwd": 0.021,
    "recompute": 0.004,
    "head": 0.002,
    "d2h": 0.012,
    "h2d": 0.0235,
}


def _scratch(count: int, size: int) -> tuple[RegionBuffer, ...]:
    """Small lives one after the other, two at a time."""
    step = (LINES - 4) / count
    sizes = (size * (1 + i % 3) + 512 * (i % 5) for i in range(count))
    return tuple(
        buffer(f"t{i}", size_bytes, int(i * step), int(i * step + 2 * step) + 1)
        for i, size_bytes in enumerate(sizes)
    )


def _region(name: str, kept: dict[str, tuple[int, int]], ends: tuple[int, ...]) -> RegionProfile:
    """A region that makes ``kept`` (name -> size, first line) beside its scratch."""
    buffers = [buffer(key, size, start, LINES) for key, (size, start) in kept.items()]
    outputs = [arena(index) for index in range(len(buffers))]
    if name.endswith("bwd"):
        outputs.append(external(20 * MIB))
    return region(name, (*buffers, *_scratch(24, 3 * MIB)), ends, outputs, LINES)


def _regions() -> dict[str, RegionProfile]:
    made = {"attn": (ATTN, 10), "mlp": (MLP, 30), "up": (UP, 28), "x": (X, 50)}
    forward = _region("fwd", made, (40,))
    recompute = _region("recompute", {"mlp": (MLP, 30)}, (40, 20))
    backward = _region("bwd", {"g": (X, 40)}, (50, 45, 30, 55, 20))
    head = region("head", [buffer("logits", 64 * MIB, 1, 6)], [2], [external(512)], 6)
    tail = region("tail", [buffer("g", X, 3, 6)], [2, 1], [arena(0)], 6)
    regions = {made.name: made for made in (forward, recompute, backward, head, tail)}
    return {**regions, **copy_regions([ATTN])}


def _copy_call(name: str, kind: CallKind, layer: int, **more: object) -> StepCall:
    forward = kind is CallKind.OFFLOAD or name.startswith("w.d2h")
    fields: dict[str, object] = {
        "region": reload_region(ATTN) if kind is CallKind.RELOAD else COPY_REGION,
        "phase": Phase.FORWARD if forward else Phase.BACKWARD,
        "inputs": (),
        "outputs": (),
        "layer_class": "block",
        "instance": layer,
    }
    return StepCall(name=name, kind=kind, **{**fields, **more})  # type: ignore[arg-type]


def _forward(num_layers: int, moving: int) -> Iterator[StepCall]:
    for k in range(num_layers):
        outputs = (f"attn.{k}", f"mlp.{k}", f"up.{k}", f"x.{k + 1}")
        place = {"layer_class": "block", "instance": k}
        yield call(f"fwd@{k}", "fwd", Phase.FORWARD, [f"x.{k}"], outputs, **place)
        if 0 <= k - 1 < moving:
            yield _copy_call(
                f"w.d2h@{k - 1}",
                CallKind.WAIT,
                k - 1,
                inputs=(f"attn.{k - 1}",),
                waits_for=f"d2h@{k - 1}",
            )
        if k < moving:
            moved = Copy(start_bytes=0, end_bytes=ATTN, host_offset=k * ATTN)
            yield _copy_call(f"d2h@{k}", CallKind.OFFLOAD, k, inputs=(f"attn.{k}",), copy=moved)


def _reload(k: int) -> StepCall:
    moved = Copy(start_bytes=0, end_bytes=ATTN, host_offset=k * ATTN)
    return _copy_call(f"h2d@{k}", CallKind.RELOAD, k, outputs=(f"reloaded.attn.{k}",), copy=moved)


def _backward(num_layers: int, moving: int) -> Iterator[StepCall]:
    for k in reversed(range(num_layers)):
        attn, mlp = f"attn.{k}", f"mlp.{k}"
        place = {"layer_class": "block", "instance": k}
        if 0 <= k - 1 < moving:
            yield _reload(k - 1)
        if k < moving:
            attn, mlp = f"reloaded.{attn}", f"recomputed.{mlp}"
            yield _copy_call(f"w.h2d@{k}", CallKind.WAIT, k, inputs=(attn,), waits_for=f"h2d@{k}")
            reads, kind = [f"x.{k}", attn], CallKind.RECOMPUTE
            yield call(
                f"recompute@{k}", "recompute", Phase.BACKWARD, reads, [mlp], kind=kind, **place
            )
        reads = [attn, mlp, f"up.{k}", f"x.{k}", f"g.{k + 1}"]
        yield call(f"bwd@{k}", "bwd", Phase.BACKWARD, reads, [f"g.{k}", f"w.{k}"], **place)


def layered_problem(num_layers: int = 12) -> Problem:
    moving = max(0, num_layers - 2)
    top = f"x.{num_layers}"
    head = call("head_fwd@0", "head", Phase.FORWARD, [top], ["loss"])
    tail = call("head_bwd@0", "tail", Phase.BACKWARD, ["tangent", top], [f"g.{num_layers}"])
    tensors = {}
    for name, shape, op, line in (
        ("attn.0", (1, 16384, 768), "aten.scaled_dot_product_attention", 76),
        ("mlp.0", (16384, 1536), "aten.mm", 96),
        ("up.0", (16384, 1024), "aten.silu", 97),
        ("x.1", (16384, 512), "aten.add", 99),
    ):
        tensors[name] = TensorInfo(
            shape=shape, dtype="bfloat16", op=op, source=f"train/model.py:{line}"
        )
    return Problem(
        regions=_regions(),
        calls=(
            *_forward(num_layers, moving),
            head,
            tail,
            *_backward(num_layers, moving),
        ),
        inputs=("x.0", "tangent"),
        fixed=FixedBytes(
            parameters=20 * MIB * num_layers,
            gradients=20 * MIB * num_layers,
            new_gradients=20 * MIB * num_layers,
            optimizer_state=40 * MIB * num_layers,
            inputs=16 * MIB,
            outputs=512,
        ),
        layer_classes=(
            LayerClassInfo(
                num_layers=num_layers, module_path="model.layers", period=1, num_regions=3
            ),
        ),
        tensors=tensors,
        host_bytes=moving * ATTN,
    )


def timeline_of(problem: Problem) -> Timeline:
    """Lanes as the simulator fills them: copies queue, waits stall the compute lane."""
    clock, stalled = 0.0, 0.0
    free = {"d2h": 0.0, "h2d": 0.0}
    ended: dict[str, float] = {}
    spans = []
    for current in problem.calls:
        if current.kind in (CallKind.OFFLOAD, CallKind.RELOAD):
            lane = "d2h" if current.kind is CallKind.OFFLOAD else "h2d"
            start = max(clock, free[lane])
            free[lane] = ended[current.name] = start + SECONDS[lane]
            spans.append(Span(lane=lane, name=current.name, start_s=start, end_s=free[lane]))
        elif current.kind is CallKind.WAIT:
            end = max(clock, ended[str(current.waits_for)])
            if end > clock:
                spans.append(Span(lane="stall", name=current.name, start_s=clock, end_s=end))
            stalled += end - clock
            clock = end
        else:
            end = clock + SECONDS.get(current.region, 0.002)
            spans.append(Span(lane="compute", name=current.name, start_s=clock, end_s=end))
            clock = end
    return Timeline(step_s=clock, stall_s=stalled, spans=tuple(spans))


def _decisions() -> tuple[Decision, ...]:
    rows = (
        ("attn.0 [1, 16384, 768]", ATTN, "OFFLOAD", "12 ms of copy hide behind 31 ms of compute"),
        ("mlp.0 [16384, 1536]", MLP, "RECOMPUTE", "recompute costs 4.0 ms, frees 48 MiB"),
        ("up.0 [16384, 1024]", UP, "SAVE", "neither a copy nor time would pay"),
        ("x.1 [16384, 512]", X, "SAVE", "every recomputation reads it"),
    )
    return tuple(
        Decision(
            tensor=tensor,
            layer_class="model.layers",
            bytes=size,
            decision=decision,
            token_fraction=1.0,
            reason=reason,
            source="train/model.py:76",
        )
        for tensor, size, decision, reason in rows
    )


def _frontier(plan: Plan, step_s: float) -> tuple[FrontierPoint, ...]:
    points = (("save", 0.86, 1.62, 0.0), ("memo", 1.0, 1.0, 1.0), ("full-offload", 1.12, 0.93, 2.0))
    more = (("greedy", 1.06, 0.98, 0.5), ("full-recompute", 1.24, 0.88, 0.0))
    return tuple(
        FrontierPoint(
            policy=policy,
            step_s=step_s * time,
            peak_bytes=int(plan.peak_bytes * peak),
            host_bytes=int(plan.host_bytes * host),
            chosen=policy == "memo",
            layers_to_host=int(4 * host),
            layers_recomputed=0 if policy == "save" else 12,
        )
        for policy, time, peak, host in (*points, *more)
    )


@functools.cache
def layered(num_layers: int = 12) -> tuple[Problem, Plan]:
    """A step of ``num_layers`` with everything that a picture can show."""
    problem = layered_problem(num_layers)
    plan = place_step(problem, solver="greedy", decisions=_decisions(), name="graph0")
    timeline = timeline_of(problem)
    plan = dataclasses.replace(
        plan,
        timeline=timeline,
        policy="memo",
        host_bytes=problem.host_bytes,
        budget_bytes=int(plan.peak_bytes * 1.05),
    )
    return problem, dataclasses.replace(plan, frontier=_frontier(plan, timeline.step_s))
