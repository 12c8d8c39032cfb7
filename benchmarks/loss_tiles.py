"""The logits never exist at once: ``python -m benchmarks.loss_tiles``.

A Llama with a vocabulary of 131,072 and 2,048 tokens, compiled as a function that returns only the
loss, so that its logits are no output of the graph. Arms, each in a process of its own: inductor,
memo without a bound, memo under a budget of parameters, gradients and half of the logits. Then
inductor and memo without a bound side by side in one process, steps interleaved.

It passes when memo's peak without a bound is at most inductor's, under the budget, less parameters
and gradients, at most a tenth of the logits in 32 bits; when memo's step takes no longer than
inductor's in the median of the pairs; and when its gradients are as close to eager's as inductor's
(at most the larger of 1e-5 and twice inductor's error, relative to the largest gradient).
"""

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness
from memo_compile.units import format_bytes

MODULE = "benchmarks.loss_tiles"
SIZES = {"layers": 2, "hidden": 128, "tokens": 2048, "vocab": 131072}
ARMS = ("eager", "inductor", "memo", "memo-budget")
PAIR = "pair"
NUM_PAIRS = 9
MAX_STEP_RATIO = 1.0
MAX_OF_LOGITS = 0.1
MAX_ERROR = 1e-5
BYTES = 4
"""Of a logit in 32 bits."""


def main() -> int:
    """Run every arm, print the table, write the results, judge."""
    parser = harness.parser(__doc__, sizes=SIZES)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return harness.run_benchmark("loss_tiles", parser.parse_args(), measure, run_child)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All arms, and the verdict."""
    shared = harness.passed_on(options, *SIZES)
    with tempfile.TemporaryDirectory(prefix="memo-bench-gradients-") as folder:
        results = {}
        for name in ARMS:
            print(name, file=sys.stderr, flush=True)
            child = (f"--child={name}", f"--folder={folder}", *shared)
            results[name] = harness.run_arm(MODULE, harness.Arm(name=name, arguments=child))
        pairs = harness.run_arm(
            MODULE, harness.Arm(name=PAIR, arguments=(f"--child={PAIR}", *shared))
        )
    logits = options.tokens * options.vocab * BYTES
    show(results, logits, pairs)
    return {
        "settings": {name: getattr(options, name) for name in SIZES},
        "logits_bytes": logits,
        "arms": results,
        "pairs": pairs,
        "failures": judge(results, logits, pairs["ratio"]),
    }


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """One arm: its gradients against eager's, then the physical peak of its step."""
    if options.child == PAIR:
        return run_pair(options)
    import torch

    from benchmarks import budget

    model, ids = budget.make_model(options)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    bound = 2 * parameters + options.tokens * options.vocab * BYTES // 2
    run = make_step(model, ids, options.child, bound)
    run()
    eager = Path(options.folder) / "eager.pt"
    gradients = {name: p.grad for name, p in model.named_parameters()}
    if options.child == "eager":
        torch.save(gradients, eager)
        return {"error": 0.0}
    expected = torch.load(eager, mmap=True)
    error = worst_error(gradients, expected)
    del expected, gradients
    peak = budget.measured_peak(model, ids, run, {})
    above = peak["peak_bytes"] - 2 * parameters
    facts = memo_facts() if options.child.startswith("memo") else {}
    return {**peak, "above_bytes": above, "error": error, "bound_bytes": bound, **facts}


def run_pair(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of inductor and of memo without a bound, in turns: the median of their ratios."""
    from benchmarks import budget

    steps = {}
    for name in ("inductor", "memo"):
        model, ids = budget.make_model(options)
        steps[name] = make_step(model, ids, name)
    for step in steps.values():
        step()
        step()
    rounds = [{name: budget.timed(step) for name, step in steps.items()} for _ in range(NUM_PAIRS)]
    found = {f"{name}_s": statistics.median(times[name] for times in rounds) for name in steps}
    ratio = statistics.median(times["memo"] / times["inductor"] for times in rounds)
    return {"ratio": ratio, **found}


def make_step(model: Any, ids: Any, arm: str, bound: int = 0) -> Callable[[], None]:
    """One training step of ``arm`` without its optimizer."""

    def loss(token_ids: Any) -> Any:
        return model(input_ids=token_ids, labels=token_ids).loss

    run = compiled(loss, arm, bound)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        run(ids).backward()

    return step


def compiled(loss: Any, arm: str, bound: int) -> Any:
    """``loss`` as ``arm`` runs it."""
    import torch

    if arm == "eager":
        return loss
    if arm == "inductor":
        return torch.compile(loss)
    options: dict[str, Any] = {"strict": True, "optimizer_state_bytes_per_parameter": 0}
    if arm == "memo-budget":
        options["memory_budget"] = bound
    return torch.compile(loss, backend="memo", options=options)


def worst_error(gradients: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference over the largest gradient; infinite for what is not finite."""
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    worst = max(
        float((gradients[name] - gradient).abs().max()) for name, gradient in expected.items()
    )
    return worst / scale if math.isfinite(worst) else math.inf


def memo_facts() -> dict[str, Any]:
    """What memo planned; a step that ran without its plan is an error."""
    plan = harness.memo_plan()
    return {"planned_bytes": plan.peak_bytes, "policy": plan.policy}


def judge(results: dict[str, dict[str, Any]], logits: int, ratio: float) -> list[str]:
    """The promises that do not hold, as sentences."""
    failures = []
    allowed = max(MAX_ERROR, 2 * results["inductor"]["error"])
    for name in ("memo", "memo-budget"):
        if results[name]["error"] > allowed:
            failures.append(f"{name}: gradients differ by {results[name]['error']:.2e}")
    found = results["memo-budget"]
    if found["above_bytes"] > MAX_OF_LOGITS * logits:
        failures.append(f"peak {found['above_bytes']} above the model, logits {logits}")
    peaks = {name: results[name]["peak_bytes"] for name in ("memo", "inductor")}
    if peaks["memo"] > peaks["inductor"]:
        failures.append(f"without a bound: peak {peaks['memo']}, inductor's {peaks['inductor']}")
    if ratio > MAX_STEP_RATIO:
        failures.append(f"without a bound: {ratio:.3f} x inductor's step")
    if found["peak_bytes"] > found["bound_bytes"]:
        failures.append(f"peak {found['peak_bytes']}, budget {found['bound_bytes']}")
    return failures


def show(results: dict[str, dict[str, Any]], logits: int, pairs: dict[str, Any]) -> None:
    """The table, and the pairs in a line."""
    rows = [
        (
            name,
            format_bytes(measured["peak_bytes"]),
            format_bytes(measured["above_bytes"]),
            f"{measured['above_bytes'] / logits:.3f}",
            f"{measured['error']:.1e}",
        )
        for name, measured in results.items()
        if name != "eager"
    ]
    columns = ("arm", "peak", "less parameters and gradients", "/ logits", "gradient error")
    harness.print_table(f"logits of {format_bytes(logits)} in 32 bits", columns, rows)
    print(
        f"without a bound, {NUM_PAIRS} pairs: memo {pairs['memo_s']:.2f} s, "
        f"inductor {pairs['inductor_s']:.2f} s, median ratio {pairs['ratio']:.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
