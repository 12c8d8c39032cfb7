"""The members of a group: how they are told apart, and what gradients they have."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memo_compile.driver.around import parameters_around
from memo_compile.driver.facts import gradient_bytes
from memo_compile.step.group import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMembers:
    """A group, and its members' parameters, which it does not keep alive."""

    group: Group
    """Without gradients of steps before."""
    keys: tuple[int | None, ...]
    """Where the first parameter of each member lies."""
    parameters: tuple[weakref.ref[Any], ...]
    """Of all members, and of the model around them."""
    existing_bytes: int = 0
    """Gradients of steps before that are planned for."""
    is_assumed: bool = False
    """Nothing was seen of it yet: it was declared."""
    num_dropped: int = 0
    """Of a checkpoint: how many forwards were dropped before the first was run again."""

    @classmethod
    def of(
        cls,
        keys: tuple[int | None, ...],
        found: Sequence[torch.nn.Parameter],
        group: Group,
        *,
        is_assumed: bool = False,
        num_dropped: int = 0,
    ) -> "GroupMembers":
        """The members with parameters ``found``."""
        all_of_them = (*found, *parameters_around(found))
        return cls(
            group=group,
            keys=keys,
            parameters=tuple(weakref.ref(own) for own in all_of_them),
            is_assumed=is_assumed,
            num_dropped=num_dropped,
        )

    def existing_gradient_bytes(self) -> int:
        """Bytes of the gradients that exist now."""
        alive = {id(own): own for own in (reference() for reference in self.parameters)}
        return gradient_bytes(list(alive.values()))
