"""``memo hardware``: what it prints, what it writes, and how it leaves."""

import json
import os

import pytest
import torch

from memo_compile.cli.main import main
from memo_compile.costs import hardware_measure
from memo_compile.costs.hardware import FIGURES, HARDWARE, find_hardware
from memo_compile.costs.hardware_measure import measure_hardware, pick_device
from memo_compile.errors import InputError


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(hardware_measure, "BUDGET_S", 0.0)
    monkeypatch.setattr(hardware_measure, "COPY_BYTES", 4 * 2**20)
    monkeypatch.setattr(hardware_measure, "MATMUL_SIZE", {"cpu": 128, "cuda": 128})
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


def run(capsys, *argv):
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return left.value.code, out, err


def test_list_names_every_profile(capsys):
    code, out, err = run(capsys, "hardware", "list")
    assert (code, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines() if line.strip()]
    wanted = ["a800", "a100", "h100", "h800", "h200", "b200", "l40s", "4090", "cpu"]
    assert names[1:10] == wanted
    code, out, _ = run(capsys, "hardware", "list", "--json")
    assert [profile["name"] for profile in json.loads(out)["profiles"]] == wanted


def test_show_gives_the_source_and_date_of_each_figure(capsys):
    code, out, err = run(capsys, "hardware", "show", "NVIDIA A800")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert {"2e+11", "2022-11"} <= set(rows["link_bytes_per_s"].split())
    assert {"3.12e+14", "2021-06"} <= set(rows["peak_flops_per_s"].split())
    code, out, _ = run(capsys, "hardware", "show", "a800", "--json")
    body = json.loads(out)
    assert body["figures"].keys() == set(FIGURES)
    assert all(
        figure.keys() == {"value", "document", "date"} for figure in body["figures"].values()
    )


def test_an_unknown_name_is_one_line_and_exit_two(capsys):
    code, out, err = run(capsys, "hardware", "show", "h201")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "hardware: unknown 'h201'; did you mean h200?" in err


def test_measure_prints_one_object_and_progress_beside_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "hardware", "measure", "--device", "cpu", "--json")
    body = json.loads(out)
    assert code == 0
    assert list(tmp_path.iterdir()) == []
    assert [line.strip(" .") for line in err.replace("memo:", "").splitlines()][1:] == [
        "matrix product",
        "device memory",
        "device to host",
        "host to device",
    ]
    assert "float32" in body["figures"]["peak_flops_per_s"]["document"]
    assert body["figures"]["network_bytes_per_s"]["document"].startswith("assumed")
    assert body["figures"]["d2h_bytes_per_s"]["value"] > 1e7


def test_a_busy_machine_is_said_to_be_one(capsys, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 1.0, 1.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    code, out, err = run(capsys, "hardware", "measure", "--device", "cpu", "--json")
    assert code == 0
    assert json.loads(out)["schema_version"] == 1
    assert "other processes use this machine (load 9.0 on 4 cores)" in err


def test_a_measured_file_works_where_a_name_does(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "hardware", "measure", "--device", "cpu")
    assert code == 0
    assert "wrote memo-hardware.json" in err
    assert "h2d_bytes_per_s" in out
    profile = find_hardware("memo-hardware.json")
    assert profile.memory_bytes > 2**28
    figures = (getattr(profile, name) for name in FIGURES)
    assert all(value > 0 for value in figures)
    code, out, err = run(capsys, "hardware", "show", "memo-hardware.json", "--json")
    assert json.loads(out) == json.loads((tmp_path / "memo-hardware.json").read_text())
    pareto = ["pareto", "--model", "7b", "--seq", "4096", "--json", "--gemm-efficiency", "0.6"]
    pareto += ["--hbm-efficiency", "0.8", "--hardware", "memo-hardware.json"]
    code, out, err = run(capsys, *pareto)
    assert (code, err) == (0, "")
    assert len(json.loads(out)["points"]) > 3


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "tpu0"], "device: expected cpu, cuda or cuda:N, got 'tpu0'"),
        (["--device", "meta"], "device: expected cpu, cuda or cuda:N, got 'meta'"),
        (["--device", "cuda:99"], "GPUs, not 'cuda:99'"),
        (["--out", "missing/mine.json"], "missing/mine.json: is a folder, or its folder"),
    ],
)
def test_measure_refuses_before_it_measures(capsys, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "hardware", "measure", *argv)
    assert (code, out) == (2, "")
    assert message in err
    assert "measuring" not in err


def test_a_gpu_is_measured_in_bfloat16_and_takes_its_links_from_its_name(monkeypatch):
    """The GPU's branches, on the CPU: only its name, its memory and the host buffer differ."""
    device = torch.device("cuda", 0)
    seen = []
    monkeypatch.setattr(hardware_measure, "device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(hardware_measure, "memory_bytes", lambda _: 10**11)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for method, value in {"flops_per_s": 7e14, "copy_bytes_per_s": 4e12}.items():
        monkeypatch.setattr(hardware_measure.Bench, method, lambda bench, value=value: value)
    monkeypatch.setattr(hardware_measure.Bench, "host_bytes_per_s", lambda bench: (5e10, 5.5e10))
    profile = measure_hardware(device, say=seen.append)
    assert profile.link_bytes_per_s == HARDWARE["h200"].link_bytes_per_s
    assert profile.source_of("network_bytes_per_s").document.startswith("NVIDIA DGX H200")
    assert "bfloat16" in profile.source_of("peak_flops_per_s").document
    assert (profile.d2h_bytes_per_s, profile.h2d_bytes_per_s) == (5e10, 5.5e10)
    assert profile.devices_per_node == 1


def test_a_cpu_takes_no_figure_from_the_assumed_profile(monkeypatch):
    name = "Some(R) CPU @ 2.20GHz"
    monkeypatch.setattr(hardware_measure, "device_name", lambda _: name)
    profile = measure_hardware(torch.device("cpu"))
    assert profile.name == name
    assert profile.link_bytes_per_s == profile.d2h_bytes_per_s
    assert "one device to measure" in profile.source_of("link_bytes_per_s").document


def test_without_a_gpu_the_cpu_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device(None) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device(None) == torch.device("cuda", 0)


def test_a_host_that_does_not_say_its_memory_is_refused(monkeypatch):
    silent = type("Silent", (), {"total_bytes": None, "cgroup_limit_bytes": None})
    monkeypatch.setattr(hardware_measure, "host_memory", silent)
    with pytest.raises(InputError, match="does not say how much memory"):
        hardware_measure.memory_bytes(torch.device("cpu"))
