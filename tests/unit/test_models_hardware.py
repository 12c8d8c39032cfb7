"""Named shapes and devices, and MEMO's alpha."""

import json
import re

import pytest

from memo_compile.costs.hardware import (
    FIGURES,
    HARDWARE,
    declared_for,
    find_hardware,
    hardware_of,
    profile_to_dict,
)
from memo_compile.costs.models import MODELS, find_model
from memo_compile.errors import InputError
from memo_compile.papers.memo.alpha import compute_alpha


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-7b", 6.9),
        ("gpt-175b", 175),
        ("llama-7b", 6.7),
        ("llama-65b", 65.3),
        ("llama2-70b", 69),
        ("llama3-8b", 8.0),
        ("qwen3-8b", 8.2),
        ("llama-175b", 174.7),
    ],
)
def test_parameters_add_up_to_the_name(name, billions):
    assert find_model(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("7B", "llama-7b"),
        ("Llama-65B", "llama-65b"),
        ("Llama-2-70B", "llama2-70b"),
        ("Llama2-70B", "llama2-70b"),
        ("llama_175b", "llama-175b"),
        ("GPT-13B", "gpt-13b"),
    ],
)
def test_spellings(spelled, name):
    assert find_model(spelled).name == name


def test_every_alias_and_profile_resolves():
    assert all(find_model(name) is shape for name, shape in MODELS.items())
    assert all(profile.source for profile in HARDWARE.values())
    assert find_hardware("NVIDIA H800").peak_flops_per_s == 989.4e12
    assert find_hardware("A800").peak_flops_per_s == 312e12
    assert find_hardware("RTX 4090").name == "4090"


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(InputError, match=r"model: unknown 'llama-66b'; did you mean llama-65b\?"):
        find_model("llama-66b")
    with pytest.raises(InputError, match=r"hardware: unknown 'h801'; did you mean h800\?"):
        find_hardware("h801")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA_H200", "h200"),
        ("cpu", "cpu"),
    ],
)
def test_a_device_is_known_by_its_own_name(device, name):
    assert hardware_of(device) is declared_for(device) is HARDWARE[name]


def test_an_unknown_device_gets_a_stand_in_that_says_so():
    assert declared_for("Tesla T4") is None
    profile = hardware_of("Tesla T4")
    assert profile.name == "a100 in place of Tesla T4"
    assert profile.hbm_bytes_per_s == HARDWARE["a100"].hbm_bytes_per_s


@pytest.mark.parametrize("profile", HARDWARE.values(), ids=HARDWARE)
@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_has_a_document_and_a_date(profile, figure):
    source = profile.source_of(figure)
    assert len(source.document) > 10
    assert re.fullmatch(r"20\d\d(-\d\d){0,2}", source.date)


@pytest.mark.parametrize("profile", HARDWARE.values(), ids=HARDWARE)
def test_a_profile_survives_its_file(profile, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(profile_to_dict(profile)))
    read = find_hardware(str(path))
    assert profile_to_dict(read) == profile_to_dict(profile)
    assert all(getattr(read, figure) == getattr(profile, figure) for figure in FIGURES)


def test_a_file_of_an_earlier_memo_has_no_slowdown_beside_collectives(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(_broken(lambda body: body["figures"].pop("comm_slowdown")))
    assert find_hardware(str(path)).comm_slowdown == 1.0
    assert HARDWARE["h100"].comm_slowdown == pytest.approx(132 / 116)


def _broken(change):
    body = profile_to_dict(HARDWARE["a100"])
    change(body)
    return json.dumps(body)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n  nonsense", r"mine\.json:2: not JSON"),
        ("[1, 2]", r"mine\.json:1: expected a profile with schema_version 1"),
        (_broken(lambda b: b.update(schema_version=9)), "expected a profile with schema_version 1"),
        (_broken(lambda b: b.pop("figures")), "figures: expected an object"),
        (_broken(lambda b: b["figures"].pop("d2h_bytes_per_s")), "d2h_bytes_per_s.value: expected"),
        (
            _broken(lambda b: b["figures"]["memory_bytes"].update(value="80")),
            "memory_bytes.value: expected a number, got '80'",
        ),
        (
            _broken(lambda b: b["figures"]["memory_bytes"].update(value=float("inf"))),
            "memory_bytes.value: expected a finite number",
        ),
        (
            _broken(lambda b: b["figures"]["memory_bytes"].update(value=0)),
            "memory_bytes: expected more than 0, got 0",
        ),
        (
            _broken(lambda b: b["figures"]["memory_bytes"].pop("date")),
            "figures.memory_bytes.date: expected a text, got None",
        ),
        (
            _broken(lambda b: b["figures"]["comm_slowdown"].update(value=0.5)),
            "comm_slowdown: expected at least 1, got 0.5",
        ),
        (_broken(lambda b: b.pop("name")), "profile.name: expected a text"),
    ],
)
def test_a_broken_profile_file_is_refused(text, message, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        find_hardware(str(path))


def test_a_missing_profile_file_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"none\.json: cannot be read"):
        find_hardware(str(tmp_path / "none.json"))


WORKED = {
    "hidden": 4096,
    "num_layers": 32,
    "seq": 512 * 1024,
    "tp": 4,
    "cp": 2,
    "pp": 1,
    "bandwidth_bytes_per_s": 32e9,
    "host_bytes": 250e9,
    "flops_per_s": 156e12,
}


def test_worked_example_of_alpha():
    found = compute_alpha(**WORKED)
    assert found.bandwidth_bound == pytest.approx(8.2592, abs=1e-4)
    assert found.host_bound == pytest.approx(0.9659, abs=1e-4)
    assert (found.quantised, found.fits_host) == (0.5, True)


def test_alpha_without_host_bound_and_without_host():
    few = compute_alpha(**{**WORKED, "pp": 16})
    assert (few.host_bound, few.value, few.fits_host) == (None, 1.0, True)
    none = compute_alpha(**{**WORKED, "host_bytes": 1e9})
    assert none.host_bound < 0
    assert (none.value, none.quantised, none.fits_host) == (0.0, 0.0, False)


@pytest.mark.parametrize(
    ("host_bytes", "quantum"), [(250e9, 0.5), (257.7e9, 1.0), (110e9, 0.25), (65e9, 0.125)]
)
def test_alpha_is_rounded_down(host_bytes, quantum):
    found = compute_alpha(**{**WORKED, "host_bytes": host_bytes})
    assert found.quantised == quantum <= found.value


def test_alpha_names_the_bad_argument():
    with pytest.raises(InputError, match="tp: expected a positive number, got 0"):
        compute_alpha(**{**WORKED, "tp": 0})
    with pytest.raises(InputError, match="flops: expected a positive number"):
        compute_alpha(**{**WORKED, "flops_per_s": float("nan")})
