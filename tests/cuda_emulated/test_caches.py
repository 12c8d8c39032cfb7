"""What the emulated device teaches must not reach a real one of the same name."""

import os
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir

from memo_compile.config import cache_folder

triton = pytest.importorskip("triton", reason="comes with torch's CUDA build")


def test_caches_lie_beside_the_device():
    own = Path(os.environ["EMULATED_CUDA"])
    assert own in cache_folder().parents
    for folder in (Path(cache_dir()), Path(triton.knobs.cache.dir)):
        assert own.parent in folder.parents
