"""Blocks compiled one by one under one budget, kept: ``python -m benchmarks.regional``.

A Llama of transformers whose decoder layers are compiled in place (``layer.compile``), and a video
transformer of diffusers through its own regional compilation (``compile_repeated_blocks``), each
beside the same model compiled whole. At budgets from the group's floor to none, each in a process
of its own: the physical peak of every step from the second on must be at most 1.01 times the
budget, and no forward runs without a plan from then on. The group's floor must be at most 1.15
times the whole model's. The first step is watched; its peak is printed.

In a regional run head and loss are the user's code, between two blocks, untiled and in ordinary
memory; whole, they are in the graph. What they take at their most is ``between_bytes``.

Each arm that is done is written at once. ``--arms N`` ends after N more of them, and with
``--resume`` those are not run again that stand in today's result and ran the same code. Arms of
one run share compiled kernels, so that the first steps of later ones compile less.
"""

import argparse
import importlib.util
import itertools
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks import harness
from memo_compile.units import format_bytes

MODULE = "benchmarks.regional"
SIZES = {"layers": 6, "hidden": 256, "tokens": 512, "batch": 8, "vocab": 1024, "budgets": 5}
NUM_STEPS = 5
MAX_PEAK_OVER_BUDGET = 1.01
MAX_FLOOR_RATIO = 1.15
SMALL = 1
MAX_REFUSALS = 6
MODELS = ("llama", "diffusers")
NAME = "regional"


def main() -> int:
    """Measure, print the table, write the result; 1 when a promise breaks."""
    parser = harness.parser(__doc__, sizes=SIZES)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--model", choices=MODELS, help="only this one")
    parser.add_argument("--resume", action="store_true", help="keep what today's result has")
    parser.add_argument("--arms", type=int, default=1000, help="run so many at most")
    return harness.run_benchmark(NAME, parser.parse_args(), measure, child)


class OutOfTurns(Exception):
    """As many arms have run as were asked for."""


class Arms:
    """What arms found: those of today's result, and those that run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.found: dict[str, dict[str, Any]] = {}
        self._left = itertools.repeat(None, options.arms)
        self._kernels = tempfile.TemporaryDirectory(prefix="memo-regional-")
        earlier = harness.todays_result(NAME) if options.resume else {}
        if earlier.get("settings") == settings_of(options):
            arms: dict[str, dict[str, Any]] = earlier["arms"]
            self.found = {key: arm for key, arm in arms.items() if arm["code"] == harness.code()}

    def run(self, model: str, name: str, budget: int) -> dict[str, Any]:
        """What the arm found. Raises OutOfTurns: it has not run, and must not."""
        key = f"{model} {name} {budget}"
        if key not in self.found:
            if next(self._left, self) is self:
                raise OutOfTurns(key)
            print(key, file=sys.stderr, flush=True)
            shared = harness.passed_on(self.options, *SIZES)
            arguments = (f"--child={name}", f"--model={model}", *shared, f"--budget={budget}")
            kernels = {"TORCHINDUCTOR_CACHE_DIR": self._kernels.name}
            found = harness.run_arm(
                MODULE, harness.Arm(name=name, arguments=arguments, environment=kernels)
            )
            load = round(os.getloadavg()[0], 2)
            self.found[key] = {**found, "code": harness.code(), "load_at_end": load}
            if not self.options.no_save:
                payload = {"hardware": harness.hardware(), **self.payload()}
                harness.write_results(NAME, {**payload, "failures": ["not all arms have run"]})
        return self.found[key]

    def payload(self) -> dict[str, Any]:
        """What is written of them."""
        return {"settings": settings_of(self.options), "arms": self.found}


def settings_of(options: argparse.Namespace) -> dict[str, int]:
    """The sizes that were asked for."""
    return {name: getattr(options, name) for name in SIZES}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The results of all models, and the promises that do not hold."""
    arms, failures = Arms(options), list[str]()
    results: dict[str, Any] = {}
    for model in MODELS if options.model is None else (options.model,):
        if model == "diffusers" and importlib.util.find_spec("diffusers") is None:
            print("diffusers is not installed (pip install diffusers): its model is left out")
            results[model] = "left out: diffusers is not installed"
            continue
        try:
            results[model] = measured(options, arms, model)
        except OutOfTurns as key:
            failures.append(f"not run yet: {key}, and what follows")
            continue
        failures += (f"{model}: {text}" for text in judge(results[model]))
    return {**arms.payload(), **results, "failures": failures}


def measured(options: argparse.Namespace, arms: Arms, model: str) -> dict[str, Any]:
    """The floors of one model, and its steps at budgets between. Raises OutOfTurns."""
    whole = arms.run(model, "whole-floor", SMALL)["floor_bytes"]
    floor = regional_floor(arms, model)
    unbounded = arms.run(model, "regional", 0)
    span, count = unbounded["planned_bytes"] - floor, options.budgets - 1
    budgets = [floor + span * at // count for at in range(count)]
    rows = [*(arms.run(model, "regional", budget) for budget in budgets), unbounded]
    harness.print_table(
        f"{model}, {options.layers} blocks; floor {format_bytes(floor)}, of the model compiled "
        f"whole {format_bytes(whole)}: {floor / whole:.3f} x",
        ("budget", "planned", "peak from step 2", "peak / budget", "first step", "policy"),
        [table_row(row) for row in rows],
    )
    return {"whole_floor_bytes": whole, "floor_bytes": floor, "rows": rows}


def regional_floor(arms: Arms, model: str) -> int:
    """The smallest budget whose refusals name no other: first of the block, then of the group."""
    budget = SMALL
    for _ in range(MAX_REFUSALS):
        floor: int = arms.run(model, "regional-floor", budget)["floor_bytes"]
        if floor == budget:
            return floor
        budget = floor
    raise RuntimeError(f"floor after floor is refused, the last: {budget}")


def table_row(row: dict[str, Any]) -> tuple[str, ...]:
    """One budget as the table shows it."""
    budget, peak = row["budget_bytes"], max(row["peaks_bytes"][1:])
    return (
        format_bytes(budget) if budget else "none",
        format_bytes(row["planned_bytes"]),
        format_bytes(peak),
        f"{peak / budget:.4f}" if budget else "",
        format_bytes(row["peaks_bytes"][0]),
        row["policy"],
    )


def judge(found: dict[str, Any]) -> list[str]:
    """The promises that do not hold, as sentences."""
    failures = []
    for row in found["rows"]:
        budget, peak = row["budget_bytes"], max(row["peaks_bytes"][1:])
        if budget and peak > MAX_PEAK_OVER_BUDGET * budget:
            failures.append(f"budget {budget}: measured {row['peaks_bytes']}")
        if row["unplanned"][-1] != row["unplanned"][0]:
            failures.append(f"budget {budget}: forwards without a plan: {row['unplanned']}")
    if found["floor_bytes"] > MAX_FLOOR_RATIO * found["whole_floor_bytes"]:
        failures.append(f"floor {found['floor_bytes']}, whole {found['whole_floor_bytes']}")
    return failures


def child(options: argparse.Namespace) -> dict[str, Any]:
    """One arm in its process."""
    arms: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "whole-floor": run_floor,
        "regional-floor": run_floor,
        "regional": run_regional,
    }
    return arms[options.child](options)


def make_step(options: argparse.Namespace) -> tuple[Any, Any, Callable[[], None]]:
    """The model, its words, and a step with new gradients, compiled for ``options.budget``."""
    import torch

    model, inputs, loss = (llama if options.model == "llama" else video_transformer)(options)
    compiled = {"optimizer_state_bytes_per_parameter": 0, "strict": True}
    if options.budget:
        compiled["memory_budget"] = options.budget
    step: Any = model
    if options.child == "whole-floor":
        step = torch.compile(model, backend="memo", options={**compiled, "outputs": "dropped"})
    elif options.model == "llama":
        for layer in model.model.layers:
            layer.compile(backend="memo", options=compiled)
    else:
        model.compile_repeated_blocks(backend="memo", options=compiled)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        loss(step).backward()

    return model, inputs, run


def llama(options: argparse.Namespace) -> tuple[Any, list[Any], Callable[[Any], Any]]:
    """The language model, its words, and its own loss."""
    import torch

    sizes = {name: getattr(options, name) for name in ("layers", "hidden", "tokens", "vocab")}
    ids = torch.randint(options.vocab, (options.batch, options.tokens))
    return harness.llama(**sizes), [ids], lambda step: step(input_ids=ids, labels=ids).loss


def video_transformer(options: argparse.Namespace) -> tuple[Any, list[Any], Callable[[Any], Any]]:
    """Wan's transformer of diffusers on latents of as many tokens, and a loss of its prediction."""
    import torch
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    side = 2 * round(options.tokens**0.5)  # patches of two by two
    model = WanTransformer3DModel(
        num_attention_heads=options.hidden // 64,
        attention_head_dim=64,
        text_dim=options.hidden,
        ffn_dim=4 * options.hidden,
        num_layers=options.layers,
    ).train()
    latents, noise = (torch.randn(options.batch, 16, 1, side, side) for _ in range(2))
    words = torch.randn(options.batch, 32, options.hidden)
    times = torch.randint(1000, (options.batch,))

    def loss(step: Any) -> Any:
        found = step(latents, times, words, return_dict=False)[0]
        return torch.nn.functional.mse_loss(found, noise)

    return model, [latents, noise, words, times], loss


def run_floor(options: argparse.Namespace) -> dict[str, Any]:
    """The floor that a budget's refusal names, of the block or the group; or the budget itself."""
    _, _, run = make_step(options)
    floor = harness.floor_if_refused(run) or harness.floor_if_refused(run)
    return {"floor_bytes": options.budget if floor is None else floor}


def run_regional(options: argparse.Namespace) -> dict[str, Any]:
    """Steps under one budget (0: none): physical peaks, what was planned, what ran without."""
    import gc

    import memo_compile

    model, inputs, run = make_step(options)
    peaks, unplanned = [], []
    for _ in range(NUM_STEPS):
        model.zero_grad(set_to_none=True)
        gc.collect()
        with harness.physical_peak("cpu", harness.held_bytes(model, None, inputs)) as peak:
            run()
        peaks.append(peak.peak_bytes)
        unplanned.append(memo_compile.report().unplanned_steps)
    (group,) = memo_compile.report().groups
    return {
        "budget_bytes": options.budget,
        "planned_bytes": group.peak_bytes,
        "arena_bytes": group.arena_bytes,
        "host_bytes": group.host_bytes,
        "offloaded_bytes": group.offloaded_bytes,
        "recomputed_bytes": group.recomputed_bytes,
        "between_bytes": group.between_bytes,
        "policy": group.policy,
        "peaks_bytes": peaks,
        "unplanned": unplanned,
        "active": memo_compile.report().active,
    }


if __name__ == "__main__":
    sys.exit(main())
