"""Kwai's closed form against its published choices, and against a replay of the schedule."""

import csv
import itertools
from pathlib import Path

import pytest

from memo_compile.costs.models import find_model
from memo_compile.errors import InputError
from memo_compile.papers.kwai.offload import (
    Checkpoint,
    chunk_bytes,
    chunks_in_flight,
    divide_gpus,
    plan_offload,
    resident_chunks,
    static_bytes,
)
from memo_compile.papers.kwai.pipeline_replay import ChunkTimes, replay_step
from memo_compile.papers.kwai.schedule import Direction, PipelineShape

DATA = Path(__file__).parents[1] / "data"
BUDGET_BYTES = 65000 * 2**20
POLICIES = {"no": Checkpoint.NONE, "ours": Checkpoint.BALANCED}


def rows(name):
    with (DATA / name).open() as file:
        return list(csv.DictReader(file))


def configure(row):
    shape = find_model(row["model"])
    return shape, divide_gpus(
        shape,
        gpus=int(row["gpus"]),
        tp=int(row["tp"]),
        cp=int(row["cp"]),
        pp=int(row["pp"]),
        layers_per_chunk=int(row["layers_per_vstage"]),
        checkpoint=POLICIES[row["ckpt"]],
    )


@pytest.mark.parametrize("row", rows("kwai_offload_fractions.csv"))
def test_published_offload_fractions(row):
    shape, config = configure(row)
    plan = plan_offload(shape, seq=int(row["seqlen"]), config=config, budget_bytes=BUDGET_BYTES)
    assert plan.alpha == pytest.approx(float(row["alpha"]), abs=1e-3)
    assert plan.fits
    assert plan.peak_bytes <= BUDGET_BYTES * (1 + 1e-9)


@pytest.mark.parametrize("row", rows("kwai_peak_memory.csv"))
def test_measured_peaks_after_one_offset(row):
    shape, config = configure(row)
    num_chunks = shape.num_layers // (config.pp * config.layers_per_chunk)
    held = resident_chunks(chunks_in_flight(config.pp, num_chunks), float(row["alpha"]))
    peak = static_bytes(shape, config) + held * chunk_bytes(shape, int(row["seqlen"]), config)
    assert peak + 1.24e9 == pytest.approx(float(row["max_memory_allocated_bytes"]), rel=0.015)


def test_what_does_not_fit_says_so():
    shape = find_model("llama-175b")
    config = divide_gpus(
        shape, gpus=16, tp=1, cp=1, pp=16, layers_per_chunk=1, checkpoint=Checkpoint.NONE
    )
    plan = plan_offload(shape, seq=4096, config=config, budget_bytes=BUDGET_BYTES)
    assert (plan.alpha, plan.fits, plan.resident_chunks) == (1.0, False, 4.0)
    assert plan.peak_bytes > BUDGET_BYTES


def test_two_stages_cannot_offload():
    shape = find_model("llama-7b")
    config = divide_gpus(
        shape, gpus=2, tp=1, cp=1, pp=2, layers_per_chunk=16, checkpoint=Checkpoint.NONE
    )
    plan = plan_offload(shape, seq=131072, config=config, budget_bytes=BUDGET_BYTES)
    assert not plan.fits
    assert plan.resident_chunks == plan.chunks_in_flight == 2


def test_the_smallest_alpha_is_the_smallest():
    shape = find_model("llama-65b")
    config = divide_gpus(
        shape, gpus=64, tp=2, cp=1, pp=8, layers_per_chunk=2, checkpoint=Checkpoint.BALANCED
    )
    plan = plan_offload(shape, seq=4096, config=config, budget_bytes=BUDGET_BYTES)
    less = plan.alpha - 1e-6
    held = resident_chunks(plan.chunks_in_flight, less)
    assert 0 < less < 1
    assert static_bytes(shape, config) + held * chunk_bytes(shape, 4096, config) > BUDGET_BYTES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 255}, r"gpus: 255 is not divisible by tp \* cp \* pp = 2 \* 2 \* 16 = 64"),
        ({"pp": 5, "gpus": 320}, "pp: 5 stages do not divide the 96 layers"),
        ({"layers_per_chunk": 4}, "layers-per-chunk: 4 does not divide the 6 layers"),
        ({"tp": 0}, "tp: expected at least 1, got 0"),
        ({"tp": 64}, "tp: 64 does not divide the 96 attention heads"),
    ],
)
def test_configurations_that_do_not_divide(changes, message):
    sizes = {"gpus": 2048, "tp": 2, "cp": 2, "pp": 16, "layers_per_chunk": 1, **changes}
    with pytest.raises(InputError, match=message):
        divide_gpus(find_model("llama-175b"), checkpoint=Checkpoint.FULL, **sizes)


@pytest.mark.parametrize("num_ranks", range(3, 17))
@pytest.mark.parametrize("num_chunks", [1, 2, 5])
def test_replay_gives_the_closed_form(num_ranks, num_chunks):
    in_flight = chunks_in_flight(num_ranks, num_chunks)
    if in_flight < 4:
        return
    shape = PipelineShape(num_ranks=num_ranks, num_chunks=num_chunks, num_batches=2 * num_ranks)
    for alpha in (0.0, 0.125, 0.5, 0.811, 1.0):
        times = ChunkTimes(forward_s=1, backward_s=2, copy_out_s=alpha, reload_s=alpha)
        step = replay_step(shape, alpha, times)
        peak = step.ranks[0].peak_chunks
        assert peak == pytest.approx(resident_chunks(in_flight, alpha), abs=1e-9)
        assert all(rank.waited_s == 0 for rank in step.ranks)
        batch_s = 3 * num_chunks
        ideal_s = shape.num_batches * batch_s + (num_ranks - 1) * batch_s / num_chunks
        assert step.step_s == pytest.approx(ideal_s)


def test_slow_copies_delay_the_step_but_add_no_memory():
    shape = PipelineShape(num_ranks=4, num_chunks=2, num_batches=8)
    fast = replay_step(shape, 0.5, ChunkTimes(forward_s=1, backward_s=2))
    slow = replay_step(shape, 0.5, ChunkTimes(forward_s=1, backward_s=2, copy_out_s=5, reload_s=5))
    assert slow.step_s > fast.step_s
    assert slow.ranks[0].waited_s > 0
    assert slow.ranks[0].peak_chunks <= fast.ranks[0].peak_chunks


def test_lanes_run_one_thing_at_a_time_and_reloads_follow_copies():
    shape = PipelineShape(num_ranks=4, num_chunks=2, num_batches=8)
    times = ChunkTimes(forward_s=1, backward_s=2, copy_out_s=2.5, reload_s=1.5)
    for rank in replay_step(shape, 0.75, times).ranks:
        by_lane = {
            lane: [s for s in rank.spans if s.lane == lane] for lane in ("compute", "d2h", "h2d")
        }
        for spans in by_lane.values():
            pairs = itertools.pairwise(spans)
            assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairs)
        out = {(s.work.chunk, s.work.micro_batch): s for s in by_lane["d2h"]}
        back = {(s.work.chunk, s.work.micro_batch): s for s in by_lane["h2d"]}
        assert out.keys() == back.keys()
        assert all(out[key].end_s <= back[key].start_s + 1e-9 for key in out)
        for span in by_lane["compute"]:
            key = (span.work.chunk, span.work.micro_batch)
            if span.work.direction is Direction.BACKWARD and key in back:
                assert back[key].end_s <= span.start_s + 1e-9


def test_interleaving_needs_whole_groups():
    with pytest.raises(InputError, match="needs a multiple of the 4 ranks, got 6"):
        PipelineShape(num_ranks=4, num_chunks=2, num_batches=6)
