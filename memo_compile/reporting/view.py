"""A planned step as the pictures show it: named boxes in the arena, memory over the program.

The HTML report, the Perfetto trace and the memory snapshot are all drawn from this one view. Time
is counted in lines of the step's generated code (see ``problem.py``); no torch here.
"""

import bisect
import enum
import itertools
import operator
from dataclasses import dataclass

from memo_compile.errors import InputError
from memo_compile.planners.moves import original_name
from memo_compile.reporting.decision_lines import layers_of
from memo_compile.step.ordinary import ordinary_events, outside_events, passing_bytes
from memo_compile.step.plans import Decision, Plan
from memo_compile.step.problem import (
    ArenaBuffer,
    CallKind,
    Phase,
    Problem,
    StepCall,
    aliases,
    arena_buffers,
    arena_values,
    call_starts,
    live_bytes,
    running_sums,
)
from memo_compile.step.residency import step_constant_bytes


class Role(enum.Enum):
    """Why a buffer is in the arena."""

    SAVED = "saved"
    """Made in the forward, kept in place for the backward."""
    OFFLOADED = "offloaded"
    """Made in the forward, dead once its copy to the host has ended."""
    RELOADED = "reloaded"
    RECOMPUTED = "recomputed"
    SCRATCH = "scratch"
    """Needed only within one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One buffer of the arena: ``[start, end)`` in lines by ``[offset, offset + size)`` bytes."""

    id: str
    name: str
    call: int
    start: int
    end: int
    offset: int
    size_bytes: int
    role: Role
    layer: int | None
    """Layer of the step, counted over all classes; None for prologue, middle and epilogue."""
    about: str = ""
    """Shape, dtype and operator, where known."""
    reason: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Device memory from one line on, until the next Moment."""

    line: int
    live_bytes: int
    """Bytes of the arena's buffers that are alive."""
    outside_bytes: int
    made_bytes: int
    """Bytes of gradients and other outputs in ordinary memory, and of code between halves."""
    held_bytes: int
    """The sum on the device: constant memory, the resident arena, what is outside or made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """A planned step, ready to be drawn."""

    labels: tuple[str, ...]
    """For each call a name for people: ``layer 3 forward``."""
    layers: tuple[int | None, ...]
    """For each call the number of its layer."""
    starts: tuple[int, ...]
    """The first line of each call, and the end of the step."""
    backward_start: int
    """The first line of the backward."""
    boxes: tuple[Box, ...]
    moments: tuple[Moment, ...]
    constant_bytes: int

    def call_at(self, line: int) -> int:
        """Returns the index of the call at ``line``; the last call's for the step's end."""
        call = bisect.bisect_right(self.starts, line) - 1
        return max(0, min(call, len(self.labels) - 1))

    def heights(self, moment: Moment) -> tuple[int, ...]:
        """Returns upper ends of the memory curve's areas: constant, outputs, by kernels, arena."""
        areas = (self.constant_bytes, moment.made_bytes, moment.outside_bytes, moment.live_bytes)
        return tuple(itertools.accumulate(areas))

    @property
    def peak(self) -> Moment | None:
        """The first Moment of most memory."""
        return max(self.moments, key=lambda moment: moment.held_bytes, default=None)

    def columns(self, most: int) -> list[Moment]:
        """Cuts the step into at most ``most`` columns; each is its Moment of most memory."""
        end = max(self.starts[-1], 1)
        num_columns = min(most, end)
        groups = itertools.groupby(self.moments, lambda moment: moment.line * num_columns // end)
        moments_of = {column: list(group) for column, group in groups}
        amount = operator.attrgetter("held_bytes", "live_bytes")
        columns: list[Moment] = []
        previous = Moment(line=0, live_bytes=0, outside_bytes=0, made_bytes=0, held_bytes=0)
        for column in range(num_columns):
            moments = moments_of.get(column, [])
            # What was alive before the column's first change is alive in the column, too.
            columns.append(max((*moments, previous), key=amount))
            previous = moments[-1] if moments else previous
        return columns


def short_source(source: str | None) -> str:
    """Returns a place in the user's code with its folder only: ``folder/model.py:12``."""
    return "/".join((source or "").split("/")[-2:])


def view_step(problem: Problem, plan: Plan) -> StepView:
    """Returns the view of ``plan``. Raises InputError: it is no plan of ``problem``."""
    starts, layers, buffers = call_starts(problem), _layers(problem), arena_buffers(problem)
    backward_start = starts[problem.first_backward]
    return StepView(
        labels=tuple(map(_label, problem.calls, layers)),
        layers=layers,
        starts=starts,
        backward_start=backward_start,
        boxes=_boxes(problem, plan, buffers, layers, backward_start),
        moments=_moments(problem, plan, buffers, starts),
        constant_bytes=step_constant_bytes(problem),
    )


def _layers(problem: Problem) -> tuple[int | None, ...]:
    """Returns for each call the number of its layer, counted as the forward runs them."""
    numbers: dict[tuple[str, int], int] = {}
    return tuple(
        None
        if call.layer_class is None
        else numbers.setdefault((call.layer_class, call.instance), len(numbers))
        for call in problem.calls
    )


_KIND_WORDS = {
    CallKind.RECOMPUTE: "recompute",
    CallKind.OFFLOAD: "copy to host",
    CallKind.RELOAD: "copy from host",
    CallKind.WAIT: "wait for copy",
    CallKind.ISSUE: "collective begins",
    CallKind.COMM_WAIT: "wait for ranks",
}


def _label(call: StepCall, layer: int | None) -> str:
    """Returns the name of a call for people: ``layer 3 backward``, ``epilogue forward``."""
    what = _KIND_WORDS.get(call.kind, call.phase.value)
    if layer is not None:
        return f"layer {layer} {what}"
    region = call.name.split("@")[0].removesuffix("_fwd").removesuffix("_bwd")
    return f"{region} {what}" if call.kind is CallKind.RUN else call.name


class _Names:
    """Finds the name of the tensor in a buffer, and the decision that put it there."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem = problem
        self.value_of: dict[str, str] = {}
        """Buffer -> the first of its values."""
        buffer_of: dict[str, str] = {}
        for buffer in arena_values(problem):
            buffer_of[buffer.value] = buffer.id
            self.value_of.setdefault(buffer.id, buffer.value)
        for value, source in aliases(problem).items():
            buffer_of[value] = buffer_of.get(source, "")
        offloads = (call for call in problem.calls if call.kind is CallKind.OFFLOAD)
        self.offloaded = {buffer_of.get(call.inputs[0], "") for call in offloads}
        """Buffers that are copied to the host."""
        self.decisions_of: dict[str, list[Decision]] = {}
        """Value -> the decisions on it: several where its tokens are divided."""
        self._fill_decisions(plan)

    def _fill_decisions(self, plan: Plan) -> None:
        """Applies each class's decisions, which name tensors of its first layer, to all layers.

        What is output 2 of a region in layer 0 is output 2 of the same region in every layer.
        """
        by_tensor: dict[str, list[Decision]] = {}
        for decision in plan.decisions:
            by_tensor.setdefault(decision.tensor.split(" ")[0], []).append(decision)
        by_place: dict[tuple[str, str, int], list[Decision]] = {}
        for call in self.problem.calls:
            is_forward = call.phase is Phase.FORWARD and call.kind is CallKind.RUN
            if call.layer_class is None or not is_forward:
                continue
            for side, values in (("out", call.outputs), ("in", call.inputs)):
                for position, value in enumerate(values):
                    place = (call.region, side, position)
                    if value in by_tensor:
                        by_place.setdefault(place, by_tensor[value])
                    decisions = [d for d in by_place.get(place, ()) if _is_of(d, call.instance)]
                    if decisions:
                        self.decisions_of.setdefault(value, decisions)

    def decision(self, value: str, role: Role) -> Decision | None:
        """Returns the decision on ``value``; of several that which led to the buffer's ``role``."""
        decisions = self.decisions_of.get(value, [])
        kind = "RECOMPUTE" if role in (Role.RECOMPUTED, Role.SCRATCH) else "OFFLOAD"
        return next((d for d in decisions if d.decision == kind), next(iter(decisions), None))

    def origin(self, buffer: str) -> str:
        """Returns the forward's value that the buffer holds, for a copy its source; "": none."""
        value = self.value_of.get(buffer, "")
        origin = original_name(value)
        return origin if origin in self.decisions_of or origin in self.problem.tensors else value


def _is_of(decision: Decision, instance: int) -> bool:
    """Returns whether ``decision`` is about layer ``instance`` of its class."""
    _, span = layers_of(decision)
    return span is None or span[0] <= instance < span[1]


def _boxes(
    problem: Problem,
    plan: Plan,
    buffers: tuple[ArenaBuffer, ...],
    layers: tuple[int | None, ...],
    backward_start: int,
) -> tuple[Box, ...]:
    """Returns each buffer at its place in the arena, with all that is said of its tensor."""
    names, boxes = _Names(problem, plan), []
    for buffer in buffers:
        if buffer.id not in plan.offsets:
            raise InputError(
                f"plan: no offset for buffer {buffer.id}; the problem is another step's"
            )
        value, offloaded = names.origin(buffer.id), buffer.id in names.offloaded
        role = _role(problem.calls[buffer.call], buffer, offloaded, backward_start)
        decision, info = names.decision(value, role), problem.tensors.get(value)
        about = "" if info is None else f"{list(info.shape)} {info.dtype}, {info.op}"
        about += f" ({value})" if info is not None and info.role else ""
        source = (info.source if info else None) or (decision.source if decision else None)
        boxes.append(
            Box(
                id=buffer.id,
                name=(info.role if info else "") or value or buffer.id.split("/", 1)[1],
                call=buffer.call,
                start=buffer.start,
                end=buffer.end,
                offset=plan.offsets[buffer.id],
                size_bytes=buffer.size_bytes,
                role=role,
                layer=layers[buffer.call],
                about=about,
                reason=decision.reason if decision else "",
                source=source or "",
            )
        )
    return tuple(boxes)


def _role(call: StepCall, buffer: ArenaBuffer, offloaded: bool, backward_start: int) -> Role:
    """Says why ``call``'s ``buffer`` is in the arena; ``offloaded``: it is copied to the host."""
    if call.kind is CallKind.RELOAD:
        return Role.RELOADED
    if buffer.transient:
        return Role.SCRATCH
    if call.kind is CallKind.RECOMPUTE:
        return Role.RECOMPUTED
    if offloaded and buffer.end <= backward_start:
        return Role.OFFLOADED
    if call.phase is Phase.FORWARD and buffer.end > backward_start:
        return Role.SAVED
    return Role.OFFLOADED if offloaded else Role.SCRATCH


def _moments(
    problem: Problem, plan: Plan, buffers: tuple[ArenaBuffer, ...], starts: tuple[int, ...]
) -> tuple[Moment, ...]:
    """Returns device memory at each line where it changes."""
    live, ordinary = live_bytes(buffers), running_sums(ordinary_events(problem))
    outside = running_sums((line, change) for line, change, _ in outside_events(problem))
    resident = plan.resident_bytes or (plan.arena_bytes,) * len(problem.calls)
    if len(resident) != len(problem.calls):
        raise InputError(
            f"plan: {len(resident)} resident sizes for {len(problem.calls)} calls; "
            "the problem is another step's"
        )
    user_code = _user_code(problem, plan, starts)
    constant_bytes, moments = step_constant_bytes(problem), []
    alive_bytes = kernel_bytes = output_bytes = 0
    for line in sorted({*live, *outside, *ordinary, *user_code, *starts[:-1]}):
        if line >= starts[-1]:
            break
        alive_bytes = live.get(line, alive_bytes)
        kernel_bytes = outside.get(line, kernel_bytes)
        output_bytes = ordinary.get(line, output_bytes)
        user_bytes, freed_bytes = user_code.get(line, (0, 0))
        made_bytes = output_bytes + user_bytes
        arena_bytes = resident[bisect.bisect_right(starts, line) - 1] - freed_bytes
        moments.append(
            Moment(
                line=line,
                live_bytes=alive_bytes,
                outside_bytes=kernel_bytes,
                made_bytes=made_bytes,
                held_bytes=constant_bytes + arena_bytes + kernel_bytes + made_bytes,
            )
        )
    return tuple(moments)


def _user_code(problem: Problem, plan: Plan, starts: tuple[int, ...]) -> dict[int, tuple[int, int]]:
    """Line on which the user's code runs -> (bytes that it takes, bytes that the arena gives back).

    While the user's code runs, the arena holds no more than during the next call.
    """
    resident = plan.resident_bytes or (plan.arena_bytes,) * len(problem.calls)
    dropped = plan.dropped or ((),) * len(problem.interludes)
    bytes_at = {}
    for (call, user_bytes), ranges in zip(passing_bytes(problem), dropped, strict=True):
        freed_bytes = resident[call] - resident[min(call + 1, len(resident) - 1)]
        freed_bytes += sum(end - start for start, end in ranges)
        bytes_at[starts[call + 1] - 1] = user_bytes, freed_bytes
    return bytes_at
