"""Joint steps: several forwards, and their backwards, planned as one step in one frame.

    F B  of member 0 .. n-1    ->    F0 F1 .. Fn-1 Bn-1 .. B0
                                     F0 F1 B0 F2 B1 .. Bn-1      in the order that is given

A member is one forward and its backward. Blocks that are compiled one by one, and the microbatches
of a pipeline's stage, are members of one graph; what graph breaks or buckets cut apart, and several
stages of a rank, are members of several. A graph's regions are lowered once: members of it differ
in the names of their calls and values and in nothing else, and a layer of each member is a layer of
the joint step. What members hand to each other goes through the user's code, in ordinary memory.

Calls and values are named by their member (``member_name``), regions and layer classes by their
graph (``InGraph``), because two graphs use the same names for different things.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from memo_compile.errors import InputError
from memo_compile.step.movable import Layer, MovableStep, StepCosts
from memo_compile.step.problem import FixedBytes, Half, Interlude, Phase, Problem, StepCall, Storage
from memo_compile.step.tilings import Tiling, WholeStep

T = TypeVar("T")

HalfOrder = tuple[tuple[int, bool], ...]
"""The halves in the order in which they run: (member, is a backward)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointStep:
    """Which graphs the members are of, and what is known of the memory around them.

    A half is named by its index in the order in which the halves run.
    """

    graphs: tuple[int, ...]
    """Per member the number of its graph."""
    fixed: FixedBytes
    """Parameters, gradients, optimizer state and inputs of all members; its outputs are ignored."""
    gone: tuple[tuple[int, int, int], ...] = ()
    """(half, position of a result, half at whose end it is gone): all others are kept.

    Of a forward's results only those for the user: what is saved depends on the tiles."""
    passed: tuple[tuple[int, int], ...] = ()
    """(half, which of its incoming gradients) that is a result of another half: it counts there.

    Gradients and results are counted, not arguments: these are others when the graph is compiled
    anew in other tiles."""
    interludes: tuple[Interlude, ...] = ()
    shares: tuple[float, ...] = ()
    """Per member the share of its saved bytes that goes to the host; empty: nobody said."""
    order: HalfOrder = ()
    """Each member's forward, and behind it its backward; empty: ``F0 F1 .. Fn-1 Bn-1 .. B0``."""

    def __post_init__(self) -> None:
        if not self.graphs:
            raise InputError("a joint step has at least 1 member, got 0")
        if self.order and not _runs_each_once(self.order, self.num_members):
            raise InputError(
                f"order: expected the forward of each of {self.num_members} members and behind it "
                f"its backward, got {self.order}"
            )

    @property
    def num_members(self) -> int:
        """How many forwards, each with its backward, are planned as one step."""
        return len(self.graphs)

    @property
    def halves_order(self) -> HalfOrder:
        """``order``, spelled out."""
        return self.order or nested_order(self.num_members)


def nested_order(num_members: int) -> HalfOrder:
    """``F0 F1 .. Fn-1 Bn-1 .. B0``: blocks that call each other one after the other."""
    members = range(num_members)
    return (*((at, False) for at in members), *((at, True) for at in reversed(members)))


def _runs_each_once(order: HalfOrder, num_members: int) -> bool:
    """True for an order with each member's forward, and behind it its backward."""
    place = {half: at for at, half in enumerate(order)}
    if sorted(order) != sorted(nested_order(num_members)):
        return False
    return all(place[member, False] < place[member, True] for member in range(num_members))


def num_user_results(forward: Half, backward: Half) -> int:
    """How many of the forward's results are the user's; those saved for the backward follow."""
    made = {value for value in forward.results if value is not None}
    saved = (value in made or value == backward.handle for value in backward.arguments)
    return len(forward.results) - sum(saved)


def member_name(name: str, member: int) -> str:
    """Returns the name of a call or value in a member; those of the first are as in the graph."""
    return f"{member}:{name}" if member else name


class InGraph(NamedTuple):
    """A name of a region or of a layer class, and the graph in which it has that name."""

    graph: int
    name: str

    @property
    def joint(self) -> str:
        """What it is called in the joint step; names of the first graph are as they are there."""
        return f"g{self.graph}.{self.name}" if self.graph else self.name


def in_graph(joint: str) -> InGraph:
    """Returns the opposite of ``InGraph.joint``."""
    match = re.match(r"g(\d+)\.", joint)
    return InGraph(0, joint) if match is None else InGraph(int(match[1]), joint[match.end() :])


def renamed(values: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """Region or layer class of any graph, by its joint name -> what is known of it."""
    return {
        InGraph(graph, name).joint: value
        for graph, value_of in enumerate(values)
        for name, value in value_of.items()
    }


def joint_problem(problems: Sequence[Problem], joint: JointStep) -> Problem:
    """The step of all members, in which everything is kept; ``problems`` are the graphs'."""
    graphs = [problems[graph] for graph in joint.graphs]
    halves = _in_order([problem.halves for problem in graphs], joint.halves_order)
    tangents = {
        member_name(value, member): size
        for member, problem in enumerate(graphs)
        for value, size in problem.tangents.items()
    }
    for half, number in joint.passed:
        member = halves[half].member
        tangents.pop(member_name(list(graphs[member].tangents)[number], member), None)
    return Problem(
        regions={
            name: region if region.name == name else replace(region, name=name)
            for name, region in renamed(problem.regions for problem in problems).items()
        },
        calls=_calls([problem.calls for problem in graphs], joint),
        inputs=tuple(
            member_name(value, member)
            for member, problem in enumerate(graphs)
            for value in problem.inputs
        ),
        halves=halves,
        fixed=replace(joint.fixed, outputs=sum(problem.fixed.outputs for problem in graphs)),
        layer_classes=tuple(
            replace(layer_class, num_layers=layer_class.num_layers * joint.graphs.count(graph))
            for graph, problem in enumerate(problems)
            for layer_class in problem.layer_classes
        ),
        tensors={
            member_name(value, member): info
            for member, problem in enumerate(graphs)
            for value, info in problem.tensors.items()
        },
        tangents=tangents,
        held_until=_held_until(graphs, joint, halves),
        interludes=joint.interludes,
        keeps_outputs=True,
    )


def joint_whole(wholes: Sequence[WholeStep], joint: JointStep) -> WholeStep:
    """Returns what the graphs say that the members compute together, for the checker."""
    members = [wholes[graph] for graph in joint.graphs]
    tilings = {
        InGraph(graph, region).joint: _tiling(tiling, graph)
        for graph, whole in enumerate(wholes)
        for region, tiling in whole.tilings.items()
    }
    return WholeStep(
        calls=_calls([whole.calls for whole in members], joint),
        halves=_in_order([whole.halves for whole in members], joint.halves_order),
        tilings=tilings,
    )


def joint_layers(
    steps: Sequence[MovableStep], joint: JointStep, problem: Problem, costs: StepCosts
) -> MovableStep:
    """Returns the layers of all members, in forward order; ``steps`` are those of the graphs."""
    classes = renamed(step.classes for step in steps)
    return replace(
        steps[0],
        problem=problem,
        classes={key: replace(layer_class, key=key) for key, layer_class in classes.items()},
        layers=tuple(
            _layer_of(layer, member, graph)
            for member, graph in enumerate(joint.graphs)
            for layer in steps[graph].layers
        ),
        costs=costs,
        shares=joint.shares,
    )


def joint_costs(costs: Sequence[StepCosts]) -> StepCosts:
    """Returns the seconds of all graphs' regions; copies are as fast as those of the first."""
    links = (graph_costs.comm_bytes_per_s for graph_costs in costs)
    return replace(
        costs[0],
        region_s=renamed(graph_costs.region_s for graph_costs in costs),
        comm_bytes_per_s=next((link for link in links if link is not None), None),
        collective_s=renamed(graph_costs.collective_s or {} for graph_costs in costs) or None,
        comm_slowdown=max(graph_costs.comm_slowdown for graph_costs in costs),
    )


def _layer_of(layer: Layer, member: int, graph: int) -> Layer:
    """Returns ``layer`` of one graph as the layer of a member of the joint step."""
    return Layer(
        class_key=InGraph(graph, layer.class_key).joint,
        calls=tuple(member_name(call, member) for call in layer.calls),
        inputs=tuple(member_name(value, member) for value in layer.inputs),
        backward=member_name(layer.backward, member),
        values=tuple(member_name(value, member) for value in layer.values),
    )


def _in_order(halves: Sequence[Sequence[Half]], order: HalfOrder) -> tuple[Half, ...]:
    """Returns the halves of all members; each has a forward and, as second, a backward."""
    return tuple(_half_of(halves[member][is_backward], member) for member, is_backward in order)


def _half_of(half: Half, member: int) -> Half:
    """Returns ``half`` of one graph as that of a member, its values under the member's names."""
    return replace(
        half,
        constants=tuple(member_name(value, member) for value in half.constants),
        arguments=tuple(member_name(value, member) for value in half.arguments),
        results=tuple(
            value if value is None else member_name(value, member) for value in half.results
        ),
        handle=member_name(half.handle, member),
        member=member,
    )


def _calls(calls: Sequence[Sequence[StepCall]], joint: JointStep) -> tuple[StepCall, ...]:
    """Returns the calls of all members, in order; layers of one class are numbered through."""
    counts: dict[str | None, int] = {}
    named: list[list[StepCall]] = []
    for member, (graph, of_member) in enumerate(zip(joint.graphs, calls, strict=True)):
        named.append([_call_of(call, member, graph, counts) for call in of_member])
        for call in named[-1]:
            counts[call.layer_class] = max(counts.get(call.layer_class, 0), call.instance + 1)
    return tuple(
        call
        for member, is_backward in joint.halves_order
        for call in named[member]
        if (call.phase is Phase.BACKWARD) is is_backward
    )


def _call_of(call: StepCall, member: int, graph: int, counts: Mapping[str | None, int]) -> StepCall:
    """``call`` of one graph as a member's; ``counts``: layers per class of the members before."""
    layer_class = None if call.layer_class is None else InGraph(graph, call.layer_class).joint
    return replace(
        call,
        name=member_name(call.name, member),
        region=InGraph(graph, call.region).joint,
        inputs=tuple(member_name(value, member) for value in call.inputs),
        outputs=tuple(member_name(value, member) for value in call.outputs),
        waits_for=None if call.waits_for is None else member_name(call.waits_for, member),
        layer_class=layer_class,
        instance=call.instance + counts.get(layer_class, 0),
        member=member,
        into=tuple(replace(into, value=member_name(into.value, member)) for into in call.into),
    )


def _held_until(
    graphs: Sequence[Problem], joint: JointStep, halves: Sequence[Half]
) -> dict[str, int]:
    """Result that is made in ordinary memory -> the half at whose end it is gone."""
    external = {
        member_name(value, member)
        for member, problem in enumerate(graphs)
        for call in problem.calls
        for output, value in problem.made_by(call)
        if output.storage is Storage.EXTERNAL and output.same_as is None
    }
    results = ((halves[half].results[position], until) for half, position, until in joint.gone)
    return {value: until for value, until in results if value is not None and value in external}


def _tiling(tiling: Tiling, graph: int) -> Tiling:
    """Returns ``tiling`` with the names that its regions have in the joint step."""

    def name(region: str) -> str:
        return InGraph(graph, region).joint

    return replace(
        tiling,
        before=name(tiling.before),
        runs=tuple(
            replace(
                run,
                region=name(run.region),
                sums=tuple(replace(total, region=name(total.region)) for total in run.sums),
            )
            for run in tiling.runs
        ),
        after=None if tiling.after is None else name(tiling.after),
    )
