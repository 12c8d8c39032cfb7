"""The configurations that divide a model over GPUs, as columns.

tp in 1, 2, 4, 8; cp in 1..16; pp divides the layers; layers per chunk divides a stage; three
checkpoint policies; dp takes what is left, with tp * cp * pp dividing the GPUs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from memo_compile.errors import InputError
from memo_compile.models import ModelShape
from memo_compile.planners.pipeline.offload import Checkpoint

TP_SIZES = (1, 2, 4, 8)
CP_SIZES = tuple(range(1, 17))
CHECKPOINTS = tuple(Checkpoint)


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
    """Every configuration of ``shape`` on exactly ``gpus`` GPUs; never empty.

    Raises:
        InputError: ``gpus`` is below 1.
    """
    if gpus < 1:
        raise InputError(f"gpus: expected at least 1, got {gpus}")
    rows = []
    for pp in _divisors(shape.num_layers):
        if gpus % pp:
            continue
        chunks = _divisors(shape.num_layers // pp)
        for tp in TP_SIZES:
            for cp in CP_SIZES:
                if gpus % (tp * cp * pp):
                    continue
                dp = gpus // (tp * cp * pp)
                rows += [(tp, cp, pp, dp, layers) for layers in chunks]
    table = np.repeat(np.array(rows, dtype=np.float64), len(CHECKPOINTS), axis=0)
    return Columns(
        tp=table[:, 0],
        cp=table[:, 1],
        pp=table[:, 2],
        dp=table[:, 3],
        layers_per_chunk=table[:, 4],
        checkpoint=np.tile(np.arange(len(CHECKPOINTS)), len(rows)),
    )


def _divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]
