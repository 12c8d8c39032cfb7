"""A step small enough to draw: two layers, saved tensors, a transient in each call.

forward:  in -> [L@0] -> x0 -> [L@1] -> x1 -> [E@2] -> loss
backward: g -> [Lb@3 reads x1] -> g1 -> [Lb@4 reads x0] -> g0
"""

import dataclasses

from memo_compile.planners.place_step import place_step
from memo_compile.step.plans import Plan
from memo_compile.step.problem import FixedBytes, Phase, Problem
from tests.steps.parts import KIB, arena, buffer, call, external, region

LAYER = region("L", [buffer("t", 2 * KIB, 0, 2), buffer("y", 4 * KIB, 1, 4)], [1], [arena(1)])
HEAD = region("E", [buffer("t", KIB, 0, 2)], [1], [external(512)], num_lines=2)
LAYER_BACKWARD = region(
    "Lb",
    [buffer("t", 3 * KIB, 0, 3), buffer("g", 4 * KIB, 1, 4)],
    [2, 3],
    [arena(1), external(KIB)],
)


def two_layers() -> Problem:
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    return Problem(
        regions={"L": LAYER, "E": HEAD, "Lb": LAYER_BACKWARD},
        calls=(
            call("L@0", "L", forward, ("in",), ("x0",)),
            call("L@1", "L", forward, ("x0",), ("x1",)),
            call("E@2", "E", forward, ("x1",), ("loss",)),
            call("Lb@3", "Lb", backward, ("x1", "g"), ("g1", "w1")),
            call("Lb@4", "Lb", backward, ("x0", "g1"), ("g0", "w0")),
        ),
        inputs=("in", "g"),
        fixed=FixedBytes(parameters=KIB, gradients=2 * KIB, new_gradients=2 * KIB),
    )


def planned(problem: Problem) -> Plan:
    return place_step(problem, solver="greedy")


def moved(plan: Plan, **offsets: int) -> Plan:
    """``plan`` with other offsets; ``L_0__y`` stands for the buffer ``L@0/y``."""
    named = {_buffer_id(key): value for key, value in offsets.items()}
    return dataclasses.replace(plan, offsets={**plan.offsets, **named})


def _buffer_id(key: str) -> str:
    region, index, _, name = key.split("_")
    return f"{region}@{index}/{name}"
