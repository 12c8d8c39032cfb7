"""Eager versions of the operators that exist for Inductor only.

Inductor replaces random operators by pure functions of a seed before memo sees the graph. Here
they draw from a generator of that seed: the same seed gives the same numbers, so that a mask can
be recomputed. The numbers differ from those of Inductor's kernels.
"""

from collections.abc import Callable
from typing import Any

import torch

_MAX_SEED = 2**63 - 1


def _seeds(count: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, _MAX_SEED, (count,), device=device, dtype=torch.int64)


def _lookup_seed(seeds: torch.Tensor, index: int) -> torch.Tensor:
    return seeds[index].clone()


def _generator(seed: torch.Tensor) -> torch.Generator:
    generator = torch.Generator(device=seed.device)
    generator.manual_seed(int(seed.item()))
    return generator


def _random(size: Any, seed: torch.Tensor, mode: str, *, offset: int = 0) -> torch.Tensor:
    draw = {"rand": torch.rand, "randn": torch.randn}[mode]
    generator = _generator(seed + offset)
    return draw(list(size), device=seed.device, generator=generator, dtype=torch.float32)


def _randint(
    low: int, high: int, size: Any, seed: torch.Tensor, *, offset: int = 0
) -> torch.Tensor:
    generator = _generator(seed + offset)
    return torch.randint(low, high, list(size), device=seed.device, generator=generator)


def _table() -> dict[Any, Callable[..., Any]]:
    prims = torch.ops.prims
    found: dict[str, Callable[..., Any]] = {
        "inductor_seeds": _seeds,
        "inductor_lookup_seed": _lookup_seed,
        "inductor_random": _random,
        "inductor_randint": _randint,
    }
    return {getattr(prims, name).default: run for name, run in found.items()}


_EAGER: dict[Any, Callable[..., Any]] = {}


def runnable(target: Any) -> Callable[..., Any]:
    """``target``, or its eager version."""
    if not _EAGER:
        _EAGER.update(_table())
    return _EAGER.get(target, target)
