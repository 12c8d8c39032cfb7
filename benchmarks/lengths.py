"""Seconds for each new sequence length: ``python -m benchmarks.lengths``.

Unmodified models of transformers, small, each trained on one length after another; memo and plain
Inductor, with ``dynamic=True`` and as Dynamo hands over lengths by default, each in a process of
its own with empty caches. By default Dynamo asks for two compilations, of the first length as
numbers and of the second as symbols. A new length costs what its first step takes beyond its
second. Printed are the first compilation, the median and the largest of the new lengths, and the
sum of all first steps. Memo is judged against Inductor that is called in the same way, and against
the compilations that it was asked for; all by processor time, that of compilers that it starts
included, which other work on the machine does not lengthen.

Other parts of the promise (``--part``): ``steps``, what a step takes by code with symbols and by
code for its length alone, in turns; ``budget``, all lengths under one budget: plans and physical
peaks within it, gradients equal to eager's, a longer sequence keeps no larger share; ``trainer``, a
short run of transformers' Trainer (which needs accelerate), with batches of twelve lengths: memo,
and plain Inductor as the Trainer compiles.
"""

import argparse
import copy
import itertools
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import harness

MODULE = "benchmarks.lengths"
MODELS = ("llama", "qwen3")
RIVALS = {"memo-dynamic": "inductor-dynamic", "memo": "inductor"}
"""Who is called in the same way."""
ARMS = (*RIVALS, *RIVALS.values())
TRAINER_ARMS = ("trainer-memo", "trainer-inductor")
PARTS = {"new": ARMS, "trainer": TRAINER_ARMS, "steps": ("steps",), "budget": ("budget",)}
"""What is measured, and by which arms."""
MAX_NEW_LENGTH_S = 0.2
"""What a new length may cost, the first few apart, on two cores."""
MAX_TOTAL_RATIO = 0.5
"""All steps of all lengths, memo over Inductor."""
MAX_COMPILATIONS = 1.5
"""All steps of all lengths, over those at which Dynamo asks for a compilation."""
MAX_TRAINER_RATIO = 1.5
"""A run of the Trainer, memo over Inductor."""
MAX_STEP_RATIO = 1.1
"""A step by code with symbols, over one by code for its length: the median of pairs."""
NUM_STEP_LENGTHS, NUM_PAIRS, NUM_WARM_STEPS = 4, 30, 3
BUDGET_SHARE = 0.8
"""The budget, of what the longest length takes with everything kept."""
NUM_PEAKS, NUM_PEAK_STEPS = 8, 3
MAX_PEAK_OVER_BUDGET = 1.005
COUNTER_LAG_BYTES = 2 * 128 * 2**10
"""The kernel's counter of resident memory lags by so much on two cores."""
MAX_SHARE_GROWTH = 1e-3
"""Of what is kept, for a longer sequence: sizes are rounded."""
MAX_GRADIENT_ERROR = 1e-4
"""Against eager, of a parameter's own largest entry, in float32."""
NUM_SETTLING = 3
"""Lengths after which nothing is compiled any more: the first, another, and one of its size."""
SHORTEST, STEP = 33, 7
"""Lengths are ``SHORTEST + STEP * k`` in an order that jumps: odd and even, few multiples of 8."""


def main() -> int:
    """Run every arm of every model, print the table, write the results, judge."""
    options = arguments()
    name = "lengths" if options.part == "new" else f"lengths_{options.part}"
    return harness.run_benchmark(name, options, measure, run_child)


def arguments() -> argparse.Namespace:
    """The command line; the defaults take about half an hour on two cores."""
    sizes = {"lengths": 40, "layers": 8, "hidden": 64, "rounds": 1}
    parser = harness.parser(__doc__, sizes=sizes)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--lowering", default="inductor", choices=("inductor", "aten"))
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--part", default="new", choices=tuple(PARTS))
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All arms of all models, and the verdict."""
    models = options.models.split(",")
    kinds = PARTS[options.part]
    shared = harness.passed_on(options, "lengths", "layers", "hidden", "lowering")
    arms = [
        harness.Arm(
            name=f"{arm}-{model}", arguments=(f"--child={arm}", f"--model={model}", *shared)
        )
        for model, arm in itertools.product(models, kinds)
    ]
    rounds = harness.interleaved(MODULE, arms, options.rounds)
    results = {name: harness.medians(values) for name, values in rounds.items()}
    show, judge = REPORTS[options.part]
    show(results, models)
    settings = {
        name: getattr(options, name) for name in ("lengths", "layers", "hidden", "lowering")
    }
    failures = judge(results, models)
    return {"settings": settings, "results": results, "rounds": rounds, "failures": failures}


def order_of(count: int) -> list[int]:
    """``count`` different lengths; neighbours are far apart."""
    stride = next(n for n in range(count // 2 + 1, 2 * count + 2) if math.gcd(n, count) == 1)
    return [SHORTEST + STEP * (k * stride % count) for k in range(count)]


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """What an arm measures."""
    if options.child in TRAINER_ARMS:
        return run_trainer(options)
    others = {"steps": run_steps, "budget": run_budget}
    return others.get(options.child, run_new_lengths)(options)


def run_new_lengths(options: argparse.Namespace) -> dict[str, Any]:
    """Two steps of each length; how long the first took, and how much longer than the second."""
    import torch

    model = make_model(options)
    dynamic = True if options.child.endswith("-dynamic") else None
    if options.child in RIVALS:
        step = compiled(model, options, dynamic=dynamic)
    else:
        step = torch.compile(model, dynamic=dynamic)
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
        "compilations_cpu_s": sum(firsts_cpu[: 1 if dynamic else 2]),
    }
    if options.child in RIVALS:
        harness.memo_plan()
    return result


def compiled(model: Any, options: argparse.Namespace, *, dynamic: bool | None, **more: Any) -> Any:
    """``model`` by memo."""
    import torch

    known = {"lowering": options.lowering, "strict": True, "max_plans": options.lengths, **more}
    return torch.compile(model, backend="memo", options=known, dynamic=dynamic)


def spread(values: Sequence[int], count: int) -> list[int]:
    """``count`` of the values, the smallest and the largest among them, in order."""
    last = len(values) - 1
    return sorted({sorted(values)[round(at * last / (count - 1))] for at in range(count)})


def run_steps(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of some lengths by code with symbols and by code for the length, in turns."""
    import torch

    model = make_model(options)
    lengths = spread(order_of(options.lengths), NUM_STEP_LENGTHS)
    symbolic = compiled(model, options, dynamic=True)
    ratios = {}
    for length in lengths:
        ids = torch.randint(model.config.vocab_size, (2, length))
        own = copy.deepcopy(model)
        special = compiled(own, options, dynamic=False)
        for _ in range(NUM_WARM_STEPS):
            _step_s(symbolic, model, ids), _step_s(special, own, ids)
        pairs = [
            (_step_s(symbolic, model, ids)[0], _step_s(special, own, ids)[0])
            for _ in range(NUM_PAIRS)
        ]
        ratios[str(length)] = statistics.median(first / second for first, second in pairs)
        print(f"{length:6} tokens: {ratios[str(length)]:.3f}", file=sys.stderr)
        harness.memo_plan()
    return {"ratios": ratios}


def run_budget(options: argparse.Namespace) -> dict[str, Any]:
    """All lengths under a budget that the longest exceeds: plans, peaks, gradients."""
    import torch

    from memo_compile.step.plans import Plan

    model = make_model(options)
    eager = copy.deepcopy(model)
    lengths = order_of(options.lengths)

    def ids_of(length: int) -> Any:
        return torch.randint(model.config.vocab_size, (2, length))

    whole = compiled(copy.deepcopy(model), options, dynamic=False, **_NO_OPTIMIZER)
    ids = ids_of(max(lengths))
    whole(input_ids=ids, labels=ids).loss.backward()
    budget = int(BUDGET_SHARE * harness.memo_plan().peak_bytes)
    del whole
    step = compiled(model, options, dynamic=True, memory_budget=budget, **_NO_OPTIMIZER)
    measured = spread(lengths, NUM_PEAKS)
    found: dict[str, dict[str, Any]] = {}
    for length in lengths:
        ids = ids_of(length)
        run = one_step(step, model, ids)
        run()
        one_step(eager, eager, ids)()
        plan: Plan = harness.memo_plan()
        found[str(length)] = {
            "planned_bytes": plan.peak_bytes,
            "kept_share": kept_share(plan),
            "gradient_error": harness.gradient_error(model, eager),
        }
        if length in measured:
            found[str(length)]["peak_bytes"] = peak_of(run, model, ids)
        print(f"{length:6} tokens: {found[str(length)]}", file=sys.stderr)
    return {"budget_bytes": budget, "lengths": found}


_NO_OPTIMIZER = {"optimizer_state_bytes_per_parameter": 0.0}


def one_step(step: Any, model: Any, ids: Any) -> Callable[[], None]:
    """A forward and a backward with new gradients; the output is dropped."""

    def run() -> None:
        model.zero_grad()
        step(input_ids=ids, labels=ids).loss.backward()

    return run


def peak_of(run: Callable[[], None], model: Any, ids: Any) -> int:
    """Physical peak of a step that has run before."""
    model.zero_grad()
    with harness.physical_peak("cpu", harness.held_bytes(model, None, [ids])) as peak:
        for _ in range(NUM_PEAK_STEPS):
            run()
    return peak.peak_bytes


def kept_share(plan: Any) -> float:
    """The part of what layers save, in bytes, that stays in memory."""
    layers = {known.module_path: known.num_layers for known in plan.layer_classes}
    kept = whole = 0.0
    for row in plan.decisions:
        span = re.fullmatch(r"(.*) \[(\d+):(\d+)\]", row.layer_class)
        count = int(span[3]) - int(span[2]) if span else layers.get(row.layer_class, 1)
        size = row.bytes * row.token_fraction * count
        whole += size
        kept += size * (row.decision == "SAVE")
    return kept / whole if whole else 1.0


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
        begin, begin_cpu = time.perf_counter(), harness.processor_s()
        trainer.train()
        result = {
            "train_s": time.perf_counter() - begin,
            "train_cpu_s": harness.processor_s() - begin_cpu,
        }
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result["last_loss"] = losses[-1]
    if uses_memo:
        harness.memo_plan()
    return result


def _step_s(step: Any, model: Any, ids: Any) -> tuple[float, float]:
    """Seconds of a step, and of processor time."""
    model.zero_grad()
    begin, begin_cpu = time.perf_counter(), harness.processor_s()
    step(input_ids=ids, labels=ids).loss.backward()
    return time.perf_counter() - begin, harness.processor_s() - begin_cpu


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
    for model, (arm, rival) in itertools.product(models, RIVALS.items()):
        memo, inductor = results[f"{arm}-{model}"], results[f"{rival}-{model}"]
        if memo["new_length_cpu_s"] > MAX_NEW_LENGTH_S:
            found.append(f"{arm} {model}: a new length takes {memo['new_length_cpu_s']:.2f} s")
        ratio = memo["total_cpu_s"] / inductor["total_cpu_s"]
        if ratio > MAX_TOTAL_RATIO:
            found.append(f"{arm} {model}: all lengths take {ratio:.2f} x Inductor's")
        ratio = memo["total_cpu_s"] / memo["compilations_cpu_s"]
        if ratio > MAX_COMPILATIONS:
            found.append(f"{arm} {model}: all lengths take {ratio:.2f} x the compilations")
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


def judge_steps(results: dict[str, dict[str, Any]], models: list[str]) -> list[str]:
    """What misses its bound, in words."""
    return [
        f"{model}: a step of {length} tokens takes {ratio:.3f} x that by code for it alone"
        for model in models
        for length, ratio in results[f"steps-{model}"]["ratios"].items()
        if ratio > MAX_STEP_RATIO
    ]


def judge_budget(results: dict[str, dict[str, Any]], models: list[str]) -> list[str]:
    """What misses its bound, in words."""
    found = []
    for model in models:
        budget, lengths = (results[f"budget-{model}"][key] for key in ("budget_bytes", "lengths"))
        most = budget * MAX_PEAK_OVER_BUDGET + COUNTER_LAG_BYTES
        for length, of in lengths.items():
            if of["planned_bytes"] > budget or of.get("peak_bytes", 0) > most:
                found.append(f"{model}, {length} tokens: {of}, over the budget of {budget}")
            if not of["gradient_error"] <= MAX_GRADIENT_ERROR:
                found.append(
                    f"{model}, {length} tokens: gradients differ by {of['gradient_error']}"
                )
        for shorter, longer in itertools.pairwise(sorted(lengths, key=int)):
            if lengths[longer]["kept_share"] > lengths[shorter]["kept_share"] + MAX_SHARE_GROWTH:
                found.append(f"{model}: {longer} tokens keep a larger share than {shorter}")
    return found


def show_steps(results: dict[str, dict[str, Any]], models: list[str]) -> None:
    """The table."""
    rows = [
        [model, length, f"{ratio:.3f}"]
        for model in models
        for length, ratio in results[f"steps-{model}"]["ratios"].items()
    ]
    title = "a step by code with symbols, over one by code for its length"
    harness.print_table(title, ["model", "tokens", "ratio"], rows)


def show_budget(results: dict[str, dict[str, Any]], models: list[str]) -> None:
    """The table."""
    rows = []
    for model in models:
        found: Mapping[str, Any] = results[f"budget-{model}"]
        for length, of in sorted(found["lengths"].items(), key=lambda item: int(item[0])):
            sizes = (of["planned_bytes"], of.get("peak_bytes"), found["budget_bytes"])
            shown = ["" if size is None else f"{size / 2**20:.2f} MiB" for size in sizes]
            rows.append([model, length, *shown, f"{of['kept_share']:.3f}"])
            rows[-1].append(f"{of['gradient_error']:.1e}")
    columns = ["model", "tokens", "planned", "measured", "budget", "share kept", "gradient error"]
    harness.print_table("lengths under one budget", columns, rows)


def show_trainer(results: dict[str, dict[str, Any]], models: list[str]) -> None:
    """The table."""
    rows = [
        [name, *(f"{of[key]:.1f} s" for key in ("train_s", "train_cpu_s"))]
        for name, of in results.items()
        if name.rpartition("-")[2] in models
    ]
    harness.print_table("a run of transformers' Trainer", ["arm", "seconds", "processor"], rows)


def show(results: dict[str, dict[str, Any]], models: list[str]) -> None:
    """The table."""
    keys = ("first_length_s", "settling_s", "new_length_s", "new_length_cpu_s")
    keys += ("worst_new_length_s", "total_s", "compilations_cpu_s", "total_cpu_s")
    rows = [
        [f"{model} {arm}", *(f"{results[f'{arm}-{model}'][key]:.2f} s" for key in keys)]
        for model in models
        for arm in ARMS
    ]
    columns = ["model", "first", f"next {NUM_SETTLING - 1}", "new length", "processor", "worst"]
    title = "seconds beyond a step for a new sequence length"
    columns += ["all lengths", "compilations: processor", "all: processor"]
    harness.print_table(title, columns, rows)


REPORTS = {
    "new": (show, judge),
    "trainer": (show_trainer, judge_trainer),
    "steps": (show_steps, judge_steps),
    "budget": (show_budget, judge_budget),
}
"""Per part how its results are shown, and what is asked of them."""


if __name__ == "__main__":
    sys.exit(main())
