"""``memo search`` and ``memo calibrate``: which configuration is fastest, and how sure that is."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from memo_compile.cli.options import AsJson, Count, Hardware, Model, format_table
from memo_compile.cli.progress import working
from memo_compile.costs.hardware import HardwareProfile, find_hardware
from memo_compile.costs.models import find_model
from memo_compile.papers.search.calibrate import calibrate, read_cost_model
from memo_compile.papers.search.cost import CostModel
from memo_compile.papers.search.measurements import read_measurements
from memo_compile.papers.search.ranking import COLUMNS, SearchQuestion, search
from memo_compile.papers.search.report import write_search_report
from memo_compile.units import format_seconds, parse_budget


def search_command(
    model: Model,
    gpus: Count,
    seq: Count,
    global_batch: Count,
    hardware: Hardware = "h800",
    budget: Annotated[
        str | None, typer.Option(help="Device memory of a step; default 79.3% of the device's.")
    ] = None,
    measurements: Annotated[
        Path | None,
        typer.Option(help="Measured runs (CSV), or what `memo calibrate --json` printed (JSON)."),
    ] = None,
    top: Annotated[int, typer.Option(help="How many configurations.", min=1)] = 20,
    report: Annotated[Path | None, typer.Option(help="Also write an HTML report.")] = None,
    as_json: AsJson = False,
) -> None:
    """Rank tp x cp x pp x dp x layers per chunk x checkpoint policy x alpha by predicted time."""
    device = find_hardware(hardware)
    question = SearchQuestion(
        shape=find_model(model),
        gpus=gpus,
        seq=seq,
        global_batch=global_batch,
        hardware=device,
        budget_bytes=None
        if budget is None
        else parse_budget(budget, total_bytes=device.memory_bytes),
        model=_cost_model(measurements, device),
    )
    with working("comparing configurations"):
        result = search(question, top)
    if report is not None:
        write_search_report(report, question, result)
    if as_json:
        body = {
            "status": "optimal" if result.configurations else "infeasible",
            "num_points": result.num_points,
            "evaluation_s": result.evaluation_s,
            "configurations": [config.as_dict() for config in result.configurations],
        }
        print(json.dumps(body))
    elif result.configurations:
        print(format_table(COLUMNS, [config.cells() for config in result.configurations]))
    if not result.configurations:
        print(f"memo: infeasible: {result.conflict}", file=sys.stderr)
        raise typer.Exit(1)


def calibrate_command(
    file: Annotated[Path, typer.Argument(metavar="MEASUREMENTS.csv", help="Measured runs.")],
    hardware: Hardware = "h800",
    as_json: AsJson = False,
) -> None:
    """Fit the cost model's shares of nominal rates to measured runs."""
    runs = read_measurements(file)
    fit = calibrate(runs, find_hardware(hardware))
    fitted_runs = list(zip(runs, fit.measured_s, fit.predicted_s, fit.errors, strict=True))
    if as_json:
        rows = [
            {"measured_s": measured, "predicted_s": predicted, "error": error}
            for _, measured, predicted, error in fitted_runs
        ]
        print(json.dumps({"model": dataclasses.asdict(fit.model), "runs": rows}))
        return
    shares = [(name, f"{value:.4g}") for name, value in dataclasses.asdict(fit.model).items()]
    print(format_table(("share", "fitted"), shares))
    table = [
        (run.shape.name, format_seconds(measured), format_seconds(predicted), f"{error:+.1%}")
        for run, measured, predicted, error in fitted_runs
    ]
    print()
    print(format_table(("run", "measured", "predicted", "error"), table))


def _cost_model(measurements: Path | None, device: HardwareProfile) -> CostModel:
    if measurements is None:
        return CostModel()
    if measurements.suffix == ".json":
        return read_cost_model(measurements)
    return calibrate(read_measurements(measurements), device).model
