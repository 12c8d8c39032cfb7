"""What the pictures are drawn from: roles and names of buffers, memory, merging under a pixel."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memo_compile.errors import InputError
from memo_compile.planners.place_step import place_step
from memo_compile.reporting.svg import Shape, merge_small, nice_ticks
from memo_compile.reporting.view import Role, view_step
from memo_compile.step.plans import Decision
from memo_compile.step.problem import arena_buffers
from memo_compile.step.residency import MAX_HEAP_SLACK_BYTES
from tests.steps.pictures import ATTN, MIB, layered, layered_problem
from tests.steps.small import KIB, planned, two_layers


def test_roles_names_reasons_and_sources_of_moved_tensors():
    view = view_step(*layered(6))
    boxes = {box.id: box for box in view.boxes}
    roles = {
        name: boxes[name].role for name in ("fwd@0/attn", "fwd@0/up", "fwd@0/mlp", "fwd@5/attn")
    }
    assert roles == {
        "fwd@0/attn": Role.OFFLOADED,
        "fwd@0/up": Role.SAVED,
        "fwd@0/mlp": Role.SCRATCH,
        "fwd@5/attn": Role.SAVED,
    }
    back, recomputed = boxes["h2d@2/data"], boxes["recompute@2/mlp"]
    assert (back.role, back.name) == (Role.RELOADED, "attn.2")
    assert back.reason == "12 ms of copy hide behind 31 ms of compute"
    assert (recomputed.role, recomputed.name) == (Role.RECOMPUTED, "mlp.2")
    assert recomputed.reason == "recompute costs 4.0 ms, frees 48 MiB"
    assert boxes["fwd@0/attn"].source == "train/model.py:76"
    assert "aten.scaled_dot_product_attention" in boxes["fwd@0/attn"].about


def test_decisions_of_a_range_of_layers_hold_there_only():
    problem, plan = layered(6)
    halves = tuple(
        Decision(
            tensor="up.0 [1]",
            layer_class=f"model.layers [{first}:{last}]",
            bytes=1,
            decision="SAVE",
            token_fraction=1.0,
            reason=f"from {first}",
            source=None,
        )
        for first, last in ((0, 4), (4, 6))
    )
    view = view_step(problem, dataclasses.replace(plan, decisions=halves))
    reasons = {box.id: box.reason for box in view.boxes if box.id.endswith("/up")}
    assert reasons["fwd@3/up"] == "from 0"
    assert reasons["fwd@4/up"] == "from 4"


def test_the_memory_curve_peaks_at_the_plans_peak():
    for problem, plan in (layered(6), (two_layers(), planned(two_layers()))):
        view = view_step(problem, plan)
        assert view.peak.held_bytes == plan.peak_bytes
        assert max(moment.live_bytes for moment in view.moments) == plan.lower_bound_bytes
        columns = view.columns(50)
        assert max(column.held_bytes for column in columns) == plan.peak_bytes
        assert len(columns) <= 50


def test_the_curve_falls_where_pages_are_given_back():
    problem = layered_problem(6)
    plan = place_step(dataclasses.replace(problem, releases_pages=True), solver="greedy")
    view = view_step(problem, plan)
    assert 0 <= plan.peak_bytes - view.peak.held_bytes <= MAX_HEAP_SLACK_BYTES
    assert plan.peak_bytes < planned(problem).peak_bytes


def test_a_plan_of_another_step_is_refused():
    problem, plan = layered(4)
    with pytest.raises(InputError, match=r"no offset for buffer .*the problem is another step's"):
        view_step(layered(6)[0], plan)
    cut = dataclasses.replace(plan, resident_bytes=plan.resident_bytes[:-1])
    with pytest.raises(InputError, match=r"resident sizes for \d+ calls"):
        view_step(problem, cut)


def shape(x, y, width, height, css="a", tip=("one", "where")):
    return Shape(x=x, y=y, width=width, height=height, css=css, tip=tip)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 990), st.floats(0, 390), st.floats(0.01, 9), st.floats(0.01, 9)),
        max_size=40,
    )
)
def test_merging_keeps_every_shape_covered_to_a_pixel(sides):
    shapes = [shape(*side) for side in sides]
    merged = merge_small(shapes, noun="shapes")
    assert sum(shape.count for shape in merged) == len(shapes)
    for drawn in shapes:
        assert any(
            other.x - 1 <= drawn.x
            and drawn.right <= other.right + 1
            and other.y - 1 <= drawn.y
            and drawn.bottom <= other.bottom + 1
            for other in merged
        )


@pytest.mark.parametrize(
    ("most", "base", "low", "ticks"),
    [
        (10, 10, 0, [0, 2, 4, 6, 8, 10]),
        (0.43, 10, 0, [0, 0.1, 0.2, 0.3, 0.4]),
        (5 * 1024**3, 2, 0, [i * 1024**3 for i in range(6)]),
        (3.6, 10, 2.4, [2.5, 3.0, 3.5]),
        (0, 10, 0, [0]),
    ],
)
def test_ticks_are_round(most, base, low, ticks):
    found = nice_ticks(most, base=base, low=low)
    assert len(found) <= 6
    assert found == pytest.approx(ticks)


def test_every_buffer_has_a_box():
    problem, plan = layered(4)
    view = view_step(problem, plan)
    assert [box.id for box in view.boxes] == [buffer.id for buffer in arena_buffers(problem)]
    assert sum(box.size_bytes for box in view.boxes if box.role is Role.RELOADED) == 2 * ATTN
    assert view.constant_bytes == 4 * 60 * MIB + 16 * MIB
    assert KIB * 1024 == MIB
