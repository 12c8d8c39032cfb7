"""Reports possibilities that memo has dropped because of an error, once each.

Where a possibility fails (tiles, a slice of rows, a recomputation) planning goes on without it. An
error of a kind that no code raises on purpose is a fault of memo: the log asks to report it.
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
"""Errors of rules, kernels and checks of torch for an operator that they do not expect; the pass
runner raises PassFailed in their place."""

REPORT = "please report this with the model, torch's version and the log"


def refused(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Returns ``others`` and the runtime's errors for a device or host without room for a step.

    Does not import the runtime, which would load torch: if nobody has, it has raised nothing.
    """
    names = (("memo_runtime.arena", "ArenaError"), ("memo_runtime.pinned_memory", "HostStoreError"))
    modules = ((sys.modules.get(module), name) for module, name in names)
    errors = (getattr(module, name) for module, name in modules if hasattr(module, name))
    return (*others, *errors)


def is_bug(error: Exception) -> bool:
    """True for an error that no code raises on purpose, and for a plan that the checker refuses."""
    is_mistake = isinstance(error, PassFailed | InvalidPlan)
    return is_mistake or not isinstance(error, refused(MemoError))


def say_dropped(what: str, error: Exception) -> None:
    """Says, in the report and once in the log, that ``what`` is not done because of ``error``."""
    if is_bug(error):
        say_bug(what, described(error), error)
    else:
        state.warn_once(f"{what}: {error}")


def say_bug(what: str, reason: str, error: Exception | None = None) -> None:
    """Says that ``what`` happened because of a fault of memo, ``reason``, and asks to report it."""
    if state.add_note(f"{what}: {reason}"):
        log.error("memo: %s: %s; %s", what, reason, REPORT, exc_info=error)
