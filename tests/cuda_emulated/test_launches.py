"""What is compiled for a layer, and the kernels that it launches beside plain Inductor's."""

import pytest
import torch

import memo_compile
from tests import models
from tests.cuda_emulated.device_calls import Counts, counts
from tests.cuda_emulated.offline_plans import OwnLoss
from tests.cuda_emulated.test_memory import Training

SHALLOW, DEEP = 2, 5
MOST_MORE = {"llama": 0, "gpt2": 2}
"""Launches of a layer beyond plain Inductor's: what adds to the residual and the next layer's norm
are one kernel there, and two where a region ends between them. Backwards mostly make up for it."""


def launches(builder, backend: str, num_layers: int) -> int:
    """Of the second step of a model of so many layers."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    step = OwnLoss(lambda seq: builder(num_layers=num_layers, seq=seq)).to("cuda", torch.bfloat16)
    given = tuple(value.cuda() for value in step.inputs.values())
    options = {"strict": True, "policy": "save", "token_tiles": 1, "costs": "roofline"}
    options["passes"] = "-needless-masks"  # Inductor's attention reads them: other kernels
    compiled = torch.compile(step, backend=backend, options=options if backend == "memo" else None)
    found: list[Counts] = []
    for _ in range(2):
        step.zero_grad(set_to_none=True)
        found.append(counts())
        compiled(*given).backward()
        torch.cuda.synchronize()
    begin, end = found[-1], counts()
    assert end.host_copies == begin.host_copies
    return end.launches + end.triton_launches - begin.launches - begin.triton_launches


def launches_of_a_layer(builder, backend: str) -> float:
    shallow, deep = (launches(builder, backend, number) for number in (SHALLOW, DEEP))
    return (deep - shallow) / (DEEP - SHALLOW)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_each_half_of_a_layer_is_compiled_once(name):
    """Attention on CUDA reads a mask that is widened for its heads: one view for all layers."""
    training = Training(getattr(models, name), lowering="aten", policy="save")
    training.step()
    (layers,) = memo_compile.report().plans[-1].layer_classes
    assert layers.num_layers == 3
    assert layers.num_regions == 2


@pytest.mark.parametrize("name", MOST_MORE)
def test_a_layer_launches_hardly_more_than_with_plain_inductor(name):
    """GPT-2 has dropout, whose seeds were a kernel each."""
    builder = getattr(models, name)
    own, plain = (launches_of_a_layer(builder, backend) for backend in ("memo", "inductor"))
    assert own <= plain + MOST_MORE[name], (own, plain)
