"""``memo alpha``, ``memo pareto`` and ``memo offload-fraction``: closed forms for one step."""

import json
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memo_compile.cli.tables import format_table
from memo_compile.errors import InputError
from memo_compile.units import format_bytes, parse_size

if TYPE_CHECKING:
    from memo_compile.planners.pipeline.offload import OffloadPlan, ParallelConfig


class Policy(Enum):
    """What a layer keeps for its backward."""

    NONE = "none"
    BALANCED = "balanced"
    FULL = "full"


def register(app: typer.Typer) -> None:
    """Attach the commands of this module to ``app``."""
    app.command(name="alpha")(alpha)
    app.command(name="pareto")(pareto)
    app.command(name="offload-fraction")(offload_fraction)


MAX_COUNT = 10**15
"""Larger counts are slips of the pen, and their products would leave the floats."""


def parse_count(text: str | int) -> int:
    """A whole number, also written 32e3.

    Raises:
        typer.BadParameter: it is none, or beyond ``MAX_COUNT``.
    """
    try:
        value = float(text)
        if value == int(value) and abs(value) <= MAX_COUNT:
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise typer.BadParameter(
        f"expected a whole number such as 4096 or 32e3, at most {MAX_COUNT:.0e}, got {text!r}"
    )


Count = Annotated[int, typer.Option(parser=parse_count, metavar="N")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Model = Annotated[str, typer.Option(help="Named shape, e.g. llama-175b.")]
Hardware = Annotated[str, typer.Option(help="Named device, e.g. h800.")]


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
    from memo_compile.planners.alpha import compute_alpha

    found = compute_alpha(
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
        "alpha_bandwidth": found.bandwidth_bound,
        "alpha_host": found.host_bound,
        "alpha": found.value,
        "alpha_quantised": found.quantised,
        "fits_host": found.fits_host,
    }
    if as_json:
        print(json.dumps(body))
    else:
        print(format_table(("quantity", "value"), [(k, _short(v)) for k, v in body.items()]))
    if not found.fits_host:
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
    from memo_compile.hardware import find_hardware
    from memo_compile.models import find_model
    from memo_compile.planners.balanced import layer_frontier
    from memo_compile.planners.layer_costs import Efficiency

    efficiency = Efficiency(gemm=gemm_efficiency, hbm=hbm_efficiency)
    points = layer_frontier(find_model(model), seq, find_hardware(hardware), efficiency)
    if as_json:
        rows = [
            {
                "bytes_per_token_hidden": point.bytes_per_token_hidden,
                "extra_time_fraction": point.extra_time_fraction,
                "recomputed": list(point.recomputed),
            }
            for point in points
        ]
        print(json.dumps({"points": rows}))
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
    model: Model,
    gpus: Count,
    seq: Count,
    tp: Count,
    cp: Count,
    pp: Count,
    layers_per_chunk: Count,
    checkpoint: Annotated[Policy, typer.Option(help="What a layer keeps.")],
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
    from memo_compile.hardware import find_hardware
    from memo_compile.models import find_model
    from memo_compile.planners.pipeline.offload import Checkpoint, divide_gpus, plan_offload

    shape, total = find_model(model), find_hardware(hardware).memory_bytes
    budget_bytes = parse_size(budget, total_bytes=total, what="budget")
    if budget_bytes == 0:
        raise InputError("budget: expected more than 0 bytes")
    config = divide_gpus(
        shape,
        gpus=gpus,
        tp=tp,
        cp=cp,
        pp=pp,
        layers_per_chunk=layers_per_chunk,
        checkpoint=Checkpoint(checkpoint.value),
    )
    plan = plan_offload(shape, seq=seq, config=config, budget_bytes=budget_bytes)
    if trace is not None:
        from memo_compile.planners.pipeline.trace import chrome_trace, replay_plan
        from memo_compile.planners.search.cost import CostModel

        replay = replay_plan(
            shape,
            config,
            plan,
            seq=seq,
            num_batches=3 * pp if micro_batches is None else micro_batches,
            hardware=find_hardware(hardware),
            model=CostModel(),
        )
        _write(trace, json.dumps(chrome_trace(replay, shape, config, seq)))
    if as_json:
        body = {
            "alpha": plan.alpha,
            "peak_bytes": round(plan.peak_bytes),
            "chunks_in_flight": plan.chunks_in_flight,
            "resident_chunks": plan.resident_chunks,
            "fits": plan.fits,
        }
        print(json.dumps(body))
    else:
        rows = [
            ("alpha", f"{plan.alpha:.3f}"),
            ("peak", format_bytes(plan.peak_bytes)),
            ("budget", format_bytes(budget_bytes)),
            ("chunks in flight", str(plan.chunks_in_flight)),
            ("resident chunks", f"{plan.resident_chunks:.3f}"),
            ("fits", "yes" if plan.fits else "no"),
        ]
        print(format_table(("quantity", "value"), rows))
    if not plan.fits:
        print(f"memo: does not fit: {_shortfall(plan, config, budget_bytes)}", file=sys.stderr)
        raise typer.Exit(1)


def _shortfall(plan: "OffloadPlan", config: "ParallelConfig", budget_bytes: int) -> str:
    """What exceeds the budget, and what to change."""
    peak, budget = format_bytes(plan.peak_bytes), format_bytes(budget_bytes)
    least = f"{plan.resident_chunks:g} chunks that must stay resident"
    if plan.resident_chunks == plan.chunks_in_flight:
        least = f"{least}, as offloading saves nothing with {config.pp} stages"
    return (
        f"budget {budget} < {peak} (weights, optimizer state and {least}); raise the budget, "
        "shorten the sequence, or use a stronger checkpoint policy or more GPUs"
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"trace: cannot write {path}: {error.strerror or error}") from error


def _short(value: float | bool | None) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else f"{value:.4f}"
