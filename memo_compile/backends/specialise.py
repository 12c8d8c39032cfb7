"""Graphs whose sizes are symbols: one plan per concrete shape, made when the shape first runs.

Dynamo hands a second shape over as symbols (``dynamic=None``). A plan needs numbers, so the graph
is copied with the numbers of each call in place of the symbols and compiled for them. The plans
share one arena. The least recently used plan goes when there are ``max_plans``; a graph whose
shapes never settle runs through plain Inductor.
"""

import collections
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from memo_compile.backends import shim
from memo_compile.config import MemoConfig
from memo_compile.errors import Infeasible
from memo_compile.reporting import state

log = logging.getLogger("memo")

MAX_COMPILATIONS_PER_PLAN = 4
"""After this many times ``max_plans`` compilations the shapes of a graph count as unsettled."""

CompileStatic = Callable[[fx.GraphModule, Sequence[Any], MemoConfig], Callable[..., Any]]


def specialise(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: MemoConfig,
    compile_static: CompileStatic,
) -> Callable[..., Any]:
    """A callable that compiles ``gm`` anew for each combination of sizes it meets."""
    symbols = [i for i, one in enumerate(example_inputs) if isinstance(one, torch.SymInt)]
    return _Specialised(gm, tuple(symbols), config, compile_static)


class _Specialised:
    def __init__(
        self,
        gm: fx.GraphModule,
        symbols: tuple[int, ...],
        config: MemoConfig,
        compile_static: CompileStatic,
    ) -> None:
        self._gm = gm
        self._symbols = symbols
        self._config = config
        self._compile_static = compile_static
        self._known: collections.OrderedDict[tuple[int, ...], Callable[..., Any]]
        self._known = collections.OrderedDict()
        self._num_compiled = 0
        self._plain: Callable[..., Any] | None = None
        self._lock = threading.RLock()

    def __call__(self, *args: Any) -> Any:
        """Run with the plan of these sizes."""
        key = tuple(int(args[index]) for index in self._symbols)
        with self._lock:
            run = self._known.get(key)
            if run is not None:
                self._known.move_to_end(key)
        if run is None:
            run = self._compile(key, args)
        if run is self._plain:
            return run(*args)
        return run(*(one for index, one in enumerate(args) if index not in self._symbols))

    def _compile(self, key: tuple[int, ...], args: Sequence[Any]) -> Callable[..., Any]:
        with self._lock:
            limit = self._config.max_plans * MAX_COMPILATIONS_PER_PLAN
            if self._num_compiled >= limit:
                return self._plainly(limit)
            self._num_compiled += 1
            if len(self._known) >= self._config.max_plans:
                self._known.popitem(last=False)
            gm = _with_numbers(self._gm, dict(zip(self._symbols, key, strict=True)))
            rest = [one for index, one in enumerate(args) if index not in self._symbols]
            with shim.fresh_static_tracing():
                run = self._compile_static(gm, rest, self._config)
            self._known[key] = run
            return run

    def _plainly(self, limit: int) -> Callable[..., Any]:
        """Plain Inductor with symbolic sizes, for good."""
        reason = f"more than {limit} different shapes; raise max_plans or pad to fewer shapes"
        if self._config.memory_budget is not None:
            raise Infeasible(f"memory_budget cannot be kept for a graph with {reason}")
        if state.add_note(f"a graph runs through plain Inductor: {reason}"):
            log.warning("memo: a graph runs through plain Inductor: %s", reason)
        if self._plain is None:
            self._plain = torch.compile(self._gm, dynamic=True)
        return self._plain


def _with_numbers(gm: fx.GraphModule, numbers: dict[int, int]) -> fx.GraphModule:
    """A copy of ``gm`` in which the placeholders at these positions are numbers."""
    graph = shim.copy_graph(gm.graph)
    placeholders = graph.find_nodes(op="placeholder")
    for position, number in numbers.items():
        node = placeholders[position]
        for user in list(node.users):
            user.args = fx.node.map_arg(user.args, lambda one: number if one is node else one)  # noqa: B023
            user.kwargs = fx.node.map_arg(user.kwargs, lambda one: number if one is node else one)  # noqa: B023
        graph.erase_node(node)
    return fx.GraphModule(gm, graph)
