"""A plan made without a GPU is the backend's on that GPU, byte for byte."""

import json
import os
import subprocess
import sys

import pytest

from memo_compile.gpus import GPUS
from memo_compile.offline.cuda_attention import Kernel
from tests.cuda_emulated.offline_plans import SMALL, both
from tests.cuda_emulated.test_memory import workspaces

__all__ = ["workspaces"]  # a fixture


@pytest.mark.parametrize("policy", ["save", "full-offload", "full-recompute"])
@pytest.mark.parametrize("name", [name for name in SMALL if name != "llama3-8b-wide"])
def test_the_plan_without_the_device_is_the_backend_s(name, policy):
    offline, backend = both(name, "h200", policy=policy)
    assert offline == backend


def test_the_plan_under_a_budget_in_tiles_is_the_backend_s():
    """Tiles of the loss head, whose gradient is made in the forward."""
    options = {"memory_budget": 24_000_000_000, "optimizer_state_bytes_per_parameter": 4}
    offline, backend = both("llama3-8b-wide", "h200", token_tiles=None, **options)
    assert max(offline["tiles"].values()) > 1
    assert offline == backend


def run_as(kind: str, module: str, *arguments: str) -> dict:
    """What ``module`` prints on another kind of device; it must end well."""
    run = subprocess.run(
        [sys.executable, "-m", f"tests.cuda_emulated.{module}", *arguments],
        env={**os.environ, "EMULATED_KIND": kind},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("kind", ["a100", "b200"])
def test_the_plan_for_another_kind_of_device(kind):
    """Its kernels are written for sm_80, sm_100; its L2 cache and its libraries are others."""
    fixed = run_as(kind, "offline_plans", "llama")["offline"]["fixed"]
    assert fixed["libraries"] > GPUS[kind].l2_bytes


@pytest.mark.parametrize("kind", ["a100", "h200", "b200"])
def test_torch_chooses_attention_as_the_rules_say(kind):
    """With cuDNN, which torch prefers on Hopper and Blackwell."""
    found = set(run_as(kind, "attention_choices")["chosen"])
    assert found == {kernel.value for kernel in Kernel} - ({"cudnn"} if kind == "a100" else set())
