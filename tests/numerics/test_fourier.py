"""Fourier transforms on a CPU: what they allocate for themselves counts, op by op."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from memo_compile.lowering.workspace import fourier_workspace


def most_bytes(function, *args) -> int:
    """The most that torch's allocator holds during a call beside what is there before it."""
    function(*args)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = function(*args)
    events = profiled.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    level = most = 0
    for _, change in changes:
        level += change
        most = max(most, level)
    del kept
    return most


CASES = {
    "along the tokens": (torch.fft.rfft, (4, 512, 32), 1),
    "of the last dimension": (torch.fft.rfft, (64, 512), 1),
    "of images": (torch.fft.rfft2, (4, 3, 64, 64), (2, 3)),
    "to both sides": (torch.fft.fft, (4, 512, 32), 1),
    "of all dimensions": (torch.fft.fftn, (4, 64, 32), (0, 1, 2)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_a_transform_and_its_inverse_take_is_counted(case):
    forward, shape, dim = case
    inverse = {torch.fft.rfft: torch.fft.irfft, torch.fft.rfft2: torch.fft.irfft2}.get(forward)

    def both(x):
        made = forward(x, dim=dim)
        return made if inverse is None else inverse(made, dim=dim)

    counted = 0
    nodes = make_fx(both, tracing_mode="fake")(torch.randn(shape)).graph.nodes
    for node in nodes:
        found = fourier_workspace(node, 0)
        if found is None:
            continue
        counted += 1
        fake, *rest = node.args
        of = torch.empty_strided(
            fake.meta["val"].shape, fake.meta["val"].stride(), dtype=fake.meta["val"].dtype
        ).zero_()
        taken = most_bytes(lambda x, target=node.target, rest=rest: target(x, *rest), of)
        assert taken <= node.meta["val"].nbytes + found.size_bytes + 4096
    assert counted
