"""A step that talks to other ranks, small enough to draw; waits stand behind the beginnings.

forward:  in -> [A] -> p0 ~reduced in place~> z0 -> [B reads in] -> x1 -> [E] -> loss
backward: g -> [Bb] -> d ~gathered~> e -> [W reads d, x1: a gradient] ; R recomputes s from in ;
          [Ab reads e, s] -> gradient

``sharded`` is another: of layers whose weights are gathered, and their gradients scattered.
"""

from collections.abc import Sequence
from dataclasses import replace

from memo_compile.step.movable import StepCosts
from memo_compile.step.problem import (
    CallKind,
    FixedBytes,
    Layout,
    Phase,
    Problem,
    RegionOutput,
    RegionProfile,
    StepCall,
    Storage,
)
from tests.steps.parts import KIB, arena, buffer, call, external, region

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
SHOWN = RegionOutput(storage=Storage.INPUT, index=0)


def layout(size_bytes: int) -> Layout:
    return Layout(dtype="float32", item_bytes=4, size=(size_bytes // 4,), stride=(1,))


def one_line(name: str, outputs: Sequence[RegionOutput], num_inputs: int, **more) -> RegionProfile:
    return RegionProfile(
        name=name,
        num_lines=1,
        buffers=more.pop("buffers", ()),
        input_ends=(1,) * num_inputs,
        outputs=tuple(outputs),
        **more,
    )


def made(name: str, size_bytes: int, num_inputs: int) -> RegionProfile:
    """A region with one result in the arena."""
    own = (buffer("y", size_bytes, 0, 1),)
    return one_line(name, [arena(0)], num_inputs, buffers=own)


REGIONS = {
    "A": made("A", 4 * KIB, 1),
    "reduce": one_line("reduce", [SHOWN], 1, output_layouts=(layout(4 * KIB),)),
    "arrived": one_line("arrived", [SHOWN], 2),
    "B": made("B", 4 * KIB, 2),
    "E": region("E", [], [1], [external(512)], num_lines=1),
    "Bb": made("Bb", 2 * KIB, 1),
    "gather": one_line(
        "gather",
        [arena(0)],
        1,
        buffers=(buffer("e", 4 * KIB, 0, 1),),
        output_layouts=(layout(4 * KIB),),
    ),
    "W": region("W", [], [1, 1], [external(KIB)], num_lines=1),
    "R": made("R", 4 * KIB, 1),
    "Ab": region("Ab", [], [1, 1], [external(KIB)], num_lines=1),
}


def issue(name: str, region: str, phase: Phase, value: str, output: str) -> StepCall:
    reads = (layout(4 * KIB if region == "reduce" else 2 * KIB),)
    return call(name, region, phase, (value,), (output,), kind=CallKind.ISSUE, reads=reads)


def wait(issued: StepCall, output: str) -> StepCall:
    return call(
        f"wait.{issued.name}",
        "arrived",
        issued.phase,
        (*issued.outputs, *issued.inputs),
        (output,),
        kind=CallKind.COMM_WAIT,
        waits_for=issued.name,
    )


REDUCE = issue("reduce@1", "reduce", FORWARD, "p0", "q0")
GATHER = issue("gather@5", "gather", BACKWARD, "d", "c")


def among_ranks(*, recomputes: bool = False) -> Problem:
    """The step; with ``recomputes`` R stands right before what reads it, else s is read of in."""
    recompute = (call("R", "R", BACKWARD, ("in",), ("s",), kind=CallKind.RECOMPUTE),)
    return Problem(
        regions=REGIONS,
        calls=(
            call("A", "A", FORWARD, ("in",), ("p0",)),
            REDUCE,
            wait(REDUCE, "z0"),
            call("B", "B", FORWARD, ("z0", "in"), ("x1",)),
            call("E", "E", FORWARD, ("x1",), ("loss",)),
            call("Bb", "Bb", BACKWARD, ("g",), ("d",)),
            GATHER,
            wait(GATHER, "e"),
            call("W", "W", BACKWARD, ("d", "x1"), ("w1",)),
            *(recompute if recomputes else ()),
            call("Ab", "Ab", BACKWARD, ("e", "s" if recomputes else "in"), ("w0",)),
        ),
        inputs=("in", "g"),
        fixed=FixedBytes(parameters=KIB, gradients=2 * KIB, new_gradients=2 * KIB),
    )


def costs(comm_bytes_per_s: float = 2 * KIB) -> StepCosts:
    """A call takes a second, a collective of 4 KiB two."""
    seconds = dict.fromkeys(REGIONS, 1.0) | dict.fromkeys(("reduce", "gather", "arrived"), 0.0)
    return StepCosts(
        region_s=seconds,
        d2h_bytes_per_s=1.0,
        h2d_bytes_per_s=1.0,
        comm_bytes_per_s=comm_bytes_per_s,
    )


def _sharded_regions(weight_bytes: int) -> dict[str, RegionProfile]:
    shard_bytes = weight_bytes // 2
    return {
        "F": made("F", 4 * KIB, 2),
        "L": region("L", [], [1], [external(512)], num_lines=1),
        "B": one_line(
            "B",
            [arena(0), arena(1)],
            3,
            buffers=(buffer("g", 4 * KIB, 0, 1), buffer("d", weight_bytes, 0, 1)),
        ),
        "convert": made("convert", shard_bytes, 1),
        "shard": one_line(
            "shard",
            [arena(0)],
            1,
            buffers=(buffer("v", weight_bytes, 0, 1),),
            output_layouts=(layout(weight_bytes),),
        ),
        "scatter": one_line(
            "scatter", [external(shard_bytes)], 1, output_layouts=(layout(shard_bytes),)
        ),
        "arrived": one_line("arrived", [SHOWN], 2),
    }


def sharded(
    num_layers: int = 3, weight_bytes: int = 2 * KIB, *, converts: bool = False, again: bool = True
) -> Problem:
    """Layers that gather a weight, forward and (``again``) backward, and scatter its gradient.

    forward of i:  s_i ~gathered~> v_i ; [F reads x_i, v_i] -> x_(i+1)
    backward of i: s_i ~gathered~> u_i ; [B reads g_(i+1), x_i, u_i] -> g_i, d_i ; d_i ~scattered~>
    With ``converts`` s_i is converted first, to a tensor of its size.
    """
    shard_bytes, regions = weight_bytes // 2, _sharded_regions(weight_bytes)

    def gathered(at: int, phase: Phase, value: str) -> list[StepCall]:
        of = {"layer_class": "layer", "instance": at}
        name, source, calls = f"{value}{at}", f"s{at}", list[StepCall]()
        if converts:
            calls = [call(f"to.{name}", "convert", phase, (source,), (f"{name}.s",), **of)]
            source = f"{name}.s"
        reads = (layout(shard_bytes),)
        begun = call(
            f"gather.{name}",
            "shard",
            phase,
            (source,),
            (f"{name}.c",),
            kind=CallKind.ISSUE,
            reads=reads,
            **of,
        )
        return [*calls, begun, replace(wait(begun, name), **of)]

    calls: list[StepCall] = []
    for at in range(num_layers):
        of = {"layer_class": "layer", "instance": at}
        calls += gathered(at, FORWARD, "v")
        calls.append(call(f"F{at}", "F", FORWARD, (f"x{at}", f"v{at}"), (f"x{at + 1}",), **of))
    last = f"x{num_layers}"
    calls.append(call("L", "L", FORWARD, (last,), ("loss",)))
    for at in reversed(range(num_layers)):
        of = {"layer_class": "layer", "instance": at}
        calls += gathered(at, BACKWARD, "u") if again else []
        weight = f"u{at}" if again else f"v{at}"
        read, given = (f"g{at + 1}", f"x{at}", weight), (f"g{at}", f"d{at}")
        begun = call(
            f"scatter.{at}",
            "scatter",
            BACKWARD,
            (f"d{at}",),
            (f"r{at}.c",),
            kind=CallKind.ISSUE,
            reads=(layout(weight_bytes),),
            **of,
        )
        calls += [call(f"B{at}", "B", BACKWARD, read, given, **of), begun]
        calls.append(replace(wait(begun, f"r{at}"), **of))
    shards = (f"s{at}" for at in range(num_layers))
    inputs = ("x0", f"g{num_layers}", *shards)
    return Problem(regions=regions, calls=tuple(calls), inputs=inputs)


def sharded_costs(gather_s: float = 1.0, scatter_s: float = 1.0) -> StepCosts:
    """A forward takes a second, a backward two."""
    seconds = {"F": 1.0, "L": 0.0, "B": 2.0, "convert": 0.0}
    talking = {"shard": gather_s, "scatter": scatter_s, "arrived": 0.0}
    return StepCosts(
        region_s=seconds | dict.fromkeys(talking, 0.0),
        d2h_bytes_per_s=1.0,
        h2d_bytes_per_s=1.0,
        collective_s=talking,
    )
