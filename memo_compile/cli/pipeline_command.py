"""``memo alpha``, ``memo pareto`` and ``memo offload-fraction``: closed forms for one step."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from memo_compile.cli.options import AsJson, Count, Hardware, Model, format_table
from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import find_model
from memo_compile.papers.kwai.balanced import layer_frontier
from memo_compile.papers.kwai.offload import (
    Checkpoint,
    OffloadPlan,
    ParallelConfig,
    divide_gpus,
    plan_offload,
)
from memo_compile.papers.kwai.pipeline_replay import pipeline_trace, replay_plan
from memo_compile.papers.layer_costs import Efficiency
from memo_compile.papers.memo.alpha import compute_alpha
from memo_compile.papers.search.cost import CostModel
from memo_compile.text_files import write_text
from memo_compile.units import format_bytes, parse_budget


def alpha(
    hidden: Count,
    layers: Count,
    seq: Count,
    bandwidth: Annotated[float, typer.Option(help="Device to host, bytes/s per GPU.")],
    host_bytes: Annotated[float, typer.Option(help="Host memory per GPU, bytes.")],
    flops: Annotated[float, typer.Option(help="Achieved FLOP/s per GPU.")],
    tp: Count = 1,
    cp: Count = 1,
    pp: Count = 1,
    as_json: AsJson = False,
) -> None:
    """MEMO's alpha: the share of other activations whose offloading hides and fits the host."""
    result = compute_alpha(
        hidden=hidden,
        num_layers=layers,
        seq=seq,
        tp=tp,
        cp=cp,
        pp=pp,
        bandwidth_bytes_per_s=bandwidth,
        host_bytes=host_bytes,
        flops_per_s=flops,
    )
    body = {
        "alpha_bandwidth": result.bandwidth_bound,
        "alpha_host": result.host_bound,
        "alpha": result.value,
        "alpha_quantised": result.quantised,
        "fits_host": result.fits_host,
    }
    rows = [(name, _short(value)) for name, value in body.items()]
    print(json.dumps(body) if as_json else format_table(("quantity", "value"), rows))
    if not result.fits_host:
        print(
            f"memo: does not fit: host-bytes {host_bytes:g} cannot hold the layer inputs and "
            "attention outputs, which are always offloaded; use more host memory, a shorter "
            "sequence or more GPUs",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def pareto(
    model: Model,
    seq: Count,
    gemm_efficiency: Annotated[float, typer.Option(help="Share of peak FLOP/s.")],
    hbm_efficiency: Annotated[float, typer.Option(help="Share of memory bandwidth.")],
    hardware: Hardware = "h800",
    as_json: AsJson = False,
) -> None:
    """The frontier of bytes kept against time recomputed, for one layer."""
    efficiency = Efficiency(gemm=gemm_efficiency, hbm=hbm_efficiency)
    points = layer_frontier(find_model(model), seq, find_hardware(hardware), efficiency)
    if as_json:
        print(json.dumps({"points": [dataclasses.asdict(point) for point in points]}))
        return
    table = [
        (
            f"{point.bytes_per_token_hidden:.3f}",
            f"{point.extra_time_fraction:.2%}",
            ", ".join(point.recomputed) or "-",
        )
        for point in points
    ]
    print(format_table(("bytes/(token h)", "extra time", "recomputed"), table))


def offload_fraction(
    *,
    model: Model,
    gpus: Count,
    seq: Count,
    tp: Count,
    cp: Count,
    pp: Count,
    layers_per_chunk: Count,
    checkpoint: Annotated[Checkpoint, typer.Option(help="What a layer keeps.")],
    budget: Annotated[str, typer.Option(help="Device memory of a step, e.g. 65000MiB or 80%.")],
    hardware: Hardware = "h800",
    trace: Annotated[
        Path | None, typer.Option(help="Replay a step and write a trace for Perfetto.")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Micro-batches of the traced step; default 3 x pp.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The smallest share of every chunk that must be offloaded so that rank 0 fits the budget."""
    shape, device = find_model(model), find_hardware(hardware)
    budget_bytes = parse_budget(budget, total_bytes=device.memory_bytes)
    config = divide_gpus(
        shape,
        gpus=gpus,
        tp=tp,
        cp=cp,
        pp=pp,
        layers_per_chunk=layers_per_chunk,
        checkpoint=checkpoint,
    )
    plan = plan_offload(shape, seq=seq, config=config, budget_bytes=budget_bytes)
    if trace is not None:
        replay = replay_plan(
            shape,
            config,
            plan,
            seq=seq,
            num_batches=3 * pp if micro_batches is None else micro_batches,
            hardware=device,
            model=CostModel(),
        )
        write_text(trace, json.dumps(pipeline_trace(replay, shape, config, seq)))
    body = dataclasses.asdict(plan) | {"peak_bytes": round(plan.peak_bytes)}
    rows = [
        ("alpha", f"{plan.alpha:.3f}"),
        ("peak", format_bytes(plan.peak_bytes)),
        ("budget", format_bytes(budget_bytes)),
        ("chunks in flight", str(plan.chunks_in_flight)),
        ("resident chunks", f"{plan.resident_chunks:.3f}"),
        ("fits", "yes" if plan.fits else "no"),
    ]
    print(json.dumps(body) if as_json else format_table(("quantity", "value"), rows))
    if not plan.fits:
        print(f"memo: does not fit: {_shortfall(plan, config, budget_bytes)}", file=sys.stderr)
        raise typer.Exit(1)


def _shortfall(plan: OffloadPlan, config: ParallelConfig, budget_bytes: int) -> str:
    """Says what exceeds the budget, and what to change."""
    peak, budget = format_bytes(plan.peak_bytes), format_bytes(budget_bytes)
    least = f"{plan.resident_chunks:g} chunks that must stay resident"
    if plan.resident_chunks == plan.chunks_in_flight:
        least = f"{least}, as offloading saves nothing with {config.pp} stages"
    return (
        f"budget {budget} < {peak} (weights, optimizer state and {least}); raise the budget, "
        "shorten the sequence, or use a stronger checkpoint policy or more GPUs"
    )


def _short(value: float | bool | None) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else f"{value:.4f}"
