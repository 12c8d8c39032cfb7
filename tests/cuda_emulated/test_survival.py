"""Whole compiled steps on the device under exceptions, and in several threads; kernels compute."""

import gc
import itertools
import threading
import traceback
from collections.abc import Callable

import pytest
import torch

import memo_compile
from tests.cuda_emulated.computing import (
    CUDA,
    Computing,
    assert_close,
    copies_of,
    leased,
    ordered,
    rows_of,
)
from tests.numerics.small import watched_calls

ERRORS = (ValueError, ValueError, KeyboardInterrupt, KeyboardInterrupt)
CHANCES = (None, 0.0, 0.5)
"""When work runs, see ``computing.ordered``."""


def test_error_at_every_call(monkeypatch):
    """Before each call of a step and behind it, which leaves its work in the streams."""
    calls = watched_calls(monkeypatch, behind=True)
    steps = Computing()
    steps.begin()
    calls.count = 0
    steps.step(1)
    num_places = calls.count
    assert num_places > 60
    steps.ours.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    held, in_flight = torch.cuda.memory_allocated(), 0
    kinds = zip(itertools.cycle(ERRORS), itertools.cycle(CHANCES))
    for place, (error, chance) in zip(range(num_places), kinds):
        calls.count, calls.fail_at, calls.error = 0, place, error
        with ordered(chance, place):
            with (
                copies_of() as copies,
                pytest.raises(error, match=f"injected at region call {place}$"),
            ):
                steps.step(1)
            in_flight += len(copies.issued) > len(copies.waited)
            calls.fail_at = None
            gc.collect()
            assert copies.in_flight() == [], place
            assert leased() == 0, place
            steps.assert_step(2 + place)
        steps.ours.zero_grad(set_to_none=True)
        assert torch.cuda.memory_allocated() == held, place
    assert in_flight > 10


def run_threads(work: Callable[[int], None]) -> None:
    """``work(0)`` and ``work(1)`` at once, each in a thread with a stream of its own."""
    failures = []

    def begin(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                work(number)
        except BaseException as error:
            failures.append("".join(traceback.format_exception(error)))

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("chance", CHANCES)
def test_threads_with_a_model_each(chance):
    """Both copy through the same two lanes; frames and host frames are apart."""
    both = [Computing(max_inflight=2) for _ in range(2)]
    for steps in both:
        steps.begin()

    def work(number: int) -> None:
        for seed in range(4):
            both[number].assert_step(10 * number + seed)

    with ordered(chance):
        run_threads(work)
    assert leased() == 0
    assert memo_compile.report().unplanned_steps == 0


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("chance", CHANCES)
def test_threads_that_share_a_model(chance):
    steps = Computing(max_inflight=2)
    steps.begin()
    parameters = [*steps.ours.parameters()]

    def work(number: int) -> None:
        for seed in range(10 * number, 10 * number + 4):
            found = torch.autograd.grad(steps.compiled(rows_of(seed).to(CUDA)), parameters)
            assert_close(found, steps.wanted(seed))

    with ordered(chance):
        run_threads(work)
    assert leased() == 0
    assert memo_compile.report().unplanned_steps == 0
