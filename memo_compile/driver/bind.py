"""Binds a planned step to the runtime: values become registers, buffers become views of the frame.

What runs follows from the Problem and the Plan, which the checker has seen. Beside them only the
regions' code, the layouts of their buffers, and the graph's constants are used.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from memo_runtime.arena import FrameView
from memo_runtime.cuda_graphs import GraphUse
from memo_runtime.group_steps import GroupPlan
from memo_runtime.heap import HeapWatch
from memo_runtime.instructions import (
    CopyRange,
    InputView,
    Instruction,
    IssueCollective,
    RunCall,
    ShowReloaded,
    StartOffload,
    StartReload,
    WaitCollective,
)
from memo_runtime.instructions import WaitCopy as Wait
from memo_runtime.pages import gives_pages_back
from memo_runtime.run_step import RunHalf, StepPlan
from torch import fx

from memo_compile.analysis.purity import is_repeatable, written_storages
from memo_compile.analysis.regions import RegionGraph, ViewSpec
from memo_compile.analysis.structure import op_name
from memo_compile.analysis.views import tensors_of
from memo_compile.config import MemoConfig
from memo_compile.driver.stages import CutStep, PlannedStep
from memo_compile.reporting import state
from memo_compile.step.halves import RUNS, half_keys, half_starts, halves_of_calls
from memo_compile.step.hand_over import last_uses, ready_after
from memo_compile.step.joint_step import member_name
from memo_compile.step.problem import (
    CallKind,
    Layout,
    Phase,
    Problem,
    StepCall,
    Storage,
    aliases,
    arena_buffers,
    arena_values,
    call_starts,
)
from memo_compile.step.residency import (
    heap_slack,
    idle_after_step_bytes,
    ordinary_bytes,
    step_constant_bytes,
)
from memo_compile.torch_private.inductor_api import is_cudagraph_unsafe_fx_node
from memo_compile.torch_private.storages import end_failed_capture

_keys = itertools.count(1)


def bind_step(planned: PlannedStep, step: CutStep, config: MemoConfig) -> StepPlan:
    """Returns ``planned`` as the runtime runs it."""
    (plan,) = _bound(planned, (step,), config)
    return plan


def bind_group(planned: PlannedStep, steps: Sequence[CutStep], config: MemoConfig) -> GroupPlan:
    """Returns a group as the runtime runs it: a plan for each of ``steps``, all in one frame."""
    order = tuple((half.member, half.phase is Phase.BACKWARD) for half in planned.problem.halves)
    return GroupPlan(members=_bound(planned, steps, config), order=order)


def _bound(
    planned: PlannedStep, steps: Sequence[CutStep], config: MemoConfig
) -> tuple[StepPlan, ...]:
    """Returns a plan for each of ``steps``; they share views and memory."""
    device = steps[0].facts.device
    poison = "poison" in config.debug
    constants = {
        phase: {
            member_name(name, member): value
            for member, step in enumerate(steps)
            for name, value in step.half(phase).constants.items()
        }
        for phase in Phase
    }
    graphs = _graph_use(planned, steps[0], config)
    binder = Binder(planned, constants, poison, device)
    if graphs is not None:
        binder.written = _written_values(planned.problem, steps[0].regions)
        regions = steps[0].regions.items()
        binder.barred = {name: _why_not_captured(region.gm.graph) for name, region in regions}
    first = StepPlan(
        key=next(_keys),
        device=device,
        arena_bytes=planned.plan.arena_bytes,
        table=binder.table(),
        forward=binder.half(Phase.FORWARD),
        backward=binder.half(Phase.BACKWARD),
        max_inflight=planned.problem.live_steps,
        poison=poison,
        host_bytes=planned.problem.host_bytes,
        host_store=config.host_kind(device.type),
        schedule=config.copy_schedule(),
        measure_stall="stalls" in config.debug,
        collective_schedule=config.collective_schedule(),
        comm_bytes_per_s=config.comm_bytes_per_s,
        throttle_bytes_per_s=config.copy_speeds(),
        graphs=graphs,
        idle_bytes=idle_after_step_bytes(planned.problem, planned.plan),
        heap=_heap_watch(planned) if gives_pages_back(device) and not poison else None,
    )
    later_members = (
        replace(
            first,
            forward=binder.half(Phase.FORWARD, member),
            backward=binder.half(Phase.BACKWARD, member),
        )
        for member in range(1, len(steps))
    )
    return (first, *later_members)


def _graph_use(planned: PlannedStep, step: CutStep, config: MemoConfig) -> GraphUse | None:
    """Returns how the step uses CUDA graphs; None: it does not."""
    option, plan, name = config.asks_for_cuda_graphs(), planned.plan, step.name
    if not option or step.facts.device.type != "cuda":
        return None
    room_bytes = math.inf if plan.budget_bytes is None else plan.budget_bytes - plan.peak_bytes
    return GraphUse(
        most_bytes=room_bytes,
        say=lambda note: state.add_note(f"{option}: {name}: {note}"),
        clean_up=end_failed_capture,
    )


def _written_values(problem: Problem, regions: Mapping[str, RegionGraph]) -> Set[str]:
    """Returns the values of the step in whose memory an operator of a region writes."""
    positions: dict[str, list[int]] = {}
    for name, region in regions.items():
        graph = region.gm.graph
        written, inputs = written_storages(graph), graph.find_nodes(op="placeholder")
        positions[name] = [at for at, node in enumerate(inputs) if node in written]
    sources = aliases(problem)
    values = (call.inputs[at] for call in problem.calls for at in positions.get(call.region, ()))
    return {sources.get(value, value) for value in values}


def _why_not_captured(graph: fx.Graph) -> str:
    """Returns why a CUDA graph cannot hold a region of this ``graph``; empty: it can.

    A replay repeats only what the device does. So a number that the host draws would be the same
    one in each replay.
    """
    for node in graph.nodes:
        if any(value.device.type == "cpu" for value in tensors_of(node)):
            return "the host makes some of its values"
        # Its backward reads the random state in memory of the device only in a capture.
        if "efficient_attention" in op_name(node) and not is_repeatable(node):
            return "the host keeps the random state of memory-efficient attention"
        if node.op == "call_function" and is_cudagraph_unsafe_fx_node(node):
            return f"{node.target} may not be captured"
    return ""


def _heap_watch(planned: PlannedStep) -> HeapWatch:
    """Returns a watch that allows half of the plan's slack to be free heap."""
    step_bytes = planned.plan.peak_bytes - step_constant_bytes(planned.problem)
    return HeapWatch(allowed_bytes=heap_slack(step_bytes) // 2)


class Binder:
    """A planned step, with what binding any of its halves needs."""

    def __init__(
        self,
        planned: PlannedStep,
        constants: Mapping[Phase, Mapping[str, Any]],
        poison: bool,
        device: torch.device,
    ) -> None:
        """``constants`` are the tensors that the graph of each half carries itself."""
        self.device = device
        self.written: Set[str] = frozenset()
        """Where halves may become CUDA graphs, the values that regions write into."""
        self.barred: Mapping[str, str] = {}
        """Region -> why a half that calls it cannot be a CUDA graph; empty: it can."""
        problem = planned.problem
        self.planned, self.problem, self.plan = planned, problem, planned.plan
        self.constants = constants
        self.half_of_calls = halves_of_calls(problem)
        self.half_starts = half_starts(problem)
        copies = (call.name for call in problem.calls if call.copy is not None)
        self.numbers = {name: number for number, name in enumerate(copies)}
        """Name of a call that copies -> the number of its copy."""
        issues = (call.name for call in problem.calls if call.kind is CallKind.ISSUE)
        self.collectives = {name: number for number, name in enumerate(issues)}
        """Name of a call that begins a collective -> its number."""
        self.sources = aliases(problem)
        """A result that is a view of its region's input -> the value in whose memory it lies."""
        self.places = _places(planned, self.sources)
        """Value in the arena -> offset of its buffer, and its layout there."""
        self.offload_of = dict(_offloads_of(problem))
        """Name of a reload -> name of the offload that wrote its bytes."""
        self.reloaded_in = {
            call.outputs[0]: half
            for call, half in zip(problem.calls, self.half_of_calls, strict=True)
            if call.kind is CallKind.RELOAD
        }
        """Reloaded value -> index of the half that issues the reload."""
        self.leased = {
            half.member: self._leased(number)
            for number, half in enumerate(problem.halves)
            if half.phase is Phase.BACKWARD
        }
        """Member -> the values that its lease keeps from its forward for its backward."""
        self.views = dict(_views(problem, self.offload_of))
        """Call -> the inputs that it reads in another layout than that in which they were made."""
        self.ordinary = ordinary_bytes(problem)
        self.ready = ready_after(problem)
        """Per result of the backward, the call after which it may leave."""
        self.last_uses = last_uses(problem)
        """First value in a storage -> the last call that uses what lies there."""
        self.dying = _dying_inputs(self) if poison else {}

    def table(self) -> list[list[FrameView]]:
        """Returns, per call of the step, the views of its buffers."""
        return [self._buffer_views(call) for call in self.problem.calls]

    def _buffer_views(self, call: StepCall) -> list[FrameView]:
        """Returns a view for each buffer; one that lies in another value is a part of its view."""
        if call.kind is CallKind.RELOAD:
            return [_view(*self.places[call.outputs[0]])]
        if call.kind in (CallKind.OFFLOAD, CallKind.WAIT):
            return []
        lowered = self.planned.lowered[call.region]
        targets = {target.buffer: target for target in call.into}
        views = []
        for index, (buffer, spec) in enumerate(
            zip(lowered.profile.buffers, lowered.views, strict=True)
        ):
            target = targets.get(index)
            if target is None:
                views.append(_view(self.plan.offsets[f"{call.name}/{buffer.name}"], spec))
            elif target.value in self.places:
                views.append(_view(self.places[target.value][0] + target.offset_bytes, spec))
            else:  # the value lies in ordinary memory
                views.append(replace(_view(0, spec), in_frame=False))
        return views

    def half(self, phase: Phase, member: int = 0) -> RunHalf:
        """Returns a half with its values replaced by registers."""
        return _Half(self, half_keys(self.problem).index((phase, member))).bound()

    def calls_of(self, number: int) -> list[tuple[int, StepCall]]:
        """Returns the calls of half ``number``, with their indices in the step."""
        first, end = self.half_starts[number : number + 2]
        return list(enumerate(self.problem.calls[first:end], start=first))

    def _leased(self, number: int) -> tuple[str, ...]:
        """Returns the values that a backward reads and gets from its forward by the lease.

        Those that it makes, that autograd hands over, and that are reloaded come another way.
        """
        half = self.problem.halves[number]
        provided = {*half.constants, *half.arguments, *self.reloaded_in}
        read: list[str] = []
        for _, call in self.calls_of(number):
            if call.kind is not CallKind.WAIT:
                read += call.touched
            provided.update(call.outputs)
        read += [value for value in half.results if value is not None]
        return tuple(value for value in dict.fromkeys(read) if value not in provided)


class _Half:
    """Half ``number`` of the step while its calls are bound."""

    def __init__(self, binder: Binder, number: int) -> None:
        self.binder, self.problem, self.plan = binder, binder.problem, binder.plan
        self.number = number
        self.half = half = self.problem.halves[number]
        self.calls = binder.calls_of(number)
        self.leased = binder.leased.get(half.member, ())
        self.results = dict.fromkeys(value for value in half.results if value is not None)
        self.kept = {*self.results, *(self.leased if half.phase is Phase.FORWARD else ())}
        """Values that outlive the half, whatever reads them last."""
        names = [*half.constants, *half.arguments, *self.leased]
        self.last: dict[str, int] = {}
        """Value -> the last call that reads it or writes into it."""
        for index, call in self.calls:
            names += [*call.touched, *call.outputs]
            self.last.update(dict.fromkeys(call.touched, index))
        names += [half.handle, *self.results]
        self.registers = {value: register for register, value in enumerate(dict.fromkeys(names))}

    def bound(self) -> RunHalf:
        """Returns the half as the runtime runs it."""
        half, resident, before = self.half, self.plan.resident_bytes, self.binder.ordinary.before
        is_forward, constants = half.phase is Phase.FORWARD, self.binder.constants[half.phase]
        barred = self.binder.barred
        begin, next_half = self.calls[0][0] if self.calls else None, self.number + 1
        end = self.binder.half_starts[next_half]
        is_last = next_half == len(self.problem.halves)
        resident_after = None if is_last or end == len(self.problem.calls) else resident[end]
        shown = self._shown()
        return RunHalf(
            num_registers=len(self.registers),
            constants=tuple((self.registers[key], constants[key]) for key in half.constants),
            arguments=self._registers_of(half.arguments),
            calls=(*shown, *(self._instruction(index, call) for index, call in self.calls)),
            written=self._registers_of(
                value for value in half.arguments if value in self.binder.written
            ),
            barred=next((why for _, call in self.calls if (why := barred.get(call.region))), ""),
            owners=(*(half.member for _ in shown), *(call.member for _, call in self.calls)),
            results=tuple(None if v is None else self.registers[v] for v in half.results),
            leased=self._registers_of(self.leased),
            checked=self._checked() if is_forward else (),
            read_later=self._read_later() if is_forward else (),
            visible=self._visible() if is_forward else (),
            planned_bytes=0 if begin is None else resident[begin] + before[begin],
            resident_bytes=resident_after,
            dropped=self._dropped(),
            is_paused=any(each.half == next_half for each in self.problem.interludes),
            handle=self.registers[half.handle],
            **({} if is_forward else self._stops()),
        )

    def _dropped(self) -> tuple[tuple[int, int], ...]:
        """Returns the ranges of the frame that are freed while the user's code runs behind it."""
        pairs = zip(self.problem.interludes, self.plan.dropped, strict=True)
        return tuple(
            dropped
            for interlude, ranges in pairs
            if interlude.half == self.number + 1
            for dropped in ranges
        )

    def _stops(self) -> dict[str, Any]:
        """Returns the fields of a ``RunHalf`` that a backward needs to stop between its calls.

        It stops so that gradients reach autograd early; "until" counts calls of the half.
        """
        binder, half = self.binder, self.half
        ready = binder.ready
        if ready is None:
            return {}
        forward, _ = self.problem.halves
        checked = dict.fromkeys(binder.sources.get(value, value) for value in self.leased)
        gradients = (value for value in half.arguments if value != half.handle)
        return {
            "ready": tuple(self._num_calls_to(index) for index in ready),
            "read_until": self._until(forward.arguments),
            "guarded": tuple(
                (self.registers[value], until)
                for value in gradients
                if (until := self._num_calls_to(binder.last_uses.get(value, -1)))
            ),
            "checked_until": self._until(v for v in checked if v in forward.arguments),
        }

    def _until(self, values: Iterable[str]) -> tuple[int, ...]:
        """Returns, per value, how many calls of this half have run when it is used no more."""
        last = self.binder.last_uses
        return tuple(self._num_calls_to(last.get(value, -1)) for value in values)

    def _num_calls_to(self, index: int) -> int:
        """Returns how many calls of this half have run when call ``index`` of the step has."""
        return sum(at <= index for at, _ in self.calls)

    def _shown(self) -> tuple[ShowReloaded, ...]:
        """Returns an instruction for each value that this half reads and an earlier one reloads."""
        read = dict.fromkeys(
            value
            for _, call in self.calls
            if call.kind in RUNS
            for value in call.touched
            if self.binder.reloaded_in.get(value, self.number) != self.number
        )
        calls = enumerate(self.problem.calls)
        reload_at = {call.outputs[0]: at for at, call in calls if call.kind is CallKind.RELOAD}
        return tuple(
            ShowReloaded(
                table=reload_at[value],
                output=self.registers[value],
                offload=self._offload_of(self.problem.calls[reload_at[value]]),
                frame_offset_bytes=self.binder.places[value][0],
            )
            for value in read
        )

    def _offload_of(self, reload: StepCall) -> int | None:
        """Returns the number of the offload that wrote its bytes; None for a weight's."""
        offload = self.binder.offload_of.get(reload.name)
        return None if offload is None else self.binder.numbers[offload]

    def _registers_of(self, values: Iterable[str]) -> tuple[int, ...]:
        return tuple(self.registers[value] for value in values)

    def _checked(self) -> tuple[int, ...]:
        """Returns the registers of the step's inputs that the lease keeps, whole or as a view."""
        sources = self.binder.sources
        kept = dict.fromkeys(sources.get(value, value) for value in self.leased)
        return self._registers_of(value for value in kept if value in self.half.arguments)

    def _read_later(self) -> tuple[int, ...]:
        """Returns the registers of the step's inputs that its backward is given as well."""
        of_backward = {
            value
            for half in self.problem.halves
            if half.phase is Phase.BACKWARD and half.member == self.half.member
            for value in half.arguments
        }
        return self._registers_of(value for value in self.half.arguments if value in of_backward)

    def _visible(self) -> tuple[int, ...]:
        """Returns the registers of leased values that lie in the memory of the user's results."""
        external = {
            value
            for _, call in self.calls
            for output, value in self.problem.made_by(call)
            if output.storage is Storage.EXTERNAL
        }
        sources = self.binder.sources
        return self._registers_of(v for v in self.leased if sources.get(v, v) in external)

    def _instruction(self, index: int, call: StepCall) -> Instruction:
        """Returns ``call`` as an instruction of the runtime."""
        numbers, dying = self.binder.numbers, self.binder.dying.get(index, [])
        if call.kind is CallKind.OFFLOAD:
            value = call.inputs[0]
            return StartOffload(copy=self._copy_range(call, value), input=self.registers[value])
        if call.kind is CallKind.RELOAD:
            value = call.outputs[0]
            is_for_member = call.member == self.half.member
            return StartReload(
                copy=self._copy_range(call, value),
                table=index,
                output=self.registers[value] if is_for_member else None,
                offload=self._offload_of(call),
                weight=self.registers[call.inputs[0]] if call.inputs else None,
            )
        if call.kind is CallKind.WAIT:
            assert call.waits_for is not None, f"{call.name} waits for nothing"
            ranges = tuple((offset, size) for _, offset, size in dying)
            return Wait(number=numbers[call.waits_for], dying=ranges)
        if call.kind is CallKind.ISSUE:
            return self._issue(index, call)
        if call.kind is CallKind.COMM_WAIT:
            return self._wait_for_ranks(index, call, dying)
        return self._run(index, call, dying)

    def _reused_bytes(self, index: int) -> int:
        """Returns the bytes of work space that call ``index`` leaves allocated for the next one.

        That is so where the next call is of the same region, and no budget needs the last megabyte:
        pages that are given back would only be faulted in again.
        """
        if self.plan.budget_bytes is not None:
            return 0
        calls, runs = self.problem.calls, (CallKind.RUN, CallKind.RECOMPUTE)
        following = next((i for i in range(index + 1, len(calls)) if calls[i].kind in runs), None)
        if following is None or calls[following].region != calls[index].region:
            return 0
        if following >= self.binder.half_starts[self.number + 1]:
            return 0
        before, highest, after = (held[following] for held in self.binder.ordinary)
        return max(0, highest - max(before, after))

    def _copy_range(self, call: StepCall, value: str) -> CopyRange:
        """Returns which bytes of ``value``, whose buffer is in the frame, ``call`` copies where."""
        assert call.copy is not None, f"{call.name} copies nothing"
        return CopyRange(
            number=self.binder.numbers[call.name],
            frame_offset_bytes=self.binder.places[value][0],
            start_bytes=call.copy.start_bytes,
            end_bytes=call.copy.end_bytes,
            host_offset_bytes=call.copy.host_offset,
        )

    def _issue(self, index: int, call: StepCall) -> IssueCollective:
        """Returns the instruction that begins the collective of ``call``."""
        lowered = self.binder.planned.lowered[call.region]
        (output,), (layout,) = lowered.profile.outputs, lowered.profile.output_layouts
        assert lowered.collective is not None, f"{call.name} begins nothing"
        assert layout is not None, f"{call.name} makes no tensor"
        views, is_external = self.binder.views.get(index, ()), output.storage is Storage.EXTERNAL
        on_cpu = self.binder.device.type == "cpu"
        return IssueCollective(
            number=self.binder.collectives[call.name],
            collective=lowered.collective,
            table=index,
            resident_bytes=self.plan.resident_bytes[index],
            input=self.registers[call.inputs[0]],
            output=self.registers[call.outputs[0]],
            view=views[0] if views else None,
            in_place=output.storage is Storage.INPUT,
            external=(getattr(torch, layout.dtype), layout.size, layout.stride)
            if is_external
            else None,
            is_mapped=on_cpu and call.phase is Phase.FORWARD,
        )

    def _wait_for_ranks(
        self, index: int, call: StepCall, dying: list[tuple[int, int, int]]
    ) -> WaitCollective:
        """Returns the instruction that waits for a collective; ``dying``: ``_dying_inputs``."""
        assert call.waits_for is not None, f"{call.name} waits for nothing"
        dead = dict.fromkeys(v for v in (*call.inputs, *call.outputs) if self._is_dead(v, index))
        return WaitCollective(
            number=self.binder.collectives[call.waits_for],
            resident_bytes=self.plan.resident_bytes[index],
            in_flight=self.registers[call.inputs[0]],
            output=self.registers[call.outputs[0]],
            drop=self._registers_of(dead),
            dying=tuple((offset, size) for _, offset, size in dying),
        )

    def _is_dead(self, value: str, index: int) -> bool:
        """True when nothing reads ``value`` after call ``index``."""
        return self.last.get(value, -1) <= index and value not in self.kept

    def _run(self, index: int, call: StepCall, dying: list[tuple[int, int, int]]) -> RunCall:
        """Returns the instruction that runs a region; ``dying``: ``_dying_inputs``."""
        lowered, places = self.binder.planned.lowered[call.region], self.binder.places
        dead = {v for v in (*call.inputs, *call.outputs) if self._is_dead(v, index)}
        recomputes = call.kind is CallKind.RECOMPUTE
        resident_bytes = self.plan.resident_bytes[index]
        held_bytes = self.binder.ordinary.after[index] + self._reused_bytes(index)
        return RunCall(
            run=lowered.run,
            views=self.binder.views.get(index, ()),
            resident_bytes=resident_bytes,
            table=index,
            inputs=self._registers_of(call.inputs),
            outputs=self._registers_of(call.outputs),
            drop=self._registers_of(value for value in dict.fromkeys(call.inputs) if value in dead),
            unread=self._registers_of(value for value in call.outputs if value in dead),
            copies=tuple(  # the results for the user whose storage lies in the arena
                position
                for position, value in enumerate(call.outputs)
                if value in self.results and value in places
            ),
            dying=tuple(dying),
            into=tuple(
                (target.buffer, self.registers[target.value], target.offset_bytes)
                for target in call.into
                if target.value not in places
            ),
            planned_bytes=resident_bytes + held_bytes,
            recomputed_bytes=_output_bytes(lowered.views, call, self.problem) if recomputes else 0,
        )


def _view(offset: int, spec: ViewSpec) -> FrameView:
    return FrameView(offset_bytes=offset, dtype=spec.dtype, size=spec.size, stride=spec.stride)


def _output_bytes(views: tuple[ViewSpec, ...], call: StepCall, problem: Problem) -> int:
    """Returns the bytes that a recompute call makes for the backward."""
    outputs = problem.regions[call.region].outputs
    specs = [views[output.index] for output in outputs if output.index is not None]
    return sum(math.prod(spec.size) * spec.dtype.itemsize for spec in specs)


def _offloads_of(problem: Problem) -> Iterator[tuple[str, str]]:
    """Yields, for every reload but those of weights, its name and that of its offload."""
    offload_at: dict[int, str] = {}
    for call in problem.calls:
        if call.copy is not None and call.kind is CallKind.OFFLOAD:
            offload_at[call.copy.host_offset] = call.name
        if call.copy is not None and call.kind is CallKind.RELOAD and not call.inputs:
            yield call.name, offload_at[call.copy.host_offset]


def _places(planned: PlannedStep, sources: Mapping[str, str]) -> dict[str, tuple[int, ViewSpec]]:
    """Returns offset and layout of every value that lies in the arena, aliases included.

    A reloaded value is viewed as its buffer's bytes; the runtime takes the layout from the value
    that was offloaded. A weight has the layout in which the step is given it.
    """
    given_layouts = dict(_given_layouts(planned.problem))
    places: dict[str, tuple[int, ViewSpec]] = {}
    for value in arena_values(planned.problem):
        call = planned.problem.calls[value.call]
        layout = given_layouts.get(call.inputs[0]) if call.inputs else None
        if call.kind is CallKind.RELOAD and layout is not None:
            dtype = getattr(torch, layout.dtype)
            spec = ViewSpec(dtype=dtype, size=layout.size, stride=layout.stride)
        elif call.kind is CallKind.RELOAD:
            spec = ViewSpec(dtype=torch.uint8, size=(value.size_bytes,), stride=(1,))
        else:
            spec = planned.lowered[call.region].views[value.buffer]
        places[value.value] = (planned.plan.offsets[value.id], spec)
    aliases_of = {alias: places[source] for alias, source in sources.items() if source in places}
    return places | aliases_of


def _given_layouts(problem: Problem) -> Iterator[tuple[str, Layout | None]]:
    """Yields what the halves are given, with its layout."""
    for half in problem.halves:
        yield from half.given().items()


def _views(
    problem: Problem, offload_of: Mapping[str, str]
) -> Iterator[tuple[int, tuple[InputView, ...]]]:
    """Yields (call, its inputs that are read in another layout than that in which they exist)."""
    halves = {(half.phase, half.member): half for half in problem.halves}
    calls = {call.name: call for call in problem.calls}
    given_layouts = dict(_given_layouts(problem))
    layouts: dict[str, Layout | None] = {}
    """In which each value was made, or was given to the half that runs."""
    entered = None
    for index, call in enumerate(problem.calls):
        if call.kind in RUNS and call.half != entered:
            entered = call.half
            layouts.update(halves[entered].given())
        if call.kind is CallKind.RELOAD:  # in the layout of what was offloaded, or of the weight
            of_weight = given_layouts.get(call.inputs[0]) if call.inputs else None
            source = call.inputs[0] if call.inputs else calls[offload_of[call.name]].inputs[0]
            layouts[call.outputs[0]] = of_weight or layouts.get(source)
            continue
        views = tuple(
            (at, read.size, read.stride, read.offset)
            for at, (value, read) in enumerate(zip(call.inputs, call.reads, strict=False))
            if read is not None and read != layouts.get(value)
        )
        if views:
            yield index, views
        layouts.update(zip(call.outputs, problem.regions[call.region].output_layouts, strict=False))


def _dying_inputs(binder: Binder) -> dict[int, list[tuple[int, int, int]]]:
    """Call -> (input, offset, bytes) of its inputs' buffers whose life ends inside that call."""
    problem, plan = binder.planned.problem, binder.planned.plan
    starts = call_starts(problem)
    ends = {buffer.id: (buffer.end, buffer.size_bytes) for buffer in arena_buffers(problem)}
    buffer_of = {value.value: value.id for value in arena_values(problem)}
    dying: dict[int, list[tuple[int, int, int]]] = {}
    for index, call in enumerate(problem.calls):
        for position, value in enumerate(call.inputs):
            buffer = buffer_of.get(binder.sources.get(value, value), "")
            end, size = ends.get(buffer, (-1, 0))
            if end == starts[index] + problem.regions[call.region].input_ends[position]:
                dying.setdefault(index, []).append((position, plan.offsets[buffer], size))
    return dying
