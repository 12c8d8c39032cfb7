"""The commands for many GPUs: what they print, and how they leave."""

import json
import math
import re
from pathlib import Path

import pytest

from memo_compile.cli.main import main

DATA = Path(__file__).parents[1] / "data"
KNOWN = json.loads((DATA / "lynx_instances.json").read_text())
CALL = "--model llama-175b --gpus 256 --seq 4096".split()
OFFLOAD = [
    "offload-fraction",
    *CALL,
    *"--tp 2 --cp 2 --pp 16 --layers-per-chunk 1 --checkpoint none --budget 65000MiB".split(),
]


def run(capsys, *argv):
    """Exit code, the JSON object on stdout (or its text), stderr."""
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in argv])
    out, err = capsys.readouterr()
    try:
        return left.value.code, json.loads(out), err
    except json.JSONDecodeError:
        return left.value.code, out, err


def write(tmp_path, data):
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(data))
    return path


def test_heu(capsys, tmp_path):
    code, body, err = run(capsys, "lynx", "heu", write(tmp_path, KNOWN["heu"][2]))
    assert (code, err) == (0, "")
    assert (body["status"], body["objective"]) == ("optimal", 3)
    assert len(body["keep"]) == 5
    assert len(body["windows"]) == 5
    assert all(isinstance(op, int) for window in body["windows"] for op in window)
    assert body["peak_bytes"] <= 40


def test_heu_token_split_prints_fractions(capsys, tmp_path):
    path = write(tmp_path, KNOWN["heu"][6]["instance"])
    code, body, _ = run(capsys, "lynx", "heu", path, "--token-split")
    assert code == 0
    assert body["objective"] < KNOWN["heu"][6]["optimum"]
    parts = [part for window in body["windows"] for part in window]
    assert all(part.keys() == {"op", "fraction"} for part in parts)
    assert any(part["fraction"] < 1 for part in parts)


def test_opt(capsys, tmp_path):
    entry = KNOWN["opt"][5]
    code, body, _ = run(capsys, "lynx", "opt", write(tmp_path, entry["instance"]), "--json")
    assert code == 0
    assert (body["status"], body["objective"]) == ("optimal", entry["optimum"])
    schedule = body["schedule"]
    assert body["keep"] == schedule["S"][-1]
    assert [len(row) for row in schedule["Rc"]] == [8] * 8
    assert body["windows"] == [[i for i, x in enumerate(row) if x] for row in schedule["Ro"]]
    assert all(row[t] == 1 for t, row in enumerate(schedule["Rc"]))


@pytest.mark.parametrize("command", ["heu", "opt"])
def test_infeasible_names_the_constraint(capsys, tmp_path, command):
    entry = {**KNOWN[command][5]["instance"], "budget": 5}
    code, body, err = run(capsys, "lynx", command, write(tmp_path, entry))
    assert code == 1
    assert body["status"] == "infeasible"
    assert body["conflict"]["floor_bytes"] > 5
    assert err.count("\n") == 1
    assert "budget 5" in err


def test_bad_files(capsys, tmp_path):
    path = tmp_path / "broken.json"
    path.write_text('{"C": [1,\n 2')
    assert run(capsys, "lynx", "opt", path)[2].startswith(f"memo: {path}:2: not JSON")
    code, _, err = run(capsys, "stages", tmp_path / "none.json")
    assert code == 2
    assert "cannot be read" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(KNOWN), "heu: a list of instances; expected one instance"),
        (json.dumps({**KNOWN["heu"][2]["instance"], "budget": math.nan}), "budget: .* got nan"),
        (json.dumps({**KNOWN["heu"][2]["instance"], "budget": 10**400}), "budget: .* at most 1e"),
        (json.dumps(KNOWN["opt"][0]["instance"]), "need: missing"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_odd_files_are_one_line_and_exit_two(capsys, tmp_path, text, message):
    path = tmp_path / "instance.json"
    path.write_text(text)
    code, out, err = run(capsys, "lynx", "heu", path)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert re.search(message, err)


def test_no_time_is_no_answer(capsys, tmp_path):
    path = write(tmp_path, KNOWN["opt"][0])
    code, body, err = run(capsys, "lynx", "opt", path, "--time-limit", 0)
    assert (code, body) == (3, {"status": "time_limit"})
    assert "raise --time-limit" in err


def test_stages(capsys, tmp_path):
    entry = KNOWN["partition"][9]
    path = write(tmp_path, {k: entry[k] for k in ("stage_times", "num_layers")})
    code, body, _ = run(capsys, "stages", path)
    assert (code, body) == (0, {"status": "optimal", "objective": 252, "layers": [6, 4, 7]})
    code, body, _ = run(capsys, "stages", path, "--method", "paper")
    assert (code, body["status"], sum(body["layers"])) == (0, "feasible", 17)
    path = write(tmp_path, {"stage_times": [[None, 1], [None, None]], "num_layers": 2})
    code, body, err = run(capsys, "stages", path)
    assert (code, body["status"]) == (1, "infeasible")
    assert "stage 1 runs out of memory" in err


def test_offload_fraction(capsys):
    code, body, _ = run(capsys, *OFFLOAD, "--json")
    assert code == 0
    assert body["alpha"] == pytest.approx(0.522, abs=1e-3)
    assert (body["chunks_in_flight"], body["fits"]) == (111, True)
    assert body["resident_chunks"] == pytest.approx(4 + 107 * (1 - body["alpha"]))
    assert run(capsys, *OFFLOAD)[1].split()[-2:] == ["fits", "yes"]


def test_offload_fraction_that_does_not_fit(capsys):
    code, body, err = run(capsys, *OFFLOAD[:-1], "20GiB", "--json")
    assert (code, body["alpha"], body["fits"], body["resident_chunks"]) == (1, 1.0, False, 4.0)
    assert re.fullmatch(r"memo: does not fit: budget 20.00 GiB < 41.09 GiB .* 4 chunks .*\n", err)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--model", "llama-176b", "model: unknown 'llama-176b'; did you mean llama-175b?"),
        ("--gpus", "255", "gpus: 255 is not divisible by tp * cp * pp"),
        ("--pp", "5", "gpus: 256 is not divisible"),
        ("--checkpoint", "some", "--checkpoint"),
        ("--budget", "lots", "budget: expected bytes"),
        ("--seq", "4096.5", "expected a whole number"),
        ("--seq", "4K", "expected a whole number such as 4096 or 32e3"),
        ("--seq", "1e200", "at most 1e+15"),
    ],
)
def test_bad_arguments_exit_two(capsys, option, value, message):
    argv = list(OFFLOAD)
    argv[argv.index(option) + 1] = value
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert message in err


def test_pareto(capsys):
    argv = "pareto --model 175B --seq 4096 --gemm-efficiency 0.6 --hbm-efficiency 0.8".split()
    code, body, _ = run(capsys, *argv, "--json")
    assert code == 0
    sizes = [point["bytes_per_token_hidden"] for point in body["points"]]
    assert sizes == sorted(sizes)
    assert ["n1", "n2", "silu", "product"] in [p["recomputed"] for p in body["points"]]
    assert "n1, n2, silu, product" in run(capsys, *argv)[1]


def test_alpha(capsys):
    argv = (
        "alpha --hidden 4096 --layers 32 --seq 524288 --tp 4 --cp 2 --pp 1 --bandwidth 32e9 "
        "--host-bytes 250e9 --flops 156e12 --json"
    ).split()
    code, body, _ = run(capsys, *argv)
    assert code == 0
    assert body["alpha_quantised"] == 0.5
    argv[argv.index("250e9")] = "1e9"
    code, body, err = run(capsys, *argv)
    assert (code, body["fits_host"], body["alpha"]) == (1, False, 0.0)
    assert "does not fit: host-bytes 1e+09" in err
    argv[argv.index("--pp") + 1] = "16"
    assert run(capsys, *argv)[1]["alpha_host"] is None


def test_search(capsys, tmp_path):
    report = tmp_path / "search.html"
    argv = ["search", *CALL, "--global-batch", 256, "--hardware", "h800", "--top", 5, "--json"]
    code, body, _ = run(capsys, *argv, "--report", report)
    assert code == 0
    assert body["num_points"] == 2310
    assert len(body["configurations"]) == 5
    assert body["configurations"][0].keys() == {
        *("tp", "cp", "pp", "dp", "layers_per_chunk", "checkpoint", "alpha"),
        *("iteration_s", "mfu", "peak_bytes"),
    }
    page = report.read_text()
    assert page.count("<svg") == 2
    assert "http" not in page
    assert "MFU" in run(capsys, *argv[:-1])[1]


def test_search_with_measurements(capsys, tmp_path):
    runs = DATA / "kwai_offload_fractions.csv"
    code, fitted, _ = run(capsys, "calibrate", runs, "--json")
    assert code == 0
    saved = tmp_path / "model.json"
    saved.write_text(json.dumps(fitted))
    argv = ["search", *CALL, "--global-batch", 256, "--top", 1, "--json", "--measurements"]
    first = run(capsys, *argv, runs)[1]["configurations"]
    assert first == run(capsys, *argv, saved)[1]["configurations"]
    assert first != run(capsys, *argv[:-1])[1]["configurations"]
    assert "gemm_efficiency" in run(capsys, "calibrate", runs)[1]


JOINT = {
    "layer": {
        **{k: KNOWN["heu"][8]["instance"][k] for k in ("C", "M", "deps", "comm", "ctime")},
        "need": [1, 1, 1, 1, 1, 1],
        "backward_time": 60,
    },
    "num_layers": 10,
    "num_stages": 3,
    "num_batches": 6,
    "layer_static": 5,
    "budget": 220,
    "extra_time": [0, 0, 50],
}


def test_search_where_nothing_fits(capsys):
    argv = "search --model 175b --gpus 8 --seq 4096 --global-batch 256 --json".split()
    code, body, err = run(capsys, *argv)
    assert (code, body["status"], body["configurations"]) == (1, "infeasible", [])
    assert "smallest peak of 630 configurations" in err
    assert run(capsys, *argv, "--budget", "0%")[0] == 2


def test_stages_with_policies(capsys, tmp_path):
    code, body, _ = run(capsys, "stages", write(tmp_path, JOINT))
    assert (code, body["status"]) == (0, "optimal")
    assert sum(body["layers"]) == 10
    layer_s = sum(JOINT["layer"]["C"]) + 60
    for stage, (layers, policy) in enumerate(zip(body["layers"], body["policies"], strict=True)):
        expected = layers * (layer_s + policy["objective"]) + JOINT["extra_time"][stage]
        assert body["stage_times"][stage] == pytest.approx(expected)
        assert policy["peak_bytes"] <= 220
    assert body["objective"] == max(body["stage_times"])
    assert body["layers"][-1] <= min(body["layers"][:-1])
    assert run(capsys, "stages", write(tmp_path, {"instance": JOINT}))[1] == body


def test_trace_of_the_replayed_step(capsys, tmp_path):
    path = tmp_path / "step.json"
    code, body, _ = run(capsys, *OFFLOAD, "--json", "--trace", path, "--micro-batches", 16)
    assert code == 0
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == set(range(16))
    forwards = [e for e in spans if e["pid"] == 0 and e["name"] == "forward"]
    assert len(forwards) == 16 * 6
    assert {e["name"] for e in spans} == {"forward", "backward", "offload", "reload"}
    held = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert max(held) <= body["peak_bytes"] + 1
    code, _, err = run(capsys, *OFFLOAD, "--trace", path, "--micro-batches", 17)
    assert (code, "needs a multiple of the 16 ranks" in err) == (2, True)
