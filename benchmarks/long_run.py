"""A long run with all that happens in one: ``python -m benchmarks.long_run``.

A small GPT-2 in float64 trains for 2,000 steps of varying lengths. Every 25th step fails, in one of
four ways, and is repeated. Every 50 steps there is an evaluation, every 200 a checkpoint, which is
read again. From step 600 on a new model goes on from it under a budget, from 1,400 on under
another. Beside it the same steps by plain eager, without any interruption; and all of it, with its
failures, by torch's ``aot_eager``, which shows what torch itself keeps.

It passes when all losses are those of the plain run, and nothing grows while one budget holds:
host memory, plans, open files, threads, and resident memory beyond what ``aot_eager`` adds.
"""

import argparse
import contextlib
import ctypes
import gc
import itertools
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import harness
from memo_compile.units import format_bytes

MODULE = "benchmarks.long_run"
SIZES = {"steps": 2000, "layers": 3, "hidden": 64, "batch": 4, "vocab": 128}
LENGTHS = (24, 32, 40, 48, 56, 64, 72, 80)
EVALUATE, CHECKPOINT, FAIL = 50, 200, 25
BUDGETS = {0: None, 600: 0.9, 1400: 0.8}
"""First step -> the budget, as a part of the largest peak without one."""
LEARNING_RATE = 3e-5
"""At 1e-3 training is chaotic: gradients rounded once more move plain eager's losses by a tenth."""
MAX_LOSS_ERROR = 1e-9
"""Relative, in float64: kernels that are cut differently add in another order."""
MAX_GROWTH_BYTES = 2 * 2**20
"""Of memory between the middle and the end of a budget's steps, beyond the control's."""
TIMEOUT_S = 7200.0
CONTROL = "aot_eager"
ARMS = ("memo", "plain", CONTROL)


def main() -> int:
    """All arms, the tables, the verdict."""
    options = harness.parser(__doc__, sizes=SIZES).parse_args()
    return harness.run_benchmark("long_run", options, measure, run_child)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the arms; returns what is written, and what failed."""
    shared = harness.passed_on(options, *SIZES)

    def arm(name: str) -> dict[str, Any]:
        made = harness.Arm(name=name, arguments=(f"--child={name}", *shared))
        return harness.run_arm(MODULE, made, timeout_s=TIMEOUT_S)

    with ThreadPoolExecutor(2) as threads:  # nothing is timed
        arms = dict(zip(ARMS, threads.map(arm, ARMS), strict=True))
    losses = {name: outcome.pop("losses") for name, outcome in arms.items()}
    pairs = list(zip(losses["plain"], losses["memo"], strict=True))
    errors = [abs(ours - theirs) / abs(theirs) for theirs, ours in pairs]
    for name in ("memo", CONTROL):
        columns, *rows = table(arms[name]["samples"])
        harness.print_table(f"a long run by {name}, at each checkpoint", columns, rows)
    print(f"largest error of a loss: {max(errors):.2g}")
    failures = growth(arms["memo"]["samples"], arms[CONTROL]["samples"])
    if not max(errors) <= MAX_LOSS_ERROR:
        failures.append(f"a loss is off by {max(errors):.2g}")
    settings = {name: getattr(options, name) for name in SIZES}
    return {
        "settings": settings,
        "largest_loss_error": max(errors),
        "num_equal_losses": sum(ours == theirs for ours, theirs in pairs),
        "results": arms,
        "failures": failures,
    }


class Interrupted(Exception):
    """A step is to be given up."""


def model(options: argparse.Namespace) -> Any:
    """GPT-2 that returns its loss, which transformers would compute in float32."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"n_layer": options.layers, "n_embd": options.hidden, "n_head": 2}
            names = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
            config = GPT2Config(vocab_size=options.vocab, **sizes, **dict.fromkeys(names, 0.0))
            self.inner = GPT2LMHeadModel(config)

        def forward(self, ids: Any) -> Any:
            logits = self.inner(ids, use_cache=False).logits
            return torch.nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:])

    torch.manual_seed(0)
    return Loss().double().train()


class Training:
    """A model with its optimizer, as a script makes them anew from a checkpoint."""

    def __init__(self, options: argparse.Namespace, budget: int | None) -> None:
        import torch

        self.model = model(options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.run = self.model
        if options.child != "plain":
            torch._dynamo.reset()
            settings = {"lowering": "aten", "costs": "roofline", "memory_budget": budget}
            given = {"options": settings} if options.child == "memo" else {}
            self.run = torch.compile(self.model, backend=options.child, **given)

    def step(self, ids: Any) -> float:
        """Trains on ``ids``; returns the loss."""
        loss = self.run(ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def evaluate(self, ids: Any) -> float:
        """The loss in eval mode, without gradients."""
        import torch

        self.model.eval()
        with torch.no_grad():
            loss = float(self.run(ids))
        self.model.train()
        return loss

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def fail(self, way: int, ids: Any) -> None:
        """Begins a step that does not come to its end, and puts what it left away."""
        with contextlib.suppress(Interrupted, IndexError):
            FAILURES[way % len(FAILURES)](self, ids)
        self.optimizer.zero_grad()


def in_forward(training: Training, ids: Any) -> None:
    """A token that is not in the vocabulary."""
    training.run(ids + 10**6)


def before_backward(training: Training, ids: Any) -> None:
    """The loss is thrown away."""
    training.run(ids)


def in_backward(training: Training, ids: Any) -> None:
    """A hook of a parameter raises."""

    def interrupt(_gradient: Any) -> None:
        raise Interrupted

    loss = training.run(ids)
    hook = next(training.model.parameters()).register_hook(interrupt)
    try:
        loss.backward()
    finally:
        hook.remove()


def by_signal(training: Training, ids: Any) -> None:
    """A signal comes in the middle of a step, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        # It comes again: Python ignores what a handler raises inside of a finalizer.
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.5)
        while True:
            training.run(ids).backward()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


FAILURES: Sequence[Callable[[Training, Any], None]] = (
    in_forward,
    before_backward,
    in_backward,
    by_signal,
)


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """All steps of an arm: its losses, and what it held every 50 steps."""
    import torch

    torch.set_num_threads(1)
    harness.register_memo()
    is_compiled, peak_bytes = options.child != "plain", 0
    training, losses, samples = Training(options, None), [], []
    for step in range(options.steps):
        ids = tokens(options, step)
        if is_compiled and step and step % CHECKPOINT == 0:
            peak_bytes = peak_bytes or max((plan.peak_bytes for plan in plans()), default=1)
            share = BUDGETS.get(step)
            training = resumed(training, options, share and int(share * peak_bytes))
            print(f"{options.child}: step {step}", file=sys.stderr, flush=True)
        if is_compiled and step % FAIL == FAIL - 1:
            training.fail(step // FAIL, ids)
        losses.append(training.step(ids))
        if step % EVALUATE == EVALUATE - 1:
            losses.append(training.evaluate(ids))
            samples.append({"step": step + 1, **held()})
    return {"losses": losses, "samples": samples}


def tokens(options: argparse.Namespace, step: int) -> Any:
    """The tokens of a step, of a length that depends on it: each counts on by its row's number."""
    import torch

    seeded = torch.Generator().manual_seed(step)
    length = LENGTHS[int(torch.randint(len(LENGTHS), (), generator=seeded))]
    first, by = (torch.randint(options.vocab, (options.batch, 1), generator=seeded) for _ in "ab")
    return (first + by * torch.arange(length)) % options.vocab


def resumed(training: Training, options: argparse.Namespace, budget: int | None) -> Training:
    """Writes a checkpoint, and goes on from it: with a ``budget`` by a model of its own."""
    import torch

    with tempfile.TemporaryFile() as file:
        torch.save(training.state(), file)
        file.seek(0)
        state = torch.load(file)
    made = training if budget is None else Training(options, budget)
    made.model.load_state_dict(state["model"])
    made.optimizer.load_state_dict(state["optimizer"])
    return made


def plans() -> tuple[Any, ...]:
    """The plans that memo holds."""
    import memo_compile

    return memo_compile.report().plans


def held() -> dict[str, int]:
    """What the process holds, after garbage and free heap have gone."""
    from memo_runtime.host_store import bytes_held

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").open())
    return {
        "anonymous_bytes": int(status["RssAnon"].split()[0]) * 1024,
        "shared_bytes": int(status["RssShmem"].split()[0]) * 1024,
        "host_store_bytes": bytes_held("shm", 2**60),
        "plans": len(plans()),
        "budget_bytes": max((plan.budget_bytes or 0 for plan in plans()), default=0),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "objects": len(gc.get_objects()),
    }


def growth(samples: Sequence[dict[str, int]], control: Sequence[dict[str, int]]) -> list[str]:
    """What grew from the middle of a budget's steps to their end, in words."""
    complaints = []
    for first, end in itertools.pairwise([*BUDGETS, samples[-1]["step"]]):
        steps = [at for at, sample in enumerate(samples) if first < sample["step"] <= end]
        two = steps[len(steps) // 2], steps[-1]
        (middle, last), (before, after) = ([arm[at] for at in two] for arm in (samples, control))
        for name in ("anonymous_bytes", "shared_bytes", "host_store_bytes"):
            grown = last[name] - middle[name] - max(0, after[name] - before[name])
            if grown > MAX_GROWTH_BYTES:
                where = f"steps {middle['step']} to {end}"
                complaints.append(f"{where}: {name} grew by {format_bytes(grown)} more")
        complaints += [
            f"steps {middle['step']} to {end}: {name}: {middle[name]}, then {last[name]}"
            for name in ("plans", "files", "threads")
            if last[name] > middle[name]
        ]
    return complaints


def table(samples: Sequence[dict[str, int]]) -> list[list[str]]:
    """Columns, and a row for each checkpoint."""
    names = list(samples[0])
    rows = [sample for sample in samples if sample["step"] % CHECKPOINT == 0]
    return [names] + [
        [format_bytes(row[name]) if name.endswith("_bytes") else str(row[name]) for name in names]
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
