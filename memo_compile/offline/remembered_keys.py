"""Under which keys steps are remembered, and what does not count. No torch here."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from memo_compile.config import MemoConfig, torch_settings
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.errors import InputError
from memo_compile.file_store import FileStore, code_digest, digest_of
from memo_compile.gpus import target_of, version_of
from memo_compile.step.serialise import plain

log = logging.getLogger("memo")

CHOSEN_LATER = frozenset(
    (
        "memory_budget host_budget policy alpha placement_solver placement_time_limit_s strict "
        "max_plans cache tile_above_bytes drop_above_bytes max_over_compute max_step_s "
        "enough_s arena_percent"
    ).split()
)
"""Options that no record depends on. Of the budget only counts whether there is one."""

Say = Callable[[str, int], None]
"""Told what is done next, where that may take seconds, and how many steps follow it at least."""


def nobody_watches(_what: str, _following: int) -> None:
    """A ``Say`` that tells nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Where steps are remembered, and what stands for the model and its inputs."""

    store: FileStore
    content: Mapping[str, Any]


def step_key(
    content: Mapping[str, Any], options: MemoConfig, hardware: HardwareProfile
) -> dict[str, Any]:
    """What a record depends on, but for the two bounds that its thresholds are about."""
    chosen = {
        option.name: plain(getattr(options, option.name))
        for option in dataclasses.fields(options)
        if option.name not in CHOSEN_LATER
    }
    return {
        "kind": "step",
        "content": dict(content),
        "has_budget": options.memory_budget is not None,
        "drops": options.drops_above() is not None,
        "options": chosen,
        "hardware": plain(hardware),
        "target": [plain(target_of(hardware.name)), version_of("triton")],
    }


def in_tiles(options: MemoConfig) -> str:
    """How a step runs, for people."""
    number = options.token_tiles or 1
    return "whole" if number == 1 else f"in {number} tiles"


@contextlib.contextmanager
def ignored_if_wrong() -> Any:
    """What is remembered and is no such data is as good as not remembered."""
    try:
        yield
    except (InputError, ValueError, TypeError, KeyError) as error:
        log.warning("memo: what was remembered of a step is not used: %s", error)


def code_version() -> str:
    """What stands for all that a record depends on beside the question: memo, torch, Python."""
    return digest_of([code_digest(), torch_settings()])
