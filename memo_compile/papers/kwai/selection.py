"""Which bytes of a chunk are offloaded: a prefix of its saved tensors in a fixed order.

Source: Kwai (USENIX ATC 24), section 3. Not offloaded: parameters, tensors below 1 MiB, tables of
rotary embeddings. Views of one storage count once. The largest tensors go first, above alpha 1/2
the smallest: so the tensor that is cut is a large one in both cases, and few stay behind.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from memo_compile.errors import InputError

GRAIN_BYTES = 2**20
"""Offloaded bytes are a multiple of this; smaller tensors are not worth a copy."""

SMALLEST_FIRST_ABOVE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor that the chunk's backward reads."""

    name: str
    size_bytes: int
    storage: str
    """Name of the storage; tensors that share one are aliases."""
    is_activation: bool = True
    """False for parameters and tables of rotary embeddings."""

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise InputError(f"{self.name}: expected at least 0 bytes, got {self.size_bytes}")


def select_prefix(tensors: Sequence[SavedTensor], alpha: float) -> dict[str, int]:
    """The bytes to offload from each tensor's begin, by its name, which is its own.

    Together ceil(alpha x total), rounded up to 1 MiB, never more than there are. The last tensor
    of the prefix may be cut. Equal sizes keep the order of the chunk.

    Raises:
        InputError: ``alpha`` lies outside [0, 1].
    """
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha: expected a share in [0, 1], got {alpha}")
    movable = _movable(tensors)
    total = sum(tensor.size_bytes for tensor in movable)
    wanted = math.ceil(alpha * total)
    left = min(total, -(-wanted // GRAIN_BYTES) * GRAIN_BYTES)
    largest_first = alpha <= SMALLEST_FIRST_ABOVE
    chosen: dict[str, int] = {}
    for tensor in sorted(movable, key=lambda t: -t.size_bytes if largest_first else t.size_bytes):
        if left == 0:
            break
        chosen[tensor.name] = min(left, tensor.size_bytes)
        left -= chosen[tensor.name]
    return chosen


def _movable(tensors: Sequence[SavedTensor]) -> list[SavedTensor]:
    """One tensor, the largest, for each storage that may be offloaded, in order of appearance."""
    largest: dict[str, SavedTensor] = {}
    for tensor in tensors:
        known = largest.get(tensor.storage)
        if known is None or tensor.size_bytes > known.size_bytes:
            largest[tensor.storage] = tensor
    fixed = {t.storage for t in tensors if not t.is_activation}
    return [t for t in largest.values() if t.storage not in fixed and t.size_bytes >= GRAIN_BYTES]
