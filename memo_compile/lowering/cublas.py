"""What cuBLAS keeps on a CUDA device for good: workspaces that torch makes for its handles.

Each thread has a handle of its own, and a workspace belongs to a handle and a stream. So a step has
two: the forward's thread has one, and autograd's thread, which runs the backward, has the other.
cublasLt, which multiplies and adds a bias, has its own beside them, as measured with torch 2.11.
Read in torch's ``CublasHandlePool.cpp`` (2.11 to 2.13).
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


def libraries_bytes(major: int, flushed: int) -> int:
    """What a step's libraries keep on a GPU of compute capability ``major``, and tuning takes.

    ``flushed`` is its L2 cache in bytes where Inductor tunes kernels: it writes as much between two
    timings. The backend and ``memo plan`` count by this.
    """
    return workspaces_bytes(major, cublas_setting(), cublas_lt_setting()) + align(flushed)
