"""Records the groups and pipeline stages that the user has declared, before any module has run."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredGroup:
    """Modules that one step calls one after the other; keeps none of them alive."""

    modules: tuple[weakref.ref[Any], ...]

    def parameters(self) -> list[list[torch.nn.Parameter]]:
        """Returns those of each module; empty where one of them is gone."""
        modules = [reference() for reference in self.modules]
        alive = [module for module in modules if module is not None]
        return [list(module.parameters()) for module in alive] if len(alive) == len(modules) else []


class Stages(NamedTuple):
    """The stages that a rank of a pipeline runs, as the user has declared them."""

    num_stages: int
    """0 where a call is of no stage."""
    num_forwards: int
    """Forwards in one step: one for each stage and microbatch. When torch infers shapes before the
    first step it runs fewer."""
    share: float | None = None
    """The part of what a microbatch of this stage saves that goes to the host; None: not said."""
    kept: Callable[[], Sequence[torch.UntypedStorage]] = tuple
    """Returns memory that stays from step to step: the buffers for received inputs, gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredStages:
    """The stages of a pipeline that this rank runs, as ``Stages``; keeps none of them alive."""

    modules: tuple[weakref.ref[Any], ...]
    num_microbatches: int
    shares: tuple[float, ...] = ()
    """Per stage ``Stages.share``; empty: not said."""
    kept: Callable[[], Sequence[torch.UntypedStorage]] = tuple
    """As ``Stages.kept``."""

    def is_gone(self) -> bool:
        """True where all modules are freed."""
        return all(module() is None for module in self.modules)

    def index_of(self, parameter: torch.nn.Parameter) -> int | None:
        """Returns which of the stages has ``parameter``."""
        for at, reference in enumerate(self.modules):
            module = reference()
            if module is not None and any(parameter is each for each in module.parameters()):
                return at
        return None


_groups: list[DeclaredGroup] = []
_stages: list[DeclaredStages] = []


def declare(modules: Sequence[torch.nn.Module]) -> None:
    """Declares ``modules`` as a group."""
    global _groups
    alive = [group for group in _groups if group.parameters()]
    group = DeclaredGroup(modules=tuple(weakref.ref(module) for module in modules))
    _groups = [*alive, group]


def declare_stages(
    *modules: torch.nn.Module,
    num_microbatches: int,
    shares: tuple[float, ...] = (),
    kept: Callable[[], Sequence[torch.UntypedStorage]] = tuple,
) -> None:
    """Declares ``modules`` as one rank's stages; the other arguments as in ``DeclaredStages``."""
    global _stages
    alive = [stages for stages in _stages if not stages.is_gone()]
    refs = tuple(weakref.ref(module) for module in modules)
    stages = DeclaredStages(
        modules=refs, num_microbatches=num_microbatches, shares=shares, kept=kept
    )
    _stages = [*alive, stages]


def stages_around(args: Sequence[Any]) -> Stages:
    """Returns the stages of the rank, one of which is called with ``args``."""
    first = next((value for value in args if isinstance(value, torch.nn.Parameter)), None)
    if first is not None:
        for stages in _stages:
            at = stages.index_of(first)
            if at is not None:
                num_stages = len(stages.modules)
                share = stages.shares[at] if stages.shares else None
                return Stages(num_stages, num_stages * stages.num_microbatches, share, stages.kept)
    return Stages(0, 0)


def declared_around(args: Sequence[Any]) -> list[list[torch.nn.Parameter]]:
    """Returns the parameters of each module of the group whose first module has ``args``.

    Each list is in the order of ``args``. Empty: the call is of no declared group's first module,
    or the modules have different numbers of parameters.
    """
    first_parameters = [value for value in args if isinstance(value, torch.nn.Parameter)]
    for group in _groups:
        by_module = group.parameters()
        if not first_parameters or not by_module:
            continue
        places = {id(parameter): at for at, parameter in enumerate(by_module[0])}
        counts = {len(parameters) for parameters in by_module}
        if all(id(parameter) in places for parameter in first_parameters) and len(counts) == 1:
            order = [places[id(parameter)] for parameter in first_parameters]
            return [[parameters[at] for at in order] for parameters in by_module]
    return []
