"""Copies beside computation, in the device's virtual time: as the simulator says of the plan.

Both sides have one source. Regions are timed on the device, whose kernels all take as long, and the
plan is told the speed of the device's link.
"""

import gc
from typing import NamedTuple

import pytest
import torch
from memo_runtime.copies import Lane, Ticket, _CudaLanes

import memo_compile
from memo_compile.costs.bandwidth import CopyBandwidth
from memo_compile.driver import knowledge
from memo_compile.step.plans import ReportedPlan
from tests import models
from tests.cuda_emulated.device_calls import busy_s, set_speeds, time_s
from tests.cuda_emulated.offline_plans import OwnLoss

KERNEL_S = 200e-6
"""Far above what a call costs the host, which is not simulated."""
FAST, SLOW = 40e6, 10e6
"""Bytes per second of links. The copies of all that can be copied take less than half as long as
the step computes, and longer than it."""
MOST_APART = 0.01
"""Of a step's seconds, and of the share of its copies that is hidden."""
SEEN = 0.05
"""What a runtime whose copies do not overlap is apart at least."""
LAYERS = 4


class Took(NamedTuple):
    """A step in virtual seconds."""

    step_s: float
    compute_s: float
    copies_s: float

    @property
    def stall_s(self) -> float:
        """For which computation stands still."""
        return self.step_s - self.compute_s

    @property
    def hidden(self) -> float:
        """The share of its copies' seconds in which it computes."""
        return 1 - self.stall_s / self.copies_s


def simulated(plan: ReportedPlan) -> Took:
    seconds = dict.fromkeys(("compute", "stall", "d2h", "h2d"), 0.0)
    for span in plan.timeline.spans:
        seconds[span.lane] += span.end_s - span.start_s
    return Took(plan.timeline.step_s, seconds["compute"], seconds["d2h"] + seconds["h2d"])


@pytest.fixture
def link(monkeypatch):
    """Sets the speed of the link, for the device and for the plans."""

    def set_link(speed: float) -> None:
        known = CopyBandwidth(
            d2h_bytes_per_s=speed, h2d_bytes_per_s=speed, latency_s=0.0, source="the device's"
        )
        monkeypatch.setattr(knowledge, "copy_bandwidth", lambda device, kind: known)
        set_speeds(KERNEL_S, speed)

    yield set_link
    set_speeds()


def trained(**options: object) -> tuple[ReportedPlan, Took]:
    """A plan, and how long the third step with it takes."""
    torch._dynamo.reset()
    gc.collect()  # what is left of other models takes room in which regions are timed
    torch.manual_seed(0)
    step = OwnLoss(lambda seq: models.llama(num_layers=LAYERS, seq=seq)).to("cuda", torch.bfloat16)
    given = tuple(value.cuda() for value in step.inputs.values())
    fixed = {"strict": True, "lowering": "aten", "token_tiles": 1, "token_granule": 16}
    compiled = torch.compile(step, backend="memo", options=fixed | options)
    for _ in range(3):
        step.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        begin_s, before = time_s(), busy_s()
        compiled(*given).backward()
        torch.cuda.synchronize()
    compute_s, *others = (after - was for after, was in zip(busy_s(), before, strict=True))
    (plan,) = memo_compile.report().plans[-1:]
    assert memo_compile.report().active
    return plan, Took(time_s() - begin_s, compute_s, sum(others))


def apart(plan: ReportedPlan, took: Took) -> float:
    """By how much the step's seconds, or the hidden share of its copies, miss the simulated."""
    said = simulated(plan)
    return max(abs(took.step_s / said.step_s - 1), abs(took.hidden - said.hidden))


@pytest.mark.parametrize(
    ("policy", "speed"), [("full-offload", FAST), ("memo", FAST), ("memo", SLOW)]
)
def test_a_step_takes_as_long_as_simulated(link, policy, speed):
    link(speed)
    plan, took = trained(policy=policy)
    assert plan.offloaded_bytes > 0
    assert apart(plan, took) <= MOST_APART, (simulated(plan), took)


def test_a_step_that_stalls_and_one_under_its_peak_as_budget(link):
    link(SLOW)
    offloads, took = trained(policy="full-offload")
    assert took.stall_s > took.compute_s / 2
    assert apart(offloads, took) <= MOST_APART, (simulated(offloads), took)
    plan, took = trained(memory_budget=offloads.peak_bytes)
    assert plan.recomputed_bytes > 0
    assert 0 < plan.offloaded_bytes < offloads.offloaded_bytes
    assert apart(plan, took) <= MOST_APART, (simulated(plan), took)


def test_copies_that_are_waited_for_at_once_are_seen(link):
    link(FAST)
    plan, took = trained(policy="full-offload", debug="copies-serial")
    assert apart(plan, took) > SEEN
    assert took.step_s == pytest.approx(took.compute_s + took.copies_s, rel=MOST_APART)


@pytest.mark.parametrize("lane", list(Lane))
def test_a_lane_on_the_stream_that_computes_is_seen(link, lane, monkeypatch):
    link(FAST)
    start = _CudaLanes.start

    def on_the_own_stream(lanes: _CudaLanes, ticket: Ticket) -> None:
        lanes.copy_now(ticket) if ticket.lane is lane else start(lanes, ticket)

    monkeypatch.setattr(_CudaLanes, "start", on_the_own_stream)
    plan, took = trained(policy="full-offload")
    assert apart(plan, took) > SEEN
