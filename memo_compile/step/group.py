"""Several live steps of one graph as one step: a group.

    F B  of member 0 .. n-1    ->    F0 F1 .. Fn-1 Bn-1 .. B0
                                     F0 F1 B0 F2 B1 .. Bn-1      in the order that is given

Blocks that are compiled one by one share a graph, and autograd calls it once for each of them
before the first backward begins. Members differ in the names of their calls and values and in
nothing else: regions are lowered once, and a layer of each member is a layer of the group. The
microbatches of a pipeline's stage are members as well: their order is the pipeline schedule's. What
members hand to each other goes through the user's code, in ordinary memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from memo_compile.errors import InputError
from memo_compile.step.movable import Layer, MovableStep
from memo_compile.step.problem import (
    FixedBytes,
    Half,
    Interlude,
    Phase,
    Problem,
    StepCall,
    Storage,
)
from memo_compile.step.tilings import WholeStep

HalfOrder = tuple[tuple[int, bool], ...]
"""The halves in the order in which they run: (member, is a backward)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """How many members there are, and what is known of the memory around them.

    A half is named by its index in the order in which the halves run.
    """

    num_members: int
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
        if self.num_members < 1:
            raise InputError(f"a group has at least 1 member, got {self.num_members}")
        if self.order and not _runs_each_once(self.order, self.num_members):
            raise InputError(
                f"order: expected the forward of each of {self.num_members} members and behind it "
                f"its backward, got {self.order}"
            )


def nested_order(num_members: int) -> HalfOrder:
    """``F0 F1 .. Fn-1 Bn-1 .. B0``: blocks that call each other one after the other."""
    members = range(num_members)
    return (*((at, False) for at in members), *((at, True) for at in reversed(members)))


def _runs_each_once(order: HalfOrder, num_members: int) -> bool:
    place = {half: at for at, half in enumerate(order)}
    if sorted(order) != sorted(nested_order(num_members)):
        return False
    return all(place[member, False] < place[member, True] for member in range(num_members))


def num_user_results(forward: Half, backward: Half) -> int:
    """How many of the forward's results are the user's; those saved for the backward follow."""
    made = {value for value in forward.results if value is not None}
    saved = (value in made or value == backward.handle for value in backward.arguments)
    return len(forward.results) - sum(saved)


def own_name(name: str, member: int) -> str:
    """The name of a call or value in a member; those of the first are as in the graph."""
    return f"{member}:{name}" if member else name


def in_order(halves: tuple[Half, ...], order: HalfOrder) -> tuple[Half, ...]:
    """The halves of a graph's members in the order in which autograd calls them."""
    forward, backward = halves
    return tuple(
        own_half(backward if is_backward else forward, member) for member, is_backward in order
    )


def grouped(problem: Problem, group: Group) -> Problem:
    """The group's step, in which everything is kept, from that of one member."""
    count = group.num_members
    order = group.order or nested_order(count)
    halves = in_order(problem.halves, order)
    tangents = {
        own_name(value, member): size
        for member in range(count)
        for value, size in problem.tangents.items()
    }
    names = tuple(problem.tangents)
    for half, number in group.passed:
        tangents.pop(own_name(names[number], halves[half].member), None)
    inputs = (own_name(value, member) for member in range(count) for value in problem.inputs)
    return replace(
        problem,
        calls=_calls(problem.calls, order),
        inputs=tuple(inputs),
        halves=halves,
        fixed=replace(group.fixed, outputs=count * problem.fixed.outputs),
        layer_classes=tuple(
            replace(cls, num_layers=count * cls.num_layers) for cls in problem.layer_classes
        ),
        tensors={
            own_name(value, member): info
            for member in range(count)
            for value, info in problem.tensors.items()
        },
        tangents=tangents,
        held_until=_held_until(problem, group, halves),
        interludes=group.interludes,
        keeps_outputs=True,
        rebound_bytes=0,
        loss_bytes=0,
        live_steps=1,
    )


def grouped_whole(whole: WholeStep, num_members: int, order: HalfOrder = ()) -> WholeStep:
    """What the graphs say that the members compute together, for the checker."""
    order = order or nested_order(num_members)
    return replace(whole, calls=_calls(whole.calls, order), halves=in_order(whole.halves, order))


def grouped_layers(step: MovableStep, num_members: int) -> tuple[Layer, ...]:
    """The layers of all members, those of the first member first; the classes are the graph's."""
    return tuple(own_layer(layer, member) for member in range(num_members) for layer in step.layers)


def own_layer(layer: Layer, member: int) -> Layer:
    """``layer`` of one live step as that of a member."""
    return Layer(
        class_key=layer.class_key,
        calls=tuple(own_name(call, member) for call in layer.calls),
        inputs=tuple(own_name(value, member) for value in layer.inputs),
        backward=own_name(layer.backward, member),
        values=tuple(own_name(value, member) for value in layer.values),
    )


def _calls(calls: tuple[StepCall, ...], order: HalfOrder) -> tuple[StepCall, ...]:
    instances: dict[str | None, int] = {}
    for call in calls:
        instances[call.layer_class] = max(instances.get(call.layer_class, 0), call.instance + 1)
    found = []
    for member, is_backward in order:
        found += [
            _own_call(call, member, instances[call.layer_class])
            for call in calls
            if (call.phase is Phase.BACKWARD) is is_backward
        ]
    return tuple(found)


def _own_call(call: StepCall, member: int, num_instances: int) -> StepCall:
    return replace(
        call,
        name=own_name(call.name, member),
        inputs=tuple(own_name(value, member) for value in call.inputs),
        outputs=tuple(own_name(value, member) for value in call.outputs),
        waits_for=None if call.waits_for is None else own_name(call.waits_for, member),
        instance=member * num_instances + call.instance,
        member=member,
        into=tuple(replace(into, value=own_name(into.value, member)) for into in call.into),
    )


def own_half(half: Half, member: int) -> Half:
    """``half`` of one live step as that of a member."""
    return replace(
        half,
        constants=tuple(own_name(value, member) for value in half.constants),
        arguments=tuple(own_name(value, member) for value in half.arguments),
        results=tuple(
            value if value is None else own_name(value, member) for value in half.results
        ),
        handle=own_name(half.handle, member),
        member=member,
    )


def _held_until(problem: Problem, group: Group, halves: tuple[Half, ...]) -> Mapping[str, int]:
    """Result that is made in ordinary memory -> the half at whose end it is gone."""
    external = {
        value
        for call in problem.calls
        for output, value in problem.made_by(call)
        if output.storage is Storage.EXTERNAL and output.same_as is None
    }
    names = {own_name(value, member) for value in external for member in range(group.num_members)}
    found: dict[str, int] = {}
    for half, position, until in group.gone:
        value = halves[half].results[position]
        if value in names and value is not None:
            found[value] = until
    return found
