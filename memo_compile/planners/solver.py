"""The thin wrapper over python-mip: one way to make a model, to solve it, and to read integers.

The engine is HiGHS where its library is installed, else CBC. python-mip is imported by the first
call, not with this module: it costs 0.2 s, which most commands never need.
"""

import functools
import math
from enum import Enum
from typing import Any

from memo_compile.errors import ConfigError

INTEGRALITY_TOLERANCE = 1e-5
"""Largest distance from an integer that still counts as one; the engines promise 1e-6."""


class SolveStatus(Enum):
    """How a solve ended; the values are what the command line prints."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    TIME_LIMIT = "time_limit"
    ERROR = "error"

    @property
    def has_solution(self) -> bool:
        """True when the variables of the model hold values."""
        return self in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE)


class Engine(Enum):
    """A solver behind python-mip; the values are python-mip's names."""

    HIGHS = "HIGHS"
    CBC = "CBC"


class Sense(Enum):
    """Direction of the objective; the values are python-mip's."""

    MINIMIZE = "MIN"
    MAXIMIZE = "MAX"


@functools.cache
def available_engines() -> tuple[Engine, ...]:
    """The engines that start on this machine, the preferred one first; empty without python-mip."""
    try:
        import mip
    except ImportError:
        return ()
    found = []
    for engine in Engine:
        try:
            mip.Model(name="probe", solver_name=engine.value)
        # python-mip raises whatever the loading of its shared library raised: FileNotFoundError,
        # OSError, ImportError, or NameError where the binding was skipped at import.
        except Exception:
            continue
        found.append(engine)
    return tuple(found)


def make_model(name: str, sense: Sense = Sense.MINIMIZE, engine: Engine | None = None) -> Any:
    """An empty, silent ``mip.Model``.

    Raises:
        ConfigError: ``engine``, or with None every engine, is missing on this machine.
    """
    engines = available_engines()
    if engine is not None and engine not in engines:
        have = ", ".join(e.value for e in engines) or "none"
        raise ConfigError(f"solver engine {engine.value} is not installed (found: {have})")
    if not engines:
        raise ConfigError("no MIP engine found; install `mip` and `highspy`")
    import mip

    chosen = engine or engines[0]
    model = mip.Model(name=name, sense=sense.value, solver_name=chosen.value)
    model.verbose = 0
    return model


def solve(model: Any, time_limit_s: float = math.inf) -> SolveStatus:
    """Optimise ``model`` for at most ``time_limit_s`` seconds and say how it ended.

    With OPTIMAL and FEASIBLE the variables hold values (``integer_value`` reads them). An
    unbounded model and an engine's own failure are ERROR: no program of memo is unbounded.
    """
    if time_limit_s <= 0:
        return SolveStatus.TIME_LIMIT
    import mip

    try:
        outcome = model.optimize(max_seconds=min(time_limit_s, 1e9))
    except mip.SolutionNotAvailable:
        return SolveStatus.TIME_LIMIT
    except mip.MipBaseException:
        return SolveStatus.ERROR
    codes = mip.OptimizationStatus
    if outcome in (codes.OPTIMAL, codes.FEASIBLE) and model.num_solutions < 1 and model.num_int:
        return SolveStatus.TIME_LIMIT
    return {
        codes.OPTIMAL: SolveStatus.OPTIMAL,
        codes.FEASIBLE: SolveStatus.FEASIBLE,
        codes.INFEASIBLE: SolveStatus.INFEASIBLE,
        codes.INT_INFEASIBLE: SolveStatus.INFEASIBLE,
        codes.NO_SOLUTION_FOUND: SolveStatus.TIME_LIMIT,
        codes.LOADED: SolveStatus.TIME_LIMIT,
    }.get(outcome, SolveStatus.ERROR)


def integer_value(variable: Any) -> int:
    """The integer that the solved ``variable`` stands for.

    Asserts that the engine's float lies within ``INTEGRALITY_TOLERANCE`` (relative above 1) of it.
    """
    value = float(variable.x)
    nearest = round(value)
    slack = INTEGRALITY_TOLERANCE * max(1.0, abs(value))
    assert abs(value - nearest) <= slack, f"{variable.name} = {value!r} is not integral"
    return nearest
