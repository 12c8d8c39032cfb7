"""The free heap goes back only when memory is above the plan."""

import pytest
from memo_runtime import heap
from memo_runtime.heap import HeapWatch, anonymous_bytes

from memo_compile.costs.measure import resident_bytes

MIB = 2**20


class Machine:
    """A process whose memory and free heap the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 1000 * MIB
        self.free_heap = 0
        self.trims = 0
        monkeypatch.setattr(heap, "anonymous_bytes", lambda: self.bytes)
        monkeypatch.setattr(heap, "trim_heap", self.trim)

    def trim(self) -> None:
        self.trims += 1
        self.bytes -= self.free_heap
        self.free_heap = 0


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_a_step_that_holds_what_was_planned_trims_nothing_but_once(machine):
    watch = HeapWatch(allowed_bytes=2 * MIB)
    watch.begin(0)
    assert machine.trims == 1  # the first step knows nothing of what is there
    for _ in range(3):
        machine.bytes += 100 * MIB
        watch.check(100 * MIB)
        machine.bytes += 2 * MIB
        watch.check(100 * MIB)  # within what is allowed
        machine.bytes -= 32 * MIB
        watch.begin(70 * MIB)
        machine.bytes -= 70 * MIB
    assert machine.trims == 1


def test_freed_heap_above_the_plan_goes_back(machine):
    watch = HeapWatch(allowed_bytes=2 * MIB)
    watch.begin(0)
    machine.bytes += 120 * MIB
    machine.free_heap = 20 * MIB
    watch.check(100 * MIB)
    assert machine.trims == 2
    watch.check(100 * MIB)
    assert machine.trims == 2


def test_what_forward_kernels_freed_goes_back_although_the_frame_is_not_full_yet(machine):
    watch = HeapWatch(allowed_bytes=2 * MIB)
    watch.begin(0)
    machine.bytes += 60 * MIB
    machine.free_heap = 12 * MIB
    watch.begin_backward(100 * MIB)
    assert machine.trims == 2
    assert machine.bytes == 1048 * MIB
    machine.bytes -= 30 * MIB
    watch.begin_backward(20 * MIB)  # a small step is quicker than a trim
    assert machine.trims == 2


def test_last_steps_gradients_go_back_when_a_step_begins(machine):
    watch = HeapWatch(allowed_bytes=2 * MIB)
    watch.begin(0)
    machine.bytes += 108 * MIB + 40 * MIB
    machine.free_heap = 108 * MIB
    watch.begin(40 * MIB)
    assert machine.trims == 2
    assert machine.bytes == 1040 * MIB


def test_memory_of_others_is_not_trimmed_for_again_and_again(machine):
    watch = HeapWatch(allowed_bytes=2 * MIB)
    watch.begin(0)
    machine.bytes += 150 * MIB
    for _ in range(5):
        watch.check(100 * MIB)
    assert machine.trims == 2
    machine.bytes -= 100 * MIB
    watch.begin(0)  # what is there now counts as there
    assert machine.trims == 2


def test_the_kernel_is_asked_for_this_process():
    assert anonymous_bytes() == pytest.approx(resident_bytes(), abs=4 * MIB)
