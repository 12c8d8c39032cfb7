"""What a rank's microbatches are as a group, before any of them has run.

A step that has run says more: what else lies on the rank, what its own code takes, what is sent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import torch

from memo_compile.driver.knowledge import StepKnowledge
from memo_compile.pipelines.loss_costs import LossCosts
from memo_compile.pipelines.stage_orders import StageOrders
from memo_compile.step.group import Group, num_user_results
from memo_compile.step.problem import FixedBytes, Interlude


def rank_group(
    chunks: Sequence[StepKnowledge], orders: StageOrders, rank: int, loss: LossCosts | None
) -> Group:
    """The microbatches of all stages of ``rank``, and what torch's schedule holds beside them.

    ``chunks`` are the stages' graphs, in the order of the model. Member ``chunk *
    num_microbatches + microbatch`` is one microbatch.
    """
    seen = _Seen(chunks, orders, rank)
    return Group(
        num_members=len(chunks) * orders.num_microbatches,
        fixed=_together([seen.fixed(chunk) for chunk in range(len(chunks))]),
        gone=tuple(seen.gone()),
        passed=tuple(seen.passed()),
        interludes=tuple(seen.losses(loss)) if loss is not None else (),
        order=seen.order,
    )


def _together(parts: Sequence[FixedBytes]) -> FixedBytes:
    """The sum; what libraries keep is there once."""
    sums = {own.name: sum(getattr(part, own.name) for part in parts) for own in fields(FixedBytes)}
    return FixedBytes(**{**sums, "libraries": max(part.libraries for part in parts)})


class _Seen:
    """The halves of a rank in their order."""

    def __init__(self, chunks: Sequence[StepKnowledge], orders: StageOrders, rank: int) -> None:
        self.chunks, self.count = chunks, orders.num_microbatches
        self.order = orders.rank_order(rank)
        self.half_of = {half: at for at, half in enumerate(self.order)}
        self.has_last = orders.is_last(rank + (len(chunks) - 1) * orders.num_ranks)

    def _chunk(self, member: int) -> int:
        return member // self.count

    def _is_last(self, chunk: int) -> bool:
        """True for the stage whose results the loss reads."""
        return self.has_last and chunk == len(self.chunks) - 1

    def fixed(self, chunk: int) -> FixedBytes:
        """What the stage holds, and where its inputs and gradients come in."""
        problem = self.chunks[chunk].lowered.problem
        received = 0 if self._is_last(chunk) else sum(problem.tangents.values())
        return replace(
            problem.fixed,
            inputs=self.count * (problem.fixed.inputs + received),
            gradients=problem.fixed.new_gradients,
        )

    def passed(self) -> Iterator[tuple[int, int]]:
        """Gradients that come from other ranks, which are in memory that stays."""
        for at, (member, is_backward) in enumerate(self.order):
            chunk = self._chunk(member)
            if is_backward and not self._is_last(chunk):
                for number in range(len(self.chunks[chunk].lowered.problem.tangents)):
                    yield at, number

    def gone(self) -> Iterator[tuple[int, int, int]]:
        """When results go, as ``Group.gone`` has it.

        A forward's are kept to the end of its backward, those of the last stage to the end of the
        step. A parameter's gradient stays if it is the first, and is added to that one else. What
        is sent on is there while the next half runs.
        """
        last = len(self.order) - 1
        have_gradients: set[int] = set()
        for at, (member, is_backward) in enumerate(self.order):
            chunk = self._chunk(member)
            lowered = self.chunks[chunk].lowered
            forward, backward = lowered.problem.halves
            if not is_backward:
                until = self.half_of[member, True]
                stays = self._is_last(chunk) or until == last
                count = 0 if stays else num_user_results(forward, backward)
                yield from ((at, position, until) for position in range(count))
                continue
            inputs = lowered.cut.facts.inputs()
            for position, (value, result) in enumerate(zip(inputs, backward.results, strict=False)):
                is_parameter = isinstance(value, torch.nn.Parameter)
                until = at if is_parameter else at + 1
                stays = is_parameter and chunk not in have_gradients
                if result is not None and until < last and not stays:
                    yield at, position, until
            have_gradients.add(chunk)

    def losses(self, loss: LossCosts) -> Iterator[Interlude]:
        """What the losses take between the halves, each computed behind its forward."""
        for at, (member, is_backward) in enumerate(self.order):
            most = left = 0
            before = self.order[at - 1] if at else (0, True)
            if not before[1] and self._is_last(self._chunk(before[0])):
                most, left = max(loss.forward_bytes, loss.saved_bytes), loss.saved_bytes
            if is_backward and self._is_last(self._chunk(member)):
                most, left = max(most, left + loss.backward_bytes), left - loss.saved_bytes
            if at and (most or left):
                yield Interlude(half=at, most_bytes=max(most, left, 0), left_bytes=left)
