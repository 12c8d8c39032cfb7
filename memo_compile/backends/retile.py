"""A graph under a budget is compiled anew where a step that needs more fits in other tiles only.

Tiles are chosen when the graph is compiled, and the fastest that fit are not those that need least.
That gradients are kept, or that results are used outside, shows when the step runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from memo_compile import shim
from memo_compile.backends.all_lengths import shared_memory
from memo_compile.driver.assemble import Assembly
from memo_compile.driver.left_whole import say_dropped
from memo_compile.driver.stages import PlanRequest
from memo_compile.errors import Infeasible
from memo_compile.reporting import state


class PlannedGraph(NamedTuple):
    """A compiled graph."""

    run: Callable[..., Any]
    assembly: Assembly | None
    """The step that it runs; None for inference."""


Plan = Callable[[fx.GraphModule, Sequence[Any], PlanRequest], PlannedGraph]
"""Compiles a graph, which changes, in tiles in which a request fits. Raises Infeasible: in none."""


@dataclass(eq=False)
class Retiled:
    """A graph in tiles that are chosen anew where a step that is planned again does not fit."""

    _gm: fx.GraphModule
    _plan: Plan
    _planned: PlannedGraph
    _asked: dict[PlanRequest, Infeasible] = field(default_factory=dict)
    """Requests for which other tiles were tried, each with its error: none is compiled twice."""

    def __call__(self, *args: Any) -> Any:
        """Run in the tiles in which this step fits. Raises Infeasible: there are none."""
        planned = self._planned
        assert planned.assembly is not None, "inference is not planned"
        try:
            return planned.run(*args)
        except Infeasible as error:
            request = planned.assembly.unplanned_request
            if request is None:
                raise
            why = _without_frames(error)
        # Outside of the block that handles the error, whose frames hold the arguments.
        if request in self._asked:
            raise _without_frames(self._asked[request])
        with shim.nothing_else_compiles():
            if self._planned is planned:  # and no other thread has compiled meanwhile
                self._asked[request] = why
                self._planned = self._compiled(planned.assembly, request, args)
        return self(*args)

    def _compiled(
        self, before: Assembly, request: PlanRequest, args: Sequence[Any]
    ) -> PlannedGraph:
        before.release()
        try:
            with shim.fresh_static_tracing() as context:
                planned = self._plan(shim.copied(self._gm), args, request)
        except Infeasible as error:
            self._asked[request] = _without_frames(error)
            raise
        except Exception as error:  # what did not fit is what the user is told
            say_dropped("a step that needs more than its tiles allow", error)
            raise _without_frames(self._asked[request]) from None
        if shared_memory(args, shim.written_inputs(context, len(args))):
            raise _without_frames(self._asked[request])  # Dynamo's guards do not know of that
        assert planned.assembly is not None, "it trained before"
        planned.assembly.follow(before)
        before.retire()
        state.add_plan(planned.assembly.reported)
        state.add_note("a graph was compiled anew, in other tiles, because its steps needed more")
        return planned


def _without_frames(error: Infeasible) -> Infeasible:
    """``error`` without its traceback, which holds the arguments of a step."""
    return Infeasible(str(error), floor_bytes=error.floor_bytes)
