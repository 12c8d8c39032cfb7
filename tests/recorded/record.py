"""Records planning problems anew: ``python -m tests.recorded.record``.

Models are traced, cut and lowered op by op; the steps that reach the planner are kept as data. Each
is then planned under several budgets by the planners as they are, and what they find becomes the
record, which ``test_recorded_plans`` compares later plans with. With ``--keep-steps`` nothing is
traced: the recorded steps are planned anew, where plans have become better on purpose.
"""

import argparse
import time
from collections.abc import Container, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch

import memo_compile
from benchmarks.layer_steps import Setting, gpt_step
from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import find_model
from memo_compile.step.movable import MovableStep
from tests.fuzz import driver
from tests.fuzz.case import draw_case
from tests.fuzz.source import model_source
from tests.recorded.capture import HuggingFace, Made, Run, Traced
from tests.recorded.problems import (
    KnownRecord,
    RecordedPlan,
    RecordedProblem,
    RecordedStep,
    answer,
    load,
    save,
)
from tests.steps.many_calls import random_step
from tests.steps.movable import movable_step
from tests.steps.parallel_gpt import parallel_gpt
from tests.steps.running import Words

SMALL = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4}
EXPERTS = SMALL | {"intermediate_size": 3584, "experts_implementation": "grouped_mm"}
GEMMA = SMALL | {"intermediate_size": 8192, "head_dim": 128, "vocab_size": 256_000}

TRACED = (
    Traced("llama3-8b", 131_072, "h200", tiles=4, layers=5),
    Traced("llama3-8b", 262_144, "h100", tiles=4, tp=2),
    Traced("llama3-8b", 8_192, "h100", layers=6),
    Traced("qwen3-8b", 65_536, "h100", tiles=2),
    Traced("mistral-7b", 131_072, "h100", tiles=8, layers=3),
    Traced("gpt-7b", 524_288, "a800", tp=8),
    Traced("gpt-13b", 32_768, "a800", tp=4, layers=6),
    Traced("llama3-70b", 131_072, "h100", tp=8),
)
HUGGING_FACE = (
    HuggingFace("mixtral", 8_192, "h100", 1, EXPERTS | {"num_hidden_layers": 3}),
    HuggingFace("mixtral", 32_768, "h200", 4, EXPERTS | {"num_hidden_layers": 2}),
    HuggingFace("gemma", 16_384, "h200", 2, GEMMA | {"num_hidden_layers": 3}),
)
FUZZ_SEEDS = (4, 23, 24, 167, 280, 356)

SLOW_LINK = 12e9
"""Bytes per second: a host link of PCIe 3."""
ANY_BYTES = 2**60
LEVELS = (0.0, 0.05, 0.3)
"""Budgets between the floor and what keeping everything takes."""
FEW_LEVELS = (0.0, 0.15)


def blocks(num_layers: int, tokens: int) -> None:
    """Blocks that are compiled one by one, and planned as a group from the second step on."""
    torch.manual_seed(0)
    model = Words(num_layers=num_layers, words=64)
    for layer in model.layers:
        layer.compile(backend="memo", options=RUNS)
    for _ in range(2):
        model(torch.randint(0, 64, (2, tokens))).backward()


RUNS = {"lowering": "aten", "costs": "roofline", "token_granule": 4, "policy": "full-offload"}


class Broken(torch.nn.Module):
    """A stack that a graph break cuts in two."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Words(num_layers=6, words=64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.stack.entry(ids)
        for number, layer in enumerate(self.stack.layers):
            if number == 3:
                torch._dynamo.graph_break()
            x = layer(x)
        return x.pow(2).mean()


def pieces() -> None:
    """Graphs of one step, planned together from the second step on."""
    torch.manual_seed(0)
    run = torch.compile(Broken(), backend="memo", options=RUNS)
    for _ in range(3):
        run(torch.randint(0, 64, (2, 32))).backward()


def fuzzed(seed: int) -> None:
    """A random model of the fuzz, for one step."""
    case = draw_case(seed, "aten")
    namespace: dict[str, Any] = {}
    exec(compile(model_source(case), f"fuzz {seed}", "exec"), namespace)
    dtype = getattr(torch, case.dtype)
    tiles = {"token_tiles": 2 if seed % 2 else 1}
    run = {**case.run, "steps": 1, "accumulate": 1, "hold": False, "retain": False}
    torch.manual_seed(seed)
    compiled = partial(torch.compile, backend="memo", options=RUNS | tiles)
    driver.train(namespace["Model"]().to(dtype), namespace, run, dtype, compile=compiled)


def gpt(device: str, seq: int, link: float | None, layers: int = 5) -> MovableStep:
    hardware = find_hardware(device)
    return gpt_step(
        Setting(
            shape=replace(find_model("gpt-7b"), num_layers=layers),
            seq=seq,
            tp=8,
            hardware=hardware,
            copy_bytes_per_s=link or hardware.d2h_bytes_per_s,
        )
    )


def talking(seq: int) -> MovableStep:
    shape, hardware = find_model("gpt-7b"), find_hardware("a800")
    return parallel_gpt(shape, seq=seq, tp=8, hardware=hardware, num_layers=4)


def drawn(seed: int, talks: bool) -> MovableStep:
    return random_step(Random(seed), max_layers=4, talks=talks, pairs=bool(seed % 2))


MADE = (
    *(
        Made(
            f"gpt-7b of 5 from its shape, {device}, {seq} tokens, link {link}",
            partial(gpt, device, seq, link),
        )
        for device, seq, link in (
            ("h100", 262_144, None),
            ("h100", 65_536, SLOW_LINK),
            ("a800", 131_072, SLOW_LINK),
            ("h200", 524_288, None),
        )
    ),
    *(Made(f"parallel gpt, {seq} tokens", partial(talking, seq)) for seq in (4_096, 65_536)),
    *(
        Made(f"six layers at {speed} bytes/s", partial(movable_step, 6, bytes_per_s=speed))
        for speed in (4096, 65_536)
    ),
    *(Made(f"drawn {seed}", partial(drawn, seed, False)) for seed in (3, 8, 21, 46)),
    *(Made(f"drawn {seed}, talks", partial(drawn, seed, True)) for seed in (5, 318, 390, 1001)),
)
RUN = (
    Run("a group of 5 blocks", partial(blocks, 5, 64)),
    Run("a group of 3 blocks", partial(blocks, 3, 33)),
    Run("two pieces", pieces),
    *(Run(f"fuzz {seed}", partial(fuzzed, seed)) for seed in FUZZ_SEEDS),
)


def questions(known: KnownRecord, number: int) -> Iterator[RecordedPlan]:
    """What is asked about the step of that ``number``, answered."""
    any_budget = RecordedPlan(budget_bytes=ANY_BYTES, host_budget_bytes=ANY_BYTES)
    free = answer(known, replace(any_budget, policy="save"))
    floor = answer(known, replace(any_budget, budget_bytes=1))
    yield floor
    if floor.floor_bytes is None:
        return
    levels = FEW_LEVELS if known.name.startswith(("drawn", "fuzz")) else LEVELS
    span = free.peak_bytes - floor.floor_bytes
    asked = [
        replace(any_budget, budget_bytes=int(floor.floor_bytes + level * span)) for level in levels
    ]
    found = [answer(known, own) for own in asked]
    yield from found
    if number % 3 == 0:
        yield answer(known, replace(asked[1], host_budget_bytes=found[1].host_bytes // 2))
    elif number % 3 == 1:
        yield answer(known, replace(asked[1], exact=True))
    else:
        yield answer(known, replace(asked[-1], policy="greedy", host_budget_bytes=0))


def recorded_steps(known: Container[str]) -> Iterator[RecordedStep]:
    """All steps anew but those that are ``known``, and those whose link is slow."""
    for source in (*MADE, *TRACED, *HUGGING_FACE, *RUN):
        if source.name in known:
            continue
        begin = time.process_time()
        torch._dynamo.reset()
        memo_compile.reporting.state.reset()
        for step in source.steps():
            seconds = time.process_time() - begin
            print(f"{step.name}: {seconds:.0f} s, {len(step.problem.calls)} calls", flush=True)
            yield step
            if isinstance(source, Traced) and source.tp == 1:
                costs = replace(step.costs, d2h_bytes_per_s=SLOW_LINK, h2d_bytes_per_s=SLOW_LINK)
                yield replace(step, name=f"{step.name}, slow link", costs=costs)


def main() -> None:
    """Record, and say how long each step's plans take."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep-steps", action="store_true", help="plan the recorded steps anew")
    parser.add_argument("--add", action="store_true", help="only what is not recorded yet")
    options = parser.parse_args()
    known = load() if options.add or options.keep_steps else {}
    problems = list(known.values()) if options.add else []
    steps = (own.step for own in known.values()) if options.keep_steps else recorded_steps(known)
    for number, step in enumerate(steps):
        begin = time.process_time()
        plans = tuple(questions(KnownRecord(step), number))
        seconds = time.process_time() - begin
        problems.append(RecordedProblem(step=step, plans=plans))
        save(problems)
        over = ", ".join(
            f"{plan.step_s / plan.bound_s:.3f}" if plan.bound_s else "floor" for plan in plans
        )
        print(
            f"  {step.name}: {len(plans)} plans in {seconds:.1f} s; over their bounds {over}",
            flush=True,
        )
    print(f"{len(problems)} steps, {sum(len(problem.plans) for problem in problems)} plans")


if __name__ == "__main__":
    main()
