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
    """Returns a fresh TracingContext: Inductor asserts that its ``output_strides`` is empty.

    The fake mode is that of ``examples``: a graph may be lowered inside another graph's trace.
    """
    with tracing(None):
        mode = detect_fake_mode(examples)
    return tracing(TracingContext(mode or detect_fake_mode(examples)))


def functorch_patch(**settings: Any) -> contextlib.AbstractContextManager[None]:
    """Patches functorch's configuration; leaves out keys that this version lacks."""
    names = functorch_config._config  # type: ignore[attr-defined]
    return functorch_config.patch({key: value for key, value in settings.items() if key in names})


def keep_graph() -> bool:
    """True inside a backward that was called with retain_graph or create_graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def in_backward() -> bool:
    """True in code that autograd calls while it executes a graph."""
    return bool(torch._C._current_graph_task_id() != -1)


current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node that autograd executes in this thread; None outside of a backward."""

engine_will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""True when the backward in progress executes a node, which is no leaf."""

keep_while_backward_runs: Any = torch.autograd.Variable._execution_engine.queue_callback
"""Keeps a callback until this backward has ended, and calls it then; drops it after an error."""


def free_stopped_backward() -> None:
    """Frees what autograd holds of a backward in this thread that an exception has stopped.

    The nodes that were ready to run stay in the thread's queue until its next backward (torch 2.11,
    2.13), with all that they have saved. This runs one, of a single number.
    """
    with real_tensors(), torch.enable_grad():
        torch.ones((), device="cpu", requires_grad=True).sum().backward()


def captures(node: Any) -> bool:
    """True where ``autograd.grad`` returns this leaf's gradient: torch raises (2.11, 2.13)."""
    with contextlib.suppress(RuntimeError):
        engine_will_run(node)
        return False
    return True


def has_gradient_hook(leaf: torch.Tensor) -> bool:
    """True where a hook runs after the gradient of ``leaf`` was accumulated."""
    return bool(leaf._post_accumulate_grad_hooks)


@contextlib.contextmanager
def fresh_static_tracing() -> Iterator[TracingContext]:
    """Inside, graphs can be compiled at run time, outside Dynamo: all sizes are numbers."""
    context = TracingContext(torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True))
    with tracing(context):
        yield context


def written_inputs(context: TracingContext, num_inputs: int) -> frozenset[int]:
    """Returns the positions of inputs that a compiled graph writes into.

    All of them where AOTAutograd says nothing, or has merged inputs, so that positions differ.
    """
    metadata = context.fw_metadata
    if metadata is None or len(metadata.input_info) != num_inputs:
        return frozenset(range(num_inputs))
    return frozenset(at for at, info in enumerate(metadata.input_info) if info.mutates_data)


def written_now(num_inputs: int) -> frozenset[int]:
    """As ``written_inputs``, of the graph that a backend compiles for Dynamo now."""
    context = TracingContext.try_get()
    return frozenset(range(num_inputs)) if context is None else written_inputs(context, num_inputs)


def is_batched(value: Any) -> bool:
    """True for a tensor that stands for several, in ``is_grads_batched`` (2.13)."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(value)


def inner_tensors(value: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors inside of a traceable subclass; of another tensor none.

    A DTensor of torch 2.13 names its mesh as well.
    """
    if not is_traceable_wrapper_subclass(value):
        return []
    names, _ = value.__tensor_flatten__()
    parts = (getattr(value, name) for name in names)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def storages_of(values: Sequence[Any]) -> list[tuple[Any, int]]:
    """Returns (weak reference, bytes) of each storage; ``expired()``: it is freed (2.11, 2.13)."""
    references = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            references[storage._cdata] = (_StorageRef(storage), storage.nbytes())
    return list(references.values())


def sharing_storage(values: Sequence[Any]) -> list[tuple[int, ...]]:
    """Groups the positions of tensors that share a storage with another (2.11, 2.13)."""
    positions: dict[int, list[int]] = {}
    for at, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            positions.setdefault(value.untyped_storage()._cdata, []).append(at)
    return [tuple(same) for same in positions.values() if len(same) > 1]


class _StorageRef(StorageWeakRef):
    """Does not free its reference while Python exits: torch's own complains then."""

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            super().__del__()


def allow_second_backward() -> None:
    """Tells AOTAutograd that no saved tensor is donated: memo restores its frame itself.

    Otherwise the runtime refuses retain_graph=True, because the handle looks like a temporary. The
    list itself is emptied: the metadata of tensor subclasses shares it (2.11, 2.13).
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        (context.fw_metadata.bw_donated_idxs or []).clear()


def results_of_their_own() -> tuple[int, ...]:
    """Returns the positions of a forward's results that alias nothing in the user's program.

    To be called while the forward is compiled; written inputs come before the results (2.11, 2.13).
    """
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return ()
    metadata = context.fw_metadata
    no_alias = (OutputType.non_alias, OutputType.unsafe_view_alias)
    first = metadata.num_mutated_inp_runtime_indices
    outputs = enumerate(metadata.output_info, start=first)
    return tuple(at for at, output in outputs if output.output_type in no_alias)
