"""Copies hide behind computation: ``python -m benchmarks.overlap``.

A Llama of equal layers on the CPU engine, policy full-offload: all that its layers save goes to
the host and comes back. Copies are throttled so that a layer's copy to the host takes 0.8 x its
forward, and its copy back 0.8 x its backward. Three steps run in turn in one process: without
copies (policy save), with copies, and with copies while overlap is switched off.

It passes when the step with overlap takes at most 1.1 x the step without copies, and the one
without overlap over 1.5 x.
"""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks import harness, side_by_side
from memo_compile.units import format_bytes

MODULE = "benchmarks.overlap"
COPY_PART = 0.8
"""A layer's copy over the layer's own time in the same half of the step."""
MAX_OVERLAPPED = 1.1
MIN_SERIAL = 1.5
MIN_LAYER_S = 0.05
UNTHROTTLED = "unthrottled"
ARMS = ("save", "overlapped", "serial")


def main() -> int:
    """Run the three steps in a child, print the ratios, write the results, judge."""
    options = side_by_side.arguments(__doc__, layers=12)
    return harness.run_benchmark("overlap", options, measure, run_child)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The three steps, in a child, and the verdict."""
    result = side_by_side.in_child(MODULE, options)
    show(result)
    note = side_by_side.busy_note(result["steps"])
    return {**result, "failures": judge(result), "note": note}


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """The three steps, side by side in this process."""
    model, ids = side_by_side.llama(
        layers=options.layers, hidden=options.hidden, tokens=options.tokens, vocab=1024
    )

    def compiled(name: str, **more: Any) -> side_by_side.CompiledStep:
        return side_by_side.compiled_step(name, model, ids, more)

    save = compiled("save", policy="save")
    free = compiled(UNTHROTTLED, policy="full-offload")
    first = side_by_side.timed_in_turn([save], num_samples=5, time_limit_s=options.time_limit / 6)
    layer = layer_costs(free.plan, options.layers, first["save"].median_s)
    speeds = copy_speeds(layer, COPY_PART)
    throttled = {"policy": "full-offload", "copy_bytes_per_s": speeds}
    overlapped = compiled("overlapped", **throttled)
    serial = compiled("serial", **throttled, debug="copies-serial")
    timed = side_by_side.timed_in_turn(
        [save, overlapped, serial],
        num_samples=options.samples,
        time_limit_s=options.time_limit,
    )
    return {
        "settings": {key: getattr(options, key) for key in ("layers", "hidden", "tokens")},
        "layer": layer,
        "copy_bytes_per_s": speeds,
        "offloaded_bytes": overlapped.plan.offloaded_bytes,
        "simulated_s": overlapped.plan.timeline.step_s,
        "stall_s": {step.name: step.plan.stall_s for step in (overlapped, serial)},
        "steps": {name: samples.as_dict() for name, samples in timed.items()},
    }


def layer_costs(plan: Any, num_layers: int, step_s: float) -> dict[str, float]:
    """Seconds of a layer's forward and backward, and the bytes that it offloads.

    The seconds are those of the plan's regions, scaled so that all of them take ``step_s``: the
    machine may have been busier when regions were measured.
    """
    spans = [span for span in plan.timeline.spans if span.lane == "compute"]
    scale = step_s / sum(span.end_s - span.start_s for span in spans)
    found: dict[str, float] = {"bytes": plan.offloaded_bytes / num_layers}
    for half in ("fwd", "bwd"):
        layers = [span for span in spans if span.name.startswith(f"layer0_{half}")]
        if len(layers) != num_layers:
            raise RuntimeError(f"expected {num_layers} calls of layer0_{half}, got {len(layers)}")
        seconds = sum(span.end_s - span.start_s for span in layers)
        found[f"{half}_s"] = scale * seconds / num_layers
    return found


def copy_speeds(layer: Mapping[str, float], part: float) -> tuple[float, float]:
    """Bytes per second at which a layer's copy takes ``part`` of its forward, or backward."""
    return layer["bytes"] / (part * layer["fwd_s"]), layer["bytes"] / (part * layer["bwd_s"])


def judge(result: dict[str, Any]) -> list[str]:
    """The promises that do not hold, as sentences."""
    failures = []
    if result["layer"]["fwd_s"] < MIN_LAYER_S:
        failures.append(f"a layer takes {result['layer']['fwd_s']:.3f} s; make the model larger")
    if not result["offloaded_bytes"]:
        failures.append("nothing was offloaded")
    if ratio(result, "overlapped") > MAX_OVERLAPPED:
        failures.append(
            f"with copies {ratio(result, 'overlapped'):.3f} x, at most {MAX_OVERLAPPED}"
        )
    if ratio(result, "serial") <= MIN_SERIAL:
        failures.append(f"without overlap {ratio(result, 'serial'):.3f} x, over {MIN_SERIAL}")
    return failures


def ratio(result: dict[str, Any], name: str) -> float:
    """The median step ``name`` over the one without copies."""
    steps = result["steps"]
    return float(steps[name]["median_s"] / steps["save"]["median_s"])


def show(result: dict[str, Any]) -> None:
    """The layer, and the table of steps."""
    layer, speeds = result["layer"], result["copy_bytes_per_s"]
    print(
        f"a layer: forward {layer['fwd_s']:.3f} s, backward {layer['bwd_s']:.3f} s, offloads "
        f"{format_bytes(int(layer['bytes']))}; copies at {format_bytes(int(speeds[0]))}/s, back "
        f"at {format_bytes(int(speeds[1]))}/s"
    )
    rows = []
    for name in ARMS:
        step = result["steps"][name]
        rows.append(
            (
                name,
                f"{step['median_s']:.3f} s",
                f"{ratio(result, name):.3f}",
                f"{result['stall_s'].get(name, 0.0):.3f} s",
                f"{step['num_quiet']} / {len(step['seconds'])}",
            )
        )
    columns = ("step", "median", "/ save", "stall", "quiet samples")
    harness.print_table("copies of 0.8 x a layer's time, each way", columns, rows)


if __name__ == "__main__":
    sys.exit(main())
