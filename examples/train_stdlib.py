"""Train a byte-level language model on Python's own standard library, memo beside eager.

    python examples/train_stdlib.py [--steps 60] [--backend memo] [--device cpu|cuda]

Two copies of one model start from the same seed and see the same batches: one runs eagerly, the
other through ``torch.compile(backend="memo")``. Every step prints both losses; the end prints the
speed and the memory of both and memo's report. The exit code is 1 when the losses part, when one
is not finite, or when memo had no plan in use.
"""

import os

# Read by OpenMP when torch is loaded: threads that wait then sleep. Spinning, they cost up to five
# times the step time on a machine whose cores are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from byte_llama import ByteLlama, ByteLlamaConfig
from memo_runtime.arena import arena_of
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

import memo_compile
from memo_compile.costs.measure import watch_memory
from memo_compile.units import format_bytes

MAX_DIFFERENCE = 1e-3
"""Of the two losses, relative, while the steps have not yet amplified rounding."""
NUM_COMPARED_STEPS = 20
WARM_STEPS = 3
"""The first compiles; after the second, gradients and optimizer state exist."""
MEASURED_STEPS = 3
"""Steps whose memory is followed; they are left out of the timing."""


@dataclass(slots=True, kw_only=True)
class Arm:
    """One of the two runs and what it showed. Memory in bytes, times in seconds."""

    name: str
    model: ByteLlama
    step: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def main() -> int:
    """Train both arms and judge them; the exit code says whether memo kept its word."""
    options = arguments()
    device = torch.device(options.device)
    console = Console(highlight=False)
    config = ByteLlamaConfig(
        num_layers=options.layers, hidden=options.hidden, max_tokens=options.tokens
    )
    arms = [
        make_arm("eager", config, None, options),
        make_arm(options.backend, config, options.backend, options),
    ]
    text = corpus()
    num_parameters = sum(p.numel() for p in arms[0].model.parameters())
    console.print(
        f"{num_parameters / 1e6:.1f} M parameters, {config.num_layers} layers, batches of "
        f"{options.batch} x {options.tokens} bytes of {text.numel() / 1e6:.1f} MB, on {device}; "
        f"step 1 compiles"
    )
    stream = batches(text, options, device)
    measured = range(WARM_STEPS, WARM_STEPS + MEASURED_STEPS)
    with progress_bar(console) as bar:
        task = bar.add_task("training", total=options.steps)
        for step in range(options.steps):
            tokens, targets = next(stream)
            for arm in arms:
                train_step(arm, tokens, targets, measure=step in measured)
            console.print(loss_line(step, arms))
            bar.advance(task)
    console.print(summary(arms, options))
    report = memo_compile.report()
    print(report)
    return verdict(arms, report, options)


def arguments() -> argparse.Namespace:
    """The command line; the defaults take two to three minutes on two cores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=60)
    parser.add_argument("--layers", type=positive, default=6)
    parser.add_argument("--hidden", type=positive, default=256)
    parser.add_argument("--tokens", type=positive, default=512)
    parser.add_argument("--batch", type=positive, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="memo", help="another one, to see how it compares")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def corpus() -> Tensor:
    """The standard library's own Python files in path order, as one uint8 tensor."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    files = (
        f for f in sorted(root.rglob("*.py")) if skipped.isdisjoint(f.parts[len(root.parts) :])
    )
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batches(
    text: Tensor, options: argparse.Namespace, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of ``(B, T)`` int64: bytes from seeded random places, and each one's next byte."""
    generator = torch.Generator().manual_seed(options.seed)
    span = torch.arange(options.tokens + 1)
    while True:
        starts = torch.randint(
            text.numel() - options.tokens, (options.batch, 1), generator=generator
        )
        window = text[starts + span].long().to(device)
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def make_arm(
    name: str, config: ByteLlamaConfig, backend: str | None, options: argparse.Namespace
) -> Arm:
    """A freshly seeded model, compiled when ``backend`` names one, with an optimizer of its own."""
    torch.manual_seed(options.seed)
    model = ByteLlama(config).to(options.device)
    return Arm(
        name=name,
        model=model,
        step=model if backend is None else torch.compile(model, backend=backend),
        optimizer=torch.optim.AdamW(model.parameters(), lr=options.learning_rate),
    )


def train_step(arm: Arm, tokens: Tensor, targets: Tensor, *, measure: bool) -> None:
    """One step of ``arm``; its time is kept, or, with ``measure``, its peak memory instead."""
    begin = time.perf_counter()
    if measure:
        loss = measured_forward_backward(arm, tokens, targets)
    else:
        loss = forward_backward(arm, tokens, targets)
    arm.optimizer.step()
    arm.optimizer.zero_grad(set_to_none=True)
    arm.losses.append(loss.item())
    if not measure and len(arm.losses) > WARM_STEPS:
        arm.times_s.append(time.perf_counter() - begin)


def forward_backward(arm: Arm, tokens: Tensor, targets: Tensor) -> Tensor:
    """The loss, with its gradients in ``.grad``."""
    loss = arm.step(tokens, targets)
    loss.backward()
    return loss.detach()


def measured_forward_backward(arm: Arm, tokens: Tensor, targets: Tensor) -> Tensor:
    """As ``forward_backward``; notes the peak of the arm's memory from entry to exit.

    The peak is what the arm's tensors hold at entry plus the growth of the process (of the
    device's allocator on CUDA). memo's arena stays between steps: on CUDA it is held at entry, on
    CPU its pages are given back first.
    """
    held = tensor_bytes(arm) + tokens.nbytes + targets.nbytes
    arena = arena_of(tokens.device)
    if tokens.is_cuda:
        held += arena.size_bytes if arm.name == "memo" else 0
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = forward_backward(arm, tokens, targets)
        growth = torch.cuda.max_memory_allocated() - before
    else:
        arena.release_pages()
        with watch_memory() as watch:
            loss = forward_backward(arm, tokens, targets)
        growth = watch.growth_bytes
    arm.peak_bytes = max(arm.peak_bytes, held + growth)
    return loss


def tensor_bytes(arm: Arm) -> int:
    """Bytes of the arm's parameters, buffers, gradients and optimizer state."""
    tensors = [*arm.model.parameters(), *arm.model.buffers()]
    tensors += [p.grad for p in arm.model.parameters() if p.grad is not None]
    for state in arm.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def difference(arms: list[Arm], step: int) -> float:
    """Of the two losses of ``step``, relative to eager's."""
    eager, other = (arm.losses[step] for arm in arms)
    return abs(other - eager) / abs(eager)


def progress_bar(console: Console) -> Progress:
    """A bar with the count of steps and the time so far."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


def loss_line(step: int, arms: list[Arm]) -> str:
    """Both losses of the newest step, in nats per byte."""
    losses = "  ".join(f"{arm.name} {arm.losses[step]:.6f}" for arm in arms)
    return f"step {step + 1:3d}  {losses}  relative difference {difference(arms, step):.1e}"


def summary(arms: list[Arm], options: argparse.Namespace) -> Table:
    """Speed and memory of both arms."""
    plans = memo_compile.report().plans
    planned = {"memo": format_bytes(plans[-1].peak_bytes)} if plans else {}
    table = Table(title="forward + backward + AdamW", title_justify="left")
    columns = ("", "last loss", "tokens/s", "step (median)", "planned peak", "measured peak")
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    for arm in arms:
        step_s = statistics.median(arm.times_s) if arm.times_s else math.nan
        table.add_row(
            arm.name,
            f"{arm.losses[-1]:.4f}",
            f"{options.batch * options.tokens / step_s:.0f}",
            f"{step_s * 1e3:.0f} ms",
            planned.get(arm.name, "-"),
            format_bytes(arm.peak_bytes) if arm.peak_bytes else "-",
        )
    return table


def verdict(arms: list[Arm], report: memo_compile.Report, options: argparse.Namespace) -> int:
    """0 when the losses agree and memo ran its plan; else 1, with the reasons on stderr."""
    faults = []
    for arm in arms:
        faults += [
            f"step {step + 1}: the loss of {arm.name} is {loss}"
            for step, loss in enumerate(arm.losses)
            if not math.isfinite(loss)
        ]
    num_compared = min(NUM_COMPARED_STEPS, options.steps)
    for step in range(num_compared):
        if difference(arms, step) > MAX_DIFFERENCE:
            faults.append(f"step {step + 1}: losses differ by {difference(arms, step):.1e}")
    if options.backend == "memo" and not report.active:
        faults.append("memo has no active plan; its notes say why")
    if options.backend == "memo" and report.unplanned_steps:
        faults.append(f"{report.unplanned_steps} steps ran without a plan")
    for fault in faults:
        print(f"FAILED: {fault}", file=sys.stderr)
    if not faults:
        print(f"OK: losses agree to {MAX_DIFFERENCE:g} over the first {num_compared} steps")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
