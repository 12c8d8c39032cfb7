"""Eager versions of operators that exist for Inductor only, or that take too much memory in eager.

Inductor replaces random operators by pure functions of a seed before memo sees the graph. Here too
the same seed gives the same numbers, so that a mask can be recomputed; they differ from those of
Inductor's kernels. On a CPU they come from a generator with that seed. A device's generator takes
its seed from the host, which would wait for the device. So there SplitMix64 makes the numbers
(Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), by operators that read
the seed on the device.

Eager's ``copy``, ``slice_scatter`` and their like copy the whole storage of their first input,
which in a step is the arena, and their result keeps that copy alive. ``auto_functionalized_v2``,
which wraps a custom operator that writes, does so for each tensor that is written.
"""

import functools
import math
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
    """Returns float32 numbers of ``mode`` rand or randn, equal ones for equal ``seed + offset``."""
    seed = seed + offset
    if seed.device.type != "cpu":
        number = {"rand": _uniform, "randn": _normal}[mode]
        return _in_pieces(size, seed, torch.float32, number)
    draw = {"rand": torch.rand, "randn": torch.randn}[mode]
    generator = _generator(seed)
    return draw(list(size), device=seed.device, generator=generator, dtype=torch.float32)


def _randint(
    low: int, high: int, size: Any, seed: torch.Tensor, *, offset: int = 0
) -> torch.Tensor:
    """Returns integers of [low, high); equal ``seed + offset`` give equal ones."""
    seed = seed + offset
    if seed.device.type != "cpu":

        def number(bits: torch.Tensor) -> torch.Tensor:
            return _shifted(bits, 1).remainder_(high - low).add_(low)

        return _in_pieces(size, seed, torch.int64, number)
    generator = _generator(seed)
    return torch.randint(low, high, list(size), device=seed.device, generator=generator)


PIECE = 2**20
"""Numbers that are drawn at once on a device, so that the memory beside the result stays small."""
PIECE_ITEM_BYTES = 2 * torch.int64.itemsize
"""Bytes beside the result for each of them."""

_STEP, _FIRST, _SECOND = (
    number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""SplitMix64's constants, as signed 64-bit numbers."""
_FLOAT_BITS = 24
"""Bits of a float32's fraction."""


def _in_pieces(
    size: Any,
    seed: torch.Tensor,
    dtype: torch.dtype,
    number: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Returns a tensor of ``size``; ``number`` makes each element from 64 random bits."""
    result = torch.empty(list(size), dtype=dtype, device=seed.device)
    flat = result.view(-1)
    for start in range(0, flat.numel(), PIECE):
        piece = flat[start : start + PIECE]
        piece.copy_(number(_bits(seed, start, start + piece.numel())))
    return result


def _bits(seed: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Returns SplitMix64's numbers ``start`` to ``end``, 64 bits each."""
    bits = torch.arange(start + 1, end + 1, device=seed.device).mul_(_STEP).add_(seed)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(factor)
    return bits.bitwise_xor_(_shifted(bits, 31))


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shifts right, filling with zeros: torch's own shift repeats the sign."""
    return (bits >> by).bitwise_and_(2 ** (64 - by) - 1)


def _uniform(bits: torch.Tensor, half: int = 0) -> torch.Tensor:
    """Returns numbers of [0, 1) from one 32-bit half of each of ``bits``, which is overwritten."""
    integers = bits.view(torch.int32)[half::2].bitwise_right_shift_(32 - _FLOAT_BITS)
    return integers.bitwise_and_(2**_FLOAT_BITS - 1).float().mul_(2.0**-_FLOAT_BITS)


def _normal(bits: torch.Tensor) -> torch.Tensor:
    """Returns normal numbers by Box and Muller: a length and an angle, from the two halves."""
    length = _uniform(bits).add_(2.0 ** -(_FLOAT_BITS + 1)).log_().mul_(-2).sqrt_()
    return _uniform(bits, half=1).mul_(2 * math.pi).cos_().mul_(length)


def _scatter(view: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns an operator that copies ``base``, and ``source`` over ``view`` of the copy."""

    def run(base: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = base.clone()
        view(result, *args, **kwargs).copy_(source)
        return result

    return run


def _as_strided_scatter(
    base: torch.Tensor, src: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None
) -> torch.Tensor:
    """As ``_scatter``; the view may also reach memory between and beside elements of ``base``."""
    base_offset = base.storage_offset()
    offset = base_offset if storage_offset is None else storage_offset
    begin = min(base_offset, offset)
    end = max(base_offset + _extent(base.size(), base.stride()), offset + _extent(size, stride))
    result = base.as_strided((end - begin,), (1,), begin).clone()
    result.as_strided(size, stride, offset - begin).copy_(src)
    return result.as_strided(base.size(), base.stride(), base_offset - begin)


def _extent(size: Any, stride: Any) -> int:
    """Elements from the first to the last of a tensor that is not empty."""
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def _copy(base: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    result = torch.empty_like(base)
    if source.dim() == 0 and source.device.type == "cpu":  # a number; to copy it waits for a device
        return result.fill_(source.to(base.dtype))
    return result.copy_(source, non_blocking=non_blocking)


def _auto_functionalized(operator: Any, **given: Any) -> Any:
    """Runs torch's own, with copies of only the tensors that ``operator`` writes, not storages."""
    bases = [None if base is None else _compact_copy(base) for base in given.pop("_all_bases")]
    wrapped = torch.ops.higher_order.auto_functionalized_v2
    return wrapped(operator, _all_bases=bases, _only_clone_these_bases=(), **given)


def _compact_copy(base: torch.Tensor) -> torch.Tensor:
    """Copies ``base`` with its strides, without the rest of its storage."""
    copy = torch.empty_strided(base.size(), base.stride(), dtype=base.dtype, device=base.device)
    return copy.copy_(base)


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
    """Counts from ``start``; types that eager cannot count in are counted in int64."""
    counted = torch.int64 if dtype in _WITHOUT_ARANGE else dtype
    settings = {"dtype": counted, "device": device, "requires_grad": requires_grad}
    result = torch.ops.prims.iota.default(length, start=start, step=step, **settings)
    return result if counted is dtype else result.to(dtype)


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    """Returns operator -> its eager version here."""
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
        torch.ops.higher_order.auto_functionalized_v2: _auto_functionalized,
    }


def runnable(target: Any) -> Callable[..., Any]:
    """Returns the eager version of ``target``, or ``target``."""
    return _table().get(target, target)
