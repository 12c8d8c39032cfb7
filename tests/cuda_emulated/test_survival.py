"""Whole compiled steps on the device under exceptions, and in several threads; kernels compute."""

import gc
import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.cuda_emulated.computing import (
    Computing,
    assert_close,
    copies_of,
    leased,
    ordered,
    quick_collections,
)
from tests.numerics.small import Calls, watched_calls

ERRORS = (ValueError, ValueError, KeyboardInterrupt, KeyboardInterrupt)
CHANCES = (None, 0.0, 0.5)
"""When work runs, see ``computing.ordered``."""
STEPS = 5
OFTEN_S = 1e-5
"""Python's threads take turns after so long; a step would mostly be over in the usual 5 ms."""

pytestmark = pytest.mark.filterwarnings(
    # autograd's, of parameters that were made on another stream
    "ignore:The AccumulateGrad node's stream does not match:UserWarning"
)


def test_error_at_every_call(monkeypatch):
    """Before each call of a step and behind it, which leaves its work in the streams."""
    calls = watched_calls(monkeypatch, behind=True)
    steps = Computing()
    steps.begin()
    with quick_collections():
        _break_everywhere(steps, calls)


def _break_everywhere(steps: Computing, calls: Calls) -> None:
    calls.count = 0
    steps.step(1)
    num_places = calls.count
    assert num_places > 50
    steps.ours.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    held, in_flight = torch.cuda.memory_allocated(), 0
    kinds = zip(range(num_places), itertools.cycle(ERRORS), itertools.cycle(CHANCES))
    for place, error, chance in kinds:
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
    failures, both_are_there, interval_s = [], threading.Barrier(2), sys.getswitchinterval()

    def begin(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                both_are_there.wait()
                work(number)
        except BaseException as error:
            failures.append("".join(traceback.format_exception(error)))

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(2)]
    sys.setswitchinterval(OFTEN_S)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
    finally:
        sys.setswitchinterval(interval_s)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, "\n".join(failures)


def begun(number: int) -> list[Computing]:
    """Models whose steps may be live two at a time; models of one class share a plan."""
    found = [Computing(max_inflight=2) for _ in range(number)]
    for steps in found:
        steps.begin()
    return found


def assert_whole(made: Sequence[tuple[Computing, int, Sequence[torch.Tensor]]]) -> None:
    """All gradients are right, of (model, seed, its step's gradients); nothing is held."""
    for steps, seed, gradients in made:
        assert_close(gradients, steps.wanted(seed))
    assert leased() == 0
    assert all(steps.is_planned() for steps, _, _ in made)


@pytest.mark.parametrize("chance", CHANCES)
def test_threads_with_a_model_each(chance):
    """Both copy through the same two lanes, and their steps take turns on frames."""
    both, made = begun(2), []

    def work(number: int) -> None:
        for seed in range(10 * number, 10 * number + STEPS):
            made.append((both[number], seed, both[number].gradients_of(seed)))

    with ordered(chance):
        run_threads(work)
    assert_whole(made)


@pytest.mark.parametrize("chance", CHANCES)
def test_threads_that_share_a_model(chance):
    (steps,), made = begun(1), []

    def work(number: int) -> None:
        for seed in range(10 * number, 10 * number + STEPS):
            made.append((steps, seed, steps.gradients_of(seed)))

    with ordered(chance):
        run_threads(work)
    assert_whole(made)


@pytest.mark.parametrize("chance", CHANCES)
def test_steps_on_two_streams_in_turns(chance):
    """Each works on the frames that the last one may still use, on another stream."""
    (steps,), made, streams = begun(1), [], (torch.cuda.Stream(), torch.cuda.Stream())
    with ordered(chance):
        for seed in range(STEPS):
            with torch.cuda.stream(streams[seed % 2]):
                made.append((steps, seed, steps.gradients_of(seed)))
    assert_whole(made)
