"""Explains why memory beside the arena ran out, and warns where much of it is fragmented.

The arena is one block. Beside it torch's allocator keeps what it once took from the device
(``reserved``), and hands parts of that out (``allocated``).
"""

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from memo_runtime.arena import ArenaError

from memo_compile.config import expands_segments
from memo_compile.reporting import state
from memo_compile.reporting.write import write_pictures
from memo_compile.step.plans import Plan
from memo_compile.step.problem import Problem
from memo_compile.units import format_bytes

log = logging.getLogger("memo")

FRAGMENTED = 0.02
"""Share of the device's memory in unused pieces from which on the report names them."""

EXPAND = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts"


@dataclass(slots=True, kw_only=True)
class OutOfMemory:
    """Explains the OutOfMemoryErrors of one step, and writes its plan to a folder once."""

    dump: str | None
    """Where the plan is written to; None: a new folder among the temporary ones."""
    _folder: Path | None = None
    _steps: int = 0

    def step_ended(self, device: torch.device) -> None:
        """Warns of fragmented memory beside the arena, on CUDA, after steps 2, 4, 8 and so on."""
        self._steps += 1
        if device.type == "cuda" and self._steps > 1 and self._steps.bit_count() == 1:
            total = torch.cuda.get_device_properties(device).total_memory
            unused = unused_bytes(device)
            if unused > FRAGMENTED * total:
                state.warn_once(fragmentation(unused, total))

    @contextlib.contextmanager
    def explained(self, problem: Problem, plan: Plan) -> Iterator[None]:
        """Explains an OutOfMemoryError of the ``with`` block; an ArenaError explains itself."""
        try:
            yield
        except ArenaError:
            raise
        except torch.OutOfMemoryError as error:
            unused = unused_bytes(torch.device("cuda")) if torch.cuda.is_available() else 0
            text = explanation(plan, self._dumped(problem, plan), unused)
            error.add_note(text)
            log.error("%s", text)
            raise

    def _dumped(self, problem: Problem, plan: Plan) -> Path | None:
        """Writes the plan once, and returns the folder; None where that failed."""
        if self._folder is None:
            try:
                folder = Path(tempfile.mkdtemp(prefix="memo-out-of-memory-", dir=self.dump))
                write_pictures(folder, problem, plan)
                self._folder = folder
            except Exception as error:  # of any kind: the user must see the first error
                log.warning("memo: the plan could not be written: %s", error)
        return self._folder


def unused_bytes(device: torch.device) -> int:
    """Returns the most bytes that torch's allocator had reserved, less the most in use at once."""
    most_reserved = torch.cuda.max_memory_reserved(device)
    return max(0, most_reserved - torch.cuda.max_memory_allocated(device))


def fragmentation(unused: int, total: int) -> str:
    """Returns a warning that ``unused`` of a device's ``total`` bytes are fragmented."""
    text = (
        f"torch's allocator has taken {format_bytes(unused)} of the device ({unused / total:.0%}) "
        "beyond the most that was in use at one time: beside the arena they lie in pieces. A plan "
        "counts what is in use"
    )
    return text if expands_segments() else f"{text}; {EXPAND}"


def explanation(plan: Plan, folder: Path | None, unused: int = 0) -> str:
    """Says what the step was planned to hold, and what to change; ``unused``: fragmented bytes."""
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
    if unused:
        remedy = "" if expands_segments() else f": {EXPAND}"
        size = format_bytes(unused)
        where = f" {size} of the device lie in pieces that nothing uses{remedy}.{where}"
    peak = format_bytes(plan.peak_bytes)
    return (
        f"memo: the device ran out of memory beside the arena, in a step that was planned to hold "
        f"{peak} at its peak ({sizes}; not all at one time). What other code holds is not in it, "
        f"nor the copy of the arena that retain_graph=True makes: set memory_budget to less than "
        f"{peak} to reserve room for them.{where}"
    )
