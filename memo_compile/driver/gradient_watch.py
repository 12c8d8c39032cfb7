"""Which gradients of a graph are gone once autograd has them, so that a plan need not hold them.

One that is added to an existing ``.grad`` is, unless autograd waits for other parts of it (a weight
that other code uses too). One that a hook uses up is, which only a step shows. Positions are those
of the graph's inputs.
"""

import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memo_compile.torch_private import autograd

Positions = tuple[int, ...]


@dataclass(slots=True)
class GradientWatch:
    """What steps have shown of one graph's gradients."""

    trained: frozenset[int] = frozenset()
    """Inputs for which the backward makes a gradient that may leave early; empty: none does."""
    used_up: frozenset[int] = frozenset()
    """Those that were gone after their hooks, though there was no gradient to add them to."""
    _waited: frozenset[int] = frozenset()
    """Those that were not gone when they should have been: no plan counts on them again."""

    def leaving(self, leaves: Sequence[Any], expected: str = "auto") -> Positions:
        """Those that will be gone in a step whose inputs are ``leaves`` now.

        ``expected`` is the option ``gradients``, where no step runs yet.
        """
        counts = {"auto": _is_added, "fresh": lambda leaf: False, "accumulated": _is_leaf}[expected]
        return tuple(
            at
            for at in sorted(self.trained - self._waited)
            if at in self.used_up or counts(leaves[at])
        )

    def may_be_used_up(self, leaves: Sequence[Any]) -> Positions:
        """All that leave, if each has a hook that may use it up; else none."""
        own = [at for at in sorted(self.trained - self._waited) if _is_leaf(leaves[at])]
        return tuple(own) if all(autograd.has_gradient_hook(leaves[at]) for at in own) else ()

    def follow(self, leaves: Sequence[Any]) -> "HandedGradients":
        """Watches a step whose inputs are ``leaves``. Keeps none of them alive."""
        own = {at: weakref.ref(leaves[at]) for at in self.trained if _is_leaf(leaves[at])}
        return HandedGradients(own, self.used_up - self._waited)

    def learn(self, used_up: Collection[int], waited: Collection[int]) -> None:
        """A step has shown this. Where one hook uses nothing up, none is counted on."""
        broken = not self.used_up.isdisjoint(waited)
        self._waited |= frozenset(waited)
        self.used_up = frozenset() if broken else (self.used_up | frozenset(used_up)) - self._waited


@dataclass(slots=True)
class HandedGradients:
    """One backward's gradients between the call that made them and the end of their memory."""

    leaves: dict[int, weakref.ref[Any]]
    used_before: frozenset[int]
    """Those that hooks used up in steps before."""
    _added: frozenset[int] = frozenset()
    _follows: bool = True
    _handed: dict[int, tuple[Any, int]] = field(default_factory=dict)

    def begin(self, *, follows: bool = True) -> None:
        """The backward begins: see to what gradients will be added.

        One that keeps gradients (``torch.autograd.grad``), or drops some, shows nothing.
        """
        self._follows = follows
        self._added = frozenset(at for at, leaf in self.leaves.items() if _is_added(leaf()))

    def handed(self, positions: Sequence[int], gradients: Sequence[Any]) -> None:
        """Autograd gets these."""
        for at, gradient in zip(positions, gradients, strict=True):
            if self._follows and at in self.leaves and gradient is not None:
                (self._handed[at],) = autograd.storages_of([gradient])

    def still_there(self) -> Iterator[tuple[int, int]]:
        """(position, bytes) of what should be gone and is not.

        What became ``.grad`` because the user freed the one that existed in the forward should not:
        the plan counts that one to the end of the step.
        """
        for at, (storage, size_bytes) in self._handed.items():
            if at in self._added | self.used_before and not storage.expired():
                yield at, size_bytes

    def used_up(self) -> Iterator[int]:
        """Those that are gone without a gradient to which they could be added."""
        for at, (storage, _) in self._handed.items():
            if at not in self._added and storage.expired() and not _is_added(self.leaves[at]()):
                yield at


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad


def _is_added(value: Any) -> bool:
    return _is_leaf(value) and value.grad is not None
