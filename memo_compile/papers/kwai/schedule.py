"""The order of forwards and backwards on each rank: 1F1B and interleaved 1F1B.

A rank owns ``num_chunks`` model chunks; chunk v of rank r is virtual stage v * p + r. Names and
orders are Megatron-LM's (Narayanan et al. 2021), and torch.distributed.pipelining's.
"""

from dataclasses import asdict, dataclass
from enum import Enum

from memo_compile.errors import InputError, require_at_least


class Direction(Enum):
    """What a rank does with a chunk."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One chunk of one micro-batch in one direction."""

    direction: Direction
    chunk: int
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """Ranks, chunks per rank, micro-batches of a step."""

    num_ranks: int
    num_chunks: int
    num_batches: int

    def __post_init__(self) -> None:
        require_at_least(1, asdict(self))
        if self.num_chunks > 1 and self.num_ranks < 2:
            raise InputError("num_chunks: interleaving needs at least two ranks")
        if self.num_chunks > 1 and self.num_batches % self.num_ranks:
            raise InputError(
                f"num_batches: interleaved 1F1B needs a multiple of the {self.num_ranks} ranks, "
                f"got {self.num_batches}"
            )

    @property
    def num_stages(self) -> int:
        """Virtual stages that a micro-batch passes."""
        return self.num_ranks * self.num_chunks

    def num_warmup(self, rank: int) -> int:
        """Forwards of ``rank`` before its first pair of a forward and a backward."""
        if self.num_chunks == 1:
            ahead = self.num_ranks - 1 - rank
        else:
            ahead = 2 * (self.num_ranks - 1 - rank) + (self.num_chunks - 1) * self.num_ranks
        return min(ahead, self.num_batches * self.num_chunks)


def order_work(shape: PipelineShape, rank: int) -> tuple[Work, ...]:
    """Returns what ``rank`` does in one step, in order. Raises InputError: no such rank."""
    if not 0 <= rank < shape.num_ranks:
        raise InputError(f"rank: expected 0..{shape.num_ranks - 1}, got {rank}")
    each_way = range(shape.num_batches * shape.num_chunks)
    forwards, backwards = ([_nth(shape, way, k) for k in each_way] for way in Direction)
    num_warmup = shape.num_warmup(rank)
    pairs = zip(forwards[num_warmup:], backwards, strict=False)
    cooldown = backwards[len(forwards) - num_warmup :]
    return (*forwards[:num_warmup], *(work for pair in pairs for work in pair), *cooldown)


def _nth(shape: PipelineShape, direction: Direction, k: int) -> Work:
    """Returns the ``k``-th forward (or backward) of any rank, counted from 0.

    p micro-batches pass one chunk after the other, then the next p: with 2 ranks and 2 chunks
    (chunk, micro-batch) are (0, 0), (0, 1), (1, 0), (1, 1), (0, 2) ...
    """
    group, index_in_group = divmod(k, shape.num_stages)
    chunk, index = divmod(index_in_group, shape.num_ranks)
    if direction is Direction.BACKWARD:
        chunk = shape.num_chunks - 1 - chunk
    return Work(direction=direction, chunk=chunk, micro_batch=group * shape.num_ranks + index)
