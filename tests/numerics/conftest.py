"""One thread, and nothing left of one test in the next."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo import guards
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx as inductor

from memo_compile.backends import entry
from memo_compile.driver.probe import TilingProbes
from memo_compile.reporting import state
from memo_compile.torch_private import inductor_api

# Torch times the guards of each graph behind a flush of all caches, for a log that nobody reads.
guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture(autouse=True)
def fresh_compiler():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    state.reset()
    torch.manual_seed(0)
    gc.collect()
    gc.freeze()  # tests that collect garbage need not walk what others left in the process
    yield
    torch._dynamo.reset()
    state.reset()
    torch.set_num_threads(threads)


PROBES = TilingProbes()


@pytest.fixture
def probes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tilings of equal content are compared on numbers once, not once for each compilation."""
    monkeypatch.setattr(entry, "TilingProbes", lambda: PROBES)


@pytest.fixture
def aside_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that memo leaves to Inductor run op by op behind AOTAutograd: kernels take seconds."""
    for module in (inductor_api, inductor):
        monkeypatch.setattr(module, "compile_fx", _without_kernels(module.compile_fx))


def _without_kernels(compile_fx: Callable) -> Callable:
    def compiled(gm: fx.GraphModule, inputs: Sequence[Any], **more: Any) -> Callable:
        return compile_fx(gm, inputs, **{"inner_compile": _op_by_op, **more})

    return compiled


def _op_by_op(gm: fx.GraphModule, *_: object, **__: object) -> Callable:
    return make_boxed_func(gm.forward)
