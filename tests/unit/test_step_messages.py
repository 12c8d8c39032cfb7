"""What refusals advise."""

import pytest

from memo_compile.driver.step_messages import no_room


@pytest.mark.parametrize("keeps_outputs", [False, True])
def test_results_that_are_held_may_be_planned_once(keeps_outputs):
    """A step that was planned with its results is not told to plan with them."""
    nothing = {"second_gradients": 0, "staying": 0, "copied": 0}
    words = no_room(3 * 2**20, 2**20, held=2**20, keeps_outputs=keeps_outputs, **nothing)
    assert "1.00 MiB: results of forwards that are held" in words
    assert "let go of them; or raise memory_budget" in words
    assert ("outputs='held'" in words) is not keeps_outputs
