"""Layers of real shapes, and their split over stages with a policy for each."""

import dataclasses

import pytest

from benchmarks.lynx import describe_layer
from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import find_model
from memo_compile.errors import InputError
from memo_compile.papers.layer_costs import Efficiency
from memo_compile.papers.lynx.heu import solve_heu
from memo_compile.papers.lynx.joint import JointProblem, cooldown_seconds, plan_stages
from memo_compile.papers.lynx.lynx_instance import HeuInstance
from memo_compile.papers.lynx.solution import HeuSolution, Part
from memo_compile.planners.solver import SolveStatus

SHAPES = ("gpt-300m", "gpt-1.3b", "gpt-7b", "gpt-13b", "gpt-23b", "gpt-175b")


def layer(name, micro_batch=4, tp=8):
    return describe_layer(
        find_model(name),
        seq=2048,
        micro_batch=micro_batch,
        tp=tp,
        hardware=find_hardware("a100"),
        efficiency=Efficiency(gemm=0.5, hbm=0.8),
    )


def stage(costs, share):
    kept = sum(m for m, need in zip(costs.ops.sizes, costs.need, strict=True) if need)
    return HeuInstance(
        ops=costs.ops,
        need=costs.need,
        windows=costs.windows,
        num_layers=8,
        num_batches=8,
        static=0,
        budget=share * 64 * kept,
        forward_windows=True,
    )


def test_a_layer_weighs_what_its_shape_says():
    costs = layer("gpt-7b", micro_batch=1, tp=1)
    assert costs.ops.count == 13
    # Megatron's 34 s b h without its dropout masks and attention matrix: norms, qkv, attention,
    # residual, norm, 4h + 4h and the output are 2 (1 + 3 + 1 + 1 + 1 + 4 + 4 + 1) = 32 bytes.
    kept = sum(m for m, need in zip(costs.ops.sizes, costs.need, strict=True) if need)
    assert kept == 32 * 2048 * 4096
    assert costs.windows == (0, 0, 0, 0)
    assert min(layer("gpt-7b").windows) > 0


@pytest.mark.parametrize("name", SHAPES)
def test_overlap_beats_on_demand_beats_full(name):
    costs = layer(name)
    heu = solve_heu(stage(costs, 0.3)).critical_time
    on_demand = solve_heu(dataclasses.replace(stage(costs, 0.3), windows=(0, 0, 0, 0)))
    split = solve_heu(stage(costs, 0.3), token_split=True).critical_time
    full = sum(costs.ops.times[:-1])
    assert split <= heu <= on_demand.critical_time <= full
    assert on_demand.critical_time > 0


def test_more_memory_is_never_slower():
    costs = layer("gpt-13b")
    plans = [solve_heu(stage(costs, share)) for share in (0.3, 0.4, 0.5, 0.7, 1.0)]
    assert all(plan.status is SolveStatus.OPTIMAL for plan in plans)
    times = [plan.critical_time for plan in plans]
    assert times == sorted(times, reverse=True)
    assert times[-1] == 0


def joint(gib, num_stages=8, **changes):
    costs = layer("gpt-175b", micro_batch=1)
    arguments = {
        "costs": costs,
        "num_layers": 48,
        "num_stages": num_stages,
        "num_batches": 32,
        "layer_static": 18 * find_model("gpt-175b").layer_parameters / 8,
        "budgets": (gib * 2**30,) * num_stages,
        **changes,
    }
    return costs, plan_stages(JointProblem(**arguments))


def test_joint_plan_moves_layers_away_from_full_stages():
    costs, plan = joint(28, num_stages=8)
    _, roomy = joint(80, num_stages=8)
    assert plan.status is SolveStatus.OPTIMAL
    assert sum(plan.layers) == 48
    assert plan.slowest_s >= roomy.slowest_s
    assert roomy.slowest_s == pytest.approx(6 * (costs.forward_s + costs.backward_s))
    assert all(policy.peak <= 28 * 2**30 for policy in plan.policies)
    uneven = [28 * 2**30] * 8
    uneven[0] = 18 * 2**30
    _, shifted = joint(28, budgets=tuple(uneven))
    assert shifted.layers[0] < 6


def test_joint_plan_refuses_and_reports():
    assert joint(4)[1].status is SolveStatus.INFEASIBLE
    assert "stage 0 with a single layer: static " in joint(4)[1].conflict
    assert "48 layers, but the stages' memory holds" in joint(20)[1].conflict
    with pytest.raises(InputError, match="num_stages: 50 stages for 48 layers"):
        joint(40, num_stages=50)
    with pytest.raises(InputError, match="budgets: expected 8 entries, got 1"):
        joint(40, budgets=(2**35,))
    with pytest.raises(InputError, match="tp: 7 does not divide"):
        layer("gpt-7b", tp=7)


def test_cooldown_counts_what_stalls_do_not_cover():
    costs = layer("gpt-7b")
    early = costs.ops.times[1]
    policy = HeuSolution(
        status=SolveStatus.OPTIMAL, windows=((Part(op=1),), (), (), (), ()), critical_time=0
    )
    own = 2 * costs.backward_s
    idle = [own] * 4
    assert cooldown_seconds(costs, policy, idle, 1, 2, 8) == pytest.approx(2 * 2 * early)
    assert cooldown_seconds(costs, policy, [own + 2 * early] * 4, 1, 2, 8) == pytest.approx(0)
    assert cooldown_seconds(costs, policy, idle, 3, 2, 8) == 0
