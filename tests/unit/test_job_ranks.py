"""What ranks tell each other before a graph runs, each rank a thread that meets others at a store.

The same between processes, and with graphs: ``tests/distributed/test_agreement.py``.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from memo_runtime.collectives import Collective, CollectiveKind

from memo_compile.driver.agreement import GroupOrder, JobRank, RankStep, StepCollective, orders_of
from memo_compile.errors import RanksDisagree, RankSteppedAside, UnsupportedGraph
from memo_compile.step.problem import CallKind, Layout
from memo_compile.torch_private import distributed
from memo_compile.torch_private.distributed import JobStore

LONG_S = 60.0
"""Nobody waits so long in a test that passes."""


class Job:
    """Ranks that meet at one store, and who of them is gone."""

    def __init__(self, num_ranks):
        store, self.gone = JobStore(dist.HashStore()), set()
        self.ranks = [
            JobRank(rank, num_ranks, store, lambda other: other in self.gone)
            for rank in range(num_ranks)
        ]

    def run(self, *programs):
        """``programs`` of the ranks at one time; what each returned or raised."""
        with ThreadPoolExecutor(len(programs)) as pool:
            pairs = zip(programs, self.ranks, strict=True)
            futures = [pool.submit(program or (lambda _: None), rank) for program, rank in pairs]
        return [future.exception() or future.result() for future in futures]


def order(*what, ranks=(0, 1), group="world"):
    begun = tuple(StepCollective(call=f"call{at}", what=each) for at, each in enumerate(what))
    return GroupOrder(group_name=group, ranks=ranks, collectives=begun)


def step(*orders, key="graph"):
    return RankStep(name=key, key=key, orders=orders)


def agreeing(own, timeout_s=LONG_S):
    """The program of a rank that plans ``own``, waits for the others, and says what it raises."""

    def program(rank):
        rank.begin(own.key)
        try:
            rank.agree(own, timeout_s)
        except RanksDisagree as error:
            rank.refuse(own.key, error, steps_aside=False)
            raise
        return "agreed"

    return program


def refusing(key="graph", *, steps_aside=False, timeout_s=0.0):
    """The program of a rank that has no plan."""

    def program(rank):
        rank.begin(key)
        rank.refuse(key, UnsupportedGraph("not here"), steps_aside=steps_aside, timeout_s=timeout_s)
        return "refused"

    return program


def after(seconds, program):
    def later(rank):
        time.sleep(seconds)
        return program(rank)

    return later


def test_equal_orders_are_agreed_on_and_then_need_nobody():
    job, own = Job(2), step(order("reduce", "gather"))
    assert job.run(agreeing(own), after(0.05, agreeing(own))) == ["agreed", "agreed"]
    assert job.run(agreeing(own), None) == ["agreed", None]


def test_the_first_difference_is_named_on_both():
    job = Job(2)
    first, second = step(order("reduce", "gather")), step(order("reduce"), key="other")
    results = job.run(agreeing(first, 0.3), agreeing(second, 0.3))
    for number, error in enumerate(results):
        assert isinstance(error, RanksDisagree)
        assert "collective 2 among ranks [0, 1] is " in str(error)
        mine = ("gather (call1)", "none")[number]
        assert f"{mine} on rank {number}" in str(error)


def exchanging(*sizes):
    """The order of a step that begins an all-to-all of each of ``sizes``."""
    calls, regions = [], {}
    for number, (rows, width) in enumerate(sizes):
        reads = (Layout(dtype="float32", item_bytes=4, size=(rows, width), stride=(width, 1)),)
        kind, name = CallKind.ISSUE, f"call{number}"
        calls.append(SimpleNamespace(name=name, kind=kind, region=name, reads=reads))
        collective = Collective(
            kind=CollectiveKind.ALL_TO_ALL, group_name="world", input_splits=(1, rows - 1)
        )
        regions[name] = SimpleNamespace(collective=collective)
    return orders_of(SimpleNamespace(calls=calls), regions)


def test_all_to_alls_in_another_order_are_told_apart_by_their_rows(monkeypatch):
    """A rank may send more rows than another one."""
    monkeypatch.setattr(distributed, "ranks_of_group", lambda _: (0, 1))
    own, with_more, crossed = (
        step(*exchanging(*sizes))
        for sizes in [[(3, 8), (3, 4)], [(5, 8), (5, 4)], [(3, 4), (3, 8)]]
    )
    assert Job(2).run(agreeing(own), agreeing(with_more)) == ["agreed", "agreed"]
    for error in Job(2).run(agreeing(own, 0.3), agreeing(crossed, 0.3)):
        assert isinstance(error, RanksDisagree)
        assert "all_to_all_single rows of float32[8] (call" in str(error)


def test_who_has_waited_longer_raises_and_then_follows():
    """The second rank goes on to a graph that the first comes to after its error."""
    job, later = Job(2), step(order("gather"), key="later")

    def tries_both(rank):
        with pytest.raises(RanksDisagree):
            rank.agree(step(order("reduce")), LONG_S)
        return agreeing(later)(rank)

    assert job.run(tries_both, after(0.1, agreeing(later))) == ["agreed", "agreed"]


def test_a_rank_that_does_not_come_is_named():
    (error, _) = Job(2).run(agreeing(step(order("reduce")), 0.1), None)
    assert "rank 1 did not say within 100.00 ms what it begins among ranks [0, 1]" in str(error)
    assert "here the first is reduce (call0)" in str(error)


def test_a_rank_that_has_ended_is_named_before_the_time_is_over():
    job = Job(2)
    job.gone.add(1)
    (error, _) = job.run(agreeing(step(order("reduce"))), None)
    assert "the process of rank 1 has ended" in str(error)


def test_a_refusal_is_heard_and_leaves_nothing_behind():
    job = Job(2)
    first, _ = job.run(agreeing(step(order("reduce"))), after(0.05, refusing()))
    assert "rank 1 raised in place of graph (the first is reduce (call0))" in str(first)
    assert "UnsupportedGraph: not here" in str(first)
    again = agreeing(step(order("reduce")))
    assert job.run(again, after(0.05, again)) == ["agreed", "agreed"]


def in_mesh(rank):
    """The program of one of 2 x 2 ranks, which is in no group with the one opposite."""
    groups = [ranks for ranks in [(0, 1), (2, 3), (0, 2), (1, 3)] if rank in ranks]
    orders = (order("reduce", ranks=ranks, group=str(ranks)) for ranks in groups)
    return after(0.05 * rank, agreeing(step(*orders)))


def test_a_refusal_is_heard_across_a_mesh():
    *errors, _ = Job(4).run(in_mesh(0), in_mesh(1), in_mesh(2), after(0.2, refusing()))
    for error in errors:
        assert isinstance(error, RanksDisagree)
        assert "raised in place of graph" in str(error)
        assert "rank 3 raised" in str(error)


def test_a_mesh_agrees_once_all_are_there():
    assert Job(4).run(*map(in_mesh, range(4))) == ["agreed"] * 4


def test_a_refusal_of_the_try_before_is_no_answer():
    job, own = Job(2), agreeing(step(order("reduce")))
    job.run(refusing(), refusing())
    assert job.run(own, after(0.1, own)) == ["agreed", "agreed"]


def test_all_step_aside_with_one():
    own = agreeing(step(order("reduce")))
    first, second = Job(2).run(own, after(0.05, refusing(steps_aside=True)))
    assert isinstance(first, RankSteppedAside)
    assert "rank 1 runs plain Inductor in place of graph" in str(first)
    assert second == "refused"


def test_no_rank_steps_aside_where_another_runs_its_plan():
    job, own = Job(2), agreeing(step(order("reduce")))
    job.run(own, own)
    _, second = job.run(None, refusing(steps_aside=True))
    assert isinstance(second, RanksDisagree)
    assert "rank 0 runs a plan of a graph for which this rank has none" in str(second)


def test_all_step_aside_from_what_they_had_planned_before():
    job, own = Job(2), agreeing(step(order("reduce")))
    job.run(own, own)
    aside = refusing(steps_aside=True, timeout_s=LONG_S)
    assert job.run(aside, after(0.1, aside)) == ["refused", "refused"]


def test_the_first_that_asks_answers_all_that_ask_as_often():
    job = Job(3)

    def asking(rank):
        heard = []
        for _ in range(2):
            place, first = rank.ask("which plan")
            if first == rank.rank:
                time.sleep(0.05)
                rank.answer(place, f"plan {time.monotonic()}")
            heard.append(rank.answer_of(first, place, LONG_S))
        return heard

    first, second, third = job.run(asking, asking, asking)
    assert first == second == third
    assert len(set(first)) == 2


def test_who_does_not_answer_or_has_ended_is_not_waited_for():
    job = Job(2)
    job.ranks[0].ask("which plan")
    place, first = job.ranks[1].ask("which plan")
    assert first == 0
    assert job.ranks[1].answer_of(0, place, 0.05) is None
    job.gone.add(0)
    assert job.ranks[1].answer_of(0, place, LONG_S) is None
