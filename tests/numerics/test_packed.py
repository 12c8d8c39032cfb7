"""Packed sequences: a plan serves all values of the longest, and documents stay apart."""

import functools
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import memo_compile
from memo_compile.backends import entry
from memo_compile.errors import Infeasible
from memo_compile.reporting import state
from tests import models
from tests.numerics.small import Pair, leased_slabs
from tests.numerics.training import ATEN, assert_planned, in_ci, sgd
from tests.steps.packed_sequences import KERNELS, TOKENS, Batch, Decoder, batch_of, read


def alone(batch: Batch) -> Iterator[Batch]:
    """Each sequence of ``batch`` by itself."""
    *rows, ends, _ = batch
    for start, end in itertools.pairwise(ends.tolist()):
        if end > start:
            length = torch.tensor([0, end - start], dtype=torch.int32)
            yield *(each[start:end] for each in rows), length, end - start


def lengths_of(longest: int, tokens: int = TOKENS) -> list[int]:
    """A longest sequence, and shorter ones behind it."""
    rest = tokens - longest
    parts = -(-rest // (longest - 1))
    shorter = [rest // parts + (at < rest % parts) for at in range(parts)]
    return [longest, *shorter]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The graphs that memo compiles; one for each compilation of Dynamo's at least."""
    graphs: list[object] = []
    plan = entry.plan_graph

    def noted(gm, *args):
        graphs.append(gm)
        return plan(gm, *args)

    monkeypatch.setattr(entry, "plan_graph", noted)
    read.clear()
    return graphs


def trained(pair: Pair, batches: list[Batch]) -> None:
    """A step each: gradients equal those of the whole batch, and the sum of each sequence's."""
    optimizers = [sgd(pair.ours), sgd(pair.eager)]
    for batch in batches:
        pair.assert_step(*batch)
        pair.eager.zero_grad()
        for sequence in alone(batch):
            pair.eager(*sequence).backward()
        pair.assert_equal()
        for optimizer in optimizers:
            optimizer.step()
        pair.ours.load_state_dict(pair.eager.state_dict())


WHOLE = {**ATEN, "token_tiles": 1, "costs": "roofline"}


@functools.cache
def budget() -> int:
    """Between the floor and what it takes to keep everything."""
    model, batch = Decoder(KERNELS["operator"]), batch_of(lengths_of(24), 0)
    with pytest.raises(Infeasible) as refused:
        Pair(model, **WHOLE, memory_budget=1).assert_step(*batch)
    torch._dynamo.reset()
    Pair(model, **WHOLE).assert_step(*batch)
    plan = memo_compile.report().plans[-1]
    torch._dynamo.reset()
    state.reset()
    assert refused.value.floor_bytes is not None
    return (refused.value.floor_bytes + plan.fixed.new_gradients + plan.peak_bytes) // 2


@pytest.mark.parametrize(
    ("kernel", "schedule"),
    in_ci(itertools.product(KERNELS, ("copies-early", "copies-late")), ("operator", "copies-late")),
)
def test_forty_batches_under_a_budget_are_compiled_twice(kernel, schedule, planned):
    bound = budget()
    planned.clear()
    torch.manual_seed(0)
    options = {**WHOLE, "memory_budget": bound, "debug": ("poison", schedule)}
    pair = Pair(Decoder(KERNELS[kernel]), **options)
    trained(pair, [batch_of(lengths_of(16 + seed), seed) for seed in range(40)])
    assert len(planned) <= 2
    assert_planned()
    plans = memo_compile.report().plans
    assert all(plan.peak_bytes <= bound for plan in plans)
    assert any(plan.offloaded_bytes or plan.recomputed_bytes for plan in plans)
    assert leased_slabs() == 0
    assert not [note for note in memo_compile.report().notes if "length" in note]
    if kernel == "operator":
        assert len({longest for longest, _ in read}) >= 40
        assert all(given == actual for given, actual in read)


@pytest.mark.parametrize("kernel", in_ci(KERNELS, "flash-attn"))
def test_the_same_through_inductor(kernel, planned):
    torch.manual_seed(0)
    pair = Pair(Decoder(KERNELS[kernel]), lowering="inductor", policy="full-recompute")
    trained(pair, [batch_of(lengths_of(20 + seed), seed) for seed in range(4)])
    assert len(planned) <= 2
    assert_planned()


def test_the_rest_of_a_layer_runs_in_tiles():
    """Made-up ends leave tokens out, which the kernel does not write: no difference of tiles."""
    torch.manual_seed(0)
    pair = Pair(Decoder(KERNELS["flash-attn"]), **{**WHOLE, "token_tiles": 4})
    for seed, longest in enumerate((20, 30, 40)):
        pair.assert_step(*batch_of(lengths_of(longest), seed))
    assert_planned()
    report = memo_compile.report()
    assert report.plans[-1].tiles["layer0_fwd"] == 4
    assert not [note for note in report.notes if "tiles" in note]


def test_a_plan_for_each_total_length(planned):
    torch.manual_seed(0)
    pair = Pair(Decoder(KERNELS["operator"]))
    totals = (96, 64, 80, 64, 96, 80, 48, 80)
    longest = range(20, 20 + len(totals))
    lengths = [lengths_of(*each) for each in zip(longest, totals, strict=True)]
    trained(pair, [batch_of(each, seed) for seed, each in enumerate(lengths)])
    assert len(planned) <= 1 + len(set(totals))  # the first is compiled for its numbers alone
    assert_planned()


def test_numbers_of_sequences_that_vary(planned):
    torch.manual_seed(0)
    pair = Pair(Decoder(KERNELS["operator"]))
    lengths = ([40, 56], [30, 33, 33], [12] * 8, [46, 50], [34, 31, 31], [60, 36])
    batches = [batch_of(each, seed, 0) for seed, each in enumerate(lengths)]
    trained(pair, batches)
    assert len(planned) <= 1 + len({len(each) for each in lengths})
    assert_planned()


def test_a_number_that_an_operator_of_torch_reads_gets_a_plan_for_each_value(planned):
    torch.manual_seed(0)
    pair = Pair(Decoder(KERNELS["operator"], scales=True))
    for seed, longest in enumerate((20, 30, 40, 30)):
        pair.assert_step(*batch_of(lengths_of(longest), seed))
    assert_planned()
    assert len(planned) == 4  # of them one was for all values, and was given up


def test_position_ids_that_restart_keep_sequences_apart(planned):
    """As transformers' collator without padding hands them over; sdpa makes a mask of them."""
    transformers = pytest.importorskip("transformers")
    collate = transformers.DataCollatorWithFlattening()
    model, _, _ = models.llama(num_layers=2)
    pair = Pair(model)
    for seed, longest in enumerate((20, 31, 17)):
        source = torch.Generator().manual_seed(seed)
        sequences = [
            {"input_ids": torch.randint(models.VOCABULARY, (length,), generator=source)}
            for length in lengths_of(longest, 64)
        ]
        batch = dict(collate(sequences))
        pair.zero_grad()
        pair.compiled(**batch, num_items_in_batch=50).loss.backward()
        for sequence in sequences:
            ids = sequence["input_ids"][None]
            pair.eager(input_ids=ids, labels=ids, num_items_in_batch=50).loss.backward()
        pair.assert_equal()
    assert len(planned) == 1
    assert_planned()


def test_flex_attention_is_refused_by_torch_on_a_cpu():
    def attends(x: torch.Tensor) -> torch.Tensor:
        return flex_attention(x, x, x).sum()

    x = torch.randn(1, 1, 128, 16, requires_grad=True)
    with pytest.raises(Exception, match="does not support backward on CPU"):
        torch.compile(attends, backend="memo")(x).backward()
