"""Every private torch API that memo uses, in one place, with the versions it was read in.

Read in torch 2.11.0 and 2.13.0. What differs between them is settled here and nowhere else.
"""

import contextlib
import itertools
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, cast

import sympy
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from memo_runtime import ops
from torch import fx
from torch._dynamo import compiled_autograd, convert_frame
from torch._dynamo.eval_frame import innermost_fn, set_enable_dynamic
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.exc import RestartAnalysis as RestartAnalysis  # tensorify's too (2.11, 2.13)
from torch._dynamo.external_utils import wrap_inline
from torch._dynamo.utils import counters, dynamo_timed, get_metrics_context
from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext, tracing
from torch._guards import detect_fake_mode as detect_fake_mode
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
from torch._inductor.virtualized import V
from torch._logging._internal import trace_structured as trace_structured
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass


def device_codegens() -> dict[str, Any]:
    """Device type -> Inductor's code generators, registered if they were not yet."""
    _codegen_common.init_backend_registration()
    return _codegen_common.device_codegens


def current_graph() -> Any:
    """The GraphLowering whose wrapper is being generated."""
    return V.graph


def keep_strides(node: fx.Node) -> None:
    """Let Inductor lay ``node`` out as it was traced, whatever reads it."""
    node.meta["inductor_realize_to_strides"] = True


def chosen_strides(graph: Any) -> Iterator[Sequence[Any] | None]:
    """The strides of each result of a GraphLowering; None for what is no tensor."""
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
    """The name of the operator that an extern kernel runs, also into given buffers; or ""."""
    operator = getattr(node, "op_overload", None)
    return ops.called(operator) if isinstance(operator, torch._ops.OpOverload) else ""


def written_buffers(node: Any) -> list[str]:
    """Names of the buffers that an extern kernel without results of its own writes into."""
    return [name for output in node.mutation_outputs for name in output.get_mutation_names()]


def writes_first(node: Any) -> bool:
    """True for a kernel that ``copies_results``, all but the first: that is made in its buffer."""
    return ops.writes_first(node.op_overload)


def is_tensor_buffer(node: Any) -> bool:
    """True for a buffer with a dtype and a size."""
    return isinstance(getattr(node, "layout", None), ir.Layout)


def is_static(node: Any) -> bool:
    """True when the size and the strides of ``node`` are numbers."""
    values = [*node.get_size(), *node.get_stride()]
    return all(isinstance(value, int | sympy.Integer) for value in values)


def own_tracing_context(examples: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """A fresh TracingContext: Inductor asserts that ``output_strides`` is empty at each compile.

    The mode is that of ``examples``: what was traced before may be lowered inside another trace.
    """
    with tracing(None):
        mode = detect_fake_mode(examples)
    return tracing(TracingContext(mode or detect_fake_mode(examples)))


ROUNDED = "low_precision_pointwise_barrier"
"""In ``node.meta``: Inductor rounds a pointwise operator's float16 and bfloat16 operands and its
result as eager does, inside of fused kernels too (``make_pointwise``, 2.11 and 2.13). torch sets it
itself where ``emulate_precision_casts`` is on, which turns off other things as well."""

NO_GRAPH_CACHE: dict[str, Any] = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
"""Turns these caches off: on a hit neither partitioner nor wrapper runs. ``force_disable_caches``
would give each compilation an empty folder, in which Inductor builds its C++ headers anew."""


def inductor_patch(settings: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Inductor's configuration with ``settings``, keys that this version lacks left out."""
    known = {key: value for key, value in settings.items() if key in inductor_settings()}
    return inductor_config.patch(known)


def functorch_patch(**settings: Any) -> contextlib.AbstractContextManager[None]:
    """Functorch's configuration with ``settings``, keys that this version lacks left out."""
    names = functorch_config._config  # type: ignore[attr-defined]
    known = {key: value for key, value in settings.items() if key in names}
    return functorch_config.patch(known)


def graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """``graph`` with the attributes of ``root``; its code is written when it is first called.

    Mostly nodes are run one by one or lowered, and the code would be written for nothing.
    """
    return _LazyGraphModule(root, graph)


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """``gm`` with a graph of its own, to be rewritten; names and Dynamo's notes are kept."""
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        args = fx.node.map_arg((node.args, node.kwargs), nodes.__getitem__)
        made = nodes[node] = like_node(graph, node, *args)
        made.meta.update(node.meta)
        if node.op == "placeholder" and hasattr(node, "_dynamo_source"):
            made._dynamo_source = node._dynamo_source  # where Dynamo found the input
    return like_dynamo(gm, graph)


def like_dynamo(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """``graph`` with what Dynamo has noted at ``gm``; both have the same attributes."""
    made = graph_module(gm, graph)
    made.meta.update(gm.meta)
    for name in ("_param_name_to_source", "_backend_id"):  # read by AOTAutograd, 2.11 and 2.13
        if hasattr(gm, name):
            setattr(made, name, getattr(gm, name))
    return made


def like_node(graph: fx.Graph, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    """A node behind the others of ``graph``, named like ``node``, with these arguments.

    ``create_node`` looks through all that it is given for raw symbols, and with each attribute that
    is set a node is put anew into its graph's table of targets, which args do not change: together
    most of the time of a copy (2.13).
    """
    made = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    if made.name != node.name:
        made.name = node.name
    for name, value in (("args", args), ("kwargs", kwargs)):
        if value:
            object.__setattr__(made, name, value)
    return made


def wrong_fake(node: fx.Node) -> str:
    """Why what torch says of the results of ``node`` is not true; empty where nothing is known.

    CPU attention of float64 returns its log-sum-exp in float64. Torch 2.11 says float32, and a
    planned buffer of that type would lose half of it; 2.13 says float64.
    """
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    if node.target is attention:
        out, lse = node.meta["val"]
        if out.dtype is torch.float64 and lse.dtype is not torch.float64:
            return f"torch {torch.__version__} takes the log-sum-exp of {out.dtype} for {lse.dtype}"
    return ""


def errors_are_suppressed() -> bool:
    """True when Dynamo hides what a backend raises and runs the frame eagerly."""
    return bool(torch._dynamo.config.suppress_errors)


def dynamo_is_verbose() -> bool:
    """True where TORCHDYNAMO_VERBOSE=1 asks for whole tracebacks."""
    return bool(torch._dynamo.config.verbose)


def as_backend_failure(
    error: Exception, backend: Callable[..., Any], frame: FrameType | None
) -> Exception:
    """``error`` as an exception of its own type that is a BackendCompilerFailed as well.

    Dynamo wraps what a backend raises, unless it is such a one already (2.11, 2.13): this one
    arrives as it is, so that both types catch it. Tracebacks begin at ``frame``.
    """
    kind = type(error)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    both: Any = type(kind.__name__, (kind, BackendCompilerFailed), names)
    failed: Exception = both.__new__(both)
    BackendCompilerFailed.__init__(failed, backend, error, frame)  # type: ignore[arg-type]
    failed.__dict__.update(error.__dict__)
    return failed


def keep_graph() -> bool:
    """True inside a backward that was called with retain_graph or create_graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


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
def _attention_is_checked() -> Iterator[None]:
    """Inductor puts its attention kernels only where the graph is attention.

    It looks for attention with patterns in which every integer counts as any other, and believes
    them: a softmax over the batch or over the queries becomes one over the keys, a permuted key a
    transposed one (pytorch 2.11, 2.13; issues 195320 and 196468). Without the stored pattern its
    check traces the pattern for the shapes at hand, and compares the integers as well.
    """
    lazy_init, stored = joint_graph.lazy_init, []

    def lazy_init_and_forget(*args: Any, **kwargs: Any) -> None:
        lazy_init(*args, **kwargs)
        for cell in _stored_patterns():
            stored.append((cell, cell.cell_contents))
            cell.cell_contents = None

    joint_graph.lazy_init = lazy_init_and_forget
    try:
        yield
    finally:
        joint_graph.lazy_init = lazy_init
        for cell, pattern in stored:
            cell.cell_contents = pattern


def _stored_patterns() -> Iterator[Any]:
    """The cells of the checks' closures that hold a pattern of attention."""
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
    """``gm`` through AOTAutograd and Inductor; ``settings`` are compile_fx's own keywords."""
    return cast(Callable[..., Any], _compile_fx(gm, list(example_inputs), **settings))


def inductor_settings() -> Collection[str]:
    """The names of all settings of this version of Inductor."""
    return inductor_config._config  # type: ignore[attr-defined]


def inductor_uses_cuda_graphs() -> bool:
    """Inductor's own setting, as it is now."""
    return bool(inductor_config.triton.cudagraphs)


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


def is_compiled_alone(module: torch.nn.Module) -> bool:
    """True for a module that ``module.compile()`` or ``torch.compile(module)`` compiled.

    Private in 2.13.0 (``nn.Module._compiled_call_impl``).
    """
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or isinstance(module, torch._dynamo.OptimizedModule)


def nothing_else_compiles() -> contextlib.AbstractContextManager[Any]:
    """Dynamo's lock, held when it calls a backend, and needed by what is compiled at run time."""
    return convert_frame.compile_lock


real_tensors = unset_fake_temporarily
"""Inside, tensors are real, although a compilation on fakes is going on."""


CONVOLUTION_SETTINGS = (
    "stride",
    "padding",
    "dilation",
    "transposed",
    "output_padding",
    "groups",
)
"""Arguments of a convolution beside its tensors, in their order."""


def convolution_backend(
    source: torch.Tensor, weight: torch.Tensor, settings: Mapping[str, Any]
) -> str:
    """Torch's implementation of a convolution on a CPU: ``Mkldnn``, ``Slow3d``... (2.11, 2.13).

    It goes by sizes, type and number of threads. Of fakes it would say what runs on no device.
    """
    rest = [settings[name] for name in CONVOLUTION_SETTINGS]
    with real_tensors(), _disable_current_modes():
        real = (torch.empty((), dtype=like.dtype).expand(like.shape) for like in (source, weight))
        return str(torch._C._select_conv_backend(*real, None, *rest)).rpartition(".")[2]


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


def ddp_splits_graphs() -> bool:
    """True inside the compilation of a DistributedDataParallel module that Dynamo cuts up."""
    from torch.nn.parallel import DistributedDataParallel

    active = DistributedDataParallel._get_active_ddp_module() is not None
    return active and torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"


def compiles_autograd() -> bool:
    """True where compiled autograd traces backwards."""
    return bool(
        torch._dynamo.config.compiled_autograd or compiled_autograd.compiled_autograd_enabled
    )


def refuse_compiled_autograd(backward: fx.GraphModule, error: Callable[[], Exception]) -> None:
    """Raise ``error`` where compiled autograd copies a backward whose forward has run by a plan.

    It starts from this module, and would end in an IndexError: it does not know what was saved
    without a version check (2.13, ``compiled_autograd.proxy_call_aot_backward``). Every GraphModule
    has a class of its own.
    """
    cls = type(backward)
    usual = cls.graph

    def graph(module: fx.GraphModule) -> fx.Graph:
        if compiles_autograd() or compiled_autograd.in_compiled_autograd_region:
            raise error()
        return usual.fget(module)  # type: ignore[attr-defined]

    cls.graph = property(graph, usual.fset)  # type: ignore[attr-defined, assignment]


class DynamoCounts(NamedTuple):
    """What Dynamo left out since its last reset."""

    breaks: dict[str, int]
    """Graph breaks by reason."""
    skipped: dict[str, int]
    """Functions that run eagerly, by the reason why Dynamo cannot trace them."""
    given_up: int
    """Functions that run eagerly after too many compilations."""
    explained: frozenset[str] = frozenset()
    """All that Dynamo says of the graph breaks."""


def dynamo_counts() -> DynamoCounts:
    """What Dynamo left out, by its own counters (2.11, 2.13).

    A break that Dynamo got over is counted as one; what else is unimplemented ended a function.
    """
    breaks, ended = (
        {reason.splitlines()[0]: n for reason, n in counters[name].items() if reason}
        for name in ("graph_break", "unimplemented")
    )
    given_up = {reason for reason in ended if "recompile limit exceeded" in reason}
    return DynamoCounts(
        breaks=breaks,
        skipped={reason: n for reason, n in ended.items() if reason not in given_up},
        given_up=sum(ended[reason] for reason in given_up),
        explained=frozenset(counters["graph_break"]),
    )


def ignore_logging(method: Callable[..., Any]) -> None:
    """Dynamo leaves calls of a logger's ``method`` out of graphs, which they would break (2.11)."""
    torch._dynamo.config.ignore_logger_methods.add(method)


@contextlib.contextmanager
def traced_whole(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[fx.GraphModule, Sequence[Any]] | None]:
    """The whole Dynamo graph of ``function`` and its inputs, as a backend gets them; nothing runs.

    Inside, the graph can be compiled. None where ``function`` computes nothing. What Dynamo leaves
    among the function's globals for code that runs is gone at the end. (2.11, 2.13) Raises
    Exception: Dynamo's own; ``graph_break`` names a graph break.
    """
    function = innermost_fn(getattr(function, "_orig_mod", function))  # of what was compiled
    if not isinstance(function, torch.nn.Module) and not hasattr(function, "__globals__"):
        function = wrap_inline(function)
    scope = convert_frame.get_traced_fn(function)[0].__globals__
    names = set(scope)
    try:
        with (
            convert_frame.compile_lock,
            _disable_current_modes(),
            get_metrics_context(),
            dynamo_timed("memo: fullgraph_capture"),
            set_enable_dynamic(False),
            torch_function_mode_stack_state_mgr,
        ):
            found = convert_frame.fullgraph_capture(function, tuple(args), dict(kwargs))
            graph = found.backend_input
            if graph is None:
                yield None
                return
            context = TracingContext(graph.fake_mode)
            context.tensor_to_context = graph.tensor_to_context
            with tracing(context):
                yield graph.graph_module, graph.example_inputs
    finally:
        for name in set(scope) - names:
            del scope[name]


def ends_at_graph_break(gm: fx.GraphModule) -> bool:
    """True for a graph of Dynamo's behind which other code of its function runs (2.11, 2.13)."""
    return bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))


def graph_break(error: BaseException) -> str | None:
    """What Dynamo could not trace, in one line with the user's line; None for another error."""
    refused = (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)
    if not isinstance(error, refused):
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = lines[0] if lines else "graph break"
    hint = next((line for line in lines if line.startswith("Explanation:")), "")
    where = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    place = f" at {where[-1][0]}:{where[-1][1]}" if where else ""
    return f"{what}{place}" + (f" ({hint.removeprefix('Explanation:').strip()})" if hint else "")


def register_backend(name: str, backend: Callable[..., Any]) -> None:
    """``torch.compile(backend=name)`` calls ``backend``; a registered entry point is not loaded."""
    torch._dynamo.register_backend(backend, name=name)


def fake_mode(*, real_inputs: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Tensors made inside take no memory; with ``real_inputs`` real ones may be mixed in."""
    return torch._subclasses.FakeTensorMode(allow_non_fake_inputs=real_inputs)


cpp_compiler = get_cpp_compiler
"""The command of the C++ compiler that Inductor uses; a RuntimeError where it finds none."""


@contextlib.contextmanager
def failing_fakes_unlogged() -> Iterator[None]:
    """Operators may refuse the shapes of fakes inside; torch logs each with a traceback."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def falls_back(target: Any) -> bool:
    """True for an operator that Inductor calls as a kernel rather than compiling it."""
    return target in lowering.fallbacks


def has_lowering(target: Any) -> bool:
    """True for an operator that Inductor knows by now: custom ones, once they were lowered."""
    return target in lowering.lowerings
