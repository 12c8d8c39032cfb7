"""The search itself: enumerate, evaluate, rank."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.models import ModelShape
from memo_compile.errors import require_at_least
from memo_compile.papers.kwai.offload import ParallelConfig
from memo_compile.papers.search.cost import CostModel, Evaluation, describe_workload, evaluate
from memo_compile.papers.search.space import CHECKPOINTS, SIZES, enumerate_space
from memo_compile.units import format_bytes, format_seconds

DEFAULT_BUDGET_SHARE = 65000 / 81920
"""Share of a device's memory that a plan may fill: 65000 MiB of 80 GiB reproduces Kwai's choices;
the rest is CUDA's context, communication buffers and fragmentation."""


COLUMNS = ("tp", "cp", "pp", "dp", "layers/chunk", "checkpoint", "alpha", "step", "MFU", "peak")
"""Columns of a table of configurations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration(ParallelConfig):
    """One way to run the step, with its prediction."""

    alpha: float
    iteration_s: float
    mfu: float
    peak_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"checkpoint": self.checkpoint.value}

    def cells(self) -> tuple[str, ...]:
        """A row under COLUMNS."""
        return (
            *map(str, (self.tp, self.cp, self.pp, self.dp, self.layers_per_chunk)),
            self.checkpoint.value,
            f"{self.alpha:.3f}",
            format_seconds(self.iteration_s),
            f"{self.mfu:.1%}",
            format_bytes(self.peak_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Usable configurations, fastest first, out of ``num_points`` that were evaluated."""

    num_points: int
    evaluation_s: float
    """One evaluation of all points, after a first one that pays numpy's start-up costs."""
    configurations: tuple[Configuration, ...]
    conflict: str = ""
    """Why no configuration is usable, in words; empty otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchQuestion:
    """The step whose configurations are to be ranked, and what it runs on."""

    shape: ModelShape
    gpus: int
    seq: int
    global_batch: int
    hardware: HardwareProfile
    budget_bytes: float | None = None
    """None: DEFAULT_BUDGET_SHARE of the device's memory."""
    model: CostModel = field(default_factory=CostModel)


def search(question: SearchQuestion, top: int | None = None) -> SearchResult:
    """Evaluates every configuration and returns the ``top`` fastest that fit (all with None).

    Ties go to the smaller peak, then to fewer chunks, then to smaller tp, cp, pp. Raises
    InputError: a size is below 1; it is named.
    """
    hardware, global_batch = question.hardware, question.global_batch
    require_at_least(1, {"global-batch": global_batch, "top": 1 if top is None else top})
    columns = enumerate_space(question.shape, question.gpus)
    work = describe_workload(question.shape, question.seq, global_batch)
    budget = question.budget_bytes
    budget = hardware.memory_bytes * DEFAULT_BUDGET_SHARE if budget is None else budget
    evaluate(work, columns, hardware, question.model, budget)  # pays numpy's start-up costs
    began_s = time.perf_counter()
    evaluation = evaluate(work, columns, hardware, question.model, budget)
    evaluation_s = time.perf_counter() - began_s
    keys = (columns.pp, columns.cp, columns.tp, -columns.layers_per_chunk, evaluation.peak_bytes)
    order = np.lexsort((*keys, evaluation.iteration_s))
    best = order[evaluation.usable[order]][:top]
    return SearchResult(
        num_points=len(columns),
        evaluation_s=evaluation_s,
        configurations=tuple(
            Configuration(
                **{name: int(getattr(columns, name)[i]) for name in SIZES},
                checkpoint=CHECKPOINTS[columns.checkpoint[i]],
                alpha=float(evaluation.alpha[i]),
                iteration_s=float(evaluation.iteration_s[i]),
                mfu=float(evaluation.mfu[i]),
                peak_bytes=round(float(evaluation.peak_bytes[i])),
            )
            for i in best
        ),
        conflict="" if len(best) else _explain(evaluation, budget, question),
    )


def _explain(evaluation: Evaluation, budget: float, question: SearchQuestion) -> str:
    """Says which constraint no configuration meets."""
    least_bytes = float(evaluation.peak_bytes.min())
    if least_bytes > budget:
        return (
            f"budget {format_bytes(budget)} < {format_bytes(least_bytes)}, the smallest peak of "
            f"{len(evaluation.peak_bytes)} configurations; use more GPUs, a shorter sequence or a "
            "larger budget"
        )
    return (
        f"global-batch: {question.global_batch} sequences cannot be divided over the replicas and "
        f"stages of any configuration of {question.gpus} GPUs that fits the budget "
        f"{format_bytes(budget)}"
    )
