"""How tight the arena is: ``python -m benchmarks.arena``.

For GPT-2 in its own size (1024 tokens) and a small Llama, both from transformers, at several
depths: the arena over the largest sum of live bytes; the arena with memory outside it over what
plain Inductor's wrappers keep alive at their worst line (``live_bytes``, which shares no code with
memo), on both sides without what the step makes for the user; saved activations outside the arena;
and the physical growth of a step against the plan. Each case runs in processes of its own.

What kernels allocate themselves is copied into the arena, and both count: the second ratio may be
above 1.
"""

import argparse
import json
import sys
from typing import Any

from benchmarks import harness
from memo_compile.units import format_bytes

MODULE = "benchmarks.arena"
MAX_ARENA_RATIO = 1.05
MAX_LIVE_RATIO = 1.1
MAX_PHYSICAL_RATIO = 1.02
MODELS = ("gpt2", "llama")
DEPTHS = (4, 8, 16, 32)
NUM_PEAK_STEPS = 3


def main() -> int:
    """Run every case, print the table, write the results; 1 when a bound is broken."""
    return harness.run_benchmark("arena", arguments(), measure, run_child)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All cases, and what breaks a bound."""
    rows = []
    for model in options.models.split(","):
        for depth in (int(depth_text) for depth_text in options.depths.split(",")):
            rows.append(run_case(model, depth, options))
            print(json.dumps(rows[-1]), file=sys.stderr)
    show(rows)
    return {"rows": rows, "failures": [failure for row in rows for failure in judge(row)]}


def arguments() -> argparse.Namespace:
    """The command line; the defaults take about twenty minutes on two cores."""
    parser = harness.parser(__doc__, sizes={"hidden": 512, "tokens": 512})  # of Llama
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--depths", default=",".join(str(depth) for depth in DEPTHS))
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_case(model: str, depth: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row: memo's plan and physical growth, and plain Inductor's live bytes."""
    row: dict[str, Any] = {"model": model, "layers": depth}
    for arm in ("memo", "inductor"):
        sizes = harness.passed_on(options, "hidden", "tokens")
        arguments = (f"--child={arm}:{model}", f"--layers={depth}", *sizes)
        row.update(harness.run_arm(MODULE, harness.Arm(name=arm, arguments=arguments)))
    row["arena_ratio"] = row["arena_bytes"] / row["lower_bound_bytes"]
    inductor_bytes = row["inductor_live_bytes_without_results"]
    row["live_ratio"] = (row["arena_bytes"] + row["outside_bytes"]) / inductor_bytes
    row["physical_ratio"] = row["physical_bytes"] / row["planned_bytes"]
    return row


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """One arm of one case, in this process."""
    import torch

    arm, name = options.child.split(":")
    model, ids = make_model(name, options)
    step = torch.compile(model, backend=arm)

    def forward_backward() -> Any:
        out = step(input_ids=ids, labels=ids)
        out.loss.backward()
        return out

    forward_backward()
    forward_backward()
    if arm == "memo":
        return memo_numbers(model, ids, forward_backward)
    from benchmarks.live_bytes import LiveBytes

    with LiveBytes() as live:
        out = forward_backward()
    outputs = [value for value in out.values() if isinstance(value, torch.Tensor)]
    return {
        "inductor_live_bytes": live.peak(),
        "inductor_live_bytes_without_results": live.peak_without_results(outputs),
    }


def memo_numbers(model: Any, ids: Any, forward_backward: Any) -> dict[str, Any]:
    """The plan's numbers, and how much a step grows the process beside what it held before."""
    held = harness.held_bytes(model, None, [ids])
    with harness.physical_peak("cpu", held) as peak:
        for _ in range(NUM_PEAK_STEPS):
            forward_backward()
    plan = harness.memo_plan()
    return {
        "arena_bytes": plan.arena_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "outside_bytes": plan.outside_bytes,
        "saved_outside_bytes": plan.outside_bytes_by_kind.get("unplanned outputs", 0),
        "peak_bytes": plan.peak_bytes,
        "planned_bytes": plan.peak_bytes - plan.fixed.optimizer_state,
        "physical_bytes": peak.peak_bytes,
        "num_regions": plan.num_regions,
    }


def make_model(name: str, options: argparse.Namespace) -> tuple[Any, Any]:
    """An unmodified transformers model from a config, and its token ids."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tokens = options.tokens
    if name == "gpt2":
        config = GPT2Config(
            n_layer=options.layers,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        tokens = config.n_positions
        model: Any = GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"  # transformers guesses it, with a graph break
    else:
        model = harness.llama(
            layers=options.layers, hidden=options.hidden, tokens=tokens, vocab=4096
        )
    generator = torch.Generator().manual_seed(1)
    return model.train(), torch.randint(model.config.vocab_size, (1, tokens), generator=generator)


def judge(row: dict[str, Any]) -> list[str]:
    """What the row breaks, in words."""
    where = f"{row['model']}, {row['layers']} layers"
    bounds = {
        "arena_ratio": MAX_ARENA_RATIO,
        "live_ratio": MAX_LIVE_RATIO,
        "physical_ratio": MAX_PHYSICAL_RATIO,
    }
    found = [
        f"{where}: {name} is {row[name]:.4f}, at most {most}"
        for name, most in bounds.items()
        if row[name] > most
    ]
    if row["saved_outside_bytes"]:
        found.append(f"{where}: {row['saved_outside_bytes']} B of saved activations outside")
    return found


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    harness.print_table(
        "arena",
        [
            "model",
            "layers",
            "arena",
            "/ live bytes",
            "with outside / inductor",
            "physical / plan",
        ],
        [
            [
                row["model"],
                str(row["layers"]),
                format_bytes(row["arena_bytes"]),
                f"{row['arena_ratio']:.4f}",
                f"{row['live_ratio']:.4f}",
                f"{row['physical_ratio']:.4f}",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
