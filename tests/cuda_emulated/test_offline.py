"""A plan made without a GPU is the backend's on that GPU, byte for byte."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend

from memo_compile.gpus import GPUS
from memo_compile.offline.cuda_attention import Kernel, kernel_for
from tests.cuda_emulated.offline_plans import SMALL, both
from tests.cuda_emulated.test_memory import workspaces

__all__ = ["workspaces"]  # a fixture

CHOICES = {
    SDPBackend.FLASH_ATTENTION: Kernel.FLASH,
    SDPBackend.EFFICIENT_ATTENTION: Kernel.EFFICIENT,
    SDPBackend.MATH: Kernel.MATH,
}


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


@pytest.mark.parametrize("kind", ["a100", "b200"])
def test_the_plan_for_another_kind_of_device(kind):
    """Its kernels are written for sm_80, sm_100; its L2 cache and its libraries are others."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.cuda_emulated.offline_plans", "llama"],
        env={**os.environ, "EMULATED_KIND": kind},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    fixed = json.loads(run.stdout)["offline"]["fixed"]
    assert fixed["libraries"] > GPUS[kind].l2_bytes


def attentions():
    """Shapes, dtypes and settings that lead to each of torch's choices."""
    dtypes, widths = (torch.bfloat16, torch.float32, torch.float16), (8, 12, 64, 72, 256, 320)
    return itertools.product(dtypes, widths, (4, 2), (16, 24), (False, True), (False, True))


def test_torch_chooses_as_the_rules_say():
    seen = set()
    for dtype, width, heads, rows, is_causal, masked in attentions():
        if masked and is_causal:
            continue
        query = torch.empty(2, 4, rows, width, dtype=dtype, device="cuda", requires_grad=True)
        key = torch.empty(2, heads, 16, width, dtype=dtype, device="cuda", requires_grad=True)
        mask = torch.empty(rows, 16, dtype=dtype, device="cuda") if masked else None
        settings = {"dropout_p": 0.0, "is_causal": is_causal, "enable_gqa": heads != 4}
        chosen = torch._fused_sdp_choice(query, key, key, mask, **settings)
        wanted = kernel_for(GPUS["h200"], query, key, key, mask, **settings)
        given = (dtype, width, heads, rows, is_causal, masked)
        assert CHOICES[SDPBackend(chosen)] is wanted, given
        seen.add(wanted)
    assert seen == set(CHOICES.values())
