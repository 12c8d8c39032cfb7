"""Compiles a graph anew, in other tiles, for a step that does not fit in the tiles it has.

Tiles are chosen when the graph is compiled, and the fastest that fit are not those that need least.
Later steps may need more: gradients are kept, or results are used outside. What several modules
that share the graph need is known when their first step ends: then other tiles are compiled between
two steps, not on top of the memory of the next.
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
    """A compiled graph, and its planned step."""

    run: Callable[..., Any]
    assembly: Assembly | None
    """The step that it runs; None for inference."""


Plan = Callable[[fx.GraphModule, Sequence[Any], PlanRequest], PlannedGraph]
"""Compiles a copy of a graph in tiles in which a request fits. Raises Infeasible: in none."""


class _Input(NamedTuple):
    """An input of a call; a tensor is not kept alive."""

    value: Any
    """A weak reference where it is a tensor."""
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    requires_grad: bool = False
    has_history: bool = False

    @classmethod
    def of(cls, value: Any) -> "_Input":
        """Describes ``value``."""
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
        """Returns a tensor of that form; unwritten memory of a CPU takes no pages."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)

    def current(self) -> Any:
        """Returns the input; None where it is a tensor that is freed."""
        return self.value() if isinstance(self.value, weakref.ref) else self.value

    def stand_in(self) -> torch.Tensor:
        """Returns a tensor that compiles like the one that is freed."""
        if self.has_history:
            return not_a_leaf(self.memory)
        return self.memory().requires_grad_(self.requires_grad)


class _Call(NamedTuple):
    """The inputs and modes of a call, from which the graph can be compiled again."""

    inputs: list[_Input]
    autocast: dict[str, torch.dtype | None]
    """Kind of device -> the dtype that operators are cast to; None: they are not."""

    @classmethod
    def now(cls, args: Sequence[Any]) -> "_Call":
        """Describes a call with ``args`` under the modes of now."""
        kinds = {value.device.type for value in args if isinstance(value, torch.Tensor)} | {"cpu"}
        autocast = {
            kind: torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            for kind in sorted(kinds)
        }
        return cls([_Input.of(value) for value in args], autocast)

    def inputs_and_stand_ins(self) -> tuple[list[Any], frozenset[int]]:
        """Returns the inputs, and the positions of stand-ins for those that are freed."""
        values = [each.current() for each in self.inputs]
        freed = frozenset(
            at
            for at, (each, value) in enumerate(zip(self.inputs, values, strict=True))
            if value is None and each.value is not None
        )
        for at in freed:
            values[at] = self.inputs[at].stand_in()
        return values, freed

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Inside, torch traces under the modes of the call."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, dtype in self.autocast.items():
                cast = torch.autocast(kind, dtype=dtype, enabled=dtype is not None)
                stack.enter_context(cast)
            yield


@dataclass(eq=False)
class Retiled:
    """A graph in tiles that are chosen anew where a replanned step does not fit."""

    _gm: fx.GraphModule
    _plan: Plan
    _planned: PlannedGraph
    _tried: dict[PlanRequest, Infeasible] = field(default_factory=dict)
    """Requests for which other tiles were tried, each with its error: none is compiled twice."""
    _first_call: _Call | None = None

    def __post_init__(self) -> None:
        self._follow(self._planned)

    def _follow(self, planned: PlannedGraph) -> None:
        """Runs ``planned`` from now on; it may ask for other tiles between two calls."""
        assert planned.assembly is not None, "inference is not planned"
        self._planned, itself = planned, weakref.ref(self)

        def retile(why: Infeasible) -> None:
            if (graph := itself()) is not None:
                graph._between_calls(why)

        planned.assembly.retile = retile

    def __call__(self, *args: Any) -> Any:
        """Runs in tiles in which this step fits. Raises Infeasible: there are none."""
        planned = self._planned
        assert planned.assembly is not None, "inference is not planned"
        self._first_call = self._first_call or _Call.now(args)
        try:
            return planned.run(*args)
        except Infeasible as error:
            request = planned.assembly.unplanned_request
            if request is None:
                raise
            why = without_frames(error)
        # Outside of the block that handles the error, whose frames hold the arguments.
        if request in self._tried:
            raise without_frames(self._tried[request])
        with dynamo.nothing_else_compiles():
            if self._planned is planned:  # and no other thread has compiled meanwhile
                self._tried[request] = why
                self._follow(self._compiled(planned.assembly, request, args))
        return self(*args)

    def _between_calls(self, why: Infeasible) -> None:
        """Compiles the graph in tiles in which the last refused request fits, if there are any."""
        assembly = self._planned.assembly
        assert assembly is not None, "inference is not planned"
        assert self._first_call is not None, "a step has run"
        request = assembly.unplanned_request
        if request is None or request in self._tried:
            return
        args, stand_ins = self._first_call.inputs_and_stand_ins()
        self._tried[request] = without_frames(why)
        with (
            dynamo.nothing_else_compiles(),
            self._first_call.modes(),
            contextlib.suppress(Infeasible),  # the next step that asks for so much gets it
        ):
            self._follow(self._compiled(assembly, request, args, stand_ins))

    @hidden_from_modes()
    def _compiled(
        self,
        before: Assembly,
        request: PlanRequest,
        args: Sequence[Any],
        stand_ins: Collection[int] = (),
    ) -> PlannedGraph:
        """Compiles the graph in tiles for ``request``; ``args`` at ``stand_ins`` are no real ones.

        Raises Infeasible: there are no such tiles, or the graph writes into inputs that share
        memory, which Dynamo's guards (they are not made anew) do not check.
        """
        before.release()
        try:
            with autograd.fresh_static_tracing() as context:
                planned = self._plan(self._gm, args, request)
        except Infeasible as error:
            self._tried[request] = without_frames(error)
            raise
        except Exception as error:  # what did not fit is what the user is told
            say_dropped("a step that needs more than its tiles allow", error)
            raise without_frames(self._tried[request]) from None
        written = autograd.written_inputs(context, len(args))
        if not written.isdisjoint(stand_ins):
            raise without_frames(self._tried.pop(request))  # the next call has its inputs
        if shared_memory(args, written):
            raise without_frames(self._tried[request])
        assert planned.assembly is not None, "it trained before"
        planned.assembly.follow(before)
        before.retire()
        state.add_plan(planned.assembly.reported)
        state.add_note("a graph was compiled anew, in other tiles, because its steps needed more")
        return planned
