"""What the probe of slices and tiles sees, whatever the rules about operators say."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from memo_compile.analysis.regions import RegionGraph
from memo_compile.driver import probe
from memo_compile.driver.probe import Verdict, made_up_inputs, probe_rows, probe_tiling
from memo_compile.passes.tile_cut import RegionTiling
from memo_compile.passes.tiles import tilings

TOKENS, WIDTH, INNER = 8, 16, 512


def region(function: Callable[..., object], *args: torch.Tensor) -> RegionGraph:
    gm = make_fx(function, tracing_mode="fake")(*args)
    gm.graph.eliminate_dead_code()
    return RegionGraph(
        name="part",
        gm=gm,
        external_outputs=frozenset(),
        static_inputs=(),
        is_backward=False,
        device=torch.device("cpu"),
    )


def both(function: Callable[..., object], num_rows: int, *more: torch.Tensor) -> list[RegionGraph]:
    """``function`` for all rows and for half of them; only the first input has rows."""
    x = torch.randn(num_rows, WIDTH)
    return [region(function, rows, *more) for rows in (x, x[: num_rows // 2])]


def test_rows_that_are_apart_agree():
    whole, half = both(lambda x, w: ((x @ w).softmax(-1),), 4, torch.randn(WIDTH, 3))
    assert probe_rows(whole, half, num_parts=2).verdict is Verdict.AGREES


def test_what_goes_on_from_row_to_row_differs_behind_the_first_rows():
    whole, half = both(lambda x: (x.cumsum(0),), 4)
    assert probe_rows(whole, half).verdict is Verdict.AGREES
    found = probe_rows(whole, half, num_parts=2)
    assert found.verdict is Verdict.DIFFERS
    assert "result 0: 32 of 32 numbers differ" in found.reason


def test_a_scatter_of_one_row_differs():
    at, new = torch.tensor([[1, 3]]), torch.randn(1, 2)
    whole, half = both(lambda x, at, new: (x.scatter(1, at, new),), 4, at, new)
    assert probe_rows(whole, half, num_parts=2).verdict is Verdict.DIFFERS


def test_parts_that_raise_differ():
    whole, half = both(lambda x: (x.view(-1, WIDTH),), 4)
    assert probe_rows(whole, half).verdict is Verdict.AGREES
    wrong = region(lambda x: (x.view(4, WIDTH),), torch.randn(4, WIDTH))
    wrong.gm.graph.find_nodes(op="placeholder")[0].meta["val"] = half.example_inputs()[0]
    assert "raise RuntimeError" in probe_rows(whole, wrong).reason


def mlp(x, up, down):
    return (x + (x @ up).relu() @ down,)


def tiling_of(whole: RegionGraph) -> RegionTiling:
    return RegionTiling.of(whole, tilings(whole, 4)[0])


def wide() -> RegionGraph:
    shapes = [(TOKENS, WIDTH), (WIDTH, INNER), (INNER, WIDTH)]
    return region(mlp, *(torch.randn(shape) for shape in shapes))


def test_tiles_agree_with_their_region():
    assert probe_tiling(tiling_of(wide())).verdict is Verdict.AGREES


numbers = itertools.count(1)


@torch.library.custom_op("memo_tests::half_written", mutates_args=())
def half_written(x: torch.Tensor) -> torch.Tensor:
    """As attention of packed sequences: it writes no token behind the last one's end."""
    torch.full_like(x, math.nan if next(numbers) > 2 else 0.0)  # it lies there when it is freed
    out = torch.empty_like(x)
    out[: len(x) // 2] = x[: len(x) // 2]
    return out


half_written.register_fake(torch.empty_like)


def test_memory_that_a_kernel_leaves_unwritten_is_no_difference():
    def written(x, up, down):
        return (half_written(x), *mlp(half_written(x), up, down))

    args = [torch.randn(shape) for shape in [(TOKENS, WIDTH), (WIDTH, INNER), (INNER, WIDTH)]]
    whole = region(written, *args)
    assert probe_tiling(tiling_of(whole)).verdict is Verdict.AGREES
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_tile_that_reads_the_rows_of_another_differs():
    found = tiling_of(wide())
    calls = list(found.calls)
    at = next(at for at, call in enumerate(calls) if call.name.endswith("tile2"))
    before = next(call for call in calls if call.name.endswith("tile1"))
    calls[at] = replace(calls[at], reads=before.reads)
    found = replace(found, calls=tuple(calls))
    assert probe_tiling(found).verdict is Verdict.DIFFERS


def test_what_is_too_large_is_compared_for_two_rows(monkeypatch):
    found = tiling_of(wide())
    whole = 2 * TOKENS * INNER * 8
    monkeypatch.setitem(probe.MAX_BYTES, "cpu", 2 * WIDTH * INNER * 8 + whole // 2)
    chains: list[probe.Probe] = []
    of_chain = probe._probe_chain
    monkeypatch.setattr(probe, "_probe_chain", lambda it: chains.append(of_chain(it)) or chains[-1])
    assert probe_tiling(found).verdict is Verdict.AGREES
    assert [chain.verdict for chain in chains] == [Verdict.AGREES]
    monkeypatch.setitem(probe.MAX_BYTES, "cpu", 1000)
    answer = probe_tiling(found)
    assert answer.verdict is Verdict.NOT_RUN
    assert "a run takes" in answer.reason


def test_a_sum_that_cancels_is_compared_with_its_own_rounding():
    def backward(x, tangent):
        return (torch._softmax_backward_data(tangent, x.softmax(-1), -1, x.dtype).sum(-1),)

    def turned(x, tangent):
        return backward(x.flip(-1), tangent.flip(-1))

    inputs = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    whole, other = region(backward, *inputs), region(turned, *inputs)
    assert probe_rows(whole, other).verdict is Verdict.AGREES
    off = region(lambda x, tangent: (backward(x, tangent)[0] + 1e-12,), *inputs)
    assert "4 of 4 numbers differ" in probe_rows(whole, off).reason


def test_a_jump_at_a_tie_says_nothing_of_other_numbers():
    def program(x):
        return (torch.cat([(x[:1] * 3 - x[:1] - x[:1] - x[:1]).sign(), x[1:]]),)

    whole = region(program, torch.randn(3))
    off = region(lambda x: (program(x)[0] + 1e-3,), torch.randn(3))
    assert "2 of 3 numbers differ" in probe_rows(whole, off).reason


def test_where_made_up_numbers_have_no_root_positive_ones_are_compared():
    whole = region(lambda x: (x.sqrt().sum(-1),), torch.randn(4, WIDTH))
    wrong = region(lambda x: (x.sqrt().sum(-1) + 1,), torch.randn(4, WIDTH))
    assert probe_rows(whole, whole).verdict is Verdict.AGREES
    assert "4 of 4 numbers differ" in probe_rows(whole, wrong).reason


def test_made_up_indices_are_valid_wherever_they_are_read():
    def program(table, ids, x, at):
        return table[ids.view(-1)], x.gather(1, at), torch.where(ids > 1, ids, 0)

    table, x = torch.randn(5, 3), torch.randn(4, 7)
    ids, at = torch.zeros(2, 9, dtype=torch.long), torch.zeros(4, 30, dtype=torch.long)
    _, ids, _, at = made_up_inputs(region(program, table, ids, x, at), wide=True, positive=False)
    assert int(ids.max()) == 4
    assert int(at.max()) == 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64])
def test_short_types_are_compared_in_long_ones(dtype):
    whole = region(lambda x: (x * x,), torch.ones(2, 2, dtype=dtype))
    (value,) = made_up_inputs(whole, wide=True, positive=False)
    assert value.dtype in (torch.float64, torch.complex128)
    assert probe_rows(whole, whole).verdict is Verdict.AGREES
