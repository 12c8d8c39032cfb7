"""What memo could have done and did not, because something unexpected happened: said once.

A possibility that fails (tiles, a slice of rows, a recomputation) is dropped and planning goes on.
An error of a kind that no code raises on purpose is a fault of memo: the log asks to report it.
"""

import logging
import sys

from memo_compile.errors import InvalidPlan, MemoError, PassFailed, described
from memo_compile.reporting import state

log = logging.getLogger("memo")

UNEXPECTED = (
    RuntimeError,
    LookupError,
    AttributeError,
    AssertionError,
    TypeError,
    ValueError,
    ArithmeticError,
    StopIteration,
    PassFailed,
)
"""What rules, kernels and checks of torch raise for an operator that they do not expect, and
PassFailed, which the pass runner raises in its place."""

REPORT = "please report this with the model, torch's version and the log"


def refused(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """``others``, and what the runtime raises where a device or a host has no room for a step.

    Nothing while it is not loaded, which loads torch: then it has raised nothing either.
    """
    names = (("memo_runtime.arena", "ArenaError"), ("memo_runtime.host_store", "HostStoreError"))
    loaded = ((sys.modules.get(module), name) for module, name in names)
    found = (getattr(module, name) for module, name in loaded if hasattr(module, name))
    return (*others, *found)


def is_bug(error: Exception) -> bool:
    """True for an error that no code raises on purpose, as it is or named by the pass runner.

    And for a plan that the checker refuses: a planner has made a mistake.
    """
    is_mistake = isinstance(error, PassFailed | InvalidPlan)
    return is_mistake or not isinstance(error, refused(MemoError))


def say_dropped(what: str, error: Exception) -> None:
    """Say, in the report and once in the log, that ``error`` is why ``what`` is not done."""
    if is_bug(error):
        say_bug(what, described(error), error)
    else:
        state.warn_once(f"{what}: {error}")


def say_bug(what: str, reason: str, error: Exception | None = None) -> None:
    """Say that ``what`` happened for a ``reason`` that should not exist, and ask to report it."""
    if state.add_note(f"{what}: {reason}"):
        log.error("memo: %s: %s; %s", what, reason, REPORT, exc_info=error)
