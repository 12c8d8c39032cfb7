"""Watches which gradients are freed once autograd has them: a plan need not count those to the end.

A gradient that is added to an existing ``.grad`` is freed, unless autograd waits for other parts of
it (a weight that other code uses too). One that goes to the host (``memo_compile.offload``) is
freed too, and one that a hook uses up (an optimizer in the backward); only a step shows the latter.
Positions are those of the graph's inputs.
"""

import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from memo_runtime.host_state import gradient_goes_home

from memo_compile.torch_private import autograd

Positions = tuple[int, ...]


@dataclass(slots=True)
class GradientWatch:
    """What steps have shown of one graph's gradients."""

    trained: frozenset[int] = frozenset()
    """Inputs for which the backward makes a gradient that may leave early; empty: none does."""
    used_up: frozenset[int] = frozenset()
    """Gradients that were freed after their hooks, though no ``.grad`` existed to add them to."""
    _stayed: frozenset[int] = frozenset()
    """Gradients that stayed when they should have been freed: no plan counts on them again."""

    def leaving(self, leaves: Sequence[Any], expected: str = "auto") -> Positions:
        """Returns the gradients that will be freed early in a step whose inputs are ``leaves``.

        ``expected`` is the option ``gradients``, where no step runs yet.
        """
        by_option = {"auto": _is_added, "fresh": lambda leaf: False, "accumulated": _is_leaf}
        will_be_added = by_option[expected]
        return tuple(
            at
            for at in sorted(self.trained - self._stayed)
            if at in self.used_up or _goes_home(leaves[at]) or will_be_added(leaves[at])
        )

    def all_leaving(self, leaves: Sequence[Any]) -> Positions:
        """Returns all that may leave early, if every trained one of ``leaves`` goes to the host."""
        trained = [leaf for leaf in leaves if _is_leaf(leaf)]
        all_go = bool(trained) and all(map(_goes_home, trained))
        return tuple(sorted(self.trained)) if all_go else ()

    def may_be_used_up(self, leaves: Sequence[Any]) -> Positions:
        """Returns all that may leave early, if each has a hook that may use it up; else none."""
        leaving = [at for at in sorted(self.trained - self._stayed) if _is_leaf(leaves[at])]
        have_hooks = all(autograd.has_gradient_hook(leaves[at]) for at in leaving)
        return tuple(leaving) if have_hooks else ()

    def follow(self, leaves: Sequence[Any]) -> "HandedGradients":
        """Watches a step whose inputs are ``leaves``. Keeps none of them alive."""
        refs = {at: weakref.ref(leaves[at]) for at in self.trained if _is_leaf(leaves[at])}
        going_home = {at for at in refs if _goes_home(leaves[at])}
        return HandedGradients(refs, (self.used_up | going_home) - self._stayed)

    def learn(self, used_up: Collection[int], stayed: Collection[int]) -> None:
        """Takes over what a step has shown. If a used-up gradient stayed, none counts any more."""
        is_broken = not self.used_up.isdisjoint(stayed)
        self._stayed |= frozenset(stayed)
        self.used_up = (
            frozenset() if is_broken else (self.used_up | frozenset(used_up)) - self._stayed
        )


@dataclass(slots=True)
class HandedGradients:
    """Follows one backward's gradients from the call that made them until they are freed."""

    leaves: dict[int, weakref.ref[Any]]
    used_before: frozenset[int]
    """Gradients that hooks used up in earlier steps, or that go to the host."""
    _added: frozenset[int] = frozenset()
    """Gradients that will be added to an existing ``.grad``."""
    _follows: bool = True
    _handed: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """Position -> weak reference to a gradient's storage, and its bytes."""

    def begin(self, *, follows: bool = True) -> None:
        """Notes, when a backward begins, which gradients have a ``.grad`` to be added to.

        A backward that keeps gradients (``torch.autograd.grad``), or drops some, is not followed.
        """
        self._follows = follows
        self._added = frozenset(at for at, leaf in self.leaves.items() if _is_added(leaf()))

    def handed(self, positions: Sequence[int], gradients: Sequence[Any]) -> None:
        """Follows ``gradients``, which autograd gets now."""
        for at, gradient in zip(positions, gradients, strict=True):
            if self._follows and at in self.leaves and gradient is not None:
                (self._handed[at],) = autograd.storages_of([gradient])

    def still_there(self) -> Iterator[tuple[int, int]]:
        """Yields (position, bytes) of gradients that should be freed and are not.

        Not counted: a gradient that became ``.grad`` itself, because the user freed the one that
        existed in the forward. The plan counts that one to the end of the step.
        """
        for at, (storage, size_bytes) in self._handed.items():
            if at in self._added | self.used_before and not storage.expired():
                yield at, size_bytes

    def used_up(self) -> Iterator[int]:
        """Yields the gradients that are freed though there was no ``.grad`` to add them to."""
        for at, (storage, _) in self._handed.items():
            if at not in self._added and storage.expired() and not _is_added(self.leaves[at]()):
                yield at


def _is_leaf(value: Any) -> bool:
    """True for a tensor to whose ``.grad`` autograd adds."""
    return isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad


def _goes_home(value: Any) -> bool:
    return _is_leaf(value) and gradient_goes_home(value)


def _is_added(value: Any) -> bool:
    return _is_leaf(value) and value.grad is not None
