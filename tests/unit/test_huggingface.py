"""The backend's name in accelerate, and memo's numbers in the Trainer's logs."""

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
from transformers.trainer_callback import PrinterCallback

import memo_compile
from memo_compile import config, huggingface
from memo_compile.errors import ConfigError, RuntimeMisuse
from memo_compile.lowering import region_cache
from memo_compile.lowering.region_cache import CacheCounts
from memo_compile.reporting import state
from memo_compile.step.plans import Observed, ReportedPlan
from tests.steps.small import planned, two_layers

pytestmark = pytest.mark.usefixtures("fresh_report")


@pytest.fixture(autouse=True)
def no_options(monkeypatch):
    monkeypatch.setattr(config, "_configured", {})


@pytest.fixture
def backends(monkeypatch):
    """accelerate's enumeration, as far as it goes here; the real one is in `make examples`."""

    class DynamoBackend(str, Enum):  # noqa: UP042 - as accelerate has it
        NO = "NO"
        INDUCTOR = "INDUCTOR"

    utils = ModuleType("accelerate.utils")
    utils.DynamoBackend = DynamoBackend
    monkeypatch.setitem(sys.modules, "accelerate", ModuleType("accelerate"))
    monkeypatch.setitem(sys.modules, "accelerate.utils", utils)
    return DynamoBackend


def test_the_name_is_a_member_like_the_others(backends):
    enabled = huggingface.enable(memory_budget="1GiB")
    assert enabled.changed
    member = backends("MEMO")
    assert member is backends["MEMO"] is backends.MEMO
    assert (member.name, member.value, member) == ("MEMO", "MEMO", "MEMO")
    assert isinstance(member, backends)
    assert [known.name for known in backends] == ["NO", "INDUCTOR", "MEMO"]
    assert config.resolve(None, None).memory_budget == "1GiB"
    (note,) = memo_compile.report().notes
    assert "DynamoBackend has the new member MEMO, and Dynamo leaves warnings" in note
    assert "Tried with accelerate 1.15" in note


def test_a_second_call_sets_options_and_changes_nothing_else(backends):
    huggingface.enable()
    members = dict(backends.__members__)
    enabled = huggingface.enable(max_inflight=2)
    assert not enabled.changed
    assert "had the member MEMO already" in str(enabled)
    assert dict(backends.__members__) == members
    assert config.resolve(None, None).max_inflight == 2
    assert len(memo_compile.report().notes) == 1


def test_a_wrong_option_changes_nothing(backends):
    with pytest.raises(ConfigError, match="unknown option 'memory_bugdet'"):
        huggingface.enable(memory_bugdet=1)
    assert "MEMO" not in backends.__members__


def test_nothing_is_changed_by_the_import(backends):
    assert "MEMO" not in backends.__members__


def test_without_accelerate_it_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "accelerate.utils", raising=False)
    with pytest.raises(RuntimeMisuse, match="pip install accelerate"):
        huggingface.enable()


def test_another_accelerate_is_named(monkeypatch, backends):
    del sys.modules["accelerate.utils"].DynamoBackend
    with pytest.raises(RuntimeMisuse, match=r"model\.compile\(backend='memo'\)"):
        huggingface.enable()


def plan(**observed: float) -> ReportedPlan:
    return ReportedPlan.of(planned(two_layers()), Observed(**observed))


def test_metrics_are_of_the_last_step(monkeypatch):
    monkeypatch.setattr(region_cache, "counts", CacheCounts())
    names = ("memo/active", "memo/unplanned_steps", "memo/lowered_regions")
    assert memo_compile.metrics() == dict.fromkeys(names, 0.0)
    state.add_plan(plan())
    for offloaded in (1, 10):  # two steps of two graphs each
        state.step_begins()
        state.step_ran(plan(offloaded_bytes=offloaded, stall_s=0.5))
        state.step_ran(plan(offloaded_bytes=offloaded, recomputed_bytes=7))
    state.step_begins()  # the third has not ended
    found = memo_compile.metrics()
    assert found["memo/active"] == 1.0
    assert found["memo/offloaded_bytes"] == 20
    assert found["memo/recomputed_bytes"] == 7
    assert found["memo/stall_s"] == 0.5
    assert found["memo/planned_peak_bytes"] == plan().peak_bytes
    assert "memo/budget_bytes" not in found
    assert all(isinstance(value, float) for value in found.values())


def test_the_trainer_reports_them_beside_the_loss():
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[PrinterCallback()]))
    huggingface.log_metrics(trainer)
    huggingface.log_metrics(trainer)
    first, printer = trainer.callback_handler.callbacks
    assert isinstance(printer, PrinterCallback)
    logs, of_trainer = {"loss": 1.0}, SimpleNamespace(log_history=[{"loss": 1.0}])
    first.on_log(None, of_trainer, None, logs=logs)
    assert logs == of_trainer.log_history[0] == {"loss": 1.0, **memo_compile.metrics()}
    logs = {"eval_loss": 1.0}
    first.on_log(None, of_trainer, None, logs=logs)
    assert logs == {"eval_loss": 1.0}
