"""Counts the forward's results that the user holds: assumed before the first step, then watched.

A graph does not show what becomes of its results. Under a budget they count as held to the end of
the step, and those of the step before until they are replaced (``out = model(x)`` in a loop). A
result that is held longer is noticed before the next forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from memo_compile.analysis.joint_units import is_tangent
from memo_compile.config import MemoConfig
from memo_compile.step.problem import Phase, Problem, Storage
from memo_compile.torch_private import autograd

LARGE_RESULT_BYTES = 2**16
"""Results of more bytes are followed; losses and small statistics lie within a plan's slack."""

LOSS_TENSORS = 4
"""Most float32 tensors of its input's shape that a loss outside the graph holds until it returns
the gradient: cross_entropy of shifted logits holds a copy of them, the log-probabilities, their
gradient, and that gradient with zeros for the last token."""


def result_storages(problem: Problem, results: Sequence[str | None]) -> dict[int, str]:
    """Returns, by position of a result, the value whose ordinary memory it keeps alive.

    Views, and results that share one storage, lead to the same value.
    """
    root: dict[str, str] = {}
    for call in problem.calls:
        for output, value in problem.made_by(call):
            if output.storage is Storage.EXTERNAL:
                root[value] = value if output.same_as is None else call.outputs[output.same_as]
            elif output.storage is Storage.INPUT and output.index is not None:
                source = call.inputs[output.index]
                if source in root:
                    root[value] = root[source]
    return {at: root[value] for at, value in enumerate(results) if value in root}


def held_bytes(problem: Problem, results: Sequence[str | None]) -> int:
    """Returns the bytes of the large results, each storage once."""
    sizes = {
        value: output.size_bytes
        for call in problem.calls
        if call.phase is Phase.FORWARD
        for output, value in problem.made_by(call)
    }
    roots = set(result_storages(problem, results).values())
    return sum(sizes[value] for value in roots if sizes[value] > LARGE_RESULT_BYTES)


def assume_held(
    problem: Problem, results: Sequence[str | None], backward: fx.Graph, config: MemoConfig
) -> Problem:
    """Returns ``problem`` with the results that ``config`` says are held.

    With ``outputs="auto"`` and a budget, all large ones count as held. Of several ``microbatches``
    inputs and results of all stay; else those of the last step stay until this forward returns.
    """
    is_cautious = config.outputs == "auto" and config.memory_budget is not None
    if not is_cautious and config.outputs != "held":
        return problem
    held, num_others = held_bytes(problem, results), config.microbatches - 1
    inputs = problem.fixed.inputs * config.microbatches
    gradients = result_gradients(backward)
    has_inside_loss = _has_loss(gradients) and not config.outside_loss
    return replace(
        problem,
        fixed=replace(problem.fixed, inputs=inputs, earlier_outputs=held * num_others),
        keeps_outputs=held > 0,
        rebound_bytes=0 if num_others else held,
        loss_bytes=0 if has_inside_loss else outside_loss_bytes(gradients),
    )


def _has_loss(gradients: Sequence[Any]) -> bool:
    """True where a result is one number: that is taken for the loss."""
    return any(isinstance(value, torch.Tensor) and value.numel() == 1 for value in gradients)


def outside_loss_bytes(gradients: Sequence[Any]) -> int:
    """Returns the bytes of a loss outside that is computed from results with ``gradients``."""
    num_bytes = 0
    for tensor in gradients:
        if _is_large(tensor):
            has_cast = tensor.element_size() < torch.float32.itemsize  # a copy in float32 as well
            num_bytes += tensor.numel() * torch.float32.itemsize * (LOSS_TENSORS + has_cast)
    return num_bytes


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.nbytes > LARGE_RESULT_BYTES


def result_gradients(backward: fx.Graph) -> list[Any]:
    """Returns the fake gradients of the forward's results that a backward is given."""
    return [node.meta["val"] for node in backward.find_nodes(op="placeholder") if is_tangent(node)]


@dataclass(slots=True)
class LossWatch:
    """Notices a second loss outside of a graph that returns a loss.

    Examples are distillation and a z-loss on returned logits. The gradient of a large result is
    zero unless something outside was computed from it.
    """

    positions: tuple[int, ...]
    """Positions of the large results' gradients among the backward's arguments; empty where the
    graph returns no loss."""
    _seen: torch.Tensor | None = None

    @staticmethod
    def of(backward: fx.Graph) -> "LossWatch":
        """Returns a watch of the arguments of ``backward``."""
        if not _has_loss(result_gradients(backward)):
            return LossWatch(())
        nodes = enumerate(backward.find_nodes(op="placeholder"))
        return LossWatch(
            tuple(at for at, node in nodes if is_tangent(node) and _is_large(node.meta["val"]))
        )

    def look(self, args: Sequence[Any]) -> None:
        """Looks at a backward's arguments. ``is_seen`` is read later: nothing waits for a GPU."""
        for gradient in (args[position] for position in self.positions):
            if self._seen is None:
                pins = gradient.is_cuda
                self._seen = torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=pins)
            with torch.no_grad():
                before = self._seen.to(gradient.device, non_blocking=True)
                self._seen.copy_(_is_nonzero(gradient) | before, non_blocking=True)

    def is_seen(self) -> bool:
        """True once such a loss was noticed."""
        return self._seen is not None and bool(self._seen)


def _is_nonzero(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a truth value, shape (): is any number not 0 (NaN is not).

    ``any`` would take a byte for each number.
    """
    if tensor.element_size() == 1:  # no norm of float8
        return tensor.any()
    return torch.linalg.vector_norm(tensor, ord=torch.inf) != 0


Held = list[tuple[Any, int]]
"""Weak references to storages, and their bytes."""


@dataclass(slots=True)
class ResultWatch:
    """Follows the large results of one graph's forwards; keeps none of them alive.

    Its methods are called in this order: ``begin``, ``returned``, ``begin_backward``, ``end``.
    """

    _last: Held = field(default_factory=list)
    """Results of the forwards since ``begin``."""
    _earlier: Held = field(default_factory=list)
    """Results of the steps before that."""
    _at_entry_bytes: int = 0
    """Bytes of ``_earlier`` when the last forward began."""
    _replaced_bytes: int = 0
    """How many of those bytes were freed before that step's backward."""

    def begin(self) -> tuple[int, int]:
        """Before a forward, while no other is live: returns two numbers of bytes.

        The first counts earlier results that are held, the second those that will last: all but as
        many as the last step's results replaced (``out = model(x)`` in a loop frees the old ``out``
        when the forward returns).
        """
        self._earlier = [*_alive(self._earlier), *_alive(self._last)]
        self._last = []
        held = self._at_entry_bytes = _sum(self._earlier)
        return held, max(0, held - self._replaced_bytes)

    def returned(self, results: Sequence[Any]) -> None:
        """After a forward: follows its large results."""
        self._last += _large(results)

    def begin_backward(self, counted: Sequence[Any]) -> int:
        """Before a backward: returns the bytes of results that are held and not in ``counted``."""
        self._earlier = _alive(self._earlier)
        earlier = _sum(self._earlier)
        self._replaced_bytes = self._at_entry_bytes - earlier
        counted_storages = {storage.cdata for storage, _ in _large(counted)}
        last = [held for held in _alive(self._last) if held[0].cdata not in counted_storages]
        return earlier + _sum(last)

    def end(self) -> int:
        """After a backward: returns the bytes of results that are held, of waiting steps too."""
        self._last = _alive(self._last)
        return _sum(self._last)


def _large(values: Sequence[Any]) -> Held:
    """Returns the storages of large tensors among ``values``."""
    return [storage for storage in autograd.storages_of(values) if storage[1] > LARGE_RESULT_BYTES]


def _alive(held: Held) -> Held:
    return [reference for reference in held if not reference[0].expired()]


def _sum(held: Held) -> int:
    return sum(size for _, size in held)
