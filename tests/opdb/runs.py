"""Runs one case eagerly and under memo, compares, and says in one word what became of it."""

import collections
import copy
import dataclasses
import functools
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import Unsupported, UserError
from torch._inductor import config as inductor_config

import memo_compile
from memo_compile.errors import Infeasible, UnsupportedGraph
from memo_compile.reporting import state
from tests.opdb.blocks import LEAN, Blocks, Call, inputs_of, weights_of
from tests.opdb.samples import Case, Sample, candidates

Record = Mapping[str, torch.Tensor]
"""Losses, gradients and buffers of every step, by name."""

NUM_STEPS = 2

RELATIVE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of a tensor's own largest entry: what rounding in another order may differ by."""

LARGEST = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""Of the largest entry of all gradients: one that cancels is rounding."""

VERDICTS = (
    *("right", "nothing to move", "stepped aside", "graph break", "data-dependent"),
    *("inherited", "wrong", "raised", "not tried"),
)
"""``nothing to move``: a plan, right, of a step that keeps nothing which it could move.
``graph break``: Dynamo cannot trace it, so that it is in no graph that memo could plan.
``data-dependent``: the same, since a shape or a number of Python's depends on what is computed.
``inherited``: torch's own backends are wrong or raise alike.
``raised``: an exception that none of torch's backends raises and that is no refusal of memo's.
``not tried``: eager torch refuses every sample, or gives no gradient, or an infinite one."""

FAILURES = ("wrong", "raised")

GOOD = ("right", "nothing to move")
"""After all others each sample is run alone, which tells the one that it is about."""

PEERS = {
    "aten": ("aot_eager", "aot_eager_decomp_partition"),
    "inductor": ("aot_eager", "aot_eager_decomp_partition", "inductor"),
}
"""Backends of torch that do a part of what memo does with this lowering."""

DATA_DEPENDENT = ("dynamic shape", "data dependent", "data-dependent", ".item()")
"""Words of Dynamo's about such an operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of samples that ran in one model, in one mode."""

    samples: Sequence[Sample]
    lowering: str
    mode: str
    verdict: str
    reason: str = ""
    detail: str = ""
    peers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What is wrong with torch's own backends, where memo is."""

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value}


def outcomes_of(case: Case) -> list[Outcome]:
    """Outcomes for each mode. Raises nothing that memo or the operator raises."""
    with (
        warnings.catch_warnings(),
        inductor_config.patch(fallback_random=True),
        dynamo_config.patch(allow_rnn=True),
    ):
        warnings.simplefilter("ignore")  # torch's own, about the odd things that samples do
        try:
            return _outcomes(case)
        finally:
            torch._dynamo.reset()
            state.reset()


def _outcomes(case: Case) -> list[Outcome]:
    found = [(sample, *usable_call(sample)) for sample in case.samples]
    outcomes = [
        Outcome(
            samples=[sample], lowering=case.lowering, mode="", verdict="not tried", reason=refusal
        )
        for sample, call, _, refusal in found
        if call is None
    ]
    tried = [(sample, call, lean) for sample, call, lean, _ in found if call is not None]
    return outcomes + (_apart(case, tried) if tried else [])


def _apart(case: Case, tried: "Sequence[Tried]", modes: Sequence[str] = ()) -> list[Outcome]:
    """One outcome in each mode for all samples, or where that is not good one for each half."""
    arms = _together(case, tried)
    outcomes: list[Outcome] = []
    again = []
    for mode in modes or case.modes:
        outcome = arms.judged(mode) if arms is not None else None
        if outcome is not None and (outcome.verdict in GOOD or len(tried) == 1):
            outcomes.append(outcome)
            continue
        again.append(mode)
        if outcome is not None:
            outcomes.append(outcome)
    if not again:
        return outcomes
    half = len(tried) // 2
    parts = [part for half in (tried[:half], tried[half:]) for part in _apart(case, half, again)]
    told = {part.mode for part in parts if part.verdict not in GOOD}
    return [each for each in outcomes if each.verdict in GOOD or each.mode not in told] + parts


def _together(case: Case, tried: "Sequence[Tried]") -> "Arms | None":
    """All calls in one model; None where eager torch gives them no finite gradients so."""
    samples, calls, leans = zip(*tried, strict=True)
    try:
        arms = Arms(samples, calls, min(leans), case.lowering)
    except Exception:
        return None
    return arms if arms.is_finite() or len(tried) == 1 else None


def usable_call(sample: Sample) -> tuple[Call | None, float, str]:
    """The first call that eager torch runs in blocks with finite gradients, and how it scales.

    Without one: why not.
    """
    refusals: collections.Counter[str] = collections.Counter()
    for call in candidates(sample):
        for lean in (LEAN, -LEAN):
            try:
                arms = Arms([sample], [call], lean)
            except Exception as error:
                refusals[f"eager: {type(error).__name__}: {error}"] += 1
                continue
            if arms.is_finite():
                return call, lean, ""
            refusals["eager gives no gradient that is finite and not zero"] += 1
    most = refusals.most_common(1)
    return None, LEAN, most[0][0] if most else "no sample"


Tried = tuple[Sample, Call, float]
"""A sample, its call, and how the call scales its input."""


class Arms:
    """Some calls in three blocks: eager's run, and those that are compared with it."""

    def __init__(
        self, samples: Sequence[Sample], calls: Sequence[Call], lean: float, lowering: str = "aten"
    ) -> None:
        self.samples, self.lowering = samples, lowering
        small = all(sample.dtype in ("bfloat16", "float32") for sample in samples)
        wide = torch.float32 if small else torch.float64
        self._model = Blocks(calls, lean, wide)
        self._x, self._given = inputs_of(calls, wide)
        self._weights = weights_of(calls, lean, wide)
        self.eager = self.run(lambda model: model)
        self._rough = torch.bfloat16 if samples[0].dtype == "bfloat16" else wide
        self._peer_faults: dict[str, str] = {}

    def is_finite(self) -> bool:
        """The calls have gradients, and no loss or gradient is infinite or NaN."""
        learnt = any("pieces" in name and value.any() for name, value in self.eager.items())
        return learnt and all(bool(value.isfinite().all()) for value in self.eager.values())

    def run(self, compile: Callable[[nn.Module], Callable[..., Any]]) -> Record:
        """Two steps of a fresh copy of the model."""
        model = copy.deepcopy(self._model)
        called = compile(model)
        record: dict[str, torch.Tensor] = {}
        for step in range(NUM_STEPS):
            torch.manual_seed(step)
            model.zero_grad()
            x = self._x.clone().requires_grad_()
            loss = called(x, self._given, self._weights)
            loss.backward()
            record[f"{step} loss"] = loss.detach().clone()
            leaves = [("of the input", x), *model.named_parameters()]
            record |= {
                f"{step} gradient {name}": leaf.grad.clone()
                for name, leaf in leaves
                if leaf.grad is not None
            }
            record |= {f"{step} {name}": value.clone() for name, value in model.named_buffers()}
        return record

    def compiled(self, backend: str, **options: Any) -> Record:
        torch._dynamo.reset()
        state.reset()
        how = {"options": options} if options else {}
        return self.run(functools.partial(torch.compile, backend=backend, fullgraph=True, **how))

    def judged(self, mode: str) -> Outcome:
        """A run under memo and what it is worth."""
        outcome = functools.partial(self._outcome, mode)
        try:
            record = self._run_in_mode(mode)
        except Exception as error:
            return self._of_error(mode, _inner(error))
        report = memo_compile.report()
        if faults := self.faults(record):
            peers = self.peers()
            verdict = "inherited" if any(peers.values()) else "wrong"
            return outcome(verdict, faults[0], detail="\n".join(faults[:12]), peers=peers)
        if not report.active:
            return outcome("stepped aside", "; ".join(report.notes))
        return outcome("right" if _has_moved(mode, report) else "nothing to move")

    def _outcome(self, mode: str, verdict: str, reason: str = "", **more: Any) -> Outcome:
        return Outcome(
            samples=self.samples,
            lowering=self.lowering,
            mode=mode,
            verdict=verdict,
            reason=reason[:300],
            **more,
        )

    def _run_in_mode(self, mode: str) -> Record:
        schedule = {"offload": ("copies-late",), "floor": ("copies-early",)}.get(mode, ())
        options = {
            "lowering": self.lowering,
            "debug": ("poison", *schedule),
            "strict": True,
            "cache": True,  # what is traced for one mode is not traced again for the next
            "token_tiles": 1,
            "costs": "roofline",
        }
        if mode != "floor":
            return self.compiled("memo", policy=f"full-{mode}", **options)
        budget = 1
        while True:
            try:
                return self.compiled("memo", memory_budget=budget, **options)
            except Exception as error:
                floor = getattr(_inner(error), "floor_bytes", None)
                if floor is None or floor <= budget:
                    raise
                budget = floor

    def _of_error(self, mode: str, error: BaseException) -> Outcome:
        outcome = functools.partial(self._outcome, mode)
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, Unsupported | UserError):
            depends = any(word in text.lower() for word in DATA_DEPENDENT)
            return outcome("data-dependent" if depends else "graph break", text)
        if isinstance(error, UnsupportedGraph | Infeasible) and "please report" not in text:
            return outcome("stepped aside", text)
        peers = self.peers()
        verdict = "inherited" if any(peers.values()) else "raised"
        shown = "".join(traceback.format_exception(error))[-3000:]
        return outcome(verdict, f"{_place(error)}: {text}", detail=shown, peers=peers)

    def peers(self) -> dict[str, str]:
        """What is wrong with each of torch's own backends; empty texts where nothing is."""
        for backend in PEERS[self.lowering]:
            if backend not in self._peer_faults:
                self._peer_faults[backend] = self._peer_fault(backend)
        return self._peer_faults

    def _peer_fault(self, backend: str) -> str:
        try:
            faults = self.faults(self.compiled(backend))
        except Exception as error:
            return f"raises {type(_inner(error)).__name__}"
        return faults[0] if faults else ""

    def faults(self, record: Record) -> list[str]:
        """One line for every loss, gradient and buffer that is not eager's.

        No gradient and one of zeros mean the same.
        """
        largest = max(_size(value) for name, value in self.eager.items() if "gradient" in name)
        lines = []
        for name in sorted(record.keys() | self.eager.keys()):
            nothing = torch.zeros_like((record if name in record else self.eager)[name])
            theirs = self.eager.get(name, nothing)
            off = _distance(record.get(name, nothing), theirs)
            allowed = RELATIVE[self._rough] * _size(theirs) + LARGEST[self._rough] * largest
            if not off <= allowed:
                lines.append(f"{name}: {off:.2e} off, {allowed:.2e} allowed, {_size(theirs):.2e}")
        return lines


def _has_moved(mode: str, report: Any) -> bool:
    offloaded = sum(plan.offloaded_bytes for plan in report.plans)
    recomputed = sum(plan.recomputed_bytes for plan in report.plans)
    moved = {"recompute": recomputed, "offload": offloaded}
    return bool(moved.get(mode, offloaded + recomputed))


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    difference = (ours.to(wide) - theirs.to(wide)).abs()
    return float(difference.max()) if difference.numel() else 0.0


def _size(value: torch.Tensor) -> float:
    return float(value.abs().max()) if value.numel() and value.dtype != torch.bool else 0.0


def _inner(error: BaseException) -> BaseException:
    """What a backend raised, without Dynamo's wrapping."""
    return getattr(error, "inner_exception", None) or error


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "memo_" in frame.filename] or frames
    return f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else ""
