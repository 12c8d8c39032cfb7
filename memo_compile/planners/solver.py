"""Linear and mixed-integer programs: variables, constraints, an objective, limits, and a solve.

HiGHS solves them, which every install has. python-mip, an extra, is the way to CBC and to Gurobi.
A program knows nothing of either, so that any of them solves it:

    program = LinearProgram()
    x, y = program.variable(high=2, is_integer=True), program.variable(high=2)
    program.require(x + y <= 3)
    program.minimise(-x - 2 * y)
    program.solve()         # SolveStatus.OPTIMAL
    program.value(y)        # 2.0
"""

import gc
import importlib.util
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from memo_compile.errors import ConfigError

INTEGRALITY_TOLERANCE = 1e-5
"""A value this close to an integer counts as the integer; the engines promise 1e-6."""

EXACT_TOLERANCE = 1e-9
"""Feasibility, integrality and relative gap of an exact program: with the engines' defaults (1e-6,
1e-4) a plan could miss its budget by kilobytes, or the optimum by 0.01 %."""

HOW_TO_GET_MIP = "pip install 'memo-compile[mip]'"

NO_LIMIT_S = 1e9


class SolveStatus(Enum):
    """How a solve ended; the values are what the command line prints."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    TIME_LIMIT = "time_limit"
    ERROR = "error"

    @property
    def has_solution(self) -> bool:
        """True when the variables of the program hold values."""
        return self in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE)


class Engine(Enum):
    """What solves a program; the values are the names that users give."""

    HIGHS = "highs"
    CBC = "cbc"
    GUROBI = "gurobi"


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A sum of variables with weights, and a constant. Compared with another it is a Constraint."""

    weights: Mapping[int, float]
    """By the variable's number."""
    constant: float = 0.0

    def __add__(self, other: "Linear | float") -> "Linear":
        return weighted((1.0, 1.0), (self, other))

    __radd__ = __add__

    def __sub__(self, other: "Linear | float") -> "Linear":
        return weighted((1.0, -1.0), (self, other))

    def __rsub__(self, other: float) -> "Linear":
        return weighted((-1.0, 1.0), (self, other))

    def __neg__(self) -> "Linear":
        return weighted((-1.0,), (self,))

    def __mul__(self, factor: float) -> "Linear":
        return weighted((factor,), (self,))

    __rmul__ = __mul__

    def __le__(self, other: "Linear | float") -> "Constraint":
        return Constraint(self - other, -math.inf)

    def __ge__(self, other: "Linear | float") -> "Constraint":
        return Constraint(other - self, -math.inf)

    def equals(self, other: "Linear | float") -> "Constraint":
        """Neither is larger."""
        return Constraint(self - other, 0.0)


class Constraint(NamedTuple):
    """A sum that is at most 0, and at least ``least``."""

    sum: Linear
    least: float


def weighted(weights: Iterable[float], terms: "Iterable[Linear | float]") -> Linear:
    """The sum of each weight times its term."""
    weight_of: dict[int, float] = {}
    constant = 0.0
    for weight, term in zip(weights, terms, strict=True):
        if not isinstance(term, Linear):
            constant += weight * term
            continue
        constant += weight * term.constant
        for number, term_weight in term.weights.items():
            weight_of[number] = weight_of.get(number, 0.0) + weight * term_weight
    return Linear(weight_of, constant)


def total(terms: "Sequence[Linear | float]") -> Linear:
    """Plain sum."""
    return weighted([1.0] * len(terms), terms)


@dataclass(slots=True, kw_only=True)
class LinearProgram:
    """A program to be minimised; what limits its search; after a solve, the variables' values."""

    engine: Engine = Engine.HIGHS
    gap: float = 1e-4
    """The search ends at a solution that is at most this share of the optimum above it."""
    added_gap: float = 1e-6
    """Or this much."""
    max_nodes: int | None = None
    """Most nodes of the search tree. Such a limit gives the same answer in each run, which one in
    seconds does not."""
    tolerance: float | None = None
    """By which a constraint may fail, and an integer be none; None leaves it to the engine."""
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    is_integer: list[bool] = field(default_factory=list)
    rows: list[Constraint] = field(default_factory=list)
    objective: Linear = field(default_factory=lambda: Linear({}))
    start: dict[int, float] = field(default_factory=dict)
    """A solution to begin from, by the variable's number."""
    values: Sequence[float] = ()

    def variable(
        self, *, low: float = 0.0, high: float = math.inf, is_integer: bool = False
    ) -> Linear:
        """A new variable between two bounds."""
        self.low.append(low)
        self.high.append(high)
        self.is_integer.append(is_integer)
        return Linear({len(self.low) - 1: 1.0})

    def choice(self) -> Linear:
        """A new variable that is 0 or 1."""
        return self.variable(high=1.0, is_integer=True)

    def require(self, constraint: Constraint) -> None:
        """Every solution obeys ``constraint``."""
        self.rows.append(constraint)

    def minimise(self, objective: Linear) -> None:
        """Seek the least ``objective``, in place of what was sought before."""
        self.objective = objective

    def begin_at(self, variable: Linear, value: float) -> None:
        """The search begins with ``value`` for ``variable``."""
        (number,) = variable.weights
        self.start[number] = value

    def solve(self, time_limit_s: float = math.inf) -> SolveStatus:
        """Search for at most ``time_limit_s`` seconds, and say how that ended.

        An unbounded program and an engine's own failure are ERROR: no program of memo is unbounded.
        Raises ConfigError: the engine is not installed.
        """
        if self.engine is not Engine.HIGHS:
            require_engine(self.engine)
        if time_limit_s <= 0:
            return SolveStatus.TIME_LIMIT
        solve = _solve_by_highs if self.engine is Engine.HIGHS else _solve_by_mip
        status, self.values = solve(self, min(time_limit_s, NO_LIMIT_S))
        return status

    def value(self, term: "Linear | float") -> float:
        """What ``term`` comes to in the solution."""
        if not isinstance(term, Linear):
            return float(term)
        return term.constant + math.fsum(
            weight * self.values[number] for number, weight in term.weights.items()
        )

    def integer_value(self, term: "Linear | float") -> int:
        """The integer that ``term`` stands for in the solution.

        Asserts that the engine's float lies within ``INTEGRALITY_TOLERANCE`` (relative above 1) of
        it.
        """
        value = self.value(term)
        nearest = round(value)
        slack = INTEGRALITY_TOLERANCE * max(1.0, abs(value))
        assert abs(value - nearest) <= slack, f"{value!r} is not integral"
        return nearest


def exact_program() -> LinearProgram:
    """An empty program whose optimum is proved to ``EXACT_TOLERANCE``."""
    return LinearProgram(gap=0.0, added_gap=EXACT_TOLERANCE, tolerance=EXACT_TOLERANCE)


def available_engines() -> tuple[Engine, ...]:
    """The engines that start on this machine, the preferred one first."""
    return tuple(engine for engine in Engine if not missing_engine(engine))


def require_engine(engine: Engine) -> None:
    """Raises ConfigError: ``engine`` does not start; the message says what to install."""
    if reason := missing_engine(engine):
        raise ConfigError(f"solver {engine.value}: {reason}")


def missing_engine(engine: Engine) -> str:
    """Why ``engine`` does not start; empty where it does."""
    if engine is Engine.HIGHS:
        return "" if importlib.util.find_spec("highspy") else "needs highspy; pip install highspy"
    try:
        import mip
    except ImportError:
        return f"needs python-mip; {HOW_TO_GET_MIP}"
    if engine is Engine.CBC and importlib.util.find_spec("cbcbox") is None:
        return "needs cbcbox; pip install cbcbox"  # which python-mip would print
    try:
        mip.Model(solver_name=_MIP_NAMES[engine])
    # python-mip raises what the loading of a library raises, or the search for a license.
    except Exception as error:
        return f"does not start: {' '.join(str(error).split())}"
    # cffi looks up what frees a model when the first one is freed, under a lock that a collection
    # of garbage must not meet: so the first is freed here.
    gc.collect()
    return ""


Solved = tuple[SolveStatus, Sequence[float]]
"""How a search ended, and the value of each variable."""

_MIP_NAMES = {Engine.CBC: "CBC", Engine.GUROBI: "GRB"}
"""python-mip's own names."""


def _solve_by_highs(program: LinearProgram, time_limit_s: float) -> Solved:
    """Solves ``program`` with highspy, HiGHS's own interface."""
    import highspy

    highs = highspy.Highs()
    for option, value in _highs_options(program, time_limit_s).items():
        highs.setOptionValue(option, value)
    highs.passModel(_highs_model(program))
    if program.start:
        start = highspy.HighsSolution()
        start.col_value = [program.start.get(number, 0.0) for number in range(len(program.low))]
        highs.setSolution(start)
    highs.run()
    codes = highspy.HighsModelStatus
    ended = highs.getModelStatus()
    if ended in (codes.kInfeasible, codes.kUnboundedOrInfeasible):
        return SolveStatus.INFEASIBLE, ()
    by_limit = (codes.kTimeLimit, codes.kSolutionLimit, codes.kIterationLimit, codes.kInterrupt)
    if ended not in (codes.kOptimal, codes.kModelEmpty, *by_limit):
        return SolveStatus.ERROR, ()
    solution_status = highs.getInfo().primal_solution_status
    is_feasible = solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if ended in by_limit and not is_feasible:
        return SolveStatus.TIME_LIMIT, ()
    status = SolveStatus.FEASIBLE if ended in by_limit else SolveStatus.OPTIMAL
    return status, list(highs.getSolution().col_value)


def _highs_options(program: LinearProgram, time_limit_s: float) -> Mapping[str, Any]:
    """HiGHS's options by their names."""
    options: dict[str, Any] = {
        "output_flag": False,
        "threads": 1,
        "mip_rel_gap": program.gap,
        "mip_abs_gap": program.added_gap,
        "time_limit": time_limit_s,
    }
    if program.max_nodes is not None:
        options["mip_max_nodes"] = program.max_nodes
    if program.tolerance is not None:
        options["mip_feasibility_tolerance"] = program.tolerance
        options["primal_feasibility_tolerance"] = program.tolerance
    return options


def _highs_model(program: LinearProgram) -> Any:
    """``program`` as HiGHS takes it: bounds of columns and rows, and the matrix row by row."""
    import highspy

    rows, num_columns = program.rows, len(program.low)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = num_columns, len(rows)
    model.col_lower_, model.col_upper_ = program.low, program.high
    model.col_cost_ = [program.objective.weights.get(at, 0.0) for at in range(num_columns)]
    model.offset_ = program.objective.constant
    model.row_lower_ = [row.least - row.sum.constant for row in rows]
    model.row_upper_ = [-row.sum.constant for row in rows]
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.num_col_, matrix.num_row_ = num_columns, len(rows)
    matrix.start_ = [*itertools.accumulate((len(row.sum.weights) for row in rows), initial=0)]
    matrix.index_ = [number for row in rows for number in row.sum.weights]
    matrix.value_ = [weight for row in rows for weight in row.sum.weights.values()]
    if any(program.is_integer):
        kinds = highspy.HighsVarType
        model.integrality_ = [
            kinds.kInteger if is_whole else kinds.kContinuous for is_whole in program.is_integer
        ]
    return model


def _solve_by_mip(program: LinearProgram, time_limit_s: float) -> Solved:
    """Solves ``program`` with python-mip, by CBC or Gurobi."""
    import mip

    model = mip.Model(solver_name=_MIP_NAMES[program.engine])
    model.verbose, model.threads = 0, 1
    model.max_mip_gap, model.max_mip_gap_abs = program.gap, program.added_gap
    if program.tolerance is not None:
        model.infeas_tol = model.integer_tol = program.tolerance
    columns = [
        model.add_var(lb=low, ub=high, var_type=mip.INTEGER if is_integer else mip.CONTINUOUS)
        for low, high, is_integer in zip(program.low, program.high, program.is_integer, strict=True)
    ]

    def expression(term: Linear) -> Any:
        variables = [columns[number] for number in term.weights]
        return mip.LinExpr(variables, [*term.weights.values()], term.constant)

    for row in program.rows:
        row_sum = expression(row.sum)
        model.add_constr(row_sum == 0 if row.least == 0 else row_sum <= 0)
    model.objective = expression(program.objective)
    model.start = [(columns[number], value) for number, value in program.start.items()]
    try:
        ended = model.optimize(max_seconds=time_limit_s, max_nodes=program.max_nodes or mip.INT_MAX)
    except mip.SolutionNotAvailable:
        return SolveStatus.TIME_LIMIT, ()
    except mip.MipBaseException:
        return SolveStatus.ERROR, ()
    codes = mip.OptimizationStatus
    if ended in (codes.INFEASIBLE, codes.INT_INFEASIBLE):
        return SolveStatus.INFEASIBLE, ()
    has_values = model.num_solutions > 0 or not any(program.is_integer)
    if ended in (codes.OPTIMAL, codes.FEASIBLE) and has_values:
        values = [float(column.x) for column in columns]
        return (SolveStatus.OPTIMAL if ended is codes.OPTIMAL else SolveStatus.FEASIBLE), values
    is_error = ended in (codes.ERROR, codes.UNBOUNDED, codes.INT_UNBOUNDED, codes.CUTOFF)
    return (SolveStatus.ERROR if is_error else SolveStatus.TIME_LIMIT), ()
