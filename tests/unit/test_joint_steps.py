"""Who watches the steps waits for nobody who compiles."""

import threading
from unittest import mock

from memo_compile.driver.joint_steps import JointSteps


def part() -> mock.Mock:
    return mock.Mock(**{"assembly.step.live": 0, "assembly.step.beyond": 0})


def test_a_graph_is_compiled_or_goes_while_another_thread_plans() -> None:
    """Who compiles holds Dynamo's lock, which planning wants: it must not wait for the other."""
    steps, graphs = JointSteps(), [part(), part()]
    steps.add(graphs[0])
    planning, may_end = threading.Event(), threading.Event()

    def plan() -> None:
        with steps._lock:
            planning.set()
            may_end.wait(20)

    def compile_and_retire() -> None:
        steps.add(graphs[1])
        steps.remove(graphs[0])

    planner = threading.Thread(target=plan)
    planner.start()
    planning.wait()
    compiler = threading.Thread(target=compile_and_retire, daemon=True)
    compiler.start()
    compiler.join(10)
    waits = compiler.is_alive()
    may_end.set()
    planner.join()
    assert not waits
    steps._take_changes()
    assert set(steps._parts) == {graphs[1]}
