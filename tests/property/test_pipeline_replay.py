"""Properties of the pipeline replay for any times and sizes."""

import itertools

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memo_compile.papers.kwai.offload import chunks_in_flight, resident_chunks
from memo_compile.papers.kwai.pipeline_replay import ChunkTimes, replay_step
from memo_compile.papers.kwai.schedule import Direction, PipelineShape

seconds = st.floats(0.01, 10, allow_nan=False)
shares = st.floats(0, 1)


@st.composite
def steps(draw):
    ranks, chunks = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    groups = draw(st.integers(1, 3))
    shape = PipelineShape(num_ranks=ranks, num_chunks=chunks, num_batches=groups * ranks)
    times = ChunkTimes(
        forward_s=draw(seconds),
        backward_s=draw(seconds),
        copy_out_s=draw(seconds),
        reload_s=draw(seconds),
    )
    return shape, draw(shares), times


@settings(max_examples=120, deadline=None)
@given(steps())
def test_any_step_is_causal_and_within_its_memory(step):
    shape, alpha, times = step
    replay = replay_step(shape, alpha, times)
    done = {}
    for rank, found in enumerate(replay.ranks):
        for lane in ("compute", "d2h", "h2d"):
            spans = [s for s in found.spans if s.lane == lane]
            assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(spans))
        for span in found.spans:
            key = (rank, span.lane, span.work.direction, span.work.chunk, span.work.micro_batch)
            assert key not in done
            done[key] = span
    for (rank, lane, direction, chunk, batch), span in done.items():
        if lane == "compute" and direction is Direction.BACKWARD:
            assert done[rank, lane, Direction.FORWARD, chunk, batch].end_s <= span.start_s + 1e-9
            back = done.get((rank, "h2d", direction, chunk, batch))
            assert back is None or back.end_s <= span.start_s + 1e-9
        if lane == "h2d":
            out = done[rank, "d2h", Direction.FORWARD, chunk, batch]
            assert out.end_s <= span.start_s + 1e-9
    assert all(abs(found.memory[-1][1] - held(found, alpha)) < 1e-6 for found in replay.ranks)
    in_flight = chunks_in_flight(shape.num_ranks, shape.num_chunks)
    assume(in_flight >= 4 and shape.num_ranks >= 3)
    bound = resident_chunks(in_flight, alpha)
    assert replay.ranks[0].peak_chunks <= bound + 1e-9


def held(found, alpha):
    """What is left at the end of a step: the two reload buffers where there are any."""
    return 2 * alpha if any(span.lane == "h2d" for span in found.spans) else 0.0


@settings(max_examples=60, deadline=None)
@given(steps())
def test_offloading_never_makes_a_step_faster(step):
    shape, alpha, times = step
    plain = replay_step(shape, 0.0, times)
    assert replay_step(shape, alpha, times).step_s >= plain.step_s - 1e-9
