"""A graph under a budget is compiled anew where a step that needs more fits in other tiles only.

Tiles are chosen when the graph is compiled, and the fastest that fit are not those that need least.
That gradients are kept, or that results are used outside, shows when the step runs. What several
modules need that share the graph is known when their first step ends: then other tiles are compiled
in that step, and not on top of the memory of the next.
"""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from memo_runtime.operator_modes import hidden_from_modes
from torch import fx

from memo_compile.backends.all_lengths import shared_memory
from memo_compile.backends.made_inputs import not_a_leaf
from memo_compile.driver.assemble import Assembly
from memo_compile.driver.left_whole import say_dropped
from memo_compile.driver.stages import PlanRequest
from memo_compile.errors import Infeasible, without_frames
from memo_compile.reporting import state
from memo_compile.torch_private import autograd, dynamo


class PlannedGraph(NamedTuple):
    """A compiled graph."""

    run: Callable[..., Any]
    assembly: Assembly | None
    """The step that it runs; None for inference."""


Plan = Callable[[fx.GraphModule, Sequence[Any], PlanRequest], PlannedGraph]
"""Compiles a graph, which stays as it is, in tiles in which a request fits.

Raises Infeasible: in none."""


class _Input(NamedTuple):
    """An input of a call. A tensor is not kept alive."""

    value: Any
    """Of a tensor a weak reference."""
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    requires_grad: bool = False
    has_history: bool = False

    @classmethod
    def of(cls, value: Any) -> "_Input":
        """What is known of ``value``."""
        if not isinstance(value, torch.Tensor):
            return cls(value)
        return cls(
            weakref.ref(value),
            tuple(value.shape),
            value.stride(),
            value.dtype,
            value.device,
            value.requires_grad,
            value.requires_grad and not value.is_leaf,
        )

    def memory(self) -> torch.Tensor:
        """A tensor of that form; of new memory on a CPU no page is there before it is written."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)

    def there(self) -> Any:
        """The input; None where it is a tensor that is gone."""
        return self.value() if isinstance(self.value, weakref.ref) else self.value

    def stand_in(self) -> torch.Tensor:
        """What compiles like the tensor that is gone."""
        if self.has_history:
            return not_a_leaf(self.memory)
        return self.memory().requires_grad_(self.requires_grad)


class _Call(NamedTuple):
    """What a call was like for which the graph can be compiled."""

    inputs: list[_Input]
    autocast: dict[str, torch.dtype | None]
    """By kind of device: to what operators are cast; None: they are not."""

    @classmethod
    def now(cls, args: Sequence[Any]) -> "_Call":
        """A call with ``args``."""
        kinds = {value.device.type for value in args if isinstance(value, torch.Tensor)} | {"cpu"}
        autocast = {
            kind: torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            for kind in sorted(kinds)
        }
        return cls([_Input.of(value) for value in args], autocast)

    def inputs_again(self) -> tuple[list[Any], frozenset[int]]:
        """The inputs, and at which positions there are stand-ins for those that are gone."""
        found = [given.there() for given in self.inputs]
        gone = frozenset(
            at
            for at, (given, value) in enumerate(zip(self.inputs, found, strict=True))
            if value is None and given.value is not None
        )
        for at in gone:
            found[at] = self.inputs[at].stand_in()
        return found, gone

    @contextlib.contextmanager
    def ambient(self) -> Iterator[None]:
        """The modes of the call, under which torch traces."""
        with contextlib.ExitStack() as modes:
            modes.enter_context(torch.enable_grad())
            for kind, dtype in self.autocast.items():
                cast = torch.autocast(kind, dtype=dtype, enabled=dtype is not None)
                modes.enter_context(cast)
            yield


@dataclass(eq=False)
class Retiled:
    """A graph in tiles that are chosen anew where a step that is planned again does not fit."""

    _gm: fx.GraphModule
    _plan: Plan
    _planned: PlannedGraph
    _asked: dict[PlanRequest, Infeasible] = field(default_factory=dict)
    """Requests for which other tiles were tried, each with its error: none is compiled twice."""
    _called: _Call | None = None
    """What the first call was like."""

    def __post_init__(self) -> None:
        self._follow(self._planned)

    def _follow(self, planned: PlannedGraph) -> None:
        """From now on ``planned`` runs. It may ask for other tiles between two calls."""
        assert planned.assembly is not None, "inference is not planned"
        self._planned, itself = planned, weakref.ref(self)

        def retile(why: Infeasible) -> None:
            if (graph := itself()) is not None:
                graph._between_calls(why)

        planned.assembly.retile = retile

    def __call__(self, *args: Any) -> Any:
        """Run in the tiles in which this step fits. Raises Infeasible: there are none."""
        planned = self._planned
        assert planned.assembly is not None, "inference is not planned"
        self._called = self._called or _Call.now(args)
        try:
            return planned.run(*args)
        except Infeasible as error:
            request = planned.assembly.unplanned_request
            if request is None:
                raise
            why = without_frames(error)
        # Outside of the block that handles the error, whose frames hold the arguments.
        if request in self._asked:
            raise without_frames(self._asked[request])
        with dynamo.nothing_else_compiles():
            if self._planned is planned:  # and no other thread has compiled meanwhile
                self._asked[request] = why
                self._follow(self._compiled(planned.assembly, request, args))
        return self(*args)

    def _between_calls(self, why: Infeasible) -> None:
        """Compile the graph in tiles for what its last plan was refused for, if there are any."""
        before = self._planned.assembly
        assert before is not None, "inference is not planned"
        assert self._called is not None, "a step has run"
        request = before.unplanned_request
        if request is None or request in self._asked:
            return
        args, gone = self._called.inputs_again()
        self._asked[request] = without_frames(why)
        with (
            dynamo.nothing_else_compiles(),
            self._called.ambient(),
            contextlib.suppress(Infeasible),
        ):
            self._follow(self._compiled(before, request, args, gone))

    @hidden_from_modes()
    def _compiled(
        self,
        before: Assembly,
        request: PlanRequest,
        args: Sequence[Any],
        gone: Collection[int] = (),
    ) -> PlannedGraph:
        """The graph in tiles for ``request``; of ``args`` those at ``gone`` are stand-ins.

        Raises Infeasible: there are no such tiles, or Dynamo's guards, which are not made anew, do
        not know how inputs lie in memory into which the graph writes.
        """
        before.release()
        try:
            with autograd.fresh_static_tracing() as context:
                planned = self._plan(self._gm, args, request)
        except Infeasible as error:
            self._asked[request] = without_frames(error)
            raise
        except Exception as error:  # what did not fit is what the user is told
            say_dropped("a step that needs more than its tiles allow", error)
            raise without_frames(self._asked[request]) from None
        written = autograd.written_inputs(context, len(args))
        if not written.isdisjoint(gone):
            raise without_frames(self._asked.pop(request))  # the next call has its inputs
        if shared_memory(args, written):
            raise without_frames(self._asked[request])
        assert planned.assembly is not None, "it trained before"
        planned.assembly.follow(before)
        before.retire()
        state.add_plan(planned.assembly.reported)
        state.add_note("a graph was compiled anew, in other tiles, because its steps needed more")
        return planned
