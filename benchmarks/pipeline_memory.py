"""Memory of a pipeline's rank 0: ``python -m benchmarks.pipeline_memory``.

GPT layers as the papers draw them, the microbatches of rank 0 in the order of its schedule, as one
step. Three things are compared in bytes alive, by the planner's own account; nothing runs:

* keeping everything, in chunks: how many of them are alive (N), against the closed form. What a
  chunk returns is kept until its backward too, which the closed form leaves out: of two layers 3 %;
* Kwai's amounts for several alpha against 4 + (N - 4)(1 - alpha) chunks (papers, section 2). The
  closed form has two reload buffers of a whole chunk that live for the whole step, and one chunk
  being copied out. The planner's copies end layer by layer, and a reload is there from its issue
  on: so it may need less, never more;
* the floor of policy ``greedy`` against recomputation of everything.

Passes when N is within 3 % of the closed form, when no alpha needs more than 3 % above it, and when
the floor is no higher than recomputation of everything.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks import harness
from benchmarks.layer_steps import Setting, gpt_step, place_live, recompute_of
from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import ModelShape
from memo_compile.errors import Infeasible
from memo_compile.papers.kwai.offload import chunks_in_flight, resident_chunks
from memo_compile.papers.kwai.schedule import Direction, PipelineShape, order_work
from memo_compile.planners.moves import apply_moves
from memo_compile.planners.policy import choose
from memo_compile.planners.policy.named import QUANTA, named_moves
from memo_compile.step.joint_step import HalfOrder, JointStep, joint_layers, joint_problem
from memo_compile.step.movable import MovableStep
from memo_compile.step.problem import FixedBytes, Half, Phase, Problem
from memo_compile.step.simulate import peak_live_bytes

NAME = "pipeline_memory"
SHAPES = {
    "1F1B, 8 ranks": PipelineShape(num_ranks=8, num_chunks=1, num_batches=16),
    "interleaved, 4 ranks x 2": PipelineShape(num_ranks=4, num_chunks=2, num_batches=8),
}
TOLERANCE = 0.03


def main() -> int:
    """The tables, the results, the verdict."""
    parser = harness.parser(__doc__, sizes={"layers": 2, "hidden": 4096, "seq": 4096})
    return harness.run_benchmark(NAME, parser.parse_args(), measure, measure)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All settings, and what is not as the closed form says."""
    rows, failures = [], []
    for name, shape in SHAPES.items():
        step = rank_step(shape, options.layers, options.hidden, options.seq)
        row = {"name": name, **sizes(step, shape)}
        rows.append(row)
        failures += [f"{name}: {fault}" for fault in judged(row)]
        show(row)
        print(f"{name}: done", file=sys.stderr)
    settings = {key: getattr(options, key) for key in ("layers", "hidden", "seq")}
    return {"settings": settings, "rows": rows, "failures": failures}


def rank_step(shape: PipelineShape, layers: int, hidden: int, seq: int) -> MovableStep:
    """The step of rank 0: each chunk of ``layers`` layers, all chunks alike."""
    model = ModelShape(
        name="chunk",
        hidden=hidden,
        num_layers=layers,
        ffn=4 * hidden,
        num_heads=hidden // 128,
        num_kv_heads=hidden // 128,
        vocab=128,
        gated=False,
    )
    device = find_hardware("h100")
    chunk = gpt_step(
        Setting(
            shape=model, seq=seq, tp=1, hardware=device, copy_bytes_per_s=device.d2h_bytes_per_s
        )
    )
    problem = replace(chunk.problem, fixed=FixedBytes(), halves=(_half(True), _half(False)))
    order = _order(shape)
    joint = JointStep(graphs=(0,) * (len(order) // 2), fixed=FixedBytes(), order=order)
    together = _without_gradients(joint_problem([problem], joint))
    return joint_layers([chunk], joint, together, chunk.costs)


def _half(is_forward: bool) -> Half:
    return Half(
        phase=Phase.FORWARD if is_forward else Phase.BACKWARD,
        constants=(),
        arguments=() if is_forward else ("handle",),
        results=(),
        handle="handle",
        layouts=() if is_forward else (None,),
    )


def _order(shape: PipelineShape) -> HalfOrder:
    members: dict[tuple[int, int], int] = {}
    found = []
    for work in order_work(shape, 0):
        key = (work.chunk, work.micro_batch)
        member = members.setdefault(key, len(members))
        found.append((member, work.direction is Direction.BACKWARD))
    return tuple(found)


def _without_gradients(problem: Problem) -> Problem:
    """``problem`` whose gradients of parameters take nothing: the static part counts them."""
    regions = {
        name: replace(
            region,
            outputs=tuple(
                replace(output, size_bytes=0) if output.index is None else output
                for output in region.outputs
            ),
        )
        for name, region in problem.regions.items()
    }
    return replace(problem, regions=regions)


def sizes(step: MovableStep, shape: PipelineShape) -> dict[str, Any]:
    """What is alive at the most, in bytes and in chunks."""
    recompute = recompute_of(step)
    chunk_bytes = len(step.layers) // _num_members(shape) * step.classes["layer"].saved_bytes

    def peak(policy: str, alpha: float | None = None) -> int:
        moves = named_moves(step, policy, recompute, alpha=alpha).moves
        return peak_live_bytes(apply_moves(step, moves, recompute))

    single = peak_of_one(step)
    saved, in_flight = peak("save"), int(chunks_in_flight(shape.num_ranks, shape.num_chunks))
    alphas = {
        str(alpha): {
            "bytes": (found := peak("kwai", alpha)),
            "chunks": 1 + (found - single) / chunk_bytes,
            "closed_form": float(resident_chunks(in_flight, alpha)),
        }
        for alpha in QUANTA
    }
    return {
        "chunk_bytes": chunk_bytes,
        "save_bytes": saved,
        "chunks": 1 + (saved - single) / chunk_bytes,
        "closed_form": in_flight,
        "kwai": alphas,
        "full_recompute_bytes": peak("full-recompute"),
        "full_offload_bytes": peak("full-offload"),
        "floor_bytes": floor_bytes(step),
    }


def _num_members(shape: PipelineShape) -> int:
    return shape.num_chunks * shape.num_batches


def peak_of_one(step: MovableStep) -> int:
    """Bytes alive where a single microbatch of a single chunk runs: its own, and transients."""
    calls = tuple(call for call in step.problem.calls if call.member == 0)
    halves = tuple(half for half in step.problem.halves if half.member == 0)
    return peak_live_bytes(replace(step.problem, calls=calls, halves=halves))


def floor_bytes(step: MovableStep) -> int:
    """The fewest bytes alive of policy ``greedy``'s plans."""
    floor = None
    try:
        choose(
            step,
            budget_bytes=1,
            host_budget_bytes=None,
            policy="greedy",
            recompute=recompute_of(step),
            place=place_live,
        )
    except Infeasible as error:
        floor = error.floor_bytes
    if floor is None:
        raise AssertionError("nothing but the budget is in the way")
    return floor


def judged(row: dict[str, Any]) -> Iterator[str]:
    """What is not as it should be."""
    if abs(row["chunks"] / row["closed_form"] - 1) > TOLERANCE:
        yield f"{row['chunks']:.2f} chunks are alive, expected {row['closed_form']}"
    for alpha, found in row["kwai"].items():
        if found["chunks"] > found["closed_form"] * (1 + TOLERANCE):
            yield f"alpha {alpha}: {found['chunks']:.2f} chunks, over {found['closed_form']:.2f}"
    if row["floor_bytes"] > row["full_recompute_bytes"]:
        yield f"floor {row['floor_bytes']} > full recomputation {row['full_recompute_bytes']}"


def show(row: dict[str, Any]) -> None:
    """One setting as a table."""
    unit = row["chunk_bytes"]
    lines = [["keep everything", f"{row['chunks']:.2f}", f"{row['closed_form']:.2f}"]]
    lines += [
        [f"kwai, alpha {alpha}", f"{found['chunks']:.2f}", f"{found['closed_form']:.2f}"]
        for alpha, found in row["kwai"].items()
    ]
    lines += [
        [name, f"{row[f'{name}_bytes'] / unit:.2f} (all bytes)", ""]
        for name in ("full_recompute", "full_offload", "floor")
    ]
    harness.print_table(row["name"], ("policy", "chunks alive", "closed form"), lines)


if __name__ == "__main__":
    sys.exit(main())
