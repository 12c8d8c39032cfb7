"""The replayed step as a Chrome trace: for each rank a process, its lanes, and its memory."""

from typing import Any

from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.models import ModelShape
from memo_compile.papers.kwai.offload import OffloadPlan, ParallelConfig, chunk_bytes, static_bytes
from memo_compile.papers.kwai.pipeline_replay import ChunkTimes, StepReplay, replay_step
from memo_compile.papers.kwai.schedule import PipelineShape
from memo_compile.papers.search.cost import CostModel, describe_workload, layer_seconds
from memo_compile.papers.search.space import columns_of

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
    """Replay a step of ``num_batches`` micro-batches with the offloaded share of ``plan``.

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
    layers, copied = config.layers_per_chunk, plan.alpha * chunk_bytes(shape, seq, config)
    times = ChunkTimes(
        forward_s=layers * float(layer.forward[0]) + model.chunk_overhead_s,
        backward_s=layers * float((layer.backward + layer.repeated)[0]) + model.chunk_overhead_s,
        copy_out_s=copied / (hardware.d2h_bytes_per_s * model.host_efficiency),
        reload_s=copied / (hardware.h2d_bytes_per_s * model.host_efficiency),
    )
    return replay_step(pipeline, plan.alpha, times)


def pipeline_trace(
    replay: StepReplay, shape: ModelShape, config: ParallelConfig, seq: int
) -> dict[str, Any]:
    """The trace as a JSON object; memory in bytes, on top of rank 0's parameters."""
    static, chunk = static_bytes(shape, config), chunk_bytes(shape, seq, config)
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
                "args": {"bytes": static + chunk * chunks},
            }
            for now_s, chunks in rank.memory
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}
