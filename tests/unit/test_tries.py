"""The tilings in which a graph is tried: their order, what leads on, which error counts."""

import gc
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memo_runtime.arena import ArenaError
from torch import fx

import memo_compile
from memo_compile.config import MemoConfig, Try
from memo_compile.driver import tile_order, tries
from memo_compile.driver.facts import GraphFacts
from memo_compile.driver.pipeline import fastest
from memo_compile.driver.step_planner import require_fast
from memo_compile.driver.tile_order import TOKEN_TILES, Tiles
from memo_compile.driver.tries import first_that_fits
from memo_compile.errors import ConfigError, Infeasible, InvalidPlan, TooSlow, UnsupportedGraph
from memo_compile.step.plans import Timeline
from memo_compile.torch_private import dynamo
from tests.steps.bugs import plan_of
from tests.steps.moved import SHAPES

pytestmark = pytest.mark.usefixtures("fresh_report")


def graph() -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: x.sin())


def tried(*failures, order=(1, TOKEN_TILES), monkeypatch=None, **options):
    """(what comes out, the numbers of tiles tried) when the first attempts raise ``failures``."""
    if monkeypatch is not None:
        monkeypatch.setattr(tries, "tile_order", lambda *_: tuple(map(Tiles, order)))
    seen = []

    def attempt(gm, config):
        seen.append(config.token_tiles)
        if len(seen) <= len(failures):
            raise failures[len(seen) - 1]
        return "planned"

    settings = {"memory_budget": 2**30, **options}
    try:
        found = first_that_fits(
            graph(), GraphFacts([torch.ones(4)]), MemoConfig(**settings), attempt
        )
    except Exception as error:
        found = error
    return found, seen


def floor(floor_bytes):
    return Infeasible(f"floor {floor_bytes}", floor_bytes=floor_bytes)


def test_a_graph_that_fits_is_tried_once():
    assert tried() == ("planned", [1])


class Output:
    """What a caller of the compiled model holds."""


def test_a_try_that_failed_keeps_nothing_of_its_callers_alive(monkeypatch):
    """Results of the first forward go when the user lets them go, not when the collector runs."""

    def attempt(gm, config):
        if config.token_tiles == 1:
            raise floor(5)

    def first_step():
        output = Output()
        config = MemoConfig(memory_budget=2**30)
        first_that_fits(graph(), GraphFacts([torch.ones(4)]), config, attempt)
        return weakref.ref(output)

    monkeypatch.setattr(tries, "tile_order", lambda *_: (Tiles(1), Tiles(TOKEN_TILES)))
    gc.disable()
    try:
        assert first_step()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("options", "tiles"), [({"token_tiles": 4}, 4), ({"exact": True}, 1)])
def test_a_number_that_the_user_gave_is_the_only_one(options, tiles):
    error = floor(5)
    assert tried(error, **options) == (error, [tiles])


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (floor(5), {}),
        (ArenaError("refused"), {}),
        (ArenaError("refused"), {"memory_budget": None}),
    ],
    ids=["budget", "device and budget", "device"],
)
def test_what_does_not_fit_whole_is_tried_in_tiles(error, options):
    assert tried(error, **options) == ("planned", [1, TOKEN_TILES])


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (floor(5), {"memory_budget": None}),
        (UnsupportedGraph("no"), {}),
        (InvalidPlan("no"), {}),
        (KeyError("no"), {}),
        (ConfigError("no"), {}),
        (torch.OutOfMemoryError("no"), {}),
    ],
    ids=["no budget", "unsupported", "invalid", "bug", "option", "torch out of memory"],
)
def test_what_tiles_do_not_mend_is_raised(error, options):
    assert tried(error, **options) == (error, [1])
    assert memo_compile.report().notes == ()


@pytest.mark.parametrize("error", [floor(5), UnsupportedGraph("no"), KeyError("no")], ids=repr)
def test_tiles_that_fail_first_lead_to_the_whole(monkeypatch, error):
    found, seen = tried(error, order=(TOKEN_TILES, 1), monkeypatch=monkeypatch)
    assert (found, seen) == ("planned", [TOKEN_TILES, 1])
    notes = [note for note in memo_compile.report().notes if f"{TOKEN_TILES} tiles" in note]
    assert bool(notes) == isinstance(error, KeyError)


@pytest.mark.parametrize("error", [ConfigError("no"), dynamo.RestartAnalysis("again")], ids=repr)
def test_what_no_tiles_mend_is_raised_from_the_first_tiles(monkeypatch, error):
    found, seen = tried(error, order=(TOKEN_TILES, 1), monkeypatch=monkeypatch)
    assert (found, seen) == (error, [TOKEN_TILES])
    assert memo_compile.report().notes == ()


@pytest.mark.parametrize("error", [UnsupportedGraph("no"), KeyError("no")], ids=repr)
def test_tiles_that_fail_without_a_budget_lead_to_the_whole(monkeypatch, error):
    options = {"order": (TOKEN_TILES, 1), "monkeypatch": monkeypatch, "memory_budget": None}
    assert tried(error, **options) == ("planned", [TOKEN_TILES, 1])


LOW, HIGH, UNKNOWN = floor(4), floor(9), floor(None)
UNFIT, BUG, REFUSED = UnsupportedGraph("no"), KeyError("no"), ArenaError("refused")


@pytest.mark.parametrize(
    ("first", "second", "raised"),
    [
        (HIGH, LOW, LOW),
        (LOW, HIGH, LOW),
        (UNKNOWN, HIGH, HIGH),
        (HIGH, UNKNOWN, HIGH),
        (HIGH, UNFIT, HIGH),
        (HIGH, BUG, HIGH),
        (HIGH, REFUSED, REFUSED),
        (REFUSED, HIGH, HIGH),
        (REFUSED, UNFIT, REFUSED),
    ],
    ids=lambda error: f"{type(error).__name__} {error}",
)
def test_of_two_failures_the_one_that_tells_most_is_raised(first, second, raised):
    found, seen = tried(first, second)
    assert found is raised
    assert seen == [1, TOKEN_TILES]
    assert bool(memo_compile.report().notes) == (second is BUG)


def with_logits(
    tokens: int, hidden: int, vocabulary: int, operator: Any = torch.mm
) -> tuple[fx.GraphModule, GraphFacts]:
    """A loss head that keeps nothing small, and what it is given."""
    gm = fx.symbolic_trace(lambda x, weight: operator(x, weight))
    product = next(iter(gm.graph.find_nodes(op="call_function", target=operator)))
    product.meta["example_value"] = torch.empty(tokens, vocabulary, device="meta")
    weight = torch.nn.Parameter(torch.empty(hidden, vocabulary))
    return gm, GraphFacts([torch.empty(tokens, hidden), weight])


@pytest.mark.parametrize("operator", [torch.mm, torch.ops.aten.mm.default])
def test_where_logits_alone_break_the_budget_only_what_does_so_runs_in_tiles(operator):
    """Also in the stage of a pipeline, which torch has exported."""
    gm, facts = with_logits(tokens=4096, hidden=16, vocabulary=1024, operator=operator)
    logits, least = 4096 * 1024 * 4, facts.constant_bytes(0)
    room = int(1.5 * logits)
    budget = int((least + room) / (1 - tile_order.LAYERS_SHARE)) + 1
    config = MemoConfig(memory_budget=budget, optimizer_state_bytes_per_parameter=0)
    first, *others = tries.tile_order(gm, facts, config, None)
    assert first.number == tile_order.HEAD_TILES
    assert 0 <= first.above_bytes - room <= 2
    assert first.max_over_compute == tile_order.FAST * tile_order.COMPILING
    assert first.drop_above_bytes == first.above_bytes
    in_all = first._replace(
        number=TOKEN_TILES,
        above_bytes=0,
        max_over_compute=tile_order.FAST_IN_ALL * tile_order.COMPILING,
    )
    assert others == [in_all, Tiles(TOKEN_TILES), Tiles(1)]
    assert str(first).startswith("16 tiles of tokens, where more than 24.00 MiB")


ORDER = (Tiles(8, 5, 5, 1.05), Tiles(8, 3, 5, 1.05), Tiles(8), Tiles(1))


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        ({5: 1.2, 3: 1.1, 0: None}, [5, 3, 0, 3]),
        ({5: 1.1, 3: 1.2, 0: 1.3}, [5, 3, 0, 5]),
        ({5: 1.2, 3: 1.0}, [5, 3]),
        ({5: 1.2, 3: None, 0: 1.1}, [5, 3, 0]),
        ({5: None, 3: None, 0: None, -1: 2.0}, [5, 3, 0, -1]),
    ],
    ids=["second", "first", "fast", "last", "whole"],
)
def test_of_slow_plans_the_fastest_is_taken(monkeypatch, seconds, taken):
    seen = []

    def attempt(gm, config):
        above = config.attempt.tile_above_bytes if config.token_tiles == 8 else -1
        seen.append(above)
        step_s = seconds[above]
        if step_s is None:
            raise floor(9)
        if step_s > config.attempt.max_over_compute or step_s >= config.attempt.max_step_s:
            raise TooSlow("a plan that fits", step_s=step_s)
        return above

    monkeypatch.setattr(tries, "tile_order", lambda *_: ORDER)
    config = MemoConfig(memory_budget=2**30)
    assert first_that_fits(graph(), GraphFacts([torch.ones(4)]), config, attempt) == taken[-1]
    assert seen == taken
    assert memo_compile.report().notes == ()


@pytest.mark.parametrize(
    ("plans", "taken", "tried"),
    [
        # above_bytes: bound, seconds of its plan (None: nothing fits)
        ({5: (1.1, 1.2), 3: (1.0, 1.0)}, 3, 2),
        ({5: (1.1, 1.2), 3: (1.3, 1.3), 0: (1.2, 1.4)}, 5, 4),
        ({5: (1.1, 1.2), 3: (1.06, 1.07), 0: (1.3, 1.3)}, 3, 4),
        ({5: (1.1, 1.2), 3: (1.06, 1.15), 0: (1.3, 1.3)}, 3, 6),
        ({5: (1.1, 1.2), 3: (1.3, 1.3), 0: (1.0, 1.05)}, 0, 4),
        ({5: (1.1, None), 3: (1.0, None), 0: (1.2, 1.4)}, 0, 5),
    ],
    ids=["fast", "bound", "bounds", "both", "everywhere", "misfit"],
)
def test_tiles_that_are_only_bounded_are_planned_where_they_may_be_fastest(
    monkeypatch, plans, taken, tried
):
    seen = []

    def attempt(gm, config):
        above = config.attempt.tile_above_bytes if config.token_tiles == 8 else -1
        seen.append(above)
        bound, step_s = plans[above]
        over = config.attempt.max_over_compute
        if bound > min(over or math.inf, config.attempt.max_step_s):
            raise TooSlow("no plan can", step_s=bound, is_bound=True)
        if step_s is None:
            raise floor(9)
        if step_s > max(over, config.attempt.enough_s) or step_s >= config.attempt.max_step_s:
            raise TooSlow("a plan that fits", step_s=step_s)
        return above

    monkeypatch.setattr(tries, "tile_order", lambda *_: ORDER)
    config = MemoConfig(memory_budget=2**30)
    assert first_that_fits(graph(), GraphFacts([torch.ones(4)]), config, attempt) == taken
    assert len(seen) == tried


@pytest.mark.parametrize(
    ("steps", "planned"),
    [
        # above_bytes: bound, seconds of greedy's plan; which are planned, the last one is taken
        ({5: (1.1, 1.4), 3: (1.2, 1.2), 0: (1.5, 1.5)}, [3]),
        ({5: (1.1, 1.4), 3: (1.2, 1.3), 0: (1.25, 1.5)}, [3]),
        ({5: (1.1, 1.15), 3: (1.2, 1.2), 0: (1.3, 1.3)}, [5]),
        ({5: (1.1, 1.3), 3: (1.2, 1.3), 0: (1.3, 1.3)}, [3]),
    ],
    ids=["one is as fast as its bound", "none is", "the first is fast", "all are the same"],
)
def test_tiles_are_planned_in_the_order_of_what_greedy_finds(monkeypatch, steps, planned):
    """Placing, and solving the program, take longest: greedy's seconds put tiles behind others."""
    made = []

    def attempt(gm, config):
        above = config.attempt.tile_above_bytes if config.token_tiles == 8 else -1
        bound, greedy_s = steps[above]
        if bound > min(config.attempt.max_over_compute or math.inf, config.attempt.max_step_s):
            raise TooSlow("no plan can", step_s=bound, is_bound=True)
        if greedy_s > min(config.attempt.enough_s or math.inf, config.attempt.max_step_s):
            raise TooSlow("no plan is fast enough", step_s=greedy_s, is_bound=True)
        made.append(above)
        return above

    monkeypatch.setattr(tries, "tile_order", lambda *_: ORDER)
    config = MemoConfig(memory_budget=2**30)
    assert first_that_fits(graph(), GraphFacts([torch.ones(4)]), config, attempt) == planned[-1]
    assert made == planned


def test_a_plan_is_fast_near_its_computation_and_where_no_other_was_faster():
    known: Any = SimpleNamespace(whole_compute_s=lambda: 2.0)
    timeline = Timeline(step_s=3.0, stall_s=0.0)
    plan = replace(plan_of(next(iter(SHAPES))), timeline=timeline, compute_s=2.0)
    require_fast(plan, MemoConfig(attempt=Try(max_over_compute=1.5, max_step_s=3.1)), known)
    kept = replace(plan, timeline=None)
    require_fast(kept, MemoConfig(attempt=Try(max_over_compute=1.06, max_step_s=2.1)), known)
    with pytest.raises(TooSlow, match="others are faster"):  # though it keeps everything
        require_fast(kept, MemoConfig(attempt=Try(max_step_s=1.9)), known)
    with pytest.raises(TooSlow, match=r"1\.500 x the computation"):
        require_fast(plan, MemoConfig(attempt=Try(max_over_compute=1.06)), known)
    with pytest.raises(TooSlow, match="others are faster") as caught:
        require_fast(plan, MemoConfig(attempt=Try(max_step_s=3.0)), known)
    assert caught.value.step_s == 3.0


@pytest.mark.parametrize("budget", [None, 2**34])
def test_wide_logits_run_in_tiles_without_a_budget_and_are_saved_if_the_backward_reads_them(budget):
    gm, facts = with_logits(tokens=8192, hidden=16, vocabulary=16384)
    logits = 8192 * 16384 * 4
    config = MemoConfig(memory_budget=budget)
    first, *others = tries.tile_order(gm, facts, config, None)
    assert {Tiles(1), Tiles(TOKEN_TILES)} <= {*others}
    assert (first.number, first.above_bytes) == (TOKEN_TILES, logits)
    assert first.drop_above_bytes > 2**60


def test_very_wide_logits_run_in_the_same_tiles_whether_they_fit_or_not(monkeypatch):
    gm, facts = with_logits(tokens=8192, hidden=16, vocabulary=16384)
    logits = 8192 * 16384 * 4
    monkeypatch.setattr(tile_order, "MANY_BYTES", logits)
    (fits, *_), (breaks, *_) = (
        tries.tile_order(gm, facts, MemoConfig(memory_budget=budget), None)
        for budget in (2**34, facts.constant_bytes() + logits)
    )
    assert fits.number == breaks.number == tile_order.HEAD_TILES
    assert fits.above_bytes == logits > breaks.above_bytes > 16 * 8192 * 4


@pytest.mark.parametrize("costs", ["roofline", "measured"])
def test_where_logits_just_fit_the_whole_is_taken_only_if_it_is_fast(costs):
    gm, facts = with_logits(tokens=4096, hidden=16, vocabulary=1024)
    room = int(2.5 * 4096 * 1024 * 4)
    budget = int((facts.constant_bytes(0) + room) / (1 - tile_order.LAYERS_SHARE)) + 1
    config = MemoConfig(memory_budget=budget, costs=costs, optimizer_state_bytes_per_parameter=0)
    first, *others = tries.tile_order(gm, facts, config, None)
    if costs == "measured":
        assert (first, *others) == (Tiles(1), Tiles(TOKEN_TILES))
        return
    assert first == Tiles(1, max_over_compute=tile_order.FAST)
    assert [tiles.number for tiles in others] == [tile_order.HEAD_TILES, TOKEN_TILES, TOKEN_TILES]
    assert others[-1] == Tiles(TOKEN_TILES)


def test_where_logits_fit_the_whole_comes_first():
    gm, facts = with_logits(tokens=64, hidden=16, vocabulary=64)
    config = MemoConfig(memory_budget=2**30)
    assert tries.tile_order(gm, facts, config, None) == (Tiles(1), Tiles(TOKEN_TILES))


def test_a_slow_whole_leads_to_tiles_and_is_taken_where_they_are_slower(monkeypatch):
    order = (Tiles(1, max_over_compute=1.05), Tiles(8, 3, 3, 1.05), Tiles(8))
    monkeypatch.setattr(tries, "tile_order", lambda *_: order)

    def fastest(seconds):
        def attempt(gm, config):
            step_s = seconds[config.token_tiles]
            if step_s > config.attempt.max_over_compute or step_s >= config.attempt.max_step_s:
                raise TooSlow("a plan that fits", step_s=step_s)
            return config.token_tiles

        config = MemoConfig(memory_budget=2**30)
        return first_that_fits(graph(), GraphFacts([torch.ones(4)]), config, attempt)

    assert fastest({1: 1.2, 8: 1.1}) == 8
    assert fastest({1: 1.2, 8: 1.3}) == 1
    assert fastest({1: 1.02, 8: 1.01}) == 1


@pytest.mark.parametrize("wrong", [0, 1])
def test_of_two_ways_to_gather_weights_the_one_that_the_checker_accepts_is_taken(wrong):
    again = SimpleNamespace(name="step", gathering_again=lambda: None)
    lowered = SimpleNamespace(again=again)
    steps = [SimpleNamespace(name="step", gathering_again=lambda: again, lowered=lowered), again]
    plan = SimpleNamespace(plan=SimpleNamespace(step_s=1.0))

    def planned(step):
        if step is steps[wrong]:
            raise InvalidPlan("refused by the test")
        return plan, None

    assert fastest(steps[0], planned) == (steps[1 - wrong], (plan, None))
    (note,) = memo_compile.report().notes
    assert "is left out: InvalidPlan: refused by the test" in note


def test_a_plan_that_nobody_simulated_takes_as_long_as_its_computation():
    """It keeps everything and has no timeline: that is no step of 0 s."""
    again = SimpleNamespace(name="step", gathering_again=lambda: None, compute_s=lambda: 3.0)
    lowered = SimpleNamespace(again=again)
    step = SimpleNamespace(gathering_again=lambda: again, lowered=lowered, compute_s=lambda: 2.0)
    for seconds, taken in ((1.0, again), (2.5, step)):
        plans = {
            id(step): SimpleNamespace(plan=SimpleNamespace(step_s=None, compute_s=None)),
            id(again): SimpleNamespace(plan=SimpleNamespace(step_s=seconds, compute_s=9.0)),
        }
        found, _ = fastest(step, lambda known, plans=plans: (plans[id(known)], None))
        assert found is taken
