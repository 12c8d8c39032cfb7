"""Seconds for each new sequence length: ``python -m benchmarks.lengths``.

Unmodified models of transformers, small, each trained on one length after another; memo, and
plain Inductor with ``dynamic=True``, each in a process of its own with empty caches. A new length
costs what its first step takes beyond its second. Printed are the first compilation, the median
and the largest of the new lengths, and the sum of all first steps. A new length is judged by the
processor time of the process, which other work on the machine does not lengthen.
"""

import argparse
import itertools
import statistics
import sys
import time
from typing import Any

from benchmarks import harness

MODULE = "benchmarks.lengths"
MODELS = ("llama", "qwen3")
ARMS = ("memo", "inductor")
MAX_NEW_LENGTH_S = 0.2
"""What a new length may cost, the first few apart, on two cores."""
MAX_TOTAL_RATIO = 0.5
"""All steps of all lengths, memo over Inductor."""
NUM_SETTLING = 3
"""Lengths until code with a symbol exists: the first, another, and the one that it is made for."""
SHORTEST, STEP = 33, 7
"""Lengths are ``SHORTEST + STEP * k`` in an order that jumps: odd and even, few multiples of 8."""


def main() -> int:
    """Run every arm of every model, print the table, write the results, judge."""
    return harness.run_benchmark("lengths", arguments(), measure, run_child)


def arguments() -> argparse.Namespace:
    """The command line; the defaults take about half an hour on two cores."""
    sizes = {"lengths": 40, "layers": 8, "hidden": 64, "rounds": 1}
    parser = harness.parser(__doc__, sizes=sizes)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--lowering", default="inductor", choices=("inductor", "aten"))
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All arms of all models, and the verdict."""
    models = options.models.split(",")
    shared = harness.passed_on(options, "lengths", "layers", "hidden", "lowering")
    arms = [
        harness.Arm(
            name=f"{arm}-{model}", arguments=(f"--child={arm}", f"--model={model}", *shared)
        )
        for model, arm in itertools.product(models, ARMS)
    ]
    rounds = harness.interleaved(MODULE, arms, options.rounds)
    results = {name: harness.medians(values) for name, values in rounds.items()}
    show(results, models)
    return {"results": results, "rounds": rounds, "failures": judge(results, models)}


def order_of(count: int) -> list[int]:
    """``count`` different lengths; neighbours are far apart."""
    stride = next(n for n in range(count // 2 + 1, 2 * count + 2) if _is_coprime(n, count))
    return [SHORTEST + STEP * (k * stride % count) for k in range(count)]


def _is_coprime(first: int, second: int) -> bool:
    while second:
        first, second = second, first % second
    return first == 1


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """Two steps of each length; how long the first took, and how much longer than the second."""
    import torch

    model = make_model(options)
    if options.child == "memo":
        memo_options = {"lowering": options.lowering, "strict": True, "max_plans": options.lengths}
        step = torch.compile(model, backend="memo", options=memo_options)
    else:
        step = torch.compile(model, dynamic=True)
    firsts, extras, extras_cpu = [], [], []
    for length in order_of(options.lengths):
        ids = torch.randint(model.config.vocab_size, (2, length))
        (first, first_cpu), (second, second_cpu) = (_step_s(step, model, ids) for _ in range(2))
        firsts.append(first)
        extras.append(first - second)
        extras_cpu.append(first_cpu - second_cpu)
        print(f"{length:6} tokens: {extras_cpu[-1]:7.2f} s of processor time", file=sys.stderr)
    result = {
        "first_length_s": firsts[0],
        "settling_s": sum(firsts[1:NUM_SETTLING]),
        "new_length_s": statistics.median(extras[NUM_SETTLING:]),
        "new_length_cpu_s": statistics.median(extras_cpu[NUM_SETTLING:]),
        "worst_new_length_s": max(extras[NUM_SETTLING:]),
        "total_s": sum(firsts),
        "total_cpu_s": sum(extras_cpu),
    }
    if options.child == "memo":
        import memo_compile

        report = memo_compile.report()
        if not report.active or report.unplanned_steps:
            raise RuntimeError(f"memo stepped aside:\n{report}")
    return result


def _step_s(step: Any, model: Any, ids: Any) -> tuple[float, float]:
    """Seconds of a step, and of this process's processor time."""
    model.zero_grad()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    step(input_ids=ids, labels=ids).loss.backward()
    return time.perf_counter() - begin, time.process_time() - begin_cpu


def make_model(options: argparse.Namespace) -> Any:
    """Llama or Qwen3 from a config and a seed: no download."""
    import torch
    import transformers

    names = {"llama": "Llama", "qwen3": "Qwen3"}
    name = names[options.model]
    heads = 4
    config = getattr(transformers, f"{name}Config")(
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=options.hidden // heads,
        vocab_size=512,
        max_position_embeddings=4096,
        use_cache=False,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


def judge(results: dict[str, dict[str, Any]], models: list[str]) -> list[str]:
    """What misses its bound, in words."""
    found = []
    for model in models:
        memo, inductor = results[f"memo-{model}"], results[f"inductor-{model}"]
        if memo["new_length_cpu_s"] > MAX_NEW_LENGTH_S:
            found.append(f"{model}: a new length takes {memo['new_length_cpu_s']:.2f} s")
        ratio = memo["total_s"] / inductor["total_s"]
        if ratio > MAX_TOTAL_RATIO:
            found.append(f"{model}: all lengths take {ratio:.2f} x Inductor's")
    return found


def show(results: dict[str, dict[str, Any]], models: list[str]) -> None:
    """The table."""
    keys = ("first_length_s", "settling_s", "new_length_s", "new_length_cpu_s")
    keys += ("worst_new_length_s", "total_s")
    rows = [
        [f"{model} {arm}", *(f"{results[f'{arm}-{model}'][key]:.2f} s" for key in keys)]
        for model in models
        for arm in ARMS
    ]
    columns = ["model", "first", f"next {NUM_SETTLING - 1}", "new length", "processor", "worst"]
    title = "seconds beyond a step for a new sequence length"
    harness.print_table(title, [*columns, "all lengths"], rows)


if __name__ == "__main__":
    sys.exit(main())
