"""Where memo planned nothing, the report says why, with a budget and without."""

import pytest
import torch
from torch import nn

import memo_compile

pytestmark = pytest.mark.usefixtures("fresh_report")

NO_BACKWARD = "a graph without a backward is not planned"


@pytest.fixture(params=[{}, {"memory_budget": "1GiB"}], ids=["free", "budget"])
def options(request):
    torch._dynamo.reset()
    return {"lowering": "aten", **request.param}


def only_note() -> str:
    report = memo_compile.report()
    assert not report.active
    assert report.plans == ()
    (note,) = report.notes
    return note


def test_a_function_that_dynamo_cannot_trace(options):
    lstm = torch.compile(nn.LSTM(8, 8), backend="memo", options=options)
    lstm(torch.randn(4, 2, 8))[0].sum().backward()
    note = only_note()
    skipped = "without regard to memory_budget" in note and "RNN, GRU, or LSTM" in note
    assert skipped or "graph break(s): what lies between runs eagerly" in note  # torch 2.15


def test_a_transform_over_a_compiled_function(options):
    model = torch.compile(nn.Linear(8, 8), backend="memo", options=options)
    torch.func.grad(lambda x: model(x).sum())(torch.randn(2, 8))
    assert "functorch" in only_note()


def test_a_compiled_transform(options):
    model = nn.Linear(8, 8)
    loss = torch.compile(
        torch.func.grad(lambda p, x: torch.func.functional_call(model, p, (x,)).sum()),
        backend="memo",
        options=options,
    )
    loss({name: value.detach() for name, value in model.named_parameters()}, torch.randn(2, 8))
    note = only_note()
    assert note.startswith(NO_BACKWARD)
    assert ("memory_budget does not bound it" in note) == ("memory_budget" in options)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(options, mode):
    model = torch.compile(nn.Linear(8, 8), backend="memo", options=options)
    with mode():
        model(torch.randn(2, 8))
    assert only_note().startswith(NO_BACKWARD)


def test_inference_beside_training_leaves_the_plan_active(options):
    model = torch.compile(nn.Linear(8, 8), backend="memo", options=options)
    model(torch.randn(2, 8)).sum().backward()
    with torch.no_grad():
        model(torch.randn(2, 8))
    report = memo_compile.report()
    assert report.active
    assert [note.startswith(NO_BACKWARD) for note in report.notes] == [True]
