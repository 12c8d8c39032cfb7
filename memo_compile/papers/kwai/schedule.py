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
    """Everything that ``rank`` does in one step, in order; InputError for no such rank."""
    if not 0 <= rank < shape.num_ranks:
        raise InputError(f"rank: expected 0..{shape.num_ranks - 1}, got {rank}")
    each_way = range(shape.num_batches * shape.num_chunks)
    forwards, backwards = ([_nth(shape, way, k) for k in each_way] for way in Direction)
    warmup = shape.num_warmup(rank)
    pairs = zip(forwards[warmup:], backwards, strict=False)
    late = backwards[len(forwards) - warmup :]
    return (*forwards[:warmup], *(work for pair in pairs for work in pair), *late)


def _nth(shape: PipelineShape, direction: Direction, k: int) -> Work:
    """The ``k``-th forward (or backward) of any rank: groups of p micro-batches, chunk by chunk."""
    group, within = divmod(k, shape.num_stages)
    chunk, lane = divmod(within, shape.num_ranks)
    if direction is Direction.BACKWARD:
        chunk = shape.num_chunks - 1 - chunk
    return Work(direction=direction, chunk=chunk, micro_batch=group * shape.num_ranks + lane)
