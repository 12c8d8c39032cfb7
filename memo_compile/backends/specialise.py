"""Compiles a graph with symbolic sizes once for each concrete shape, when the shape first runs.

Dynamo hands a second shape over as symbols (``dynamic=None``). A plan needs numbers, so the graph
is copied with the numbers of each call in place of the symbols and compiled for them. AOTAutograd
traces it only once, with symbols, where it can (``all_lengths``). The plans share one arena. The
least recently used plan goes when there are ``max_plans``; a graph whose shapes never settle runs
through plain Inductor. An integer that is no tensor's size stays open: one plan serves all its
values.
"""

import collections
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from memo_runtime.open_numbers import as_tensor
from memo_runtime.operator_modes import hidden_from_modes
from torch import fx

from memo_compile.backends.all_lengths import LENGTHS, AllLengths, shared_memory
from memo_compile.config import MemoConfig
from memo_compile.errors import Infeasible, NumberNeeded
from memo_compile.garbage import seldom_collected
from memo_compile.lowering.varying_sizes import VaryingRegions, varying
from memo_compile.passes.numbers import PutNumbers, is_wrapped_float, open_positions
from memo_compile.passes.runner import PassRunner
from memo_compile.reporting import state
from memo_compile.torch_private import autograd, dynamo, fx_graphs
from memo_compile.torch_private.symbols import free_symbols

log = logging.getLogger("memo")

_graph_numbers = itertools.count()

MAX_COMPILATIONS_PER_PLAN = 4
"""A graph's shapes count as unsettled after this many times ``max_plans`` compilations."""


def symbol_positions(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[int, ...]:
    """Returns the inputs that are numbers: sizes, and floats that Dynamo wraps into tensors."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return tuple(
        index
        for index, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True))
        if isinstance(value, torch.SymInt) or is_wrapped_float(node)
    )


@dataclass(eq=False)
class Specialised:
    """A graph that is compiled anew for each combination of sizes it meets."""

    _gm: fx.GraphModule
    _symbols: tuple[int, ...]
    _config: MemoConfig
    _compile_static: Callable[[fx.GraphModule, Sequence[Any], MemoConfig], Callable[..., Any]]
    _compiled: collections.OrderedDict[tuple[str, ...], Callable[..., Any]] = field(
        default_factory=collections.OrderedDict
    )
    """By ``_key``, the least recently used first."""
    _written: frozenset[int] | None = None
    """Positions of inputs, without numbers, that the graph writes into; None before compilation."""
    _num_compiled: int = 0
    _plain: Callable[..., Any] | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _fitted: set[tuple[float, ...]] = field(default_factory=set)
    """The numbers for which there was a plan."""
    _regions: VaryingRegions = field(default_factory=VaryingRegions)
    """Regions that are lowered once for all lengths."""
    _lengths: tuple[str, AllLengths] | None = None
    """The numbers of the first call that do not vary, and the trace for all sizes."""
    _constants: frozenset[int] = frozenset()
    """Those of ``_symbols`` that are floats, or always the same: no symbols of a trace."""
    _open: tuple[int, ...] = ()
    """Those of ``_symbols`` that are given in tensors: a plan serves all of their values."""

    def __post_init__(self) -> None:
        inputs = self._gm.graph.find_nodes(op="placeholder")
        values = {at: inputs[at].meta.get("example_value") for at in self._symbols}
        self._constants = frozenset(at for at, value in values.items() if not free_symbols(value))
        self._open = open_positions(self._gm, self._symbols)
        dump, folder = self._config.dump, f"symbolic{next(_graph_numbers)}"
        self._runner = PassRunner(Path(dump) / folder if dump else None)

    def __call__(self, *args: Any) -> Any:
        """Runs the graph with the plan of these sizes."""
        values, inputs = self._taken_apart(args)
        key = self._key(values, inputs)
        with self._lock:
            run = self._compiled.get(key)
            if run is not None:
                self._compiled.move_to_end(key)
        if run is None:
            run, inputs = self._compile(args)
        return run(*args) if run is self._plain else run(*inputs)

    def _taken_apart(self, args: Sequence[Any]) -> tuple[dict[int, float], list[Any]]:
        """Returns the numbers among ``args`` of a plan by position, and the other inputs."""
        in_tensors = self._open
        values = {
            at: arg.item() if isinstance(arg := args[at], torch.Tensor) else int(arg)
            for at in self._symbols
            if at not in in_tensors
        }
        others = [(at, arg) for at, arg in enumerate(args) if at not in values]
        return values, [as_tensor(arg) if at in in_tensors else arg for at, arg in others]

    def _key(self, values: Mapping[int, float], inputs: Sequence[Any]) -> tuple[str, ...]:
        """Returns a plan's key; as text, since 0.0 equals -0.0, and NaN not even itself."""
        return (*map(repr, values.values()), *shared_memory(inputs, self._written or ()))

    @seldom_collected()
    @hidden_from_modes()
    def _compile(self, args: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
        """Returns what runs the graph for ``args``, and the inputs that it takes."""
        with dynamo.nothing_else_compiles(), self._lock:
            values, inputs = self._taken_apart(args)
            if (run := self._compiled.get(self._key(values, inputs))) is not None:
                return run, inputs  # compiled by another thread meanwhile
            limit = self._config.max_plans * MAX_COMPILATIONS_PER_PLAN
            if self._num_compiled >= limit:
                has_floats = any(isinstance(number, float) for number in values.values())
                return self._plainly(limit, has_floats), inputs
            try:
                return self._planned(values, inputs), inputs
            except NumberNeeded as error:
                log.info("memo: each value of an integer gets its plan: %s", error)
                self._open, self._lengths = (), None
                return self._compile(args)

    def _planned(self, values: Mapping[int, float], inputs: Sequence[Any]) -> Callable[..., Any]:
        """Plans the graph for ``values``. Raises NumberNeeded: of those that stay open."""
        self._num_compiled += 1
        num_lowered, numbers = self._regions.num_lowered, tuple(values.values())
        if len(self._compiled) >= self._config.max_plans:
            self._compiled.popitem(last=False)
        gm = self._with_numbers(values, stage="dynamo")
        self._runner.write_times()
        sizes = tuple(int(n) for at, n in values.items() if at not in self._constants)
        lengths = self._lengths_for(values)
        if lengths is not None:
            gm.meta[LENGTHS] = functools.partial(lengths.compiled, sizes)
        with varying(self._regions, sizes), autograd.fresh_static_tracing() as context:
            try:
                run = self._compile_static(gm, inputs, self._config)
            except Infeasible as error:
                raise _with_what_fits(error, numbers, self._fitted) from None
        self._fitted.add(numbers)
        if self._written is None:
            self._written = autograd.written_inputs(context, len(inputs))
        self._compiled[self._key(values, inputs)] = run
        if self._regions.counts.reused and self._regions.num_lowered == num_lowered:
            self._num_compiled -= 1  # without a compiler's time
        log.info("memo: regions for changing sizes so far: %s", self._regions.counts)
        return run

    def _with_numbers(self, values: Mapping[int, float], stage: str) -> fx.GraphModule:
        """Returns the graph with ``values`` in it, and tensors for numbers that stay open."""
        put = PutNumbers(numbers={**values, **dict.fromkeys(self._open)})
        gm = fx_graphs.copied(self._gm)
        return self._runner.run(gm, [put], stage=stage) if put.numbers else gm

    def _lengths_for(self, values: Mapping[int, float]) -> AllLengths | None:
        """Returns the trace for all sizes, with the floats of ``values``; None for other floats.

        Floats are mostly constants of the model, which ``dynamic=True`` makes inputs. One that
        changes with each step would be traced for all sizes each time.
        """
        fixed = {at: number for at, number in values.items() if at in self._constants}
        if self._lengths is None:
            gm = self._with_numbers(fixed, stage="dynamo-fixed")
            positions = tuple(
                at - sum(fixed_at < at for fixed_at in fixed) for at in values if at not in fixed
            )
            self._lengths = repr(fixed), AllLengths(gm=gm, positions=positions)
        first_fixed, lengths = self._lengths
        is_symbolic = bool(lengths.positions or self._open)
        return lengths if first_fixed == repr(fixed) and is_symbolic else None

    def _plainly(self, limit: int, has_floats: bool) -> Callable[..., Any]:
        """Returns the graph compiled by plain Inductor with symbolic sizes, for good."""
        mend = "raise max_plans or pad to fewer shapes"
        if has_floats:
            mend += ", and pass a float that changes (a weight, a temperature) as torch.tensor(x)"
        reason = f"{limit} compilations for its changing shapes; {mend}"
        if self._config.memory_budget is not None:
            raise Infeasible(f"memory_budget cannot be kept for a graph after {reason}")
        if self._plain is None:
            note = f"a graph runs through plain Inductor after {reason}"
            state.mark_failed(note)
            log.warning("memo: %s", note)
            self._plain = torch.compile(self._gm, dynamic=True)
        state.count_unplanned()
        return self._plain


def _with_what_fits(
    error: Infeasible, numbers: tuple[float, ...], fitted: Collection[tuple[float, ...]]
) -> Infeasible:
    """Adds to ``error`` the largest sizes that had a plan and are nowhere above ``numbers``."""
    smaller = [fit for fit in fitted if all(n <= m for n, m in zip(fit, numbers, strict=True))]
    if not smaller:
        return error
    sizes, largest = ", ".join(map(str, numbers)), ", ".join(map(str, max(smaller)))
    text = (
        f"{error}. This graph's changing sizes are {sizes}; the largest so far that fit: "
        f"{largest}. memo_compile.longest finds the largest that fits"
    )
    return Infeasible(text, floor_bytes=error.floor_bytes)
