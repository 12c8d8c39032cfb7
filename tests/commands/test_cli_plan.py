"""``memo plan``: what it prints, how shapes are cut over devices, what it refuses."""

import dataclasses
import json
import math
import sys
import textwrap
from collections import Counter

import pytest
import torch
from torch._subclasses import FakeTensorMode

from memo_compile.cli.main import main
from memo_compile.cli.plan_text import numbers, plan_lines
from memo_compile.costs import models
from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import ModelShape
from memo_compile.errors import InputError, RuntimeMisuse
from memo_compile.file_store import FileStore
from memo_compile.offline import forecast as forecasting
from memo_compile.offline.forecast import Need, Question, forecast, longest
from memo_compile.offline.shapes.parallel import behind
from memo_compile.offline.shapes.transformer import Degrees, first_stage
from memo_compile.reporting.emit import Settings, emit
from memo_compile.step.plans import Decision, Plan, Where
from memo_compile.step.problem import CallKind, Phase
from memo_compile.step.serialise import from_json
from tests.commands.tiny import TINY
from tests.numerics.training import in_ci

GPT = dataclasses.replace(TINY, name="tiny-gpt")
LLAMA = ModelShape(
    name="tiny-llama",
    hidden=64,
    num_layers=2,
    ffn=128,
    num_heads=4,
    num_kv_heads=2,
    vocab=512,
    gated=True,
)
DEEP_GPT = dataclasses.replace(GPT, name="deep-gpt", num_layers=4)

FIELDS = {
    "fits",
    "peak_bytes",
    "budget_bytes",
    "headroom_bytes",
    "arena_bytes",
    "lower_bound_bytes",
    "outside_bytes",
    "host_bytes",
    "step_s",
    "mfu",
    "tokens_per_s",
    "peak_at",
    "buffers",
    "layer_classes",
    "decisions",
}
"""What ``--json`` promises."""


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """What is traced once for all tests here; answers are the same (``test_remembered``)."""
    return FileStore(folder=tmp_path_factory.mktemp("steps"))


@pytest.fixture(autouse=True)
def _tiny(monkeypatch, steps):
    monkeypatch.setattr(forecasting, "user_store", lambda: steps)
    monkeypatch.setitem(models.MODELS, GPT.name, GPT)
    monkeypatch.setitem(models.MODELS, LLAMA.name, LLAMA)
    monkeypatch.setitem(models.MODELS, DEEP_GPT.name, DEEP_GPT)
    monkeypatch.setenv("MEMO_LOWERING", "aten")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def inductor(monkeypatch):
    """What users get; it takes twice as long."""
    monkeypatch.delenv("MEMO_LOWERING")


def plan(capsys, *arguments):
    """(exit code, stdout, stderr) of ``memo plan ARGUMENTS``."""
    with pytest.raises(SystemExit) as left:
        main(["plan", *arguments])
    out, err = capsys.readouterr()
    return left.value.code, out, err


def question(model="tiny-gpt", seq=1024, **more):
    names = ("tp", "cp", "pp", "dp", "cp_kind")
    degrees = Degrees(**{key: more.pop(key) for key in names if key in more})
    hardware = find_hardware(more.pop("hardware", "a100"))
    return Question(model=model, seq=seq, hardware=hardware, degrees=degrees, **more)


@pytest.mark.usefixtures("inductor")
def test_what_fits_has_all_fields_and_exit_code_0(capsys):
    code, out, _ = plan(capsys, "tiny-llama", "--seq", "1024", "--hardware", "h200", "--json")
    body = json.loads(out)
    assert code == 0
    assert set(body) >= FIELDS
    assert body["fits"] is True
    assert body["buffers"] == "estimated"
    assert any("is not installed" in note for note in body["notes"])
    assert body["headroom_bytes"] == body["budget_bytes"] - body["peak_bytes"] > 0
    assert body["budget_bytes"] == 141 * 10**9 - 2**30
    assert body["peak_bytes"] >= body["arena_bytes"] >= body["lower_bound_bytes"] > 0
    assert 0 < body["mfu"] < 1
    assert body["tokens_per_s"] == pytest.approx(1024 / body["step_s"])
    assert [cls["num_layers"] for cls in body["layer_classes"]] == [2]
    assert {row["decision"] for row in body["decisions"]} == {"SAVE"}
    largest = body["peak_at"]["tensors"]
    assert [row["bytes"] for row in largest] == sorted((o["bytes"] for o in largest), reverse=True)


def test_each_part_of_the_training_state_goes_to_the_host(capsys):
    bodies = {}
    for offload in ("none", "state", "gradients"):
        few = ("--seq", "64", "--hardware", "h200", "--offload", offload, "--json")
        code, out, _ = plan(capsys, "deep-gpt", *few)
        assert code == 0
        bodies[offload] = body = json.loads(out)
        seconds = body["step_s"] + body["update_s"]
        assert body["tokens_per_s"] == pytest.approx(64 / seconds)
    none, state, gradients = (body["state"] for body in bodies.values())
    sizes = none["gradients"]["device_bytes"]
    assert state["gradients"] == {"device_bytes": sizes, "host_bytes": 0}
    assert state["update"] == "device"
    assert gradients["gradients"]["device_bytes"] == 0
    assert 0.9 * sizes < gradients["gradients"]["host_bytes"] <= sizes
    assert gradients["update"] == "host"
    peaks = [body["peak_bytes"] for body in bodies.values()]
    assert peaks[0] > peaks[1] > peaks[2] + sizes // 2
    assert bodies["none"]["update_s"] == 0 < bodies["state"]["update_s"]


def test_what_does_not_fit_has_exit_code_1_and_the_smallest_peak(capsys, tmp_path, monkeypatch):
    (tmp_path / "my_rows.py").write_text(
        textwrap.dedent("""
            import torch

            def build(seq):
                return torch.nn.Sequential(
                    torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
                ), (torch.randn(seq, 64),)
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ("my_rows:build", "--seq", "1024", "--hardware", "a100", "--json")
    code, out, err = plan(capsys, *arguments, "--budget", "60MiB")
    body = json.loads(out)
    assert code == 1
    assert body["fits"] is False
    assert body["headroom_bytes"] == body["budget_bytes"] - body["peak_bytes"] < 0
    assert body["budget_bytes"] == 60 * 2**20
    assert "does not fit" in err
    smallest = body["peak_bytes"]
    code, out, _ = plan(capsys, *arguments, "--budget", str(smallest))
    assert (code, json.loads(out)["peak_bytes"]) == (0, smallest)
    sys.modules.pop("my_rows")


@pytest.mark.parametrize(("budget", "is_told"), [("81GiB", True), ("80GiB", False)])
def test_a_budget_above_the_device_is_told(capsys, budget, is_told):
    arguments = ("tiny-gpt", "--seq", "1024", "--hardware", "a100", "--budget", budget)
    code, out, _ = plan(capsys, *arguments)
    assert code == 0
    assert ("note: the budget is above the 80.00 GiB that a100 has" in out) is is_told


@pytest.mark.full
def test_a_budget_between_floor_and_saving_moves_tensors(capsys):
    """The floor is 64.2 MiB; saving everything takes 84.0 MiB."""
    code, out, _ = plan(
        capsys, "tiny-gpt", "--seq", "2048", "--budget", "66.2MiB", "--hardware", "a100", "--json"
    )
    body = json.loads(out)
    assert code == 0
    assert body["peak_bytes"] <= body["budget_bytes"] == int(66.2 * 2**20)
    assert {row["decision"] for row in body["decisions"]} != {"SAVE"}
    assert "layer0_fwd" in body["tiles"]


def test_the_answer_is_one_screen_and_tables_are_verbose(capsys, tmp_path, monkeypatch):
    answer = forecast(question("tiny-gpt", 1024))
    monkeypatch.setattr(forecasting, "forecast", lambda *_: answer)
    report, saved = tmp_path / "out.html", tmp_path / "plan.json"
    arguments = ("--seq", "1024", "--report", str(report), "--out", str(saved))
    code, out, _ = plan(capsys, "tiny-gpt", *arguments)
    assert code == 0
    assert len(out.splitlines()) <= 40
    assert max(map(len, out.splitlines())) <= 100
    assert "layers 0-1: " in out
    assert "<dt>shape</dt><dd>1 x 1024 tokens</dd>" in report.read_text()
    assert "<dt>device</dt><dd>a100, 80.00 GiB (planned, not run)</dd>" in report.read_text()
    assert " and " in out
    assert "kept, " in out
    code, verbose, _ = plan(capsys, "tiny-gpt", "--seq", "1024", "--verbose")
    assert code == 0
    assert "read by the layer's backward" in verbose
    assert "tiny-gpt, 1 x 1024 tokens on a100: fits" in out
    assert "set by" in out
    assert "epilogue_fwd@" in out
    assert "MFU" in out
    assert report.read_text().startswith("<!")
    restored = from_json(saved.read_text(), Plan, where="plan.json")
    assert restored.check.ok
    assert restored.timeline is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt-7c", "--seq", "1024"), "model: unknown 'gpt-7c'; did you mean gpt-7b?"),
        (("gpt-7c",), "model: unknown 'gpt-7c'; did you mean gpt-7b?"),
        (("tiny-gpt",), "seq: missing"),
        (
            ("tiny-gpt", "--seq", "1024", "--tp", "3"),
            "tp: 3 does not divide the attention heads (4)",
        ),
        (("tiny-gpt", "--seq", "1023", "--cp", "2"), "cp: 2 does not divide the sequence (1023)"),
        (("tiny-gpt", "--seq", "1024", "--pp", "3"), "pp: 3 does not divide the layers (2)"),
        (("tiny-gpt", "--seq", "1024", "--dp", "0"), "dp: expected at least 1, got 0"),
        (("tiny-gpt", "--seq", "1024", "--batch", "0"), "batch: expected at least 1"),
        (("tiny-gpt", "--seq", "0"), "seq: expected at least 1"),
        (("tiny-gpt", "--seq", "1024", "--dtype", "int3"), "dtype: expected one of"),
        (("tiny-gpt", "--seq", "1024", "--hardware", "h20000"), "hardware"),
        (("tiny-gpt", "--seq", "1024", "--optimizer", "lion"), "optimizer: expected one of"),
        (("tiny-gpt", "--seq", "1024", "--policy", "luck"), "policy: expected one of"),
        (("tiny-gpt", "--seq", "1024", "--lora", "0"), "lora: expected at least 1"),
        (("tiny-gpt", "--seq", "1024", "--lora", "4", "--tp", "2"), "lora: adapters are added to"),
        (("tiny-gpt", "--seq", "1024", "--offload", "all"), "offload: expected one of none, state"),
        (("tiny-gpt", "--seq", "1024", "--budget", "lots"), "budget: expected bytes"),
        (("tiny-gpt", "--seq", "1024", "--emit", "jax"), "emit: expected one of"),
        (("tiny-gpt", "--seq", "1024", "--emit", "hf", "--json"), "give one of the two"),
        (("no_such_module:f",), "cannot import no_such_module"),
        (("there/mine.py:f",), "expected a module, not a file: mine:f, from its folder"),
        (("json:no_function",), "json has no function 'no_function'"),
        (("nowhere/config.json", "--seq", "128"), "nowhere/config.json: cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, message):
    code, out, err = plan(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config.json:1: not JSON"),
        ("{}", r"field 'model_type' is missing"),
        ('{"model_type": "llama", "hidden_size": 64}', r"field 'num_hidden_layers' is missing"),
        ('{"model_type": "nothing-known"}', "has no model of model_type 'nothing-known'; newer"),
        ('{"model_type": "qwn3"}', "has no model of model_type 'qwn3'; did you mean 'qwen3'?"),
    ],
)
def test_a_config_that_lacks_something_is_refused(capsys, tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    code, out, err = plan(capsys, str(path), "--seq", "128")
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_config_json_is_planned(capsys, tmp_path):
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    path.write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    code, out, _ = plan(capsys, str(path), "--seq", "256", "--hardware", "a100", "--json")
    body = json.loads(out)
    assert code == 0
    assert [cls["num_layers"] for cls in body["layer_classes"]] == [2]
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert body["fixed_bytes"]["parameters"] == 2 * (2 * layer + 2 * 256 * 64 + 64)
    assert body["fixed_bytes"]["outputs"] >= 256 * 256 * 2  # the logits
    assert any("logits" in note for note in body["notes"])


def test_a_function_of_the_user_is_planned_on_fakes(capsys, tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        textwrap.dedent("""
            import torch

            def build(seq):
                huge = torch.nn.Linear(2**17, 2**17)
                return huge, (torch.randn(seq, 2**17),)
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, _ = plan(capsys, "my_models:build", "--seq", "64", "--hardware", "h200", "--json")
    sys.modules.pop("my_models")
    body = json.loads(out)
    assert code == 1  # 64 GiB of weights, twice with the gradient, four times with AdamW's state
    assert body["fixed_bytes"]["parameters"] == 4 * (2**34 + 2**17)
    assert body["fixed_bytes"]["optimizer_state"] == 8 * (2**34 + 2**17)


@pytest.mark.parametrize(
    ("shape", "degrees"),
    in_ci([(GPT, {}), (LLAMA, {"tp": 2, "cp": 2, "cp_kind": "ring"})], (GPT, {})),
    ids=lambda value: value.name if isinstance(value, ModelShape) else str(value),
)
def test_flops_of_the_trace_are_those_of_the_closed_form(shape, degrees):
    """However the step is cut, its FLOPs add up to 6 per weight and 6 h s for attention."""
    seq = 1024
    answer = forecast(question(shape.name, seq, **degrees))
    devices = math.prod(Degrees(**degrees).sizes.values())
    expected = shape.flops_per_token(seq) * seq / devices
    assert answer.step.model_flops == pytest.approx(expected, rel=1e-3)


def test_tensor_parallel_cuts_parameters_as_megatron_does():
    h, f, v, layers = LLAMA.hidden, LLAMA.ffn, LLAMA.vocab, LLAMA.num_layers
    kv = h * LLAMA.num_kv_heads // LLAMA.num_heads
    for tp in (1, 2):
        with FakeTensorMode():
            model, (ids, _) = first_stage(
                LLAMA, Degrees(tp=tp), seq=1024, batch=1, dtype=torch.bfloat16
            )
        cut = (2 * h * h + 2 * h * kv + 3 * h * f) // tp
        expected = layers * (cut + 2 * h) + 2 * v * h // tp + h
        assert sum(p.numel() for p in model.parameters()) == expected
        assert ids.shape == (1, 1024 // tp)


def test_key_value_heads_are_replicated_when_tp_exceeds_them():
    with FakeTensorMode():
        model, _ = first_stage(LLAMA, Degrees(tp=4), seq=1024, batch=1, dtype=torch.bfloat16)
    sizes = [tuple(weight.shape) for weight in model.layers[0].attention.qkv.weights]
    assert sizes == [(16, 64), (16, 64), (16, 64)]


@pytest.mark.full
def test_optimizer_state_is_sharded_over_dp_and_cp():
    sharded = forecast(question(dp=4)).step.plan.fixed
    both = forecast(question(dp=4, cp=2, cp_kind="ring", optimizer="adamw-fp32")).step.plan.fixed
    assert sharded.optimizer_state == 2 * sharded.parameters // 4
    assert sharded.parameters == both.parameters
    assert both.optimizer_state == both.parameters // 2 * 12 // 8


@pytest.mark.full
def test_a_pipeline_stage_holds_a_frame_for_each_micro_batch_in_flight():
    answer = forecast(question("deep-gpt", 4096, pp=2))
    plan = answer.step.plan
    assert answer.in_flight == 2
    assert answer.peak_bytes > plan.peak_bytes + plan.arena_bytes
    assert any("1F1B" in note for note in answer.notes)
    budget = answer.peak_bytes - plan.arena_bytes // 2
    tight = forecast(question("deep-gpt", 4096, pp=2, budget=budget))
    assert tight.fits
    assert tight.peak_bytes <= tight.budget_bytes < answer.peak_bytes


@pytest.mark.full
def test_gathers_belong_to_the_backward_and_are_not_saved():
    """Megatron's: 2 gathers and 2 scatters forwards; their counterparts and 2 gathers backwards.

    The first layer's last scatter stands with the embedding.
    """
    step = forecast(question("tiny-llama", 4096, tp=2)).step
    issues = Counter(
        (call.phase, call.instance)
        for call in step.problem.calls
        if call.kind is CallKind.ISSUE and call.layer_class is not None
    )
    assert [issues[Phase.FORWARD, layer] for layer in range(LLAMA.num_layers)] == [4, 4]
    assert [issues[Phase.BACKWARD, layer] for layer in range(LLAMA.num_layers)] == [5, 6]
    arrived = {
        call.outputs[0]
        for call in step.problem.calls
        if call.kind is CallKind.COMM_WAIT and call.phase is Phase.FORWARD
    }
    late_readers = [
        call.name
        for call in step.problem.calls
        if call.phase is Phase.BACKWARD and not arrived.isdisjoint(call.inputs)
    ]
    assert arrived
    assert not late_readers


@pytest.mark.full
def test_other_devices_are_waited_for_longer_over_a_slower_link():
    fast, slow = (
        forecast(question("tiny-llama", 4096, tp=2, hardware=name)) for name in ("h100", "l40s")
    )
    assert fast.step.plan.num_collectives == slow.step.plan.num_collectives > 0
    assert 0 < fast.step.plan.exposed_comm_s < slow.step.plan.exposed_comm_s
    assert fast.step_s < slow.step_s
    (line,) = (line for line in plan_lines(slow, None) if "collectives" in line)
    assert f"{slow.step.plan.num_collectives} at 29.80 GiB/s: " in line


def test_a_frozen_base_lies_on_the_host_and_adapters_on_the_device():
    rank, shape = 2, LLAMA
    answer = forecast(question("tiny-llama", lora=rank, offload="weights"))
    state, inner, kv = answer.step.plan.training_state, shape.hidden, shape.hidden // 2
    weights = [(inner, inner), (inner, kv), (inner, kv), (inner, inner)]
    weights += [(inner, shape.ffn)] * 3
    large = shape.num_layers * sum(width * height for width, height in weights)
    small = shape.num_layers * rank * sum(width + height for width, height in weights)
    rest = 2 * shape.vocab * inner + inner + shape.num_layers * 2 * inner
    assert state.parameters == Where(device_bytes=2 * (small + rest), host_bytes=2 * large)
    assert state.gradients.device_bytes + state.gradients.host_bytes == 2 * small
    assert answer.host_bytes >= 2 * large
    assert "parameters" in dict(numbers(answer, None))["on the host"]


def test_the_operators_of_shapes_do_not_run():
    with pytest.raises(RuntimeMisuse, match="behind: exists for planning"):
        behind(torch.zeros(1, 4, 2), torch.zeros(1))


def _needing(limit, curve=1.0):
    """A model of which ``limit`` tokens fit; the bytes of all grow with that exponent."""

    def needed(setting):
        with forecasting._recorded_model(setting) as model:
            constant = forecasting._held_bytes(setting, model)
        room = setting.room.available_bytes - constant
        num_bytes = constant + room * (setting.seq / (limit + 1)) ** curve
        return Need(num_bytes, setting.seq <= limit)

    return needed


@pytest.mark.parametrize("curve", [1.0, 2.0, 0.5])
@pytest.mark.parametrize(
    ("limit", "start"), [(7, 1), (8, 1), (1, 1), (23, 4), (3, 100), (0, 1), (999, 8), (400, 900)]
)
def test_the_longest_sequence_fits_and_the_next_does_not(monkeypatch, limit, start, curve):
    granule = 1024 * 4
    monkeypatch.setattr(forecasting, "needed", _needing(limit * granule, curve))
    tried = {}
    found = longest(question(seq=start * granule, tp=2, cp=2), tried.__setitem__)
    assert found == limit * granule
    assert all(fits is (seq <= limit * granule) for seq, fits in tried.items())
    assert found == 0 or tried[found]
    assert not tried[found + granule]
    assert len(tried) <= (4 if curve == 1.0 else 20)


def test_the_longest_sequence_is_found_where_nothing_is_known_of_the_floor(monkeypatch):
    def unknown(setting):
        return Need(math.inf, setting.seq <= 77 * 1024)

    monkeypatch.setattr(forecasting, "needed", unknown)
    assert longest(question(seq=None), lambda *_: None) == 77 * 1024


def test_max_seq_is_in_the_answer(capsys, monkeypatch):
    monkeypatch.setattr(forecasting, "needed", _needing(3 * 1024))
    code, out, err = plan(capsys, "tiny-gpt", "--max-seq", "--hardware", "a100", "--json")
    body = json.loads(out)
    assert (code, body["max_seq"], body["seq"]) == (0, 3072, 3072)
    assert "4096 tokens: does not fit" in err


def test_a_sweep_goes_from_the_floor_to_no_budget(capsys, monkeypatch):
    answer = forecast(question())
    least, most = 1000, 5000

    def planned(setting, _subject):
        peak = min(max(setting.budget, least), most)
        return dataclasses.replace(answer, peak_bytes=peak, budget_bytes=setting.budget)

    monkeypatch.setattr(forecasting, "_forecast", planned)
    arguments = ("tiny-gpt", "--seq", "1024", "--sweep", "budget", "--budgets", "5")
    code, out, _ = plan(capsys, *arguments, "--json")
    rows = json.loads(out)["sweep"]
    assert code == 0
    assert [row["budget_bytes"] for row in rows] == [1000, 2000, 3000, 4000, 5000]
    assert [row["peak_bytes"] for row in rows] == [1000, 2000, 3000, 4000, 5000]
    assert {row["step_s"] for row in rows} == {answer.step_s}
    assert rows[0]["offloaded_bytes"] == answer.offloaded_bytes == 0
    assert rows[0]["recompute_s"] == answer.recompute_s == 0
    _, text, _ = plan(capsys, *arguments)
    assert text.count("save") == 5
    assert "larger budgets" not in text
    most = 2**40
    _, text, _ = plan(capsys, *arguments)
    assert "h200 has 131.32 GiB: larger budgets need another device" in text


@pytest.mark.full
def test_the_seconds_of_recomputation_are_told():
    """A sweep shows them for each plan; they are no region's that the step begins with."""
    answer = forecast(question(policy="full-recompute"))
    again = [call for call in answer.step.problem.calls if call.kind is CallKind.RECOMPUTE]
    assert 0 < answer.recompute_s < answer.step_s
    assert all(answer.step.costs.call_s(call) > 0 for call in again)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--sweep", "seq"), "sweep: expected budget"),
        (("--sweep", "budget", "--budget", "1GiB"), "leave out --budget"),
        (("--sweep", "budget", "--max-seq"), "leave out --max-seq"),
        (("--sweep", "budget", "--budgets", "1"), "at least 2"),
        (("--budgets", "3"), "give --sweep budget"),
    ],
)
def test_a_sweep_that_cannot_be_made_is_refused(capsys, arguments, named):
    code, _, err = plan(capsys, "tiny-gpt", "--seq", "1024", *arguments)
    assert code == 2
    assert named in err


def _settings(*decisions, **more):
    rows = tuple(
        Decision(
            tensor="t",
            layer_class="layers",
            bytes=2**20,
            decision=kind,
            token_fraction=1.0,
            reason="",
            source=None,
        )
        for kind in decisions
    )
    sizes = {"num_layers": 32, "seq": 4096, "batch": 1, "tp": 1, "cp": 1, "pp": 1}
    return Settings(model="m", decisions=rows, **{"cp_kind": None, **sizes, **more})


@pytest.mark.parametrize(
    ("tool", "decisions", "expected"),
    [
        ("hf", ("SAVE",), "gradient_checkpointing=False"),
        ("hf", ("RECOMPUTE",), "gradient_checkpointing=True"),
        ("hf", ("OFFLOAD",), "save_on_cpu(pin_memory=True)"),
        ("torchtitan", ("SAVE",), 'mode = "none"'),
        ("torchtitan", ("SAVE", "SAVE", "RECOMPUTE"), 'mode = "selective"'),
        ("torchtitan", ("SAVE", "RECOMPUTE", "RECOMPUTE"), 'mode = "full"'),
        ("megatron", ("SAVE",), "no --recompute-*"),
        ("megatron", ("SAVE", "SAVE", "RECOMPUTE"), "--recompute-granularity selective"),
        ("megatron", ("RECOMPUTE",), "--recompute-granularity full"),
        ("megatron", ("OFFLOAD",), "--cpu-offloading-num-layers 30"),
    ],
)
def test_settings_of_other_tools(tool, decisions, expected):
    assert expected in emit(tool, _settings(*decisions))


def test_settings_name_the_degrees():
    text = emit("megatron", _settings("SAVE", tp=8, cp=2, cp_kind="ulysses", pp=4))
    assert "--tensor-model-parallel-size 8" in text
    assert "--cp-comm-type a2a" in text
    assert "--sequence-parallel" in text
    with pytest.raises(InputError, match="emit: expected one of hf, torchtitan, megatron"):
        emit("jax", _settings())
