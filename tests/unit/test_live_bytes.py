"""The recorder of Inductor's live bytes, on stand-ins for the functions that Inductor writes."""

import torch

from benchmarks.live_bytes import LiveBytes

KIB = 1024

WRAPPERS = """
empty_strided_cpu = None

def call(args):
    weight, x = args
    args.clear()
    saved = new(4)
    scratch = new(16)
    del scratch
    logits = new(8)
    return (logits, weight, saved)

forward = call

def call(args):
    weight, saved, tangent = args
    args.clear()
    gradient = new(2)
    scratch = new(3)
    del saved
    more = new(1)
    return (gradient,)

backward = call
"""


def new(kib):
    return torch.empty(kib * KIB, dtype=torch.uint8)


def recorded():
    """A step with 100 KiB of weights, 8 KiB of logits, 4 KiB saved, and 2 KiB of gradients."""
    scope = {"new": new}
    exec(WRAPPERS, scope)
    weight, x = new(100), new(1)
    with LiveBytes() as live:
        logits, *kept = scope["forward"]([weight, x])
        gradient = scope["backward"]([*kept, new(8)])
    del gradient
    return live, logits


def test_weights_that_a_forward_saves_are_not_the_steps():
    """The most is in the forward: 4 KiB saved and 16 KiB of scratch."""
    live, _ = recorded()
    assert live.peak() == 20 * KIB


def test_results_count_or_do_not():
    live, logits = recorded()
    assert live.peak_without_results([logits]) == 20 * KIB
    late = LiveBytes()
    late._calls, late._moments = live._calls, live._moments[-3:]  # the end of the backward
    late._kept = live._kept
    assert late.peak() == 6 * KIB
    assert late.peak_without_results([logits]) == 4 * KIB
