"""Graphs cut at their collectives: what begins when, what runs beside it, what is left alone."""

import operator

import pytest
import torch
from memo_runtime.collectives import Collective, CollectiveKind
from torch import fx

from memo_compile.analysis.splittable import collective_of, may_reuse_input, split_collectives
from memo_compile.offline.shapes import parallel
from memo_compile.passes.collective_cut import pieces
from memo_compile.step.problem import CallKind

aten, ranks = torch.ops.aten, torch.ops._c10d_functional
WORDS = {CallKind.RUN: "run", CallKind.ISSUE: "issue", CallKind.COMM_WAIT: "wait"}


class Graph:
    """An fx graph whose values are 4 x 4, unless said."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, name, value=None):
        node = self.graph.placeholder(name)
        node.meta["val"] = like() if value is None else value
        return node

    def op(self, name, target, *args, value=None, **kwargs):
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta["val"] = like() if value is None else value
        return node

    def reduced(self, name, source, group="0", value=None):
        """A collective and its wait."""
        issue = self.op(name, ranks.all_reduce.default, source, "sum", group, value=value)
        return self.op(f"{name}_there", ranks.wait_tensor.default, issue, value=value)

    def cut(self, *results, joins=False):
        """The pieces, each a word and the names of its nodes."""
        self.graph.output(results)
        nodes = [node for node in self.graph.nodes if node.op == "call_function"]
        found = pieces(nodes, split_collectives(nodes), set(results), joins=joins)
        assert sorted(node.name for piece in found for node in piece.nodes) == sorted(
            node.name for node in nodes
        )
        return [f"{WORDS[piece.kind]} {' '.join(n.name for n in piece.nodes)}" for piece in found]


def like(*size, stride=None):
    made = torch.empty(size or (4, 4), device="meta")
    return made if stride is None else made.as_strided(size, stride)


@pytest.fixture
def graph():
    return Graph()


def test_a_weights_gradient_runs_beside_the_collective(graph):
    a, weight = graph.input("a"), graph.input("weight")
    dx = graph.op("dx", aten.mm.default, a, weight)
    there = graph.reduced("c", dx)
    dw = graph.op("dw", aten.mm.default, weight, a)
    e = graph.op("e", aten.relu.default, there)
    assert graph.cut(dw, e) == ["run dx", "issue c", "run dw", "wait c_there", "run e"]


def test_several_are_in_flight_at_once(graph):
    """As the parallel layers of one input make them: each begins when its input is there."""
    a = graph.input("a")
    parts = []
    for name in "qkv":
        parts.append(graph.reduced(name, graph.op(f"d{name}", aten.mm.default, a, a)))
    first = graph.op("first", aten.add.Tensor, parts[0], parts[1])
    second = graph.op("second", aten.add.Tensor, first, parts[2])
    assert graph.cut(second) == [
        *("run dq", "issue q", "run dk", "issue k", "run dv", "issue v"),
        *("wait q_there", "wait k_there", "wait v_there", "run first second"),
    ]


def test_what_only_prepares_later_work_waits_for_it(graph):
    """It would be held in memory until the collective is there."""
    a = graph.input("a")
    there = graph.reduced("c", graph.op("dx", aten.mm.default, a, a))
    prepared = graph.op("prepared", aten.exp.default, a)
    e = graph.op("e", aten.mul.Tensor, there, prepared)
    assert graph.cut(e) == ["run dx", "issue c", "wait c_there", "run prepared e"]


def test_a_collective_of_a_collective(graph):
    a = graph.input("a")
    there = graph.reduced("c", graph.op("dx", aten.mm.default, a, a))
    norm = graph.op("norm", aten.exp.default, there)
    free = graph.op("free", aten.sin.default, a)
    again = graph.reduced("d", norm)
    assert graph.cut(again, free) == [
        *("run dx", "issue c", "run free", "wait c_there", "run norm", "issue d", "wait d_there"),
    ]


@pytest.mark.parametrize("group", ["0", "1"])
def test_what_was_begun_before_is_there_before(graph, group):
    """Only collectives of one group end in their order: others are waited for where they must."""
    a = graph.input("a")
    first = graph.reduced("c", graph.op("dx", aten.mm.default, a, a))
    second = graph.reduced("d", graph.op("dy", aten.exp.default, a), group)
    dw = graph.op("dw", aten.mm.default, first, a)
    third = graph.reduced("e", graph.op("norm", aten.exp.default, second))
    begun = ["run dx", "issue c", "run dy", "issue d"]
    if group == "0":
        rest = ["wait c_there", "run dw", "wait d_there", "run norm", "issue e"]
        assert graph.cut(dw, third) == [*begun, *rest, "wait e_there"]
    else:
        rest = ["wait d_there", "run norm", "issue e", "wait c_there", "run dw"]
        assert graph.cut(dw, third) == [*begun, *rest, "wait e_there"]


@pytest.mark.parametrize("joins", [True, False])
def test_what_hands_over_more_than_is_sent_is_one_piece(graph, joins):
    """A chain of wide values can run in tiles then; a narrow collective begins later."""
    a, narrow = graph.input("a"), like(2)
    wide = graph.op("wide", aten.exp.default, a)
    dx = graph.op("dx", aten.sum.dim_IntList, wide, [0], value=narrow)
    small = graph.reduced("c", dx, value=narrow)
    end = graph.op("end", aten.sin.default, wide)
    large = graph.reduced("d", graph.op("dy", aten.cos.default, end))
    last = graph.op("last", aten.mul.Tensor, graph.op("more", aten.exp.default, end), large)
    parts = ["run wide dx end dy", "issue c"] if joins else ["run wide dx", "issue c", "run end dy"]
    assert graph.cut(small, last, joins=joins) == [
        *parts,
        *("issue d", "wait c_there", "wait d_there", "run more last"),
    ]


def test_a_collective_begins_before_those_inside_the_next_piece(graph):
    """Ranks whose steps have no tiles, or other sizes, begin them in this order."""
    a, narrow = graph.input("a"), like(2)
    wide = graph.op("wide", aten.exp.default, a)
    dx = graph.op("dx", aten.sum.dim_IntList, wide, [0], value=narrow)
    small = graph.reduced("c", dx, value=narrow)
    inside = graph.op("inside", ranks.broadcast.default, wide, 0, "0")
    there = graph.op("there", ranks.wait_tensor.default, inside)
    expected = ["run wide dx", "issue c", "run inside there", "wait c_there"]
    assert graph.cut(small, there, joins=True) == expected


def test_an_input_that_is_there_begins_at_once(graph):
    a = graph.input("a")
    there = graph.reduced("c", a)
    assert graph.cut(there) == ["issue c", "wait c_there"]


def test_what_a_gradient_only_delays_is_read_when_that_is_there(graph):
    """Megatron gathers tokens again behind a gradient; until then memory need not hold them."""
    a, shard = graph.input("a"), graph.input("shard")
    grad = graph.op("grad", aten.mm.default, a, a)
    again = graph.reduced("c", graph.op("late", parallel.behind._opoverload, shard, grad))
    dw = graph.op("dw", aten.mm.default, grad, again)
    assert graph.cut(dw) == ["run grad", "run late", "issue c", "wait c_there", "run dw"]


def test_a_write_into_the_input_comes_after_the_wait(graph):
    state = graph.input("state")
    there = graph.reduced("c", state)
    new = graph.op("new", aten.exp.default, state)
    written = graph.op("written", aten.copy_.default, state, new)
    after = graph.op("after", aten.add.Tensor, there, written)
    assert graph.cut(after) == ["issue c", "wait c_there", "run new written after"]


def test_random_numbers_are_drawn_in_order(graph):
    """The second does not run beside the collective that the first one waits for."""
    a = graph.input("a")
    there = graph.reduced("c", a)
    first = graph.op("first", aten.rand_like.default, there)
    second = graph.op("second", aten.rand_like.default, a)
    assert graph.cut(first, second) == ["issue c", "wait c_there", "run first second"]


def test_items_stay_with_their_list(graph):
    a = graph.input("a")
    both = graph.op("both", aten.topk.default, a, 2, value=(like(4, 2), like(4, 2)))
    values = graph.op("values", operator.getitem, both, 0, value=like(4, 2))
    there = graph.reduced("c", graph.op("dx", aten.exp.default, a))
    places = graph.op("places", operator.getitem, both, 1, value=like(4, 2))
    late = graph.op("late", aten.mm.default, there, places, value=like(4, 2))
    assert graph.cut(values, late) == [
        *("run dx", "issue c", "run both values places", "wait c_there", "run late"),
    ]


@pytest.mark.parametrize(
    ("target", "arguments", "expected"),
    [
        (ranks.all_reduce, ("avg", "7"), {"kind": "all_reduce", "reduce_op": "avg"}),
        (ranks.all_gather_into_tensor, (2, "7"), {"kind": "all_gather_into_tensor"}),
        (
            ranks.reduce_scatter_tensor,
            ("max", 2, "7"),
            {"kind": "reduce_scatter_tensor", "reduce_op": "max"},
        ),
        (
            ranks.all_to_all_single,
            ([1, 3], [2, 2], "7"),
            {"kind": "all_to_all_single", "output_splits": (1, 3), "input_splits": (2, 2)},
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_collectives_are_read(graph, target, arguments, expected):
    node = graph.op("c", target.default, graph.input("a"), *arguments)
    kind = CollectiveKind(expected.pop("kind"))
    assert collective_of(node) == Collective(kind=kind, group_name="7", **expected)


def refused(graph, issue, *more):
    wait = graph.op("there", ranks.wait_tensor.default, issue)
    graph.graph.output((wait, *more))
    assert split_collectives(graph.graph.nodes) == {}


def test_other_operators_are_left_in_their_region(graph):
    a = graph.input("a")
    assert collective_of(graph.op("e", aten.exp.default, a)) is None
    assert collective_of(graph.op("b", ranks.broadcast.default, a, 0, "0")) is None
    assert collective_of(graph.op("i", ranks.all_reduce_.default, a, "sum", "0")) is None
    assert collective_of(graph.op("x", ranks.all_reduce.default, a, "premul_sum", "0")) is None
    assert collective_of(graph.op("g", ranks.all_reduce.default, a, "sum", a)) is None


def test_a_result_that_is_read_before_its_wait_is_left(graph):
    issue = graph.op("c", ranks.all_reduce.default, graph.input("a"), "sum", "0")
    refused(graph, issue, graph.op("early", aten.view.default, issue, [16], value=like(16)))


def test_a_result_that_is_no_dense_block_is_left(graph):
    turned = like(4, 4, stride=(1, 4))
    refused(
        graph, graph.op("c", ranks.all_reduce.default, graph.input("a"), "sum", "0", value=turned)
    )


def test_an_input_that_is_a_part_is_left(graph):
    """A slice would have to keep its whole source alive under its own name."""
    part = graph.op("part", aten.slice.Tensor, graph.input("a"), 0, 0, 2, value=like(2, 4))
    whole = graph.op("whole", aten.expand.default, part, [2, 4], value=like(2, 4))
    issue = graph.op("c", ranks.all_reduce.default, whole, "sum", "0", value=like(2, 4))
    assert issue in split_collectives_of(graph, issue), "a part that another call makes is a value"


def split_collectives_of(graph, issue):
    graph.graph.output((graph.op("there", ranks.wait_tensor.default, issue),))
    return split_collectives(graph.graph.nodes)


def test_the_result_takes_the_place_of_what_nobody_else_reads(graph):
    made = graph.op("made", aten.exp.default, graph.input("a"))
    shown = graph.op("shown", aten.view.default, made, [16], value=like(16))
    issue = graph.op("c", ranks.all_reduce.default, shown, "sum", "0", value=like(16))
    assert may_reuse_input(issue)
    graph.op("other", aten.sin.default, made)
    assert not may_reuse_input(issue)


def test_the_place_of_an_input_or_of_a_part_is_not_taken(graph):
    a = graph.input("a")
    assert not may_reuse_input(graph.op("c", ranks.all_reduce.default, a, "sum", "0"))
    made = graph.op("made", aten.exp.default, a)
    part = graph.op("part", aten.slice.Tensor, made, 0, 0, 2, value=like(2, 4))
    assert not may_reuse_input(
        graph.op("d", ranks.all_reduce.default, part, "sum", "0", value=like(2, 4))
    )
    other = graph.op("e", ranks.all_gather_into_tensor.default, made, 2, "0", value=like(8, 4))
    assert not may_reuse_input(other)
