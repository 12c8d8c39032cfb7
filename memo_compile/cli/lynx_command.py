"""``memo lynx heu|opt`` and ``memo stages``: Lynx's programs over JSON files, JSON out."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from memo_compile.cli.options import EXIT_CODES, example
from memo_compile.cli.progress import working
from memo_compile.errors import InputError
from memo_compile.papers.lynx.fields import read_object, unwrap_instance
from memo_compile.papers.lynx.heu import solve_heu
from memo_compile.papers.lynx.joint import JointProblem, plan_stages
from memo_compile.papers.lynx.lynx_instance import HeuInstance, OptInstance, StageTimes
from memo_compile.papers.lynx.opt import solve_opt
from memo_compile.papers.lynx.partition import split_exact, split_paper
from memo_compile.papers.lynx.solution import Conflict, HeuSolution, Part
from memo_compile.planners.solver import SolveStatus

lynx = typer.Typer(help="Recomputation overlapped with communication (Lynx).")

InstanceFile = Annotated[Path, typer.Argument(metavar="FILE.json", help="The instance.")]
TokenSplit = Annotated[
    bool, typer.Option("--token-split", help="Cut operators along tokens to fit a window.")
]
TimeLimit = Annotated[float, typer.Option(help="Seconds for the solver.", min=0.0)]
AsJson = Annotated[bool, typer.Option("--json", help="Accepted: the output is always JSON.")]


@lynx.command(name="heu", epilog=example("lynx heu layer.json"))
def heu(
    file: InstanceFile,
    token_split: TokenSplit = False,
    time_limit: TimeLimit = math.inf,
    as_json: AsJson = False,
) -> None:
    """What one layer keeps, and in which of five phases it recomputes the rest."""
    instance = HeuInstance.from_json(read_object(file))
    with working("choosing what a layer keeps"):
        solution = solve_heu(instance, token_split=token_split, time_limit_s=time_limit)
    _finish(
        solution.status,
        solution.conflict,
        {**_policy(solution, token_split), "recompute_time": solution.recompute_time},
    )


@lynx.command(name="opt", epilog=example("lynx opt graph.json --time-limit 60"))
def opt(
    file: InstanceFile,
    token_split: TokenSplit = False,
    time_limit: TimeLimit = math.inf,
    as_json: AsJson = False,
) -> None:
    """The best schedule of a small graph, with recomputation behind its communications."""
    instance = OptInstance.from_json(read_object(file))
    with working("searching the best schedule"):
        solution = solve_opt(instance, token_split=token_split, time_limit_s=time_limit)
    matrices = {"S": solution.resident, "Rc": solution.critical, "Ro": solution.overlapped}
    _finish(
        solution.status,
        solution.conflict,
        {
            "objective": solution.critical_time,
            "keep": list(solution.resident[-1]) if solution.resident else [],
            "windows": [_parts(parts, token_split) for parts in solution.windows],
            "peak_bytes": solution.peak,
            "schedule": {
                name: [[int(x) if x == int(x) else x for x in row] for row in matrix]
                for name, matrix in matrices.items()
            },
        },
    )


def stages(
    file: InstanceFile,
    method: Annotated[
        Literal["exact", "paper"], typer.Option(help="paper: the greedy, for ablation.")
    ] = "exact",
    token_split: TokenSplit = False,
    as_json: AsJson = False,
) -> None:
    """Split layers over pipeline stages so that the slowest stage is fastest.

    The file holds a table of stage times, or the operators of a layer (field `layer`): then each
    stage's recomputation policy is planned too.
    """
    data = unwrap_instance(read_object(file))
    if "layer" not in data:
        table = StageTimes.from_json(data)
        split = split_exact(table) if method == "exact" else split_paper(table)
        _require_split(split.status, split.conflict)
        _emit(split.status, {"objective": split.slowest, "layers": list(split.layers)})
        return
    if method == "paper":
        raise InputError("method: the paper's greedy needs a table of stage times")
    with working("planning stages"):
        plan = plan_stages(JointProblem.from_json(data), token_split=token_split)
    _require_split(plan.status, plan.conflict)
    body = {
        "objective": plan.slowest_s,
        "layers": list(plan.layers),
        "stage_times": list(plan.stage_s),
        "cooldown_times": list(plan.cooldown_s),
        "policies": [_policy(policy, token_split) for policy in plan.policies],
    }
    _emit(plan.status, body)


def _policy(solution: HeuSolution, token_split: bool) -> dict[str, Any]:
    return {
        "objective": solution.critical_time,
        "keep": [int(kept) for kept in solution.keep],
        "windows": [_parts(parts, token_split) for parts in solution.windows],
        "peak_bytes": solution.peak,
    }


def _parts(parts: Sequence[Part], token_split: bool) -> list[Any]:
    """Lists what a window recomputes: operators, or with ``token_split`` fractions of them."""
    if token_split:
        return [{"op": part.op, "fraction": part.fraction} for part in parts]
    return [part.op for part in parts]


def _finish(status: SolveStatus, conflict: Conflict | None, body: dict[str, Any]) -> None:
    """Prints the answer, or why there is none, and leaves with the exit code of ``status``."""
    if conflict is not None:
        print(f"memo: infeasible: {conflict.message}", file=sys.stderr)
        body = {
            "conflict": {
                "constraint": conflict.constraint,
                "message": conflict.message,
                "floor_bytes": conflict.floor,
                "budget_bytes": conflict.budget,
            }
        }
    elif not status.has_solution:
        print(f"memo: no answer: {status.value}; raise --time-limit", file=sys.stderr)
        body = {}
    _emit(status, body)


def _require_split(status: SolveStatus, conflict: str) -> None:
    """Where there is no split, prints why and leaves with exit code 1."""
    if status is SolveStatus.INFEASIBLE:
        print(f"memo: infeasible: {conflict}", file=sys.stderr)
        _emit(status, {"conflict": conflict})


def _emit(status: SolveStatus, body: dict[str, Any]) -> None:
    print(json.dumps({"status": status.value, **body}))
    if code := EXIT_CODES[status.value]:
        raise typer.Exit(code)
