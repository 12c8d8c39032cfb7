"""Groups that the user named: which modules, in which order, before any of them has run."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredGroup:
    """Modules that one step calls one after the other. It keeps none of them alive."""

    modules: tuple[weakref.ref[Any], ...]

    def parameters(self) -> list[list[torch.nn.Parameter]]:
        """Of each module; empty where one of them is gone."""
        modules = [reference() for reference in self.modules]
        alive = [module for module in modules if module is not None]
        return [list(module.parameters()) for module in alive] if len(alive) == len(modules) else []


class Stages(NamedTuple):
    """What is known of a pipeline's rank before any of it has run."""

    num_stages: int
    """0 where a call is of no stage."""
    num_forwards: int
    """Of one step: one for each stage and microbatch. Torch's runs before the first step, which
    find out shapes, have fewer."""
    share: float | None = None
    """The part of what a microbatch of this stage saves that goes to the host; None: not said."""
    kept: Callable[[], Sequence[torch.UntypedStorage]] = tuple
    """Memory of the stages that stays from step to step: where inputs and gradients come in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredStages:
    """The stages of a pipeline that this rank runs. It keeps none of them alive."""

    modules: tuple[weakref.ref[Any], ...]
    num_microbatches: int
    shares: tuple[float, ...] = ()
    """Per stage ``Stages.share``; empty: not said."""
    kept: Callable[[], Sequence[torch.UntypedStorage]] = tuple
    """As ``Stages.kept``."""

    def is_gone(self) -> bool:
        """True where no module is there any more."""
        return all(known() is None for known in self.modules)

    def index_of(self, parameter: torch.nn.Parameter) -> int | None:
        """Which of the stages has ``parameter``."""
        for at, known in enumerate(self.modules):
            module = known()
            if module is not None and any(parameter is own for own in module.parameters()):
                return at
        return None


@dataclass(slots=True)
class _Declared:
    groups: list[DeclaredGroup] = field(default_factory=list)
    stages: list[DeclaredStages] = field(default_factory=list)


_declared = _Declared()


def declare(modules: Sequence[torch.nn.Module]) -> None:
    """From now on the modules are a group."""
    alive = [known for known in _declared.groups if known.parameters()]
    group = DeclaredGroup(modules=tuple(weakref.ref(module) for module in modules))
    _declared.groups = [*alive, group]


def declare_stages(
    *modules: torch.nn.Module,
    num_microbatches: int,
    shares: tuple[float, ...] = (),
    kept: Callable[[], Sequence[torch.UntypedStorage]] = tuple,
) -> None:
    """From now on the live steps of ``modules`` are microbatches of one rank of a pipeline."""
    alive = [known for known in _declared.stages if not known.is_gone()]
    refs = tuple(weakref.ref(module) for module in modules)
    made = DeclaredStages(modules=refs, num_microbatches=num_microbatches, shares=shares, kept=kept)
    _declared.stages = [*alive, made]


def stages_around(args: Sequence[Any]) -> Stages:
    """The stages of the rank one of which is called with ``args``."""
    given = next((value for value in args if isinstance(value, torch.nn.Parameter)), None)
    for known in _declared.stages if given is not None else ():
        at = None if given is None else known.index_of(given)
        if at is not None:
            num_forwards = len(known.modules) * known.num_microbatches
            share = known.shares[at] if known.shares else None
            return Stages(len(known.modules), num_forwards, share, known.kept)
    return Stages(0, 0)


def declared_around(args: Sequence[Any]) -> list[list[torch.nn.Parameter]]:
    """The parameters of each module of the group whose first module is called with ``args``.

    They are in the order of the graph's arguments, and start with the same one. Empty: the call is
    of no such group, or of a module that has other parameters than the rest.
    """
    given = [value for value in args if isinstance(value, torch.nn.Parameter)]
    for group in _declared.groups:
        found = group.parameters()
        if not given or not found:
            continue
        places = {id(parameter): at for at, parameter in enumerate(found[0])}
        counts = {len(own) for own in found}
        if all(id(parameter) in places for parameter in given) and len(counts) == 1:
            order = [places[id(parameter)] for parameter in given]
            return [[own[at] for at in order] for own in found]
    return []
