"""Planned steps of small models that can run with another plan, and be compared in numbers."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from memo_runtime.arena import arena_of
from memo_runtime.backward_run import BackwardRun
from memo_runtime.run_step import StepPlan, begin_backward, run_backward, run_forward
from torch import nn
from torch.nn import functional

from memo_compile.backends import entry
from memo_compile.check.check_plan import check
from memo_compile.check.prove import prove
from memo_compile.driver import assemble
from memo_compile.driver.bind import Binder
from memo_compile.driver.stages import LoweredStep, PlannedStep
from memo_compile.driver.step_planner import StepPlanner
from memo_compile.reporting import state
from memo_compile.step.plans import Plan
from memo_compile.step.problem import CallKind, Phase, Problem

CPU = torch.device("cpu")
WIDTH, HEADS, WORDS, TOKENS = 32, 2, 256, 32

_keys = itertools.count(20_000_000)


class Norm(nn.Module):
    """Root mean square, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    """Attention and an MLP: gated and without biases as Llama's, or as GPT's."""

    def __init__(self, is_llama: bool) -> None:
        super().__init__()
        self.is_llama = is_llama
        self.norms = nn.ModuleList(Norm() if is_llama else nn.LayerNorm(WIDTH) for _ in range(2))
        self.heads = nn.Linear(WIDTH, 3 * WIDTH, bias=not is_llama)
        self.out = nn.Linear(WIDTH, WIDTH, bias=not is_llama)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=not is_llama)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False) if is_llama else None
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=not is_llama)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.attention(self.heads(self.norms[0](x))))
        inner = self.norms[1](x)
        if self.gate is None:
            return x + self.down(functional.gelu(self.up(inner)))
        return x + self.down(functional.silu(self.gate(inner)) * self.up(inner))

    def attention(self, both: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = both.shape
        parts = both.view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = parts[0] @ parts[1].transpose(-1, -2) / WIDTH**0.5
        mask = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(mask, -1e9).softmax(-1) @ parts[2]
        return mixed.transpose(1, 2).reshape(batch, tokens, WIDTH)


class Words(nn.Module):
    """A language model of two or more layers; returns the loss."""

    def __init__(self, *, is_llama: bool = True, num_layers: int = 3, words: int = WORDS) -> None:
        super().__init__()
        self.entry = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(Block(is_llama) for _ in range(num_layers))
        self.norm = Norm() if is_llama else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.entry(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What one step is made of."""

    is_llama: bool = True
    words: int = WORDS
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def ready(self) -> "Ready":
        """The step, run once by autograd."""
        torch.manual_seed(0)
        model = Words(is_llama=self.is_llama, words=self.words)
        ids = torch.randint(0, self.words, (1, TOKENS))
        options = {
            "lowering": "aten",
            "strict": True,
            "costs": "roofline",
            "token_granule": 4,
            "token_tiles": 1,
            **self.options,
        }
        return _recorded(lambda: torch.compile(model, backend="memo", options=options)(ids))


SETUPS: Mapping[str, Setup] = {
    "save": Setup(),
    "offload": Setup(options={"policy": "full-offload"}),
    "recompute": Setup(is_llama=False, options={"policy": "full-recompute"}),
    "slices": Setup(options={"policy": "memo", "alpha": 0.5}),
    "memo with two in flight": Setup(
        is_llama=False, options={"policy": "memo", "alpha": 0.25, "max_inflight": 2}
    ),
    "weights on the host": Setup(options={"policy": "full-recompute", "weights": "host"}),
    "tiles": Setup(options={"policy": "save", "token_tiles": 4}),
    "tiled loss head": Setup(
        is_llama=False, words=8 * WORDS, options={"policy": "save", "token_tiles": 2}
    ),
    "tiles that move": Setup(options={"policy": "full-offload", "token_tiles": 4}),
}


@contextlib.contextmanager
def assemblies() -> Iterator[list[assemble.Assembly]]:
    """The steps that are assembled in the block."""
    made: list[assemble.Assembly] = []
    original = entry.assemble

    def keep(*args: Any) -> assemble.Assembly:
        made.append(original(*args))
        return made[-1]

    with mock.patch.object(entry, "assemble", keep):
        yield made


def _recorded(call: Callable[[], torch.Tensor]) -> "Ready":
    """One step of ``call``, with all that runs it again."""
    given: list[list[Any]] = []
    results: list[list[Any]] = []

    def forward(plan: StepPlan, args: list[Any]) -> list[Any]:
        given.append(copied_all(args))
        results.append(run_forward(plan, args))
        return results[-1]

    def backward(plan: StepPlan, args: list[Any], *, keep_graph: bool) -> BackwardRun:
        given.append(copied_all(args))
        return begin_backward(plan, args, keep_graph=keep_graph)

    torch._dynamo.reset()
    state.reset()
    with (
        assemblies() as made,
        mock.patch.object(assemble, "run_forward", forward),
        mock.patch.object(assemble, "begin_backward", backward),
    ):
        call().backward()
    (assembly,) = made
    cuts = (assembly.lowered.cut.forward, assembly.lowered.cut.backward)
    return Ready(
        assembly=assembly,
        constants={half.phase: half.constants for half in cuts},
        forward_args=given[0],
        backward_args=given[1],
    )


def copied_all(args: list[Any]) -> list[Any]:
    return [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in args]


@dataclasses.dataclass(kw_only=True)
class Ready:
    """A planned step with the numbers that it is given."""

    assembly: assemble.Assembly
    constants: Mapping[Phase, Mapping[str, Any]]
    forward_args: list[Any]
    backward_args: list[Any]

    @property
    def planned(self) -> PlannedStep:
        return self.assembly.planned

    @property
    def lowered(self) -> LoweredStep:
        return self.assembly.lowered

    def unmoved(self, problem: Problem) -> Problem:
        """What ``problem`` is compared with: the step that keeps everything; itself if that is it.

        Of such a step only its own tilings are looked at.
        """
        moves = any(call.kind is not CallKind.RUN for call in self.planned.problem.calls)
        return self.planner.problem if moves else problem

    @functools.cached_property
    def planner(self) -> StepPlanner:
        """What planned the step."""
        assembly = self.assembly
        return StepPlanner.of(assembly.known, assembly.config, assembly.request)

    def complaints(self, problem: Problem, plan: Plan) -> tuple[str, ...]:
        """What the checker says, as when a step is planned."""
        verdict = check(problem, plan)
        if not verdict.ok:
            return verdict.problems
        whole, unmoved = self.planner.known.whole, self.unmoved(problem)
        return prove(whole, unmoved, problem, self.planner.recomputations(problem)).problems

    def numbers(self, problem: Problem, plan: Plan, schedule: str = "normal") -> list[Any]:
        """All that a step returns, and its inputs as it leaves them."""
        planned = dataclasses.replace(self.planned, problem=problem, plan=plan)
        binder = Binder(planned, self.constants, True, torch.device("cpu"))
        step = StepPlan(
            key=next(_keys),
            device=CPU,
            arena_bytes=plan.arena_bytes,
            table=binder.table(),
            forward=binder.half(Phase.FORWARD),
            backward=binder.half(Phase.BACKWARD),
            poison=True,
            max_inflight=self.assembly.config.max_inflight,
            host_bytes=problem.host_bytes,
            schedule=schedule,
        )
        try:
            return self._run(step)
        finally:
            arena_of(CPU).forget(step.key)

    def _run(self, step: StepPlan) -> list[Any]:
        """As many forwards as may wait for their backwards, and then those."""
        forward, backward = self.planned.problem.halves
        waiting = []
        for _ in range(step.max_inflight):
            args = copied_all(self.forward_args)
            results = run_forward(step, list(args))
            waiting.append((args, dict(zip(forward.results, results, strict=True))))
        found = []
        for args, made in waiting:
            known = {**dict(zip(forward.arguments, args, strict=True)), **made}
            known[backward.handle] = made[forward.handle]
            arriving = [
                known.get(name, given)
                for name, given in zip(backward.arguments, self.backward_args, strict=True)
            ]
            gradients = run_backward(step, arriving, keep_graph=False)
            shown = [value for name, value in made.items() if name not in (None, forward.handle)]
            found += [*shown, *gradients, *args]
        return found


def same(ours: list[Any], expected: list[Any]) -> bool:
    """Every number is equal, bit by bit; no number equals no number."""
    return len(ours) == len(expected) and all(
        _equal(mine, theirs) for mine, theirs in zip(ours, expected, strict=True)
    )


def _equal(mine: Any, theirs: Any) -> bool:
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return mine is theirs or mine == theirs
    if mine.shape != theirs.shape or mine.dtype is not theirs.dtype:
        return False
    return torch.equal(mine, theirs) or torch.allclose(mine, theirs, rtol=0, atol=0, equal_nan=True)
