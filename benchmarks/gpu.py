"""Everything that needs a GPU, in a quarter of an hour: ``python -m benchmarks.gpu``.

    --part tests      tests/gpu: numerics, budgets, streams
    --part speed      tokens/s at 16K and 64K tokens in each arm, memo under three budgets
    --part longest    the longest sequence of the 8B model with LoRA, and with its state on the host
    --part graphs     CUDA graphs on a small model: seconds of a step, and of the host in it
    --part overlap    copies beside kernels: measured, and as the simulator says; a trace is kept
    --part fits       the longest sequence that trains in each arm; only if asked for

The parts are in the order of their worth. Other arms than memo's are eager with checkpointing, the
same with the checkpoints on the host, Inductor, and Inductor with an activation memory budget; all
train in bf16 with AdamW, a 1B-shaped and a Llama-3-8B-shaped model. Each is a process of its own
with its share of its part's time, and each part ends at its limit. Results are written as they
come; ``--resume`` measures what is missing in the result of this day and this code. memo's peak
must lie within its budget and within 1 % of its plan, and its tables show the simulated step.

``--dry-run`` takes the same ways through the code with a tiny model: on the CPU, or on the device
that is there, as the emulated one (``python -m tests.cuda_emulated run benchmarks.gpu --dry-run``).
"""

import argparse
import contextlib
import gc
import importlib.util
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import harness
from memo_compile.units import format_bytes

MODULE = "benchmarks.gpu"
ARMS = ("memo", "checkpointing", "offloaded-checkpointing", "inductor", "inductor-budget")
LIMITS_S = {
    "tests": 180.0,
    "speed": 320.0,
    "longest": 130.0,
    "graphs": 110.0,
    "overlap": 60.0,
    "fits": 220.0,
}
"""Of each part. What an arm leaves over is for those after it. A first step that finds no kernels
takes up to a minute."""
USUAL = ("tests", "speed", "longest", "graphs", "overlap")
OVERLAP = "memo-offload"
"""memo with everything that layers save on the host: an arm of the part ``overlap``."""
LORA, STATE = "memo-lora", "memo-state"
"""Arms of the part ``longest``: adapters train beside a frozen model; ``memo_compile.offload``."""
GRAPHS = ("memo-graphs", "inductor-graphs", "memo-calls", "inductor")
"""Arms of the part ``graphs``, memo and Inductor each with and without CUDA graphs."""
SPEED_BUDGETS = ("92%", "70%", "50%")
"""Of the device: memo's in the part ``speed``, as arms ``memo:92%``."""
SPEED_TOKENS = (16384, 65536)
LORA_RANK = 16
KERNELS = harness.ROOT / "build" / "gpu_kernels"
"""Inductor's cache of the arms."""
MOST_LENGTHS, DRY_LENGTHS = 8, 2
"""Of an arm, at most; nothing refuses a tiny model's lengths before time ends."""
TEST_PROCESSES = 6
"""They share the GPU; most of a test is compilation."""
MANY_STEPS = 10
"""Timed steps where only one length is trained."""
OUT_OF_TIME = "out of time"
"""What a row says that ``--resume`` measures."""
NO_TESTS = 5
"""pytest's exit code where all are skipped or none is there."""
MIN_ARM_S = 20.0
"""Less is not enough to build a model and to run one length."""
MAX_PEAK_DIFFERENCE = 0.01
MEMO_BUDGET = "92%"
"""Of the device: CUDA's context, cuBLAS's workspaces and fragmentation need the rest."""
ACTIVATION_BUDGET = 0.1
"""Inductor's ratio; it is a wish, and memory decides what comes of it."""
GROWTH = (2.0, 1.5)
"""Each length is twice the one before; when that fails, half as long again as the last is tried."""


Interval = tuple[float, float]
"""Start and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama, and the length to begin with."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tokens: int


SHAPES = {
    "1b": Shape(hidden=2048, ffn=8192, layers=16, heads=32, kv_heads=8, vocab=128256, tokens=16384),
    "8b": Shape(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, vocab=128256, tokens=8192),
    "small": Shape(hidden=512, ffn=1536, layers=8, heads=8, kv_heads=8, vocab=8192, tokens=512),
    "tiny": Shape(hidden=64, ffn=128, layers=3, heads=4, kv_heads=2, vocab=256, tokens=128),
}


def main() -> int:
    """Run the parts, print their tables, write the results, judge."""
    options = arguments()
    if options.child:
        harness.send_result(run_child(options))
        return 0
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        print("benchmarks.gpu: no CUDA device here; --dry-run needs none", file=sys.stderr)
        return 2
    return max(run_part(part, options) for part in options.part.split(","))


def run_part(part: str, options: argparse.Namespace) -> int:
    """One part within its limit; the exit code."""
    begin = time.monotonic()
    limit_s = LIMITS_S[part] if options.time_limit is None else options.time_limit
    at_start = {"hardware": harness.hardware(), "code": harness.code(), "limit_s": limit_s}
    if part == "tests":
        payload = {**at_start, **run_tests(limit_s, dry_run=options.dry_run)}
    else:
        payload = {**at_start, "rows": kept_rows(part, at_start) if options.resume else []}

        def save() -> None:
            if not options.no_save:
                harness.write_results(name_of(part), payload)

        run_arms(part, options, begin + limit_s, payload["rows"], save)
        payload["failures"] = judge(payload["rows"], every_arm=options.dry_run)
        show(part, payload["rows"])
    payload["took_s"] = time.monotonic() - begin
    print(f"{part}: {payload['took_s']:.0f} s of {limit_s:.0f}")
    return harness.conclude(name_of(part), payload, save=not options.no_save)


def name_of(part: str) -> str:
    """Of the part's result."""
    return f"gpu_{part}"


def run_tests(limit_s: float, *, dry_run: bool) -> dict[str, Any]:
    """``tests/gpu``, stopped at the limit."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "tests/gpu"]
    if dry_run:
        command.append("--collect-only")  # an emulated device computes nothing
    elif importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(TEST_PROCESSES, os.cpu_count() or 1)), "--dist", "worksteal"]
    try:
        code = subprocess.run(command, check=False, timeout=limit_s).returncode
    except subprocess.TimeoutExpired:
        return {"tests_exit_code": None, "failures": [f"tests: not done after {limit_s:.0f} s"]}
    passed = code == 0 or (dry_run and code == NO_TESTS)
    failures = [] if passed else [f"tests: exit code {code}"]
    return {"tests_exit_code": code, "failures": failures}


def kept_rows(part: str, at_start: dict[str, Any]) -> list[dict[str, Any]]:
    """What the result of this day has of this code and this machine, but for what failed."""
    earlier = harness.todays_result(name_of(part))
    if not earlier or earlier["code"] != at_start["code"]:
        return []
    same_machine = earlier["hardware"]["gpus"] == at_start["hardware"]["gpus"]
    return [row for row in earlier["rows"] if "failure" not in row] if same_machine else []


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="a tiny model; needs no GPU")
    parser.add_argument("--models", default=None, help=f"comma-separated, of {', '.join(SHAPES)}")
    parser.add_argument("--part", default=",".join(USUAL), help="comma-separated")
    parser.add_argument("--resume", action="store_true", help="measure what is missing")
    parser.add_argument("--arms", default=",".join(ARMS), help="comma-separated")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each length")
    parser.add_argument("--max-lengths", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=None, help="the first length of each arm")
    parser.add_argument("--memory-budget", default=None, help=f"memo's; {MEMO_BUDGET}% by default")
    parser.add_argument("--time-limit", type=float, default=None, help="of each part, in seconds")
    options = parser.parse_args(argv)
    if options.models is None and options.dry_run:
        options.models = "tiny"
    if options.max_lengths is None:
        options.max_lengths = DRY_LENGTHS if options.dry_run else MOST_LENGTHS
    known_of = {"models": tuple(SHAPES), "arms": ARMS, "part": tuple(LIMITS_S)}
    for name, known in known_of.items():
        for value in (getattr(options, name) or "").split(",") if not options.child else ():
            if value and value not in known:
                parser.error(f"--{name}: unknown {value!r}; known: {', '.join(known)}")
    return options


def run_arms(
    part: str,
    options: argparse.Namespace,
    deadline: float,
    rows: list[dict[str, Any]],
    save: Callable[[], None],
) -> None:
    """Runs each model in each arm, unless ``rows`` has it already, and adds its row.

    The time until ``deadline`` is shared out evenly. An arm that fails leaves a row that says why.
    """
    measured = {(row["model"], row["arm"], row.get("first")) for row in rows}
    jobs = [job for job in jobs_of(part, options) if job not in measured]
    for index, (model, name, tokens) in enumerate(jobs):
        share_s = (deadline - time.monotonic()) / (len(jobs) - index)
        row: dict[str, Any] = {"model": model, "arm": name, "first": tokens, "lengths": []}
        rows.append(row)
        if share_s < MIN_ARM_S and not options.dry_run:
            row["failure"] = OUT_OF_TIME
            continue
        grows = part in ("fits", "longest")
        most = options.max_lengths if grows else 1
        steps = options.steps if grows or options.dry_run else max(options.steps, MANY_STEPS)
        flags = [f"--child={name}", f"--models={model}", f"--steps={steps}"]
        flags += [f"--time-limit={share_s:.0f}", f"--max-lengths={most}"]
        flags += ["--dry-run"] * options.dry_run
        if tokens:
            flags.append(f"--tokens={tokens}")
        if options.memory_budget:
            flags.append(f"--memory-budget={options.memory_budget}")
        # Kernels that one run has compiled are there for the next part, and for the next run.
        kernels = {"TORCHINDUCTOR_CACHE_DIR": str(KERNELS)}
        arm = harness.Arm(name=name, arguments=tuple(flags), environment=kernels)
        limit_s = max(share_s, deadline - time.monotonic())
        try:
            row.update(harness.run_arm(MODULE, arm, timeout_s=limit_s))
        except harness.ChildFailed as error:
            lines = str(error).splitlines()
            # What is stopped behind the first length has told what it could.
            is_told = error.sent is not None and "exit code" not in lines[0]
            row.update({**(error.sent or {}), "ended" if is_told else "failure": _reason(lines)})
        save()


def jobs_of(part: str, options: argparse.Namespace) -> list[tuple[str, str, int | None]]:
    """Model, arm, and the first length if it is not the model's own, the most telling first."""
    tokens = options.tokens
    chosen = options.models.split(",") if options.models else None
    arms = options.arms.split(",")
    if part == "longest":
        return [((chosen or ["8b"])[0], arm, tokens) for arm in (LORA, STATE)]
    if part == "graphs":
        return [((chosen or ["small"])[0], arm, tokens) for arm in GRAPHS]
    if part == "overlap":
        return [((chosen or ["1b"])[0], OVERLAP, tokens)]
    models = chosen or ["1b", "8b"]
    if part == "speed" and not options.memory_budget:
        number = 1 if options.dry_run else len(SPEED_BUDGETS)
        budgets = [f"memo:{budget}" for budget in SPEED_BUDGETS[:number]]
        arms = [each for arm in arms for each in (budgets if arm == "memo" else [arm])]
    lengths = SPEED_TOKENS if part == "speed" and not (tokens or options.dry_run) else (tokens,)
    return [(model, arm, length) for length in lengths for model in models for arm in arms]


def _reason(lines: list[str]) -> str:
    """The exception that ended an arm; of one that was ended that it was."""
    return lines[-1] if "exit code" in lines[0] else lines[0]


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """One model in one arm at growing lengths, until memory or time ends."""
    harness.register_memo()
    limit_s = math.inf if options.time_limit is None else options.time_limit
    deadline = time.monotonic() + limit_s
    trainer = Trainer(options.child, SHAPES[options.models], options)
    rows: list[dict[str, Any]] = []
    tokens, growth = options.tokens or trainer.shape.tokens, list(GROWTH)
    ended = "as many lengths as were asked for"
    while len(rows) < options.max_lengths:
        begin = time.monotonic()
        if rows and begin + rows[-1]["took_s"] > deadline:
            ended = "out of time"
            break
        refusal = trainer.try_length(tokens, rows)
        if refusal is None:
            rows[-1]["took_s"] = time.monotonic() - begin
            if options.max_lengths > 1:  # the next one may be stopped
                harness.send_result({"lengths": rows, "ended": "stopped"})
        else:
            ended = refusal
            growth.pop(0)
        if not growth or not rows:
            break
        tokens = int(rows[-1]["tokens"] * growth[0])
        if len(growth) < len(GROWTH) and refusal is None:
            break
    return {"lengths": rows, "ended": ended}


class Trainer:
    """One model as one arm trains it."""

    def __init__(self, arm: str, shape: Shape, options: argparse.Namespace) -> None:
        import torch

        self.arm, self.shape, self.options = arm, shape, options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = make_model(shape, self.device)
        if arm == LORA:
            add_adapters(self.model)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        if arm == STATE:
            import memo_compile

            self.optimizer = memo_compile.offload(torch.optim.AdamW(trained, lr=1e-5))
        self.loss = self._compiled(self._loss)

    def _loss(self, ids: Any) -> Any:
        # Only the loss: logits that are returned would have to exist as a whole in every arm.
        return self.model(input_ids=ids, labels=ids).loss

    def _compiled(self, loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
        import torch

        if "checkpointing" in self.arm:
            self.model._set_gradient_checkpointing(gradient_checkpointing_func=self._checkpoint)
            return loss
        if self.arm.startswith("memo"):
            settings: dict[str, Any] = {"strict": True}
            budget = self.arm.partition(":")[2] or self.options.memory_budget
            if self.options.dry_run:
                settings |= {"lowering": "aten", "costs": "roofline"}
            if self.arm == OVERLAP:
                settings["policy"] = "full-offload"
            elif self.arm == GRAPHS[0]:
                settings["mode"] = "reduce-overhead"
            elif self.arm not in GRAPHS and (budget or not self.options.dry_run):
                settings["memory_budget"] = budget or MEMO_BUDGET
            return torch.compile(loss, backend="memo", options=settings)
        if self.arm == "inductor-budget":
            import torch._functorch.config as functorch_config

            functorch_config.activation_memory_budget = ACTIVATION_BUDGET
        mode = "reduce-overhead" if self.arm == "inductor-graphs" else None
        if self.options.dry_run:
            return torch.compile(loss, backend="eager")
        return torch.compile(loss, mode=mode)

    def try_length(self, tokens: int, rows: list[dict[str, Any]]) -> str | None:
        """Train at ``tokens`` and add a row; what refused it when it does not fit, else None."""
        import torch

        from memo_compile.errors import Infeasible

        try:
            rows.append(self._length(tokens))
            return None
        except torch.OutOfMemoryError as error:
            return f"{tokens} tokens: {str(error).splitlines()[0][:80]}"
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, Infeasible | torch.OutOfMemoryError):
                raise
            return f"{tokens} tokens: {str(error.inner_exception).splitlines()[0][:80]}"
        finally:
            self.model.zero_grad(set_to_none=True)
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _length(self, tokens: int) -> dict[str, Any]:
        import torch

        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(self.shape.vocab, (1, tokens), generator=generator).to(self.device)
        begin = time.perf_counter()
        self._step(ids)
        first_s = time.perf_counter() - begin
        self.model.zero_grad(set_to_none=True)
        held = self._held_bytes(ids)
        with harness.physical_peak(self.device, held) as peak:
            self._forward_backward(ids)
        times, host_times = zip(*(self._timed(ids) for _ in range(self.options.steps)), strict=True)
        return {
            "tokens": tokens,
            "peak_bytes": peak.peak_bytes,
            "step_s": statistics.median(times),
            "host_s": statistics.median(host_times),
            "tokens_per_s": tokens / statistics.median(times),
            "first_step_s": first_s,
            **memo_facts(self.arm),
            **(self._copies(ids) if self.arm == OVERLAP else {}),
        }

    def _held_bytes(self, ids: Any) -> int:
        """Between two steps. CUDA: all that is allocated, cuBLAS's workspaces too, as in a plan."""
        import torch

        if self.device.type == "cuda":
            return torch.cuda.memory_allocated()
        return harness.held_bytes(self.model, self.optimizer, [ids])

    def _copies(self, ids: Any) -> dict[str, Any]:
        """One step under the profiler: seconds of copies, and of them beside a kernel."""
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
        with profile(activities=activities) as profiler:
            self._step(ids)
        path = harness.RESULTS / "gpu_overlap-trace.json.gz"
        keeps_trace = on_gpu and not self.options.dry_run
        if keeps_trace:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        events = [event for event in profiler.events() if "CUDA" in str(event.device_type)]
        copies = [event.time_range for event in events if "Memcpy" in event.name]
        kernels = [event.time_range for event in events if "Mem" not in event.name]
        hidden_us = overlap_us(
            [(each.start, each.end) for each in copies],
            [(each.start, each.end) for each in kernels],
        )
        return {
            "copies_s": sum(each.end - each.start for each in copies) / 1e6,
            "hidden_s": hidden_us / 1e6,
            "trace": str(path.name) if keeps_trace else None,
        }

    def _timed(self, ids: Any) -> tuple[float, float]:
        """Seconds of a step, and until the host has launched it."""
        begin = time.perf_counter()
        host_s = self._step(ids) - begin
        return time.perf_counter() - begin, host_s

    def _step(self, ids: Any) -> float:
        """One step; returns when the host had launched it."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._forward_backward(ids)
        self.optimizer.step()
        launched = time.perf_counter()
        float(loss)  # waits for the device
        return launched

    def _forward_backward(self, ids: Any) -> Any:
        loss = self.loss(ids)
        loss.backward()
        return loss.detach()

    def _checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One layer, checkpointed; its input goes to the host where the arm says so."""
        import torch
        from torch.utils.checkpoint import checkpoint

        hooks: Any = contextlib.nullcontext()
        if self.arm == "offloaded-checkpointing":  # as transformers 5 does it with offload=True
            hooks = torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")
        with hooks:
            return checkpoint(function, *args, use_reentrant=False, **kwargs)


def overlap_us(copies: list[Interval], kernels: list[Interval]) -> float:
    """How long a copy of ``copies`` ran while a kernel did; kernels may overlap each other."""
    busy: list[list[float]] = []
    for start, end in sorted(kernels):
        if busy and start <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], end)
        else:
            busy.append([start, end])
    return sum(
        max(0.0, min(end, until) - max(start, since))
        for start, end in copies
        for since, until in busy
    )


def make_model(shape: Shape, device: Any) -> Any:
    """A bf16 Llama from transformers on ``device``, unmodified, from a config: no download."""
    import torch

    from memo_compile.offline.shapes.transformer import default_dtype

    with default_dtype(torch.bfloat16), device:
        return harness.llama(
            layers=shape.layers,
            hidden=shape.hidden,
            tokens=2**20,
            vocab=shape.vocab,
            intermediate_size=shape.ffn,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
        )


def add_adapters(model: Any) -> None:
    """Freezes ``model``, and puts low-rank adapters that train beside its linear layers."""
    import torch
    from torch import nn

    class Adapted(nn.Module):
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base, weight = base, base.weight
            down = torch.randn(LORA_RANK, base.in_features, dtype=weight.dtype) / LORA_RANK
            up = torch.zeros(base.out_features, LORA_RANK, dtype=weight.dtype)
            self.down = nn.Parameter(down.to(weight.device))
            self.up = nn.Parameter(up.to(weight.device))

        def forward(self, x: Any) -> Any:
            return self.base(x) + x @ self.down.t() @ self.up.t()

    model.requires_grad_(False)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, Adapted(child))


def memo_facts(arm: str) -> dict[str, Any]:
    """What memo planned for the last length, in the arm that is memo's."""
    if not arm.startswith("memo"):
        return {}
    plan = harness.memo_plan()
    return {
        "planned_bytes": plan.peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "policy": plan.policy,
        "planning_s": plan.planning_s,
        "lowering_s": plan.lowering_s,
        "offloaded_bytes": plan.offloaded_bytes,
        "recomputed_bytes": plan.recomputed_bytes,
        "simulated_s": None if plan.timeline is None else plan.timeline.step_s,
    }


def judge(rows: list[dict[str, Any]], *, every_arm: bool = False) -> list[str]:
    """What memo promises and does not hold, as sentences, and its arms that died, or all that did.

    On a GPU another arm may run out of memory or of time; a tiny model does not.
    """
    failures = []
    for row in rows:
        where = f"{row['model']} {row['arm']}"
        is_memo = row["arm"].startswith("memo")
        if (every_arm or is_memo) and row.get("failure", OUT_OF_TIME) != OUT_OF_TIME:
            failures.append(f"{where}: {row['failure']}")
        if not is_memo or row["model"] in ("small", "tiny"):  # a few pages decide there
            continue
        for length in row["lengths"]:
            names = ("peak_bytes", "planned_bytes", "budget_bytes")
            peak, planned, budget = (length[name] for name in names)
            if budget is not None and peak > budget:
                failures.append(f"{where}, {length['tokens']} tokens: {peak} over budget {budget}")
            if abs(peak / planned - 1) > MAX_PEAK_DIFFERENCE:
                failures.append(f"{where}, {length['tokens']} tokens: {peak}, planned {planned}")
    return failures


def show(part: str, rows: list[dict[str, Any]]) -> None:
    """The lengths of every arm, and what ended each."""
    cells: list[tuple[str, ...]] = []
    for row in rows:
        for length in row["lengths"]:
            planned = length.get("planned_bytes")
            cells.append(
                (
                    f"{row['model']} {row['arm']}",
                    str(length["tokens"]),
                    format_bytes(length["peak_bytes"]),
                    "-" if planned is None else format_bytes(planned),
                    f"{length['tokens_per_s']:.0f}",
                    f"{length['first_step_s']:.1f} s",
                    *(
                        f"{length.get(name) or 0:.4f}"
                        for name in ("step_s", "host_s", "simulated_s")
                    ),
                )
            )
    columns = ("arm", "tokens", "peak", "planned", "tokens/s", "first step")
    columns += ("step s", "host s", "simulated s")
    harness.print_table(f"{part}: bf16, forward and backward's peak", columns, cells)
    if part == "overlap":
        show_copies(rows)
        return
    for row in rows:
        longest = max((length["tokens"] for length in row["lengths"]), default=0)
        reason = row.get("failure") or row["ended"]
        print(f"{row['model']} {row['arm']}: longest {longest} tokens; ended by: {reason}")


def show_copies(rows: list[dict[str, Any]]) -> None:
    """What was copied, how much of it beside kernels, and what the simulator expected."""
    for row in rows:
        for length in row["lengths"]:
            print(
                f"{row['model']} {row['arm']}: {format_bytes(length['offloaded_bytes'])}, "
                f"copies {length['copies_s']:.3f} s, beside kernels {length['hidden_s']:.3f} s; "
                f"step {length['step_s']:.3f} s, simulated {length['simulated_s'] or 0:.3f} s"
            )
        if "failure" in row:
            print(f"{row['model']} {row['arm']}: {row['failure']}")


if __name__ == "__main__":
    sys.exit(main())
