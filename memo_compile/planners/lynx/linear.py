"""Small helpers over python-mip that both programs use."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from memo_compile.planners import solver
from memo_compile.planners.lynx.fields import Number
from memo_compile.planners.lynx.solution import HeuSolution, OptSolution

ENGINE_TOLERANCE = 1e-9
"""Feasibility, integrality and relative gap asked of the engine: its defaults (1e-6, 1e-4) would
let a plan miss its budget by kilobytes, or stop 0.01 % short of the optimum."""

SUM_TOLERANCE = 1e-12
"""Relative rounding of a sum of floats: 0.1 + 0.2 fits a bound of 0.3."""

FRACTION_TOLERANCE = 1e-7
"""Parts of an operator below this are the engine's rounding, not a decision."""


_HIGHS_OPTIONS = {
    "mip_rel_gap": 0.0,
    "mip_abs_gap": ENGINE_TOLERANCE,
    "mip_feasibility_tolerance": ENGINE_TOLERANCE,
    "primal_feasibility_tolerance": ENGINE_TOLERANCE,
}


GAIN = 1e-6
"""Relative saving below which cutting operators is not worth a more complicated plan."""

PlanT = TypeVar("PlanT", HeuSolution, OptSolution)


def exact_model(name: str) -> Any:
    """An empty model whose engine proves optimality to ``ENGINE_TOLERANCE``."""
    model = solver.make_model(name)
    for option in ("infeas_tol", "integer_tol", "max_mip_gap"):
        setattr(model, option, ENGINE_TOLERANCE)
    # python-mip 2.0 keeps these attributes to itself with HiGHS, so they are set on the engine.
    set_option = getattr(model.solver, "_set_double_option_value", None)
    if set_option is not None:
        for option, value in _HIGHS_OPTIONS.items():
            set_option(option, value)
    model.threads = 1
    return model


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


def better_plan(whole: PlanT, split: PlanT) -> PlanT:
    """``split`` where it saves time beyond the engine's rounding, else ``whole``."""
    if not split.status.has_solution:
        return whole
    if not whole.status.has_solution or exceeds(whole.critical_time, split.critical_time, GAIN):
        return split
    return whole


def add_share(model: Any, name: str, num_slices: int) -> Any:
    """A variable in [0, 1], with ``num_slices`` > 0 a multiple of 1 / num_slices."""
    share = model.add_var(name, ub=1.0)
    if num_slices:
        slices = model.add_var(f"{name}_slices", ub=float(num_slices), var_type="I")
        model.add_constr(num_slices * share == slices, f"{name}_sliced")
    return share


def fraction_value(variable: Any, num_slices: int = 0) -> float:
    """The solved variable in [0, 1], snapped to 0, 1 and whole slices; a fixed int stays."""
    if isinstance(variable, int):
        return float(variable)
    value = float(variable.x)
    if num_slices:
        return round(value * num_slices) / num_slices
    if value < FRACTION_TOLERANCE:
        return 0.0
    return 1.0 if value > 1 - FRACTION_TOLERANCE else value


def exceeds(value: Number, bound: Number, tolerance: float = SUM_TOLERANCE) -> bool:
    """True when ``value`` is above ``bound`` by more than rounding; exact for integers."""
    if isinstance(value, int) and isinstance(bound, int):
        return value > bound
    return value > bound and not math.isclose(value, bound, rel_tol=tolerance, abs_tol=1e-300)
