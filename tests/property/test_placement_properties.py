"""Random problems: every solver's placement is valid, and the better solvers are never worse."""

import itertools
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memo_compile.planners.placement import (
    Buffer,
    PlacementProblem,
    check_placement,
    place,
)
from memo_compile.planners.placement.files import (
    format_csv,
    parse_csv,
)
from memo_compile.planners.placement.placement_problem import fixed_collisions
from memo_compile.planners.solver import SolveStatus
from memo_compile.step.serialise import plain, restore

SETTINGS = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@st.composite
def buffers(draw, index, features=True):
    lower = draw(st.integers(-2, 8))
    upper = lower + draw(st.integers(1, 6))
    alignment = draw(st.sampled_from([1, 1, 2, 3, 4])) if features else 1
    gaps = ()
    if features and upper - lower >= 3 and draw(st.booleans()):
        start = draw(st.integers(lower, upper - 2))
        gaps = ((start, draw(st.integers(start + 1, upper - (start == lower)))),)
    offset = None
    if features and draw(st.integers(0, 5)) == 0:
        offset = alignment * draw(st.integers(0, 4))
    return Buffer(
        id=f"b{index}",
        lower=lower,
        upper=upper,
        size=draw(st.integers(0 if features else 1, 9)),
        alignment=alignment,
        offset=offset,
        gaps=gaps,
        hint=draw(st.none() | st.integers(0, 20)) if features else None,
    )


@st.composite
def problems(draw, most=8, features=True):
    chosen = []
    for index in range(draw(st.integers(0, most))):
        buffer = draw(buffers(index, features))
        if not any(fixed_collisions([*chosen, buffer])):
            chosen.append(buffer)
    return PlacementProblem(buffers=tuple(chosen))


def brute_force(problem):
    """The lowest height, by trying every order: each buffer sinks onto those before it."""
    free = [b for b in problem.buffers if b.offset is None and b.size]
    fixed = {b.id: b for b in problem.buffers if b.offset is not None}
    floor = max((b.offset + b.size for b in fixed.values()), default=0)
    best = sum(b.size + b.alignment for b in problem.buffers) + floor
    for order in itertools.permutations(free):
        best = min(best, max(floor, _stack(order, fixed.values(), best)))
    return best


def _stack(order, fixed, limit):
    placed = [(b, b.offset) for b in fixed if b.size]
    height = 0
    for buffer in order:
        # First fit, not sinking: with fixed buffers in the way there are holes to fill.
        walls = sorted((o, o + b.size) for b, o in placed if _together(b, buffer))
        at = 0
        for start, stop in walls:
            if start - at >= buffer.size:
                break
            at = max(at, -(-stop // buffer.alignment) * buffer.alignment)
        placed.append((buffer, at))
        height = max(height, at + buffer.size)
        if height >= limit:
            return limit
    return height


def _together(a, b):
    return any(x < v and u < y for x, y in a.segments() for u, v in b.segments())


@SETTINGS
@given(problems(most=6))
def test_every_solver_is_valid_and_the_exact_ones_equal_brute_force(problem):
    greedy = place(problem, solver="greedy")
    search = place(problem, solver="search", use_numba=False)
    auto = place(problem, use_numba=False)
    for placement in (greedy, search, auto):
        check_placement(problem, placement)
        assert placement.lower_bound_bytes <= placement.height_bytes
    assert search.height_bytes <= greedy.height_bytes
    assert search.status is SolveStatus.OPTIMAL
    assert auto.status is SolveStatus.OPTIMAL
    best = brute_force(problem)
    assert search.height_bytes == auto.height_bytes == best
    assert greedy.lower_bound_bytes <= best


@settings(SETTINGS, max_examples=15)
@given(problems(most=8, features=False))
def test_exact_search_equals_brute_force_on_eight_plain_buffers(problem):
    found = place(problem, solver="search", use_numba=False)
    assert found.status is SolveStatus.OPTIMAL
    assert found.height_bytes == brute_force(problem)


@settings(SETTINGS, max_examples=25)
@given(problems(most=7))
def test_search_is_at_most_mip_is_at_most_greedy(problem):
    greedy = place(problem, solver="greedy")
    mip = place(problem, solver="mip", time_limit_s=20)
    search = place(problem, solver="search", use_numba=False)
    check_placement(problem, mip)
    assert search.height_bytes <= mip.height_bytes <= greedy.height_bytes
    assert mip.status is SolveStatus.OPTIMAL
    assert mip.height_bytes == search.height_bytes


@SETTINGS
@given(problems(most=10), st.sampled_from([2, 3, 8]))
def test_alignment_of_the_problem_is_kept(problem, alignment):
    free = [
        Buffer(id=b.id, lower=b.lower, upper=b.upper, size=b.size, gaps=b.gaps)
        for b in problem.buffers
    ]
    aligned = PlacementProblem(buffers=tuple(free), alignment=alignment)
    for solver in ("greedy", "search"):
        found = place(aligned, solver=solver, time_limit_s=5, use_numba=False)
        check_placement(aligned, found)
        assert all(offset % alignment == 0 for offset in found.offsets.values())


@SETTINGS
@given(problems(most=6, features=False), st.integers(0, 30))
def test_a_capacity_is_met_or_refuted_with_a_conflict_that_cannot_fit(problem, capacity):
    best = place(problem, solver="search", use_numba=False).height_bytes
    bounded = PlacementProblem(buffers=problem.buffers, capacity=capacity)
    found = place(bounded, use_numba=False)
    if capacity >= best:
        check_placement(bounded, found)
        return
    assert found.status is SolveStatus.INFEASIBLE
    assert found.lower_bound_bytes > capacity
    named = tuple(b for b in problem.buffers if b.id in found.conflict)
    assert len(named) == len(found.conflict)
    assert brute_force(PlacementProblem(buffers=named)) > capacity
    for left_out in named:
        rest = tuple(b for b in named if b is not left_out)
        assert brute_force(PlacementProblem(buffers=rest)) <= capacity


@SETTINGS
@given(problems(most=10))
def test_csv_and_json_round_trip(problem):
    text = format_csv(problem)
    assert parse_csv(text) == problem
    assert format_csv(parse_csv(text)) == text
    assert restore(json.loads(json.dumps(plain(problem))), PlacementProblem, "file") == problem


@st.composite
def steps(draw):
    """A layered step: forward calls, mirrored backward calls, saved buffers between them."""
    layers = draw(st.integers(2, 4))
    length = draw(st.integers(3, 6))
    classes = {}
    for kind in ("f", "b"):
        spans = st.tuples(st.integers(0, length - 1), st.integers(1, length), st.integers(1, 9))
        classes[kind] = [
            (lo, max(hi, lo + 1), size)
            for lo, hi, size in draw(st.lists(spans, min_size=1, max_size=4))
        ]
    saved = draw(st.lists(st.integers(1, 9), max_size=2))
    chosen = []
    for call in range(2 * layers):
        kind, start = ("f" if call < layers else "b"), call * length
        block = f"{kind}{call}"
        for k, (lo, hi, size) in enumerate(classes[kind]):
            name = f"{block}.{k}"
            chosen.append(
                Buffer(id=name, lower=start + lo, upper=start + hi, size=size, block=block)
            )
    for layer, (k, size) in itertools.product(range(layers), enumerate(saved)):
        lower, upper = layer * length + length // 2, (2 * layers - layer) * length
        chosen.append(Buffer(id=f"s{layer}.{k}", lower=lower, upper=upper, size=size))
    return PlacementProblem(buffers=tuple(chosen))


@SETTINGS
@given(steps())
def test_a_step_is_placed_no_higher_than_greedily(problem):
    found = place(problem, time_limit_s=2, use_numba=False)
    check_placement(problem, found)
    assert found.height_bytes <= place(problem, solver="greedy").height_bytes
