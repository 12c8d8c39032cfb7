"""What the report says of situations that memo only names."""

from dataclasses import replace

import pytest
import torch

from memo_compile.backends import entry
from memo_compile.backends.entry import DynamoWatch
from memo_compile.config import MemoConfig
from memo_compile.driver import around
from memo_compile.driver.report_rows import step_notes
from memo_compile.reporting import state
from memo_compile.step.plans import Decision
from memo_compile.step.problem import FixedBytes
from memo_compile.torch_private import dynamo
from tests.steps.small import two_layers

pytestmark = pytest.mark.usefixtures("fresh_report")

RECOMPUTED = Decision(
    tensor="mm [8, 8]",
    layer_class="layers",
    bytes=256,
    decision="RECOMPUTE",
    token_fraction=1.0,
    reason="",
    source=None,
)


@pytest.fixture
def two_ranks(monkeypatch):
    """A process group of two, as far as notes go."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(dynamo, "ddp_splits_graphs", lambda: False)
    monkeypatch.setattr(entry, "has_fsdp_modules", lambda: False)


def test_one_process_has_no_notes():
    entry._note_distributed()
    assert state.report().notes == ()


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (None, "that all ranks begin the same collectives inside a graph is checked"),
        ("ddp_splits_graphs", "optimize_ddp = False"),
        ("has_fsdp_modules", "FSDP2"),
    ],
)
def test_what_several_ranks_do_is_named(two_ranks, monkeypatch, found, word):
    """Rows 23 and 24."""
    if found is not None:
        owner = entry if found == "has_fsdp_modules" else dynamo
        monkeypatch.setattr(owner, found, lambda: True)
    entry._note_distributed()
    entry._note_distributed()
    notes = state.report().notes
    assert len(notes) == (1 if found is None else 2)
    assert word in notes[-1]


def test_fully_sharded_modules_are_seen(monkeypatch):
    from torch.distributed.fsdp import FSDPModule

    with monkeypatch.context() as as_at_first:
        as_at_first.setattr(FSDPModule, "__subclasses__", list)
        before = around.has_fsdp_modules()

    class FSDPLinear(FSDPModule, torch.nn.Linear):
        """What fully_shard() makes of the class of a module."""

    assert (before, around.has_fsdp_modules()) == (False, True)


def test_what_torch_derives_itself_is_no_sharded_module(monkeypatch):
    from torch.distributed.fsdp import FSDPModule

    class ReplicateModule(FSDPModule):
        """As in torch.distributed._composable, which others import: not a module yet."""

    monkeypatch.setattr(FSDPModule, "__subclasses__", lambda: [ReplicateModule])
    assert not around.has_fsdp_modules()


def notes(rows, outputs=0, host_bytes=0, device_type="", **options):
    problem = replace(two_layers(), fixed=FixedBytes(outputs=outputs), host_bytes=host_bytes)
    return list(step_notes(problem, rows, MemoConfig(**options), device_type=device_type))


def test_parts_that_round_differently_are_named():
    """Where a slice's result is not bitwise that of the whole, the report says so."""
    assert notes([RECOMPUTED]) == []
    (note,) = notes([RECOMPUTED, replace(RECOMPUTED, token_fraction=0.25)])
    assert note.startswith("a part of the tokens is recomputed")
    assert notes([replace(RECOMPUTED, decision="OFFLOAD", token_fraction=0.25)]) == []
    (note,) = notes([], token_tiles=4)
    assert note.startswith("wide chains run in tiles")


def test_large_results_are_named_under_a_budget():
    assert notes([], outputs=2**30) == []
    (note,) = notes([], outputs=2**30, memory_budget="2GiB")
    assert note.startswith("the forward returns 1.00 GiB")
    assert "only the loss" in note
    assert notes([], outputs=4, memory_budget="2GiB") == []


def test_copies_to_the_same_memory_are_named_under_a_budget():
    moved = {"host_bytes": 2**20, "device_type": "cpu"}
    (note,) = notes([], memory_budget="2GiB", **moved)
    assert "the same memory" in note
    assert "host_budget=0" in note
    assert notes([], **moved) == []
    assert notes([], memory_budget="2GiB", host_budget="1GiB", **moved) == []
    assert notes([], memory_budget="2GiB", host_store="file:.", **moved) == []
    assert notes([], memory_budget="2GiB", host_bytes=0, device_type="cpu") == []
    for elsewhere in ("cuda", ""):
        assert notes([], memory_budget="2GiB", host_bytes=1, device_type=elsewhere) == []


def test_counts_begin_anew_and_survive_torch_clearing_its_own(monkeypatch):
    counts = [
        dynamo.DynamoCounts({"print": 2}, {}, 1),
        dynamo.DynamoCounts({"print": 3, "data": 1}, {}, 1),
        dynamo.DynamoCounts({"print": 2, "LSTM": 1}, {"LSTM": 3}, 1),
        dynamo.DynamoCounts({}, {}, 0),
        dynamo.DynamoCounts({"print": 1}, {}, 5),
    ]
    monkeypatch.setattr(dynamo, "dynamo_counts", lambda: counts.pop(0) if counts[1:] else counts[0])
    watch = DynamoWatch()
    (note,), gave_up = watch.left_out()
    assert note.startswith("2 graph break(s)")
    assert not gave_up
    (note,), gave_up = watch.left_out()
    assert note.startswith("3 function(s) run eagerly")
    assert "First: LSTM" in note
    assert not gave_up
    assert watch.left_out() == ((), False)
    (note,), gave_up = watch.left_out()
    assert "memo is OFF" in note
    assert gave_up


@pytest.mark.parametrize(
    ("says", "how"),
    [
        ("Logger (WARNING)>.warning_once, args: `loss_type=None` was set", "model.loss_type ="),
        ("logging.Logger method not supported", "huggingface.enable()"),
        ("<class 'torch.utils.hooks.RemovableHandle'>", "output_router_logits=False"),
    ],
)
def test_graph_breaks_of_a_well_known_cause_say_what_avoids_them(monkeypatch, says, how):
    counts = [
        dynamo.DynamoCounts({}, {}, 0, frozenset({"another break"})),
        dynamo.DynamoCounts({"a break": 1}, {}, 0, frozenset({"another break", says})),
    ]
    monkeypatch.setattr(dynamo, "dynamo_counts", lambda: counts.pop(0) if counts[1:] else counts[0])
    (note,), _ = DynamoWatch().left_out()
    assert how in note
