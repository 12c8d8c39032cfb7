"""Tries a row: its gradients beside eager's, whether memo planned it, its smallest budget."""

import contextlib
import datetime
import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import memo_compile
from memo_compile.errors import Infeasible
from memo_compile.reporting import state
from tests.models import ModelCase
from tests.numerics import closeness
from tests.numerics.closeness import Reference
from tests.numerics.training import FLOOR, Optimizer
from tests.works_with.makers import deterministic
from tests.works_with.row import Row

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"debug": "poison", "costs": "roofline"}
STEPS = 2
MAX_REFUSALS = 6
"""A model in several graphs is refused for each of them, and names a larger budget each time."""
ABOVE_FLOOR = 1.05
"""Of a floor: the budget that steps run in. A plan at the floor itself takes five times as long."""
RELATIVE = 1e-4
"""Of a gradient's largest entry: what is allowed where a model cannot run in float64."""
Tried = dict[str, Any]


_unplanned: list[int] = []
"""After each step of an optimizer: how many forwards ran without a plan so far."""


def _noting(optimizer: Optimizer) -> Optimizer:
    """``optimizer``, of which each step adds to ``_unplanned``."""

    def made(model: nn.Module) -> torch.optim.Optimizer:
        noting = optimizer(model)
        noting.register_step_post_hook(
            lambda *_: _unplanned.append(memo_compile.report().unplanned_steps)
        )
        return noting

    return made


def _beside(case: ModelCase, optimizer: Optimizer) -> tuple[Reference, float]:
    """The steps in eager, and what gradients may be off beside what eager is off float64.

    Packed weights do not run in float64, nor do kernels of one type: there eager is what is right.
    """
    optimizer = _noting(optimizer)
    try:
        reference = Reference(case, [optimizer], STEPS)
        assert all(loss.isfinite() for loss in reference.exact.losses)
        return reference, FLOOR
    except Exception:
        with mock.patch.object(closeness, "in_float64", lambda case: case):
            return Reference(case, [optimizer], STEPS), RELATIVE


def tried(row: Row, *, lowering: str = "aten", finds_floor: bool = True) -> Tried:
    """What is written down of a row. A fault of memo's is an outcome; one of eager's is raised."""
    began = time.monotonic()
    with contextlib.chdir(ROOT), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of other packages
        outcome = _example(row) if row.example else _model(row, lowering, finds_floor)
    return {
        **outcome,
        "versions": versions(row),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "lowering": "aten" if row.example else lowering,
        "seconds": round(time.monotonic() - began),
    }


def versions(row: Row) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", *row.packages)}


def _model(row: Row, lowering: str, finds_floor: bool) -> Tried:
    assert row.make is not None
    torch.manual_seed(0)
    model, inputs, loss = row.make()
    beside = _beside((deterministic(model), inputs, loss), row.optimizer)
    options = {**OPTIONS, "lowering": lowering}
    outcome = _run(*beside, options)
    if finds_floor:
        outcome |= _floor(*beside, options) if outcome["active"] else {"bounded": False}
    return outcome


def _run(reference: Reference, relative: float, options: Mapping[str, Any]) -> Tried:
    """Two steps without a bound, or within one."""
    torch._dynamo.reset()
    state.reset()
    _unplanned.clear()
    compiled = functools.partial(torch.compile, backend="memo", options=options)
    try:
        ours = reference.train(compiled)
    except Infeasible:
        raise
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        return {"right": None, "active": False, "note": f"{type(error).__name__}: {text[0]}"}
    fault = ""
    try:
        reference.assert_close(ours, relative)
    except AssertionError as error:
        fault = str(error).partition("\n")[0] or "other parameters have gradients"
    report = memo_compile.report()
    plans = [*report.plans, *report.groups]
    before = _unplanned[0] if len(report.plans) > 1 else 0  # its graphs are watched first
    is_active = report.active and _unplanned[-1] == before
    return {
        "right": not fault,
        "active": is_active,
        "peak_bytes": max((plan.peak_bytes for plan in plans), default=0),
        "graphs": len(report.plans),
        "layers": [cls.num_layers for plan in report.plans for cls in plan.layer_classes],
        "note": fault,
        "notes": [] if is_active else list(report.notes),
    }


def _floor(reference: Reference, relative: float, options: Mapping[str, Any]) -> Tried:
    """The smallest budget that memo names, and whether steps close to it are right and keep it."""
    budget = floor = 1
    for _ in range(MAX_REFUSALS):
        try:
            outcome = _run(reference, relative, {**options, "memory_budget": budget})
        except Infeasible as refused:
            if refused.floor_bytes is None:
                return {"bounded": False, "note": str(refused)}
            floor = refused.floor_bytes
            budget = int(ABOVE_FLOOR * floor)
            continue
        kept = outcome["active"] and 0 < outcome["peak_bytes"] <= budget
        found = {"bounded": kept, "floor_bytes": floor}
        if not (kept and outcome["right"]):
            found |= {"right": outcome["right"], "note": f"near its floor: {outcome['note']}"}
            found["notes"] = outcome.get("notes", [])
        return found
    return {"bounded": False, "note": f"refused {MAX_REFUSALS} times"}


def _example(row: Row) -> Tried:
    """An example fails where losses part, memo is not active, or its budget is not kept."""
    done = run_example(*row.example)
    is_good = done.returncode == 0 and "of eager's" in done.stdout
    faults = [line for line in done.stdout.splitlines() if line.startswith("FAULT: ")]
    last = (done.stderr.strip().splitlines() or [""])[-1]
    budgets = re.findall(r", budget ([\d,]+) B", done.stdout)
    return {
        "right": is_good or bool(faults and not any("losses differ" in fault for fault in faults)),
        "active": is_good or bool(faults and not any("not active" in fault for fault in faults)),
        "bounded": is_good,
        "note": "" if is_good else (faults or [last])[0],
        "budget_bytes": int(budgets[0].replace(",", "")) if budgets else None,
    }


def run_example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program of examples/tools in a process of its own, op by op, without a network."""
    folder = ROOT / "examples" / "tools"
    paths = [str(ROOT), str(ROOT / "runtime"), os.environ.get("PYTHONPATH", "")]
    environment = {
        "MEMO_LOWERING": "aten",  # what is compiled is not the point, and takes minutes
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [sys.executable, str(folder / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
