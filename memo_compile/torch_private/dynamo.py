"""Private torch APIs of Dynamo, which traces a user's function. Read in torch 2.11.0 and 2.13.0."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo import compiled_autograd, convert_frame, trace_rules
from torch._dynamo.eval_frame import innermost_fn, set_enable_dynamic
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.exc import RestartAnalysis as RestartAnalysis
from torch._dynamo.external_utils import wrap_inline
from torch._dynamo.utils import counters, dynamo_timed, get_metrics_context
from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr
from torch._guards import TracingContext, tracing
from torch._logging._internal import trace_structured as trace_structured
from torch.utils._python_dispatch import _disable_current_modes

for package in ("memo_runtime", "memo_compile.driver"):
    # A finalizer of memo's may run within a function that Dynamo runs eagerly. Unless the packages
    # are named here Dynamo compiles what it calls.
    trace_rules.add(package)


def errors_are_suppressed() -> bool:
    """True when Dynamo hides what a backend raises and runs the frame eagerly."""
    return bool(torch._dynamo.config.suppress_errors)


def dynamo_is_verbose() -> bool:
    """True where TORCHDYNAMO_VERBOSE=1 asks for whole tracebacks."""
    return bool(torch._dynamo.config.verbose)


def as_backend_failure(
    error: Exception, backend: Callable[..., Any], frame: FrameType | None
) -> Exception:
    """Returns ``error`` as an exception of its own type that is a BackendCompilerFailed as well.

    Dynamo wraps a backend's exceptions unless they are BackendCompilerFailed already (2.11, 2.13):
    so this one arrives unwrapped, and both types catch it. A user sees the frames of the program
    and one of Dynamo, and ``error``'s own words last; under TORCHDYNAMO_VERBOSE also the frames
    from ``frame`` on, and what Dynamo adds.
    """
    kind = type(error)
    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__str__": _words,
        "remove_dynamo_frames": _without_frames,
    }
    both: Any = type(kind.__name__, (kind, BackendCompilerFailed), names)
    failed: Exception = both.__new__(both)
    BackendCompilerFailed.__init__(failed, backend, error, frame)  # type: ignore[arg-type]
    failed.__dict__.update(error.__dict__)
    return failed


def _words(failed: BackendCompilerFailed) -> str:
    """Returns what ``failed`` says: the backend's own message, without Dynamo's around it."""
    return str(failed.args[0] if dynamo_is_verbose() else failed.inner_exception)


def _without_frames(failed: BackendCompilerFailed) -> BackendCompilerFailed:
    """Returns ``failed`` without the frames in which it was made, as Dynamo asks."""
    return failed if dynamo_is_verbose() else failed.with_traceback(None)


def is_compiled_alone(module: torch.nn.Module) -> bool:
    """True for a module that ``module.compile()`` or ``torch.compile(module)`` compiled.

    Private in 2.13.0 (``nn.Module._compiled_call_impl``).
    """
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or isinstance(module, torch._dynamo.OptimizedModule)


def nothing_else_compiles() -> contextlib.AbstractContextManager[Any]:
    """Returns Dynamo's lock, which it holds when it calls a backend; needed to compile later."""
    return convert_frame.compile_lock


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
    """Makes ``backward`` raise ``error`` when compiled autograd copies its graph.

    Its forward has run by a plan, and the copy would end in an IndexError: compiled autograd does
    not know what was saved without a version check (2.13,
    ``compiled_autograd.proxy_call_aot_backward``). Every GraphModule has a class of its own.
    """
    cls = type(backward)
    usual = cls.graph

    def graph(module: fx.GraphModule) -> fx.Graph:
        if compiles_autograd() or compiled_autograd.in_compiled_autograd_region:
            raise error()
        return usual.fget(module)  # type: ignore[attr-defined]

    cls.graph = property(graph, usual.fset)  # type: ignore[attr-defined, assignment]


class DynamoCounts(NamedTuple):
    """Dynamo's counts of code that it left out, since its last reset."""

    breaks: dict[str, int]
    """Graph breaks by reason."""
    skipped: dict[str, int]
    """Functions that run eagerly, by the reason why Dynamo cannot trace them."""
    given_up: int
    """Functions that run eagerly after too many compilations."""
    explained: frozenset[str] = frozenset()
    """Dynamo's full messages of the graph breaks."""


def dynamo_counts() -> DynamoCounts:
    """Reads Dynamo's own counters (2.11, 2.13).

    A graph break is counted as one; anything else that is unimplemented makes a function eager.
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
    """Makes Dynamo leave calls of a logger's ``method`` out of graphs, not break them (2.11)."""
    torch._dynamo.config.ignore_logger_methods.add(method)


@contextlib.contextmanager
def traced_whole(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[fx.GraphModule, Sequence[Any]] | None]:
    """Yields the whole Dynamo graph of ``function`` and its inputs, as for a backend; nothing runs.

    Inside, the graph can be compiled. None where ``function`` computes nothing. Globals that Dynamo
    adds to the function's module are removed at the end (2.11, 2.13). Raises Dynamo's own errors;
    ``graph_break`` names a graph break.
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
            capture = convert_frame.fullgraph_capture(function, tuple(args), dict(kwargs))
            graph = capture.backend_input
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
    """True for a graph of Dynamo's that ends at a graph break (2.11, 2.13)."""
    return bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))


def graph_break(error: BaseException) -> str | None:
    """Says in one line what Dynamo could not trace, and where; None for another error."""
    refused = (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)
    if not isinstance(error, refused):
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = lines[0] if lines else "graph break"
    hint = next((line for line in lines if line.startswith("Explanation:")), "")
    frames = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    place = f" at {frames[-1][0]}:{frames[-1][1]}" if frames else ""
    return f"{message}{place}" + (f" ({hint.removeprefix('Explanation:').strip()})" if hint else "")


def register_backend(name: str, backend: Callable[..., Any]) -> None:
    """Makes ``torch.compile(backend=name)`` call ``backend``, without loading an entry point."""
    torch._dynamo.register_backend(backend, name=name)
