"""The runner of passes: what it skips, dumps, verifies, times, and makes of a failure."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.errors import ConfigError, PassFailed, UnsupportedGraph
from memo_compile.passes.cse import MergeCommonSubexpressions
from memo_compile.passes.order import PASSES, selection
from memo_compile.passes.runner import PassRunner, PassSelection


def two_sines() -> fx.GraphModule:
    with FakeTensorMode():
        return make_fx(lambda x: (x.sin() + 1, x.sin() + 2))(torch.empty(4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Appends an operator that nobody reads, and claims what it is told to."""

    name: str = "append"
    modified: bool = True
    is_required: ClassVar[bool] = False

    def __call__(self, gm):
        with gm.graph.inserting_before(gm.graph.output_node()):
            gm.graph.call_function(torch.ops.aten.relu.default, (next(iter(gm.graph.nodes)),))
        return PassResult(gm, self.modified)


class Needed:
    """Changes nothing, and has to run."""

    name = "needed"
    is_required = True

    def __call__(self, gm):
        return PassResult(gm, False)


class Broken:
    """Raises what no code raises on purpose, or what it was given."""

    name = "broken"
    is_required = False

    def __init__(self, error=None):
        self.error = error or KeyError("seq_nr")

    def __call__(self, gm):
        raise self.error


def num_relus(gm: fx.GraphModule) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default))


def test_a_pass_that_lies_is_caught():
    with pytest.raises(PassFailed, match="pass append on joint: says unchanged"):
        PassRunner().run(two_sines(), [Append(modified=False)], stage="joint")


def test_dump_before_and_after_a_pass(tmp_path):
    PassRunner(tmp_path).run(two_sines(), [MergeCommonSubexpressions()], stage="joint")
    before, after = sorted(tmp_path.iterdir())
    assert before.name == "00-joint-merge-common-subexpressions.before.txt"
    assert after.name == "01-joint-merge-common-subexpressions.after.txt"
    assert before.read_text().count("aten.sin") == 2
    assert after.read_text().count("aten.sin") == 1


def test_a_pass_that_raises_is_named():
    with pytest.raises(PassFailed, match="pass broken on joint: KeyError: 'seq_nr'"):
        PassRunner().run(two_sines(), [Broken()], stage="joint")


def test_what_a_pass_raises_on_purpose_stays_as_it_is():
    with pytest.raises(UnsupportedGraph, match="no such size"):
        PassRunner().run(two_sines(), [Broken(UnsupportedGraph("no such size"))], stage="joint")


def test_a_skipped_pass_does_not_run_and_leaves_nothing(tmp_path):
    runs = PassRunner(tmp_path, PassSelection(skipped=frozenset({"broken"})))
    gm = runs.run(two_sines(), [Broken(), Append()], stage="joint")
    assert num_relus(gm) == 1
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["00-joint-append.before.txt", "01-joint-append.after.txt"]


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_bisecting_ends_after_so_many_passes_that_need_not_run(limit):
    """Required passes run behind the limit too; graphs of one runner count together."""
    runs = PassRunner(selection=PassSelection(limit=limit))
    found = runs.run(two_sines(), [Append(), Needed(), Append()], stage="forward")
    found = runs.run(found, [Append()], stage="backward")
    assert num_relus(found) == min(limit, 3)
    assert "needed" in runs.times()


def test_a_required_pass_refuses_to_be_skipped():
    runs = PassRunner(selection=PassSelection(skipped=frozenset({"needed"})))
    with pytest.raises(ConfigError, match="needed is required"):
        runs.run(two_sines(), [Needed()], stage="joint")


def test_the_option_names_passes_of_memo():
    chosen = selection(("-hoist-invariants", "-accumulate-in-place", "..2"))
    assert chosen.skipped == {"hoist-invariants", "accumulate-in-place"}
    assert chosen.limit == 2
    assert selection(()).limit is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("hoist-invariants", "expected -NAME or ..N, got 'hoist-invariants'"),
        ("-hoist-invariant", "unknown pass 'hoist-invariant'; did you mean 'hoist-invariants'"),
        (
            "-?",
            "known passes: inline-regions, read-outside, put-numbers, needless-masks, slice-first",
        ),
        ("-lease-saved", "lease-saved is required"),
        ("..x", "expected a number of passes behind '..', got '..x'"),
        ("..-1", "expected a number of passes"),
    ],
)
def test_what_the_option_cannot_mean_is_refused(entry, message):
    with pytest.raises(ConfigError, match=message):
        selection((entry,))


def test_every_pass_has_a_name_of_its_own():
    names = [graph_pass.name for graph_pass in PASSES]
    assert len(set(names)) == len(names)


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


def halves(made: list[fx.GraphModule]) -> dict[str, fx.GraphModule]:
    return {f"half{number}": gm for number, gm in enumerate(made)}


def test_dump_before_and_after_a_derivation(tmp_path):
    gm = two_sines()
    both = PassRunner(tmp_path).derive(
        "cut", gm, lambda: [copy_of(gm), copy_of(gm)], stage="joint", graphs=halves
    )
    assert len(both) == 2
    before, after = sorted(tmp_path.iterdir())
    assert before.name == "00-joint-cut.before.txt"
    assert before.read_text().count("aten.sin") == 2
    assert after.name == "01-joint-cut.after.txt"
    assert after.read_text().count("aten.sin") == 4
    assert [line for line in after.read_text().splitlines() if line.startswith("#")] == [
        "# half0",
        "# half1",
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda gm: Append()(gm),
        lambda gm: next(iter(reversed(gm.graph.nodes))).update_arg(0, ()),
    ],
    ids=["a-node", "an-argument"],
)
def test_a_derivation_leaves_its_graph_as_it_is(change):
    gm = two_sines()
    with pytest.raises(PassFailed, match="cut of joint: changed the graph that it reads"):
        PassRunner().derive("cut", gm, lambda: change(gm), stage="joint", graphs=lambda _: {})
