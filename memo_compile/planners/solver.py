"""The thin wrapper over python-mip: one way to make a model, to solve it, and to read integers.

The engine is HiGHS where its library is installed, else CBC. python-mip is imported by the first
call, not with this module: it costs 0.2 s, which most commands never need. It is an extra, since
its own dependency cbcbox weighs 598 MB; without that, with HiGHS, it does all that memo asks.
"""

import functools
import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from memo_compile.errors import ConfigError

INTEGRALITY_TOLERANCE = 1e-5
"""A value this close to an integer counts as the integer; the engines promise 1e-6."""

EXACT_TOLERANCE = 1e-9
"""Feasibility, integrality and relative gap of an exact model: with the engines' defaults (1e-6,
1e-4) a plan could miss its budget by kilobytes, or the optimum by 0.01 %."""

HOW_TO_GET_ONE = "pip install --no-deps mip && pip install cffi"
"""Without cbcbox: HiGHS comes with memo."""

_EXACT_HIGHS = {
    "mip_rel_gap": 0.0,
    "mip_abs_gap": EXACT_TOLERANCE,
    "mip_feasibility_tolerance": EXACT_TOLERANCE,
    "primal_feasibility_tolerance": EXACT_TOLERANCE,
}


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


@functools.cache
def available_engines() -> tuple[Engine, ...]:
    """The engines that start on this machine, the preferred one first; empty without python-mip."""
    try:
        import mip
    except ImportError:
        return ()
    found = []
    for engine in Engine:
        if engine is Engine.CBC and importlib.util.find_spec("cbcbox") is None:
            continue  # python-mip would print an error
        try:
            _free(mip.Model(name="probe", solver_name=engine.value))
        # python-mip raises whatever the loading of its shared library raised: FileNotFoundError,
        # OSError, ImportError, or NameError where the binding was skipped at import.
        except Exception:
            continue
        found.append(engine)
    return tuple(found)


def _free(model: Any) -> None:
    """Free what the engine holds of ``model`` now, the first one of its engine.

    Garbage is collected at any time, also while cffi looks up a function under a lock that its
    thread cannot take twice. A model that is freed then must not be the first: what frees it would
    be looked up, and the process would wait for ever.
    """
    model.solver.__del__()
    model.solver._model = None


def make_model(name: str, engine: Engine | None = None) -> Any:
    """An empty, silent minimising ``mip.Model``. Raises ConfigError: no such engine, or none."""
    engines = available_engines()
    if engine is not None and engine not in engines:
        have = ", ".join(e.value for e in engines) or "none"
        raise ConfigError(f"solver engine {engine.value} is not installed (found: {have})")
    if not engines:
        raise ConfigError(f"no MIP engine found; {HOW_TO_GET_ONE}")
    import mip

    chosen = engine or engines[0]
    model = mip.Model(name=name, solver_name=chosen.value)
    model.verbose = 0
    return model


def exact_model(name: str) -> Any:
    """An empty model whose engine proves optimality to ``EXACT_TOLERANCE``."""
    model = make_model(name)
    for option in ("infeas_tol", "integer_tol", "max_mip_gap"):
        setattr(model, option, EXACT_TOLERANCE)
    _set_highs(model, "double", _EXACT_HIGHS)
    model.threads = 1
    return model


def limit_nodes(model: Any, max_nodes: int) -> None:
    """The search tree of ``model`` has at most ``max_nodes`` nodes, where the engine is HiGHS.

    Such a limit gives the same answer in each run, which one in seconds does not.
    """
    _set_highs(model, "int", {"mip_max_nodes": max_nodes})
    model.threads = 1


def _set_highs(model: Any, kind: str, options: Mapping[str, float]) -> None:
    """python-mip 2.0 keeps these options to itself with HiGHS, so they are set on the engine."""
    set_option = getattr(model.solver, f"_set_{kind}_option_value", None)
    if set_option is not None:
        for option, value in options.items():
            set_option(option, value)


def weighted(weights: Iterable[float], variables: Iterable[Any]) -> Any:
    """Sum of products as a linear expression; ints among the variables are constants."""
    import mip

    pairs = list(zip(weights, variables, strict=True))
    constant = sum(w * v for w, v in pairs if isinstance(v, int))
    terms = [(v, w) for w, v in pairs if not isinstance(v, int)]
    return mip.LinExpr([v for v, _ in terms], [float(w) for _, w in terms], float(constant))


def total(variables: Sequence[Any]) -> Any:
    """Plain sum as a linear expression; ints among the variables are constants."""
    return weighted([1.0] * len(variables), variables)


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
