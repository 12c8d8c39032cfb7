"""The report: when memo counts as active, and what the table shows."""

import dataclasses
import json

import pytest

import memo_compile
from memo_compile.reporting import state
from memo_compile.step.plans import Decision, Observed, ReportedGroup, ReportedPlan
from memo_compile.step.problem import LayerClassInfo
from tests.steps.small import planned, two_layers

pytestmark = pytest.mark.usefixtures("fresh_report")


@pytest.fixture
def plan():
    decision = Decision(
        tensor="mm_3 [2, 8]",
        layer_class="model.layers",
        bytes=4096,
        decision="SAVE",
        token_fraction=1.0,
        reason="read by the layer's backward",
        source="/home/user/project/model.py:88",
    )
    layers = LayerClassInfo(num_layers=2, module_path="model.layers", period=1, num_regions=2)
    made = dataclasses.replace(
        planned(two_layers()), name="graph3", decisions=(decision,), layer_classes=(layers,)
    )
    return ReportedPlan.of(made, Observed(planning_s=0.25, lowering_s=1.5))


def test_nothing_compiled_is_not_active():
    assert not memo_compile.report().active
    assert "memo is NOT active: 0 plan(s)" in str(memo_compile.report())


def test_a_plan_makes_it_active_and_a_failure_ends_that(plan):
    state.add_plan(plan)
    assert memo_compile.report().active
    state.mark_failed("graph4 has no plan")
    report = memo_compile.report()
    assert not report.active
    assert report.notes == ("graph4 has no plan",)
    state.add_plan(plan)
    assert not memo_compile.report().active  # graph4 still runs without one


def test_a_refused_graph_counts_until_its_next_try(plan):
    state.add_plan(plan)
    state.add_note("of the graph that has a plan")
    before = state.current_notes()
    state.add_note("of the refused graph")
    state.add_note("of the refused graph, and of its next try")
    state.mark_refused("budget < floor", before)
    assert not memo_compile.report().active
    assert "budget < floor" in memo_compile.report().notes
    state.add_note("of the refused graph, and of its next try")
    state.add_plan(plan)
    report = memo_compile.report()
    assert report.active
    assert report.notes == (
        "of the graph that has a plan",
        "of the refused graph, and of its next try",
    )


def test_a_graph_that_is_refused_twice_leaves_no_note(plan):
    for _ in range(2):
        state.mark_refused("budget < floor", state.current_notes())
    state.add_plan(plan)
    assert memo_compile.report().notes == ()


def test_a_plan_whose_model_is_gone_leaves_with_the_next_plan(plan):
    state.add_plan(plan)
    state.plan_is_gone(plan)
    assert memo_compile.report().plans == (plan,)  # printed after the training is over
    other = dataclasses.replace(plan, name="graph4")
    state.add_plan(other)
    state.add_plan(plan)
    assert memo_compile.report().plans == (other, plan)


def test_the_collector_may_find_a_model_gone_during_a_report(plan):
    state.add_plan(plan)
    with state._state.lock:
        state.plan_is_gone(plan)


def test_notes_are_kept_once_in_order():
    assert state.add_note("b")
    assert state.add_note("a")
    assert not state.add_note("b")
    assert memo_compile.report().notes == ("b", "a")


def test_a_report_is_a_picture_of_one_moment(plan):
    before = memo_compile.report()
    state.add_plan(plan)
    state.count_unplanned()
    assert before.plans == ()
    assert before.unplanned_steps == 0
    assert memo_compile.report().unplanned_steps == 1


def test_the_text_says_what_goes_where_in_a_few_lines(plan):
    state.add_plan(plan)
    state.add_note("left out: " + "nothing at all " * 20)
    lines = str(memo_compile.report()).splitlines()
    assert lines[:2] == [
        "memo is active: 1 plan(s), 0 step(s) ran without one",
        "plan graph3: peak 18.00 KiB, no budget, policy save",
    ]
    assert "  model.layers 0-1: mm_3 kept, 4.00 KiB a layer" in lines
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 12


def test_the_table_names_what_a_user_asks_for(plan):
    state.add_plan(plan)
    state.add_note("left out: nothing")
    text = memo_compile.report().text(verbose=True)
    assert max(len(line) for line in text.splitlines()) <= 110
    for part in ("plan graph3", "15.00 KiB", "1.0000 x", "model.layers, period 1", "mm_3", "SAVE"):
        assert part in text
    assert "project/model.py:88" in text.replace("\n", "")
    assert "note: left out: nothing" in text


def test_the_dictionary_is_json(plan):
    state.add_plan(plan)
    content = json.loads(json.dumps(memo_compile.report().as_dict()))
    (found,) = content["plans"]
    assert content["active"] is True
    assert found["arena_bytes"] == found["lower_bound_bytes"] == 15 * 1024
    assert found["outside_bytes"] == 0
    assert found["layer_classes"] == [
        {"num_layers": 2, "module_path": "model.layers", "period": 1, "num_regions": 2}
    ]
    assert found["decisions"][0]["decision"] == "SAVE"


@pytest.mark.parametrize("verbose", [False, True])
def test_a_group_stands_in_place_of_the_plans_of_its_blocks(plan, verbose):
    """Steps run by the group's plan: that of one block, which has no budget, misleads."""
    made = dataclasses.replace(
        planned(two_layers()), budget_bytes=25 * 2**20, layer_classes=plan.layer_classes
    )
    group = ReportedGroup.of_group(
        made, Observed(), num_instances=6, between_bytes=0, graphs=(plan.name,)
    )
    state.add_plan(plan)
    state.replace_group(None, group)
    text = memo_compile.report().text(verbose=verbose)
    assert "1 group(s)" in text
    assert "group of 6 x model.layers" in text
    assert "25.00 MiB" in text
    assert "no budget" not in text
    assert plan.name not in text
    state.plan_is_gone(plan)
    state.add_plan(dataclasses.replace(plan, name="graph4"))  # compiled anew, in other tiles
    assert "no budget" in memo_compile.report().text(verbose=verbose)
    assert memo_compile.report().groups == ()
