"""What slices of recomputations in windows gain at most: ``python -m benchmarks.window_slices``.

memo moves a recomputation into the windows of collectives whole. Here each one of a planned step of
tensor parallel layers is cut into ``--slices`` parts that take equal times, cost no launches and no
memory, and may each run in another window: no slices of tokens can gain more. What is printed is
the step's simulated time so over that with whole recomputations, where memory does not count for
either, and over the plan's own.

Nothing is copied to the host, so that recomputation is all that saves memory. Nothing is run.
"""

import argparse
import math
import sys
from dataclasses import replace
from typing import Any

from benchmarks import harness
from memo_compile.step.timed import TimedProgram
from memo_compile.units import format_seconds

NAME = "window_slices"
UNLIMITED = 1 << 62
FLOORS = 1.05
"""Times its floor is the budget of a policy that does not fit the one that is wanted."""


def main() -> int:
    """Plan each shape in each way, print the table, write the results."""
    made = harness.parser(__doc__)
    made.add_argument("--shapes", nargs="+", default=["gpt-1.3b"])
    made.add_argument("--layers", type=int, default=6)
    made.add_argument("--tokens", type=int, default=2048)
    made.add_argument("--gpu", default="a100")
    made.add_argument("--links", type=float, nargs="+", default=[10e9, 30e9])
    made.add_argument("--slices", type=int, default=16)
    made.add_argument("--policies", nargs="+", default=["full-recompute", "lynx-heu"])
    made.add_argument("--room", type=float, default=0.85, help="budget over what keeping all takes")
    options = made.parse_args()
    return harness.run_benchmark(NAME, options, measure, measure)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of every shape, link and policy."""
    rows = [
        {"shape": shape, "link": link, "policy": policy, **_bound(options, shape, link, policy)}
        for shape in options.shapes
        for link in options.links
        for policy in options.policies
    ]
    show(rows)
    settings = ("layers", "tokens", "gpu", "slices", "room")
    return {
        "settings": {key: getattr(options, key) for key in settings},
        "rows": rows,
        "failures": [],
        "note": "",
    }


def _bound(options: argparse.Namespace, shape: str, link: float, policy: str) -> dict[str, float]:
    """Simulated seconds of the plan, and of its recomputations whole and in slices."""
    from memo_compile.errors import Infeasible
    from memo_compile.planners.recompute_windows import filled, window_recompute_s
    from memo_compile.step.problem import CallKind
    from memo_compile.step.simulate import simulate

    given: dict[str, Any] = {"policy": policy}
    if policy != "full-recompute":
        keeps = _planned(options, shape, link, {"policy": "save"})
        given["memory_budget"] = int(options.room * keeps.plan.peak_bytes)
    try:
        step = _planned(options, shape, link, given)
    except Infeasible as error:
        given["memory_budget"] = int(FLOORS * (error.floor_bytes or 0))
        step = _planned(options, shape, link, given)
    problem, costs = _on_demand(step.problem), step.costs
    whole = filled(TimedProgram(problem, costs), limit_bytes=UNLIMITED).problem
    parts, whole_of = _in_slices(problem, options.slices)
    seconds = {part: costs.region_s[of] / options.slices for part, of in whole_of.items()}
    costs_of_parts = replace(costs, region_s={**costs.region_s, **seconds})
    sliced = filled(TimedProgram(parts, costs_of_parts), limit_bytes=UNLIMITED).problem
    return {
        "plan_s": simulate(step.problem, costs).step_s,
        "on_demand_s": simulate(problem, costs).step_s,
        "whole_s": simulate(whole, costs).step_s,
        "sliced_s": simulate(sliced, costs_of_parts).step_s,
        "in_windows_s": window_recompute_s(step.problem, costs),
        "recompute_s": math.fsum(
            costs.call_s(call) for call in problem.calls if call.kind is CallKind.RECOMPUTE
        ),
        "exposed_s": simulate(step.problem, costs).exposed_comm_s,
    }


def _planned(options: argparse.Namespace, shape: str, link: float, given: dict[str, Any]) -> Any:
    """The step of one device, and its costs."""
    from memo_compile.config import resolve
    from memo_compile.costs.hardware import find_hardware
    from memo_compile.offline.plan_offline import plan_step_offline

    model, arguments = harness.fake_stage(shape, layers=options.layers, tokens=options.tokens)
    _reduce(model)
    every = {"comm_bytes_per_s": link, "host_budget": 0, "token_tiles": 1, **given}
    hardware = find_hardware(options.gpu)
    return plan_step_offline(model, arguments, {}, config=resolve(every, None), hardware=hardware)


def _reduce(model: Any) -> None:
    """What attention and MLP of each layer make is summed over ranks, and their inputs' gradients.

    The layers are as large as one device's share of a model that is as many times as large.
    """
    import torch
    from torch import nn

    from memo_compile.offline.shapes.parallel import GROUP

    def summed(x: Any) -> Any:
        total = torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", GROUP)
        return torch.ops._c10d_functional.wait_tensor(total)

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return summed(grads[0])

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return summed(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    class Shared(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any, *others: Any) -> Any:
            return Leave.apply(self.inner(Enter.apply(x), *others))

    for layer in model.layers:
        layer.attention, layer.mlp = Shared(layer.attention), Shared(layer.mlp)


def _on_demand(problem: Any) -> Any:
    """``problem`` with each recomputation right before the first call that reads it."""
    from memo_compile.step.problem import CallKind

    waiting: dict[str, Any] = {}
    calls: list[Any] = []

    def needed(call: Any) -> None:
        for value in call.inputs:
            if value in waiting:
                maker = waiting[value]
                for made in maker.outputs:
                    del waiting[made]
                needed(maker)
                calls.append(maker)

    for call in problem.calls:
        if call.kind is CallKind.RECOMPUTE and not call.into:
            waiting.update(dict.fromkeys(call.outputs, call))
            continue
        needed(call)
        calls.append(call)
    return replace(problem, calls=tuple(calls))


def _in_slices(problem: Any, count: int) -> tuple[Any, dict[str, str]]:
    """Divides each recomputation into ``count`` calls, of which the last has its results.

    Returns the problem, and for each new region the region that it is a slice of.
    """
    from memo_compile.step.problem import CallKind

    regions, whole_of, calls = dict(problem.regions), dict[str, str](), list[Any]()
    for call in problem.calls:
        if call.kind is not CallKind.RECOMPUTE or call.into:
            calls.append(call)
            continue
        part, last = f"{call.region}.slice", f"{call.region}.last"
        profile = problem.regions[call.region]
        regions[part] = replace(profile, name=part, outputs=(), output_layouts=())
        regions[last] = replace(profile, name=last)
        whole_of |= {part: call.region, last: call.region}
        calls += [
            replace(call, name=f"{call.name}.{number}", region=part, outputs=())
            for number in range(count - 1)
        ]
        calls.append(replace(call, region=last))
    return replace(problem, regions=regions, calls=tuple(calls)), whole_of


def show(rows: list[dict[str, Any]]) -> None:
    """Steps over one another."""
    table = [
        (
            row["shape"],
            f"{row['link'] / 1e9:g} GB/s",
            row["policy"],
            format_seconds(row["plan_s"]),
            format_seconds(row["exposed_s"]),
            format_seconds(row["recompute_s"]),
            format_seconds(row["in_windows_s"]),
            f"{row['plan_s'] / row['on_demand_s']:.3f}",
            f"{row['sliced_s'] / row['whole_s']:.3f}",
            f"{row['sliced_s'] / row['plan_s']:.3f}",
        )
        for row in rows
    ]
    columns = ("shape", "link", "policy", "plan", "waits", "recomputes", "in windows")
    columns += ("/ on demand", "sliced / whole", "sliced / plan")
    harness.print_table("slices of recomputation in windows, at best, simulated", columns, table)


if __name__ == "__main__":
    sys.exit(main())
