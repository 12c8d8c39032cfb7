"""Torch's own choice of an attention kernel, in C++, beside the one that a plan offline makes.

    python -m tests.cuda_emulated run tests.cuda_emulated.attention_choices

The device is an emulated one (``EMULATED_KIND``), and torch uses cuDNN where it likes to: nothing
runs. Printed is one JSON object; the exit code is 1 where a choice differs.
"""

import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from memo_compile.gpus import GPUS
from memo_compile.offline.cuda_attention import Kernel, kernel_for

CHOICES = {
    SDPBackend.FLASH_ATTENTION: Kernel.FLASH,
    SDPBackend.CUDNN_ATTENTION: Kernel.CUDNN,
    SDPBackend.EFFICIENT_ATTENTION: Kernel.EFFICIENT,
    SDPBackend.MATH: Kernel.MATH,
}
LEFT = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
WIDTHS = ((8, 8), (12, 12), (64, 64), (72, 72), (128, 128), (136, 136), (256, 256), (320, 320))
WIDTHS += ((192, 192), (192, 128), (64, 128))
"""Of heads of queries and keys, and of values."""
ROWS = ((16, 16), (24, 16), (1, 16), (16, 1))
"""Queries and keys."""
HEADS = 4
MASKS = (None, "whole", "one row", "of truth", "learned")

Call = tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], dict[str, Any]]


def calls() -> Iterator[Call]:
    """Shapes, dtypes, masks and settings that lead to each of the choices."""
    for dtype, widths, (rows, columns), heads, kind, dropout, is_causal in itertools.product(
        DTYPES, WIDTHS, ROWS, (HEADS, 2), MASKS, (0.0, 0.1), (False, True)
    ):
        if kind is not None and is_causal:
            continue  # an error
        query, key, value = (
            torch.empty(2, number, length, width, dtype=dtype, device="cuda", requires_grad=True)
            for number, length, width in (
                (HEADS, rows, widths[0]),
                (heads, columns, widths[0]),
                (heads, columns, widths[1]),
            )
        )
        settings = {"dropout_p": dropout, "is_causal": is_causal, "enable_gqa": heads != HEADS}
        yield (query, key, value, _mask(kind, rows, columns, dtype)), settings


def _mask(kind: str | None, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor | None:
    if kind is None:
        return None
    made = torch.empty(
        1 if kind == "one row" else rows,
        columns,
        dtype=torch.bool if kind == "of truth" else dtype,
        device="cuda",
    )
    return made.requires_grad_() if kind == "learned" else made


def main() -> int:
    if os.environ.pop(LEFT, None) is not None:  # torch reads it once
        os.execv(sys.executable, [sys.executable, "-m", "tests.cuda_emulated.attention_choices"])
    gpu = GPUS[os.environ.get("EMULATED_KIND", "h200")]
    found: Counter[str] = Counter()
    differing = []
    for given, settings in calls():
        chosen = CHOICES[SDPBackend(torch._fused_sdp_choice(*given, **settings))]
        planned = kernel_for(gpu, *given, **settings)
        found[chosen.value] += 1
        if chosen is not planned:
            shapes = [None if each is None else [str(each.dtype), *each.shape] for each in given]
            differing.append([chosen.value, planned.value, *shapes, settings])
    print(json.dumps({"chosen": found, "differing": differing}))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
