"""The simulated step under the papers' policies against MEMO's closed forms, within 1 %."""

import dataclasses

import pytest

from benchmarks import memo_tables
from benchmarks.memo_steps import (
    ATTENTION_BACKWARD_FACTOR,
    BACKWARD_FACTOR,
    Rates,
    Training,
    choose_alpha,
    layer_times,
    rotating_step_s,
)
from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import find_model
from memo_compile.papers.layer_costs import Efficiency
from memo_compile.planners.moves import apply_moves
from memo_compile.planners.policy.named import QUANTA, memo_alpha, named_moves
from memo_compile.step.simulate import simulate
from tests.steps.gpt_step import gpt_step
from tests.steps.movable import costs_of, recomputer

K = 1024
MANY = 300
"""Layers, so that the two at the ends, which the paper's n max(T, S/B) counts, weigh below 1 %."""


def training(seq):
    return Training(shape=find_model("gpt-7b"), seq=seq, tp=4, cp=2, host_bytes=250e9)


def rates(copy_bytes_per_s):
    return Rates(
        hardware=find_hardware("a800"),
        efficiency=Efficiency(gemm=0.65, hbm=0.2),
        copy_bytes_per_s=copy_bytes_per_s,
    )


def simulated(setup, speed, num_layers, policy, alpha=None):
    """Seconds, and the simulated stalls of the compute lane."""
    step = gpt_step(setup, speed, num_layers)
    recompute = recomputer(step)
    used = []

    def noted(key):
        used.append(recompute(key))
        return used[-1]

    plan = named_moves(step, policy, recompute, alpha=alpha)
    timeline = simulate(apply_moves(step, plan.moves, noted), costs_of(step, *used))
    return timeline.step_s, timeline.stall_s


SETUPS = [
    pytest.param(seq, speed, id=f"{seq // K}K-{speed / 1e9:g}GBps")
    for seq, speed in [(64 * K, 11e9), (64 * K, 3e9), (256 * K, 11e9), (896 * K, 32e9)]
]


@pytest.mark.parametrize(("seq", "speed"), SETUPS)
def test_full_recompute(seq, speed):
    """n T forward, n (backward + everything but the layer's output once more) backward."""
    setup, reached = training(seq), rates(speed)
    times = layer_times(setup, reached)
    again_s = times.others_s + _attention_s(times)
    found, stall_s = simulated(setup, reached, 32, "full-recompute")
    assert stall_s == 0
    assert found == pytest.approx(32 * (times.forward_s + times.backward_s + again_s), rel=0.01)


def _attention_s(times):
    """From backward = 2 (T - A) + f A, where f is attention's own factor."""
    excess = ATTENTION_BACKWARD_FACTOR - BACKWARD_FACTOR
    return (times.backward_s - BACKWARD_FACTOR * times.forward_s) / excess


@pytest.mark.parametrize(("seq", "speed"), SETUPS)
def test_full_offload(seq, speed):
    """n max(T, S/B) forward, n max(backward, S/B) backward."""
    setup, reached = training(seq), rates(speed)
    times = layer_times(setup, reached)
    copy_s = (times.always_bytes + times.others_bytes) / speed
    closed = MANY * (max(times.forward_s, copy_s) + max(times.backward_s, copy_s))
    found, stall_s = simulated(setup, reached, MANY, "full-offload")
    assert found == pytest.approx(closed, rel=0.01)
    assert (stall_s > 0.01 * found) == (copy_s > times.forward_s)


@pytest.mark.parametrize("alpha", QUANTA)
@pytest.mark.parametrize(("seq", "speed"), SETUPS)
def test_memo(seq, speed, alpha):
    """n max(T, S/B) forward, n max(backward + (1 - alpha) R, S/B) backward."""
    setup, reached = training(seq), rates(speed)
    times = layer_times(setup, reached)
    copy_s = (times.always_bytes + alpha * times.others_bytes) / speed
    backward_s = times.backward_s + (1 - alpha) * times.others_s
    closed = MANY * (max(times.forward_s, copy_s) + max(backward_s, copy_s))
    found, _ = simulated(setup, reached, MANY, "memo", alpha)
    assert found == pytest.approx(closed, rel=0.01)


@pytest.mark.parametrize("alpha", QUANTA)
@pytest.mark.parametrize(("seq", "speed"), SETUPS)
def test_memo_of_32_layers_with_the_last_two_kept(seq, speed, alpha):
    """The form of ``memo_steps``, less the recomputation of the two layers that stay whole."""
    setup, reached = training(seq), rates(speed)
    times = layer_times(setup, reached)
    copy_s = (times.always_bytes + alpha * times.others_bytes) / speed
    again_s = (1 - alpha) * times.others_s
    closed = rotating_step_s(
        num_layers=32,
        forward_s=times.forward_s,
        backward_s=times.backward_s + again_s,
        out_s=copy_s,
        in_s=copy_s,
    )
    found, _ = simulated(setup, reached, 32, "memo", alpha)
    assert found == pytest.approx(closed - 2 * again_s, rel=0.01)


@pytest.mark.parametrize("seq", [64 * K, 128 * K, 256 * K, 512 * K, 896 * K])
@pytest.mark.parametrize("speed", [3e9, 6e9, 11e9, 32e9])
def test_the_step_has_the_closed_forms_alpha(seq, speed):
    setup, reached = training(seq), rates(speed)
    step = gpt_step(setup, reached, setup.shape.num_layers)
    found = memo_alpha(step, host_budget_bytes=int(setup.host_bytes))
    assert found == choose_alpha(setup, reached).quantised


POLICIES = {
    "full_recompute_plan": "full-recompute",
    "full_swap_plan": "full-offload",
    "memo": "memo",
}


def test_table_4_from_the_simulated_policies():
    """Moves made and simulated call by call give the same table, within the same 3 points."""
    cells = memo_tables.read_cells()
    folds = memo_tables.cross_validate(cells)
    worst = 0.0
    for index, cell in enumerate(cells):
        gemm, hbm, speed = next(f for f in folds if index not in f.fitted).parameters
        efficiency = Efficiency(gemm=gemm, hbm=hbm)
        reached = dataclasses.replace(rates(speed), efficiency=efficiency)
        setup, shape = cell.training, cell.training.shape
        alpha = choose_alpha(setup, reached).quantised if cell.row == "memo" else None
        layers_s, _ = simulated(setup, reached, shape.num_layers, POLICIES[cell.row], alpha)
        peak = reached.hardware.peak_flops_per_s
        head_s = 6 * shape.embedding_parameters * setup.tokens_per_device / (peak * gemm)
        flops = shape.flops_per_token(setup.seq) * setup.tokens_per_device
        mfu_points = 100 * flops / (peak * (layers_s + head_s))
        worst = max(worst, abs(mfu_points - cell.mfu_points))
    assert worst <= 3.0
