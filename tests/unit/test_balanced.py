"""The frontier of bytes kept against seconds recomputed."""

import itertools

import pytest

from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import find_model
from memo_compile.errors import InputError
from memo_compile.papers.kwai.balanced import layer_frontier
from memo_compile.papers.layer_costs import Efficiency

KWAI = Efficiency(gemm=0.6, hbm=0.8)
BALANCED = ("n1", "n2", "silu", "product")


def frontier(name, seq=4096):
    return layer_frontier(find_model(name), seq, find_hardware("h800"), KWAI)


@pytest.mark.parametrize("name", ["llama-7b", "llama-65b", "llama2-70b", "llama-175b"])
@pytest.mark.parametrize("seq", [4096, 32768])
def test_balanced_set_is_on_the_frontier(name, seq):
    assert BALANCED in [point.recomputed for point in frontier(name, seq)]


def test_balanced_is_the_smallest_within_one_and_a_half_percent():
    points = frontier("llama-175b")
    small = min(
        (p for p in points if p.extra_time_fraction <= 0.015),
        key=lambda p: p.bytes_per_token_hidden,
    )
    assert small.recomputed == BALANCED
    assert small.bytes_per_token_hidden == pytest.approx(22.667, abs=1e-3)
    assert points[-1].bytes_per_token_hidden == pytest.approx(37.333, abs=1e-3)


def test_ends_of_the_frontier():
    points = frontier("llama-65b")
    assert points[0].bytes_per_token_hidden == 2.0
    assert points[0].recomputed[0] == "n1"
    assert (points[-1].extra_time_fraction, points[-1].recomputed) == (0.0, ())
    assert points[-1].bytes_per_token_hidden == 37.5


def test_ascending_in_bytes_descending_in_time():
    for name in ("llama-175b", "llama3-8b", "gpt-7b"):
        points = frontier(name)
        pairs = list(itertools.pairwise(points))
        assert all(a.bytes_per_token_hidden < b.bytes_per_token_hidden for a, b in pairs)
        assert all(a.extra_time_fraction > b.extra_time_fraction for a, b in pairs)


def test_refusals():
    with pytest.raises(InputError, match="gemm-efficiency: expected a share"):
        Efficiency(gemm=1.2, hbm=0.8)
