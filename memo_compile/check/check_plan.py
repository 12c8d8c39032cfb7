"""The independent checker: replays a plan and proves that it cannot compute a wrong result.

It shares nothing with the planners: not the lifetimes, not the sums. It walks the calls of the
step in order, gives every buffer its bytes when the region allocates it, takes them back when its
last reader has run and no copy reads or writes it, and complains if one of these happens:

- two live buffers share a byte;
- a call reads a value that no earlier call made, or whose bytes were given to another;
- an offset is missing, misaligned or outside the arena;
- a call needs more than the plan's peak, the peak exceeds the budget, or the lower bound the arena;
- a copy is not ordered with calls that read or write the same bytes (``check_contents.py``).

That a step with moves computes what the step without them does is ``check_moves.py``.
"""

import bisect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memo_compile.check.check_contents import MAX_PROBLEMS, StepContents, misshapen_calls
from memo_compile.errors import InvalidPlan
from memo_compile.step.halves import half_keys, halves_of_calls
from memo_compile.step.plans import CheckVerdict, Plan
from memo_compile.step.problem import (
    ALIGNMENT_BYTES,
    Interlude,
    Phase,
    Problem,
    RegionOutput,
    RegionProfile,
    StepCall,
    Storage,
)

_FOR_USER, _OUTSIDE = " for the user", " outside"
"""Behind the name of a value: the owner of its bytes in ordinary memory."""
_LOSS = "a loss outside the graph"
NEVER = 1 << 30
"""A half behind all others: until then the user keeps what he keeps to the end of the step."""

_Event = tuple[int, bool, str, int, bool]
"""(line, is birth, owner, bytes, in the arena): on a line deaths come before births."""


def check(problem: Problem, plan: Plan) -> CheckVerdict:
    """Returns the faults of ``plan``, a sentence each. Cost: buffers x log live buffers."""
    misshapen = misshapen_calls(problem)
    if misshapen:
        return CheckVerdict(problems=misshapen[:MAX_PROBLEMS])
    return _Replay(problem, plan).run()


def require_valid(problem: Problem, plan: Plan) -> Plan:
    """Returns ``plan`` with its verdict. Raises InvalidPlan, with all faults: there are some."""
    verdict = check(problem, plan)
    if not verdict.ok:
        raise InvalidPlan(f"plan {plan.name or 'of this step'}: {verdict}")
    return replace(plan, check=verdict)


def require_within_budget(plan: Plan) -> Plan:
    """Returns ``plan``. Raises InvalidPlan: its peak exceeds the budget that it names."""
    if over := _over_budget(plan):
        raise InvalidPlan(f"plan {plan.name or 'of this step'}: {over}")
    return plan


def _over_budget(plan: Plan) -> str:
    """Returns the fault of a plan over its budget; empty where it fits, or names no budget."""
    if plan.budget_bytes is None or plan.peak_bytes <= plan.budget_bytes:
        return ""
    return f"peak {plan.peak_bytes} > budget {plan.budget_bytes}"


@dataclass(slots=True)
class _Storage:
    """The bytes that one buffer holds now, and the values that live in them."""

    offset: int
    size_bytes: int
    in_arena: bool = True
    until: int = -1
    """Results for the user: the half at whose end they may be freed; -1: only the step reads it."""
    values: set[str] = field(default_factory=set)


class _Replay:
    """Replays the calls of a step at the addresses of its plan; ``run`` returns the faults."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem = problem
        self.plan = plan
        self.problems: list[str] = []
        self._complain = self.problems.append
        self.contents = StepContents(problem, self._complain)
        self.live: list[tuple[int, str]] = []
        """(offset, owner) of the live storages that have bytes, by offset."""
        self.is_disjoint = True
        """No two live storages shared a byte so far, so that of those in front of a new one only
        the last can reach into it."""
        self.storages: dict[str, _Storage] = {}
        self.place_of: dict[str, str | None] = {}
        """Value -> owner of its storage; None for a value that the step does not free."""
        self.reads_left = Counter(value for call in problem.calls for value in call.touched)
        """Value -> how often calls to come read it or write into it."""
        self.num_buffers = self.num_reads = 0
        """Of the verdict."""
        self.highest = 0
        """The highest address that the call being replayed uses."""
        self.outside_bytes = problem.rebound_bytes
        """Ordinary memory now: of kernels, results, incoming gradients, the step before."""
        self.most_outside_bytes = 0
        """The most of it during the call being replayed."""
        self.left_bytes = 0
        """Bytes that interludes have left and not freed again."""
        self.leaving = _LeavingGradients(problem)
        self.half_keys = half_keys(problem)
        self.half_of_calls = halves_of_calls(problem)
        self.half = 0
        """Index of the half that the call being replayed is of."""
        backwards = (at for at, key in enumerate(self.half_keys) if key[0] is Phase.BACKWARD)
        self.first_backward_half = next(backwards, len(self.half_keys))
        """Index of the first half that is a backward; without one, the number of halves."""
        fixed = problem.fixed
        self.constant_bytes = (
            fixed.parameters
            + fixed.buffers
            + fixed.optimizer_state
            + fixed.inputs
            + fixed.earlier_outputs
            + fixed.libraries
            + max(0, fixed.gradients - fixed.new_gradients)
        )
        # Other forwards that wait for their backwards hold an arena each.
        waiting_step = plan.arena_bytes + (fixed.outputs if problem.keeps_outputs else 0)
        self.constant_bytes += (problem.live_steps - 1) * waiting_step

    def run(self) -> CheckVerdict:
        """Replays all calls, or as many as bring ``MAX_PROBLEMS`` faults."""
        plan = self.plan
        if plan.lower_bound_bytes > plan.arena_bytes:
            self._complain(f"lower bound {plan.lower_bound_bytes} > arena {plan.arena_bytes}")
        if over := _over_budget(plan):
            self._complain(over)
        self.place_of.update(dict.fromkeys(self.problem.inputs))
        for index, call in enumerate(self.problem.calls):
            while self.half < self.half_of_calls[index]:
                self._enter_half(self.half + 1)
            self._replay(call, self.problem.regions[call.region])
            self._check_memory(index, call)
            if len(self.problems) >= MAX_PROBLEMS:
                break
        else:
            while self.half < len(self.half_keys):
                self.half += 1
                self._check_interludes(self.half)
            self._check_update()
            self.contents.finish()
        return CheckVerdict(
            problems=tuple(self.problems[:MAX_PROBLEMS]),
            num_buffers=self.num_buffers,
            num_reads=self.num_reads,
        )

    def _replay(self, call: StepCall, region: RegionProfile) -> None:
        """Replays one call: what it reads, allocates, returns and frees."""
        placed = [storage for storage in self.storages.values() if storage.in_arena]
        self.highest = max((storage.offset + storage.size_bytes for storage in placed), default=0)
        self.most_outside_bytes = self.outside_bytes
        self._die(_LOSS)
        self.contents.replay(call)
        for value in call.inputs:
            self._use(call, value)
        for _, is_birth, owner, size_bytes, in_arena in sorted(self._events(call, region)):
            if not is_birth:
                self._die(owner)
            elif in_arena:
                self._bear(owner, size_bytes)
            else:
                self._bear_outside(owner, size_bytes)
                if owner.endswith(_FOR_USER):
                    until = self._until(call, owner.removesuffix(_FOR_USER))
                    self.storages[owner].until = NEVER if until is None else until
        for position, value in enumerate(call.outputs):
            self._bind(call, region, position, value)
        for into in call.into:
            self._use(call, into.value)
        for value in (*call.touched, *call.outputs):
            owner_of_value = self.place_of.get(value)
            if owner_of_value is not None and self._is_unread(owner_of_value):
                self._die(owner_of_value)
        for owner in self.leaving.leave_now(self.reads_left):
            self._die(f"{owner}{_FOR_USER}")

    def _check_interlude(self, interlude: Interlude, dropped: Sequence[tuple[int, int]]) -> None:
        """Checks that the user's code fits the peak; ``dropped``: ranges of pages given back."""
        where = f"the interlude before half {interlude.half}"
        next_call = bisect.bisect_left(self.half_of_calls, interlude.half)
        resident = self.plan.resident_bytes[min(next_call, len(self.plan.resident_bytes) - 1)]
        previous_end = 0
        for start, end in dropped:
            if not previous_end <= start < end <= resident:
                self._complain(
                    f"{where} drops [{start}, {end}) of {resident} B, {previous_end} B done"
                )
            previous_end = end
            for offset, owner in self.live:
                if offset < end and start < offset + self.storages[owner].size_bytes:
                    self._complain(f"{where} drops [{start}, {end}) with {owner} at {offset}")
        stays = resident - sum(end - start for start, end in dropped)
        need = self.constant_bytes + stays + self.outside_bytes + interlude.most_bytes
        if need > self.plan.peak_bytes:
            self._complain(f"{where} needs {need} B, the peak says {self.plan.peak_bytes}")
        self.outside_bytes += interlude.left_bytes
        self.left_bytes += interlude.left_bytes
        if self.left_bytes < 0:
            self._complain(f"{where} frees {-self.left_bytes} B more than those before it left")

    def _check_interludes(self, half: int) -> None:
        """Checks the interludes right before ``half``; the number of halves stands for the end."""
        interludes = self.problem.interludes
        dropped = self.plan.dropped or ((),) * len(interludes)
        if len(dropped) != len(interludes):
            if half == 1:
                self._complain(
                    f"dropped: expected {len(interludes)} interludes, got {len(dropped)}"
                )
            return
        for interlude, ranges in zip(interludes, dropped, strict=True):
            if interlude.half == half:
                self._check_interlude(interlude, ranges)

    def _check_update(self) -> None:
        """Checks that the optimizer's update fits the peak, beside all gradients."""
        borrowed = self.problem.fixed.update
        if not borrowed:
            return
        if not self.plan.releases_pages:  # it lies beside the arena, which stays
            borrowed += self.plan.arena_bytes
        need = self.constant_bytes + borrowed + self.outside_bytes
        if need > self.plan.peak_bytes:
            self._complain(f"the update needs {need} B, the peak says {self.plan.peak_bytes}")

    def _enter_half(self, half: int) -> None:
        """Begins a half: incoming gradients are allocated, results of earlier halves freed."""
        self.half, problem = half, self.problem
        if half == self.first_backward_half:
            self.outside_bytes -= problem.rebound_bytes  # the new results have replaced them
            self._bear_outside(_LOSS, problem.loss_bytes)
        self._check_interludes(half)
        halves = problem.halves
        if halves:
            arriving = [value for value in halves[half].arguments if value in problem.tangents]
        else:
            arriving = list(problem.tangents) if half == self.first_backward_half else []
        for value in arriving:
            owner = f"{value} given"
            self._bear_outside(owner, problem.tangents[value])
            self.storages[owner].values.add(value)
            self.place_of[value] = owner
        for owner, storage in list(self.storages.items()):
            if 0 <= storage.until < half and self._is_unread(owner):
                self._die(owner)

    def _until(self, call: StepCall, value: str) -> int | None:
        """Returns the half at whose end the user frees the result ``value``; None: he does not."""
        half = self.problem.held_until.get(value)
        if half is not None or call.phase is Phase.BACKWARD or self.problem.keeps_outputs:
            return half
        return self.first_backward_half - 1  # with the forward

    def _check_memory(self, index: int, call: StepCall) -> None:
        """Checks that all live bytes lie in pages that stay, and that the peak counts them."""
        if len(self.plan.resident_bytes) != len(self.problem.calls):
            if index == 0:
                self._complain("resident_bytes: expected one number per call")
            return
        resident = self.plan.resident_bytes[index]
        before = self.plan.resident_bytes[index - 1] if index else self.plan.arena_bytes
        if resident > before:
            self._complain(f"{call.name}: {resident} B of the arena in memory after {before} B")
        if self.highest > resident:
            self._complain(f"{call.name} uses the arena up to {self.highest}, {resident} B stay")
        need = self.constant_bytes + resident + self.most_outside_bytes
        if need > self.plan.peak_bytes:
            self._complain(f"{call.name} needs {need} B, the peak says {self.plan.peak_bytes}")

    def _events(self, call: StepCall, region: RegionProfile) -> Iterator[_Event]:
        """Yields what is allocated and what is freed inside this call."""
        buffers_of_outputs = {
            output.index for output in region.outputs if output.storage is Storage.ARENA
        }
        buffers_inside_others = {into.buffer for into in call.into}
        for index, buffer in enumerate(region.buffers):
            if index in buffers_inside_others:
                continue
            owner = f"{call.name}/{buffer.name}"
            yield buffer.start, True, owner, buffer.size_bytes, True
            if index not in buffers_of_outputs:
                yield buffer.end, False, owner, 0, True
        for index, outside in enumerate(region.outside):
            owner = f"{call.name}/{outside.kind} {index}"
            yield outside.start, True, owner, outside.size_bytes, False
            yield outside.end, False, owner, 0, False
        for output, value in zip(region.outputs, call.outputs, strict=True):
            if output.same_as is not None:
                continue
            if output.storage is Storage.OUTSIDE:
                yield 0, True, f"{value}{_OUTSIDE}", output.size_bytes, False
            elif output.storage is Storage.EXTERNAL:
                yield output.start, True, f"{value}{_FOR_USER}", output.size_bytes, False
        yield from self._last_uses(call, region)

    def _last_uses(self, call: StepCall, region: RegionProfile) -> Iterator[_Event]:
        """Yields the deaths of storages in the arena that this call is the last to read.

        Ordinary memory is freed when the call has ended, because the heap need not put what the
        call makes into the hole.
        """
        ends: dict[str, int] = {}
        for value, end in zip(call.inputs, region.input_ends, strict=True):
            owner = self.place_of.get(value)
            if owner is not None:
                ends[owner] = max(ends.get(owner, 0), end)
        passed_on = {
            self.place_of.get(call.inputs[output.index])
            for output in region.outputs
            if output.storage is Storage.INPUT and output.index is not None
        }
        for owner, end in ends.items():
            in_arena = owner in self.storages and self.storages[owner].in_arena
            if in_arena and owner not in passed_on and self._is_unread(owner):
                yield end, False, owner, 0, True

    def _is_unread(self, owner: str) -> bool:
        """True when no later call uses what ``owner`` holds, and no copy reads or writes it."""
        storage = self.storages.get(owner)
        if storage is None or self.contents.is_busy(owner):
            return False
        if self.half <= storage.until:
            return False
        return not any(self.reads_left[value] for value in storage.values)

    def _use(self, call: StepCall, value: str) -> None:
        """Counts a use of ``value``, whose bytes must still be its own."""
        self.num_reads += 1
        self.reads_left[value] -= 1
        owner = self.place_of.get(value)
        if owner is not None and owner not in self.storages:
            self._complain(f"{call.name} reads {value} after its bytes were given back")

    def _bear(self, owner: str, size_bytes: int) -> None:
        """Allocates a buffer in the arena, at the plan's offset."""
        self.num_buffers += 1
        offset = self.plan.offsets.get(owner)
        if offset is None:
            self._complain(f"{owner} has no offset")
            return
        if offset < 0 or offset + size_bytes > self.plan.arena_bytes:
            self._complain(
                f"{owner} at [{offset}, {offset + size_bytes}) is outside the arena of "
                f"{self.plan.arena_bytes} B"
            )
        if offset % ALIGNMENT_BYTES:
            self._complain(f"{owner} at {offset} is not aligned to {ALIGNMENT_BYTES} B")
        for other in self._overlapping(offset, size_bytes):
            self.is_disjoint = False
            self._complain(f"{owner} and {other} share bytes while both are alive")
        self.highest = max(self.highest, offset + size_bytes)
        self._die(owner)
        self.storages[owner] = _Storage(offset, size_bytes)
        if size_bytes:
            bisect.insort(self.live, (offset, owner))

    def _bear_outside(self, owner: str, size_bytes: int) -> None:
        self.storages[owner] = _Storage(0, size_bytes, in_arena=False)
        self.outside_bytes += size_bytes
        self.most_outside_bytes = max(self.most_outside_bytes, self.outside_bytes)

    def _overlapping(self, offset: int, size_bytes: int) -> list[str]:
        """Returns the live storages that share a byte with ``[offset, offset + size_bytes)``."""
        if not size_bytes:
            return []
        first = max(0, bisect.bisect_left(self.live, (offset, "")) - 1) if self.is_disjoint else 0
        behind = bisect.bisect_left(self.live, (offset + size_bytes, ""))
        return [
            owner
            for start, owner in self.live[first:behind]
            if start + self.storages[owner].size_bytes > offset
        ]

    def _die(self, owner: str) -> None:
        """Takes back the bytes of a storage, if it has not died before."""
        storage = self.storages.pop(owner, None)
        if storage is None:
            return
        if not storage.in_arena:
            self.outside_bytes -= storage.size_bytes
        elif storage.size_bytes:
            del self.live[bisect.bisect_left(self.live, (storage.offset, owner))]

    def _bind(self, call: StepCall, region: RegionProfile, position: int, value: str) -> None:
        """Notes in which storage an output of the call lies."""
        output = region.outputs[position]
        self.leaving.bind(call, output, value)
        holder = value if output.same_as is None else call.outputs[output.same_as]
        owner: str | None = None
        if output.storage is Storage.ARENA:
            assert output.index is not None, f"{call.name}: ARENA output without a buffer"
            value_around = call.value_around(output.index)
            buffer = f"{call.name}/{region.buffers[output.index].name}"
            owner = buffer if value_around is None else self.place_of.get(value_around)
        elif output.storage is Storage.INPUT:
            assert output.index is not None, f"{call.name}: INPUT output without an input"
            owner = self.place_of.get(call.inputs[output.index])
        elif output.storage is Storage.OUTSIDE:
            owner = f"{holder}{_OUTSIDE}"
        elif output.storage is Storage.EXTERNAL and self._until(call, holder) is not None:
            if self.reads_left[value]:  # it keeps the user's memory alive
                owner = f"{holder}{_FOR_USER}"
        self.place_of[value] = owner
        if owner is not None and owner in self.storages:
            self.storages[owner].values.add(value)


@dataclass(slots=True)
class _Gradient:
    """Ordinary memory that a call of the backward made, and the values that lie in it."""

    values: set[str]
    has_left: bool = False


@dataclass(slots=True)
class _LeavingGradients:
    """Follows the results of the backward from the call that makes them until they leave.

    A gradient is handed to autograd when no later call uses its memory, nor that of the input it is
    the gradient of. If the problem lists it as leaving, its memory is free before the next call.
    """

    problem: Problem
    _inputs_of: dict[str, set[str]] = field(default_factory=dict)
    """Result of the backward -> the inputs that it is the gradient of."""
    _values_of: dict[str, set[str]] = field(default_factory=dict)
    """Input of the step -> the values that lie in its memory."""
    _owner: dict[str, str] = field(default_factory=dict)
    """Value -> the first value in its memory: a gradient, or an input of the step."""
    _gradients: dict[str, _Gradient] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Finds ``_inputs_of``; nothing is followed in groups, whose halves hand gradients over."""
        halves = {half.phase: half for half in self.problem.halves}
        if not self.problem.leaving or len(self.problem.halves) != 2:
            return
        inputs = halves[Phase.FORWARD].arguments
        results = halves[Phase.BACKWARD].results
        if len(inputs) != len(results):
            return
        for name, value in zip(inputs, results, strict=True):
            if value is not None:
                self._inputs_of.setdefault(value, set()).add(name)
        for name in self.problem.inputs:
            self._owner[name] = name
            self._values_of[name] = {name}

    def bind(self, call: StepCall, output: RegionOutput, value: str) -> None:
        """Notes where ``value`` lies, which ``call`` has made."""
        if not self._inputs_of:
            return
        if output.storage is Storage.INPUT and output.index is not None:
            owner = self._owner.get(call.inputs[output.index])
        elif output.storage is Storage.EXTERNAL and call.phase is Phase.BACKWARD:
            first = value if output.same_as is None else call.outputs[output.same_as]
            owner = self._owner.setdefault(first, first)
            self._gradients.setdefault(owner, _Gradient(set()))
        else:
            holder = call.value_around(output.index) if output.storage is Storage.ARENA else None
            owner = None if holder is None else self._owner.get(holder)
        if owner is None:
            return
        self._owner[value] = owner
        if owner in self._gradients:
            self._gradients[owner].values.add(value)
        else:
            self._values_of[owner].add(value)

    def leave_now(self, reads_left: Mapping[str, int]) -> Iterator[str]:
        """Yields the gradients that leave after this call, by the first value in their memory."""
        for owner, gradient in self._gradients.items():
            if not gradient.has_left and self._leaves(gradient, reads_left):
                gradient.has_left = True
                yield owner

    def _leaves(self, gradient: _Gradient, reads_left: Mapping[str, int]) -> bool:
        """True where no later call uses it, or an input that it is the gradient of."""
        results = gradient.values & self._inputs_of.keys()
        if not results or not results <= set(self.problem.leaving):
            return False
        used = set(gradient.values)
        for result in results:
            for name in self._inputs_of[result]:
                used |= self._values_of[name]
        return not any(reads_left.get(value, 0) for value in used)
