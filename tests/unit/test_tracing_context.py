"""What was traced first is lowered in its own fake mode, inside a later trace as well."""

import pytest
import torch
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode

from memo_compile.torch_private import autograd


def test_a_region_of_an_earlier_trace_is_compiled_inside_a_later_one():
    with FakeTensorMode() as first:
        value = torch.empty(4, 3)
    later = TracingContext(FakeTensorMode())
    with tracing(later):
        with autograd.own_tracing_context([value]):
            context = TracingContext.try_get()
            assert context is not None
            assert context.fake_mode is first
        with autograd.own_tracing_context([torch.ones(2)]):  # nothing says which: that of the trace
            context = TracingContext.try_get()
            assert context is not None
            assert context.fake_mode is later.fake_mode
        assert TracingContext.try_get() is later


@pytest.mark.parametrize("examples", [[], [torch.ones(2)]])
def test_without_any_trace_there_is_no_mode(examples):
    with autograd.own_tracing_context(examples):
        context = TracingContext.try_get()
        assert context is not None
        assert context.fake_mode is None
