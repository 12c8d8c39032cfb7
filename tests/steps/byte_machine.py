"""Runs a planned step on cells that stand for bytes, under the worst timings of what is in flight.

An oracle for the checker that knows nothing of lifetimes or of rules: kernels read and write cells
at the offsets of the plan, copies and collectives happen as early or as late as their waits allow
(a wait ends what it waits for only, though lanes are in order), and what counts is whether the
step's results are those of the step without moves. A collective reads its input and writes its
output when it happens; until then its output, where that has a place of its own, is undefined.
Collectives must begin in the order of the step without moves, since other ranks begin them so.
"""

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping

from memo_compile.check.check_moves import Recomputation
from memo_compile.step.plans import Plan
from memo_compile.step.problem import CallKind, Copy, Problem, RegionProfile, StepCall, Storage

CELL_BYTES = 256

LANES = {CallKind.OFFLOAD: "d2h", CallKind.RELOAD: "h2d"}

Hurry = Callable[[str], bool]
"""Lane -> whether its next copy happens now, asked at every line of every call."""

SCHEDULES: dict[str, Hurry] = {
    "early": lambda lane: True,
    "late": lambda lane: False,
    "late out, early back": lambda lane: lane == "h2d",
    "early out, late back": lambda lane: lane == "d2h",
}


def now_and_then(seed: int) -> Hurry:
    draw = random.Random(seed)
    return lambda lane: draw.random() < 0.3


class Broken(Exception):
    """The step does something that has no meaning at all."""


@dataclasses.dataclass
class Cells:
    """Cells ``[first, first + count)`` of a memory."""

    memory: dict
    first: object
    count: int

    def get(self, index: int):
        return self.memory.get((self.first, index) if self.is_ordinary else self.first + index)

    def put(self, index: int, content) -> None:
        self.memory[(self.first, index) if self.is_ordinary else self.first + index] = content

    @property
    def is_ordinary(self) -> bool:
        return isinstance(self.first, str)

    def all(self, count: int | None = None) -> tuple:
        return tuple(self.get(i) for i in range(self.count if count is None else count))


class Machine:
    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        hurry: Hurry = SCHEDULES["early"],
        recomputations: Mapping[str, Recomputation] | None = None,
        reference: "Machine | None" = None,
        used_bytes: Mapping[tuple[str, str], int] | None = None,
    ) -> None:
        self.problem, self.plan, self.hurry = problem, plan, hurry
        self.recomputations, self.reference = recomputations or {}, reference
        self.used_bytes = used_bytes or {}
        self.arena: dict = {}
        self.host: dict = {}
        self.ordinary: dict = {}
        self.values: dict[str, Cells] = {}
        self.last_read: dict[str, tuple] = {}
        self.lanes: dict[str, list[tuple[str, Callable[[], None]]]] = {
            "d2h": [],
            "h2d": [],
            "ranks": [],
        }
        """The copies and collectives in flight: the name of the call, and what it does."""
        self.begun: list[tuple] = []
        """The collectives in the order in which they begin: region, and what they are given."""
        self.results: dict[str, tuple] = {}

    def run(self) -> "Machine":
        for value in self.problem.inputs:
            self.values[value] = self._ordinary(value, 1, ("given", value))
        for call in self.problem.calls:
            region = self.problem.regions[call.region]
            if call.kind in (CallKind.WAIT, CallKind.COMM_WAIT):
                self._wait(call)
            if call.kind is CallKind.ISSUE:
                self._issue(call, region)
            elif call.kind is not CallKind.WAIT:
                self._run(call, region)
                if call.kind in LANES:
                    value = (call.inputs or call.outputs)[0]
                    copies = functools.partial(self._copy, call, self.values[value])
                    self.lanes[LANES[call.kind]].append((call.name, copies))
            self._progress()
        for name in self.lanes:
            self._drain(name)
        return self

    def _ordinary(self, name: str, count: int, content) -> Cells:
        storage = Cells(self.ordinary, name, count)
        for index in range(count):
            storage.put(index, (content, index))
        return storage

    def _progress(self) -> None:
        for name, lane in self.lanes.items():
            while lane and self.hurry(name):
                lane.pop(0)[1]()

    def _drain(self, name: str) -> None:
        while self.lanes[name]:
            self.lanes[name].pop(0)[1]()

    def _issue(self, call: StepCall, region: RegionProfile) -> None:
        if call.inputs[0] not in self.values:
            raise Broken(f"{call.name} reads what is not there")
        (output,), (name,) = region.outputs, call.outputs
        given = self.values[call.inputs[0]]
        if output.storage is Storage.INPUT:
            made = given
        elif output.storage is Storage.ARENA:
            made = self._place(call, region, output.index)
            self._scribble(call, made)
        else:
            made = self._ordinary(name, 1, ("in flight", call.name))
        self.values[name] = made
        self.begun.append((call.region, given.all()))
        self.lanes["ranks"].append((call.name, functools.partial(self._talk, call, given, made)))

    def _talk(self, call: StepCall, given: Cells, made: Cells) -> None:
        digest = hash((call.region, given.all()))
        for index in range(made.count):
            made.put(index, (digest, index))
        if made.is_ordinary and made is not given:
            self.results[call.outputs[0]] = made.all()

    def _copy(self, call: StepCall, storage: Cells) -> None:
        copy = call.copy
        assert isinstance(copy, Copy)
        shift = copy.host_offset - copy.start_bytes
        for at in range(copy.start_bytes, copy.end_bytes, CELL_BYTES):
            cell, host = at // CELL_BYTES, (at + shift) // CELL_BYTES
            if call.kind is CallKind.OFFLOAD:
                self.host[host] = storage.get(cell)
            else:
                storage.put(cell, self.host.get(host))

    def _wait(self, call: StepCall) -> None:
        for lane in self.lanes.values():
            for at, (name, act) in enumerate(lane):
                if name == call.waits_for:
                    del lane[at]
                    act()
                    return

    def _run(self, call: StepCall, region: RegionProfile) -> None:
        if any(value not in self.values for value in call.inputs):
            raise Broken(f"{call.name} reads what is not there")
        mine: dict[int, Cells] = {}
        into = {target.buffer: target for target in call.into}
        seen: list = []
        for line in range(region.num_lines):
            for index, buffer in enumerate(region.buffers):
                if buffer.start == line:
                    mine[index] = self._place(call, region, index)
                    if index not in into or into[index].value not in call.inputs:
                        self._scribble(call, mine[index])
            self._progress()
            for end, value in zip(region.input_ends, call.inputs, strict=True):
                if line in (0, end - 1) and line < end:
                    self.last_read[value] = self.values[value].all()
                    seen.append(self.last_read[value])
            for index, buffer in enumerate(region.buffers):
                if buffer.end - 1 == line and index not in into:
                    seen.append(self._was_scribbled(call, mine[index]))
        self._finish(call, region, mine, seen)

    def _finish(
        self, call: StepCall, region: RegionProfile, mine: dict[int, Cells], seen: list
    ) -> None:
        digest = hash((call.region, tuple(seen)))
        kept = {output.index for output in region.outputs if output.storage is Storage.ARENA}
        for index in sorted(kept | {target.buffer for target in call.into}):
            for cell in range(mine[index].count if call.kind is not CallKind.RELOAD else 0):
                mine[index].put(cell, (digest, index, cell))
        for position in region.overwrites:
            taken = self.values[call.inputs[position]]
            for cell in range(taken.count):
                taken.put(cell, (digest, "over", position, cell))
        for position, (output, value) in enumerate(zip(region.outputs, call.outputs, strict=True)):
            if output.storage is Storage.ARENA:
                self.values[value] = mine[output.index]
                self._recompute(call, position, mine[output.index])
            elif output.storage is Storage.INPUT:
                self.values[value] = self.values[call.inputs[output.index]]
            else:
                self.values[value] = self._ordinary(value, 1, (digest, position))
                self.results[value] = self.values[value].all()

    def _recompute(self, call: StepCall, position: int, storage: Cells) -> None:
        """A recomputation of the right inputs gives what the forward gave."""
        recomputation = self.recomputations.get(call.name)
        if recomputation is None or self.reference is None or call.kind is not CallKind.RECOMPUTE:
            return
        for value, stand_in in zip(recomputation.inputs, call.inputs, strict=True):
            expected = self.reference.last_read[value]
            if self.values[stand_in].all(len(expected)) != expected:
                return
        contents = self.reference.last_read[recomputation.outputs[position]]
        for cell in range(min(storage.count, len(contents))):
            storage.put(cell, contents[cell])

    def _place(self, call: StepCall, region: RegionProfile, index: int) -> Cells:
        buffer = region.buffers[index]
        size = self.used_bytes.get((region.name, buffer.name), buffer.size_bytes)
        for target in call.into:
            if target.buffer == index:
                if target.value not in self.values:
                    raise Broken(f"{call.name} writes into what is not there")
                inside = self.values[target.value]
                assert not inside.is_ordinary, "the machine keeps such values in the arena"
                first = inside.first + target.offset_bytes // CELL_BYTES
                return Cells(self.arena, first, size // CELL_BYTES)
        offset = self.plan.offsets[f"{call.name}/{buffer.name}"]
        return Cells(self.arena, offset // CELL_BYTES, size // CELL_BYTES)

    def _scribble(self, call: StepCall, storage: Cells) -> None:
        for cell in range(storage.count):
            storage.put(cell, ("scribble", call.name, cell))

    def _was_scribbled(self, call: StepCall, storage: Cells) -> bool:
        if call.kind is CallKind.RELOAD:
            return True
        return storage.all() == tuple(("scribble", call.name, i) for i in range(storage.count))


def is_right(
    original: Problem,
    problem: Problem,
    plan: Plan,
    *,
    recomputations: Mapping[str, Recomputation] | None = None,
    used_bytes: Mapping[tuple[str, str], int] | None = None,
    num_random: int = 4,
) -> bool:
    """True when the step's results are the original's under every schedule of the copies."""
    reference = Machine(original, roomy(original), used_bytes=used_bytes).run()
    schedules = [*SCHEDULES.values(), *(now_and_then(seed) for seed in range(num_random))]
    for hurry in schedules:
        machine = Machine(problem, plan, hurry, recomputations, reference, used_bytes)
        try:
            machine.run()
        except Broken:
            return False
        if (machine.results, machine.begun) != (reference.results, reference.begun):
            return False
    return True


def roomy(problem: Problem) -> Plan:
    """A plan in which no two buffers share a byte: what is wrong with it is wrong with the step."""
    offsets, at, made = {}, 0, 0
    for call in problem.calls:
        region = problem.regions[call.region]
        inside = call.into_buffers()
        for index, buffer in enumerate(region.buffers):
            if index not in inside:
                offsets[f"{call.name}/{buffer.name}"] = at
                at += buffer.size_bytes
        made += sum(slot.size_bytes for slot in region.outputs)
    fixed = problem.fixed
    return Plan(
        offsets=offsets,
        arena_bytes=at,
        lower_bound_bytes=0,
        outside_bytes_by_kind={},
        peak_bytes=at + made + fixed.parameters + fixed.gradients + fixed.inputs + fixed.buffers,
        fixed=fixed,
        layer_classes=(),
        resident_bytes=(at,) * len(problem.calls),
    )
