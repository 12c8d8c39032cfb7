"""The torch.compile backend ``memo``: what torch calls with a Dynamo graph."""

import contextlib
import dataclasses
import difflib
import itertools
import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from memo_runtime.arena import ArenaError
from memo_runtime.host_store import FILE_PREFIX, HostStoreError
from torch import fx

from memo_compile import shim
from memo_compile.backends.capture import StepCompiler
from memo_compile.backends.left_out import DynamoWatch
from memo_compile.backends.specialise import specialise, symbol_positions
from memo_compile.config import MemoConfig, resolve
from memo_compile.driver.assemble import Assembly
from memo_compile.driver.facts import GraphFacts
from memo_compile.driver.left_whole import REPORT, UNEXPECTED, is_bug, say_dropped
from memo_compile.driver.tiling import tile_order
from memo_compile.errors import ConfigError, Infeasible, MemoError, UnsupportedGraph, described
from memo_compile.reporting import state

log = logging.getLogger("memo")

_graph_numbers = itertools.count()

_dynamo = DynamoWatch()
_dynamo.begin()
state.watch(_dynamo.left_out, _dynamo.begin)


def memo(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """Compile ``gm`` so that its training step runs in a planned arena.

    A graph that memo cannot plan runs through plain Inductor; the report says why.

    Raises:
        ConfigError: an option is unknown or cannot be used.
        MemoError: planning failed and ``strict`` is set.
    """
    with _failure_reported():
        config = _with_own_dump(resolve(options, mode))
        _require_usable(config)
        _note_mode(config)
        _note_distributed()
        if not symbol_positions(gm, example_inputs):
            return compile_static(gm, example_inputs, config)
        if not _trains(example_inputs):
            return shim.compile_fx(gm, example_inputs)
        return specialise(gm, example_inputs, config, _compile_specialised)


@contextlib.contextmanager
def _failure_reported() -> Iterator[None]:
    """An error that leaves the block is in the report, and in the log where torch swallows it."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        suppressed = shim.errors_are_suppressed()
        state.mark_failed(f"memo is off for a graph: {reason}", runs=suppressed)
        if suppressed:
            log.error("memo: off for a graph, which runs eagerly (suppress_errors): %s", reason)
        raise


def _trains(example_inputs: Sequence[Any]) -> bool:
    """False for inference, which has nothing to plan: it keeps its symbolic sizes."""
    tensors = (value for value in example_inputs if isinstance(value, torch.Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _compile_specialised(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: MemoConfig
) -> Callable[..., Any]:
    """``compile_static`` for sizes that came up while the program ran."""
    with _failure_reported():
        return compile_static(gm, example_inputs, config)


def compile_static(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: MemoConfig
) -> Callable[..., Any]:
    """``gm`` for inputs of known shapes, planned or, if that is not possible, plain."""
    original = shim.with_graph(gm, shim.copy_graph(gm.graph))
    try:
        compiler = plan_graph(gm, example_inputs, config)
    except ConfigError:
        raise
    except Exception as error:
        return _step_aside(original, example_inputs, config, error)
    return compiler


MakeCompiler = Callable[[MemoConfig, GraphFacts, str], StepCompiler]
"""The compiler of a graph from its options, its facts and its name."""


def plan_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: MemoConfig,
    make: MakeCompiler = StepCompiler,
    device_bytes: int | None = None,
) -> Callable[..., Any]:
    """``gm`` compiled by memo; every failure is raised.

    Where the budget, or what the device grants, is below what the step needs, its wide chains are
    run in tiles of tokens. ``device_bytes`` is the memory of another device than the one that the
    tensors lie on.
    """
    if config.exact:
        config = dataclasses.replace(config, token_tiles=1)
    if config.token_tiles is not None:
        return _plan_once(gm, example_inputs, config, make)
    facts = GraphFacts(example_inputs)
    first, second = tile_order(gm, facts, config, device_bytes or facts.device_bytes())
    untouched = shim.with_graph(gm, shim.copy_graph(gm.graph))
    try:
        return _plan_once(gm, example_inputs, dataclasses.replace(config, token_tiles=first), make)
    except (MemoError, ArenaError, *UNEXPECTED) as error:
        expected = isinstance(error, Infeasible | ArenaError)
        unbounded = config.memory_budget is None and not isinstance(error, ArenaError)
        if unbounded or (first == 1 and not expected) or _ends_planning(error):
            raise
        if is_bug(error) and not isinstance(error, ArenaError):
            say_dropped(f"the graph is not planned in {first} tiles of tokens", error)
        log.info("memo: in %d tiles of tokens: %s; trying %d", first, error, second)
        again = dataclasses.replace(config, token_tiles=second)
        return _plan_in_other_tiles(untouched, example_inputs, again, error, make)


def _ends_planning(error: Exception) -> bool:
    """True for what another plan does not mend: an option, memory that torch itself ran out of."""
    return isinstance(error, ConfigError | torch.OutOfMemoryError)


def _plan_in_other_tiles(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: MemoConfig,
    before: Exception,
    make: MakeCompiler,
) -> Callable[..., Any]:
    """``gm`` with other tiles; if that does not fit either, the error has the lower floor."""
    try:
        return _plan_once(gm, example_inputs, config, make)
    except UnsupportedGraph:
        raise before from None
    except (Infeasible, ArenaError) as error:
        if not isinstance(before, Infeasible) or not isinstance(error, Infeasible):
            raise
        floors = before.floor_bytes, error.floor_bytes
        if floors[1] is None or (floors[0] is not None and floors[0] < floors[1]):
            raise before from None
        raise
    except UNEXPECTED as error:
        if _ends_planning(error) or not isinstance(before, Infeasible):
            raise
        say_dropped(f"the graph is not planned in {config.token_tiles} tiles of tokens", error)
        raise before from None


def _plan_once(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: MemoConfig, make: MakeCompiler
) -> Callable[..., Any]:
    name = f"graph{next(_graph_numbers)}"
    compiler = make(config, GraphFacts(example_inputs), name)
    with shim.functorch_patch(
        force_non_lazy_backward_lowering=True,
        enable_autograd_cache=False,
        enable_remote_autograd_cache=False,
    ):
        compiled = shim.compile_fx(
            gm,
            example_inputs,
            inner_compile=shim.inner_compiler(compiler.inner),
            config_patches=shim.known_inductor_settings(
                {
                    "custom_partitioner_fn": shim.partitioner(compiler.partition),
                    **shim.NO_GRAPH_CACHE,
                }
            ),
        )
    if compiler.assembly is not None:
        compiler.assembly.on_unplanned(_on_unplanned)
        weakref.finalize(compiler, _retire, compiler.assembly).atexit = False
        state.add_plan(compiler.assembly.plan)
    elif compiler.saw_training:
        raise UnsupportedGraph("the backward of this graph was not compiled with its forward")
    return compiled


def _retire(assembly: Assembly) -> None:
    """Nothing of a model that is gone is held."""
    assembly.retire()
    state.plan_is_gone(assembly.plan)


def _on_unplanned() -> None:
    if state.count_unplanned() == 1:
        _warn_once(
            "a forward began while another of the same graph was waiting for its backward; it "
            "runs in ordinary memory. Set max_inflight to the number of live forwards"
        )


def _step_aside(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: MemoConfig, error: Exception
) -> Callable[..., Any]:
    """Plain Inductor for a graph that got no plan; ``strict`` raises instead.

    Where the device refused every planned arena, plain Inductor, which mostly needs more, is no
    way out.
    """
    refused = isinstance(error, ArenaError)
    if config.strict or config.memory_budget is not None or refused:
        raise _named(error)
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    state.mark_failed(f"a graph runs through plain Inductor, without a plan: {reason}")
    if isinstance(error, UnsupportedGraph):
        log.warning("memo: no plan for this graph, plain Inductor runs it: %s", reason)
    elif not is_bug(error):
        log.error("memo: planning failed, plain Inductor runs this graph: %s", reason)
    else:
        log.error("memo: planning failed, plain Inductor runs this graph", exc_info=error)
    return shim.compile_fx(gm, example_inputs)


def _named(error: Exception) -> Exception:
    """``error``, or a MemoError with its cause where no code raises such an error on purpose."""
    if isinstance(error, MemoError | HostStoreError | torch.OutOfMemoryError):
        return error
    log.error("memo: planning failed; %s", REPORT, exc_info=error)
    named = MemoError(f"planning failed: {described(error)}; {REPORT}")
    named.__cause__ = error
    return named


def _several_ranks() -> bool:
    """True in a process group of more than one."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1


def _note_distributed() -> None:
    """Name what memo does not do yet when several ranks train together."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    if _several_ranks():
        _warn_once("each rank plans its own graph; that the ranks' plans agree is not checked yet")
    if shim.has_fsdp_modules():
        _warn_once(
            "FSDP2 gathers parameters outside the compiled blocks: every block is planned by "
            "itself, and what fully_shard() keeps gathered is not in the plan"
        )
    if shim.ddp_splits_graphs():
        _warn_once(
            "DistributedDataParallel cuts the graph at its gradient buckets, so that every piece "
            "is planned by itself; set torch._dynamo.config.optimize_ddp = False"
        )


def _warn_once(note: str) -> None:
    if state.add_note(note):
        log.warning("memo: %s", note)


def _require_usable(config: MemoConfig) -> None:
    """What only this machine and this torch can tell of the options.

    Raises:
        ConfigError: Inductor has no such setting, or the folder to offload to is not there.
    """
    settings = shim.inductor_settings()
    for name in config.inductor_options:
        if name not in settings:
            near = difflib.get_close_matches(name, settings, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"inductor_options: unknown setting {name!r}{hint}")
    store = config.host_store
    if store.startswith(FILE_PREFIX):
        folder = store.removeprefix(FILE_PREFIX)
        if not os.access(folder, os.W_OK | os.X_OK) or not Path(folder).is_dir():
            raise ConfigError(f"host_store: expected a folder that can be written, got {folder!r}")


def _with_own_dump(config: MemoConfig) -> MemoConfig:
    """``config`` with a dump folder of this rank; with none, and a note, where nothing can go."""
    if config.dump is None:
        return config
    folder = Path(config.dump)
    if _several_ranks():
        folder /= f"rank{torch.distributed.get_rank()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _warn_once(f"nothing is dumped: {folder} cannot be written: {error.strerror or error}")
        return dataclasses.replace(config, dump=None)
    return dataclasses.replace(config, dump=str(folder))


def _note_mode(config: MemoConfig) -> None:
    if config.mode == "reduce-overhead":
        _warn_once("mode='reduce-overhead': CUDA graphs are not used together with the arena")
