"""Counts the workspaces that cuBLAS keeps on a CUDA device for good.

Torch makes one for each handle and stream, and each thread has its own handle. So a step has two:
one in the forward's thread, one in autograd's, which runs the backward. cublasLt, which multiplies
and adds a bias, has its own, as measured with torch 2.11. Read in torch's ``CublasHandlePool.cpp``
(2.11 to 2.13).
"""

import re

from memo_compile.config import cublas_lt_setting, cublas_setting
from memo_compile.step.problem import align

NUM_HANDLES = 2

LARGE_BYTES = 32 * 2**20
"""On Hopper and Blackwell, whose compute capability is LARGE_FROM or above."""
LARGE_FROM = 9
SMALL_BYTES = (2 * 4096 + 8 * 16) * 1024

LT_KIB = 1024
"""cublasLt's workspace, unless ``CUBLASLT_WORKSPACE_SIZE`` says another."""

_PART = re.compile(r":(\d+):(\d+)")
"""Of ``CUBLAS_WORKSPACE_CONFIG``: KiB, and how many of them."""


def workspaces_bytes(major: int, setting: str | None = None, lt_setting: str | None = None) -> int:
    """Bytes of a step's workspaces on a device of compute capability ``major``.

    ``setting`` and ``lt_setting`` are what the environment says in ``CUBLAS_WORKSPACE_CONFIG`` and
    in ``CUBLASLT_WORKSPACE_SIZE`` (KiB), if anything.
    """
    parts = _PART.findall(setting or "")
    size_bytes = LARGE_BYTES if major >= LARGE_FROM else SMALL_BYTES
    if parts:
        size_bytes = sum(int(kib) * int(count) * 1024 for kib, count in parts)
    lt_kib = int(lt_setting) if lt_setting and lt_setting.isdecimal() else LT_KIB
    return NUM_HANDLES * (size_bytes + lt_kib * 1024)


def libraries_bytes(major: int, tuning_bytes: int) -> int:
    """Bytes that libraries keep on a GPU of compute capability ``major``, and that tuning takes.

    Where Inductor tunes kernels, ``tuning_bytes`` is the size of the L2 cache, which it flushes by
    a buffer of that size before each timing; else 0.
    """
    return workspaces_bytes(major, cublas_setting(), cublas_lt_setting()) + align(tuning_bytes)
