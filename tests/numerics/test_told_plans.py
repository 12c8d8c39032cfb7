"""One rank plans for all whose steps are equal: two ranks in one process, one after the other.

Processes that talk to each other do it in ``tests/distributed/test_agreement.py``.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from memo_runtime import host_store

import memo_compile
from memo_compile.costs.bandwidth import CopyBandwidth
from memo_compile.driver import knowledge, plan_step, step_planner
from memo_compile.driver.agreement import JobRank
from memo_compile.errors import Infeasible
from memo_compile.reporting import state
from memo_compile.torch_private.distributed import JobStore
from tests.numerics.small import Stack, rows

COPY = CopyBandwidth(d2h_bytes_per_s=1e6, h2d_bytes_per_s=1e6, latency_s=0.0, source="made up")
SECONDS = 1.0, 1e-6
"""Of a region on each rank: here it is faster to copy, there to compute again."""


class Trained:
    """A step of a model on ``rank``: its report, its errors, and what was measured."""

    def __init__(self, monkeypatch, rank, *, num_rows=32, budget=222_000):
        torch._dynamo.reset()
        state.reset()
        torch.manual_seed(0)
        self.num_measured, self.region_s = 0, SECONDS[rank.rank]
        monkeypatch.setattr(plan_step, "job_rank", lambda: rank)
        monkeypatch.setattr(knowledge, "measure_all", self.measured)
        monkeypatch.setattr(knowledge, "copy_bandwidth", lambda *_: COPY)
        model = Stack(hidden=32, num_layers=2)
        eager = copy.deepcopy(model)
        options = {"lowering": "aten", "policy": "greedy", "token_tiles": 1}
        options["memory_budget"] = budget
        for own in (torch.compile(model, backend="memo", options=options), eager):
            own(rows(1, num_rows)).backward()
        self.report = memo_compile.report()
        plan = self.report.plans[-1]
        self.planned = plan.recomputed_bytes, plan.offloaded_bytes, plan.peak_bytes, plan.step_s
        pairs = zip(model.parameters(), eager.parameters(), strict=True)
        self.error = max(float((own.grad - its.grad).abs().max()) for own, its in pairs)

    def measured(self, lowered, graphs, **_):
        self.num_measured += len(lowered)
        return dict.fromkeys(lowered, self.region_s)


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(knowledge.StepKnowledge, "is_shared", lambda own: True)
    store = JobStore(dist.HashStore())
    return [JobRank(rank, 2, store, lambda other: False) for rank in range(2)]


def test_the_second_rank_runs_the_plan_of_the_first_and_measures_nothing(monkeypatch, ranks):
    first, second = (Trained(monkeypatch, rank) for rank in ranks)
    assert first.planned == second.planned
    assert first.planned[1] > 0
    assert first.num_measured > 0
    assert second.num_measured == 0
    assert max(first.error, second.error) < 1e-6


def test_a_rank_with_less_memory_plans_by_itself(monkeypatch, ranks):
    first = Trained(monkeypatch, ranks[0])
    monkeypatch.setattr(step_planner, "default_host_budget_bytes", lambda *_: 0)
    monkeypatch.setattr(host_store, "bytes_held", lambda *_: 0)
    second = Trained(monkeypatch, ranks[1])
    assert first.planned[1] > 0
    assert second.planned[1] == 0
    assert any("than on rank 0: there is less host memory" in note for note in second.report.notes)
    assert second.error < 1e-6


def test_a_plan_of_another_step_is_not_run(monkeypatch, ranks):
    texts, tell = [], ranks[0].answer
    monkeypatch.setattr(ranks[0], "answer", lambda place, text: texts.append(text))
    Trained(monkeypatch, ranks[0])
    monkeypatch.setattr(ranks[0], "answer", lambda place, _: tell(place, texts[0]))
    Trained(monkeypatch, ranks[0], num_rows=48, budget=300_000)
    second = Trained(monkeypatch, ranks[1], num_rows=48, budget=300_000)
    assert any("planned otherwise than on rank 0" in note for note in second.report.notes)
    assert second.error < 1e-6


def test_a_refusal_is_raised_on_all_with_the_floor(monkeypatch, ranks):
    floors = []
    for rank in ranks:
        with pytest.raises(Infeasible) as raised:
            Trained(monkeypatch, rank, budget=1000)
        floors.append(raised.value.floor_bytes)
    assert "(as rank 0 has found)" in str(raised.value)
    assert floors[0] == floors[1]
    assert floors[0] > 1000
