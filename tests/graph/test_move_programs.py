"""Decisions -> step program; the text is the golden."""

import pytest

from memo_compile.planners.moves import apply_moves
from memo_compile.step.movable import Action, Mode, Moves, Schedule
from memo_compile.step.program_text import program_text
from tests.steps.movable import movable_step, recomputer

SAVE, OFFLOAD, RECOMPUTE = Action.SAVE, Action.OFFLOAD, Action.RECOMPUTE
KEEP = Mode(actions=(SAVE,) * 5)
ALL_OUT = Mode(actions=(OFFLOAD,) * 5)
AGAIN = Mode(actions=(SAVE, SAVE, RECOMPUTE, RECOMPUTE, RECOMPUTE))
AGAIN_FROM_HOST = Mode(actions=(OFFLOAD, OFFLOAD, RECOMPUTE, RECOMPUTE, RECOMPUTE))
MIX = Mode(actions=(OFFLOAD, OFFLOAD, RECOMPUTE, RECOMPUTE, RECOMPUTE), recompute_rows=4)
CHAIN = Mode(actions=(SAVE, SAVE, SAVE, OFFLOAD, RECOMPUTE))

PROGRAMS = {
    "moves_save": Moves(modes=(KEEP,) * 3),
    "moves_offload": Moves(modes=(ALL_OUT, ALL_OUT, KEEP)),
    "moves_recompute": Moves(modes=(AGAIN,) * 3),
    "moves_recompute_from_host": Moves(modes=(AGAIN_FROM_HOST,) * 3),
    "moves_recompute_from_slot": Moves(modes=(CHAIN, CHAIN, KEEP)),
    "moves_mix": Moves(modes=(MIX, MIX, KEEP)),
    "moves_rotating": Moves(modes=(MIX, MIX, KEEP, KEEP)),
}
"""Name of the golden -> what is decided."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(golden, name):
    moves = PROGRAMS[name]
    step = movable_step(len(moves.modes))
    text = program_text(apply_moves(step, moves, recomputer(step)))
    golden(name, text)


def test_long_lists_are_cut_short():
    step = movable_step(6, bytes_per_s=1.0)
    moves = Moves(modes=(ALL_OUT,) * 6, schedule=Schedule(layers=5))
    text = program_text(apply_moves(step, moves, recomputer(step)))
    assert "| out x0, c0, d0, a0, b0, x1 and 5 more" in text
