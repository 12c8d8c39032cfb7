"""Private torch APIs of autograd and AOTAutograd. Read in torch 2.11.0 and 2.13.0."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext, tracing
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memo_compile.torch_private.fx_graphs import detect_fake_mode, real_tensors


def own_tracing_context(examples: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """A fresh TracingContext: Inductor asserts that ``output_strides`` is empty at each compile.

    The mode is that of ``examples``: what was traced before may be lowered inside another trace.
    """
    with tracing(None):
        mode = detect_fake_mode(examples)
    return tracing(TracingContext(mode or detect_fake_mode(examples)))


def functorch_patch(**settings: Any) -> contextlib.AbstractContextManager[None]:
    """Functorch's configuration with ``settings``, keys that this version lacks left out."""
    names = functorch_config._config  # type: ignore[attr-defined]
    known = {key: value for key, value in settings.items() if key in names}
    return functorch_config.patch(known)


def keep_graph() -> bool:
    """True inside a backward that was called with retain_graph or create_graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def in_backward() -> bool:
    """True in what autograd calls while it executes a graph."""
    return bool(torch._C._current_graph_task_id() != -1)


current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node that autograd executes in this thread; None outside of a backward."""

engine_will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""True when the backward in progress executes a node, which is no leaf."""

keep_while_backward_runs: Any = torch.autograd.Variable._execution_engine.queue_callback
"""Autograd calls what it is given when this backward has ended, and drops it after an exception."""


def free_stopped_backward() -> None:
    """Free what autograd holds of a backward in this thread that an exception has stopped.

    The nodes that were ready to run stay in the thread's queue until its next backward (torch 2.11,
    2.13), with all that they have saved. This runs one, of a single number.
    """
    with real_tensors(), torch.enable_grad():
        torch.ones((), device="cpu", requires_grad=True).sum().backward()


def captures(node: Any) -> bool:
    """True where the backward returns what reaches this leaf: torch then raises (2.11, 2.13)."""
    with contextlib.suppress(RuntimeError):
        engine_will_run(node)
        return False
    return True


def has_gradient_hook(leaf: torch.Tensor) -> bool:
    """True where a hook runs after the gradient of ``leaf`` was accumulated."""
    return bool(leaf._post_accumulate_grad_hooks)


@contextlib.contextmanager
def fresh_static_tracing() -> Iterator[TracingContext]:
    """A tracing context for compiling at run time, outside Dynamo: all sizes are numbers."""
    context = TracingContext(torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True))
    with tracing(context):
        yield context


def written_inputs(context: TracingContext, num_inputs: int) -> frozenset[int]:
    """Positions among a graph's inputs of those that it writes into, once it was compiled.

    All of them where AOTAutograd merged some, so that its positions are others, or says nothing.
    """
    known = context.fw_metadata
    if known is None or len(known.input_info) != num_inputs:
        return frozenset(range(num_inputs))
    return frozenset(at for at, given in enumerate(known.input_info) if given.mutates_data)


def written_now(num_inputs: int) -> frozenset[int]:
    """As ``written_inputs``, of the graph that Dynamo has a backend compile."""
    context = TracingContext.try_get()
    return frozenset(range(num_inputs)) if context is None else written_inputs(context, num_inputs)


def is_batched(value: Any) -> bool:
    """True for a tensor that stands for several, in ``is_grads_batched`` (2.13)."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(value)


def inner_tensors(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that ``value`` is made of, where it is a subclass that says so; else none.

    A DTensor of torch 2.13 names its mesh as well.
    """
    if not is_traceable_wrapper_subclass(value):
        return []
    names, _ = value.__tensor_flatten__()
    parts = (getattr(value, name) for name in names)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def storages_of(values: Sequence[Any]) -> list[tuple[Any, int]]:
    """(weak reference, bytes) of the tensors' storages; ``expired()``: it is gone (2.11, 2.13)."""
    found = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            found[storage._cdata] = (_StorageRef(storage), storage.nbytes())
    return list(found.values())


def sharing_storage(values: Sequence[Any]) -> list[tuple[int, ...]]:
    """Positions of the tensors that lie in one storage, where there are several (2.11, 2.13)."""
    found: dict[int, list[int]] = {}
    for at, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            found.setdefault(value.untyped_storage()._cdata, []).append(at)
    return [tuple(same) for same in found.values() if len(same) > 1]


class _StorageRef(StorageWeakRef):
    """Lets go of its storage only while there is a torch: torch's own complains at exit."""

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            super().__del__()


def allow_second_backward() -> None:
    """Tell AOTAutograd that no saved tensor is donated: memo restores its frame itself.

    Otherwise the runtime refuses retain_graph=True, because the handle looks like a temporary. The
    list itself is emptied: where an input is a tensor subclass, torch reads it from the metadata of
    the subclass, which shares it with the one of the graph (2.11, 2.13).
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        (context.fw_metadata.bw_donated_idxs or []).clear()


def results_of_their_own() -> tuple[int, ...]:
    """Positions among a forward's results of those that alias nothing in the user's program.

    While the forward is compiled, AOTAutograd's context tells; written inputs come first (2.11,
    2.13).
    """
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return ()
    known = context.fw_metadata
    apart = (OutputType.non_alias, OutputType.unsafe_view_alias)
    first = known.num_mutated_inp_runtime_indices
    found = (at for at, output in enumerate(known.output_info) if output.output_type in apart)
    return tuple(first + at for at in found)
