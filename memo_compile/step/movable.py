"""A step as layers with saved tensors that may move: what the policies decide on.

Every layer has *slots*: its input, and the tensors that its forward saves for its backward. The
prologue, the middle and the epilogue count as layers too, each the only one of its class. A *mode*
says for each slot of a layer whether it is kept, copied to the host or recomputed. No torch here.
"""

import enum
import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from memo_compile.errors import InputError
from memo_compile.step.problem import LEFT_OUT, Problem, RegionProfile, StepCall

MEASURED = "measured"
"""``StepCosts.source`` of measured costs, which differ a little in the next process."""


class Action(enum.Enum):
    """What happens to a saved tensor between the forward and the backward."""

    SAVE = "SAVE"
    OFFLOAD = "OFFLOAD"
    RECOMPUTE = "RECOMPUTE"

    __hash__ = object.__hash__  # right, as each member is one object; Enum's own is much slower


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One saved tensor of a layer class; sizes are of one layer."""

    name: str
    """Name of the value in the class's first layer."""
    size_bytes: int
    """Bytes of its buffer, a multiple of ALIGNMENT_BYTES."""
    can_offload: bool = True
    """False for what must stay where it is: views of inputs, memory outside the arena."""
    can_recompute: bool = False
    """True when its own layer can recompute it from other slots (``LayerOp``)."""
    is_input: bool = False
    """The layer's input; the layer before made it, so that it cannot be recomputed here."""
    is_attention: bool = False
    """An attention kernel's output or log-sum-exp: policy ``memo`` always offloads it."""
    num_rows: int = 1
    """Rows (tokens) along which the buffer can be split; 1 for a tensor that moves whole."""
    row_bytes: int = 0
    """Row r is bytes ``[r * row_bytes, (r + 1) * row_bytes)`` of the storage, when num_rows > 1."""
    pinned: "Action | None" = None
    """What every plan does with it, by a rule or a tag of the user; None: the plan decides."""
    first_read: int = 0
    """Index of the first backward call that reads it, among those of the class's first layer: a
    backward in tiles is several calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOp:
    """One operator of a layer's forward, for the cost of recomputing."""

    name: str
    seconds: float
    """On all rows. 0 for a layer input."""
    inputs: tuple[int, ...] = ()
    """Indices of earlier operators of the layer; parameters and shared inputs are not listed."""
    slot: int | None = None
    """The slot that holds its output, if that is saved."""
    can_recompute: bool = True
    """False for layer inputs, random numbers, collectives and operators not known to be safe."""
    row_wise: bool = False
    """True when row r of the output depends on row r of every input only."""


class RecomputePart(NamedTuple):
    """The slots that one region recomputes: see ``RecomputeKey``."""

    slots: tuple[int, ...]
    passing: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerClass:
    """What all layers of one class have in common. Operators are in an order that can run."""

    key: str
    slots: tuple[Slot, ...]
    ops: tuple[LayerOp, ...] = ()
    parts: dict[tuple[int, ...], tuple[RecomputePart, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Cache: slots that are recomputed -> the parts, a region each, into which that work is cut."""

    @property
    def saved_bytes(self) -> int:
        """Bytes of the slots of one layer."""
        return sum(slot.size_bytes for slot in self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of the step."""

    class_key: str
    calls: tuple[str, ...]
    """The names of its forward calls, in order: one, or several where it runs in tiles."""
    inputs: tuple[str, ...]
    """The values that its forward region reads, in order; there is one region, tiles or not."""
    backward: str
    """The name of its backward call, the first reader of its slots."""
    values: tuple[str, ...]
    """Per slot of the class, the value's name in the step."""

    @property
    def forward(self) -> str:
        """The name of its first forward call."""
        return self.calls[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of every region and the speed of the copies."""

    region_s: Mapping[str, float]
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    copy_latency_s: float = 0.0
    comm_bytes_per_s: float | None = field(default=None, metadata=LEFT_OUT)
    """Of a collective between ranks; None: there are none, or nobody knows."""
    collective_s: Mapping[str, float] | None = field(default=None, metadata=LEFT_OUT)
    """Region of a collective -> its seconds, where they were measured."""
    comm_slowdown: float = field(default=1.0, metadata=LEFT_OUT)
    """By which factor computation is slower while a collective runs beside it."""
    source: str = "declared"
    """Where the numbers come from, for the report: ``measured``, ``roofline: h200`` ..."""

    def call_s(self, call: StepCall) -> float:
        """Returns the seconds of the region that ``call`` runs. Raises InputError: not known."""
        seconds = self.region_s.get(call.region)
        if seconds is None:
            raise InputError(
                f"region {call.region} of {call.name} has no seconds; add it to region_s of the "
                "costs"
            )
        return seconds

    def comm_s(self, region: str, num_bytes: int) -> float:
        """Returns a collective's seconds: measured, or by the link's declared speed; 0: unknown."""
        if self.collective_s is not None and region in self.collective_s:
            return self.collective_s[region]
        return 0.0 if self.comm_bytes_per_s is None else num_bytes / self.comm_bytes_per_s

    def beside_s(self, seconds: float, busy_s: float) -> float:
        """Returns how long ``seconds`` of computation take if collectives still run ``busy_s``."""
        if busy_s <= 0 or self.comm_slowdown == 1:
            return seconds
        slowed_s = min(seconds, busy_s / self.comm_slowdown)
        return seconds + (self.comm_slowdown - 1) * slowed_s

    def d2h_s(self, num_bytes: int, num_copies: int = 1) -> float:
        """Returns the seconds of ``num_copies`` copies to the host, ``num_bytes`` in sum."""
        return num_copies * self.copy_latency_s + num_bytes / self.d2h_bytes_per_s

    def h2d_s(self, num_bytes: int, num_copies: int = 1) -> float:
        """Returns the seconds of ``num_copies`` copies from the host, ``num_bytes`` in sum."""
        return num_copies * self.copy_latency_s + num_bytes / self.h2d_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeKey:
    """Names a region that recomputes slots of a layer class, on rows ``[0, rows)`` (None: all)."""

    class_key: str
    slots: tuple[int, ...]
    rows: int | None = None
    passing: tuple[int, ...] = ()
    """Slots that it computes on the way and drops: another region recomputes them later."""

    @property
    def region(self) -> str:
        """The region's name in ``Problem.regions``."""
        rows = "" if self.rows is None else f".rows{self.rows}"
        passing = "".join(f".passing{slot}" for slot in self.passing)
        return f"{self.class_key}.recompute.{'.'.join(map(str, self.slots))}{passing}{rows}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionInput:
    """Where an input of a recompute region comes from: exactly one of the two is set."""

    forward_input: int | None = None
    """Position among the inputs of the layer's forward call."""
    slot: int | None = None
    """A slot of the layer that is saved or reloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeRegion:
    """A region that recomputes slots, lowered or estimated. Output i is ``key.slots[i]``."""

    key: RecomputeKey
    profile: RegionProfile
    inputs: tuple[RegionInput, ...]
    seconds: float
    is_lowered: bool = True
    """False while ``profile`` is an estimate made before lowering."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What one layer does with its slots.

    With ``recompute_rows`` the RECOMPUTE slots are recomputed for rows ``[0, recompute_rows)`` and
    offloaded for the rest (MEMO's token-wise mix: alpha = 1 - recompute_rows / num_rows); all of
    them must then have ``num_rows`` > 1. None recomputes all rows.
    """

    actions: tuple[Action, ...]
    recompute_rows: int | None = None

    def slots(self, action: Action) -> tuple[int, ...]:
        """Returns the indices of the slots with ``action``."""
        return tuple(slot for slot, chosen in enumerate(self.actions) if chosen is action)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long copies may last."""

    layers: int = 1
    """So many layers run beside a copy. 1, as MEMO's two rotating buffers allow: before the forward
    of layer i + 2 the copies of layer i to the host have ended, and its copies back begin when the
    backward of layer i + 2 has. 0: nothing runs beside a copy. ``widen`` has no need of it."""
    widen: float = 0.0
    """Copies last as long as seconds ask for, and no more bytes are alive than this many times the
    peak of the step whose copies have no time; 0: they last for ``layers``, whatever they take."""
    spare: float = 0.0
    """Where ``widen`` puts waits of offloads off, this share of the peak stays free: for plans
    whose tensors could not be placed without holes otherwise."""

    def __post_init__(self) -> None:
        if self.layers < 0:
            raise InputError(f"layers: expected at least 0, got {self.layers}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """All decisions of one step: a mode for each layer of ``MovableStep.layers``."""

    modes: tuple[Mode, ...]
    schedule: Schedule = field(default_factory=Schedule)
    policy: str = "auto"
    """Who proposed them: a named policy, ``greedy``, ``steady``, ``widened``, or the integer
    ``program``. Of a choice: the policy that the options name."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True, eq=False)
class MovableStep:
    """What policies decide on: the step with everything kept, its layers in forward order, costs.

    Caches are keyed by the object, so that two are equal only if they are the same object.
    """

    problem: Problem
    classes: Mapping[str, LayerClass]
    layers: tuple[Layer, ...]
    costs: StepCosts
    token_granule: int = 128
    """``recompute_rows`` is a multiple of this."""
    shares: tuple[float, ...] = ()
    """For each member the share of its saved bytes that goes to the host, as the user declared it
    for the stages of a pipeline; empty: not declared."""
    waits_late: bool = True
    """Collectives are waited for as late as their readers allow; else directly behind the issue."""

    def class_of(self, layer: Layer) -> LayerClass:
        """Returns the class of ``layer``."""
        return self.classes[layer.class_key]

    def save_all(self) -> Moves:
        """Returns the decisions that keep everything."""
        modes = (
            Mode(actions=tuple(slot.pinned or Action.SAVE for slot in self.class_of(layer).slots))
            for layer in self.layers
        )
        return Moves(modes=tuple(modes), policy="save")


_Result = TypeVar("_Result")


def once_per_step(make: Callable[[MovableStep], _Result]) -> Callable[[MovableStep], _Result]:
    """Wraps ``make`` so that its result is kept as long as the step: all plans of it ask for it."""
    results = weakref.WeakKeyDictionary[MovableStep, _Result]()

    @functools.wraps(make)
    def cached(step: MovableStep) -> _Result:
        if step not in results:
            results[step] = make(step)
        return results[step]

    return cached
