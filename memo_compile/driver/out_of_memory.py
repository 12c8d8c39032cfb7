"""Explains memory that ran out outside the arena: the error is raised on, with the plan's sizes."""

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from memo_runtime.arena import ArenaError

from memo_compile.reporting.write import write_pictures
from memo_compile.step.plans import Plan
from memo_compile.step.problem import Problem
from memo_compile.units import format_bytes

log = logging.getLogger("memo")


@dataclass(slots=True, kw_only=True)
class OutOfMemory:
    """Explains the OutOfMemoryErrors of one step; its plan is written once."""

    dump: str | None
    """Where the plan is written to; None: a new folder among the temporary ones."""
    _folder: Path | None = None

    @contextlib.contextmanager
    def explained(self, problem: Problem, plan: Plan) -> Iterator[None]:
        """The block's OutOfMemoryError names the planned step; a refused arena's says enough."""
        try:
            yield
        except ArenaError:
            raise
        except torch.OutOfMemoryError as error:
            text = explanation(plan, self._dumped(problem, plan))
            error.add_note(text)
            log.error("%s", text)
            raise

    def _dumped(self, problem: Problem, plan: Plan) -> Path | None:
        if self._folder is None:
            try:
                folder = Path(tempfile.mkdtemp(prefix="memo-out-of-memory-", dir=self.dump))
                write_pictures(folder, problem, plan)
                self._folder = folder
            except Exception as error:  # of any kind: the user must see the first error
                log.warning("memo: the plan could not be written: %s", error)
        return self._folder


def explanation(plan: Plan, folder: Path | None) -> str:
    """What the step was planned to hold, and what to change."""
    fixed = plan.fixed
    parts = {
        "parameters and buffers": fixed.parameters + fixed.buffers,
        "gradients": fixed.gradients,
        "optimizer state": fixed.optimizer_state,
        "inputs": fixed.inputs,
        "kept by libraries": fixed.libraries,
        "arena": plan.arena_bytes,
        "kernels' own": plan.outside_bytes,
    }
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    where = "" if folder is None else f" The plan lies in {folder}."
    peak = format_bytes(plan.peak_bytes)
    return (
        f"memo: the device ran out of memory beside the arena, in a step that was planned to hold "
        f"{peak} at its peak ({sizes}; not all at one time). What other code holds is not in it, "
        f"nor the copy of the arena that retain_graph=True makes: set memory_budget to less than "
        f"{peak} to reserve room for them.{where}"
    )
