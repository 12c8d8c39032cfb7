"""Copies between the device and the host, on a link whose speed is known."""

import torch

from memo_compile.costs.bandwidth import measure_copies

DEVICE = torch.device("cuda", 0)
PINNED_BYTES_PER_S = 55e9
"""What ``device/device.h`` gives a copy to or from pinned memory."""


def test_a_timed_copy_is_waited_for():
    found = measure_copies(DEVICE, "pinned")
    # The host's time is added to the link's, and on a busy machine that may be long.
    for speed in (found.d2h_bytes_per_s, found.h2d_bytes_per_s):
        assert speed < PINNED_BYTES_PER_S * 1.25
