"""In which order a pipeline schedule runs the microbatches of a stage, as torch's schedules do."""

from dataclasses import dataclass

from memo_compile.errors import ConfigError
from memo_compile.papers.kwai.schedule import Direction, PipelineShape, order_work
from memo_compile.step.joint_step import HalfOrder

KINDS = ("1f1b", "gpipe", "interleaved")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOrders:
    """A schedule of stages; stage s lies on rank ``s % num_ranks``."""

    kind: str
    num_stages: int
    num_microbatches: int
    num_ranks: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"schedule: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        for name in ("num_stages", "num_microbatches", "num_ranks"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}: expected at least 1, got {value!r}")
        chunks, remainder = divmod(self.num_stages, self.num_ranks)
        if self.kind != "interleaved" and self.num_ranks != self.num_stages:
            raise ConfigError(
                f"num_ranks: {self.kind} has one stage on each rank, got {self.num_stages} stages "
                f"on {self.num_ranks}"
            )
        if remainder or (self.kind == "interleaved" and chunks < 2):
            raise ConfigError(
                f"num_stages: interleaved expects two or more on each of {self.num_ranks} ranks, "
                f"got {self.num_stages}"
            )
        if self.kind == "interleaved" and self.num_microbatches % self.num_ranks:
            raise ConfigError(
                f"num_microbatches: interleaved expects a multiple of the {self.num_ranks} ranks, "
                f"got {self.num_microbatches}"
            )

    @property
    def num_chunks(self) -> int:
        """Stages of each rank."""
        return self.num_stages // self.num_ranks

    def is_last(self, stage: int) -> bool:
        """True for the stage whose results the loss reads."""
        return stage == self.num_stages - 1

    def runs_one_by_one(self, stage: int) -> bool:
        """True where each microbatch's backward follows its forward, so that each is one step."""
        alternates = self.kind == "1f1b" and self.is_last(stage)
        return self.num_chunks == 1 and (alternates or self.num_microbatches == 1)

    def rank_order(self, rank: int) -> HalfOrder:
        """(member, is_backward) for all halves of a rank's stages.

        Member ``chunk * num_microbatches + microbatch`` is one microbatch of one stage.
        """
        count = self.num_microbatches
        if self.kind == "gpipe":
            members = range(count)
            return (*((at, False) for at in members), *((at, True) for at in members))
        shape = PipelineShape(
            num_ranks=self.num_ranks, num_chunks=self.num_chunks, num_batches=count
        )
        return tuple(
            (work.chunk * count + work.micro_batch, work.direction is Direction.BACKWARD)
            for work in order_work(shape, rank)
        )

    def stage_order(self, stage: int) -> HalfOrder:
        """(microbatch, is_backward) for all halves of a stage."""
        chunk, rank = divmod(stage, self.num_ranks)
        first_member = chunk * self.num_microbatches
        return tuple(
            (member - first_member, is_backward)
            for member, is_backward in self.rank_order(rank)
            if first_member <= member < first_member + self.num_microbatches
        )

    def num_in_flight(self, stage: int) -> int:
        """How many microbatches of a stage wait for their backward, at most."""
        level = most = 0
        for _, is_backward in self.stage_order(stage):
            level += -1 if is_backward else 1
            most = max(most, level)
        return most
