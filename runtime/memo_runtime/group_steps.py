"""Runs a group: several live steps of one graph in one frame, half by half as planned.

Each member has a lease and a handle of its own, the frame is the group's. It goes back when the
last member's backward has run, or when autograd has dropped the handles of all that are left.

Autograd may leave halves out: a block that did not run, an output that nobody used. Then the copies
that the plan put into those halves for other members are made all the same, in order. A backward
that comes too early, or again (retain_graph), finds the frame as it was when the others had run: it
is copied before anything is overwritten that is still to be read, and put back.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from memo_runtime.copies import Lane
from memo_runtime.instructions import Instruction, Running, StartReload, WaitCopy
from memo_runtime.leases import Lease, StepCounters, leases
from memo_runtime.run_step import RunHalf, StepError, StepPlan, refuse_capture, run_forward


@dataclass(slots=True, kw_only=True)
class GroupPlan:
    """A group that can run."""

    members: tuple[StepPlan, ...]
    """The halves of each; table, sizes and options are the group's, the same in all of them."""
    order: tuple[tuple[int, bool], ...]
    """The halves in the order in which they run: (member, is a backward)."""
    on_step_end: Callable[[StepCounters], None] = lambda counted: None
    """Called when the last half has run, with what all of them did."""
    before_copy: Callable[[], None] = lambda: None
    """Called before the frame is copied; may raise where there is no room for that."""

    @property
    def is_live(self) -> bool:
        """True while a step of the group holds the frame."""
        return self.members[0].live > 0

    def reserve(self) -> None:
        """As ``StepPlan.reserve``."""
        self.members[0].reserve()

    def begin(self, *, follows: bool = False, stays: bool = False) -> "GroupStep":
        """The frame is taken; no member has run. Raises as ``run_forward``.

        A step that ``follows`` belongs to others that ran before, as which it is planned: what is
        taken since they began is known. ``stays``: if the step is dropped, the next one begins at
        once, and uses the pages of its frame.
        """
        first = self.members[0]
        refuse_capture(first.device)
        frame = first.lease()
        if first.heap is not None:
            resident_bytes = frame.slab.occupy(first.arena_bytes)
            if not follows:
                first.heap.begin(resident_bytes)
        return GroupStep(plan=self, frame=frame, stays=stays)


class _Snapshot(NamedTuple):
    """The frame's bytes before half ``position`` ran."""

    position: int
    content: torch.Tensor


@dataclass(eq=False, kw_only=True)
class GroupStep:
    """One live step of a group."""

    plan: GroupPlan
    frame: Lease
    stays: bool = False
    """The frame keeps its pages if the step is dropped."""
    position: int = 0
    """The next half in the plan's order."""
    started: set[int] = field(default_factory=set)
    """Members whose forward has begun: the copies of others have no bytes."""
    live: dict[int, int] = field(default_factory=dict)
    """Members whose backward may still come, and the numbers of their leases."""
    counted: StepCounters = field(default_factory=StepCounters)
    _snapshot: _Snapshot | None = None

    @property
    def is_over(self) -> bool:
        """True once the frame has gone back."""
        return not self.frame.active

    def place_of(self, member: int, *, is_backward: bool) -> int:
        """Where this half stands in the plan's order."""
        return self.plan.order.index((member, is_backward))

    def takes(self, member: int) -> bool:
        """True where the member's forward can run now, and every live backward still after it.

        None of those may stand before it in the plan's order: its place in the frame is planned
        for when they have run. Nor may the frame have to be put back for one.
        """
        place = self.place_of(member, is_backward=False)
        skipped = self.plan.order[self.position : place]
        waits = any(is_backward and other in self.live for other, is_backward in skipped)
        return place >= self.position and not waits and self._snapshot is None

    def forward(self, member: int, args: list[object]) -> list[object]:
        """The forward's results. The step must take the member."""
        try:
            self._advance(self.place_of(member, is_backward=False))
        except BaseException:
            self._end_if_unused()
            raise
        self.started.add(member)
        frame, at_end = self.frame, contextlib.ExitStack()
        at_end.callback(self._ended, member)
        lease = leases.open(frame.slab, frame.size_bytes, None, at_end)
        lease.group, lease.host = self, frame.host
        self.live[member] = lease.number
        self.position += 1
        return run_forward(self.plan.members[member], args, lease)

    def begin_backward(self, lease: Lease, *, keep_graph: bool) -> None:
        """The frame is as the backward of this member needs it."""
        member = next(at for at, number in self.live.items() if number == lease.number)
        place = self.place_of(member, is_backward=True)
        if place < self.position:
            self._restore(place, keep_graph=keep_graph)
        skipped = self.plan.order[self.position : place]
        waits = any(is_backward and other in self.live for other, is_backward in skipped)
        if self._snapshot is None and (keep_graph or waits):
            self._copy_frame()
        self._advance(place)
        self.position += 1

    def count(self, counted: StepCounters) -> None:
        """A member has run, both halves; tells the plan when it was the last."""
        self.counted += counted
        if self.position == len(self.plan.order):
            self.plan.on_step_end(self.counted)

    def instructions(self, half: RunHalf) -> Iterator[Instruction]:
        """What a half does: all but the copies of members that never began."""
        for call, owner in zip(half.calls, half.owners, strict=True):
            if owner in self.started:
                yield call

    def _advance(self, place: int) -> None:
        """The halves up to ``place`` are left out; copies that stand in them are made."""
        for member, is_backward in self.plan.order[self.position : place]:
            plan = self.plan.members[member]
            half = plan.backward if is_backward else plan.forward
            running = Running(
                lease=self.frame,
                env=[None] * half.num_registers,
                tables=self.frame.slab.tables(plan.key, plan.table),
                resident_bytes=plan.arena_bytes,
                poison=plan.poison,
                counted=StepCounters(),
            )
            for call in self.instructions(half):
                if isinstance(call, StartReload | WaitCopy):
                    call.execute(running)
            running.leave(half)
            self.position += 1

    def _copy_frame(self) -> None:
        self.plan.before_copy()
        for number in list(self.frame.tickets):
            self.frame.wait(number)
        self._snapshot = _Snapshot(self.position, self.frame.snapshot())

    def _restore(self, place: int, *, keep_graph: bool) -> None:
        snapshot = self._snapshot
        if snapshot is None or snapshot.position > place:
            raise StepError(
                "memo: the saved activations of this step are gone: backwards of a group came in "
                "an order that its frame cannot serve. Call backward once for all of them"
            )
        for number, ticket in self.frame.tickets.items():
            if ticket.lane is Lane.H2D:
                self.frame.wait(number)
        self.frame.restore(snapshot.content)
        self.position = snapshot.position
        if not keep_graph:
            self._snapshot = None

    def _ended(self, member: int) -> None:
        self.live.pop(member, None)
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if not self.live:
            self._snapshot = None
            if self.position < len(self.plan.order) and not self.stays:
                self.frame.drop()  # a backward will not come
            self.frame.release()
