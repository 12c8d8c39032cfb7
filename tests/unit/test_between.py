"""What user code takes between halves is a level: what it frees again does not count to the end."""

import mmap
import threading
import time
from unittest import mock

import pytest
import torch

from memo_compile.driver import between, step_watch
from memo_compile.driver.between import Between
from memo_compile.driver.step_watch import SeenGraph, StepWatch
from memo_compile.step.interludes import IGNORED_BYTES as UNIT
from memo_compile.step.interludes import MEASURED_BYTES
from memo_compile.step.problem import FixedBytes, Half, Interlude, Phase

BASE = 100 * UNIT


class Memory:
    """The process's memory, as a number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = BASE
        monkeypatch.setattr(between, "anonymous_bytes", lambda: self.now)
        monkeypatch.setattr(between, "trim_heap", lambda: None)
        monkeypatch.setattr(step_watch.gc, "collect", lambda: None)


@pytest.fixture
def memory(monkeypatch):
    before = threading.active_count()
    yield Memory(monkeypatch)
    while threading.active_count() > before:
        time.sleep(0.001)  # those that looked are told to end


def left(found) -> list[int]:
    return [own.left_bytes for own in found]


def measured(memory: Memory, *changes: int) -> Between:
    """Between halves 0, 1, .. the process's memory changes by ``changes`` bytes."""
    watched = Between()
    for half, change in enumerate(changes, start=1):
        watched.begin(0, 0)
        memory.now += change
        watched.end(half, 0, 0)
    return watched


def test_what_is_freed_in_a_later_pause_counts_no_longer(memory):
    watched = measured(memory, 4 * UNIT, -4 * UNIT, 4 * UNIT, -4 * UNIT)
    assert list(watched.interludes({}, {})) == [
        Interlude(half=1, most_bytes=4 * UNIT, left_bytes=4 * UNIT),
        Interlude(half=2, most_bytes=0, left_bytes=-4 * UNIT),
        Interlude(half=3, most_bytes=4 * UNIT, left_bytes=4 * UNIT),
        Interlude(half=4, most_bytes=0, left_bytes=-4 * UNIT),
    ]


def test_what_stays_is_rounded_once_and_not_in_every_pause(memory):
    watched = measured(memory, *(UNIT // 4 for _ in range(16)))
    assert sum(left(watched.interludes({}, {}))) == 4 * UNIT
    watched = measured(memory, *(UNIT + 1 for _ in range(16)))
    assert sum(left(watched.interludes({}, {}))) == 16 * UNIT + MEASURED_BYTES


def test_less_is_there_than_before_the_step_only_until_something_is_taken(memory):
    watched = measured(memory, -8 * UNIT, 2 * UNIT)
    assert left(watched.interludes({}, {})) == [2 * UNIT]


def test_frames_that_go_meanwhile_are_not_the_users(memory):
    watched = measured(memory, 4 * UNIT)
    watched.begin(2, 0)
    memory.now -= 4 * UNIT
    watched.end(2, 0, 1)
    assert left(watched.interludes({}, {})) == [4 * UNIT]


def test_gradients_of_other_modules_are_counted_as_they_were_made(memory):
    watched = measured(memory, 3 * UNIT, UNIT)
    found = list(watched.interludes({1: 3 * UNIT - 7, 3: 5}, {}))
    more = UNIT + MEASURED_BYTES  # what else stays is counted in units
    assert left(found) == [3 * UNIT - 7, more, 5]
    assert [own.half for own in found] == [1, 2, 3]


BACKWARD = Half(
    phase=Phase.BACKWARD,
    constants=(),
    arguments=("saved", "dy"),
    results=("dx",),
    handle="saved",
    layouts=(None, None),
)
ORDER = [(False, 0), (False, 1), (True, 0), (False, 2), (True, 1), (True, 2)]


def large() -> torch.Tensor:
    return torch.empty(4 * UNIT, dtype=torch.uint8)


def watched_pipeline(memory: Memory, gradients, stay: int = 0, kept=()) -> StepWatch:
    """Three microbatches; before each half user code takes 4 units and frees those of before."""
    part = mock.Mock(graph=SeenGraph(BACKWARD, 1, {"dy": 4 * UNIT}))
    watch = StepWatch(samples=True)
    watch.is_pipeline, watch.num_forwards = True, 3
    watch.keep([own.untyped_storage() for own in kept])
    weight = torch.nn.Parameter(torch.zeros(2))
    outputs, saved, inputs = {}, {}, []  # which stay, as the memory is none that they are in
    for at, half in enumerate(ORDER):
        is_backward, member = half
        memory.now += 4 * UNIT if at % 2 else -4 * UNIT if at else 0
        memory.now += stay if at else 0
        if is_backward:
            args = [saved.pop(member), gradients(member)]
            watch.begin(half, args)
            del args
            inputs.append(torch.empty(3))
            watch.end(half, inputs[-1:])
        else:
            inputs.append(torch.empty(5))
            outputs[member], saved[member] = torch.empty(7), torch.empty(1)
            watch.begin(half, [weight, inputs[-1]], part)
            watch.end(half, [outputs[member], saved[member]])
    assert watch.is_step()
    return watch


def test_user_code_between_microbatches_counts_while_it_is_there(memory):
    given = [large() for _ in range(3)]
    watch = watched_pipeline(memory, given.__getitem__, kept=given)
    group = watch.joint(FixedBytes())
    level = [sum(left(group.interludes[:at])) for at in range(1, 1 + len(group.interludes))]
    assert max(level) == 4 * UNIT, "and not three times as much"


def test_memory_that_is_received_into_counts_as_inputs(memory):
    """It stays from step to step; another rank writes into it whenever it likes."""
    given = [large() for _ in range(3)]
    watch = watched_pipeline(memory, given.__getitem__, kept=given)
    group = watch.joint(FixedBytes())
    assert group.fixed.inputs == 3 * 4 * UNIT + 3 * 20
    assert group.passed == ((2, 0), (4, 0), (5, 0))
    assert not watch.tangents


def test_gradients_that_user_code_holds_on_to_are_measured_like_all_it_holds(memory):
    held = [large() for _ in range(3)]
    group = watched_pipeline(memory, held.__getitem__).joint(FixedBytes())
    assert group.passed == ((2, 0), (4, 0)), "of the last nobody knows"


def test_gradients_that_are_let_go_of_count_in_the_half_that_takes_them(memory):
    """The plan has them there: they are taken off what was measured before it, and only there."""
    watch = watched_pipeline(memory, lambda member: large(), stay=4 * UNIT)
    assert watch.joint(FixedBytes()).passed == ()
    assert watch._given_gradients() == {2: 4 * UNIT, 4: 4 * UNIT, 5: 4 * UNIT}


def test_pages_that_do_not_count_are_found_one_by_one():
    memory = mmap.mmap(-1, 64 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    sampler = between.MemorySampler(apart=(storage,))
    assert sampler._apart_bytes() == 0
    memory[3 * mmap.PAGESIZE] = 1
    memory[40 * mmap.PAGESIZE] = 1
    assert sampler._apart_bytes() == 2 * mmap.PAGESIZE
