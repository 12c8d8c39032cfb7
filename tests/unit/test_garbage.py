"""How often Python looks for cycles while memo works."""

import gc

import pytest

from memo_compile.garbage import ENOUGH, seldom_collected


@pytest.mark.parametrize(("before", "inside"), [(700, ENOUGH), (0, 0), (2 * ENOUGH, 2 * ENOUGH)])
def test_the_users_threshold_comes_back_and_a_higher_one_stays(before: int, inside: int) -> None:
    known = gc.get_threshold()
    gc.set_threshold(before, *known[1:])
    try:
        first, second = seldom_collected(), seldom_collected(ENOUGH // 2)
        first.__enter__()
        second.__enter__()
        assert gc.get_threshold() == (inside, *known[1:])
        first.__exit__(None, None, None)  # threads leave in any order
        second.__exit__(None, None, None)
        assert gc.get_threshold() == (before, *known[1:])
    finally:
        gc.set_threshold(*known)
