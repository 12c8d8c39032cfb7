"""CUDA graphs that are asked for: by options, and by a capture around a step or a compilation."""

import gc

import pytest
import torch
from memo_runtime.run_step import StepError

import memo_compile
from memo_compile.errors import RuntimeMisuse
from memo_compile.reporting import state
from tests.cuda_emulated.computing import CUDA, Computing, leased, rows_of

REFUSED = r"cannot be captured into a CUDA graph.*torch\.cuda\.graph"


@pytest.fixture
def steps():
    torch._dynamo.reset()
    found = Computing()
    found.begin()
    return found


def test_a_forward_is_not_captured(steps):
    """CUDA itself says no more than that some dependency is not part of the capture."""
    x = rows_of(1).to(CUDA)
    with pytest.raises(StepError, match=REFUSED), torch.cuda.graph(torch.cuda.CUDAGraph()):
        steps.compiled(x)
    gc.collect()
    assert leased() == 0
    steps.assert_step(2)


def test_a_backward_is_not_captured(steps):
    """Its forward ran on the stream that is captured: autograd runs it there."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        loss = steps.compiled(rows_of(1).to(CUDA))
    captured = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream)
    with pytest.raises(StepError, match=REFUSED), captured:
        loss.backward()
    del loss
    gc.collect()
    assert leased() == 0
    steps.assert_step(2)


def test_graphed_callables_are_refused(steps):
    x = rows_of(1).to(CUDA).requires_grad_()
    with pytest.raises(StepError, match=REFUSED):
        torch.cuda.make_graphed_callables(steps.compiled, (x,))
    gc.collect()
    assert leased() == 0
    steps.assert_step(2)


def test_nothing_is_compiled_in_a_capture():
    """What is measured and compared then would be of a device that does nothing."""
    torch._dynamo.reset()
    steps = Computing()
    x = rows_of(1).to(CUDA)
    with (
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised,
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        steps.compiled(x)
    assert isinstance(raised.value.inner_exception, RuntimeMisuse)
    assert "first called while a CUDA graph is captured" in str(raised.value)
    steps.begin()


def test_the_setting_of_inductor_is_named_and_not_used(monkeypatch):
    torch._dynamo.reset()
    state.reset()

    def begin(*args: object, **kwargs: object) -> None:
        raise AssertionError("a capture begins")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begin)
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        steps = Computing(lowering="inductor", policy="save")
        steps.step(0)
        steps.step(1)
    report = memo_compile.report()
    assert report.active
    assert [note for note in report.notes if "triton.cudagraphs: CUDA graphs are not" in note]
