"""The graphs of one step as one step: the pieces of a model that graph breaks or buckets cut.

    F B  of graph 0, F B  of graph 1, ..    ->    F0 F1 .. Fn-1 Bn-1 .. B0
                                                  F0 F1 B1 F2 B0 ..      in the group's order

A member is one forward and its backward; several may be of one graph. Pieces of a model have a
single turn from forward to backward. Where a rank of a pipeline has several stages, the members are
(stage, microbatch) in the order of its schedule.
Calls and values are named by their member, regions and layer classes by their graph, because two
graphs use the same names for different things. What pieces hand to each other goes through the
user's code, in ordinary memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from memo_compile.step.group import (
    Group,
    HalfOrder,
    nested_order,
    own_half,
    own_layer,
    own_name,
)
from memo_compile.step.movable import MovableStep, StepCosts
from memo_compile.step.problem import Half, Phase, Problem, StepCall, Storage
from memo_compile.step.tilings import Tiling, WholeStep

T = TypeVar("T")


class InGraph(NamedTuple):
    """A name of a region or of a layer class, and the graph in which it has that name."""

    graph: int
    name: str

    @property
    def joined(self) -> str:
        """What it is called in the step of all graphs."""
        return f"g{self.graph}.{self.name}"


def in_graph(joined: str) -> InGraph:
    """The opposite of ``InGraph.joined``."""
    graph, _, name = joined.partition(".")
    return InGraph(int(graph.removeprefix("g")), name)


def renamed(values: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """Region or layer class -> what is known of it, of all graphs, by its joined name."""
    return {
        InGraph(graph, name).joined: value
        for graph, known in enumerate(values)
        for name, value in known.items()
    }


def joined_problem(problems: Sequence[Problem], members: Sequence[int], group: Group) -> Problem:
    """The step of all members, in which everything is kept; ``members`` are their graphs."""
    own = [problems[graph] for graph in members]
    order = group.order or nested_order(len(own))
    halves = _in_order([problem.halves for problem in own], order)
    tangents = {
        own_name(value, member): size
        for member, problem in enumerate(own)
        for value, size in problem.tangents.items()
    }
    for half, number in group.passed:
        member = halves[half].member
        tangents.pop(own_name(list(own[member].tangents)[number], member), None)
    return Problem(
        regions={
            name: replace(region, name=name)
            for name, region in renamed(problem.regions for problem in problems).items()
        },
        calls=_calls([problem.calls for problem in own], members, order),
        inputs=tuple(
            own_name(value, member)
            for member, problem in enumerate(own)
            for value in problem.inputs
        ),
        halves=halves,
        fixed=replace(group.fixed, outputs=sum(problem.fixed.outputs for problem in own)),
        layer_classes=tuple(
            replace(known, num_layers=known.num_layers * list(members).count(graph))
            for graph, problem in enumerate(problems)
            for known in problem.layer_classes
        ),
        tensors={
            own_name(value, member): info
            for member, problem in enumerate(own)
            for value, info in problem.tensors.items()
        },
        tangents=tangents,
        held_until=_held_until(own, group, halves),
        interludes=group.interludes,
        keeps_outputs=True,
    )


def joined_whole(
    wholes: Sequence[WholeStep], members: Sequence[int], order: HalfOrder = ()
) -> WholeStep:
    """What the graphs say that the members compute together, for the checker."""
    order = order or nested_order(len(members))
    own = [wholes[graph] for graph in members]
    tilings = {
        InGraph(graph, region).joined: _tiling(tiling, graph)
        for graph, whole in enumerate(wholes)
        for region, tiling in whole.tilings.items()
    }
    return WholeStep(
        calls=_calls([whole.calls for whole in own], members, order),
        halves=_in_order([whole.halves for whole in own], order),
        tilings=tilings,
    )


def joined_step(
    steps: Sequence[MovableStep], members: Sequence[int], problem: Problem, costs: StepCosts
) -> MovableStep:
    """The layers of all members, in forward order; ``steps`` are those of the graphs."""
    layers = [
        replace(own_layer(layer, member), class_key=InGraph(graph, layer.class_key).joined)
        for member, graph in enumerate(members)
        for layer in steps[graph].layers
    ]
    return MovableStep(
        problem=problem,
        classes={
            key: replace(found, key=key)
            for key, found in renamed(step.classes for step in steps).items()
        },
        layers=tuple(layers),
        costs=costs,
        token_granule=steps[0].token_granule,
    )


def _in_order(halves: Sequence[Sequence[Half]], order: HalfOrder) -> tuple[Half, ...]:
    """The halves of all members; each has a forward and, as second, a backward."""
    return tuple(own_half(halves[member][is_backward], member) for member, is_backward in order)


def _calls(
    calls: Sequence[Sequence[StepCall]], members: Sequence[int], order: HalfOrder
) -> tuple[StepCall, ...]:
    """The calls of all members; layers of one class are numbered through."""
    counts: dict[str, int] = {}
    found: list[list[StepCall]] = []
    for member, (graph, own) in enumerate(zip(members, calls, strict=True)):
        mine = [_own_call(call, member, graph, counts) for call in own]
        for call in mine:
            if call.layer_class is not None:
                counts[call.layer_class] = max(counts.get(call.layer_class, 0), call.instance + 1)
        found.append(mine)
    return tuple(
        call
        for member, is_backward in order
        for call in found[member]
        if (call.phase is Phase.BACKWARD) is is_backward
    )


def _own_call(call: StepCall, member: int, graph: int, counts: Mapping[str, int]) -> StepCall:
    known = None if call.layer_class is None else InGraph(graph, call.layer_class).joined
    return replace(
        call,
        name=own_name(call.name, member),
        region=InGraph(graph, call.region).joined,
        inputs=tuple(own_name(value, member) for value in call.inputs),
        outputs=tuple(own_name(value, member) for value in call.outputs),
        waits_for=None if call.waits_for is None else own_name(call.waits_for, member),
        layer_class=known,
        instance=call.instance + (0 if known is None else counts.get(known, 0)),
        member=member,
        into=tuple(replace(into, value=own_name(into.value, member)) for into in call.into),
    )


def _held_until(
    problems: Sequence[Problem], group: Group, halves: Sequence[Half]
) -> dict[str, int]:
    """Result that is made in ordinary memory -> the half at whose end it is gone."""
    external = {
        own_name(value, member)
        for member, problem in enumerate(problems)
        for call in problem.calls
        for output, value in problem.made_by(call)
        if output.storage is Storage.EXTERNAL and output.same_as is None
    }
    found: dict[str, int] = {}
    for half, position, until in group.gone:
        value = halves[half].results[position]
        if value is not None and value in external:
            found[value] = until
    return found


def _tiling(tiling: Tiling, graph: int) -> Tiling:
    def name(region: str) -> str:
        return InGraph(graph, region).joined

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


def joined_costs(costs: Sequence[StepCosts]) -> StepCosts:
    """The seconds of all graphs' regions; copies are as fast as those of the first."""
    links = (known.comm_bytes_per_s for known in costs)
    return replace(
        costs[0],
        region_s=renamed(known.region_s for known in costs),
        comm_bytes_per_s=next((link for link in links if link is not None), None),
        collective_s=renamed(known.collective_s or {} for known in costs) or None,
        comm_slowdown=max(known.comm_slowdown for known in costs),
    )
