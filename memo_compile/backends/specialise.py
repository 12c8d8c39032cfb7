"""Compiles a graph with symbolic sizes once for each concrete shape, when the shape first runs.

Dynamo hands a second shape over as symbols (``dynamic=None``). A plan needs numbers, so the graph
is copied with the numbers of each call in place of the symbols and compiled for them. AOTAutograd
traces it only once, with symbols, where it can (``all_lengths``). The plans share one arena. The
least recently used plan goes when there are ``max_plans``; a graph whose shapes never settle runs
through plain Inductor.
"""

import collections
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from memo_runtime.operator_modes import hidden_from_modes
from torch import fx

from memo_compile.backends.all_lengths import LENGTHS, AllLengths, AtLength, shared_memory
from memo_compile.config import MemoConfig
from memo_compile.errors import Infeasible
from memo_compile.garbage import seldom_collected
from memo_compile.lowering.varying_sizes import VaryingRegions, varying
from memo_compile.passes.numbers import PutNumbers, is_wrapped_float
from memo_compile.passes.runner import PassRunner
from memo_compile.reporting import state
from memo_compile.torch_private import autograd, dynamo, fx_graphs
from memo_compile.torch_private.symbols import expression_of

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


def _is_constant(node: fx.Node) -> bool:
    """True for a symbolic size that is always the same number.

    For example a layer's width, where a body of ``checkpoint()`` is given it.
    """
    value = node.meta.get("example_value")
    return isinstance(value, torch.SymInt) and not expression_of(value).free_symbols


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
    """Those of ``_symbols`` that are always the same."""

    def __post_init__(self) -> None:
        placeholders = self._gm.graph.find_nodes(op="placeholder")
        self._constants = frozenset(at for at in self._symbols if _is_constant(placeholders[at]))
        dump, folder = self._config.dump, f"symbolic{next(_graph_numbers)}"
        self._runner = PassRunner(Path(dump) / folder if dump else None)

    def __call__(self, *args: Any) -> Any:
        """Runs the graph with the plan of these sizes."""
        numbers = tuple(_number(args[index]) for index in self._symbols)
        inputs = [arg for index, arg in enumerate(args) if index not in self._symbols]
        key = self._key(numbers, inputs)
        with self._lock:
            run = self._compiled.get(key)
            if run is not None:
                self._compiled.move_to_end(key)
        if run is None:
            run = self._compile(numbers, inputs)
        return run(*args) if run is self._plain else run(*inputs)

    def _key(self, numbers: tuple[float, ...], inputs: Sequence[Any]) -> tuple[str, ...]:
        """Returns a plan's key; as text, since 0.0 equals -0.0, and NaN not even itself."""
        return (*map(repr, numbers), *shared_memory(inputs, self._written or ()))

    @seldom_collected()
    @hidden_from_modes()
    def _compile(self, numbers: tuple[float, ...], inputs: Sequence[Any]) -> Callable[..., Any]:
        with dynamo.nothing_else_compiles(), self._lock:
            if (run := self._compiled.get(self._key(numbers, inputs))) is not None:
                return run  # compiled by another thread meanwhile
            limit = self._config.max_plans * MAX_COMPILATIONS_PER_PLAN
            if self._num_compiled >= limit:
                return self._plainly(limit, any(isinstance(number, float) for number in numbers))
            self._num_compiled += 1
            num_lowered = self._regions.num_lowered
            if len(self._compiled) >= self._config.max_plans:
                self._compiled.popitem(last=False)
            put = PutNumbers(numbers=dict(zip(self._symbols, numbers, strict=True)))
            gm = self._runner.run(fx_graphs.copied(self._gm), [put], stage="dynamo")
            self._runner.write_times()
            pairs = zip(self._symbols, numbers, strict=True)
            sizes = tuple(int(number) for at, number in pairs if self._varies(at, number))
            lengths = self._lengths_for(numbers)
            if lengths is not None:
                gm.meta[LENGTHS] = AtLength(lengths, sizes)
            with varying(self._regions, sizes), autograd.fresh_static_tracing() as context:
                try:
                    run = self._compile_static(gm, inputs, self._config)
                except Infeasible as error:
                    raise _with_what_fits(error, numbers, self._fitted) from None
            self._fitted.add(numbers)
            if self._written is None:
                self._written = autograd.written_inputs(context, len(inputs))
            self._compiled[self._key(numbers, inputs)] = run
            if self._regions.counts.reused and self._regions.num_lowered == num_lowered:
                self._num_compiled -= 1  # without a compiler's time
            log.info("memo: regions for changing sizes so far: %s", self._regions.counts)
            return run

    def _varies(self, at: int, number: float) -> bool:
        """True where input ``at`` is a size that a trace for all sizes keeps as a symbol."""
        return not isinstance(number, float) and at not in self._constants

    def _lengths_for(self, numbers: tuple[float, ...]) -> AllLengths | None:
        """Returns the trace for all sizes, with the floats of ``numbers``; None for other floats.

        Floats are mostly constants of the model, which ``dynamic=True`` makes inputs. One that
        changes with each step would be traced for all sizes each time.
        """
        pairs = list(zip(self._symbols, numbers, strict=True))
        fixed = {at: number for at, number in pairs if not self._varies(at, number)}
        if self._lengths is None:
            put = PutNumbers(numbers=fixed)
            gm = fx_graphs.copied(self._gm)
            gm = self._runner.run(gm, [put], stage="dynamo-fixed") if fixed else gm
            positions = tuple(
                at - sum(fixed_at < at for fixed_at in fixed) for at, _ in pairs if at not in fixed
            )
            self._lengths = repr(fixed), AllLengths(gm=gm, positions=positions)
        first_fixed, lengths = self._lengths
        return lengths if first_fixed == repr(fixed) and lengths.positions else None

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


def _number(value: Any) -> float:
    return value.item() if isinstance(value, torch.Tensor) else int(value)
