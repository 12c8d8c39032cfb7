"""Random decisions on synthetic steps, for laws that hold for all of them."""

from dataclasses import replace

import hypothesis.strategies as st

from memo_compile.planners.move_rules import recompute_keys
from memo_compile.planners.moves import apply_moves
from memo_compile.step.movable import (
    Action,
    Mode,
    Moves,
    RecomputeRegion,
    Schedule,
)
from tests.steps.movable import KIB, NUM_ROWS, movable_step, recomputer
from tests.steps.parallel_gpt import ROWS, parallel_step
from tests.steps.parallel_gpt import SLOTS as PARALLEL_SLOTS

SAVE, OFFLOAD, RECOMPUTE = Action.SAVE, Action.OFFLOAD, Action.RECOMPUTE
CHOICES = ((SAVE, OFFLOAD),) * 2 + ((SAVE, OFFLOAD, RECOMPUTE),) * 3


@st.composite
def modes(draw) -> Mode:
    actions = tuple(draw(st.sampled_from(choices)) for choices in CHOICES)
    rows = None
    if RECOMPUTE in actions:
        rows = draw(st.none() | st.integers(1, NUM_ROWS))
    return Mode(actions=actions, recompute_rows=rows)


@st.composite
def moved_steps(draw):
    """(the step, the decisions, the program)."""
    num_layers = draw(st.integers(1, 5))
    step = movable_step(
        num_layers,
        bytes_per_s=KIB * draw(st.sampled_from([1, 7, 16, 40, 64, 100, 1000])),
        copy_latency_s=draw(st.sampled_from([0.0, 0.1])),
        reads_early=draw(st.booleans()),
    )
    waiting = st.integers(0, 5)
    moves = Moves(
        modes=tuple(draw(modes()) for _ in range(num_layers)),
        schedule=Schedule(layers=draw(waiting)),
    )
    return step, moves, apply_moves(step, moves, recomputer(step))


@st.composite
def talking_steps(draw):
    """The same of tensor parallel layers, whose waits stand at once or late."""
    sizes = st.sampled_from([512, 1024, 2048])
    seconds = st.sampled_from([0.0, 0.5, 1.0, 3.0])
    step = parallel_step(
        {name: draw(sizes) for name in PARALLEL_SLOTS},
        {row: draw(seconds) for row in ROWS},
        num_rows=2,
        num_layers=draw(st.integers(1, 4)),
        copy_bytes_per_s=draw(st.sampled_from([100, 1000])),
        comm_bytes_per_s=draw(st.sampled_from([100, 500, 5000, 50_000])),
        comm_slowdown=draw(st.sampled_from([1.0, 1.15, 1.5])),
        returns_sum=draw(st.booleans()),
    )
    step = replace(step, waits_late=draw(st.booleans()))
    moved = draw(st.sampled_from([(OFFLOAD,), (OFFLOAD,), ()]))
    choices = [
        (SAVE, *moved, RECOMPUTE) if slot.can_recompute else (SAVE, *moved)
        for slot in step.classes["L"].slots
    ]
    waiting = st.integers(0, 2)
    schedules = st.builds(Schedule, layers=waiting)
    drawn = st.tuples(*map(st.sampled_from, choices)).map(lambda actions: Mode(actions=actions))
    modes = st.tuples(*[drawn] * len(step.layers))
    alike = drawn.map(lambda mode: (mode,) * len(step.layers))
    once = Schedule(layers=0)
    moves = Moves(modes=draw(modes | alike), schedule=draw(schedules | st.just(once)))
    return step, moves, apply_moves(step, moves, recomputer(step))


def regions_of(step, moves: Moves) -> list[RecomputeRegion]:
    """Of every mode of ``moves``, for its rows and for all of them."""
    recompute = recomputer(step)
    keys = {key for mode in moves.modes for key in recompute_keys(step.classes["L"], mode)}
    return [
        recompute(replace(key, rows=rows))
        for key in keys
        for rows in dict.fromkeys((key.rows, None))
    ]
