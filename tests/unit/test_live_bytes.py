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


def recorded(keep_logits):
    """The peak of a step with 100 KiB of weights, 8 KiB of logits and 4 KiB saved."""
    scope = {"new": new}
    exec(WRAPPERS, scope)
    weight, x = new(100), new(1)
    with LiveBytes() as live:
        logits, *kept = scope["forward"]([weight, x])
        gradient = scope["backward"]([*kept, new(8)])
    del gradient
    return live.peak([logits] if keep_logits else [])


def test_weights_that_a_forward_saves_are_not_the_steps():
    """The most is in the forward: 4 KiB saved and 16 KiB of scratch."""
    assert recorded(keep_logits=True) == 20 * KIB


def test_logits_that_nothing_reads_are_the_users_anyway():
    assert recorded(keep_logits=False) == 20 * KIB
