"""What was planned, as pure data: the offset of every buffer and the plan's numbers.

What was observed while planning and while the step ran is another value (``Observed``); users see
both as one (``ReportedPlan``). No torch here. ``to_json`` and ``from_json`` of Problem and Plan
live in ``serialise.py``.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memo_compile.step.problem import LEFT_OUT, FixedBytes, LayerClassInfo

SCHEMA_VERSION = 1
"""Version of plan.json, which rises when a field changes its meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckVerdict:
    """What the independent checker found. ``problems`` is empty for a valid plan."""

    problems: tuple[str, ...] = ()
    """One sentence for each fault."""
    num_buffers: int = 0
    """How many were compared."""
    num_reads: int = 0
    """How many reads of a buffer were followed."""

    @property
    def ok(self) -> bool:
        """True when the plan is valid."""
        return not self.problems

    def __str__(self) -> str:
        if self.ok:
            return f"ok ({self.num_buffers} buffers, {self.num_reads} reads checked)"
        return "; ".join(_one_of_each_sort(self.problems))


def _one_of_each_sort(problems: Sequence[str]) -> Iterator[str]:
    """Yields one of the faults that differ in names and numbers only, and counts the rest."""
    sorts: dict[tuple[str, ...], list[str]] = {}
    for problem in problems:
        words = (word.strip(",;") for word in problem.split())
        sorts.setdefault(tuple(filter(str.isalpha, words)), []).append(problem)
    for first, *similar in sorts.values():
        yield f"{first} (and {len(similar)} more such faults)" if similar else first


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happens to one saved tensor of a layer class between forward and backward."""

    tensor: str
    """Its name in the first layer that the row stands for, and its shape."""
    layer_class: str
    """Its layers; it ends in ``[first:last]`` where the row holds for some of the class only."""
    bytes: int
    """Bytes in one layer."""
    decision: str
    """``SAVE``, ``OFFLOAD`` or ``RECOMPUTE``."""
    token_fraction: float
    """The share of the tokens that the row holds for."""
    reason: str
    """Why, as a sentence for the user."""
    source: str | None
    """Where in the user's code it is made: ``file:line``."""
    role: str = ""
    """The tensor's name for the user: ``layer input``, ``mlp.up_proj``; empty where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What a lane does during ``[start_s, end_s)`` of the simulated step."""

    lane: str
    """``compute``, ``d2h``, ``h2d`` or ``communication``; ``stall`` is compute that waits."""
    name: str
    """The call's name."""
    start_s: float
    """When it begins, counted from the step's start."""
    end_s: float
    """When it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated step."""

    step_s: float
    """Seconds from the forward's start to the backward's end."""
    stall_s: float
    """Seconds of the step in which computation waits for copies."""
    spans: tuple[Span, ...] = ()
    """What each lane does, in order of time."""
    hidden_comm_s: float = field(default=0.0, metadata=LEFT_OUT)
    """Seconds of collectives beside which the step computes."""
    exposed_comm_s: float = field(default=0.0, metadata=LEFT_OUT)
    """Seconds in which computation waits for collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One plan that was considered: what it costs and what it needs."""

    policy: str
    """Who proposed it."""
    step_s: float
    """Seconds of its simulated step."""
    peak_bytes: int
    """Peak device memory, after placement."""
    host_bytes: int
    """Host memory for offloaded tensors."""
    chosen: bool = False
    """True for the plan that was taken."""
    layers_to_host: int = field(default=0, metadata=LEFT_OUT)
    """How many layers copy something to the host."""
    layers_recomputed: int = field(default=0, metadata=LEFT_OUT)
    """How many layers recompute something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Bytes of one kind of training state, by where they are."""

    device_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """What a training step needs beside activations, and where it is."""

    parameters: Where
    gradients: Where
    optimizer_state: Where
    update: str | Mapping[str, int] = "device"
    """Where the optimizer updates parameters; bytes of their gradients where it does both."""

    @classmethod
    def of(cls, fixed: FixedBytes) -> "TrainingState":
        """As ``fixed`` has it."""
        on_host, on_device = fixed.gradients_on_host, fixed.new_gradients
        by_place = {"device": on_device, "host": on_host}
        return cls(
            parameters=Where(device_bytes=fixed.parameters, host_bytes=fixed.parameters_on_host),
            gradients=Where(device_bytes=fixed.gradients, host_bytes=on_host),
            update=by_place if on_host and on_device else "host" if on_host else "device",
            optimizer_state=Where(
                device_bytes=fixed.optimizer_state, host_bytes=fixed.state_on_host
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One planned step. All sizes in bytes."""

    offsets: Mapping[str, int]
    """Buffer id (``call/buffer``) -> byte offset in the arena."""
    arena_bytes: int
    """Size of the arena's frame of one step."""
    lower_bound_bytes: int
    """The largest sum of bytes alive in the arena at one time."""
    outside_bytes_by_kind: Mapping[str, int]
    """Memory that kernels allocate themselves, at its largest, by operator."""
    peak_bytes: int
    """Upper bound of the device memory of the step, from forward entry to backward exit."""
    fixed: FixedBytes
    """Device memory outside the arena."""
    layer_classes: tuple[LayerClassInfo, ...]
    """The layers that were found."""
    decisions: tuple[Decision, ...] = ()
    """What becomes of each kind of saved tensor, and why."""
    resident_bytes: tuple[int, ...] = ()
    """For each call how many bytes of the arena, from its start, stay in memory."""
    dropped: tuple[tuple[tuple[int, int], ...], ...] = ()
    """For each interlude of the problem the ranges ``[start, end)`` of the arena that are given
    back while it runs; later calls get the pages again as they write to them."""
    releases_pages: bool = False
    """CPU: the arena's pages can be given back; ``peak_bytes`` counts what the heap adds."""
    budget_bytes: int | None = None
    """The budget that ``peak_bytes`` had to fit."""
    solver: str = "greedy"
    """How the offsets were found."""
    num_regions: int = 0
    """How many regions were lowered."""
    name: str = ""
    """Of the captured graph, such as ``graph0``."""
    check: CheckVerdict = field(default_factory=CheckVerdict)
    """What the independent checker found."""
    policy: str = "save"
    """The policy that the options name; ``save`` where everything is kept because it fits."""
    host_bytes: int = 0
    """Host memory: the frame that offloaded activations are copied to, and training state."""
    timeline: Timeline | None = None
    """The simulated step, where costs are known."""
    step_lower_bound_s: float | None = None
    """No plan within the budget takes fewer seconds, by the same costs as ``timeline``."""
    compute_s: float | None = None
    """Seconds of computation alone: of the same step, in the same tiles, with everything kept."""
    tiles: Mapping[str, int] = field(default_factory=dict)
    """Region (a layer's half, the loss head's) -> number of its tiles; 1: whole."""
    frontier: tuple[FrontierPoint, ...] = ()
    """Plans that were considered and not beaten, fastest first; empty where everything fits."""
    num_collectives: int = field(default=0, metadata=LEFT_OUT)
    """How many collectives have an issue and a wait of their own in the step's program."""
    measured_collectives: int = field(default=0, metadata=LEFT_OUT)
    """How many of them had measured seconds when the plan was made; others' are declared."""
    window_recompute_s: float = field(default=0.0, metadata=LEFT_OUT)
    """Simulated seconds of recomputation between the issue of a collective and its wait."""
    dropping_saves_bytes: int = 0
    """By how much the peak would fall, with the same decisions, if the user dropped the forward's
    results before the backward."""

    @property
    def training_state(self) -> "TrainingState":
        """Where parameters, gradients and optimizer state are."""
        return TrainingState.of(self.fixed)

    @property
    def step_s(self) -> float | None:
        """Seconds of the simulated step, where costs are known."""
        return None if self.timeline is None else self.timeline.step_s

    @property
    def hidden_comm_s(self) -> float:
        """Simulated seconds of communication beside computation; 0 where costs are not known."""
        return 0.0 if self.timeline is None else self.timeline.hidden_comm_s

    @property
    def exposed_comm_s(self) -> float:
        """Simulated seconds for which computation waits for other ranks."""
        return 0.0 if self.timeline is None else self.timeline.exposed_comm_s

    @property
    def outside_bytes(self) -> int:
        """Memory that kernels allocate themselves, at its largest."""
        return sum(self.outside_bytes_by_kind.values())


@dataclass(frozen=True, kw_only=True)  # without slots, so that ReportedPlan can have two bases
class Observed:
    """How long it took to plan a step, and what the last step that ran has moved."""

    planning_s: float = 0.0
    """Seconds that it took to plan the step."""
    lowering_s: float = 0.0
    """Seconds that it took to lower its regions to code."""
    offloaded_bytes: int = 0
    """Bytes that the last step copied to the host, counted while it ran."""
    recomputed_bytes: int = 0
    """Bytes that the last step recomputed, counted while it ran."""
    stall_s: float = 0.0
    """Seconds for which computation waited for copies in the last step, measured."""
    comm_wait_s: float = field(default=0.0, metadata=LEFT_OUT)
    """Seconds for which it waited for collectives, measured."""
    measured_s: float = field(default=0.0, metadata=LEFT_OUT)
    """Seconds of the forward and the backward of the last step, measured; 0: not measured."""


@dataclass(frozen=True, kw_only=True)
class ReportedPlan(Plan, Observed):
    """A plan and what was observed of it: what the report shows and plan.json holds."""

    @classmethod
    def of(cls, plan: Plan, observed: Observed) -> "ReportedPlan":
        """``plan`` and ``observed`` in one value."""
        return cls(**_fields(plan, Plan), **_fields(observed, Observed))


@dataclass(frozen=True, kw_only=True)
class ReportedGroup(ReportedPlan):
    """The plan of a group: several modules that share one graph, planned as one step."""

    num_instances: int
    """How many modules run that graph in one step."""
    between_bytes: int = 0
    """The most bytes that other code took between two of their forwards and backwards, as measured
    (CPU, under a budget), or as its gradients take. They are counted in ``peak_bytes``."""
    module_path: str | None = None
    graphs: tuple[str, ...] = ()
    """Names of the plans of single graphs in whose place the group's plan stands."""

    @classmethod
    def of_group(
        cls,
        plan: Plan,
        observed: Observed,
        *,
        num_instances: int,
        between_bytes: int,
        graphs: tuple[str, ...],
    ) -> "ReportedGroup":
        """``plan`` and ``observed`` in one value, with the path of the first class that has one."""
        paths = (layer_class.module_path for layer_class in plan.layer_classes)
        return cls(
            **_fields(plan, Plan),
            **_fields(observed, Observed),
            num_instances=num_instances,
            between_bytes=between_bytes,
            module_path=next(filter(None, paths), None),
            graphs=graphs,
        )


def _fields(data: Plan | Observed, kind: type) -> dict[str, Any]:
    return {field.name: getattr(data, field.name) for field in dataclasses.fields(kind)}
