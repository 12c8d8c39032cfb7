"""Memory that ran out beside the arena: not swallowed, but said with what the plan holds."""

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from memo_runtime.arena import ArenaError

from memo_compile.config import MemoConfig
from memo_compile.errors import MemoError
from memo_compile.plans import Plan
from memo_compile.problem import Problem
from memo_compile.reporting.write import write_pictures
from memo_compile.units import format_bytes

log = logging.getLogger("memo")


@contextlib.contextmanager
def out_of_memory_explained(config: MemoConfig, problem: Problem, plan: Plan) -> Iterator[None]:
    """The block's OutOfMemoryError names the planned step; its plan and pictures are on disk.

    A refused arena says what to change already. The step's frames have gone back by then.
    """
    try:
        yield
    except ArenaError:
        raise
    except torch.OutOfMemoryError as error:
        text = _explanation(problem, plan, _dumped(config, problem, plan))
        error.add_note(text)
        log.error("%s", text)
        raise


def _explanation(problem: Problem, plan: Plan, folder: Path | None) -> str:
    fixed = problem.fixed
    parts = {
        "parameters and buffers": fixed.parameters + fixed.buffers,
        "gradients": fixed.gradients,
        "optimizer state": fixed.optimizer_state,
        "inputs": fixed.inputs,
        "arena": plan.arena_bytes,
    }
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    where = "" if folder is None else f" The plan lies in {folder}."
    return (
        f"memo: the device ran out of memory beside the arena, in a step that was planned to hold "
        f"{format_bytes(plan.peak_bytes)} ({sizes}). The rest is held by others: set memory_budget "
        f"to less than {format_bytes(plan.peak_bytes)}, to reserve room for them.{where}"
    )


def _dumped(config: MemoConfig, problem: Problem, plan: Plan) -> Path | None:
    """Where the plan was written: the dump folder, or a new one."""
    try:
        parent = None if config.dump is None else str(config.dump)
        folder = Path(tempfile.mkdtemp(prefix="memo-out-of-memory-", dir=parent))
        write_pictures(folder, problem, plan)
    except (OSError, MemoError) as error:
        log.warning("memo: the plan could not be written: %s", error)
        return None
    return folder
