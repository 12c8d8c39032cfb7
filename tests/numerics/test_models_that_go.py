"""What a model's plan holds goes with the model."""

import collections
import contextvars
import gc

import torch

import memo_compile
from tests.numerics.small import Stack, rows


def trained() -> None:
    """Two lengths, so that a step with symbols is planned, and a forward without its backward."""
    planned = torch.compile(Stack(hidden=8), backend="memo", options={"lowering": "aten"})
    for num_rows in (8, 12):
        planned(rows(1, num_rows, hidden=8)).backward()
    planned(rows(1, 12, hidden=8))
    assert memo_compile.report().active


def objects_of_memo() -> collections.Counter[str]:
    """How many objects there are of each class of memo's, after all models have gone."""
    torch._dynamo.reset()
    gc.collect()
    kinds = (type(made) for made in gc.get_objects())
    return collections.Counter(
        kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("memo_")
    )


def test_nothing_of_memos_outlives_its_model():
    """Torch 2.13 keeps a copy of its configuration for each context, a thread's or its own."""
    trained()  # what a process makes once stays
    before = objects_of_memo()
    context = contextvars.copy_context()
    context.run(trained)
    assert not objects_of_memo() - before
