"""What ranks know of the seconds of a step's collectives, and when a plan is made anew for them."""

import pytest
from memo_runtime.collectives import Collective, CollectiveKind, TimedCollective

from memo_compile.config import MemoConfig
from memo_compile.costs.links import add_seconds, label
from memo_compile.driver import comm_costs
from memo_compile.driver.comm_costs import CommCosts
from memo_compile.file_store import FileStore
from memo_compile.torch_private import distributed

BYTES_PER_S = 1000.0


def reduce(num_bytes: int, group: str = "0") -> TimedCollective:
    collective = Collective(kind=CollectiveKind.ALL_REDUCE, group_name=group, reduce_op="sum")
    return TimedCollective(collective, "float32", num_bytes)


SMALL, LARGE = reduce(1000), reduce(9000)
CALLS = [("a", SMALL), ("b", LARGE)]
"""A second and nine, as declared."""


@pytest.fixture
def told():
    """What ranks have told, by key."""
    return {}


@pytest.fixture
def asked(monkeypatch, tmp_path, told):
    """Makes what a rank knows of the given calls; its cache is ``tmp_path``."""

    def fingerprint(group, *_):
        return {"places": group}

    def make(calls=CALLS, **options):
        monkeypatch.setattr(comm_costs, "_collectives", lambda *_: calls)
        return CommCosts.of(Lowered(), MemoConfig(**options), BYTES_PER_S)

    monkeypatch.setattr(distributed, "job_store", lambda: told)
    monkeypatch.setattr(comm_costs, "_fingerprint", fingerprint)
    store = FileStore(folder=tmp_path)
    monkeypatch.setattr(MemoConfig, "store", lambda config: store if config.cache else None)
    return make


class Lowered:
    problem = regions = None


def measure(costs, seconds):
    """A step has run, in which collectives took ``seconds``."""
    costs.times.least_s.update(seconds)


def test_nobody_knows_and_all_is_measured(asked):
    costs = asked()
    assert costs.seconds() == {}
    assert costs.times.wanted == {SMALL, LARGE}
    assert costs.times.patience_s is None
    assert not costs.are_measured
    measure(costs, {SMALL: 1.0, LARGE: 18.0})
    assert costs.are_measured
    assert costs.take()
    assert costs.seconds() == {"a": 1.0, "b": 18.0}
    assert costs.times is None
    assert not costs.take()


def test_the_next_process_asks_the_cache(asked, told):
    costs = asked()
    measure(costs, {SMALL: 1.0, LARGE: 18.0})
    costs.take()
    told.clear()
    again = asked()
    assert again.seconds() == {"a": 1.0, "b": 18.0}
    assert again.times is None


def test_without_a_cache_nothing_is_remembered(asked, told, tmp_path):
    costs = asked(cache=False)
    measure(costs, {SMALL: 1.0, LARGE: 18.0})
    costs.take()
    told.clear()
    assert list(tmp_path.iterdir()) == []
    assert asked(cache=False).times is not None


@pytest.mark.parametrize(("large_s", "is_other"), [(11.0, False), (7.0, False), (12.0, True)])
def test_a_plan_is_made_anew_where_a_quarter_changes(asked, large_s, is_other):
    costs = asked()
    measure(costs, {SMALL: 1.0, LARGE: large_s})
    assert costs.take() == is_other
    assert costs.seconds()["b"] == large_s


def test_what_the_first_rank_does_not_know_no_rank_knows(asked, tmp_path):
    """The second one has found it in its cache meanwhile."""
    first = asked()
    add_seconds(FileStore(folder=tmp_path), {"places": "0"}, {label(SMALL): 5.0, label(LARGE): 6.0})
    second = asked()
    assert first.seconds() == second.seconds() == {}
    measure(first, {SMALL: 1.0, LARGE: 2.0})
    measure(second, {SMALL: 3.0, LARGE: 4.0})
    assert first.take()
    assert second.take()
    assert first.seconds() == second.seconds() == {"a": 1.0, "b": 2.0}


def test_what_was_measured_in_part_counts_where_no_more_comes(asked):
    costs = asked()
    measure(costs, {LARGE: 18.0})
    assert not costs.are_measured
    assert costs.take()
    assert costs.seconds() == {"b": 18.0}


def test_a_step_that_talks_in_several_groups_is_measured_with_patience(asked, told, tmp_path):
    """What the cache knows of either group counts; each group's seconds are remembered apart."""
    add_seconds(FileStore(folder=tmp_path), {"places": "1"}, {label(LARGE): 6.0})
    other = reduce(9000, "1")
    costs = asked([("a", SMALL), ("b", other), ("c", LARGE)])
    assert costs.times.patience_s == comm_costs.PATIENCE_S
    assert costs.times.wanted == {SMALL, LARGE}
    assert costs.seconds() == {"b": 6.0}
    measure(costs, {SMALL: 1.0, LARGE: 2.0})
    assert costs.take()
    told.clear()
    assert asked().seconds() == {"a": 1.0, "b": 2.0}
    assert asked([("b", other)]).seconds() == {"b": 6.0}


@pytest.mark.parametrize("flag", ["collectives-early", "collectives-late"])
def test_the_schedules_of_tests_are_not_measured(asked, flag):
    assert asked(debug=(flag,)).times is None


def test_what_is_declared_is_not_a_number_among_ranks(asked, told):
    asked()
    assert set(told.values()) == {"nan"}
