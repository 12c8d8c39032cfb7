"""Gradients reach autograd while the backward of their graph still runs.

AOTAutograd makes one node of a whole graph, so that all its gradients reach autograd at its end.
Before the forward, parameters therefore pass through *gates*: nodes that do nothing in the forward.
In the backward the graph's own node runs the step until its first gradients may leave, and returns
those alone. Each gate runs the next part of the step and returns that part's gradients::

    parameters of the first layer  --- gate 2 ---.
    parameters of the layer behind --- gate 1 --- the graph's node --- loss
    parameters of the last layer ----------------'
    gate 1 hangs on gate 2 by a token: no gate runs before the one of the part before.

So autograd's engine does what it does for a model without memo: it adds up what several users of
one parameter contribute, calls each hook once, and runs what follows from a gradient before the
next gate, since a leaf comes before all other nodes. Where gradients cannot leave early, the
graph's node runs the whole step, and gates pass on what it returns.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from memo_runtime.backward_run import BackwardRun
from memo_runtime.operator_modes import hidden_from_modes
from memo_runtime.run_step import RunHalf

from memo_compile.driver.gradient_watch import HandedGradients
from memo_compile.torch_private import autograd


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardPart:
    """A part of the backward, by positions of the graph's inputs."""

    inputs: tuple[int, ...]
    """Their gradients leave when the part ends."""
    beside: tuple[int, ...] = ()
    """Other inputs in the same memory, which are read for the last time in this part or before."""


_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""AOTAutograd takes others (DTensor) apart, so that inputs and gradients are no pairs."""

RunPart = Callable[[int], Sequence[Any]]
"""Runs part N of a backward, and returns its gradients."""


@dataclass(slots=True, eq=False)
class Gates:
    """The gates of one forward, and its backward while that runs in parts."""

    parts: tuple[BackwardPart, ...]
    """The first is run by the graph's own node, the others by gates."""
    is_proved: bool = False
    """True once the graph was given what the gates returned, each at its input's position."""
    run_part: RunPart | None = None
    """Set while a backward runs in parts."""
    watch: HandedGradients | None = None
    """Follows the gradients of that backward."""

    def begin(self, run: BackwardRun, run_part: RunPart) -> None:
        """Lets gates run the later parts; ends ``run`` if autograd gives the backward up."""
        self.run_part = run_part

        def end() -> None:
            self.run_part = None
            run.abandon()

        def at_end() -> None:
            """Autograd's engine keeps this alive until the backward has ended or failed."""

        weakref.finalize(at_end, end).atexit = False
        autograd.keep_while_backward_runs(at_end)


class Gate(torch.autograd.Function):
    """Passes tensors through the forward; its backward runs a part of the step."""

    @staticmethod
    def forward(ctx: Any, gates: Gates, number: int, token: Any, *inputs: Any) -> Any:
        """Returns a token for the next gate, and ``inputs``."""
        ctx.gates, ctx.number = gates, number
        ctx.set_materialize_grads(False)
        return (inputs[0].new_empty(0), *(value.detach() for value in inputs))

    @staticmethod
    def backward(ctx: Any, token: Any, *given: Any) -> Any:
        """Runs this gate's part; returns its gradients, added to those that came in (``given``)."""
        run_part = ctx.gates.run_part
        if run_part is None:
            return (None, None, None, *given)
        with hidden_from_modes():
            gradients = run_part(ctx.number)
        return (None, None, None, *map(_sum, gradients, given))


def _sum(gradient: Any, given: Any) -> Any:
    if gradient is None or given is None:
        return given if gradient is None else gradient
    return gradient + given


@dataclass(slots=True)
class Gating:
    """Puts the inputs of one graph behind gates."""

    _half: RunHalf | None = None
    _parts: dict[Any, tuple[BackwardPart, ...]] = field(default_factory=dict)
    """By which inputs need a gradient, and which share memory: the parts of ``_half``."""

    def gated(self, half: RunHalf, args: Sequence[Any]) -> Sequence[Any]:
        """Returns ``args`` behind gates, for the graph whose backward is ``half``.

        As they are where gradients are no pairs with ``args``, or all leave in one part.
        """
        if not torch.is_grad_enabled() or len(half.ready) != len(args):
            return args
        if half is not self._half:
            self._half, self._parts = half, {}
        needs = tuple(isinstance(v, torch.Tensor) and v.requires_grad for v in args)
        if any(need and type(value) not in _PLAIN for need, value in zip(needs, args, strict=True)):
            return args
        sharing = autograd.sharing_storage(args)
        key = (needs, tuple(sharing))
        parts = self._parts.get(key)
        if parts is None:
            parts = self._parts[key] = _parts(half, needs, sharing)
        if len(parts) < 2:
            return args
        gates, token, passed = Gates(parts), None, list(args)
        for number in reversed(range(1, len(parts))):
            inputs = parts[number].inputs
            token, *values = Gate.apply(gates, number, token, *(args[at] for at in inputs))
            for at, value in zip(inputs, values, strict=True):
                passed[at] = value
        return passed


def _parts(
    half: RunHalf, needs: Sequence[bool], sharing: Sequence[tuple[int, ...]]
) -> tuple[BackwardPart, ...]:
    """Groups the inputs that need a gradient by how many calls have run when it may leave."""
    sharing_with = {at: positions for positions in sharing for at in positions}
    inputs_by_end: dict[int, list[int]] = {}
    for at, needed in enumerate(needs):
        if needed and half.results[at] is not None:
            read = max(half.read_until[other] for other in sharing_with.get(at, (at,)))
            inputs_by_end.setdefault(max(half.ready[at], read), []).append(at)
    return tuple(
        BackwardPart(
            inputs=tuple(inputs),
            beside=tuple(
                other for at in inputs for other in sharing_with.get(at, ()) if other != at
            ),
        )
        for _, inputs in sorted(inputs_by_end.items())
    )


def prove(args: Sequence[Any]) -> Gates | None:
    """Returns the gates that ``args`` have passed, and sets ``is_proved``; None: they passed none.

    They are proved if each gated input arrives at its own position. AOTAutograd may drop or merge
    inputs, and then positions move.
    """
    gates, num_in_place = None, 0
    for at, value in enumerate(args):
        node = value.grad_fn if isinstance(value, torch.Tensor) else None
        gates_of_value = getattr(node, "gates", None)
        if isinstance(gates_of_value, Gates):
            gates = gates_of_value  # output 0 of a gate is its token
            position = gates.parts[node.number].inputs[value.output_nr - 1]  # type: ignore[union-attr]
            num_in_place += position == at
    if gates is not None:
        gates.is_proved = num_in_place == sum(len(part.inputs) for part in gates.parts[1:])
    return gates


def gates_here() -> Gates | None:
    """Returns the gates behind the autograd node that runs now, if all of them will run after it.

    None where a gate will not, or where the graph of the gradients is recorded too.
    """
    node = None if torch.is_grad_enabled() else autograd.current_node()
    if node is None:
        return None
    behind = [gate for gate, _ in node.next_functions if hasattr(gate, "gates")]
    gates = behind[0].gates if behind else None
    if not isinstance(gates, Gates) or not gates.is_proved or gates.run_part is not None:
        return None
    numbers = {gate.number for gate in behind if gate.gates is gates}
    if len(numbers) != len(gates.parts) - 1 or any(gate.gates is not gates for gate in behind):
        return None
    return gates if all(map(autograd.engine_will_run, behind)) else None


def is_captured() -> bool:
    """True where ``torch.autograd.grad`` keeps gradients instead of adding them."""
    return any(map(autograd.captures, _leaves_behind()))


def adds_all() -> bool:
    """True where this backward adds every gradient: none is kept, none is dropped unread."""
    return not any(
        autograd.captures(leaf) or not autograd.engine_will_run(leaf) for leaf in _leaves_behind()
    )


def _leaves_behind() -> list[Any]:
    """Returns the AccumulateGrad nodes behind the graph whose backward autograd runs now."""
    node = autograd.current_node()
    edges = [edge for edge, _ in node.next_functions if edge is not None]
    for gate in [edge for edge in edges if hasattr(edge, "gates")]:
        edges += (edge for edge, _ in gate.next_functions if edge is not None)
    return [edge for edge in edges if hasattr(edge, "variable")]


def own_leaves(args: Sequence[Any]) -> list[Any]:
    """Returns ``args``; one that has passed a gate is replaced by the leaf in front of it."""
    return [_leaf(value) for value in args]


def _leaf(value: Any) -> Any:
    """Returns the leaf in front of the gate that ``value`` has passed; ``value`` if of none."""
    node = value.grad_fn if isinstance(value, torch.Tensor) else None
    if not isinstance(getattr(node, "gates", None), Gates):
        return value
    edges = node.next_functions  # type: ignore[union-attr]  # the last are those of the inputs
    behind = edges[value.output_nr - 1 - len(node.gates.parts[node.number].inputs)][0]  # type: ignore[union-attr]
    return getattr(behind, "variable", value)
