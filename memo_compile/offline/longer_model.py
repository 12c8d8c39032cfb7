"""Makes the step of a model of many equal layers from the step of a few that were traced.

Layers of one class are calls of the same regions, and what a layer reads lies a fixed number of
layers away: ``add_6`` of layer 2 is to layer 3 what ``embedding`` of layer 1 is to layer 2. So the
values of a step form chains, with one value for each layer. To add a layer, the middle layer's
calls are copied, and every chain gets one more value:

    F1(e, p1) -> a1    F2(a1, p2) -> a2                            F3(a2, p3) -> a3
    F1(e, p1) -> a1    F2(a1, p2) -> a2    F2(a2, p2') -> a2'    F3(a2', p3) -> a3

A *unit* is one repetition of the layer class; of a class with a period of 2 it has two layers.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import fx

from memo_compile.analysis.joint_units import JointUnits
from memo_compile.analysis.layers import LayerStructure
from memo_compile.driver.stages import CutStep
from memo_compile.offline.offline_step import NotUniform as NotUniform
from memo_compile.passes.cut import Cut, CutCall
from memo_compile.step.problem import Phase
from memo_compile.torch_private import fx_graphs

Name = TypeVar("Name", str, str | None)


MIN_UNITS = 5
"""Fewest traced units: two at each end, since the outermost may do extra work, and one between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongerModel:
    """The model that is planned, where a model with fewer layers is traced in its place."""

    num_layers: int
    """All layers of the planned model."""
    untraced: Sequence[torch.Tensor]
    """Parameters and buffers of the layers that are not traced."""


def with_layers(step: CutStep, num_layers: int) -> CutStep:
    """Returns ``step`` as if its model had ``num_layers`` layers, by copying the middle unit.

    Raises NotUniform: the layers differ, or ``num_layers`` is no whole number of units more.
    """
    classes = step.units.structure.classes
    if len(classes) != 1:
        raise NotUniform(f"{len(classes)} classes of layers")
    (layers,) = classes
    num_copies, remainder = divmod(num_layers - layers.num_layers, layers.period)
    first, last = layers.units[0], layers.units[-1]
    if remainder or num_copies < 0 or layers.units != tuple(range(first, last + 1)):
        raise NotUniform(f"{layers.num_layers} layers in units {layers.units} become {num_layers}")
    if not num_copies:
        return step
    if len(layers.units) < MIN_UNITS:
        raise NotUniform(f"{len(layers.units)} units of layers, of which the ends may differ")
    middle = layers.units[len(layers.units) // 2]
    return _LongerStep(step, middle=middle, num_copies=num_copies).build()


class _LongerStep:
    """Builds the step with ``num_copies`` copies of unit ``middle`` behind that unit."""

    def __init__(self, step: CutStep, *, middle: int, num_copies: int) -> None:
        self._old = step
        self._middle, self._num_copies = middle, num_copies
        self._units = step.units.structure.classes[0].units  # of the layers, first to last
        self._num_units = step.units.num_units  # all, those before and behind the layers too
        arguments = {*step.forward.arguments, *step.backward.arguments}
        self._chains = _Chains(self._calls_of_units(), self._units, arguments)

    def build(self) -> CutStep:
        """Returns the longer step."""
        return replace(
            self._old,
            forward=self._half(self._old.forward),
            backward=self._half(self._old.backward),
            units=self._longer_units(),
        )

    def _unit(self, call: CutCall, phase: Phase) -> int:
        """Returns the unit of ``call``; the backward runs through the units in reverse."""
        return call.position if phase is Phase.FORWARD else self._num_units - 1 - call.position

    def _calls_of_units(self) -> dict[int, list[CutCall]]:
        calls: dict[int, list[CutCall]] = defaultdict(list)
        for half in (self._old.forward, self._old.backward):
            for call in (*half.calls, *half.whole_calls, *half.layer_calls):
                calls[self._unit(call, half.phase)].append(call)
        return calls

    def _half(self, half: Cut) -> Cut:
        """Returns the forward or backward with the copies of the middle unit."""
        arguments = self._with_copies(half.arguments)
        copied_nodes = {
            self._chains.copy(name, number): node
            for name, node in half.nodes.items()
            if self._chains.unit_of.get(name) == self._middle
            for number in range(1, self._num_copies + 1)
        }
        return replace(
            half,
            calls=self._longer_calls(half.calls, half.phase),
            whole_calls=self._longer_calls(half.whole_calls, half.phase),
            layer_calls=self._longer_calls(half.layer_calls, half.phase),
            arguments=arguments,
            results=self._with_copies(half.results),
            leased=self._with_copies(half.leased),
            nodes={**half.nodes, **copied_nodes},
            half_graph=self._graph_of_inputs(half, arguments),
        )

    def _longer_calls(self, calls: Sequence[CutCall], phase: Phase) -> tuple[CutCall, ...]:
        """Returns ``calls`` in their order, with the copies of the middle unit's beside those."""
        longer_calls: list[CutCall] = []
        for unit, group in itertools.groupby(calls, lambda call: self._unit(call, phase)):
            unit_calls = list(group)
            # Number 0 is the unit itself, the others are its copies.
            numbers = range(self._num_copies + 1) if unit == self._middle else (0,)
            for number in reversed(numbers) if phase is Phase.BACKWARD else numbers:
                longer_calls += (self._placed(call, unit, number, phase) for call in unit_calls)
        return tuple(longer_calls)

    def _placed(self, call: CutCall, unit: int, number: int, phase: Phase) -> CutCall:
        """Returns ``call`` of ``unit`` at its place in the longer step.

        ``number`` is above 0 for the copies of the middle unit.
        """
        new_unit = unit + (self._num_copies if unit > self._middle else number)
        last = self._num_units + self._num_copies - 1
        position = new_unit if phase is Phase.FORWARD else last - new_unit

        def renamed(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(self._renamed(name, unit, new_unit) for name in names)

        return replace(
            call,
            name=call.name.replace(f"@{call.position}", f"@{position}", 1),
            position=position,
            waits_for=call.waits_for
            and call.waits_for.replace(f"@{call.position}", f"@{position}", 1),
            inputs=renamed(call.inputs),
            outputs=renamed(call.outputs),
            into=tuple(
                replace(target, value=self._renamed(target.value, unit, new_unit))
                for target in call.into
            ),
        )

    def _renamed(self, name: str, unit: int, new_unit: int) -> str:
        """Returns what a call of ``unit`` reads or makes for ``name``, once it is ``new_unit``."""
        value_unit = self._chains.unit_of.get(name)
        if value_unit is None:
            return name
        if unit not in self._units:  # before or behind the layers: it reads the nearer end only
            if (unit < self._units[0]) != (value_unit <= self._middle):
                raise NotUniform(f"unit {unit} reads {name} of layer {value_unit}")
            return name
        return self._value_at(name, new_unit + value_unit - unit)

    def _value_at(self, name: str, unit: int) -> str:
        """Returns the value of ``name``'s chain that belongs to ``unit`` of the longer step."""
        number = unit - self._middle
        if number <= 0:
            return self._chains.value_at(name, unit)
        if number > self._num_copies:
            return self._chains.value_at(name, unit - self._num_copies)
        return self._chains.copy(self._chains.value_at(name, self._middle), number)

    def _with_copies(self, names: Sequence[Name]) -> tuple[Name, ...]:
        """Returns ``names``, and behind those of the middle unit their copies, unit by unit."""

        def is_middle(name: Name) -> bool:
            return name is not None and self._chains.unit_of.get(name) == self._middle

        longer_names: list[Name] = []
        for is_copied, neighbours in itertools.groupby(names, is_middle):
            group = list(neighbours)
            longer_names += group
            if is_copied:
                for number in range(1, self._num_copies + 1):
                    longer_names += (self._chains.copy(name, number) for name in group if name)
        return tuple(longer_names)

    def _graph_of_inputs(self, half: Cut, arguments: Sequence[str]) -> fx.GraphModule:
        """Returns a graph of placeholders for ``arguments``: a plan reads only a half's inputs."""
        old_inputs = {
            node.name: node for node in half.half_graph.graph.find_nodes(op="placeholder")
        }
        graph = fx.Graph()
        for name in arguments:
            placeholder = graph.placeholder(name)
            placeholder.meta = dict(old_inputs[self._chains.original_of.get(name, name)].meta)
        graph.output(())
        return fx_graphs.graph_module(half.half_graph, graph)

    def _longer_units(self) -> JointUnits:
        """Returns the units of the longer step: the middle unit's span repeats."""
        structure = self._old.units.structure
        middle, (layers,) = structure.units[self._middle], structure.classes
        spans = [
            *structure.units[: self._middle],
            *itertools.repeat(middle, self._num_copies),
            *structure.units[self._middle :],
        ]
        units = tuple(range(layers.units[0], layers.units[-1] + self._num_copies + 1))
        for instance, unit in enumerate(units):
            spans[unit] = replace(spans[unit], instance=instance)
        num_layers = layers.num_layers + self._num_copies * layers.period
        longer_class = replace(layers, num_layers=num_layers, units=units)
        return replace(
            self._old.units, structure=LayerStructure(units=tuple(spans), classes=(longer_class,))
        )


class _Chains:
    """Which value of a unit plays the part that another plays in the next unit."""

    def __init__(
        self, calls: dict[int, list[CutCall]], units: Sequence[int], arguments: set[str]
    ) -> None:
        """Pairs values of neighbouring ``units``. Raises NotUniform: they are not wired alike."""
        self._next: dict[str, str] = {}
        """Value -> the value of the same chain in the next unit."""
        self.original_of: dict[str, str] = {}
        """Copy of a value -> the value."""
        self.unit_of: dict[str, int] = {}
        """Value -> the unit that it belongs to; values that all layers share have none."""
        for unit in units:
            outputs = (name for call in calls[unit] for name in call.outputs)
            self.unit_of.update(dict.fromkeys(outputs, unit))
        shared: set[str] = set()
        for unit, next_unit in itertools.pairwise(_uniform_units(calls, units)):
            pairs = zip(_values(calls[unit]), _values(calls[next_unit]), strict=True)
            for name, next_name in pairs:
                if name == next_name:
                    shared.add(name)
                    continue
                if (follower := self._next.setdefault(name, next_name)) != next_name:
                    raise NotUniform(f"{name} is followed by {follower} and by {next_name}")
                if name in arguments:  # a parameter, say, which no call makes
                    self.unit_of.setdefault(name, unit)
                    self.unit_of.setdefault(next_name, next_unit)
        self._find_units_of_borders()
        if mixed := shared & self.unit_of.keys():
            raise NotUniform(f"{min(mixed)} is one layer's, and another layer reads it as well")
        self._previous = {next_name: name for name, next_name in self._next.items()}
        if len(self._previous) != len(self._next):
            raise NotUniform("two values of a layer are one in the next")

    def _find_units_of_borders(self) -> None:
        """Gives units to values that enter the first layer from before, or the last from behind."""
        for name, next_name in self._next.items():
            if name not in self.unit_of and next_name in self.unit_of:
                self.unit_of[name] = self.unit_of[next_name] - 1
            elif name in self.unit_of:
                self.unit_of.setdefault(next_name, self.unit_of[name] + 1)
            if name not in self.unit_of or self.unit_of[next_name] != self.unit_of[name] + 1:
                raise NotUniform(f"{name} and {next_name} are not of neighbouring layers")

    def value_at(self, name: str, unit: int) -> str:
        """Returns the value of ``name``'s chain that belongs to ``unit`` of the traced step."""
        neighbours = self._next if unit > self.unit_of[name] else self._previous
        while self.unit_of[name] != unit:
            if name not in neighbours:
                layer = self.unit_of[name]
                raise NotUniform(f"no layer {unit} has what {name} is to layer {layer}")
            name = neighbours[name]
        return name

    def copy(self, name: str, number: int) -> str:
        """Returns the name of copy ``number`` of a value of the middle unit."""
        copy = f"{name}_copy{number}"
        self.original_of[copy] = name
        return copy


def _uniform_units(calls: dict[int, list[CutCall]], units: Sequence[int]) -> Sequence[int]:
    """Returns ``units`` without the first or last where it calls other regions: to sum up, say."""
    shapes = {unit: [_shape(call) for call in calls[unit]] for unit in units}
    usual = shapes[units[len(units) // 2]]
    skips_first, skips_last = (shapes[unit] != usual for unit in (units[0], units[-1]))
    inner = units[skips_first : len(units) - skips_last]
    if any(shapes[unit] != usual for unit in inner):
        raise NotUniform("two layers call different regions")
    return inner


def _values(calls: Iterable[CutCall]) -> Iterator[str]:
    """Yields all values that ``calls`` read or make, for calls of equal shape in equal order."""
    for call in calls:
        yield from (*call.inputs, *call.outputs, *(target.value for target in call.into))


def _shape(call: CutCall) -> tuple[object, ...]:
    """Returns what a call does, without the names of the values that it reads and makes."""
    return (
        call.region,
        call.reads,
        len(call.inputs),
        len(call.outputs),
        tuple((target.output, target.offset_bytes) for target in call.into),
    )
