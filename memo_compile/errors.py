"""The exceptions that the compiler raises on purpose. A user's mistake is never an assert.

The runtime imports nothing of the compiler and has its own, which are no MemoError: ``ArenaError``,
``HostStoreError`` and ``StepError``.
"""

import difflib
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path


class MemoError(Exception):
    """Something went wrong that memo can name: what failed, where, expected against got, a mend."""


class ConfigError(MemoError, ValueError):
    """An option is unknown or has a value that cannot be used."""


class InputError(MemoError, ValueError):
    """A file or argument of a command is malformed; the message starts with file:line or field."""


def require_at_least(least: int, values: Mapping[str, float]) -> None:
    """Raises InputError for the first of ``values`` that is less than ``least``."""
    for name, value in values.items():
        if not value >= least:
            raise InputError(f"{name}: expected at least {least}, got {value}")


def nearest(name: str, names: Iterable[str], otherwise: str = "", *, least: float = 0.5) -> str:
    """Returns the end of a message about an unknown ``name``: ``; did you mean 'greedy'?``.

    ``least`` is how alike one of ``names`` must be, from 0 to 1; where none is, ``otherwise``.
    """
    alike = difflib.get_close_matches(name, list(names), n=1, cutoff=least)
    return f"; did you mean {alike[0]!r}?" if alike else otherwise


class UnsupportedGraph(MemoError):
    """The graph holds something that memo cannot plan; the caller steps aside to plain Inductor."""


class UntraceableGraph(UnsupportedGraph):
    """AOTAutograd failed on the graph before memo saw it: mostly an error of the user's program.

    Plain Inductor then raises what the user is to read, as it does without memo.
    """


class NumberNeeded(UnsupportedGraph):
    """A graph was traced for all values of an integer, and needs the value: it is traced anew."""


class Infeasible(MemoError):
    """No plan satisfies the bound; the message states the floor and what makes it.

    ``floor_bytes`` is the smallest bound that could be kept, where it is known. While torch
    compiles, this error (as every MemoError) is a ``torch._dynamo.exc.BackendCompilerFailed`` as
    well, whose ``inner_exception`` is not. A step that is planned anew raises the bare error.
    """

    def __init__(self, message: str, *, floor_bytes: int | None = None) -> None:
        super().__init__(message)
        self.floor_bytes = floor_bytes


def without_frames(error: Infeasible) -> Infeasible:
    """Returns a copy of ``error`` to keep: its traceback would keep a step's tensors alive."""
    return Infeasible(str(error), floor_bytes=error.floor_bytes)


class TooSlow(MemoError):
    """A plan fits, and with other tiles the step may be faster than its ``step_s`` seconds.

    With ``is_bound`` nothing was placed: hardly a plan takes less than ``step_s``.
    """

    def __init__(self, message: str, *, step_s: float, is_bound: bool = False) -> None:
        super().__init__(message)
        self.step_s = step_s
        self.is_bound = is_bound


class InvalidPlan(MemoError):
    """The independent checker found a plan that would compute a wrong result or break its bound."""


class RanksDisagree(MemoError):
    """Ranks would begin different collectives, or a rank did not come; the message names both."""


class RankSteppedAside(UnsupportedGraph):
    """Another rank runs the graph through plain Inductor, so this one has to do the same."""


class PassFailed(MemoError):
    """A pass raised, broke the graph, or claimed something that is not true."""


class RuntimeMisuse(MemoError):
    """Code was run that exists for planning only, or that this machine cannot run."""


def described(error: BaseException) -> str:
    """Returns ``error`` in one line: type, message, and the line of code that raised it."""
    text = str(error).strip().partition("\n")[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}"
