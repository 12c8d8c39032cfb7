"""What ``memo plan`` says on one screen: decisions in lines, and what to change."""

import dataclasses
from types import SimpleNamespace

import pytest

from memo_compile.cli import plan_command, plan_text
from memo_compile.costs.hardware import find_hardware
from memo_compile.offline.forecast import Forecast, PeakAt, Question, TensorAtPeak
from memo_compile.offline.shapes.transformer import Degrees
from memo_compile.reporting.decision_lines import decision_lines
from memo_compile.step.plans import Decision, Timeline
from memo_compile.step.problem import FixedBytes, LayerClassInfo
from tests.steps.small import planned, two_layers

GIB = 2**30
LAYERS = LayerClassInfo(num_layers=32, module_path="layers", period=1, num_regions=2)


def row(tensor: str, decision: str, where: str = "layers", fraction: float = 1.0, size: int = GIB):
    return Decision(
        tensor=f"{tensor} [1, 8]",
        layer_class=where,
        bytes=size,
        decision=decision,
        token_fraction=fraction,
        reason="a long sentence",
        source="model.py:1",
    )


def test_all_tensors_that_go_one_way_are_one_line():
    rows = [
        *(
            row(name, "OFFLOAD", "layers [0:18]", size=size)
            for name, size in zip("abcd", (1, 4, 3, 2), strict=True)
        ),
        row("e", "RECOMPUTE", "layers [0:18]", 0.25),
        row("e", "OFFLOAD", "layers [0:18]", 0.75),
        row("a", "SAVE", "layers [18:32]"),
    ]
    assert list(decision_lines(rows, [LAYERS], copies="copies hide")) == [
        "layers 0-17: e (75% of tokens), b, c and 2 more -> host, 768.00 MiB a layer; copies hide",
        "layers 0-17: e (25% of tokens) recomputed, 256.00 MiB a layer",
        "layers 18-31: a kept, 1.00 GiB a layer",
    ]


def test_layers_that_go_the_same_way_are_together_wherever_they_lie():
    """What alternates from layer to layer does not fill the screen."""
    spans = [(at, at + 1) for at in range(8)]
    rows = [
        row("a", "OFFLOAD" if first % 2 else "SAVE", f"layers [{first}:{end}]")
        for first, end in spans
    ]
    assert list(decision_lines(rows, [LAYERS])) == [
        "layers 0, 2, 4, 6: a kept, 1.00 GiB a layer",
        "layers 1, 3, 5, 7: a -> host, 1.00 GiB a layer",
    ]


def test_people_read_what_a_tensor_is():
    rows = [
        dataclasses.replace(row("mm_4", "SAVE", size=3), role="mlp.up"),
        dataclasses.replace(row("mm_5", "SAVE", size=3), role="mlp.up"),
        dataclasses.replace(row("embedding", "SAVE", size=2), role="layer input"),
        row("mul_9", "SAVE", size=1),
        row("mul_10", "SAVE", size=1),
    ]
    assert list(decision_lines(rows, [LAYERS])) == [
        "layers 0-31: 2 x mlp.up, layer input, mul_9 and 1 more kept, 10 B a layer"
    ]
    assert list(decision_lines(rows, [LAYERS], width=60)) == [
        "layers 0-31: 2 x mlp.up and 3 more kept, 10 B a layer"
    ]


def test_a_whole_class_names_its_layers():
    rows = [row("a", "SAVE"), row("b", "SAVE", "epilogue_fwd")]
    assert list(decision_lines(rows, [LAYERS])) == [
        "layers 0-31: a kept, 1.00 GiB a layer",
        "epilogue_fwd: b kept, 1.00 GiB",
    ]


def answer(peak: int, budget: int, *, constant: int = 10 * GIB, stall_s: float = 0.0, rows=()):
    plan = dataclasses.replace(
        planned(two_layers()),
        decisions=tuple(rows),
        layer_classes=(LAYERS,),
        fixed=FixedBytes(parameters=constant),
        timeline=Timeline(step_s=1.0, stall_s=stall_s),
    )
    question = Question(
        model="llama3-8b",
        hardware=find_hardware("h200"),
        seq=8192,
        degrees=Degrees(),
        budget=budget,
    )
    return Forecast(
        question=question,
        name="m",
        step=SimpleNamespace(plan=plan, exact=True, model_flops=0, costs=None),
        peak_bytes=peak,
        budget_bytes=budget,
        outside_bytes=0,
        host_bytes=0,
        in_flight=1,
        tokens_per_s=4096.0,
        peak_at=PeakAt(call="c", region="r", phase="backward", layer=None, tensors=()),
        notes=tuple(f"note {number}: " + "many words " * 30 for number in range(9)),
    )


def text(*arguments, **more) -> str:
    return "\n".join(plan_text.plan_lines(answer(*arguments, **more), None))


@pytest.mark.parametrize("fits", [True, False])
def test_the_screen_is_kept_whatever_there_is_to_say(fits):
    rows = [row("t" * 90, "SAVE", f"part{number}") for number in range(50)]
    lines = text(20 * GIB, (21 if fits else 19) * GIB, rows=rows).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= plan_text.WIDTH
    assert "38 more decisions: --verbose" in lines
    assert "7 more notes: --verbose" in lines


def test_what_sets_the_peak_is_said_in_words():
    tensors = [
        TensorAtPeak(
            name=f"layer0_bwd@2/buf{n}", size_bytes=3 * GIB, source=None, label="temporary"
        )
        for n in (1, 3)
    ]
    tensors.append(TensorAtPeak(name="l/mm_3", size_bytes=GIB, source=None, label="mlp.up"))
    peak = PeakAt(call="layer0_bwd@2", region="r", phase="backward", layer=29, tensors=(*tensors,))
    said = dict(plan_text.numbers(dataclasses.replace(answer(GIB, GIB), peak_at=peak), None))
    assert said["set by"] == ("the backward of layer 29: 2 x temporary 3.00 GiB, mlp.up 1.00 GiB")
    assert said["stalls"] == "none"


@pytest.mark.parametrize(
    ("host_budget", "bound"),
    [
        (None, " on each device's host, without a bound"),
        (0, ", none may be used (--host-budget)"),
        ("600GiB", ", of 600.00 GiB (--host-budget)"),
        ("50%", ", of 119.21 GiB (--host-budget)"),
        (
            find_hardware("h200").usable_host_bytes,
            ", of 214.58 GiB (--host-budget: a device's share of a usual machine is 238.42 GiB)",
        ),
    ],
)
def test_the_first_line_says_what_host_memory_it_takes(host_budget, bound):
    plan = answer(20 * GIB, 30 * GIB)
    question = dataclasses.replace(plan.question, host_budget=host_budget)
    assert plan_text.verdict(plan).endswith("on h200: fits, 10.00 GiB to spare")
    plan = dataclasses.replace(plan, question=question, host_bytes=510 * GIB)
    assert plan_text.verdict(plan).endswith(
        "on h200: fits, with 510.00 GiB of host memory, 10.00 GiB to spare"
    )
    assert dict(plan_text.numbers(plan, None))["host"] == f"510.00 GiB of pinned memory{bound}"


def test_host_memory_has_a_bound_by_default(monkeypatch):
    monkeypatch.delenv("MEMO_HOST_BUDGET", raising=False)
    h200 = find_hardware("h200")
    assert plan_command._host_budget(None, h200) == h200.usable_host_bytes == 230_400_000_000
    assert plan_command._host_budget(None, find_hardware("cpu")) == 0
    assert plan_command._host_budget("none", h200) is None
    assert plan_command._host_budget("1TB", h200) == "1TB"
    monkeypatch.setenv("MEMO_HOST_BUDGET", "2TB")
    assert plan_command._host_budget(None, h200) == "2TB"
    assert plan_command._host_budget("1TB", h200) == "1TB"


def test_what_to_change_is_said_with_numbers():
    said = text(30 * GIB, 20 * GIB)
    assert "does not fit: 10.00 GiB too much" in said
    assert "--budget 30.00GiB holds this plan" in said
    assert "about 50% shorter, --seq 4096; --max-seq finds" in said
    assert "--tp 2: " in said
    assert "what to change" not in text(20 * GIB, 30 * GIB)


def test_more_host_memory_is_advised_where_it_has_a_bound():
    plan = answer(30 * GIB, 20 * GIB)
    advice = "more host memory may hold it: --host-budget none says how much"
    assert advice not in plan_text._advice(plan)
    bounded = dataclasses.replace(plan.question, host_budget=GIB)
    assert advice in plan_text._advice(dataclasses.replace(plan, question=bounded))


def test_a_model_that_alone_is_too_large_is_told_so():
    said = text(400 * GIB, 100 * GIB, constant=120 * GIB)
    assert "no sequence is short enough" in said
    assert "optimizer state alone take 120.00 GiB" in said.replace("\n    ", " ")
    assert "--budget" not in said  # the device has less
    assert "--tp 4: " in said


def test_copies_hide_or_the_step_waits():
    rows = [row("a", "OFFLOAD")]
    assert "copies hide" in text(20 * GIB, 30 * GIB, rows=rows)
    assert "the step waits 200.00 ms for copies" in text(20 * GIB, 30 * GIB, rows=rows, stall_s=0.2)
