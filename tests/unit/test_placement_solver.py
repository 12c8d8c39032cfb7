"""The wrapper over python-mip: statuses of small programs, with each engine."""

import subprocess
import sys

import pytest

from memo_compile.errors import ConfigError
from memo_compile.planners import solver
from memo_compile.planners.solver import (
    Engine,
    SolveStatus,
    available_engines,
    integer_value,
    make_model,
    solve,
)

ENGINES = available_engines()


@pytest.mark.parametrize("engine", ENGINES)
def test_optimal_then_infeasible(engine):
    import mip

    model = make_model("knapsack", engine)
    take = [model.add_var(var_type=mip.BINARY) for _ in range(3)]
    model.objective = -mip.xsum((i + 1) * x for i, x in enumerate(take))
    model += mip.xsum(take) <= 2
    assert solve(model, 10.0) is SolveStatus.OPTIMAL
    assert [integer_value(x) for x in take] == [0, 1, 1]
    model += mip.xsum(take) >= 3
    assert solve(model, 10.0) is SolveStatus.INFEASIBLE


def test_no_time_is_a_time_limit_and_has_no_solution():
    status = solve(make_model("empty"), 0.0)
    assert status is SolveStatus.TIME_LIMIT
    assert not status.has_solution


def test_a_fraction_is_never_rounded_away():
    class Variable:
        name, x = "z", 0.4

    with pytest.raises(AssertionError, match=r"z = 0\.4 is not integral"):
        integer_value(Variable())


def test_missing_engines_are_named(monkeypatch):
    monkeypatch.setattr(solver, "available_engines", lambda: (Engine.CBC,))
    with pytest.raises(ConfigError, match=r"HIGHS is not installed \(found: CBC\)"):
        make_model("m", engine=Engine.HIGHS)
    monkeypatch.setattr(solver, "available_engines", lambda: ())
    with pytest.raises(ConfigError, match="no MIP engine found"):
        make_model("m")


FREED_UNDER_LOCK = """
import gc
gc.disable()
from memo_compile.planners import solver
assert solver.available_engines()
from mip import cbc, highs
with highs.ffi._lock, cbc.ffi._lock:
    gc.collect()
"""


def test_garbage_may_be_collected_while_cffi_looks_up_a_function():
    """It was waited for ever where python-mip's first model was among the garbage."""
    subprocess.run([sys.executable, "-c", FREED_UNDER_LOCK], check=True, timeout=60)
