"""Eager versions of operators that exist for Inductor only, or that take too much memory in eager.

Inductor replaces random operators by pure functions of a seed before memo sees the graph. Here
they draw from a generator of that seed: the same seed gives the same numbers, so that a mask can
be recomputed. The numbers differ from those of Inductor's kernels.

Eager's ``copy``, ``slice_scatter`` and their like copy the whole storage of their first input,
which in a step is the arena, and their result keeps that copy alive.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

_MAX_SEED = 2**63 - 1


def _seeds(count: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, _MAX_SEED, (count,), device=device, dtype=torch.int64)


def _lookup_seed(seeds: torch.Tensor, index: int) -> torch.Tensor:
    return seeds[index].clone()


def _generator(seed: torch.Tensor) -> torch.Generator:
    return torch.Generator(device=seed.device).manual_seed(int(seed.item()))


def _random(size: Any, seed: torch.Tensor, mode: str, *, offset: int = 0) -> torch.Tensor:
    draw = {"rand": torch.rand, "randn": torch.randn}[mode]
    generator = _generator(seed + offset)
    return draw(list(size), device=seed.device, generator=generator, dtype=torch.float32)


def _randint(
    low: int, high: int, size: Any, seed: torch.Tensor, *, offset: int = 0
) -> torch.Tensor:
    generator = _generator(seed + offset)
    return torch.randint(low, high, list(size), device=seed.device, generator=generator)


def _scatter(view: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What ``view`` shows of a copy of the first input is overwritten with the second."""

    def run(base: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = base.clone()
        view(result, *args, **kwargs).copy_(source)
        return result

    return run


def _as_strided_scatter(
    base: torch.Tensor,
    source: torch.Tensor,
    size: Any,
    stride: Any,
    storage_offset: int | None = None,
) -> torch.Tensor:
    """As ``_scatter``; what is overwritten may lie between and beside the elements of ``base``."""
    own = base.storage_offset()
    offset = own if storage_offset is None else storage_offset
    begin = min(own, offset)
    end = max(own + _extent(base.size(), base.stride()), offset + _extent(size, stride))
    result = base.as_strided((end - begin,), (1,), begin).clone()
    result.as_strided(size, stride, offset - begin).copy_(source)
    return result.as_strided(base.size(), base.stride(), own - begin)


def _extent(size: Any, stride: Any) -> int:
    """Elements from the first to the last of a tensor that is not empty."""
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def _copy(base: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return torch.empty_like(base).copy_(source, non_blocking=non_blocking)


_WITHOUT_ARANGE = (torch.uint16, torch.uint32, torch.uint64)
"""Types of numbers that eager cannot count in; Inductor takes them for short ranges."""


def _iota(
    length: int,
    *,
    start: int,
    step: int,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> torch.Tensor:
    counted = torch.int64 if dtype in _WITHOUT_ARANGE else dtype
    settings = {"dtype": counted, "device": device, "requires_grad": requires_grad}
    made = torch.ops.prims.iota.default(length, start=start, step=step, **settings)
    return made if counted is dtype else made.to(dtype)


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    aten, prims = torch.ops.aten, torch.ops.prims
    return {
        prims.iota.default: _iota,
        prims.inductor_seeds.default: _seeds,
        prims.inductor_lookup_seed.default: _lookup_seed,
        prims.inductor_random.default: _random,
        prims.inductor_randint.default: _randint,
        aten.copy.default: _copy,
        aten.as_strided_scatter.default: _as_strided_scatter,
        aten.slice_scatter.default: _scatter(aten.slice.Tensor),
        aten.select_scatter.default: _scatter(aten.select.int),
        aten.diagonal_scatter.default: _scatter(aten.diagonal.default),
    }


def runnable(target: Any) -> Callable[..., Any]:
    """``target``, or its eager version."""
    return _table().get(target, target)
