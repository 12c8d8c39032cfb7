"""Layers that gather their sharded weights, simulated: ``python -m benchmarks.sharded_weights``.

A model of a named shape on one of ``--ranks`` GPUs, each of which has a part of every weight. The
layers gather their weights themselves, so that the collectives are in the graph. Nothing is run:
the figures are those of memo's plans, with a link of ``--link`` bytes per second.

    at once      every collective is waited for right behind its beginning (``comm_windows=False``)
    ahead        gathers run ahead of their layer, and scattered gradients are held
    at its peak  the same within the memory of the step that waits at once
    budget       the same within ``--room`` of that memory, its weights gathered again or not

It passes when ``ahead`` is never slower than ``at once``, and ``budget`` holds its budget.
"""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks import harness
from memo_compile.units import format_bytes, format_seconds

NAME = "sharded_weights"


def main() -> int:
    """Plan each shape in each way, print the table, write the results, judge."""
    made = harness.parser(__doc__)
    made.add_argument("--shapes", nargs="+", default=["gpt-1.3b"])
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--tokens", type=int, default=4096)
    made.add_argument("--ranks", type=int, default=8)
    made.add_argument("--gpu", default="h100")
    made.add_argument("--links", type=float, nargs="+", default=[50e9, 200e9])
    made.add_argument("--room", type=float, default=0.9)
    options = made.parse_args()
    return harness.run_benchmark(NAME, options, measure, measure)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of every shape and link."""
    rows = [
        {"shape": shape, "link": link, "arms": _arms(options, shape, link)}
        for shape in options.shapes
        for link in options.links
    ]
    show(rows)
    settings = ("layers", "tokens", "ranks", "gpu", "room")
    failures = [text for row in rows for text in judge(row)]
    return {
        "settings": {key: getattr(options, key) for key in settings},
        "rows": rows,
        "failures": failures,
        "note": "",
    }


def _arms(options: argparse.Namespace, shape: str, link: float) -> dict[str, dict[str, Any]]:
    first = _planned(options, shape, link, {"comm_windows": False})
    peak_bytes = first["peak_bytes"]
    budget = int(options.room * peak_bytes)
    return {
        "at once": first,
        "ahead": _planned(options, shape, link, {}),
        "at its peak": _planned(options, shape, link, {"memory_budget": peak_bytes}),
        "budget": {
            **_planned(options, shape, link, {"memory_budget": budget}),
            "budget_bytes": budget,
        },
    }


def _planned(
    options: argparse.Namespace, shape: str, link: float, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The figures of one plan."""
    import memo_compile

    model, arguments = harness.fake_stage(shape, layers=options.layers, tokens=options.tokens)
    with arguments[0].fake_mode:
        _shard(model, options.ranks)
    every = {"comm_bytes_per_s": link, "optimizer_state_bytes_per_parameter": 0, **given}
    plan = memo_compile.plan(model, *arguments, options=every, hardware=options.gpu)
    names = ("step_s", "compute_s", "exposed_comm_s", "hidden_comm_s", "peak_bytes")
    figures = {name: getattr(plan, name) for name in (*names, "num_collectives")}
    moved = {name: getattr(plan, name) for name in ("recomputed_bytes", "offloaded_bytes")}
    return {**figures, **moved}


def _shard(model: Any, ranks: int) -> None:
    """Each weight of a layer, and of the embedding and the head, is a rank's part."""
    from torch import nn
    from torch.nn.utils import parametrize

    from memo_compile.offline.shapes.parallel import GatherWeight

    class Whole(nn.Module):
        def forward(self, shard: Any) -> Any:
            return GatherWeight.apply(shard, ranks)

    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.shape[0] % ranks == 0:
                shard = parameter.detach()[: parameter.shape[0] // ranks].clone()
                module.register_parameter(name, nn.Parameter(shard))
                parametrize.register_parametrization(module, name, Whole(), unsafe=True)


def judge(row: Mapping[str, Any]) -> list[str]:
    """The promises that do not hold, as sentences."""
    arms, what, failures = row["arms"], f"{row['shape']} at {row['link']:g}", []
    if arms["ahead"]["step_s"] > arms["at once"]["step_s"]:
        failures.append(f"{what}: to gather ahead is slower than at once")
    if arms["budget"]["peak_bytes"] > arms["budget"]["budget_bytes"]:
        failures.append(f"{what}: the budget is not held")
    return failures


def show(rows: list[dict[str, Any]]) -> None:
    """Step over that of at once, communication that is seen, and peak."""
    table = [
        (
            row["shape"],
            f"{row['link'] / 1e9:g} GB/s",
            name,
            f"{arm['step_s'] / row['arms']['at once']['step_s']:.3f}",
            format_seconds(arm["exposed_comm_s"]),
            format_seconds(arm["hidden_comm_s"]),
            format_bytes(arm["peak_bytes"]),
            str(arm["num_collectives"]),
        )
        for row in rows
        for name, arm in row["arms"].items()
    ]
    columns = ("shape", "link", "way", "step", "seen", "hidden", "peak", "collectives")
    harness.print_table("sharded weights that layers gather, simulated", columns, table)


if __name__ == "__main__":
    sys.exit(main())
