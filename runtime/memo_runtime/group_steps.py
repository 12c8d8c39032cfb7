"""Runs a group: several live steps of one graph in one frame, half by half as planned.

Each member has a lease and a handle of its own; the frame is the group's. It is given back when the
last member's backward has run, or when autograd has dropped the handles of all remaining members.

Autograd may leave halves out: a block that did not run, an output that nobody used. The copies that
the plan put into those halves for other members are made all the same, in order. For a backward
that comes too early, or again (retain_graph), the frame is copied before a half overwrites what is
still to be read, and is restored later.
"""

import contextlib
import functools
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
        """Takes the frame for a step; no member has run. Raises as ``run_forward``.

        ``follows``: other graphs of the same step have run before, and the heap watch has begun
        with them. ``stays``: if the step is dropped, its frame keeps its pages, since the next step
        begins at once.
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
        """Returns the position of a half in the plan's order."""
        return self.plan.order.index((member, is_backward))

    def takes(self, member: int) -> bool:
        """True where the member's forward can run now, in its place of the plan's order.

        No live backward may stand before it in the plan's order: its place in the frame is planned
        for when those have run. Nor may the frame have to be restored for one.
        """
        place = self.place_of(member, is_backward=False)
        is_ahead = place >= self.position and not self._skips_live(place)
        return is_ahead and self._snapshot is None

    def _skips_live(self, place: int) -> bool:
        """True if a backward that may still come stands before ``place`` and has not run."""
        skipped = self.plan.order[self.position : place]
        return any(is_backward and other in self.live for other, is_backward in skipped)

    def forward(self, member: int, args: list[object]) -> list[object]:
        """Runs the member's forward, which ``takes`` allows, and returns its results."""
        return self.begin_forward(member)(args)

    def begin_forward(self, member: int) -> Callable[[list[object]], list[object]]:
        """Takes the member's place, which ``takes`` allows, and returns what runs its forward."""
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
        return functools.partial(run_forward, self.plan.members[member], member=lease)

    def begin_backward(self, lease: Lease, *, keep_graph: bool) -> None:
        """Brings the frame into the state in which the backward of this member finds its values."""
        member = next(at for at, number in self.live.items() if number == lease.number)
        place = self.place_of(member, is_backward=True)
        if place < self.position:
            self._restore(place, keep_graph=keep_graph)
        if self._snapshot is None and (keep_graph or self._skips_live(place)):
            self._copy_frame()  # this half overwrites what a later backward reads
        self._advance(place)
        self.position += 1

    def count(self, counted: StepCounters) -> None:
        """Adds the counters of a member whose halves have run; tells the plan after the last."""
        self.counted += counted
        if self.position == len(self.plan.order):
            self.plan.on_step_end(self.counted)

    def instructions(self, half: RunHalf) -> Iterator[Instruction]:
        """Yields a half's instructions without the copies of members that never began."""
        for call, owner in zip(half.calls, half.owners, strict=True):
            if owner in self.started:
                yield call

    def _advance(self, place: int) -> None:
        """Skips the halves up to ``place``, but makes the copies that stand in them."""
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
        """Copies the frame as it is now, behind all copies that are in flight."""
        self.plan.before_copy()
        for number in list(self.frame.tickets):
            self.frame.wait(number)
        self._snapshot = _Snapshot(self.position, self.frame.snapshot())

    def _restore(self, place: int, *, keep_graph: bool) -> None:
        """Goes back to the copied frame, for a half at ``place`` which has been passed already.

        Raises StepError: there is no copy from before that half.
        """
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
        """The member's lease has ended: its backward has run, or will not come."""
        self.live.pop(member, None)
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if not self.live:
            self._snapshot = None
            if self.position < len(self.plan.order) and not self.stays:
                self.frame.drop()  # a backward will not come
            self.frame.release()
