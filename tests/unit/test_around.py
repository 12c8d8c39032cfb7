"""Finding the model around a block, among all objects of the process."""

import sys
import threading

from torch import nn

from memo_compile.driver.around import parameters_around


def test_a_thread_that_makes_tuples_is_left_alone():
    """A list of all objects would hold a tuple in the making, and Python raise SystemError."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    failures, is_over, interval_s = [], [], sys.getswitchinterval()

    def work() -> None:
        while not is_over:
            try:
                tuple(number for number in range(100))
            except SystemError as error:
                failures.append(error)

    thread = threading.Thread(target=work)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(10):
            assert parameters_around([*model[0].parameters()]) == [model[1].weight]
    finally:
        sys.setswitchinterval(interval_s)
        is_over.append(True)
        thread.join()
    assert failures == []
