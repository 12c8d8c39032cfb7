"""Fourier transforms on a CPU: what they allocate counts, and is freed when it was read."""

import copy

import pytest
import torch
from memo_runtime.backward_run import BackwardRun
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from memo_compile.lowering.aten import _out_overload
from memo_compile.lowering.workspace import fourier_workspace
from tests.numerics.training import ATEN


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


def transforms_of(case):
    """The nodes of a transform and its inverse, each with a source like its own."""
    forward, shape, dim = case
    inverse = {torch.fft.rfft: torch.fft.irfft, torch.fft.rfft2: torch.fft.irfft2}.get(forward)

    def both(x):
        made = forward(x, dim=dim)
        return made if inverse is None else inverse(made, dim=dim)

    nodes = make_fx(both, tracing_mode="fake")(torch.randn(shape)).graph.nodes
    found = [node for node in nodes if fourier_workspace(node, 0) is not None]
    assert found
    for node in found:
        yield node, empty_like(node.args[0].meta["val"]).zero_()


def empty_like(fake):
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_a_transform_and_its_inverse_take_is_counted(case):
    for node, source in transforms_of(case):
        taken = most_bytes(lambda x, node=node: node.target(x, *node.args[1:]), source)
        counted = fourier_workspace(node, 0).size_bytes
        assert taken <= node.meta["val"].nbytes + counted + 4096


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_transform_exists_beside_the_buffer_that_it_is_copied_to(case):
    """Its overload for given results allocates as much as the other: its result is counted."""
    for node, source in transforms_of(case):
        assert _out_overload(node) is None
        result = empty_like(node.meta["val"])
        into = node.target.overloadpacket.out
        rest = node.args[1:]
        taken = most_bytes(lambda x, rest=rest, o=result, into=into: into(x, *rest, out=o), source)
        assert taken >= result.nbytes


class Mixed(nn.Module):
    """A layer whose complex numbers wait for the backward in ordinary memory."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        made = torch.fft.rfft(x * self.scale, dim=1)
        made = made * torch.sigmoid(made.abs())
        return x + torch.fft.irfft(made, n=x.shape[1], dim=1)


@pytest.mark.parametrize("keeps", [False, True])
def test_what_waits_in_ordinary_memory_is_freed_by_the_call_that_reads_it_last(monkeypatch, keeps):
    held, rest = [], BackwardRun.rest

    def looked_at(run, results):
        held.append((len(run.lease.saved), len(run.plan.backward.leased)))
        return rest(run, results)

    monkeypatch.setattr(BackwardRun, "rest", looked_at)
    torch.manual_seed(0)
    model, x = nn.Sequential(Mixed(), Mixed()), torch.randn(2, 33, 16)
    ours = torch.compile(copy.deepcopy(model), backend="memo", options=ATEN)
    for _ in range(2):
        for own in (model, ours):
            loss = own(x).square().mean()
            if keeps:
                loss.backward(retain_graph=True)
            loss.backward()
    for expected, found in zip(model.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    leased = held[0][1]
    assert leased
    assert held == 2 * ([(leased, leased), (0, leased)] if keeps else [(0, leased)])
