"""The torch.compile backend ``memo``: what torch calls with a Dynamo graph."""

import collections
import contextlib
import dataclasses
import functools
import inspect
import logging
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from memo_runtime.host_state import move_updates_to_host
from memo_runtime.leases import leases
from memo_runtime.pages import occupy_free_places
from torch import fx

from memo_compile.analysis.module_paths import model_class
from memo_compile.backends.all_lengths import LENGTHS
from memo_compile.backends.capture import COMPILED_AUTOGRAD, Finish, StepCapture, next_graph_name
from memo_compile.backends.negated import resolving
from memo_compile.backends.retile import PlannedGraph, Retiled
from memo_compile.backends.specialise import Specialised, symbol_positions
from memo_compile.config import CUDA_GRAPHS, MemoConfig, misspelt_variables, resolve
from memo_compile.costs.host import missing_store, processor_name
from memo_compile.costs.measure import MIN_OWN_BLOCK_BYTES, keep_large_blocks_apart
from memo_compile.driver.agreement import RankStep, graph_key, job_rank, orders_of
from memo_compile.driver.around import has_fsdp_modules
from memo_compile.driver.assemble import Assembly
from memo_compile.driver.facts import GraphFacts
from memo_compile.driver.left_whole import REPORT, is_bug, refused
from memo_compile.driver.owners import with_owners
from memo_compile.driver.pipeline import assemble
from memo_compile.driver.probe import TilingProbes
from memo_compile.driver.stages import CapturedStep, CutStep, PlanRequest
from memo_compile.driver.step_planner import require_host_budget
from memo_compile.driver.tries import first_that_fits
from memo_compile.errors import (
    ConfigError,
    Infeasible,
    MemoError,
    NumberNeeded,
    RanksDisagree,
    RuntimeMisuse,
    UnsupportedGraph,
    UntraceableGraph,
    described,
    nearest,
)
from memo_compile.garbage import seldom_collected
from memo_compile.passes.bodies import with_plain_bodies
from memo_compile.passes.numbers import OPEN_NUMBERS
from memo_compile.passes.runner import graph_text
from memo_compile.reporting import state
from memo_compile.reporting.compiling import compiling, is_terminal
from memo_compile.reporting.write import write_pictures
from memo_compile.step.program_text import program_text
from memo_compile.step.serialise import to_json
from memo_compile.torch_private import compile_caches, distributed, dynamo, fx_graphs, inductor_api
from memo_compile.units import format_bytes, format_seconds

log = logging.getLogger("memo")

NO_COMPILER = (
    "{}. Install g++ or name a compiler in the environment variable CXX; "
    "options={{'lowering': 'aten'}} runs the model operator by operator, and needs none"
)
OF_PIECE = (
    "This is the floor of one graph, and the step needs at least that much: graph breaks cut it "
    "into several. Once all of them have run, they are planned as one step, and a refusal names "
    "its floor"
)
MOST_SHAPES = 4
"""Inputs that a report's head names."""


def memo(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """Compiles ``gm`` so that its training step runs in a planned arena.

    A graph that memo cannot plan runs through plain Inductor; the report says why. Each error is a
    ``torch._dynamo.exc.BackendCompilerFailed`` as well, as Dynamo wants them.

    Raises:
        ConfigError: an option is unknown or cannot be used.
        MemoError: planning failed, and ``strict`` or a ``memory_budget`` is set.
        ArenaError, HostStoreError: the device or the host refused the memory of every plan tried.
    """
    try:
        return _compiled(gm, example_inputs, mode, options)
    except refused(MemoError) as error:
        # A refusal is the user's to read: where in memo it was made says nothing. No name for the
        # new error: this frame, which it knows, would keep it alive.
        trace = error.__traceback__ if dynamo.dynamo_is_verbose() else None
        raise dynamo.as_backend_failure(
            _of_piece(error, gm), memo, inspect.currentframe()
        ).with_traceback(trace) from None


def _of_piece(error: Exception, gm: fx.GraphModule) -> Exception:
    """Returns ``error``; of a piece of a step, it says that its floor is not the step's."""
    is_piece = dynamo.ends_at_graph_break(gm) or leases.any_live()
    if not isinstance(error, Infeasible) or error.floor_bytes is None or not is_piece:
        return error
    return Infeasible(f"{error}. {OF_PIECE}", floor_bytes=error.floor_bytes)


@seldom_collected()
def _compiled(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> Callable[..., Any]:
    """As ``memo``; raises errors as they are."""
    with _failure_reported():
        config = _with_own_dump(resolve(options, mode))
        caches = config.cache and compile_caches.caches_graphs()
        config = dataclasses.replace(config, cache=caches)
        _require_usable(config)
        for note in misspelt_variables():
            state.add_note(note)  # logged when the options were read
        for note in config.idle_options():
            state.warn_once(note)
        compile_caches.store_no_unsafe_views()
        config = _with_cuda_graphs(config, example_inputs)
        _note_distributed()
        if any(_is_unplannable(value) for value in example_inputs):
            error = UnsupportedGraph("an input is a nested or a sparse tensor")
            return _step_aside(gm, example_inputs, config, error)
        if _trains(example_inputs):
            gm = with_plain_bodies(gm)
        return resolving(
            lambda inputs: _compiled_for(gm, inputs, config),
            gm,
            example_inputs,
            lambda error: _by_operator(gm, example_inputs, config, error),
        )


def _showing_progress(config: MemoConfig) -> contextlib.AbstractContextManager[None]:
    """Inside, the terminal of the first rank shows what a long compilation does."""
    shows = is_terminal() if config.progress is None else config.progress
    is_first = distributed.num_ranks() <= 1 or torch.distributed.get_rank() == 0
    budget, purpose = config.memory_budget, ""
    if budget is not None:
        purpose = f", planning under {budget if isinstance(budget, str) else format_bytes(budget)}"
    return compiling(purpose, shows=shows and is_first)


def _compiled_for(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: MemoConfig
) -> Callable[..., Any]:
    """Compiles ``gm`` for its shapes, or where they vary for each shape when it first runs."""
    symbols = symbol_positions(gm, example_inputs)
    if not symbols:
        return compile_static(gm, example_inputs, config)
    if not _trains(example_inputs):
        _note_inference(config)
        return inductor_api.compile_fx(gm, example_inputs)
    # Sizes that come up while the program runs fail where nobody else reports it.
    return Specialised(gm, symbols, config, _failure_reported()(compile_static))


@contextlib.contextmanager
def _failure_reported() -> Iterator[None]:
    """Reports an error that leaves the block, and logs it where torch swallows it.

    The report forgets an error that the user gets once a next try has a plan.
    """
    notes_before = state.current_notes()
    try:
        yield
    except (dynamo.RestartAnalysis, NumberNeeded):
        raise  # the function is traced again, and comes back
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        note = f"memo is off for a graph: {reason}"
        if not dynamo.errors_are_suppressed():
            state.mark_refused(note, notes_before)
            raise
        state.mark_failed(note)
        log.error("memo: off for a graph, which runs eagerly (suppress_errors): %s", reason)
        raise


def _is_unplannable(value: Any) -> bool:
    """True for a tensor of several others, such as nested or sparse ones."""
    return isinstance(value, torch.Tensor) and value.layout is not torch.strided


def _trains(example_inputs: Sequence[Any]) -> bool:
    """False for inference, which has nothing to plan: it keeps its symbolic sizes."""
    tensors = (value for value in example_inputs if isinstance(value, torch.Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _note_inference(config: MemoConfig) -> None:
    """Says why a graph without a backward gets no plan."""
    bound = "" if config.memory_budget is None else ", and memory_budget does not bound it"
    state.add_note(
        "a graph without a backward is not planned, plain Inductor runs it (inference, frozen "
        f"parameters, or torch.func, which makes gradients inside the graph){bound}"
    )


def compile_static(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: MemoConfig
) -> Callable[..., Any]:
    """Compiles ``gm`` for inputs of known shapes: planned, or else by plain Inductor."""
    try:
        with _showing_progress(config):
            return plan_graph(gm, example_inputs, config)
    except (dynamo.RestartAnalysis, NumberNeeded):
        raise
    except (ConfigError, RanksDisagree) as error:
        _tell_ranks(gm, example_inputs, error)
        raise
    except UntraceableGraph as error:
        _tell_ranks(gm, example_inputs, error)
        _raise_of_inductor(gm, example_inputs)
        return _step_aside(gm, example_inputs, config, error)
    except Exception as error:
        if compile_caches.lacks_compiler(error):
            refusal = ConfigError(NO_COMPILER.format(error))
            _tell_ranks(gm, example_inputs, refusal)
            raise refusal from error
        gm.meta.pop(LENGTHS, None)
        return _step_aside(gm, example_inputs, config, error)


def _raise_of_inductor(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Raises plain Inductor's error, where it cannot trace the graph either."""
    try:
        inductor_api.compile_fx(gm, example_inputs)
    except Exception as error:
        raise error from None


def _tell_ranks(gm: fx.GraphModule, example_inputs: Sequence[Any], error: Exception) -> None:
    """Tells other ranks, which may wait for this one's plan of ``gm``, about ``error``."""
    job_rank().refuse(graph_key(gm, example_inputs), error, steps_aside=False)


def plan_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: MemoConfig
) -> Callable[..., Any]:
    """Compiles ``gm`` by memo; raises every failure, RanksDisagree too.

    Under a budget its wide chains may run in tiles of tokens, and in other tiles once a step shows
    that it needs more.
    """
    plan = functools.partial(_planned, config)
    has_tiles = not config.exact and config.token_tiles is None
    retiles = has_tiles and config.memory_budget is not None
    key = graph_key(gm, example_inputs)
    job_rank().begin(key)
    planned = plan(gm, example_inputs, PlanRequest(may_be_part=True))
    if planned.assembly is None:
        return planned.run
    lowered = planned.assembly.lowered
    step = RankStep(
        name=lowered.cut.name, key=key, orders=orders_of(lowered.problem, lowered.regions)
    )
    job_rank().agree(step, config.ranks_timeout_s)
    state.add_plan(planned.assembly.reported)
    return with_owners(Retiled(gm, plan, planned) if retiles else planned.run, example_inputs)


def _planned(
    config: MemoConfig, gm: fx.GraphModule, inputs: Sequence[Any], request: PlanRequest
) -> PlannedGraph:
    """Compiles ``gm`` in the first tiles in which ``request`` fits, or with updates on the host."""
    facts = GraphFacts(inputs)
    in_heap = facts.device.type == "cpu" and config.memory_budget is not None
    if in_heap:
        large_blocks_leave_the_heap()  # before anything large is compiled and freed
    probes = TilingProbes()

    def once(graph: fx.GraphModule, options: MemoConfig) -> PlannedGraph:
        return _planned_once(
            graph, inputs, options, lambda step: _compiled_step(step, options, probes, request)
        )

    try:
        planned = first_that_fits(gm, facts, config, once)
    except Infeasible as error:
        try:
            moved = _updates_moved(inputs, facts, config)
        except ConfigError as beyond:
            raise Infeasible(f"{error}; {beyond}", floor_bytes=error.floor_bytes) from None
        if not moved:
            raise
        planned = first_that_fits(gm, GraphFacts(inputs), config, once)  # read anew: state moved
    if in_heap:
        large_blocks_leave_the_heap()  # in which planning's small blocks have left free places
    return planned


def _updates_moved(inputs: Sequence[Any], facts: GraphFacts, config: MemoConfig) -> bool:
    """True where an optimizer of a step that does not fit updates on the host from now on.

    Raises ConfigError: a declared ``host_budget`` does not allow it.
    """
    on_host = facts.fixed_bytes(0).on_host
    parameters = [value for value in inputs if isinstance(value, torch.nn.Parameter)]
    with fx_graphs.real_tensors():
        moved = move_updates_to_host(
            parameters, lambda more_bytes: require_host_budget(config, on_host + more_bytes)
        )
    if moved:
        state.add_note(
            "the optimizer updates on the host, where gradients go as they are made: with both on "
            "the device the step does not fit"
        )
    return moved


def large_blocks_leave_the_heap() -> None:
    """Makes malloc give large blocks (gradients, workspaces) mappings of their own, from now on."""
    keep_large_blocks_apart()
    occupy_free_places(MIN_OWN_BLOCK_BYTES)


def _planned_once(
    gm: fx.GraphModule, inputs: Sequence[Any], config: MemoConfig, finish: Finish
) -> PlannedGraph:
    """Captures and compiles ``gm``; its memory and its plan go when the compiled graph goes."""
    capture = StepCapture(config, GraphFacts(inputs), next_graph_name(), finish)
    run = capture.run(gm, inputs)
    if capture.steps is None:
        _note_inference(config)
    else:
        weakref.finalize(capture, capture.steps.retire).atexit = False
    return PlannedGraph(run=run, assembly=capture.assembly)


def _compiled_step(
    captured: CapturedStep | CutStep, config: MemoConfig, probes: TilingProbes, request: PlanRequest
) -> Assembly:
    """Takes the step through all stages, and allocates its memory."""
    assembly = assemble(captured, config, probes, request)
    step = assembly.lowered.cut
    if step.runner.dump is not None:
        step.runner.write("step-forward.txt", graph_text(step.forward.half_graph))
        step.runner.write("step-backward.txt", graph_text(step.backward.half_graph))
        step.runner.write("step-program.txt", program_text(assembly.problem))
        assembly.after_steps = functools.partial(_write, step.runner.dump, _about(assembly, config))
        assembly.after_steps(assembly)
    trace_plan(step.name, lambda: to_json(assembly.reported))
    return assembly


def _write(folder: Path, about: Mapping[str, str], assembly: Assembly) -> None:
    """Writes the pictures of ``assembly``'s plan; after its first steps with what they took."""
    reported = assembly.reported
    if reported.measured_s:
        texts = [f"step {format_seconds(reported.measured_s)}"]
        if reported.step_s:
            texts[0] += f" (simulated {format_seconds(reported.step_s)})"
        if assembly.step.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(assembly.step.device)
            texts.append(f"peak {format_bytes(peak)} (planned {format_bytes(reported.peak_bytes)})")
        about = {**about, "measured": ", ".join(texts)}
    write_pictures(folder, assembly.problem, reported, assembly.costs(), about)


def _about(assembly: Assembly, config: MemoConfig) -> dict[str, str]:
    """Says in a report's head what was planned: inputs, device, and options that are no default."""
    facts = assembly.lowered.cut.facts
    tensors = [value for value in facts.inputs() if isinstance(value, torch.Tensor)]
    inputs = [value for value in tensors if not isinstance(value, torch.nn.Parameter)]
    weights = sum(value.numel() for value in tensors if isinstance(value, torch.nn.Parameter))
    shapes = [f"{value.dtype} {list(value.shape)}" for value in inputs[:MOST_SHAPES]]
    dtypes = dict.fromkeys(str(value.dtype) for value in tensors if value.requires_grad)
    defaults = MemoConfig()
    options = [
        f"{option.name}={value!r}"
        for option in dataclasses.fields(config)
        if option.name not in ("attempt", "dump")
        and (value := getattr(config, option.name)) != getattr(defaults, option.name)
    ]
    device = facts.device
    class_name = model_class(region.gm.graph for region in assembly.known.graphs().values())
    class_name += ", " if class_name else ""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    return {
        "model": f"{class_name}{weights / 1e6:.4g} million parameters",
        "dtype": ", ".join(dtypes),
        "inputs": ", ".join(shapes) + (" ..." if len(inputs) > MOST_SHAPES else ""),
        "device": f"{device.type}: {name}",
        "options": ", ".join(options) or "defaults",
    }


def trace_plan(name: str, plan: Callable[[], str]) -> None:
    """Writes the text of ``plan`` as artifact ``memo_<name>_plan`` of TORCH_TRACE, for tlparse."""
    dynamo.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"memo_{name}_plan", "encoding": "json"},
        payload_fn=plan,
        expect_trace_id=False,
    )


def _step_aside(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: MemoConfig, error: Exception
) -> Callable[..., Any]:
    """Compiles a graph that got no plan by plain Inductor; raises ``error`` under ``strict``.

    Also where the device or the host refused the memory of every plan: Inductor needs more.
    """
    if OPEN_NUMBERS in gm.meta and not isinstance(error, refused(Infeasible)):
        raise NumberNeeded(described(error)) from error
    _require_free_to_step_aside(gm, example_inputs, config, error)
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    state.mark_failed(f"a graph runs through plain Inductor, without a plan: {reason}")
    if isinstance(error, UnsupportedGraph):
        log.warning("memo: no plan for this graph, plain Inductor runs it: %s", reason)
    elif not is_bug(error):
        log.error("memo: planning failed, plain Inductor runs this graph: %s", reason)
    else:
        log.error("memo: planning failed, plain Inductor runs this graph", exc_info=error)
    return inductor_api.compile_fx(gm, example_inputs)


def _by_operator(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: MemoConfig, error: UnsupportedGraph
) -> fx.GraphModule:
    """As ``_step_aside``, for a graph that Inductor would compute wrongly: returns ``gm``."""
    _require_free_to_step_aside(gm, example_inputs, config, error)
    note = f"a graph runs operator by operator, without a plan: {error}"
    if state.add_note(note):
        log.warning("memo: %s", note)
    state.mark_failed(note)
    return gm


def _require_free_to_step_aside(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: MemoConfig, error: Exception
) -> None:
    """Raises ``error`` where a step must not run without a plan; tells other ranks."""
    raises = config.strict or config.memory_budget is not None or isinstance(error, refused())
    key = graph_key(gm, example_inputs)
    job_rank().refuse(key, error, steps_aside=not raises, timeout_s=config.ranks_timeout_s)
    if raises:
        raise _as_memo_error(error)


def _as_memo_error(error: Exception) -> Exception:
    """Returns ``error``; as a MemoError if no code raises such an error on purpose."""
    if isinstance(error, refused(MemoError, torch.OutOfMemoryError)):
        return error
    log.error("memo: planning failed; %s", REPORT, exc_info=error)
    memo_error = MemoError(f"planning failed: {described(error)}; {REPORT}")
    memo_error.__cause__ = error
    return memo_error


def _note_distributed() -> None:
    """Says what memo does not do yet when several ranks train together."""
    if not distributed.num_ranks():
        return
    if distributed.num_ranks() > 1:
        state.warn_once(
            "that all ranks begin the same collectives inside a graph is checked. Where there are "
            "any, one rank plans and the others prove and run its plan, unless their step, options "
            "or memory are others; all else each rank plans by itself"
        )
    if has_fsdp_modules():
        state.warn_once(
            "FSDP2 gathers parameters outside the compiled blocks: blocks that share a graph are "
            "planned as one group, with what was seen gathered; a block alone is planned without it"
        )
    if dynamo.ddp_splits_graphs():
        state.warn_once(
            "DistributedDataParallel cuts the graph at its gradient buckets. Under memory_budget "
            "the pieces are planned as one step from the second step on; one whole graph needs "
            "less: set torch._dynamo.config.optimize_ddp = False"
        )


def _with_cuda_graphs(config: MemoConfig, example_inputs: Sequence[Any]) -> MemoConfig:
    """Returns ``config`` with Inductor's own default for CUDA graphs; says where it is idle."""
    if inductor_api.inductor_uses_cuda_graphs():
        settings = {CUDA_GRAPHS: True, **config.inductor_options}
        config = dataclasses.replace(config, inductor_options=settings)
    option = config.asks_for_cuda_graphs()
    tensors = (value for value in example_inputs if isinstance(value, torch.Tensor))
    if option and not any(tensor.is_cuda for tensor in tensors):
        state.add_note(f"{option}: CUDA graphs are not used: this is no CUDA device")
    return config


def _require_usable(config: MemoConfig) -> None:
    """Checks options against this machine and this torch.

    A missing folder to offload to is only a note: it may not be needed. Raises ConfigError:
    Inductor has no such setting, or compiled autograd is on. Raises RuntimeMisuse: a CUDA graph is
    being captured.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeMisuse(
            "a model was first called while a CUDA graph is captured. To compile it kernels run, "
            "and the host waits for them; and a planned step is not captured afterwards either. "
            "Take it out of torch.cuda.graph and make_graphed_callables"
        )
    if dynamo.compiles_autograd():
        raise ConfigError(COMPILED_AUTOGRAD)
    settings = inductor_api.inductor_settings()
    for name in config.inductor_options:
        if name not in settings:
            hint = nearest(name, settings)
            raise ConfigError(f"inductor_options: unknown setting {name!r}{hint}")
    if wrong := missing_store(config.host_store):
        state.warn_once(f"{wrong}; only steps that move nothing can run")


def _with_own_dump(config: MemoConfig) -> MemoConfig:
    """Returns ``config`` with a dump folder of this rank; with none if that cannot be written."""
    if config.dump is None:
        return config
    folder = Path(config.dump)
    if distributed.num_ranks() > 1:
        folder /= f"rank{torch.distributed.get_rank()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        state.warn_once(f"nothing is dumped: {folder} cannot be written: {reason}")
        return dataclasses.replace(config, dump=None)
    return dataclasses.replace(config, dump=str(folder))


AVOIDED_BREAKS = {
    "loss_type=": (
        "transformers warns inside the model that it does not know its loss: "
        "model.loss_type = 'ForCausalLM' avoids that break"
    ),
    "logging.Logger method": (
        "A logger is called inside the model: memo_compile.huggingface.enable() leaves "
        "transformers' warnings out of graphs, torch._dynamo.config.ignore_logger_methods others"
    ),
    "utils.hooks.RemovableHandle": (
        "Hooks are set inside the model: with transformers output_router_logits=False, "
        "output_hidden_states=False and output_attentions=False avoid that"
    ),
}
"""Part of Dynamo's message of a well-known graph break -> how to avoid it."""


@dataclasses.dataclass(slots=True)
class DynamoWatch:
    """Counts code that Dynamo never handed to memo since ``begin``: graph breaks, eager functions.

    Torch's own counters are of the whole process.
    """

    before: dynamo.DynamoCounts = dataclasses.field(default_factory=lambda: dynamo.dynamo_counts())

    def begin(self) -> None:
        """Counts from here."""
        self.before = dynamo.dynamo_counts()

    def left_out(self) -> state.LeftOut:
        """Returns notes for the report, and whether Dynamo runs a function eagerly for good."""
        now = dynamo.dynamo_counts()
        skipped = collections.Counter(now.skipped) - collections.Counter(self.before.skipped)
        breaks = collections.Counter(now.breaks) - collections.Counter(self.before.breaks)
        breaks = collections.Counter({why: n for why, n in breaks.items() if why not in skipped})
        notes = []
        if breaks:
            explained = "".join(now.explained - self.before.explained)
            avoided = (f". {how}" for sign, how in AVOIDED_BREAKS.items() if sign in explained)
            notes.append(
                f"{breaks.total()} graph break(s): what lies between runs eagerly; under "
                "memory_budget the graphs of one step are planned together from its second run on. "
                f"First: {next(iter(breaks))} (torch.compile(fullgraph=True) shows where)"
                f"{''.join(avoided)}"
            )
        if skipped:
            notes.append(
                f"{skipped.total()} function(s) run eagerly, without a plan and without regard to "
                f"memory_budget, because Dynamo cannot trace them. First: {next(iter(skipped))} "
                "(TORCH_LOGS=graph_breaks says more)"
            )
        gave_up = now.given_up > self.before.given_up
        if gave_up:
            notes.append(
                "memo is OFF for a function: Dynamo gave it up after too many compilations and "
                "runs it eagerly. Pad to fewer shapes, or leave dynamic at its default"
            )
        return tuple(notes), gave_up


_dynamo = DynamoWatch()
state.watch(_dynamo.left_out, _dynamo.begin)
