"""Copies between the device and the host, on a link whose speed is known."""

import json

import torch

from memo_compile.costs.bandwidth import copy_bandwidth

DEVICE = torch.device("cuda", 0)
PINNED_BYTES_PER_S = 55e9
"""What ``device/device.h`` gives a copy to or from pinned memory."""


def test_a_timed_copy_is_waited_for(tmp_path):
    found = copy_bandwidth(DEVICE, "pinned", folder=tmp_path)
    # The host's time is added to the link's, and on a busy machine that may be long.
    for speed in (found.d2h_bytes_per_s, found.h2d_bytes_per_s):
        assert speed < PINNED_BYTES_PER_S * 1.25


def test_speeds_of_copies_that_were_not_waited_for_are_measured_again(tmp_path):
    first = copy_bandwidth(DEVICE, "pinned", folder=tmp_path)
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    del content["fingerprint"]["copies_end"]  # as older versions wrote it
    content["copies"]["d2h_bytes_per_s"] = 4.3e12
    path.write_text(json.dumps(content))
    assert copy_bandwidth(DEVICE, "pinned", folder=tmp_path).d2h_bytes_per_s < 4e12
    assert first.d2h_bytes_per_s < 4e12
