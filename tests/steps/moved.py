"""Small steps with copies, waits and recomputation, written by hand.

A layer's forward makes its output ``y``, and ``s`` and ``a`` for its backward:

forward:  y0 -> [F0] -> y1, s0, a0 -> ... -> yn -> [H] -> loss
backward: g -> [B(n-1) reads y, s, a] -> ... -> [B0] -> gy0
"""

import dataclasses
from collections.abc import Mapping

from memo_compile.check.check_moves import Recomputation
from memo_compile.step.problem import (
    COPY_REGION,
    CallKind,
    Copy,
    FixedBytes,
    Into,
    Phase,
    Problem,
    RegionProfile,
    StepCall,
    copy_regions,
    reload_region,
)
from tests.steps.parts import KIB, arena, buffer, call, external, region

Y, S, A = 4 * KIB, 6 * KIB, 2 * KIB
SIZES = {"y": Y, "s": S, "a": A}
ROW_BYTES = 768
"""Of ``s``, which has eight rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A step, the same with moves, and what is known of its recomputation."""

    original: Problem
    moved: Problem
    recomputations: Mapping[str, Recomputation] = dataclasses.field(default_factory=dict)
    used_bytes: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)


REGIONS = {
    profile.name: profile
    for profile in (
        region(
            "F",
            (
                buffer("t", KIB, 0, 2),
                buffer("s", S, 0, 4),
                buffer("a", A, 1, 4),
                buffer("y", Y, 2, 4),
            ),
            (3,),
            (arena(3), arena(1), arena(2)),
        ),
        region("H", (buffer("t", 3 * KIB, 0, 3),), (2,), (external(512),)),
        region(
            "B",
            (buffer("t", 2 * KIB, 1, 3), buffer("g", Y, 2, 4)),
            (3, 2, 3, 4),
            (arena(1), external(KIB)),
        ),
        region(
            "recompute.s.a",
            (buffer("s", S, 0, 4), buffer("a", A, 1, 4), buffer("t", KIB, 0, 3)),
            (2,),
            (arena(0), arena(1)),
        ),
        region("recompute.a", (buffer("a", A, 1, 4), buffer("t", KIB, 0, 3)), (2,), (arena(0),)),
    )
}


def rows_region(rows: int) -> RegionProfile:
    """Makes the first rows of ``s``, from ``y`` and ``a``."""
    size = -(-rows * ROW_BYTES // 512) * 512
    return region(
        f"recompute.s.rows{rows}",
        (buffer("t", KIB, 0, 2), buffer("s", size, 1, 4)),
        (2, 3),
        (arena(1),),
    )


def forward(i: int) -> StepCall:
    return call(f"F{i}", "F", Phase.FORWARD, (f"y{i}",), (f"y{i + 1}", f"s{i}", f"a{i}"))


def head(n: int) -> StepCall:
    return call("H", "H", Phase.FORWARD, (f"y{n}",), ("loss",))


def backward(i: int, n: int, **renamed: str) -> StepCall:
    names = {key: f"{key}{i}" for key in ("y", "s", "a")} | renamed
    incoming = "g" if i == n - 1 else f"gy{i + 1}"
    inputs = (incoming, names["y"], names["s"], names["a"])
    return call(f"B{i}", "B", Phase.BACKWARD, inputs, (f"gy{i}", f"w{i}"))


def step(calls: tuple[StepCall, ...], host_bytes: int = 0, more: Mapping | None = None) -> Problem:
    reloads = {6 * KIB, 4 * KIB, 2 * KIB}
    return Problem(
        regions={**REGIONS, **copy_regions(sorted(reloads)), **(more or {})},
        calls=calls,
        inputs=("y0", "g"),
        fixed=FixedBytes(parameters=KIB, gradients=2 * KIB, new_gradients=2 * KIB),
        host_bytes=host_bytes,
    )


def layers(n: int, more: Mapping | None = None) -> Problem:
    return step(
        (
            *(forward(i) for i in range(n)),
            head(n),
            *(backward(i, n) for i in reversed(range(n))),
        ),
        more=more,
    )


def offload(value: str, host: int, start: int = 0, end: int | None = None) -> StepCall:
    end = SIZES[value[0]] if end is None else end
    copy = Copy(start_bytes=start, end_bytes=end, host_offset=host)
    name = f"offload.{value}"
    return call(name, COPY_REGION, Phase.FORWARD, (value,), (), kind=CallKind.OFFLOAD, copy=copy)


def reload(value: str, host: int, start: int = 0, end: int | None = None) -> StepCall:
    size = SIZES[value[0]]
    copy = Copy(start_bytes=start, end_bytes=size if end is None else end, host_offset=host)
    outputs = (f"reloaded.{value}",)
    return call(
        f"reload.{value}",
        reload_region(size),
        Phase.BACKWARD,
        (),
        outputs,
        kind=CallKind.RELOAD,
        copy=copy,
    )


def wait(copy: StepCall, phase: Phase) -> StepCall:
    return call(
        f"wait.{copy.name}",
        COPY_REGION,
        phase,
        copy.inputs or copy.outputs,
        (),
        kind=CallKind.WAIT,
        waits_for=copy.name,
    )


FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


def offload_only() -> Shape:
    """``s0`` and ``a0`` leave in two copies that overlap with the next layers."""
    s, a, s1 = offload("s0", 0), offload("a0", S), offload("s1", S + A)
    back, back_a, back_s1 = reload("s0", 0), reload("a0", S), reload("s1", S + A)
    calls = (
        forward(0),
        s,
        a,
        forward(1),
        wait(s, FORWARD),
        s1,
        forward(2),
        wait(a, FORWARD),
        head(3),
        wait(s1, BACKWARD),
        back_s1,
        backward(2, 3),
        back,
        wait(back_s1, BACKWARD),
        backward(1, 3, s="reloaded.s1"),
        back_a,
        wait(back, BACKWARD),
        wait(back_a, BACKWARD),
        backward(0, 3, s="reloaded.s0", a="reloaded.a0"),
    )
    return Shape(original=layers(3), moved=step(calls, 2 * S + A))


def recompute() -> Shape:
    """Layer 0 makes ``s`` and ``a`` again; layer 1 makes ``a`` again from a reloaded ``y1``."""
    y = offload("y1", 0)
    back = reload("y1", 0)
    kind = CallKind.RECOMPUTE
    both = call(
        "recompute0",
        "recompute.s.a",
        BACKWARD,
        ("y0",),
        ("recomputed.s0", "recomputed.a0"),
        kind=kind,
    )
    broken = call(
        "recompute1", "recompute.a", BACKWARD, ("reloaded.y1",), ("recomputed.a1",), kind=kind
    )
    calls = (
        forward(0),
        y,
        forward(1),
        wait(y, FORWARD),
        forward(2),
        head(3),
        back,
        backward(2, 3),
        wait(back, BACKWARD),
        broken,
        backward(1, 3, y="reloaded.y1", a="recomputed.a1"),
        both,
        backward(0, 3, s="recomputed.s0", a="recomputed.a0"),
    )
    recomputations = {
        "recompute0": Recomputation(makers=("F0",), inputs=("y0",), outputs=("s0", "a0")),
        "recompute1": Recomputation(makers=("F1",), inputs=("y1",), outputs=("a1",)),
    }
    return Shape(original=layers(3), moved=step(calls, Y), recomputations=recomputations)


def token_mix(rows: int = 4) -> Shape:
    """Rows of ``s0`` and ``s1``: the first are made again while the others come back."""
    profile = rows_region(rows)
    split = rows * ROW_BYTES
    out = [offload(f"s{i}", i * S, start=split) for i in range(2)]
    back = [reload(f"s{i}", i * S, start=split) for i in range(2)]
    again = [
        call(
            f"recompute{i}",
            profile.name,
            BACKWARD,
            (f"y{i}", f"a{i}"),
            (f"recomputed.s{i}",),
            kind=CallKind.RECOMPUTE,
            into=(Into(buffer=1, value=f"reloaded.s{i}", offset_bytes=0),),
        )
        for i in range(2)
    ]
    calls = (
        forward(0),
        out[0],
        forward(1),
        out[1],
        wait(out[0], FORWARD),
        head(2),
        wait(out[1], FORWARD),
        back[1],
        again[1],
        back[0],
        wait(back[1], BACKWARD),
        backward(1, 2, s="reloaded.s1"),
        again[0],
        wait(back[0], BACKWARD),
        backward(0, 2, s="reloaded.s0"),
    )
    recomputations = {
        f"recompute{i}": Recomputation(
            makers=(f"F{i}",), inputs=(f"y{i}", f"a{i}"), outputs=(f"s{i}",)
        )
        for i in range(2)
    }
    return Shape(
        original=layers(2, {profile.name: profile}),
        moved=step(calls, 2 * S - split, {profile.name: profile}),
        recomputations=recomputations,
        used_bytes={(profile.name, "s"): split},
    )


def rotating() -> Shape:
    """MEMO's two buffers: i has left before i + 2 begins, and comes back after backward i + 2."""
    n = 4
    out = [offload(f"s{i}", i * S) for i in range(n - 2)]
    back = [reload(f"s{i}", i * S) for i in range(n - 2)]
    calls: list[StepCall] = []
    for i in range(n):
        if i >= 2:
            calls.append(wait(out[i - 2], FORWARD))
        calls.append(forward(i))
        if i < n - 2:
            calls.append(out[i])
    calls.append(head(n))
    for i in reversed(range(n)):
        is_moved = i < n - 2
        if is_moved:
            calls.append(wait(back[i], BACKWARD))
        calls.append(backward(i, n, **({"s": f"reloaded.s{i}"} if is_moved else {})))
        if 0 <= i - 2 < n - 2:
            calls.append(back[i - 2])
    return Shape(original=layers(n), moved=step(tuple(calls), (n - 2) * S))


TILE_REGIONS = {
    profile.name: profile
    for profile in (
        region(
            "before",
            (buffer("s", S, 0, 2), buffer("acc", A, 0, 2)),
            (2,),
            (arena(0), arena(1)),
            num_lines=2,
        ),
        region(
            "tile",
            (buffer("t", A, 0, 3), buffer("rows", 2 * KIB, 0, 3)),
            (2,),
            (arena(1), arena(0)),
            num_lines=3,
        ),
        region("sum", (buffer("sum", A, 0, 1),), (1, 1), (arena(0),), num_lines=1),
        region("after", (buffer("t", KIB, 0, 1),), (1, 2), (external(512),), num_lines=2),
        region("use", (buffer("g", Y, 0, 2),), (2, 1, 2), (arena(0), external(512)), num_lines=2),
    )
}


def tile(i: int, s: str, acc: str, tile_bytes: int) -> tuple[StepCall, StepCall]:
    """Writes rows of ``s``; what it returns beside is added to ``acc`` in its place."""
    rows = (Into(buffer=1, value=s, offset_bytes=tile_bytes * i),)
    total = (Into(buffer=0, value=acc, offset_bytes=0),)
    return (
        call(f"tile{i}", "tile", FORWARD, ("y0",), (f"rows{i}", f"t{i}"), into=rows),
        call(f"sum{i}", "sum", FORWARD, (acc, f"t{i}"), (f"acc{i}",), into=total),
    )


def tiles(tile_bytes: int = 2 * KIB) -> Shape:
    """Three tiles fill ``s`` and add up in ``acc``; both leave and come back."""
    start = call("before", "before", FORWARD, ("y0",), ("s", "acc"))
    parts = tuple(made for i in range(3) for made in tile(i, "s", "acc", tile_bytes))
    end = 3 * tile_bytes
    after = call("after", "after", FORWARD, ("s", "acc"), ("loss",))
    use = call("use", "use", BACKWARD, ("g", "s", "acc"), ("gy", "w"))
    out, out_acc = offload("s", 0, end=end), offload("acc", S)
    back, back_acc = reload("s", 0, end=end), reload("acc", S)
    other = call("other", "F", FORWARD, ("y0",), ("o", "o1", "o2"))
    moved_use = dataclasses.replace(use, inputs=("g", "reloaded.s", "reloaded.acc"))
    calls = (start, *parts, after, other, use)
    moved = (
        start,
        *parts,
        out,
        after,
        out_acc,
        wait(out, FORWARD),
        wait(out_acc, FORWARD),
        other,
        back,
        back_acc,
        wait(back_acc, BACKWARD),
        wait(back, BACKWARD),
        moved_use,
    )
    return Shape(original=step(calls, more=TILE_REGIONS), moved=step(moved, S + A, TILE_REGIONS))


SHAPES = {
    "offload only": offload_only,
    "recompute": recompute,
    "token mix": token_mix,
    "token mix in odd rows": lambda: token_mix(3),
    "rotating": rotating,
    "tiles": tiles,
}
