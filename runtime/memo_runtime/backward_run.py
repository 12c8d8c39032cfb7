"""Runs the backward of one step: as a whole, or in parts between which autograd works.

Between two parts the user's code may run (hooks, an optimizer, other graphs). If it writes into a
tensor that later parts read, the next part raises.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memo_runtime.cuda_graphs import HalfGraph
from memo_runtime.current import current
from memo_runtime.instructions import Instruction, Running
from memo_runtime.leases import Lease


class StepError(RuntimeError):
    """A backward was called that its forward's plan does not cover."""


@dataclass(slots=True, kw_only=True)
class BackwardRun:
    """One backward of one step; ``rest`` ends it, and so does an exception in it."""

    plan: Any
    """The StepPlan of its forward."""
    lease: Lease
    running: Running
    calls: tuple[Instruction, ...]
    """The plan's backward; in a group without the copies of members that never began."""
    graph: HalfGraph | None = None
    """The backward as one launch: then it does not run in parts."""
    keeps_graph: bool
    """The backward may run again: the frame is not given back."""
    snapshot: torch.Tensor | None
    """The frame as it was, where ``keeps_graph``; a group has its own."""
    _done: int = 0
    """How many of the half's calls have run."""
    _taken: set[int] = field(default_factory=set)
    """Positions of the results that were returned."""
    _versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """The user's tensors that later parts read, and their versions when the last part ended."""

    @property
    def is_over(self) -> bool:
        """True once the frame is given back, or restored."""
        return self._done < 0

    def part(self, results: Sequence[int], read: Sequence[int] = ()) -> list[Any]:
        """Runs until nothing of the step uses ``results`` any more, and returns them.

        After it the step does not read their inputs either, nor the inputs at the positions
        ``read``. Raises StepError: the user wrote into a tensor that the step still reads.
        """
        half = self.plan.backward
        ends = [half.ready[position] for position in results]
        ends += [half.read_until[position] for position in (*results, *read)]
        self._run_to(max(ends, default=0))
        values = [self._take(position) for position in results]
        self._versions = self._still_read()
        return values

    def rest(self, results: Sequence[int]) -> list[Any]:
        """Runs all calls that are left, ends the step, and returns ``results``."""
        self._run_to(len(self.calls))
        values = [self._take(position) for position in results]
        # ``_end`` clears the lease: read these first.
        lease, group, counted = self.lease, self.lease.group, self.running.counted
        if group is not None:  # its frame goes on to serve other members
            self.running.leave(self.plan.backward)
        self._end()
        lease.ran = True
        if group is None:
            self.plan.on_step_end(lease.counted + counted)
        else:
            group.count(lease.counted + counted)
        return values

    def abandon(self) -> None:
        """Ends a backward that is given up because of an exception between two parts."""
        if not self.is_over:
            self._end()

    def _run_to(self, end: int) -> None:
        """Runs the calls before ``end`` that have not run; any error ends the backward."""
        if self.is_over:
            raise StepError("memo: this backward has ended, because a part of it failed")
        if any(tensor._version != version for tensor, version in self._versions):
            self._end()
            raise StepError(
                "memo: a hook wrote in place into what the rest of this backward reads (a "
                "parameter whose own gradient is still to come, an input or a result of the step). "
                "Write into a parameter in its own hook only, or set early_gradients=False."
            )
        try:
            with self.running.timed(self.plan):
                if self.graph is not None:
                    for register, copy in self.graph.replay(self.running).items():
                        self.running.env[register] = copy
                else:
                    for call in self.calls[self._done : end]:
                        call.execute(self.running)
        except BaseException:
            self.running.lease.settle_ranks()  # a group's frame may go on to serve other members
            self._end()
            raise
        finally:
            current.views = ()
            current.inputs = {}
        self._done = max(self._done, end)

    def _take(self, position: int) -> Any:
        """Returns a result, and drops it from the step unless another result is the same."""
        results, env = self.plan.backward.results, self.running.env
        register = results[position]
        if register is None:
            return None
        value = env[register]
        self._taken.add(position)
        if all(at in self._taken for at, other in enumerate(results) if other == register):
            env[register] = None
        return value

    def _still_read(self) -> list[tuple[torch.Tensor, int]]:
        """Returns the user's tensors that later calls read, with their versions now."""
        half, env, lease = self.plan.backward, self.running.env, self.lease
        values = [env[register] for register, last_call in half.guarded if last_call > self._done]
        last_calls = half.checked_until  # of the forward's inputs; its results come behind them
        values += [
            tensor
            for at, (tensor, _) in enumerate(lease.checked)
            if at >= len(last_calls) or last_calls[at] > self._done
        ]
        return [(value, value._version) for value in values if isinstance(value, torch.Tensor)]

    def _end(self) -> None:
        """Gives the frame back, or restores it for another backward."""
        lease, self._done, self._versions = self.lease, -1, []
        if self.snapshot is not None:
            lease.settle()  # before a reload in flight can overwrite what is restored
            lease.restore(self.snapshot)
        elif not self.keeps_graph:
            lease.release()
        lease.running = False
        self.running.env.clear()  # and the lease, if a checkpoint has given its handle away
