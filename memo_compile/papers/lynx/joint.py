"""Layers over stages together with each stage's recomputation policy.

A stage's time with some number of layers is that of the best policy which fits its memory, found by
HEU. Only the stage times that decide are ever computed: the split is found by asking how many
layers each stage can take within a limit, and the limit shrinks to the optimum.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memo_compile.errors import InputError, require_at_least
from memo_compile.papers.lynx import fields
from memo_compile.papers.lynx.fields import Number
from memo_compile.papers.lynx.heu import solve_heu
from memo_compile.papers.lynx.lynx_instance import HeuInstance, LayerCosts
from memo_compile.papers.lynx.solution import HeuSolution
from memo_compile.planners.solver import SolveStatus

StageTime = Callable[[int, int], float | None]
"""Seconds of a stage with a number of layers; None = out of memory. It must not shrink when layers
are added, and more layers must never fit where fewer did not."""

_FIELDS = frozenset(
    "layer num_layers num_stages num_batches layer_static budget budgets extra_static extra_time "
    "name".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointProblem:
    """Equal layers to be split over stages of a 1F1B pipeline, each with a budget of memory."""

    costs: LayerCosts
    num_layers: int
    num_stages: int
    num_batches: int
    layer_static: Number
    """Memory of one layer's parameters, gradients and optimizer state."""
    budgets: tuple[Number, ...]
    extra_static: tuple[Number, ...] = ()
    """Static memory that stages have besides their layers (embedding, head); empty = none."""
    extra_time: tuple[Number, ...] = ()
    """Forward and backward time of a micro-batch besides the layers; empty = none."""

    def __post_init__(self) -> None:
        counts = ("num_layers", "num_stages", "num_batches")
        require_at_least(1, {name: getattr(self, name) for name in counts})
        if self.num_stages > self.num_layers:
            raise InputError(f"num_stages: {self.num_stages} stages for {self.num_layers} layers")
        for name in ("budgets", "extra_static", "extra_time"):
            count = len(getattr(self, name))
            if count != self.num_stages and (count or name == "budgets"):
                raise InputError(f"{name}: expected {self.num_stages} entries, got {count}")

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "JointProblem":
        """Reads what docs/many-gpus.md describes. Raises InputError, which names a bad field."""
        layer = data.get("layer")
        if not isinstance(layer, Mapping):
            raise InputError("layer: expected an object with C, M, deps, comm, need, ctime")
        num_stages = fields.whole(data, "num_stages", minimum=1)
        if "budgets" not in data:
            data = {**data, "budgets": [fields.number(data, "budget")] * num_stages}
        rows = {
            name: fields.numbers(data, name, num_stages)
            for name in ("budgets", "extra_static", "extra_time")
            if name in data
        }
        problem = JointProblem(
            costs=LayerCosts.from_json(layer),
            num_layers=fields.whole(data, "num_layers", minimum=1),
            num_stages=num_stages,
            num_batches=fields.whole(data, "num_batches", minimum=1),
            layer_static=fields.number(data, "layer_static", 0),
            **rows,
        )
        fields.warn_unknown(data, _FIELDS)
        return problem


@dataclass(frozen=True, slots=True, kw_only=True)
class JointPlan:
    """Layers and policy of each stage."""

    status: SolveStatus
    layers: tuple[int, ...] = ()
    stage_s: tuple[float, ...] = ()
    """Time of one micro-batch's forward and backward on each stage."""
    policies: tuple[HeuSolution, ...] = ()
    cooldown_s: tuple[float, ...] = ()
    """Per stage what cool-down adds to a step, see :func:`cooldown_seconds`."""
    conflict: str = ""

    @property
    def slowest_s(self) -> float:
        """Seconds of the slowest stage, which set the pace of the pipeline."""
        return max(self.stage_s)


def plan_stages(problem: JointProblem, *, token_split: bool = False) -> JointPlan:
    """Finds the split with the fastest slowest stage under 1F1B, with each stage's best policy."""
    stages = _Stages(problem=problem, token_split=token_split)
    layers_of = split_lazily(problem.num_layers, problem.num_stages, stages.time)
    if layers_of is None:
        return JointPlan(status=SolveStatus.INFEASIBLE, conflict=stages.explain())
    policies = tuple(stages.policy(s, n, break_ties=True) for s, n in enumerate(layers_of))
    stage_times = (stages.time(s, n) for s, n in enumerate(layers_of))
    times = tuple(time for time in stage_times if time is not None)
    return JointPlan(
        status=SolveStatus.OPTIMAL,
        layers=layers_of,
        stage_s=times,
        policies=policies,
        cooldown_s=tuple(
            cooldown_seconds(problem.costs, policies[s], times, s, n, problem.num_batches)
            for s, n in enumerate(layers_of)
        ),
    )


@dataclass(slots=True, kw_only=True)
class _Stages:
    """Stage times and policies, solved when first asked for."""

    problem: JointProblem
    token_split: bool
    solved: dict[tuple[int, int], HeuSolution] = field(default_factory=dict)

    def policy(self, stage: int, layers: int, break_ties: bool = False) -> HeuSolution:
        """Returns the best policy of ``stage`` with ``layers`` layers, or why there is none.

        ``break_ties`` solves again, for the one that recomputes least: for the answer only.
        """
        if (stage, layers) not in self.solved or break_ties:
            problem = self.problem
            extra = problem.extra_static[stage] if problem.extra_static else 0
            instance = HeuInstance(
                ops=problem.costs.ops,
                need=problem.costs.need,
                windows=problem.costs.windows,
                num_layers=layers,
                num_batches=min(problem.num_stages - stage, problem.num_batches),
                static=problem.layer_static * layers + extra,
                budget=problem.budgets[stage],
                forward_windows=stage < problem.num_stages - 1,
            )
            self.solved[stage, layers] = solve_heu(
                instance, token_split=self.token_split, break_ties=break_ties
            )
        return self.solved[stage, layers]

    def time(self, stage: int, layers: int) -> float | None:
        """Returns the time of one micro-batch on ``stage``; None when the layers do not fit."""
        policy = self.policy(stage, layers)
        if not policy.status.has_solution:
            return None
        costs, extra_s = self.problem.costs, self.problem.extra_time
        layer_s = costs.forward_s + costs.backward_s + policy.critical_time
        return layers * layer_s + (extra_s[stage] if extra_s else 0)

    def explain(self) -> str:
        """Says why no split fits: for one stage, else for all of them together."""
        capacities = []
        for stage in range(self.problem.num_stages):
            time_of = functools.partial(self.time, stage)
            capacities.append(_capacity(time_of, math.inf, 1, self.problem.num_layers))
            conflict = self.policy(stage, 1).conflict
            if capacities[-1] == 0 and conflict is not None:
                return f"stage {stage} with a single layer: {conflict.message}"
        return (
            f"num_layers: {self.problem.num_layers} layers, but the stages' memory holds "
            f"{' + '.join(map(str, capacities))} = {sum(capacities)}; raise the budgets or add "
            "stages"
        )


def cooldown_seconds(
    costs: LayerCosts,
    policy: HeuSolution,
    stage_s: Sequence[float],
    stage: int,
    num_layers: int,
    num_batches: int,
) -> float:
    """Returns the recomputation of phases 1 and 2 that cool-down exposes on ``stage``, per step.

    The last p - 1 - r micro-batches of rank r have no forward of another one to hide in. Their
    backwards arrive at the pace of the slowest later stage, so the rank stalls between them; what
    is longer than the stall lies on the critical path.
    """
    num_exposed = min(len(stage_s) - 1 - stage, num_batches)
    if num_exposed == 0:
        return 0.0
    parts = [part for window in policy.windows[:2] for part in window]
    recompute_s = num_layers * sum(costs.ops.times[part.op] * part.fraction for part in parts)
    backward_s = num_layers * (costs.backward_s + policy.critical_time)
    stall_s = max(0.0, max(stage_s[stage + 1 :]) - backward_s)
    return num_exposed * max(0.0, recompute_s - stall_s)


def split_lazily(num_layers: int, num_stages: int, stage_s: StageTime) -> tuple[int, ...] | None:
    """Finds the split with the fastest slowest stage from few stage times; None = nothing fits.

    Exact for stage times as :data:`StageTime` requires. From a first split, look for one whose
    stages are all faster than the slowest so far, until there is none.
    """
    if num_layers < num_stages:
        return None
    stage_s = functools.cache(stage_s)
    best: tuple[int, ...] | None = None
    slowest_s = math.inf
    guesses = [-(-num_layers // num_stages)] * num_stages
    while True:
        capacities = [
            _capacity(functools.partial(stage_s, stage), slowest_s, guesses[stage], num_layers)
            for stage in range(num_stages)
        ]
        if min(capacities) < 1 or sum(capacities) < num_layers:
            return best
        best = _fill(capacities, num_layers)
        times = [stage_s(stage, layers) for stage, layers in enumerate(best)]
        slowest_s = max(time for time in times if time is not None)
        guesses = list(best)


def _capacity(time_of: Callable[[int], float | None], limit: float, guess: int, most: int) -> int:
    """Returns the largest number of layers up to ``most`` whose time is below ``limit``."""

    def fits(layers: int) -> bool:
        time = time_of(layers)
        return time is not None and time < limit

    layers = min(guess, most)
    while layers > 0 and not fits(layers):
        layers -= 1
    while layers < most and fits(layers + 1):
        layers += 1
    return layers


def _fill(capacities: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Splits as evenly as the capacities allow, a layer or more each, less to earlier stages."""
    layers_of = [1] * len(capacities)
    for _ in range(num_layers - len(capacities)):
        open_stages = [s for s, most in enumerate(capacities) if layers_of[s] < most]
        target = min(open_stages, key=lambda s: (layers_of[s], -s))
        layers_of[target] += 1
    return tuple(layers_of)
