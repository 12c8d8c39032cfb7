"""Decisions -> step program; the text is the golden."""

import pytest

from memo_compile.planners.moves import apply_moves
from memo_compile.step.movable import Action, Mode, Moves, Schedule
from memo_compile.step.program_text import program_text
from tests.steps.movable import KIB, movable_step, recomputer

SAVE, OFFLOAD, RECOMPUTE = Action.SAVE, Action.OFFLOAD, Action.RECOMPUTE
ROTATING = Schedule(offload_lag=1, reload_lead=1)
KEEP = Mode(actions=(SAVE,) * 5)
ALL_OUT = Mode(actions=(OFFLOAD,) * 5)
AGAIN = Mode(actions=(SAVE, SAVE, RECOMPUTE, RECOMPUTE, RECOMPUTE))
AGAIN_FROM_HOST = Mode(actions=(OFFLOAD, OFFLOAD, RECOMPUTE, RECOMPUTE, RECOMPUTE))
MIX = Mode(actions=(OFFLOAD, OFFLOAD, RECOMPUTE, RECOMPUTE, RECOMPUTE), recompute_rows=4)
CHAIN = Mode(actions=(SAVE, SAVE, SAVE, OFFLOAD, RECOMPUTE))

PROGRAMS = {
    "moves_save": (Moves(modes=(KEEP,) * 3), 16 * KIB),
    "moves_offload": (Moves(modes=(ALL_OUT, ALL_OUT, KEEP)), 64 * KIB),
    "moves_recompute": (Moves(modes=(AGAIN,) * 3), 16 * KIB),
    "moves_recompute_from_host": (Moves(modes=(AGAIN_FROM_HOST,) * 3), 16 * KIB),
    "moves_recompute_from_slot": (Moves(modes=(CHAIN, CHAIN, KEEP)), 64 * KIB),
    "moves_mix": (Moves(modes=(MIX, MIX, KEEP)), 64 * KIB),
    "moves_rotating": (Moves(modes=(MIX, MIX, KEEP, KEEP), schedule=ROTATING), 64 * KIB),
    "moves_rotating_slow_link": (Moves(modes=(ALL_OUT,) * 4, schedule=ROTATING), 8 * KIB),
}
"""Name of the golden -> what is decided, and bytes/s of the link. A layer takes 1 s, then 2 s."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(golden, name):
    moves, bytes_per_s = PROGRAMS[name]
    step = movable_step(len(moves.modes), bytes_per_s=bytes_per_s)
    text = program_text(apply_moves(step, moves, recomputer(step)))
    golden(name, text)


def test_long_lists_are_cut_short():
    step = movable_step(6, bytes_per_s=1.0)
    moves = Moves(modes=(ALL_OUT,) * 6, schedule=Schedule(reload_lead=5))
    text = program_text(apply_moves(step, moves, recomputer(step)))
    assert "| out x0, c0, d0, a0, b0, x1 and 5 more" in text
