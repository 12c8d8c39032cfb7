"""The engine of collectives: who begins what when, who waits, what a failure does."""

import os
import time
from dataclasses import dataclass, field

import pytest
import torch
from memo_runtime import collectives
from memo_runtime.collectives import (
    Collective,
    CollectiveEngine,
    CollectiveError,
    CollectiveKind,
    CollectiveSchedule,
    CollectiveTicket,
    CollectiveTimes,
)

EARLY, LATE, NORMAL = CollectiveSchedule.EARLY, CollectiveSchedule.LATE, CollectiveSchedule.NORMAL


@dataclass
class Work:
    """Writes twice the source into the destination when it is waited for."""

    name: str
    log: list[str]
    flight: tuple[torch.Tensor, torch.Tensor]
    error: str = ""

    def is_completed(self):
        return self.name != "stuck"

    def wait(self):
        self.log.append(f"wait {self.name}")
        if self.error:
            raise RuntimeError(self.error)
        destination, source = self.flight
        destination.copy_(2 * source)


@dataclass(eq=False)
class Doubling:
    """Stands for a collective of two ranks that hold the same."""

    name: str
    log: list[str]
    kind: CollectiveKind = CollectiveKind.ALL_REDUCE
    group_name: str = "0"
    error: str = ""
    seen: list[torch.Tensor] = field(default_factory=list)

    def begin(self, destination, source):
        self.log.append(f"begin {self.name}")
        self.seen.append(source.clone())
        return Work(self.name, self.log, (destination, source), self.error)


def flights(*names: str, error: str = "") -> tuple[list[str], list[CollectiveTicket]]:
    log: list[str] = []
    made = [
        CollectiveTicket(Doubling(name, log, error=error), torch.zeros(4), torch.full((4,), 3.0))
        for name in names
    ]
    return log, made


@pytest.mark.parametrize("schedule", CollectiveSchedule)
@pytest.mark.parametrize("in_place", [False, True])
def test_the_result_is_there_after_the_wait(schedule, in_place):
    log: list[str] = []
    source = torch.full((4,), 3.0)
    destination = source if in_place else torch.zeros(4)
    flight, engine = (
        CollectiveTicket(Doubling("a", log), destination, source),
        CollectiveEngine(schedule),
    )
    engine.issue(flight)
    assert engine.wait(flight) >= 0
    assert destination.tolist() == [6.0] * 4
    assert flight.collective.seen[0].tolist() == [3.0] * 4
    assert log == ["begin a", "wait a"]
    assert engine.wait(flight) == 0.0, "a second wait does nothing"


def test_early_is_done_when_the_issue_returns():
    _, (flight,) = flights("a")
    CollectiveEngine(EARLY).issue(flight)
    assert flight.destination.tolist() == [6.0] * 4


@pytest.mark.parametrize("in_place", [False, True])
def test_late_hides_the_output_until_the_wait(in_place):
    """Who reads before the wait reads NaN, and nobody has begun anything."""
    log: list[str] = []
    source = torch.full((4,), 3.0)
    flight = CollectiveTicket(Doubling("a", log), source if in_place else torch.zeros(4), source)
    CollectiveEngine(LATE).issue(flight)
    assert flight.destination.isnan().all()
    assert log == []


def test_late_sees_what_is_written_into_the_input_before_the_wait():
    """The checker forbids it; where it is done all the same, numbers are wrong here."""
    _, (flight,) = flights("a")
    engine = CollectiveEngine(LATE)
    engine.issue(flight)
    flight.source.fill_(5.0)
    engine.wait(flight)
    assert flight.destination.tolist() == [10.0] * 4


@pytest.mark.parametrize("schedule", CollectiveSchedule)
def test_all_begin_in_the_order_of_their_issues(schedule):
    """However a rank waits: another rank may wait in another order."""
    log, made = flights("a", "b", "c")
    engine = CollectiveEngine(schedule)
    for flight in made:
        engine.issue(flight)
    for flight in (made[1], made[2], made[0]):
        engine.wait(flight)
    begun = [line for line in log if line.startswith("begin")]
    assert begun == ["begin a", "begin b", "begin c"]


def test_a_slow_link_carries_one_after_the_other():
    _, made = flights("a", "b")
    engine = CollectiveEngine(bytes_per_s=16 / 0.05)
    start_s = time.perf_counter()
    for flight in made:
        engine.issue(flight)
    engine.wait(made[1])
    assert time.perf_counter() - start_s >= 0.1
    engine.wait(made[0])


@pytest.mark.parametrize("schedule", [NORMAL, LATE])
def test_a_failure_is_raised_where_it_is_waited_for(schedule):
    _, (flight,) = flights("a", error="a rank is gone")
    engine = CollectiveEngine(schedule)
    engine.issue(flight)
    with pytest.raises(CollectiveError, match="all_reduce of a step failed: a rank is gone"):
        engine.wait(flight)
    assert flight.finished


@pytest.mark.parametrize("schedule", CollectiveSchedule)
def test_a_dropped_step_is_drained(schedule):
    """What was issued is made: other ranks wait for it."""
    log, made = flights("a", "b")
    engine = CollectiveEngine(schedule)
    for flight in made:
        engine.issue(flight)
    for flight in made:
        engine.settle(flight)
    assert sorted(log) == ["begin a", "begin b", "wait a", "wait b"]
    assert all(flight.finished for flight in made)


def wanting(*made: CollectiveTicket) -> CollectiveTimes:
    return CollectiveTimes(wanted=frozenset(flight.timed for flight in made))


def equal_flights(count: int) -> list[CollectiveTicket]:
    doubling = Doubling("a", [])
    return [CollectiveTicket(doubling, torch.zeros(4), torch.full((4,), 3.0)) for _ in range(count)]


def test_what_is_timed_ends_in_its_issue():
    """The first one is not counted, and of equal ones the fastest is."""
    made = equal_flights(3)
    engine, times = CollectiveEngine(bytes_per_s=16 / 0.02), wanting(*made)
    assert engine.issue(made[0], times) >= 0.02
    assert made[0].destination.tolist() == [6.0] * 4
    assert times.least_s == {}
    assert not times.is_over
    for flight in made[1:]:
        engine.issue(flight, times)
    (seconds,) = times.least_s.values()
    assert 0.02 <= seconds < 0.2
    assert times.is_over
    assert [engine.wait(flight) < 0.02 for flight in made] == [True] * 3
    assert all(flight.finished for flight in made)


def test_other_bytes_and_types_are_timed_apart():
    doubling, times = Doubling("a", []), CollectiveTimes(wanted=frozenset())
    sizes = (4, torch.float32), (4, torch.float32), (8, torch.float32), (4, torch.float64)
    for size, dtype in sizes:
        source = torch.ones(size, dtype=dtype)
        CollectiveEngine().issue(CollectiveTicket(doubling, source, source), times)
    assert [own[1:] for own in times.least_s] == [
        ("float32", 16),
        ("float32", 32),
        ("float64", 32),
    ]


def test_what_computes_the_input_is_not_timed(monkeypatch):
    """On CUDA the host waits for the stream before the first look at the clock, and again."""
    log, (flight,) = flights("a")
    monkeypatch.setattr(collectives, "_finish_stream", lambda _: log.append("finish"))
    CollectiveEngine().issue(flight, wanting(flight))
    assert log == ["finish", "begin a", "wait a", "finish"]


def test_steps_are_measured_until_all_is_known():
    made = equal_flights(2)
    engine, times = CollectiveEngine(), wanting(*made)
    assert times.for_step() is times
    engine.issue(made[0], times)
    assert times.for_step() is times, "the only one of its kind was the first"
    engine.issue(made[1], times)
    assert times.for_step() is None


def test_a_step_whose_collective_does_not_end_in_time_is_measured_no_further():
    """Where groups are several, its ranks may wait in another one; the next step tries again."""
    log, made = flights("a", "stuck", "b")
    engine, times = CollectiveEngine(), wanting(*made)
    times.patience_s = 0.01
    times.for_step()
    seconds = [engine.issue(flight, times) for flight in made]
    assert seconds[1] >= 0.01
    assert seconds[2] == 0.0
    assert log == ["begin a", "wait a", "begin stuck", "begin b"]
    assert times.least_s == {}
    for flight in made:
        engine.wait(flight)
    assert [flight.destination.tolist() for flight in made] == [[6.0] * 4] * 3
    assert times.for_step() is times
    assert not times.is_stopped


def test_the_first_collective_of_each_group_is_not_counted():
    times = CollectiveTimes(wanted=frozenset())
    for name, group in (("a", "0"), ("b", "1"), ("c", "1"), ("d", "0")):
        source = torch.ones(4)
        doubling = Doubling(name, [], group_name=group)
        CollectiveEngine().issue(CollectiveTicket(doubling, source, source), times)
    assert [own.collective.name for own in times.least_s] == ["c", "d"]


def test_what_never_runs_is_not_waited_for():
    times = wanting(*equal_flights(1))
    measured = [times.for_step() is times for _ in range(6)]
    assert measured == [True] * 4 + [False] * 2


def test_a_failure_while_it_is_timed_is_raised_in_the_issue():
    _, (flight,) = flights("a", error="a rank is gone")
    engine, times = CollectiveEngine(), wanting(flight)
    with pytest.raises(CollectiveError, match="all_reduce of a step failed: a rank is gone"):
        engine.issue(flight, times)
    assert flight.finished
    assert times.least_s == {}
    engine.settle(flight)


def test_a_failure_in_a_dropped_step_is_nobodys():
    _, (flight,) = flights("a", error="a rank is gone")
    engine = CollectiveEngine()
    engine.issue(flight)
    engine.settle(flight)
    assert flight.finished


def test_a_forked_process_does_not_wait(monkeypatch):
    log, (flight,) = flights("a")
    engine = CollectiveEngine()
    engine.issue(flight)
    flight.pid = os.getpid() + 1
    with pytest.raises(CollectiveError, match="a forked process cannot wait"):
        engine.wait(flight)
    engine.settle(flight)
    assert log == ["begin a"]


def test_an_unknown_reduction_is_refused():
    with pytest.raises(CollectiveError, match=r"expected a reduction of .*, got 'xor'"):
        Collective(kind=CollectiveKind.ALL_REDUCE, group_name="0", reduce_op="xor")
