"""Small programs, solved by each engine that is here."""

import pytest

from memo_compile.errors import ConfigError
from memo_compile.planners import solver
from memo_compile.planners.solver import (
    Engine,
    LinearProgram,
    SolveStatus,
    available_engines,
    exact_program,
    total,
    weighted,
)

ENGINES = available_engines()


@pytest.mark.parametrize("engine", ENGINES)
def test_optimal_then_infeasible(engine):
    program = LinearProgram(engine=engine)
    take = [program.choice() for _ in range(3)]
    program.minimise(-weighted((1, 2, 3), take))
    program.require(total(take) <= 2)
    assert program.solve(10.0) is SolveStatus.OPTIMAL
    assert [program.integer_value(x) for x in take] == [0, 1, 1]
    assert program.value(program.objective) == pytest.approx(-5)
    program.require(total(take) >= 3)
    assert program.solve(10.0) is SolveStatus.INFEASIBLE


@pytest.mark.parametrize("engine", ENGINES)
def test_fractions_constants_and_bounds(engine):
    """min 3 - x + 2 y - z where x = 2 y + 1, z <= x, x <= 4, z >= 0.5."""
    program = LinearProgram(engine=engine)
    x, y, z = program.variable(high=4), program.variable(), program.variable(low=0.5)
    program.require((x - 1).equals(2 * y))
    program.require(z <= x)
    program.minimise(3 - x + y * 2 - z)
    assert program.solve() is SolveStatus.OPTIMAL
    found = [program.value(term) for term in (x, y, z, x - z, 7)]
    assert found == pytest.approx([4, 1.5, 4, 0, 7])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_search_that_may_look_at_one_node_keeps_the_solution_it_began_with(engine):
    """Weights of a knapsack that takes a tree; without a start a limit may leave nothing."""
    program = LinearProgram(engine=engine, max_nodes=1)
    weights = [97 + 61 * i % 89 for i in range(40)]
    take = [program.choice() for _ in weights]
    for variable in take:
        program.begin_at(variable, 0.0)
    program.require(weighted(weights, take) <= 1001)
    program.minimise(-weighted([weight + i % 7 for i, weight in enumerate(weights)], take))
    assert program.solve(60.0).has_solution
    assert program.value(weighted(weights, take)) <= 1001 + 1e-6


def test_an_exact_program_does_not_miss_a_bound_by_a_millionth():
    program = exact_program()
    x = program.variable(high=2.0)
    program.require(x <= 1.0)
    program.minimise(-x)
    assert program.solve() is SolveStatus.OPTIMAL
    assert program.value(x) <= 1.0 + 1e-9


def test_no_time_is_a_time_limit_and_has_no_solution():
    status = LinearProgram().solve(0.0)
    assert status is SolveStatus.TIME_LIMIT
    assert not status.has_solution


def test_a_program_without_bounds_is_an_error():
    program = LinearProgram()
    program.minimise(-program.variable())
    assert program.solve() is SolveStatus.ERROR


def test_a_fraction_is_never_rounded_away():
    program = LinearProgram()
    x = program.variable(low=0.4)
    program.minimise(x)
    assert program.solve() is SolveStatus.OPTIMAL
    with pytest.raises(AssertionError, match=r"0\.4 is not integral"):
        program.integer_value(x)


def test_an_engine_that_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mip", None)
    with pytest.raises(ConfigError, match=r"solver gurobi: needs python-mip; pip install"):
        LinearProgram(engine=Engine.GUROBI).solve()
    assert solver.available_engines() == (Engine.HIGHS,)
