"""Seconds for each new sequence length: ``python -m benchmarks.lengths``.

Unmodified models of transformers, small, each trained on one length after another; memo as Dynamo
hands it lengths by default (``memo``: the first as numbers) and with ``dynamic=True``, and plain
Inductor with ``dynamic=True``, each in a process of its own with empty caches. A new length costs
what its first step takes beyond its second. Printed are the first compilation, the median and the
largest of the new lengths, and the sum of all first steps. All is judged by processor time, that of
compilers that it starts included, which other work on the machine does not lengthen.

``--trainer`` instead compares a short run of transformers' Trainer (which needs accelerate), with
batches of twelve lengths: memo, and plain Inductor as the Trainer compiles.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import harness

MODULE = "benchmarks.lengths"
MODELS = ("llama", "qwen3")
ARMS = ("memo", "memo-dynamic", "inductor")
TRAINER_ARMS = ("trainer-memo", "trainer-inductor")
MAX_NEW_LENGTH_S = 0.2
"""What a new length may cost, the first few apart, on two cores."""
MAX_TOTAL_RATIO = 0.5
"""All steps of all lengths, memo over Inductor."""
MAX_COMPILATIONS = 1.5
"""All steps of all lengths, over the first of them."""
MAX_TRAINER_RATIO = 1.5
"""A run of the Trainer, memo over Inductor."""
NUM_SETTLING = 3
"""Lengths after which nothing is compiled any more: the first, another, and one of its size."""
SHORTEST, STEP = 33, 7
"""Lengths are ``SHORTEST + STEP * k`` in an order that jumps: odd and even, few multiples of 8."""


def main() -> int:
    """Run every arm of every model, print the table, write the results, judge."""
    options = arguments()
    name = "lengths_trainer" if options.trainer else "lengths"
    return harness.run_benchmark(name, options, measure, run_child)


def arguments() -> argparse.Namespace:
    """The command line; the defaults take about half an hour on two cores."""
    sizes = {"lengths": 40, "layers": 8, "hidden": 64, "rounds": 1}
    parser = harness.parser(__doc__, sizes=sizes)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--lowering", default="inductor", choices=("inductor", "aten"))
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--trainer", action="store_true", help="a run of transformers' Trainer")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All arms of all models, and the verdict."""
    models = options.models.split(",")
    kinds = TRAINER_ARMS if options.trainer else ARMS
    shared = harness.passed_on(options, "lengths", "layers", "hidden", "lowering")
    arms = [
        harness.Arm(
            name=f"{arm}-{model}", arguments=(f"--child={arm}", f"--model={model}", *shared)
        )
        for model, arm in itertools.product(models, kinds)
    ]
    rounds = harness.interleaved(MODULE, arms, options.rounds)
    results = {name: harness.medians(values) for name, values in rounds.items()}
    if options.trainer:
        show_trainer(results)
        failures = judge_trainer(results, models)
    else:
        show(results, models)
        failures = judge(results, models)
    return {"results": results, "rounds": rounds, "failures": failures}


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

    if options.child in TRAINER_ARMS:
        return run_trainer(options)
    model = make_model(options)
    if options.child in ("memo", "memo-dynamic"):
        memo_options = {"lowering": options.lowering, "strict": True, "max_plans": options.lengths}
        dynamic = True if options.child == "memo-dynamic" else None
        step = torch.compile(model, backend="memo", options=memo_options, dynamic=dynamic)
    else:
        step = torch.compile(model, dynamic=True)
    firsts, firsts_cpu, extras, extras_cpu = [], [], [], []
    for length in order_of(options.lengths):
        ids = torch.randint(model.config.vocab_size, (2, length))
        (first, first_cpu), (second, second_cpu) = (_step_s(step, model, ids) for _ in range(2))
        firsts.append(first)
        firsts_cpu.append(first_cpu)
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
        "first_length_cpu_s": firsts_cpu[0],
        "settling_cpu_s": sum(firsts_cpu[1:NUM_SETTLING]),
        "total_cpu_s": sum(firsts_cpu),
    }
    if options.child != "inductor":
        require_planned()
    return result


def require_planned() -> None:
    """Raises RuntimeError: memo stepped aside, so that its times are not its own."""
    import memo_compile

    report = memo_compile.report()
    if not report.active or report.unplanned_steps:
        raise RuntimeError(f"memo stepped aside:\n{report}")


def run_trainer(options: argparse.Namespace) -> dict[str, Any]:
    """A run of the Trainer over ``--lengths`` batches, each of a length of its own."""
    import tempfile

    import torch
    import transformers

    model = make_model(options)
    uses_memo = options.child == "trainer-memo"
    if uses_memo:
        model.compile(backend="memo", options={"lowering": options.lowering, "strict": True})
    else:
        model.compile()

    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            source = torch.Generator().manual_seed(0)
            for length in order_of(options.lengths):
                for _ in range(2):
                    ids = torch.randint(model.config.vocab_size, (length,), generator=source)
                    yield {"input_ids": ids, "labels": ids}

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=options.lengths,
            per_device_train_batch_size=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Batches())
        begin, begin_cpu = time.perf_counter(), processor_s()
        trainer.train()
        result = {"train_s": time.perf_counter() - begin, "train_cpu_s": processor_s() - begin_cpu}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result["last_loss"] = losses[-1]
    if uses_memo:
        require_planned()
    return result


def _step_s(step: Any, model: Any, ids: Any) -> tuple[float, float]:
    """Seconds of a step, and of processor time."""
    model.zero_grad()
    begin, begin_cpu = time.perf_counter(), processor_s()
    step(input_ids=ids, labels=ids).loss.backward()
    return time.perf_counter() - begin, processor_s() - begin_cpu


def processor_s() -> float:
    """Processor time of this process, and of the compilers that it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


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
    for model, arm in itertools.product(models, ARMS[:2]):
        memo, inductor = results[f"{arm}-{model}"], results[f"inductor-{model}"]
        if memo["new_length_cpu_s"] > MAX_NEW_LENGTH_S:
            found.append(f"{arm} {model}: a new length takes {memo['new_length_cpu_s']:.2f} s")
        ratio = memo["total_cpu_s"] / inductor["total_cpu_s"]
        if ratio > MAX_TOTAL_RATIO:
            found.append(f"{arm} {model}: all lengths take {ratio:.2f} x Inductor's")
        ratio = memo["total_cpu_s"] / memo["first_length_cpu_s"]
        if ratio > MAX_COMPILATIONS:
            found.append(f"{arm} {model}: all lengths take {ratio:.2f} x the first")
    return found


def judge_trainer(results: dict[str, dict[str, Any]], models: list[str]) -> list[str]:
    """What misses its bound, in words."""
    found = []
    for model in models:
        memo, inductor = (results[f"{arm}-{model}"] for arm in TRAINER_ARMS)
        ratio = memo["train_cpu_s"] / inductor["train_cpu_s"]
        if ratio > MAX_TRAINER_RATIO:
            found.append(f"{model}: the Trainer's run takes {ratio:.2f} x Inductor's")
        if abs(memo["last_loss"] - inductor["last_loss"]) > 1e-3:
            found.append(f"{model}: the last losses differ")
    return found


def show_trainer(results: dict[str, dict[str, Any]]) -> None:
    """The table."""
    rows = [
        [name, *(f"{of[key]:.1f} s" for key in ("train_s", "train_cpu_s"))]
        for name, of in results.items()
    ]
    harness.print_table("a run of transformers' Trainer", ["arm", "seconds", "processor"], rows)


def show(results: dict[str, dict[str, Any]], models: list[str]) -> None:
    """The table."""
    keys = ("first_length_s", "settling_s", "new_length_s", "new_length_cpu_s")
    keys += ("worst_new_length_s", "total_s", "first_length_cpu_s", "settling_cpu_s", "total_cpu_s")
    rows = [
        [f"{model} {arm}", *(f"{results[f'{arm}-{model}'][key]:.2f} s" for key in keys)]
        for model in models
        for arm in ARMS
    ]
    columns = ["model", "first", f"next {NUM_SETTLING - 1}", "new length", "processor", "worst"]
    title = "seconds beyond a step for a new sequence length"
    columns += ["all lengths", "first", f"next {NUM_SETTLING - 1}", "all: processor"]
    harness.print_table(title, columns, rows)


if __name__ == "__main__":
    sys.exit(main())
