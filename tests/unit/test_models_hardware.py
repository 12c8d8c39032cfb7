"""Named shapes and devices, and MEMO's alpha."""

import pytest

from memo_compile.errors import InputError
from memo_compile.hardware import HARDWARE, find_hardware
from memo_compile.models import MODELS, find_model
from memo_compile.planners.alpha import compute_alpha


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


def test_alpha_reaches_one_at_the_crossover():
    hidden, flops, bandwidth = 4096, 156e12, 32e9
    crossover = 16 * flops / bandwidth - 12 * hidden
    found = compute_alpha(**{**WORKED, "seq": int(crossover), "tp": 1})
    assert found.bandwidth_bound == pytest.approx(1.0, abs=1e-4)


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
