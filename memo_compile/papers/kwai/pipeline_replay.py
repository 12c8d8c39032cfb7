"""Event replay of a pipeline step with offloading: times and memory of every rank.

Each rank has three lanes: compute, copies out (D2H), copies back (H2D). Rules, Kwai's (USENIX ATC
24, section 3): the copy of a chunk starts when its forward has ended; the compute lane joins the
previous copy first, and the copied bytes are freed at that join. The reload for backward k + 1
starts when backward k starts, the first one when warm-up has ended; two buffers that live for the
whole step take turns. Memory is counted in chunks: 1 = what one forward keeps.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.models import ModelShape
from memo_compile.errors import InputError, require_at_least
from memo_compile.papers.kwai.offload import OffloadPlan, ParallelConfig, chunk_bytes, static_bytes
from memo_compile.papers.kwai.schedule import Direction, PipelineShape, Work, order_work
from memo_compile.papers.search.cost import CostModel, describe_workload, layer_seconds
from memo_compile.papers.search.space import columns_of

NUM_RELOAD_BUFFERS = 2

Key = tuple[Direction, int, int]
"""A direction, a virtual stage, a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTimes:
    """Seconds that one chunk takes on each lane."""

    forward_s: float
    backward_s: float
    copy_out_s: float = 0.0
    reload_s: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(0, asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSpan:
    """Something that one lane did."""

    lane: str
    work: Work
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReplay:
    """What one rank did in the step."""

    spans: tuple[WorkSpan, ...]
    memory: tuple[tuple[float, float], ...]
    """(seconds, chunks held from then on), in the order of events."""
    peak_chunks: float
    waited_s: float
    """Time that the compute lane waited for copies, not for other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReplay:
    """The whole step."""

    step_s: float
    ranks: tuple[RankReplay, ...]


def is_offloaded(shape: PipelineShape, rank: int, chunk: int) -> bool:
    """True but for the last two stages, or the last of several chunks: their backward is near."""
    if shape.num_chunks == 1:
        return rank < shape.num_ranks - 2
    return (rank, chunk) != (shape.num_ranks - 1, shape.num_chunks - 1)


def replay_step(shape: PipelineShape, alpha: float, times: ChunkTimes) -> StepReplay:
    """Runs one step that offloads the share ``alpha``. Raises InputError: it is not in [0, 1]."""
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha: expected a share in [0, 1], got {alpha}")
    ends_s: dict[Key, float] = {}
    ranks = [_Rank(shape, rank, alpha, times, ends_s) for rank in range(shape.num_ranks)]
    while any(rank.pending for rank in ranks):
        have_run = [rank.advance() for rank in ranks]
        assert any(have_run), f"the schedule of {shape} never ends"
    return StepReplay(step_s=max(ends_s.values()), ranks=tuple(rank.result() for rank in ranks))


@dataclass(slots=True)
class _Rank:
    """One rank in execution."""

    shape: PipelineShape
    rank: int
    alpha: float
    times: ChunkTimes
    ends_s: dict[Key, float]
    """Ends of forwards and backwards of all ranks, as far as they have run."""
    position: int = 0
    """Index into ``order`` of what runs next."""
    compute_free_s: float = 0.0
    """When the compute lane has ended what it began; ``reload_free_s``: the lane of reloads."""
    reload_free_s: float = 0.0
    waited_s: float = 0.0
    held_chunks: float = 0.0
    memory: list[tuple[float, float]] = field(default_factory=list)
    joining: tuple[int, int] | None = None
    """The chunk and micro-batch whose copy has not been joined yet."""
    copied_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """End of each copy out, by chunk and micro-batch."""
    reloaded_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """End of each reload."""
    spans: list[WorkSpan] = field(default_factory=list)
    order: tuple[Work, ...] = ()
    reloads: list[Work] = field(default_factory=list)
    """Backwards that still wait for their reload to be started, in order."""

    def __post_init__(self) -> None:
        self.order = order_work(self.shape, self.rank)
        backwards = [work for work in self.order if work.direction is Direction.BACKWARD]
        self.reloads = [work for work in backwards if self._moves(work)]
        if self.reloads:
            self._hold(NUM_RELOAD_BUFFERS * self.alpha, 0.0)

    @property
    def pending(self) -> bool:
        return self.position < len(self.order)

    def advance(self) -> bool:
        """Runs until something of another rank is missing; returns True when anything ran."""
        first = self.position
        while self.pending:
            ready_s = self._ready_s(self.order[self.position])
            if ready_s is None:
                break
            self._run(self.order[self.position], max(ready_s, self.compute_free_s))
            self.position += 1
        return self.position > first

    def result(self) -> RankReplay:
        return RankReplay(
            spans=tuple(self.spans),
            memory=tuple(self.memory),
            peak_chunks=max(num_chunks for _, num_chunks in self.memory),
            waited_s=self.waited_s,
        )

    def _moves(self, work: Work) -> bool:
        return self.alpha > 0 and is_offloaded(self.shape, self.rank, work.chunk)

    def _ready_s(self, work: Work) -> float | None:
        """Returns when the input of ``work`` is there; None: what makes it has not run yet."""
        stage = work.chunk * self.shape.num_ranks + self.rank
        if work.direction is Direction.FORWARD:
            if stage == 0:
                return 0.0
            return self.ends_s.get((Direction.FORWARD, stage - 1, work.micro_batch))
        if stage == self.shape.num_stages - 1:  # the loss is the backward's input
            return self.ends_s.get((Direction.FORWARD, stage, work.micro_batch))
        return self.ends_s.get((Direction.BACKWARD, stage + 1, work.micro_batch))

    def _run(self, work: Work, start_s: float) -> None:
        """Runs ``work`` and notes its end; where warm-up has ended, starts the first reload."""
        if self.position == self.shape.num_warmup(self.rank):
            self._start_reload(start_s)
        run = self._forward if work.direction is Direction.FORWARD else self._backward
        stage = work.chunk * self.shape.num_ranks + self.rank
        self.ends_s[work.direction, stage, work.micro_batch] = run(work, start_s)

    def _forward(self, work: Work, start_s: float) -> float:
        """Computes a forward, waits for the copy before it, starts its own; returns its end."""
        end_s = start_s + self.times.forward_s
        self._hold(1.0, start_s)
        self._span("compute", work, start_s, end_s)
        self.compute_free_s = end_s
        if self._moves(work):
            self._join(end_s)
            copy_end_s = self.compute_free_s + self.times.copy_out_s
            self._span("d2h", work, self.compute_free_s, copy_end_s)
            self.joining = (work.chunk, work.micro_batch)
            self.copied_s[self.joining] = copy_end_s
        return end_s

    def _join(self, now_s: float) -> None:
        """Waits for the copy on its way, if any, and frees what it copied."""
        if self.joining is None:
            return
        copied_s = self.copied_s[self.joining]
        self.waited_s += max(0.0, copied_s - now_s)
        self.compute_free_s = max(now_s, copied_s)
        self._hold(-self.alpha, self.compute_free_s)
        self.joining = None

    def _backward(self, work: Work, start_s: float) -> float:
        """Waits for the chunk's reload, starts the next one, computes; returns its end."""
        moves = self._moves(work)
        key = (work.chunk, work.micro_batch)
        if moves:
            if self.joining == key:  # still on its way to the host
                self._join(start_s)
                start_s = max(start_s, self.compute_free_s)
            if key not in self.reloaded_s:
                self._start_reload(start_s)
            self.waited_s += max(0.0, self.reloaded_s[key] - start_s)
            start_s = max(start_s, self.reloaded_s[key])
            self._start_reload(start_s)
        end_s = start_s + self.times.backward_s
        self._span("compute", work, start_s, end_s)
        self.compute_free_s = end_s
        self._hold(self.alpha - 1 if moves else -1.0, end_s)
        return end_s

    def _start_reload(self, now_s: float) -> None:
        """Brings the next chunk back, if its forward has run, into the buffer that is free."""
        if not self.reloads:
            return
        work = self.reloads[0]
        key = (work.chunk, work.micro_batch)
        if key not in self.copied_s:
            return
        self.reloads.pop(0)
        start_s = max(now_s, self.reload_free_s, self.copied_s[key])
        self.reload_free_s = start_s + self.times.reload_s
        self.reloaded_s[key] = self.reload_free_s
        self._span("h2d", work, start_s, self.reload_free_s)

    def _hold(self, chunks: float, now_s: float) -> None:
        """Holds ``chunks`` more from ``now_s`` on; negative frees."""
        self.held_chunks += chunks
        self.memory.append((now_s, self.held_chunks))

    def _span(self, lane: str, work: Work, start_s: float, end_s: float) -> None:
        self.spans.append(WorkSpan(lane=lane, work=work, start_s=start_s, end_s=end_s))


LANES = ("compute", "d2h", "h2d")
_COPIES = {"d2h": "offload", "h2d": "reload"}
MICROSECONDS = 1e6


def replay_plan(
    shape: ModelShape,
    config: ParallelConfig,
    plan: OffloadPlan,
    *,
    seq: int,
    num_batches: int,
    hardware: HardwareProfile,
    model: CostModel,
) -> StepReplay:
    """Replays a step of ``num_batches`` micro-batches with the offloaded share of ``plan``.

    Seconds of a chunk on each lane are those of the search's cost model. Raises InputError:
    interleaving does not divide the micro-batches.
    """
    pipeline = PipelineShape(
        num_ranks=config.pp,
        num_chunks=shape.num_layers // (config.pp * config.layers_per_chunk),
        num_batches=num_batches,
    )
    work = describe_workload(shape, seq, 1)
    layer = layer_seconds(work, columns_of([config]), hardware, model)
    layers, copied_bytes = config.layers_per_chunk, plan.alpha * chunk_bytes(shape, seq, config)
    times = ChunkTimes(
        forward_s=layers * float(layer.forward[0]) + model.chunk_overhead_s,
        backward_s=layers * float((layer.backward + layer.repeated)[0]) + model.chunk_overhead_s,
        copy_out_s=copied_bytes / (hardware.d2h_bytes_per_s * model.host_efficiency),
        reload_s=copied_bytes / (hardware.h2d_bytes_per_s * model.host_efficiency),
    )
    return replay_step(pipeline, plan.alpha, times)


def pipeline_trace(
    replay: StepReplay, shape: ModelShape, config: ParallelConfig, seq: int
) -> dict[str, Any]:
    """Returns the trace as a JSON object; memory in bytes, on top of rank 0's parameters."""
    constant_bytes, one_chunk_bytes = static_bytes(shape, config), chunk_bytes(shape, seq, config)
    events: list[dict[str, Any]] = []
    for pid, rank in enumerate(replay.ranks):
        events.append(_name("process_name", pid, 0, f"rank {pid}"))
        events += [_name("thread_name", pid, tid, lane) for tid, lane in enumerate(LANES)]
        events += [
            {
                "ph": "X",
                "pid": pid,
                "tid": LANES.index(span.lane),
                "ts": span.start_s * MICROSECONDS,
                "dur": (span.end_s - span.start_s) * MICROSECONDS,
                "name": _COPIES.get(span.lane, span.work.direction.value),
                "args": {"chunk": span.work.chunk, "micro_batch": span.work.micro_batch},
            }
            for span in rank.spans
        ]
        events += [
            {
                "ph": "C",
                "pid": pid,
                "ts": now_s * MICROSECONDS,
                "name": "memory_bytes",
                "args": {"bytes": constant_bytes + one_chunk_bytes * num_chunks},
            }
            for now_s, num_chunks in rank.memory
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}
