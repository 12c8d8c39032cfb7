"""Decides which inputs a region of the backward may write over: nothing reads them afterwards.

A kernel that reads a saved activation for the last time may write its result in its place, where
it reads and writes each number at the same index; that is for the compiler to see. Rewrite:

    buf3 = empty(..)                         buf3 = mm_32     # the saved activation's memory
    kernel(mm_32, grad, buf3); del mm_32  -> kernel(buf3, grad)

Graphs say before lowering what may be written over (``with_donations``). After lowering regions
that wrote over something else show (``wrongly_taken``), and are lowered again without donations.
The checker proves the rule too (``check_contents.py``). A backward that runs twice (retain_graph)
works on a copy of the arena, and nothing outside of the arena is written over.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx

from memo_compile.analysis.regions import RegionGraph
from memo_compile.analysis.views import results_of, storage_of
from memo_compile.driver.stages import CutStep
from memo_compile.passes.cut import Cut, CutCall
from memo_compile.step.hand_over import storage_roots
from memo_compile.step.problem import CallKind, Phase, Problem, Storage


def with_donations(step: CutStep) -> dict[str, RegionGraph]:
    """Returns the step's regions with the inputs that they may write over (``donated``)."""
    donated = _donated(step)
    return {
        name: replace(graph, donated=donated.get(name, ())) for name, graph in step.regions.items()
    }


class _Use(NamedTuple):
    """A call that makes or reads a value."""

    call: CutCall
    phase: Phase
    unit: int
    makes: bool


def _donated(step: CutStep) -> Mapping[str, tuple[int, ...]]:
    """Returns, per region of the backward, the inputs that each of its calls is the last to use."""
    uses = _uses(step)
    shared = {*_shared(step.forward), *_shared(step.backward)}
    last_of_unit = {call.position: call.name for call in step.backward.calls}
    examples = {name: region.example_inputs() for name, region in step.backward.regions.items()}
    donated: dict[str, set[int]] = {}
    for call in step.backward.calls:
        is_last = last_of_unit[call.position] == call.name and call.kind is CallKind.RUN
        of_call = {
            position
            for position, value in enumerate(call.inputs)
            if is_last
            and _is_floating(examples[call.region][position])
            and value not in shared
            and call.inputs.count(value) == 1
            and _ends_here(call, uses[value])
        }
        donated[call.region] = donated.get(call.region, of_call) & of_call
    return {region: tuple(sorted(positions)) for region, positions in donated.items()}


def _is_floating(example: object) -> bool:
    """True for a tensor that may hold any number: a timed region reads what it has written."""
    return isinstance(example, torch.Tensor) and example.is_floating_point()


def _uses(step: CutStep) -> dict[str, list[_Use]]:
    """Returns the uses of each value, in the order of the step."""
    uses: dict[str, list[_Use]] = {}
    for half in (step.forward, step.backward):
        last = step.units.num_units - 1
        for call in half.calls:
            unit = call.position if half.phase is Phase.FORWARD else last - call.position
            for values, makes in ((call.inputs, False), (call.outputs, True)):
                for value in values:
                    uses.setdefault(value, []).append(_Use(call, half.phase, unit, makes))
    return uses


def _ends_here(call: CutCall, uses: Iterable[_Use]) -> bool:
    """True where the step makes the value, and ``call`` is the last to use it, recomputed or not.

    A recomputation may read what its layer's forward reads. So in the forward only that layer may
    read the value whose backward ``call`` is: its recomputation runs before ``call``.
    """
    *before, last = uses
    readers = {use.unit for use in before if use.phase is Phase.FORWARD and not use.makes}
    makers = {use.unit for use in before if use.phase is Phase.FORWARD and use.makes}
    units = readers or makers
    return last.call.name == call.name and any(use.makes for use in before) and units <= {last.unit}


def _shared(half: Cut) -> Iterator[str]:
    """Yields values that the step does not make, or that share their memory with others."""
    yield from half.arguments
    yield from half.constants
    yield from (value for value in half.results if value is not None)
    aliases = {name: _aliases(region) for name, region in half.regions.items()}
    for call in half.calls:
        if call.kind is not CallKind.RUN:
            yield from (*call.inputs, *call.outputs)
        for into in call.into:
            yield from (into.value, call.outputs[into.output])
        values = (*call.inputs, *call.outputs)
        yield from (values[at] for at in aliases[call.region])


def _aliases(region: RegionGraph) -> list[int]:
    """Returns the positions, in inputs followed by outputs, of values that share memory."""
    inputs = region.gm.graph.find_nodes(op="placeholder")
    first = {node: at for at, node in enumerate(inputs)}
    positions: list[int] = []
    for at, result in enumerate(results_of(region.gm.graph), start=len(inputs)):
        if isinstance(result, fx.Node):
            other = first.setdefault(storage_of(result), at)
            positions += () if other == at else (other, at)
    return positions


def wrongly_taken(problem: Problem) -> frozenset[str]:
    """Returns the regions that write over a value outside the arena, or one that is still needed.

    Only lowered regions show that: a kernel may allocate its own results, and a compiler may return
    an input where the graph makes a copy of it.
    """
    in_arena = {
        value
        for call in problem.calls
        for output, value in problem.made_by(call)
        if output.storage is Storage.ARENA and call.value_around(output.index) is None
    }
    roots, last = storage_roots(problem), dict[str, int]()
    values_at_root: dict[str, set[str]] = {}
    for at, call in enumerate(problem.calls):
        for value in (*call.touched, *call.outputs):
            last[value] = at
            values_at_root.setdefault(roots.get(value, value), set()).add(value)
    wrong = set()
    for at, call in enumerate(problem.calls):
        for position in problem.regions[call.region].overwrites:
            value = call.inputs[position]
            same_memory = values_at_root[roots.get(value, value)].difference(call.outputs)
            if value not in in_arena or any(last[other] > at for other in same_memory):
                wrong.add(call.region)
    return frozenset(wrong)
