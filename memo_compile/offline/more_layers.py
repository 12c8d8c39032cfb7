"""A step of many equal layers from the step of a few: what is traced does not grow with the model.

Layers of one class are calls of the same regions, and what a layer reads lies a fixed number of
layers away: ``add_6`` of layer 2 is to layer 3 what ``embedding`` of layer 1 is to layer 2. So the
values of a step form chains, one value a layer. A layer is added by a link in each chain:

    F1(e, p1) -> a1    F2(a1, p2) -> a2                            F3(a2, p3) -> a3
    F1(e, p1) -> a1    F2(a1, p2) -> a2    F2(a2, p2') -> a2'    F3(a2', p3) -> a3
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
"""Fewest traced units: two at each end, since the outer one may do more, and one between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreLayers:
    """What a model has beyond the one that is traced in its place."""

    num_layers: int
    """Layers of the model that is meant."""
    untraced: Sequence[torch.Tensor]
    """Parameters and buffers of its layers that are not traced."""


def with_layers(step: CutStep, num_layers: int) -> CutStep:
    """``step`` as it were if its model had ``num_layers`` layers, more by a multiple of a unit's.

    Raises NotUniform: nothing can be said of more layers.
    """
    classes = step.units.structure.classes
    if len(classes) != 1:
        raise NotUniform(f"{len(classes)} classes of layers")
    (found,) = classes
    more, rest = divmod(num_layers - found.num_layers, found.period)
    first, last = found.units[0], found.units[-1]
    if rest or more < 0 or found.units != tuple(range(first, last + 1)):
        raise NotUniform(f"{found.num_layers} layers in units {found.units} become {num_layers}")
    if not more:
        return step
    if len(found.units) < MIN_UNITS:
        raise NotUniform(f"{len(found.units)} units of layers, of which the ends may differ")
    return _Longer(step, middle=found.units[len(found.units) // 2], more=more).step()


class _Longer:
    """The step with ``more`` copies of unit ``middle`` behind it."""

    def __init__(self, step: CutStep, *, middle: int, more: int) -> None:
        self._old = step
        self._middle, self._more = middle, more
        self._units = step.units.structure.classes[0].units
        self._num_units = step.units.num_units
        arguments = {*step.forward.arguments, *step.backward.arguments}
        self._chains = _Chains(self._calls_of_units(), self._units, arguments)

    def step(self) -> CutStep:
        return replace(
            self._old,
            forward=self._half(self._old.forward),
            backward=self._half(self._old.backward),
            units=self._longer_units(),
        )

    def _unit(self, call: CutCall, phase: Phase) -> int:
        return call.position if phase is Phase.FORWARD else self._num_units - 1 - call.position

    def _calls_of_units(self) -> dict[int, list[CutCall]]:
        calls: dict[int, list[CutCall]] = defaultdict(list)
        for half in (self._old.forward, self._old.backward):
            for call in (*half.calls, *half.whole_calls, *half.layer_calls):
                calls[self._unit(call, half.phase)].append(call)
        return calls

    def _half(self, half: Cut) -> Cut:
        arguments = self._expanded(half.arguments)
        nodes = {
            self._chains.copy(name, number): node
            for name, node in half.nodes.items()
            if self._chains.level.get(name) == self._middle
            for number in range(1, self._more + 1)
        }
        return replace(
            half,
            calls=self._longer_calls(half.calls, half.phase),
            whole_calls=self._longer_calls(half.whole_calls, half.phase),
            layer_calls=self._longer_calls(half.layer_calls, half.phase),
            arguments=arguments,
            results=self._expanded(half.results),
            leased=self._expanded(half.leased),
            nodes={**half.nodes, **nodes},
            half_graph=self._inputs_alone(half, arguments),
        )

    def _longer_calls(self, calls: Sequence[CutCall], phase: Phase) -> tuple[CutCall, ...]:
        """In the order of ``calls``, the copies of the middle's calls where they run."""
        backwards = phase is Phase.BACKWARD
        made: list[CutCall] = []
        for unit, group in itertools.groupby(calls, lambda call: self._unit(call, phase)):
            of_unit = list(group)
            copies = range(self._more + 1) if unit == self._middle else (0,)
            for number in reversed(copies) if backwards else copies:
                made += (self._moved(call, unit, number, phase) for call in of_unit)
        return tuple(made)

    def _moved(self, call: CutCall, unit: int, number: int, phase: Phase) -> CutCall:
        """``call`` of ``unit`` where it runs now, or as copy ``number`` of the middle."""
        now = unit + (self._more if unit > self._middle else number)
        last = self._num_units + self._more - 1
        position = now if phase is Phase.FORWARD else last - now

        def renamed(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(self._renamed(name, unit, now) for name in names)

        return replace(
            call,
            name=call.name.replace(f"@{call.position}", f"@{position}", 1),
            position=position,
            waits_for=call.waits_for
            and call.waits_for.replace(f"@{call.position}", f"@{position}", 1),
            inputs=renamed(call.inputs),
            outputs=renamed(call.outputs),
            into=tuple(
                replace(target, value=self._renamed(target.value, unit, now))
                for target in call.into
            ),
        )

    def _renamed(self, name: str, unit: int, now: int) -> str:
        """What a call of ``unit``, which is unit ``now`` of the longer step, means by ``name``."""
        level = self._chains.level.get(name)
        if level is None:
            return name
        if unit not in self._units:  # before or behind the layers: it reads its own side's only
            if (unit < self._units[0]) != (level <= self._middle):
                raise NotUniform(f"unit {unit} reads {name} of layer {level}")
            return name
        return self._at(name, now + level - unit)

    def _at(self, name: str, level: int) -> str:
        """The link of ``name``'s chain that belongs to unit ``level`` of the longer step."""
        copy = level - self._middle
        if copy <= 0:
            return self._chains.link(name, level)
        if copy > self._more:
            return self._chains.link(name, level - self._more)
        return self._chains.copy(self._chains.link(name, self._middle), copy)

    def _expanded(self, names: Sequence[Name]) -> tuple[Name, ...]:
        """``names`` with the copies of the middle's behind them, layer by layer."""

        def is_middle(name: Name) -> bool:
            return name is not None and self._chains.level.get(name) == self._middle

        made: list[Name] = []
        for copied, group in itertools.groupby(names, is_middle):
            run = list(group)
            made += run
            if copied:
                for number in range(1, self._more + 1):
                    made += (self._chains.copy(name, number) for name in run if name is not None)
        return tuple(made)

    def _inputs_alone(self, half: Cut, arguments: Sequence[str]) -> fx.GraphModule:
        """A step program that is never run, and is asked only what it is given."""
        given = {node.name: node for node in half.half_graph.graph.find_nodes(op="placeholder")}
        graph = fx.Graph()
        for name in arguments:
            made = graph.placeholder(name)
            made.meta = dict(given[self._chains.template.get(name, name)].meta)
        graph.output(())
        return fx_graphs.graph_module(half.half_graph, graph)

    def _longer_units(self) -> JointUnits:
        structure = self._old.units.structure
        middle, (layers,) = structure.units[self._middle], structure.classes
        spans = [
            *structure.units[: self._middle],
            *itertools.repeat(middle, self._more),
            *structure.units[self._middle :],
        ]
        units = tuple(range(layers.units[0], layers.units[-1] + self._more + 1))
        for instance, unit in enumerate(units):
            spans[unit] = replace(spans[unit], instance=instance)
        num_layers = layers.num_layers + self._more * layers.period
        longer = replace(layers, num_layers=num_layers, units=units)
        return replace(
            self._old.units, structure=LayerStructure(units=tuple(spans), classes=(longer,))
        )


class _Chains:
    """Which values of neighbouring layers are the same for each of them."""

    def __init__(
        self, calls: dict[int, list[CutCall]], units: Sequence[int], arguments: set[str]
    ) -> None:
        self._following: dict[str, str] = {}
        self.template: dict[str, str] = {}
        """Copy -> what it is a copy of."""
        self.level: dict[str, int] = {}
        """Value -> the unit that it belongs to; values that all layers share have none."""
        for unit in units:
            made = (name for call in calls[unit] for name in call.outputs)
            self.level.update(dict.fromkeys(made, unit))
        shared: set[str] = set()
        for unit, following in itertools.pairwise(_alike(calls, units)):
            for name, after in zip(_values(calls[unit]), _values(calls[following]), strict=True):
                if name == after:
                    shared.add(name)
                    continue
                if (known := self._following.setdefault(name, after)) != after:
                    raise NotUniform(f"{name} is followed by {known} and by {after}")
                if name in arguments:
                    self.level.setdefault(name, unit)
                    self.level.setdefault(after, following)
        self._level_borders()
        if mixed := shared & self.level.keys():
            raise NotUniform(f"{min(mixed)} is one layer's, and another layer reads it as well")
        self._preceding = {after: name for name, after in self._following.items()}
        if len(self._preceding) != len(self._following):
            raise NotUniform("two values of a layer are one in the next")

    def _level_borders(self) -> None:
        """What comes into the first layer from before and into the last one from behind."""
        for name, after in self._following.items():
            if name not in self.level and after in self.level:
                self.level[name] = self.level[after] - 1
            elif name in self.level:
                self.level.setdefault(after, self.level[name] + 1)
            if name not in self.level or self.level[after] != self.level[name] + 1:
                raise NotUniform(f"{name} and {after} are not of neighbouring layers")

    def link(self, name: str, level: int) -> str:
        """The value of the same chain that belongs to unit ``level``."""
        way = self._following if level > self.level[name] else self._preceding
        while self.level[name] != level:
            if name not in way:
                raise NotUniform(f"no layer {level} has what {name} is to layer {self.level[name]}")
            name = way[name]
        return name

    def copy(self, name: str, number: int) -> str:
        """The name of copy ``number`` of a value of the middle."""
        made = f"{name}_copy{number}"
        self.template[made] = name
        return made


def _alike(calls: dict[int, list[CutCall]], units: Sequence[int]) -> Sequence[int]:
    """``units`` but for the first or last of them where it does more: sums up, say."""
    shapes = {unit: [_shape(call) for call in calls[unit]] for unit in units}
    usual = shapes[units[len(units) // 2]]
    inner = units[shapes[units[0]] != usual : len(units) - (shapes[units[-1]] != usual)]
    if any(shapes[unit] != usual for unit in inner):
        raise NotUniform("two layers call different regions")
    return inner


def _values(calls: Iterable[CutCall]) -> Iterator[str]:
    """All that ``calls`` name: at the same places for layers of one shape."""
    for call in calls:
        yield from (*call.inputs, *call.outputs, *(target.value for target in call.into))


def _shape(call: CutCall) -> tuple[object, ...]:
    """All of a call but for the values that it names."""
    return (
        call.region,
        call.reads,
        len(call.inputs),
        len(call.outputs),
        tuple((target.output, target.offset_bytes) for target in call.into),
    )
