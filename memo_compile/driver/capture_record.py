"""Writes a captured step, cut into regions, as plain data, so that later processes need not trace.

The record holds the regions and calls of both halves, no code. What AOTAutograd makes around the
halves lies in torch's own cache under the digest of this record, so that both always match. A step
with something that cannot be written (``passes.graph_record``) is traced in each process.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from memo_compile.analysis.joint_units import JointUnits
from memo_compile.analysis.layers import LayerStructure
from memo_compile.analysis.views import results_of
from memo_compile.driver.facts import GraphFacts
from memo_compile.driver.stages import CutStep
from memo_compile.errors import InputError, UnsupportedGraph
from memo_compile.passes.cut import Cut, CutCall
from memo_compile.passes.cut_template import is_same
from memo_compile.passes.graph_record import (
    NodeRecord,
    RegionGraphRecord,
    add_node,
    fields_like,
    graph_of_record,
    graph_record,
    node_record,
    region_of_record,
    region_record,
)
from memo_compile.passes.runner import PassRunner
from memo_compile.step.problem import Phase
from memo_compile.step.serialise import plain, restore
from memo_compile.step.tilings import Tiling
from memo_compile.torch_private.symbols import StaticFakes

Regions = Mapping[str, RegionGraphRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfRecord:
    """A ``Cut``; its fields mean the same."""

    phase: Phase
    regions: Regions
    calls: tuple[CutCall, ...]
    arguments: tuple[str, ...]
    results: tuple[str | None, ...]
    leased: tuple[str, ...]
    handle: str
    half_graph: tuple[NodeRecord, ...]
    saved: Mapping[str, tuple[NodeRecord, ...]]
    """Saved value -> the node that makes it; for an element of a tuple also the tuple, first."""
    layer_calls: tuple[CutCall, ...]
    layer_regions: Regions
    whole_calls: tuple[CutCall, ...]
    tilings: Mapping[str, Tiling]
    whole_regions: Regions


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRecord:
    """A ``CutStep``, and what else a capture holds."""

    forward: HalfRecord
    backward: HalfRecord
    structure: LayerStructure
    static_names: tuple[str, ...]
    """The forward's inputs that are parameters and buffers."""
    ties_inputs: bool
    """As of ``purity.ties_inputs``."""
    num_results: int
    """How many results the forward has, without what autograd keeps."""
    flags: Mapping[str, bool]
    """The forward's results that are truth values, by position."""
    sizes: Mapping[str, int]
    """The forward's results that are whole numbers, by position."""
    notes: tuple[str, ...]
    """What the report said while the step was captured and cut."""


def capture_record(
    step: CutStep, num_results: int, numbers: Mapping[int, Any], notes: tuple[str, ...]
) -> CaptureRecord:
    """Returns ``step`` as data. Reads it back once, to prove that it is the same step.

    Raises UnsupportedGraph: it is not, or the step holds something that cannot be written.
    """
    integers = {str(at): value for at, value in numbers.items() if type(value) in (bool, int)}
    if len(integers) < len(numbers):
        raise UnsupportedGraph("a result is a number, and no whole one")
    record = CaptureRecord(
        forward=_half_record(step.forward),
        backward=_half_record(step.backward),
        structure=step.units.structure,
        static_names=tuple(sorted(step.facts.static_names)),
        ties_inputs=step.facts.ties_inputs,
        num_results=num_results,
        flags={at: value for at, value in integers.items() if type(value) is bool},
        sizes={at: value for at, value in integers.items() if type(value) is int},
        notes=notes,
    )
    try:
        read = from_plain(json.loads(json.dumps(plain(record))))
        restored = cut_again(read, step.facts, step.runner, step.name, StaticFakes())
    except InputError as error:
        raise UnsupportedGraph(f"it would read otherwise: {error}") from error
    halves = ((step.forward, restored.forward), (step.backward, restored.backward))
    if not all(is_same(before, after) for before, after in halves):
        raise UnsupportedGraph("it would read otherwise")
    return record


def from_plain(body: Any) -> CaptureRecord:
    """Returns the record that ``body``, read from JSON, holds. Raises InputError: it holds none."""
    record: CaptureRecord = restore(body, CaptureRecord, "capture")
    return record


def cut_again(
    record: CaptureRecord, facts: GraphFacts, runner: PassRunner, name: str, fakes: StaticFakes
) -> CutStep:
    """Returns the step that ``record`` holds, for the inputs of ``facts``. Raises InputError."""
    try:
        forward, backward = (_half_again(half, fakes) for half in (record.forward, record.backward))
        step = CutStep(
            name=name,
            forward=forward,
            backward=backward,
            units=JointUnits(structure=record.structure, forward=()),
            facts=facts,
            runner=runner,
        )
        _require_whole(step, record)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise InputError(f"it is no captured step: {error}") from error
    return step


_REGIONS = ("regions", "layer_regions", "whole_regions")


def _half_record(cut: Cut) -> HalfRecord:
    """Returns ``cut`` as data. Raises UnsupportedGraph: it holds tensors."""
    if cut.constants:
        raise UnsupportedGraph("the graph carries tensors of its own")
    fields = fields_like(cut, HalfRecord) | {"half_graph": graph_record(cut.half_graph)}
    for kind in _REGIONS:
        fields[kind] = {name: region_record(region) for name, region in fields[kind].items()}
    saved = cut.leased if cut.phase is Phase.FORWARD else ()
    return HalfRecord(**fields, saved={value: _saved(cut, value) for value in saved})


def _saved(cut: Cut, value: str) -> tuple[NodeRecord, ...]:
    """Returns the record of the node that makes ``value``; before it that of the tuple it is of."""
    node = cut.nodes[value]
    record = node_record(node)
    if record.target != "getitem":
        return (record.alone(),)
    (source,) = node.all_input_nodes
    return node_record(source).alone(), record


def _half_again(record: HalfRecord, fakes: StaticFakes) -> Cut:
    fields = fields_like(record, Cut) | {"half_graph": graph_of_record(record.half_graph, fakes)}
    for kind in _REGIONS:
        fields[kind] = {name: region_of_record(of, fakes) for name, of in fields[kind].items()}
    nodes = {value: _saved_again(records, fakes) for value, records in record.saved.items()}
    return Cut(**fields, constants={}, nodes=nodes)


def _saved_again(records: Sequence[NodeRecord], fakes: StaticFakes) -> fx.Node:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for record in records:
        nodes[record.name] = add_node(graph, record, nodes, fakes)
    return nodes[records[-1].name]


def _require_whole(step: CutStep, record: CaptureRecord) -> None:
    """Raises InputError: a half is missing, or a call does not match its region."""
    phases = (record.forward.phase, record.backward.phase)
    if phases != (Phase.FORWARD, Phase.BACKWARD) or not record.forward.leased == tuple(
        record.forward.saved
    ):
        raise InputError("it has no two halves")
    for half in (step.forward, step.backward):
        for call in half.calls:
            region = half.regions[call.region]
            counts = len(region.example_inputs()), len(results_of(region.gm.graph))
            if counts != (len(call.inputs), len(call.outputs)):
                raise InputError(f"call {call.name} is not of {call.region}")
