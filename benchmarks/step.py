"""One training step of an unmodified Llama: ``python -m benchmarks.step``.

Arms, each in a process of its own: eager, activation checkpointing, torch.compile's inductor, the
same with three activation memory budgets, memo. Reported are the physical peak from the forward's
entry to the backward's exit, the median step with its optimizer, and the first step (compilation
included) with empty caches.

memo passes with a median step of at most 1.05 x inductor's and a peak of at most 1.01 x; the exit
code is 1 when it does not, or when an arm's loss differs from eager's.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import harness
from memo_compile.units import format_bytes

MODULE = "benchmarks.step"
SIZES = {"layers": 8, "hidden": 512, "tokens": 1024, "batch": 1}
MAX_STEP_RATIO = 1.05
MAX_PEAK_RATIO = 1.01
MAX_LOSS_DIFFERENCE = 1e-3
BUDGETS = (0.1, 0.3, 0.5)
ARMS = ("eager", "checkpointing", "inductor", *(f"budget-{b}" for b in BUDGETS), "memo")
JUDGED = ("inductor", "memo")
"""A machine's speed drifts within minutes: these two run at once and step in turns."""
NUM_WARM_STEPS = 3
"""The first compiles; then gradients, optimizer state and the allocator settle."""
NUM_PEAK_STEPS = 3


def main() -> int:
    """Run every arm, print the table, write the results, judge memo."""
    return harness.run_benchmark("step", arguments(), measure, run_child)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All arms, and the verdict on memo."""
    sizes = {name: getattr(options, name) for name in SIZES}
    shared = harness.passed_on(options, *SIZES, "optimizer", "steps", "device", "dtype")
    names = options.arms.split(",")
    arms = [harness.Arm(name=n, arguments=(f"--child={n}", *shared)) for n in names]
    rounds = harness.interleaved(MODULE, [arm for arm in arms if arm.name not in JUDGED], 1)
    rounds |= in_turns([arm for arm in arms if arm.name in JUDGED], options.rounds)
    results = {name: harness.medians(rounds[name]) for name in names}
    ratio = step_ratio(rounds)
    failures = judge(results, ratio)
    settings = {**sizes, "optimizer": options.optimizer, "device": options.device}
    if not options.json:
        show(results, settings, ratio)
    found = {"settings": settings, "step_ratio": ratio, "arms": results, "rounds": rounds}
    return found | {"failures": failures}


def in_turns(arms: list[harness.Arm], num_rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Results per arm, one a round; the arms of a round step in turns."""
    rounds: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for number in range(num_rounds if arms else 0):
        names = " and ".join(rounds)
        print(f"round {number + 1}/{num_rounds}: {names} in turns", file=sys.stderr, flush=True)
        for name, result in harness.run_in_turns(MODULE, arms).items():
            rounds[name].append(result)
    return rounds


def step_ratio(rounds: dict[str, list[dict[str, Any]]]) -> float | None:
    """Median over neighbouring steps of memo's seconds over inductor's; None without the two."""
    if not all(name in rounds for name in JUDGED):
        return None
    theirs, mine = (
        [s for measured in rounds[name] for s in measured["steps_s"]] for name in JUDGED
    )
    return statistics.median(memo / inductor for inductor, memo in zip(theirs, mine, strict=True))


def arguments() -> argparse.Namespace:
    """The command line; defaults fit two cores and take about ten minutes."""
    parser = harness.parser(__doc__, sizes=SIZES)
    parser.add_argument("--arms", default=",".join(ARMS), help="comma-separated")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per round")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of memo and inductor; others run once"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for name in options.arms.split(","):
        if name not in ARMS:
            parser.error(f"--arms: unknown arm {name!r}; known: {', '.join(ARMS)}")
    return options


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """Train for a few steps in one arm. Sizes in bytes, times in seconds."""
    import torch

    model = make_model(options)
    step = compiled(model, options.child)
    optimizer = make_optimizer(options.optimizer, model)
    generator = torch.Generator().manual_seed(1)
    shape = (options.batch, options.tokens)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator).to(options.device)

    def forward_backward() -> Any:
        # Gradients stay in place: the baseline of the peak then holds them in every arm.
        optimizer.zero_grad(set_to_none=False)
        loss = step(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    def train() -> float:
        loss = forward_backward()
        optimizer.step()
        return float(loss)

    harness.wait_turn()
    warm = [timed(train) for _ in range(NUM_WARM_STEPS)]
    times = warm + [in_turn(train) for _ in range(options.steps)]
    harness.wait_turn()
    arena_device = options.device if options.child == "memo" else None
    held = harness.held_bytes(model, optimizer, [ids], arena_device=arena_device)
    with harness.physical_peak(options.device, held) as peak:
        for _ in range(NUM_PEAK_STEPS):
            forward_backward()
    return {
        "peak_bytes": peak.peak_bytes,
        "growth_bytes": peak.growth_bytes,
        "held_bytes": held,
        "step_s": statistics.median(seconds for seconds, _loss in times[NUM_WARM_STEPS:]),
        "steps_s": [seconds for seconds, _loss in times[NUM_WARM_STEPS:]],
        "first_step_s": times[0][0],
        "losses": [loss for _seconds, loss in times],
        **memo_facts(options.child),
    }


def timed(train: Callable[[], float]) -> tuple[float, float]:
    """Seconds of one step and its loss (reading the loss waits for the device)."""
    begin = time.perf_counter()
    loss = train()
    return time.perf_counter() - begin, loss


def in_turn(train: Callable[[], float]) -> tuple[float, float]:
    """``timed`` when it is this arm's turn."""
    harness.wait_turn()
    return timed(train)


def make_model(options: argparse.Namespace) -> Any:
    """A Llama from transformers, unmodified, from a config: no download."""
    import torch

    model = harness.llama(
        layers=options.layers, hidden=options.hidden, tokens=options.tokens, vocab=8192
    )
    return model.to(options.device, getattr(torch, options.dtype))


def make_optimizer(name: str, model: Any) -> Any:
    """AdamW, or SGD with momentum."""
    import torch

    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=3e-4)
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def compiled(model: Any, arm: str) -> Any:
    """``model`` as ``arm`` runs it."""
    import torch

    if arm == "eager":
        return model
    if arm == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model
    if arm.startswith("budget-"):
        import torch._functorch.config as functorch_config

        functorch_config.activation_memory_budget = float(arm.removeprefix("budget-"))
    return torch.compile(model, backend="memo" if arm == "memo" else "inductor")


def memo_facts(arm: str) -> dict[str, Any]:
    """What memo planned, in the arm that is memo's; an inactive plan is an error."""
    if arm != "memo":
        return {}
    plan = harness.memo_plan()
    return {
        "planned_peak_bytes": plan.peak_bytes,
        "arena_bytes": plan.arena_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "outside_bytes": plan.outside_bytes,
    }


def judge(results: dict[str, dict[str, Any]], step_ratio: float | None) -> list[str]:
    """The promises that do not hold, as sentences."""
    failures = []
    expected = results.get("eager", {}).get("losses", [])
    for name, found in results.items():
        for step, (loss, wanted) in enumerate(zip(found["losses"], expected, strict=False)):
            if not math.isfinite(loss) or abs(loss - wanted) > MAX_LOSS_DIFFERENCE * abs(wanted):
                failures.append(f"{name}: loss {loss} of step {step + 1}, eager has {wanted}")
                break
    if step_ratio is not None:
        peak_ratio = results["memo"]["peak_bytes"] / results["inductor"]["peak_bytes"]
        for what, ratio, limit in (
            ("step", step_ratio, MAX_STEP_RATIO),
            ("peak", peak_ratio, MAX_PEAK_RATIO),
        ):
            if ratio > limit:
                failures.append(f"memo: its {what} is {ratio:.3f} x inductor's, at most {limit}")
    return failures


def show(
    results: dict[str, dict[str, Any]], settings: dict[str, Any], step_ratio: float | None
) -> None:
    """The table: absolute numbers, and ratios to inductor; memo's is that of neighbouring steps."""
    base = results.get("inductor")
    rows = []
    for name, found in results.items():
        planned = found.get("planned_peak_bytes")
        ratio = found["step_s"] / base["step_s"] if base else None
        if name == "memo":
            ratio = step_ratio
        rows.append(
            (
                name,
                format_bytes(found["peak_bytes"]),
                f"{found['peak_bytes'] / base['peak_bytes']:.3f}" if base else "-",
                format_bytes(planned) if planned else "-",
                f"{found['step_s']:.3f} s",
                f"{ratio:.3f}" if ratio else "-",
                f"{found['first_step_s']:.1f} s",
            )
        )
    title = "Llama, " + ", ".join(f"{key} {value}" for key, value in settings.items())
    columns = ("arm", "physical peak", "/ inductor", "planned", "step", "/ inductor", "first step")
    harness.print_table(title, columns, rows)


if __name__ == "__main__":
    sys.exit(main())
