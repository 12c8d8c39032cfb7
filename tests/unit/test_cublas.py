"""What cuBLAS keeps on a device, by its generation and by what the environment says."""

import pytest

from memo_compile.lowering.cublas import workspaces_bytes


@pytest.mark.parametrize(
    ("major", "setting", "kib"),
    [
        (8, None, 8320),
        (9, None, 32 * 1024),
        (12, "", 32 * 1024),
        (9, ":4096:8", 32 * 1024),
        (8, ":16:8:4096:2", 16 * 8 + 4096 * 2),
        (9, "nonsense", 32 * 1024),
    ],
)
def test_two_workspaces_of_the_size_that_torch_chooses(major, setting, kib):
    assert workspaces_bytes(major, setting, "0") == 2 * kib * 1024
    assert workspaces_bytes(major, setting) == 2 * (kib + 1024) * 1024
    assert workspaces_bytes(major, setting, "2048") == 2 * (kib + 2048) * 1024
