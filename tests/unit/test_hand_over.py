"""When gradients may leave a step, and that the checker counts them by its own reading."""

from dataclasses import replace

import pytest

from memo_compile.check.check_plan import check
from memo_compile.planners.place_step import placed_step
from memo_compile.step.hand_over import leaving_after, ready_after
from memo_compile.step.ordinary import ordinary_events
from memo_compile.step.problem import (
    Half,
    Phase,
    Problem,
    RegionOutput,
    RegionProfile,
    StepCall,
    Storage,
    running_sums,
)

EXTERNAL = RegionOutput(storage=Storage.EXTERNAL, size_bytes=512)
SAME = RegionOutput(storage=Storage.INPUT, index=0)


def region(name, num_inputs, outputs):
    return RegionProfile(
        name=name,
        num_lines=1,
        buffers=(),
        input_ends=(1,) * num_inputs,
        outputs=outputs,
    )


def call(name, region_name, inputs, outputs, phase=Phase.BACKWARD):
    return StepCall(name=name, region=region_name, phase=phase, inputs=inputs, outputs=outputs)


def problem(*backward, results, leaving=()):
    """Two weights ``v`` and ``w``; the forward makes a loss, ``backward`` what is given."""
    regions = (
        region("loss", 2, (EXTERNAL,)),
        region("make", 1, (EXTERNAL,)),
        region("add", 2, (SAME,)),
        region("read", 1, ()),
    )
    return Problem(
        regions={made.name: made for made in regions},
        calls=(call("f", "loss", ("v", "w"), ("loss",), Phase.FORWARD), *backward),
        inputs=("v", "w", "v", "w", "g"),
        halves=(
            Half(
                phase=Phase.FORWARD,
                constants=(),
                arguments=("v", "w"),
                results=("loss",),
                handle="handle",
                layouts=(None, None),
            ),
            Half(
                phase=Phase.BACKWARD,
                constants=(),
                arguments=("handle", "v", "w", "g"),
                results=results,
                handle="handle",
                layouts=(None,) * 4,
            ),
        ),
        leaving=leaving,
        tangents={"g": 0},
    )


MAKE_W = call("b1", "make", ("g",), ("dw",))
MAKE_V = call("b2", "make", ("g",), ("dv",))


def peaks(step):
    """The largest sum of ordinary memory, as planners count it, and as the checker needs it."""
    most = max(running_sums(ordinary_events(step)).values())
    plan = placed_step(step, name="step")
    assert check(step, plan).ok
    lowest = plan.peak_bytes
    while check(step, replace(plan, peak_bytes=lowest - 1)).ok:
        lowest -= 1
    return most, lowest


def test_a_gradient_leaves_after_the_call_that_makes_it():
    step = problem(MAKE_W, MAKE_V, results=("dv", "dw"), leaving=("dv", "dw"))
    assert ready_after(step) == (2, 1)
    assert leaving_after(step) == {"dv": 2, "dw": 1}
    assert peaks(step) == (512, 512)
    assert peaks(replace(step, leaving=())) == (1024, 1024)


def test_a_gradient_waits_for_the_last_read_of_its_parameter():
    """A hook may change the weight, which a later call would read changed."""
    read = call("b3", "read", ("w",), ())
    step = problem(MAKE_W, MAKE_V, read, results=("dv", "dw"), leaving=("dv", "dw"))
    assert ready_after(step) == (2, 3)
    assert peaks(step) == (1024, 1024)


def test_a_gradient_waits_for_what_is_added_in_place():
    add = call("b3", "add", ("dw", "g"), ("sum",))
    step = problem(MAKE_W, MAKE_V, add, results=("dv", "sum"), leaving=("dv", "sum"))
    assert ready_after(step) == (2, 3)
    assert leaving_after(step) == {"dv": 2, "dw": 3}
    assert peaks(step) == (1024, 1024)


def test_one_gradient_of_two_parameters_leaves_when_both_may():
    read = call("b2", "read", ("v",), ())
    step = problem(MAKE_W, read, results=("dw", "dw"), leaving=("dw",))
    assert ready_after(step) == (2, 2)


def test_memory_that_holds_another_result_stays():
    """``view`` lies where ``dw`` does, and does not leave."""
    view = call("b2", "add", ("dw", "g"), ("view",))
    step = problem(MAKE_W, view, results=("view", "dw"), leaving=("dw",))
    assert leaving_after(step) == {}
    assert peaks(step) == (512, 512)


@pytest.mark.parametrize("results", [("dw",), ("dw", None, None)])
def test_results_that_belong_to_no_arguments_do_not_leave(results):
    assert ready_after(problem(MAKE_W, results=results)) is None
