"""Lynx's programs against exhaustive searches that share no code with them."""

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from memo_compile.papers.lynx.heu import solve_heu
from memo_compile.papers.lynx.joint import split_lazily
from memo_compile.papers.lynx.lynx_instance import HeuInstance, OptInstance, StageTimes
from memo_compile.papers.lynx.opt import solve_opt
from memo_compile.papers.lynx.partition import split_exact, split_paper, split_ranges
from memo_compile.planners.solver import SolveStatus


@st.composite
def operators(draw, largest):
    count = draw(st.integers(2, largest))
    deps = [[]]
    for i in range(1, count):
        deps.append(sorted(draw(st.sets(st.integers(0, i - 1), min_size=1, max_size=3))))
    return {
        "C": draw(st.lists(st.integers(0, 12), min_size=count, max_size=count)),
        "M": draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)),
        "deps": deps,
        "comm": sorted(draw(st.sets(st.integers(0, count - 1), max_size=3))),
        "static": draw(st.integers(0, 5)),
    }


@st.composite
def heu_instances(draw, largest=8):
    data = draw(operators(largest))
    count = len(data["C"])
    layers, batches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    most = data["static"] + layers * batches * sum(data["M"])
    return {
        **data,
        "need": draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)),
        "ctime": draw(st.lists(st.integers(0, 14), min_size=4, max_size=4)),
        "nl": layers,
        "nb": batches,
        "budget": draw(st.integers(0, most)),
        "fwd_phases": draw(st.booleans()),
    }


def exhaustive_heu(data):
    """Least critical time by assigning each operator in turn; inf when nothing fits.

    A choice is a phase 1..5, 0 = kept, None = absent; an operator may be recomputed in a phase
    when all it reads is there by then.
    """
    count, deps = len(data["C"]), data["deps"]
    copies = {0: data["nl"] * data["nb"], 1: data["nl"], 2: data["nl"], 3: 1, 4: 1, 5: 1}
    room = [*data["ctime"], math.inf]
    if not data["fwd_phases"]:
        room[0] = room[1] = 0
    best = math.inf

    def assign(i, chosen, memory, windows, critical):
        nonlocal best
        if memory > data["budget"] or critical >= best:
            return
        if i == count:
            best = critical
            return
        ready = max((9 if chosen[j] is None else chosen[j] for j in deps[i]), default=0)
        options = [0] if i == count - 1 else [0, 1, 2, 3, 4, 5]
        for phase in options:
            if phase and (phase < ready or ready == 9):
                continue
            if 0 < phase < 5 and (i in data["comm"] or windows[phase - 1] < data["C"][i]):
                continue
            if phase in (1, 2) and not data["fwd_phases"]:
                continue
            left = list(windows)
            if phase:
                left[phase - 1] -= data["C"][i]
            more = memory + copies[phase] * data["M"][i]
            extra = data["C"][i] if phase == 5 else 0
            assign(i + 1, (*chosen, phase), more, left, critical + extra)
        if not data["need"][i] and i < count - 1:
            assign(i + 1, (*chosen, None), memory, windows, critical)

    assign(0, (), data["static"], room, 0)
    return best


@settings(max_examples=200, deadline=None)
@given(heu_instances())
def test_heu_equals_exhaustive_enumeration(data):
    optimum = exhaustive_heu(data)
    solution = solve_heu(HeuInstance.from_json(data))
    if optimum == math.inf:
        assert solution.status is SolveStatus.INFEASIBLE
    else:
        assert solution.status is SolveStatus.OPTIMAL
        assert solution.critical_time == optimum


@settings(max_examples=40, deadline=None)
@given(heu_instances(), st.integers(0, 3), st.integers(1, 20))
def test_more_of_anything_is_never_worse(data, window, more):
    def critical(**changes):
        solution = solve_heu(HeuInstance.from_json({**data, **changes}))
        return solution.critical_time if solution.status is SolveStatus.OPTIMAL else math.inf

    base = critical()
    longer = list(data["ctime"])
    longer[window] += more
    assert critical(budget=data["budget"] + more) <= base
    assert critical(ctime=longer) <= base
    assert base <= critical(ctime=[0, 0, 0, 0])
    split = solve_heu(HeuInstance.from_json(data), token_split=True)
    if base < math.inf:
        assert split.critical_time <= base + 1e-6


def exact_opt(data):
    """Least critical time by shortest paths over the sets of outputs resident between phases."""
    count = len(data["C"])
    reach = {frozenset(): 0}
    for t in range(count):
        nxt = {}
        for resident, cost in reach.items():
            for after, extra in phases(data, t, resident):
                if t == count - 1 and after != {i for i in range(count) if data["keep"][i]}:
                    continue
                total = cost + extra
                if total < nxt.get(after, math.inf):
                    nxt[after] = total
        reach = nxt
    return min(reach.values(), default=math.inf)


def phases(data, t, resident):
    """Every (outputs resident afterwards, critical time) that phase ``t`` can lead to."""
    others = [i for i in range(t) if i not in resident]
    hideable = t in data["comm"]
    options = [(0, 1, 2) if hideable and i not in data["comm"] else (0, 1) for i in others]
    for how in itertools.product(*options):
        first = sorted([i for i, x in zip(others, how, strict=True) if x == 1] + [t])
        behind = [i for i, x in zip(others, how, strict=True) if x == 2]
        if sum(data["C"][i] for i in behind) > data["C"][t]:
            continue
        made = set(resident)
        legal = True
        for i in (*first, *behind):
            legal = legal and made.issuperset(data["deps"][i])
            made.add(i)
        if not legal:
            continue
        for size in range(len(made) + 1):
            for after in itertools.combinations(sorted(made), size):
                if fits(data, t, resident, first, behind, set(after)):
                    yield frozenset(after), sum(data["C"][i] for i in first)


def fits(data, t, resident, first, behind, after):
    sizes, live = data["M"], set(resident)
    held = after | set(behind) | {j for i in behind for j in data["deps"][i]}
    for position, i in enumerate(first):
        live.add(i)
        at_once = live | set(behind) if i == t else live
        if data["static"] + sum(sizes[j] for j in at_once) > data["budget"]:
            return False
        still = held | {j for k in first[position + 1 :] for j in data["deps"][k]}
        live -= {j for j in (i, *data["deps"][i]) if j not in still}
    return True


@st.composite
def opt_instances(draw):
    data = draw(operators(5))
    count = len(data["C"])
    needs = [data["M"][i] + sum(data["M"][j] for j in data["deps"][i]) for i in range(count)]
    keep = draw(st.lists(st.integers(0, 1), min_size=count - 1, max_size=count - 1))
    budget = data["static"] + max(needs) + draw(st.integers(-1, 6))
    return {**data, "keep": [*keep, 1], "budget": max(budget, 0)}


@settings(max_examples=60, deadline=None)
@given(opt_instances())
def test_opt_equals_exact_search(data):
    optimum = exact_opt(data)
    solution = solve_opt(OptInstance.from_json(data))
    if optimum == math.inf:
        assert solution.status is SolveStatus.INFEASIBLE
        assert solution.conflict is not None
        assert solution.conflict.floor > data["budget"]
        return
    assert solution.status is SolveStatus.OPTIMAL
    assert solution.critical_time == optimum
    split = solve_opt(OptInstance.from_json(data), token_split=True)
    assert split.critical_time <= optimum + 1e-6


@st.composite
def stage_tables(draw):
    stages, layers = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    cell = st.one_of(st.none(), st.integers(0, 40))
    row = st.lists(cell, min_size=1, max_size=layers + 1)
    rows = draw(st.lists(row, min_size=stages, max_size=stages))
    return StageTimes(rows=tuple(map(tuple, rows)), num_layers=layers)


@settings(max_examples=150, deadline=None)
@given(stage_tables())
def test_partition_equals_brute_force(table):
    choices = [[(n, t) for n, t in enumerate(row) if t is not None] for row in table.rows]
    slowest = [
        max(t for _, t in pick)
        for pick in itertools.product(*choices)
        if sum(n for n, _ in pick) == table.num_layers
    ]
    split = split_exact(table)
    if not slowest:
        assert split.status is SolveStatus.INFEASIBLE
        assert split.conflict
        return
    assert split.slowest == min(slowest)
    assert split_paper(table).slowest >= split.slowest


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_split_of_ranges_equals_brute_force(data):
    """Layers are of several classes, so that each range has its own time on each stage."""
    stages, layers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    ranges = [(b, e) for b in range(layers) for e in range(b + 1, layers + 1)]
    cells = st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 9)))
    known = {(s, *own): data.draw(cells) for s in range(stages) for own in ranges}
    asked = set()

    def least(*where):
        return known[where][0] if where in known else None

    def exact(*where):
        asked.add(where)
        least, more = known[where]
        return None if more is None else least + more

    def costs_of(cuts):
        borders = (0, *cuts, layers)
        return [exact(s, *own) for s, own in enumerate(itertools.pairwise(borders))]

    split = split_ranges(layers, stages, least, exact)
    num_asked = len(asked)
    found = [
        (max(costs), sum(costs))
        for cuts in itertools.combinations(range(1, layers), stages - 1)
        if None not in (costs := costs_of(cuts))
    ]
    if not found:
        assert split is None
        return
    costs = costs_of(list(itertools.accumulate(split))[:-1])
    assert (max(costs), sum(costs)) == min(found)
    assert num_asked <= len(known)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_lazy_split_equals_the_dynamic_programme(data):
    stages, layers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    rows = []
    for _ in range(stages):
        steps = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=layers))
        rows.append((None, *itertools.accumulate(steps)))
    table = StageTimes(rows=tuple(rows), num_layers=layers)

    def stage_s(stage, n):
        return rows[stage][n] if n < len(rows[stage]) else None

    lazy = split_lazily(layers, stages, stage_s)
    exact = split_exact(table)
    if exact.status is SolveStatus.INFEASIBLE:
        assert lazy is None
    else:
        assert lazy is not None
        assert sum(lazy) == layers
        assert max(stage_s(s, n) for s, n in enumerate(lazy)) == exact.slowest
