"""The plan of a step for a GPU, made without it, and the plan that the backend makes on it.

    python -m tests.cuda_emulated run tests.cuda_emulated.offline_plans NAME [OPTIONS AS JSON]

NAME is a model of SMALL, or one of ``memo plan``, as ``llama3-8b``. The device is an emulated
one (``EMULATED_KIND``). Printed is one JSON object; the exit code is 1 where the plans differ.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn

import memo_compile
from memo_compile.config import resolve
from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import find_model
from memo_compile.driver import probe, step_planner
from memo_compile.driver.recompute_regions import RecomputeGraphs
from memo_compile.offline.plan_offline import plan_step_offline
from memo_compile.offline.shapes.degrees import Degrees
from memo_compile.offline.shapes.transformer import first_stage
from memo_compile.reporting import state
from memo_compile.step.plans import ReportedPlan
from memo_compile.torch_private.fx_graphs import fake_mode
from tests import models
from tests.cuda_emulated import kernels

FIXED = {"token_tiles": 1}
"""Kernels compute nothing here, so that the backend believes no tile, and a plan believes each.
With ``token_tiles=None`` it is made to believe them too."""

Step = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]
"""A loss and its inputs."""


class OwnLoss(nn.Module):
    """A model's loss of its inputs, in their order."""

    def __init__(self, builder: Callable[..., models.ModelCase]) -> None:
        super().__init__()
        self.model, self.inputs, self.loss = builder(seq=64)

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model, **dict(zip(self.inputs, given, strict=True)))


def _small(builder: Callable[..., models.ModelCase]) -> Callable[[str], Step]:
    def build(device: str) -> Step:
        step = OwnLoss(builder).to(device, torch.bfloat16)
        return step, tuple(value.to(device) for value in step.inputs.values())

    return build


def _named(name: str, *, seq: int, num_layers: int | None = None) -> Callable[[str], Step]:
    def build(device: str) -> Step:
        shape = find_model(name)
        if num_layers is not None:
            shape = dataclasses.replace(shape, num_layers=num_layers)
        sizes = {"seq": seq, "batch": 1, "dtype": torch.bfloat16}
        with fake_mode() if device == "cpu" else torch.device(device):
            return first_stage(shape, Degrees(), **sizes)

    return build


SMALL: Mapping[str, Callable[[str], Step]] = {
    "llama": _small(models.llama),
    "gpt2": _small(models.gpt2),
    "qwen3_moe": _small(models.qwen3_moe),
    "t5": _small(models.t5),
    "llama3-8b-short": _named("llama3-8b", seq=2048, num_layers=2),
    "llama3-8b-wide": _named("llama3-8b", seq=16_384, num_layers=2),
}


def offline(build: Callable[[str], Step], kind: str, **options: Any) -> ReportedPlan:
    """As ``memo plan`` makes it, of tensors on the CPU."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    step, given = build("cpu")
    config = resolve(FIXED | options, None)
    made = plan_step_offline(step, given, {}, config=config, hardware=find_hardware(kind))
    assert made.exact, "no Triton, or a CPU build of torch"
    return made.plan


def backend(build: Callable[[str], Step], **options: Any) -> ReportedPlan:
    """What the backend makes, and runs once.

    What this machine's host has left does not count, as it does not for a plan made elsewhere: it
    limits which steps are compared, and the machine of a real device has more.
    """
    kernels.install(kernels.FILLS)  # zeros that are folded must be zeros
    torch._dynamo.reset()
    state.reset()
    torch.manual_seed(0)
    step, given = build("cuda")
    more = {"costs": "roofline", "strict": True}
    tiles = believing() if options.get("token_tiles", 1) is None else contextlib.nullcontext()
    roomy = mock.patch.object(step_planner, "default_host_budget_bytes", return_value=None)
    with roomy, tiles:
        torch.compile(step, backend="memo", options=FIXED | more | options)(*given).backward()
    torch.cuda.synchronize()
    (plan,) = memo_compile.report().plans
    return plan


@contextlib.contextmanager
def believing() -> Iterator[None]:
    """Tiles and slices of rows are taken to compute what the whole does, as a plan takes them."""
    with (
        mock.patch.object(probe, "_tiling_believed", return_value=True),
        mock.patch.object(RecomputeGraphs, "_agrees", return_value=True),
    ):
        yield


def compared(plan: ReportedPlan) -> dict[str, Any]:
    """What is to be equal byte for byte."""
    return {
        "arena_bytes": plan.arena_bytes,
        "peak_bytes": plan.peak_bytes,
        "outside_bytes_by_kind": dict(plan.outside_bytes_by_kind),
        "host_bytes": plan.host_bytes,
        "fixed": dataclasses.asdict(plan.fixed),
        "decisions": sorted(
            (row.layer_class, row.bytes, row.decision, row.token_fraction) for row in plan.decisions
        ),
        "policy": plan.policy,
        "tiles": dict(plan.tiles),
        "regions_of_layers": [found.num_regions for found in plan.layer_classes],
    }


def both(name: str, kind: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(without the device, by the backend) of a model of SMALL or of ``memo plan``."""
    build = SMALL[name] if name in SMALL else _named(name, seq=16_384)
    return compared(offline(build, kind, **options)), compared(backend(build, **options))


def main() -> int:
    name, options = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    kind = os.environ.get("EMULATED_KIND", "h200")
    own, theirs = both(name, kind, **options)
    print(json.dumps({"kind": kind, "offline": own, "backend": theirs, "equal": own == theirs}))
    return 0 if own == theirs else 1


if __name__ == "__main__":
    sys.exit(main())
