"""The configurations that divide a model over GPUs, as columns.

tp in 1, 2, 4, 8; cp in 1..16; pp divides the layers; layers per chunk divides a stage; three
checkpoint policies; dp takes what is left, with tp * cp * pp dividing the GPUs.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from memo_compile.costs.models import ModelShape
from memo_compile.errors import require_at_least
from memo_compile.papers.kwai.offload import Checkpoint, ParallelConfig

TP_SIZES = (1, 2, 4, 8)
CP_SIZES = tuple(range(1, 17))
CHECKPOINTS = tuple(Checkpoint)
SIZES = ("tp", "cp", "pp", "dp", "layers_per_chunk")
"""The columns that are numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Configurations as float arrays of one length, so that a formula is one expression."""

    tp: Any
    cp: Any
    pp: Any
    dp: Any
    layers_per_chunk: Any
    checkpoint: Any
    """Index into CHECKPOINTS, an integer array."""

    def __len__(self) -> int:
        return len(self.tp)


def enumerate_space(shape: ModelShape, gpus: int) -> Columns:
    """Returns each configuration of ``shape`` on exactly ``gpus`` GPUs; InputError below one."""
    require_at_least(1, {"gpus": gpus})
    rows = []
    for pp in _divisors(shape.num_layers):
        chunks = _divisors(shape.num_layers // pp)
        for tp, cp in itertools.product(TP_SIZES, CP_SIZES):
            dp, remainder = divmod(gpus, tp * cp * pp)
            if not remainder:
                rows += [(tp, cp, pp, dp, layers) for layers in chunks]
    table = np.repeat(np.array(rows, dtype=np.float64), len(CHECKPOINTS), axis=0)
    checkpoint = np.tile(np.arange(len(CHECKPOINTS)), len(rows))
    return Columns(checkpoint=checkpoint, **dict(zip(SIZES, table.T, strict=True)))


def columns_of(configs: Iterable[ParallelConfig]) -> Columns:
    """The given configurations as columns."""
    chosen = tuple(configs)
    return Columns(
        checkpoint=np.array([CHECKPOINTS.index(config.checkpoint) for config in chosen]),
        **{name: np.array([float(getattr(c, name)) for c in chosen]) for name in SIZES},
    )


def _divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]
