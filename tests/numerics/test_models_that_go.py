"""What a model's plan holds goes with the model."""

import contextvars
import gc

import torch

import memo_compile
from memo_compile.backends.capture import StepCapture
from tests.numerics.small import Stack, rows


def trained() -> None:
    planned = torch.compile(Stack(hidden=8), backend="memo", options={"lowering": "aten"})
    planned(rows(1, hidden=8)).sum().backward()
    assert memo_compile.report().active


def captures() -> list[StepCapture]:
    gc.collect()
    return [made for made in gc.get_objects() if type(made) is StepCapture]


def test_torchs_copies_of_its_configuration_keep_no_plan():
    """Torch 2.13 keeps a copy for each context, which is a thread's or its own."""
    before = captures()
    context = contextvars.copy_context()
    context.run(trained)
    torch._dynamo.reset()
    assert [made for made in captures() if made not in before] == []
