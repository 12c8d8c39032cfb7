"""Timing regions leaves no trace: not in random states, not in the table of views."""

import logging
import random
from dataclasses import replace

import pytest
import torch
from memo_runtime.current import current

import memo_compile
from memo_compile.analysis.regions import LoweredRegion, RegionGraph
from memo_compile.costs.measure import watch_memory
from memo_compile.costs.measure_regions import TooLarge, measure, measure_all, run_once
from memo_compile.driver import knowledge
from memo_compile.errors import UnsupportedGraph
from memo_compile.lowering import aten
from memo_compile.step.problem import ALIGNMENT_BYTES
from tests import models
from tests.numerics.small import Stack, rows
from tests.numerics.training import memo_compiled
from tests.steps.layer_regions import layer_region, region_of


def spied(region: RegionGraph) -> tuple[LoweredRegion, list[list[torch.Tensor]]]:
    """The region lowered, and the inputs of every run of it."""
    lowered, seen = aten.lower(region), []

    def run(inputs):
        seen.append(list(inputs))
        assert len(current.views) == len(lowered.profile.buffers)
        return lowered.run(inputs)

    return replace(lowered, run=run), seen


def test_a_real_layer_takes_time_and_leaves_random_states_alone():
    region = layer_region(models.gpt2, dropout=0.1)
    lowered, seen = spied(region)
    marker = [torch.ones(1)]
    current.views = marker
    torch.manual_seed(3)
    states = torch.random.get_rng_state(), random.getstate()
    try:
        seconds = measure(lowered, region, repeats=2)
        assert current.views is marker
    finally:
        current.views = ()
    assert 0 < seconds < 10
    assert len(seen) == 1 + 2
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_a_region_that_draws_seeds_does_not_move_the_generator():
    prims = torch.ops.prims
    region = region_of(lambda x: (x + prims.inductor_seeds.default(2, x.device)[0],), (4,))
    before = torch.random.get_rng_state()
    assert measure(aten.lower(region), region) > 0
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.full
def test_inputs_have_the_layout_that_was_traced():
    region = layer_region(models.llama)
    lowered, seen = spied(region)
    measure(lowered, region, repeats=1)
    for value, fake in zip(seen[0], region.example_inputs(), strict=True):
        assert (value.shape, value.stride()) == (fake.shape, fake.stride())
        assert (value.dtype, value.device.type) == (fake.dtype, "cpu")
        assert not value.requires_grad
        assert value.isfinite().all()
    addresses = {value.untyped_storage().data_ptr() for value in seen[0]}
    assert len(addresses) == len(seen[0])


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3).expand(5, 3),
        torch.ones(4, 4).t(),
        torch.ones(4, dtype=torch.int32),
        torch.ones(4, dtype=torch.bool),
        torch.ones(4, dtype=torch.bfloat16),
        torch.ones(4, dtype=torch.complex64),
        torch.ones(4).to(torch.float8_e4m3fn),
        torch.ones(0, 4),
        torch.ones(()),
    ],
    ids=lambda value: f"{value.dtype}-{tuple(value.shape)}-{value.stride()}",
)
def test_inputs_of_every_kind_can_be_made(value):
    region = region_of(lambda x: (x.sin(),), (4,))
    lowered, seen = spied(region)
    region.gm.graph.find_nodes(op="placeholder")[0].meta["val"] = value
    taken = replace(lowered, run=lambda inputs: seen.append(list(inputs)))
    assert measure(taken, region, repeats=1) >= 0
    made = seen[0][0]
    assert (made.shape, made.stride(), made.dtype) == (value.shape, value.stride(), value.dtype)
    if not value.is_floating_point() and not value.is_complex():
        assert not made.any()


def test_writes_go_into_throw_away_inputs():
    region = region_of(lambda x: (x.add_(1.0).sin(),), (4,))
    lowered, seen = spied(region)
    measure(lowered, region)
    assert len({id(given[0]) for given in seen}) == 1
    assert seen[0][0].min() > 3


def test_buffers_that_live_one_after_the_other_share_memory():
    """The frame is as large as the most that is alive, not as all buffers together."""
    region = region_of(lambda x: (x.sin().cos().exp().tanh(),), (1024,))
    lowered = aten.lower(region)
    addresses = set()

    def run(inputs):
        addresses.update(view.data_ptr() for view in current.views)
        return lowered.run(inputs)

    measure(replace(lowered, run=run), region, repeats=1)
    assert len(lowered.views) == 4
    assert len(addresses) == 2


def test_a_kernel_that_fails_is_reported_by_region():
    region = region_of(lambda x: (x.sin(),), (4,))

    def run(inputs):
        raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB\nmore")

    before = current.views
    with pytest.raises(UnsupportedGraph, match=r"region region cannot run alone: CUDA out of mem"):
        measure(replace(aten.lower(region), run=run), region)
    assert current.views is before


@pytest.mark.parametrize("error", [AssertionError, TypeError, KeyError])
def test_a_fault_of_memo_is_no_reason_of_a_kernel(error):
    """Whoever measures names it; see below."""
    region = region_of(lambda x: (x.sin(),), (4,))

    def run(inputs):
        raise error("expected size 4, got 5")

    with pytest.raises(error, match="expected size 4, got 5"):
        measure(replace(aten.lower(region), run=run), region)


@pytest.mark.usefixtures("fresh_report")
@pytest.mark.parametrize(
    ("error", "level"),
    [(UnsupportedGraph("no room"), "WARNING"), (TypeError("no float"), "ERROR")],
)
def test_costs_are_computed_where_nothing_can_be_measured(monkeypatch, caplog, error, level):
    """A fault of memo is reported as one, and the step is planned all the same."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(knowledge, "measure_all", fail)
    torch._dynamo.reset()
    model = Stack()
    with caplog.at_level(logging.WARNING, logger="memo"):
        memo_compiled(model, lowering="aten", policy="full-recompute")(rows(0)).backward()
    assert memo_compile.report().active
    (note,) = (
        note for note in memo_compile.report().notes if note.startswith("costs are computed")
    )
    assert str(error) in note
    (record,) = (record for record in caplog.records if "costs are computed" in record.getMessage())
    assert record.levelname == level
    assert ("please report" in record.getMessage()) == (level == "ERROR")


def test_memory_that_is_not_there_is_reported():
    region = region_of(lambda x: (x.sin(),), (4,))
    lowered = aten.lower(region)
    node = region.gm.graph.find_nodes(op="placeholder")[0]
    node.meta["val"] = torch.empty(1 << 60, device="meta").to("meta")
    with pytest.raises(TooLarge, match="does not fit to run alone"):
        measure(lowered, region)


def test_an_input_that_is_no_tensor_is_refused():
    region = region_of(lambda x: (x.sin(),), (4,))
    lowered = aten.lower(region)
    region.gm.graph.find_nodes(op="placeholder")[0].meta["val"] = 3
    with pytest.raises(UnsupportedGraph, match="is no tensor but int"):
        measure(lowered, region)


def test_a_collective_is_refused_before_anything_runs():
    plain = region_of(lambda x: (x.sin(),), (4,))
    reduce = torch.ops._c10d_functional.all_reduce.default
    talking = region_of(lambda x: (reduce(x, "sum", "0"),), (4,))
    first, seen = spied(plain)
    with pytest.raises(UnsupportedGraph, match=r"all_reduce.* talks to other ranks"):
        measure_all({"a": first, "b": first}, {"a": plain, "b": talking})
    assert not seen


def test_a_custom_operator_is_run_unless_there_are_other_ranks(monkeypatch):
    with torch.library._scoped_library("measure_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        region = region_of(lambda x: (torch.ops.measure_test.twice(x),), (4,))
        assert measure(aten.lower(region), region) > 0
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        with pytest.raises(UnsupportedGraph, match=r"twice.* talks to other ranks, or may"):
            measure(aten.lower(region), region)


def test_a_region_that_runs_once_reads_zeros_that_take_no_memory():
    region = region_of(lambda x, w: (x.sum(), w.add_(1.0).sum()), (64, 2**18), (4,))
    lowered, seen = spied(region)
    with watch_memory() as memory:
        run_once(lowered, region)
    ((x, written),) = seen
    assert (x.shape, x.dtype) == ((64, 2**18), torch.float32)
    assert not x.any()
    assert torch.equal(written, torch.ones(4))
    assert memory.growth_bytes < x.nbytes // 8


def test_a_region_of_whole_numbers_and_empty_tensors_runs_once():
    region = region_of(lambda x: (x.sin(),), (4,))
    lowered, _ = spied(region)
    for value in (torch.ones(3, dtype=torch.int64).expand(5, 3), torch.ones(0, 4)):
        region.gm.graph.find_nodes(op="placeholder")[0].meta["val"] = value
        seen: list[list[torch.Tensor]] = []
        run_once(replace(lowered, run=lambda inputs, seen=seen: seen.append(inputs)), region)
        ((made,),) = seen
        assert (made.shape, made.stride()) == (value.shape, value.stride())
        assert made.dtype == value.dtype
        assert not made.any()


def test_a_custom_operator_does_not_run_for_what_libraries_keep():
    with torch.library._scoped_library("measure_test", "DEF") as library:
        library.define("thrice(Tensor x) -> Tensor")
        library.impl("thrice", lambda x: x * 3, "CompositeExplicitAutograd")
        region = region_of(lambda x: (torch.ops.measure_test.thrice(x),), (4,))
        lowered, seen = spied(region)
        with pytest.raises(UnsupportedGraph, match=r"thrice.* is no operator of torch"):
            run_once(lowered, region)
        assert not seen


def test_nor_does_one_that_torch_has_wrapped_because_it_writes():
    with torch.library._scoped_library("measure_test", "DEF") as library:
        library.define("note(Tensor x, Tensor(a!) log) -> ()")
        library.impl("note", lambda x, log: log.add_(x.sum()), "CompositeExplicitAutograd")
        region = region_of(lambda x: (x.sin(),), (4,))
        (sine,) = region.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
        sine.target = torch._higher_order_ops.auto_functionalize.auto_functionalized_v2
        sine.args = (torch.ops.measure_test.note.default, *sine.args)
        with pytest.raises(UnsupportedGraph, match=r"auto_functionalized_v2 is no operator"):
            run_once(aten.lower(region_of(lambda x: (x.sin(),), (4,))), region)


def test_a_region_that_the_budget_has_no_room_for_is_not_run():
    region, runs = region_of(lambda x: (x @ x,), (64, 64)), []
    lowered = replace(aten.lower(region), run=runs.append)
    with pytest.raises(TooLarge, match="that the budget leaves"):
        measure(lowered, region, room_bytes=ALIGNMENT_BYTES)
    assert not runs
