"""What cuBLAS keeps on a device, by its generation and by what the environment says."""

import pytest

from memo_compile.lowering.cublas import workspaces_bytes


@pytest.mark.parametrize(
    ("major", "setting", "num_bytes"),
    [
        (8, None, 2 * 8320 * 1024),
        (9, None, 2 * 32 * 2**20),
        (12, "", 2 * 32 * 2**20),
        (9, ":4096:8", 2 * 32 * 2**20),
        (8, ":16:8:4096:2", 2 * (16 * 8 + 4096 * 2) * 1024),
        (9, "nonsense", 2 * 32 * 2**20),
    ],
)
def test_two_workspaces_of_the_size_that_torch_chooses(major, setting, num_bytes):
    assert workspaces_bytes(major, setting) == num_bytes
