"""Tandem repeats against brute force."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memo_compile.analysis.repeats import token_runs

words = st.lists(st.integers(0, 2), max_size=24)


@settings(deadline=None, max_examples=150)
@given(words)
def test_runs_are_exactly_the_maximal_repeats(word):
    expected = set()
    for period in range(2, len(word) // 2 + 1):
        for start in range(len(word) - period):
            end = start + period
            while end < len(word) and word[end] == word[end - period]:
                end += 1
            extends_left = start > 0 and word[start - 1] == word[start - 1 + period]
            if end - start >= 2 * period and not extends_left:
                expected.add((start, end, period))
    runs = token_runs(np.array(word, dtype=np.int64))
    assert {(run.start, run.end, run.period) for run in runs} == expected
    assert len(runs) == len(expected)


@settings(deadline=None, max_examples=100)
@given(words, st.integers(0, 100))
def test_offset_only_shifts(word, offset):
    tokens = np.array(word, dtype=np.int64)
    shifted = {(run.start - offset, run.end - offset) for run in token_runs(tokens, offset)}
    assert shifted == {(run.start, run.end) for run in token_runs(tokens)}
