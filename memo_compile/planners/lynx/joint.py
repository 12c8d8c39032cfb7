"""Layers over stages together with each stage's recomputation policy.

A stage's time with some number of layers is that of the best policy which fits its memory, found by
HEU. Only the stage times that decide are ever computed: the split is found by asking how many
layers each stage can take within a limit, and the limit shrinks to the optimum.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memo_compile.errors import InputError
from memo_compile.planners.lynx.heu import solve_heu
from memo_compile.planners.lynx.layer import LayerCosts
from memo_compile.planners.lynx.solution import HeuSolution
from memo_compile.planners.solver import SolveStatus

StageTime = Callable[[int, int], float | None]
"""Seconds of a stage with a number of layers; None = out of memory. It must not shrink when layers
are added, and more layers must never fit where fewer did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointPlan:
    """Layers and policy of each stage."""

    status: SolveStatus
    layers: tuple[int, ...] = ()
    stage_s: tuple[float, ...] = ()
    """Seconds of one micro-batch's forward and backward on each stage."""
    policies: tuple[HeuSolution, ...] = ()
    cooldown_s: tuple[float, ...] = ()
    """Per stage what cool-down adds to a step, see :func:`cooldown_seconds`."""
    num_solves: int = 0
    conflict: str = ""

    @property
    def slowest_s(self) -> float:
        """What the pipeline's steady state runs at."""
        return max(self.stage_s)


def plan_stages(
    costs: LayerCosts,
    *,
    num_layers: int,
    num_stages: int,
    num_batches: int,
    layer_static_bytes: float,
    budgets: Sequence[float],
    token_split: bool = False,
) -> JointPlan:
    """The split with the fastest slowest stage under 1F1B, each stage with its optimal policy.

    Stage r holds min(p - r, num_batches) micro-batches; the last stage has no forward windows.

    Raises:
        InputError: a size is below 1, more stages than layers, or not one budget per stage.
    """
    sizes = {"num_layers": num_layers, "num_stages": num_stages, "num_batches": num_batches}
    for name, value in sizes.items():
        if value < 1:
            raise InputError(f"{name}: expected at least 1, got {value}")
    if num_stages > num_layers:
        raise InputError(f"num_stages: {num_stages} stages for {num_layers} layers")
    if len(budgets) != num_stages:
        raise InputError(f"budgets: expected {num_stages} entries, got {len(budgets)}")
    solved: dict[tuple[int, int], HeuSolution] = {}

    def policy(stage: int, layers: int, break_ties: bool = False) -> HeuSolution:
        if (stage, layers) not in solved or break_ties:
            instance = costs.instance(
                num_layers=layers,
                num_batches=min(num_stages - stage, num_batches),
                static_bytes=layer_static_bytes * layers,
                budget_bytes=budgets[stage],
                forward_windows=stage < num_stages - 1,
            )
            solved[stage, layers] = solve_heu(
                instance, token_split=token_split, break_ties=break_ties
            )
        return solved[stage, layers]

    def stage_s(stage: int, layers: int) -> float | None:
        found = policy(stage, layers)
        if not found.status.has_solution:
            return None
        return layers * (costs.forward_s + costs.backward_s + found.critical_time)

    layers_of = split_lazily(num_layers, num_stages, stage_s)
    num_solves = len(solved)
    if layers_of is None:
        return JointPlan(
            status=SolveStatus.INFEASIBLE,
            num_solves=num_solves,
            conflict=f"num_layers: {num_layers} layers do not fit {num_stages} stages' memory",
        )
    policies = tuple(policy(s, n, break_ties=True) for s, n in enumerate(layers_of))
    known = [stage_s(s, n) for s, n in enumerate(layers_of)]
    times = tuple(time for time in known if time is not None)
    return JointPlan(
        status=SolveStatus.OPTIMAL,
        layers=layers_of,
        stage_s=times,
        policies=policies,
        cooldown_s=tuple(
            cooldown_seconds(costs, policies[s], times, s, n, num_batches)
            for s, n in enumerate(layers_of)
        ),
        num_solves=num_solves + num_stages,
    )


def cooldown_seconds(
    costs: LayerCosts,
    policy: HeuSolution,
    stage_s: Sequence[float],
    stage: int,
    num_layers: int,
    num_batches: int,
) -> float:
    """Recomputation of phases 1 and 2 that cool-down exposes on ``stage``, per step.

    The last p - 1 - r micro-batches of rank r have no forward of another one to hide in. Their
    backwards arrive at the pace of the slowest later stage, so the rank stalls between them; what
    is longer than the stall lies on the critical path.
    """
    late = min(len(stage_s) - 1 - stage, num_batches)
    if late == 0:
        return 0.0
    parts = [part for window in policy.windows[:2] for part in window]
    early = num_layers * sum(costs.ops.times[part.op] * part.fraction for part in parts)
    own = num_layers * (costs.backward_s + policy.critical_time)
    stall = max(0.0, max(stage_s[stage + 1 :]) - own)
    return late * max(0.0, early - stall)


def split_lazily(num_layers: int, num_stages: int, stage_s: StageTime) -> tuple[int, ...] | None:
    """The split with the fastest slowest stage, asking for few stage times; None = nothing fits.

    Exact for stage times as :data:`StageTime` requires. From a first split, look for one whose
    stages are all faster than the slowest so far, until there is none.
    """
    if num_layers < num_stages:
        return None
    cache: dict[tuple[int, int], float | None] = {}

    def time_of(stage: int, layers: int) -> float | None:
        if (stage, layers) not in cache:
            cache[stage, layers] = stage_s(stage, layers)
        return cache[stage, layers]

    best: tuple[int, ...] | None = None
    limit = float("inf")
    start = [-(-num_layers // num_stages)] * num_stages
    while True:
        capacity = [
            _capacity(functools.partial(time_of, stage), limit, start[stage], num_layers)
            for stage in range(num_stages)
        ]
        if min(capacity) < 1 or sum(capacity) < num_layers:
            return best
        best = _fill(capacity, num_layers)
        times = [time_of(stage, layers) for stage, layers in enumerate(best)]
        limit = max(time for time in times if time is not None)
        start = list(best)


def _capacity(time_of: Callable[[int], float | None], limit: float, start: int, most: int) -> int:
    """The largest number of layers up to ``most`` whose time is below ``limit``, from a guess."""

    def fits(layers: int) -> bool:
        time = time_of(layers)
        return time is not None and time < limit

    layers = min(start, most)
    if fits(layers):
        while layers < most and fits(layers + 1):
            layers += 1
        return layers
    while layers > 0 and not fits(layers):
        layers -= 1
    return layers


def _fill(capacity: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """As even a split as the capacities allow, each stage with a layer, earlier stages less."""
    layers_of = [1] * len(capacity)
    for _ in range(num_layers - len(capacity)):
        open_stages = [s for s, most in enumerate(capacity) if layers_of[s] < most]
        target = min(open_stages, key=lambda s: (layers_of[s], -s))
        layers_of[target] += 1
    return tuple(layers_of)
