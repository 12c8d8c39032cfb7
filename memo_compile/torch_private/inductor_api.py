"""Private torch APIs of Inductor: its settings, its IR and its wrapper's lines.

Read in torch 2.11.0 and 2.13.0.
"""

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import sympy
import torch
import torch._inductor.config as inductor_config
from memo_runtime import ops
from torch import fx
from torch._inductor import graph as inductor_graph
from torch._inductor import ir, lowering
from torch._inductor.codegen import common as _codegen_common
from torch._inductor.codegen.wrapper import AllocateLine as AllocateLine
from torch._inductor.codegen.wrapper import ExternKernelAllocLine as ExternKernelAllocLine
from torch._inductor.codegen.wrapper import FreeIfNotReusedLine as FreeIfNotReusedLine
from torch._inductor.codegen.wrapper import FreeLine as FreeLine
from torch._inductor.codegen.wrapper import MemoryPlanningLine as MemoryPlanningLine
from torch._inductor.codegen.wrapper import MultiOutputLine as MultiOutputLine
from torch._inductor.codegen.wrapper import NullLine as NullLine
from torch._inductor.codegen.wrapper import PythonWrapperCodegen as PythonWrapperCodegen
from torch._inductor.codegen.wrapper import ReinterpretLine as ReinterpretLine
from torch._inductor.codegen.wrapper import ReuseLine as ReuseLine
from torch._inductor.codegen.wrapper import (
    SubgraphPythonWrapperCodegen as SubgraphPythonWrapperCodegen,
)
from torch._inductor.compile_fx import compile_fx as _compile_fx
from torch._inductor.compile_fx import compile_fx_inner as compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.fx_passes import joint_graph
from torch._inductor.ir import ScatterFallback as ScatterFallback
from torch._inductor.utils import is_cudagraph_unsafe_fx_node as is_cudagraph_unsafe_fx_node
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import _disable_current_modes

from memo_compile.torch_private.fx_graphs import real_tensors
from memo_compile.torch_private.patches import replaced


def device_codegens() -> dict[str, Any]:
    """Returns Inductor's code generators by device type; registers them first if needed."""
    _codegen_common.init_backend_registration()
    return _codegen_common.device_codegens


def current_graph() -> Any:
    """Returns the GraphLowering whose wrapper is being generated."""
    return V.graph


def keep_strides(node: fx.Node) -> None:
    """Makes Inductor keep the traced strides of ``node``, whatever reads it."""
    node.meta["inductor_realize_to_strides"] = True


def chosen_strides(graph: Any) -> Iterator[Sequence[Any] | None]:
    """Yields the strides of each result of a GraphLowering; None for one that is no tensor."""
    for result in graph.graph_outputs:
        is_strided = isinstance(result, ir.IRNode) and result.has_tensor_output()
        yield result.get_layout().stride if is_strided else None


def has_multi_output_layout(node: Any) -> bool:
    """True for an extern kernel that returns several tensors, picked out by MultiOutputLines."""
    return isinstance(node.layout, ir.MultiOutputLayout | ir.NoneLayout)


def copies_results(node: Any) -> bool:
    """True for a kernel of ``memo_runtime.ops.into``: it copies its results into given buffers."""
    return ops.copies_results(getattr(node, "op_overload", None))


def called_operator(node: Any) -> str:
    """Names the operator that an extern kernel runs, also into given buffers; or ""."""
    operator = getattr(node, "op_overload", None)
    return ops.called(operator) if isinstance(operator, torch._ops.OpOverload) else ""


def written_buffers(node: Any) -> list[str]:
    """Returns the names of buffers that an extern kernel without own results writes into."""
    return [name for output in node.mutation_outputs for name in output.get_mutation_names()]


def writes_first(node: Any) -> bool:
    """True for a kernel of ``memo_runtime.ops.into`` that writes its first result in its buffer."""
    return ops.writes_first(node.op_overload)


def is_tensor_buffer(node: Any) -> bool:
    """True for a buffer with a dtype and a size."""
    return isinstance(getattr(node, "layout", None), ir.Layout)


def is_static(node: Any) -> bool:
    """True when the size and the strides of ``node`` are numbers."""
    values = [*node.get_size(), *node.get_stride()]
    return all(isinstance(value, int | sympy.Integer) for value in values)


ROUNDED = "low_precision_pointwise_barrier"
"""In ``node.meta``: Inductor rounds a pointwise operator's float16 and bfloat16 operands and its
result as eager does, inside of fused kernels too (``make_pointwise``, 2.11 and 2.13). torch sets it
itself where ``emulate_precision_casts`` is on, which turns off other things as well."""

NO_GRAPH_CACHE: dict[str, Any] = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
"""Turns these caches off: on a hit neither partitioner nor wrapper runs. ``force_disable_caches``
would give each compilation an empty folder, in which Inductor builds its C++ headers anew."""


def inductor_patch(settings: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Patches Inductor's configuration; leaves out keys that this version lacks."""
    known = {key: value for key, value in settings.items() if key in inductor_settings()}
    return inductor_config.patch(known)


@contextlib.contextmanager
def _attention_is_checked() -> Iterator[None]:
    """Inside, Inductor replaces a pattern by an attention kernel only if it really is attention.

    Its stored patterns ignore integers: a softmax over the batch or over the queries becomes one
    over the keys, a permuted key a transposed one (pytorch 2.11, 2.13; issues 195320 and 196468).
    Without a stored pattern its check traces the pattern for the shapes at hand, and compares
    integers as well.
    """
    lazy_init, stored = joint_graph.lazy_init, []

    def lazy_init_and_forget(*args: Any, **kwargs: Any) -> None:
        lazy_init(*args, **kwargs)
        for cell in _stored_patterns():
            stored.append((cell, cell.cell_contents))
            cell.cell_contents = None

    try:
        with replaced(joint_graph, lazy_init=lazy_init_and_forget):
            yield
    finally:
        for cell, pattern in stored:
            cell.cell_contents = pattern


def _stored_patterns() -> Iterator[Any]:
    """Yields the cells of the checks' closures that hold a pattern of attention."""
    for matcher in joint_graph.pass_patterns:
        for entry in itertools.chain.from_iterable(matcher.patterns.values()):
            check = entry.extra_check
            names = getattr(getattr(check, "__code__", None), "co_freevars", ())
            cells = dict(zip(names, getattr(check, "__closure__", None) or (), strict=True))
            if {"search_fn", "search_fn_pattern"} <= cells.keys():
                name = cells["search_fn"].cell_contents.__name__
                cell = cells["search_fn_pattern"]
                if name.startswith("_sfdp") and cell.cell_contents is not None:
                    yield cell


@_attention_is_checked()
def compile_fx(
    gm: fx.GraphModule, example_inputs: Sequence[Any], **settings: Any
) -> Callable[..., Any]:
    """Compiles ``gm`` by AOTAutograd and Inductor; ``settings`` are compile_fx's own keywords."""
    return cast(Callable[..., Any], _compile_fx(gm, list(example_inputs), **settings))


def inductor_settings() -> Collection[str]:
    """Returns the names of all settings of this version of Inductor."""
    return inductor_config._config  # type: ignore[attr-defined]


def inductor_uses_cuda_graphs() -> bool:
    """Returns Inductor's setting ``triton.cudagraphs``."""
    return bool(inductor_config.triton.cudagraphs)


CONVOLUTION_SETTINGS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
"""Arguments of a convolution beside its tensors, in their order."""


def convolution_backend(
    source: torch.Tensor, weight: torch.Tensor, settings: Mapping[str, Any]
) -> str:
    """Names torch's implementation of a convolution on a CPU: ``Mkldnn``, ``Slow3d`` (2.11, 2.13).

    It depends on sizes, dtype and number of threads. Fakes would give another answer.
    """
    in_order = [settings[name] for name in CONVOLUTION_SETTINGS]
    with real_tensors(), _disable_current_modes():
        real = (torch.empty((), dtype=like.dtype).expand(like.shape) for like in (source, weight))
        return str(torch._C._select_conv_backend(*real, None, *in_order)).rpartition(".")[2]


cpp_compiler = get_cpp_compiler
"""The command of the C++ compiler that Inductor uses; a RuntimeError where it finds none."""


def falls_back(target: Any) -> bool:
    """True for an operator that Inductor calls as a kernel rather than compiling it."""
    return target in lowering.fallbacks


def has_lowering(target: Any) -> bool:
    """True for an operator that Inductor knows by now: custom ones, once they were lowered."""
    return target in lowering.lowerings


def donating(positions: Sequence[int]) -> contextlib.AbstractContextManager[None]:
    """Inside, kernels of a backward may write over these inputs once nothing reads them."""
    return replaced(inductor_graph, get_donated_idxs=lambda: list(positions))
