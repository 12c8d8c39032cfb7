"""The inputs of Lynx's programs: operators with seconds, bytes, dependencies, communication.

Operators are listed in execution order and named by their index. Units are the caller's: any unit
of time and any unit of memory, each used consistently (seconds and bytes in memo's own planners).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memo_compile.errors import InputError
from memo_compile.papers.layer_costs import BACKWARD_FACTOR
from memo_compile.papers.lynx import fields
from memo_compile.papers.lynx.fields import Number

SLICE_TOKENS = 128
"""Row splits are multiples of this: matrix kernels work on tiles of it."""

NUM_PHASES = 5
"""HEU's recompute phases: two forward and two backward communications, then on demand."""

NUM_WINDOWS = 4
"""Phases 1..4 hide recomputation behind a communication."""

_COMMON = frozenset({"C", "M", "deps", "comm", "static", "budget", "whole", "tokens", "name"})
_HEU_FIELDS = _COMMON | {"need", "ctime", "nl", "nb", "fwd_phases"}
_OPT_FIELDS = _COMMON | {"keep"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """The forward operators that both programs choose from, in execution order."""

    times: tuple[Number, ...]
    """C: time of each operator."""
    sizes: tuple[Number, ...]
    """M: memory of each operator's output."""
    deps: tuple[tuple[int, ...], ...]
    """For each operator the earlier operators whose outputs it reads."""
    comm: frozenset[int]
    """Operators that communicate: they open windows and can never be recomputed inside one."""
    whole: frozenset[int]
    """Operators that mix tokens: a token split must not cut them (attention over a sequence)."""
    num_slices: int = 0
    """A token split cuts into multiples of 1/num_slices; 0 = anywhere."""

    @property
    def count(self) -> int:
        """Number of operators."""
        return len(self.times)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instance:
    """What both programs are given."""

    ops: Operators
    static: Number
    """Memory that is there whatever is decided: parameters, gradients, optimizer state."""
    budget: Number
    """Bound on memory, at every operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeuInstance(_Instance):
    """One layer of one pipeline stage, for the per-layer program."""

    need: tuple[bool, ...]
    """Outputs that the layer's backward reads."""
    windows: tuple[Number, ...]
    """CTime: length of the windows 1..4, in the unit of the operator times."""
    num_layers: int
    """Nl: layers of this stage."""
    num_batches: int
    """Nb: micro-batches whose activations the stage holds at its peak (p - rank for 1F1B)."""
    forward_windows: bool
    """False on the last stage: no other micro-batch's forward runs before its backward."""

    @property
    def window_limits(self) -> tuple[Number, ...]:
        """Lengths of windows 1..4 that may be used: zero where the stage has no such window."""
        if self.forward_windows:
            return self.windows
        return (0, 0, *self.windows[2:])

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "HeuInstance":
        """Returns the instance that ``data`` (itself, or its field ``instance``) describes.

        Raises InputError: a field is missing, of a wrong length, negative, cyclic; it is named.
        """
        data = fields.unwrap_instance(data)
        common = _common_fields(data)
        instance = HeuInstance(
            **common,
            need=_zero_one(data, "need", common["ops"].count),
            windows=fields.numbers(data, "ctime", NUM_WINDOWS),
            num_layers=fields.whole(data, "nl", minimum=1),
            num_batches=fields.whole(data, "nb", minimum=1),
            forward_windows=fields.flag(data, "fwd_phases", True),
        )
        fields.warn_unknown(data, _HEU_FIELDS)
        return instance


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """One layer as the split over stages needs it; the other fields are those of HeuInstance."""

    ops: Operators
    need: tuple[bool, ...]
    windows: tuple[Number, ...]
    backward_s: Number
    """Time of the layer's backward without recomputation, communication included."""

    @property
    def forward_s(self) -> Number:
        """Time of the layer's forward, communication included."""
        return sum(self.ops.times)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "LayerCosts":
        """Returns the layer of ``data``: a HEU instance without ``nl``, ``nb`` and ``budget``.

        A field ``backward_time`` stands for what ``backward_seconds`` estimates.
        Raises InputError: a field is missing or cannot be used; it is named.
        """
        unused = {"nl": 1, "nb": 1, "budget": 0}
        layer = {k: v for k, v in data.items() if k != "backward_time"}
        instance = HeuInstance.from_json({**layer, **unused})
        return LayerCosts(
            ops=instance.ops,
            need=instance.need,
            windows=instance.windows,
            backward_s=fields.number(data, "backward_time", backward_seconds(instance.ops)),
        )


def backward_seconds(ops: Operators) -> Number:
    """Estimates a layer's backward: it computes twice as long and communicates as often."""
    compute_s = sum(time for i, time in enumerate(ops.times) if i not in ops.comm)
    return BACKWARD_FACTOR * compute_s + sum(ops.times[i] for i in ops.comm)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptInstance(_Instance):
    """A whole small graph, for the program over phases."""

    keep: tuple[bool, ...]
    """Outputs that must be resident after the last operator."""

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "OptInstance":
        """Returns the instance that ``data`` describes, read and refused as HeuInstance's is."""
        data = fields.unwrap_instance(data)
        common = _common_fields(data)
        count = common["ops"].count
        last_only = [0] * (count - 1) + [1]
        instance = OptInstance(**common, keep=_zero_one({"keep": last_only, **data}, "keep", count))
        fields.warn_unknown(data, _OPT_FIELDS)
        return instance


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """For each pipeline stage its time with 0, 1, 2, ... layers; None = does not fit in memory."""

    rows: tuple[tuple[Number | None, ...], ...]
    num_layers: int

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "StageTimes":
        """Returns the table that ``data`` (itself, or its field ``instance``) describes.

        Raises InputError: no stage, a row without entries, a negative time, or no layer.
        """
        data = fields.unwrap_instance(data)
        num_layers = fields.whole(data, "num_layers", minimum=1)
        table = data.get("stage_times")
        if not isinstance(table, list) or not table:
            raise InputError("stage_times: expected a list with a row for each stage")
        rows = tuple(_stage_row(row, f"stage_times[{s}]") for s, row in enumerate(table))
        return StageTimes(rows=rows, num_layers=num_layers)


def _stage_row(row: Any, name: str) -> tuple[Number | None, ...]:
    if not isinstance(row, list) or not row:
        raise InputError(f"{name}: expected a list of times (null = out of memory), got {row!r}")
    times = fields.numbers({name: [0 if value is None else value for value in row]}, name)
    return tuple(None if row[i] is None else time for i, time in enumerate(times))


def _common_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the fields of ``_Instance``."""
    times = fields.numbers(data, "C")
    if not times:
        raise InputError("C: expected at least one operator, got an empty list")
    count = len(times)
    ops = Operators(
        times=times,
        sizes=fields.numbers(data, "M", count),
        deps=fields.dependencies(data, count),
        comm=frozenset(fields.indices(data, "comm", count)),
        whole=frozenset(fields.indices({"whole": [], **data}, "whole", count)),
        num_slices=_slices(data),
    )
    static = fields.number(data, "static", 0)
    return {"ops": ops, "static": static, "budget": fields.number(data, "budget")}


def _slices(data: Mapping[str, Any]) -> int:
    """Returns how many slices of tokens there are; 0 where the instance has no ``tokens``."""
    if "tokens" not in data:
        return 0
    tokens = fields.whole(data, "tokens", minimum=SLICE_TOKENS)
    if tokens % SLICE_TOKENS:
        raise InputError(f"tokens: expected a multiple of {SLICE_TOKENS}, got {tokens}")
    return tokens // SLICE_TOKENS


def _zero_one(data: Mapping[str, Any], name: str, length: int) -> tuple[bool, ...]:
    """Reads a list of ``length`` truth values, written 0 and 1, or false and true."""
    row = data.get(name)
    if isinstance(row, list):
        data = {name: [int(value) if isinstance(value, bool) else value for value in row]}
    values = fields.numbers(data, name, length)
    for i, value in enumerate(values):
        if value not in (0, 1):
            raise InputError(f"{name}[{i}]: expected 0 or 1, got {value}")
    return tuple(value == 1 for value in values)
