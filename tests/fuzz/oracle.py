"""Runs one case eagerly, precisely, under plain Inductor and under memo, and says what differs."""

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import memo_compile
from memo_compile.driver import layer_weights, tile_order
from memo_compile.errors import Infeasible
from memo_compile.passes import loss_gradient
from memo_compile.reporting import state
from memo_compile.step.plans import Plan
from memo_compile.training_state import sizes, update_pieces
from tests.fuzz import driver, judge
from tests.fuzz.case import Case
from tests.fuzz.driver import Record
from tests.fuzz.source import model_source

ASIDE = "runs through plain Inductor"
"""Stands in the report's note on a graph that got no plan."""


OP_BY_OP = "aot_eager_decomp_partition"
"""torch.compile's backend that does all that Inductor does before it lowers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that memo did wrong."""

    kind: str
    """``wrong``, ``exception``, ``shared memory``, ``over budget``, ``no plan under a budget``,
    ``aside by an error``; of the process ``crash`` and ``timeout``."""
    where: str
    """What tells it from others of its kind: the exception and its place, the sort of tensor."""
    detail: str
    options: Mapping[str, Any]
    """memo's, with the budget in bytes."""
    torch_too: bool = False
    """torch's own backend, in the same run, is wrong or raises as well."""
    aside: bool = False
    """memo planned nothing: plain Inductor ran."""

    @property
    def signature(self) -> str:
        return f"{self.kind}: {self.where}"

    @property
    def is_torchs(self) -> bool:
        """torch's own backend raises the same, or is what ran and is wrong by itself."""
        return self.torch_too and (self.kind == "exception" or self.aside)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one case."""

    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Runs, and runs that were planned, tiled, sliced, moved, recomputed, infeasible, aside, or
    that had optimizer state, gradients or weights on the host."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why memo stepped aside, and what torch itself got wrong."""
    invalid: str = ""
    """Why eager torch refuses the case: a fault of the generator."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "counts": dict(self.counts),
            "reasons": dict(self.reasons),
            "invalid": self.invalid,
            "seconds": self.seconds,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Outcome":
        findings = [Finding(**finding) for finding in data["findings"]]
        counts, reasons = Counter(data["counts"]), Counter(data["reasons"])
        return Outcome(**{**data, "findings": findings, "counts": counts, "reasons": reasons})


def run_case(case: Case) -> Outcome:
    """Everything that the case asks for, once. Raises nothing that memo or the model raises."""
    began = time.perf_counter()
    outcome = Outcome()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # torch's own, about the odd things that cases do
        path = Path(folder) / "fuzzed_model.py"
        path.write_text(model_source(case))
        try:
            arms = _Arms(case, _loaded(path))
        except Exception as error:
            outcome.invalid = f"{type(error).__name__}: {error}"[:500]
        else:
            with _no_size_limits() if has_no_size_limits(case) else contextlib.nullcontext():
                _run_memo(arms, outcome)
    torch._dynamo.reset()
    state.reset()
    outcome.seconds = time.perf_counter() - began
    return outcome


def has_no_size_limits(case: Case) -> bool:
    """True for every second case: what memo does to large tensors it does to small ones there."""
    return case.seed % 2 == 0


@contextlib.contextmanager
def _no_size_limits() -> Iterator[None]:
    with (
        mock.patch.object(loss_gradient, "MIN_BYTES", 0),
        mock.patch.object(tile_order, "HEAD_BYTES", 0),
        mock.patch.object(tile_order, "HEAD_FACTOR", 0),
        mock.patch.object(layer_weights, "LEAST_BYTES", 0),
        mock.patch.object(sizes, "LEAST_CHUNK_BYTES", 512),
        mock.patch.object(update_pieces, "SLICE_ELEMENTS", 128),
    ):
        yield


def _loaded(path: Path) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


class _Arms:
    """The runs that memo's are compared with, from the same start."""

    def __init__(self, case: Case, namespace: Mapping[str, Any]) -> None:
        self.case = case
        self._namespace = namespace
        self._dtype = getattr(torch, case.dtype)
        torch.manual_seed(case.seed)
        self._model: nn.Module = namespace["Model"]().to(case.device, self._dtype)
        self.eager = self._train(self._model, None)
        self._starts = self.eager.starts
        if case.dtype == "float64":
            self.exact = self.eager
            own = self.train_as(torch.float32)
        else:
            self.exact = self.train_as(torch.float64)
            own = self.eager
        self._torchs: dict[str, str] = {}
        self._judged = judged_dtype(case)
        self.allowed = judge.tolerances(self.exact.steps, own.steps, self._judged)

    def train_as(self, dtype: torch.dtype) -> Record:
        return self._train(copy.deepcopy(self._model).to(dtype), None)

    def _train(self, model: nn.Module, compile: driver.Compile | None, **more: Any) -> Record:
        """A run of a copy of ``model``; the first one tells with what all others start."""
        more["starts"] = getattr(self, "_starts", None)
        if compile is not None:
            more["compile"] = compile
        copied = copy.deepcopy(model)
        return driver.train(copied, self._namespace, self.case.run, self._dtype, **more)

    def compiled(self, **how: Any) -> Record:
        """A run with ``torch.compile(**how)``; raises what that raises."""
        torch._dynamo.reset()
        more, update = {}, self.case.run["offload"]
        if update is not None and how["backend"] == "memo":
            more["offload"] = functools.partial(memo_compile.offload, update=update)
        return self._train(self._model, functools.partial(torch.compile, **how), **more)

    def faults(self, record: Record) -> list[str]:
        return judge.faults(record.steps, self.exact.steps, self.eager.steps, self.allowed)

    @property
    def plain(self) -> str:
        """What is wrong with torch's own run of the same lowering; empty when nothing is.

        Plain Inductor, or Inductor's decompositions and partitioner, op by op.
        """
        lowered = self.case.options["lowering"] == "inductor"
        return self.torchs("inductor" if lowered else OP_BY_OP)

    def torchs(self, backend: str) -> str:
        """What is wrong with the run of torch's own ``backend``; empty when nothing is."""
        if backend not in self._torchs:
            self._torchs[backend] = self._wrong_with(backend)
        return self._torchs[backend]

    def _wrong_with(self, backend: str) -> str:
        try:
            found = self.faults(self.compiled(backend=backend))
        except Exception as error:
            return f"raises {type(_inner(error)).__name__}"
        return f"wrong {_sort(found[0])}" if found else ""


def judged_dtype(case: Case) -> str:
    source = model_source(case).split("class ", 1)[1]
    single = ".float()" in source or "float32" in source
    # In float32, whose last bit compilers leave to the device.
    single |= case.device != "cpu" and "linspace" in source
    return "float32" if single and case.dtype == "float64" else case.dtype


def _run_memo(arms: _Arms, outcome: Outcome) -> None:
    """memo without a budget, then with the case's budgets; what is refused, at the floor named."""
    case = arms.case
    if case.options["lowering"] == "inductor" and arms.plain:
        outcome.counts["plain inductor wrong"] += 1
    plans = _run(arms, outcome, dict(case.options))
    if not plans:
        return
    largest = max(plans, key=lambda plan: plan.peak_bytes)
    floors = set()
    for fraction in case.budgets:
        budget = largest.peak_bytes - int((1 - fraction) * largest.arena_bytes)
        floor = _run(arms, outcome, {**case.options, "memory_budget": budget})
        if isinstance(floor, int):
            budget = max(budget, floor + max(_kept_gradients(plan) for plan in plans))
            if budget not in floors:
                _run(arms, outcome, {**case.options, "memory_budget": budget})
            floors.add(budget)


def _kept_gradients(plan: Plan) -> int:
    """Bytes of gradients that existed before a backward; no plan knows them before it runs."""
    return plan.fixed.gradients - plan.fixed.new_gradients


def _run(arms: _Arms, outcome: Outcome, options: dict[str, Any]) -> tuple[Plan, ...] | int | None:
    """One run under memo: its plans; the floor of one that is infeasible; None after a fault."""
    state.reset()
    outcome.counts["runs"] += 1
    try:
        record = arms.compiled(backend="memo", options=options)
    except Exception as error:
        infeasible = _infeasible(error)
        if infeasible is None:
            outcome.findings.append(_raised(error, options, arms))
            return None
        outcome.counts["infeasible"] += 1
        return infeasible.floor_bytes
    report = memo_compile.report()
    _count(outcome, report.plans, report.notes)
    outcome.findings += _judged(arms, record, options, report.plans)
    return report.plans


def _infeasible(error: BaseException | None) -> Infeasible | None:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, Infeasible):
            return error
        seen.append(error)
        error = getattr(error, "inner_exception", None) or error.__cause__
    return None


def _raised(error: Exception, options: dict[str, Any], arms: _Arms) -> Finding:
    inner = _inner(error)
    frames = traceback.extract_tb(inner.__traceback__)
    ours = [frame for frame in frames if "memo_" in frame.filename] or frames
    place = f"{Path(ours[-1].filename).name}:{ours[-1].name}"
    return Finding(
        kind="exception",
        where=f"{type(inner).__name__} at {place}",
        detail="".join(traceback.format_exception(inner))[-3000:],
        options=options,
        torch_too=arms.plain == f"raises {type(inner).__name__}",
    )


def _inner(error: BaseException) -> BaseException:
    """What a backend raised, without Dynamo's wrapping."""
    return getattr(error, "inner_exception", None) or error


def _judged(
    arms: _Arms, record: Record, options: dict[str, Any], plans: tuple[Plan, ...]
) -> list[Finding]:
    make = functools.partial(Finding, options=options)
    found = []
    if faults := arms.faults(record):
        where = _sort(faults[0])
        detail = "\n".join(faults[:12])
        plain = arms.plain if plans else arms.torchs("inductor")
        more = {"torch_too": bool(plain), "aside": not plans}
        found.append(make(kind="wrong", where=where, detail=detail, **more))
    are_same_kernels = arms.case.device == "cpu" or arms.case.run["offload"] == "device"
    if wrong := judge.wrong_updates(
        record.updates, judged_dtype(arms.case), are_same_kernels=are_same_kernels
    ):
        found.append(make(kind="wrong", where="update", detail="\n".join(wrong[:12])))
    if shared := sorted(record.shared - arms.eager.shared):
        where = shared[0].split()[0]
        found.append(make(kind="shared memory", where=where, detail="\n".join(shared[:12])))
    budget = options.get("memory_budget")
    if budget is not None and not plans:
        note = "; ".join(memo_compile.report().notes)
        found.append(make(kind="no plan under a budget", where="", detail=note))
    raw = [reason for reason in _aside(memo_compile.report().notes) if not _is_refusal(reason)]
    if raw:
        where = raw[0].split(":")[0]
        found.append(make(kind="aside by an error", where=where, detail="\n".join(raw)))
    over = [plan for plan in plans if budget is not None and plan.peak_bytes > budget]
    found += [
        make(kind="over budget", where="", detail=f"{plan.peak_bytes} B planned, {budget} allowed")
        for plan in over
    ]
    return found


def _aside(notes: tuple[str, ...]) -> list[str]:
    """Why graphs got no plan."""
    return [note.split(": ", 1)[-1] for note in notes if ASIDE in note]


def _is_refusal(reason: str) -> bool:
    """True for what memo names itself; everything else escaped from its planning."""
    return reason.split(":")[0] in ("UnsupportedGraph", "Infeasible", "NothingFits")


def _sort(fault: str) -> str:
    """``gradient`` of "step 0: gradient head.weight: ..."."""
    return fault.split(": ")[1].split()[0]


def _count(outcome: Outcome, plans: tuple[Plan, ...], notes: tuple[str, ...]) -> None:
    """Every plan's step ran, so that what was counted while it ran is known."""
    calls = {key.split("/")[0] for plan in plans for key in plan.offsets}
    decisions = [row for plan in plans for row in plan.decisions]
    aside = _aside(notes)
    outcome.counts.update(
        {
            "planned": bool(plans) and not aside,
            "tiled": any(".tile" in call for call in calls),
            "sliced": any(
                row.decision == "RECOMPUTE" and row.token_fraction < 1 for row in decisions
            ),
            "moved": any(plan.offloaded_bytes for plan in plans),
            "recomputed": any(plan.recomputed_bytes for plan in plans),
            "state on host": any(plan.fixed.state_on_host for plan in plans),
            "gradients on host": any(plan.fixed.gradients_on_host for plan in plans),
            "weights on host": any(plan.fixed.parameters_on_host for plan in plans),
            "stepped aside": bool(aside),
        }
    )
    outcome.reasons.update(reason[:160] for reason in aside)
