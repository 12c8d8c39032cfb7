"""A whole training step, update included, in several ways: ``python -m benchmarks.whole_step``.

A stack of equal layers on few rows, so that the training state is most of what a step needs, and
torch's fused AdamW. Each way in a process of its own; their steps take turns.

* plain: everything on the device
* state, gradients: ``memo_compile.offload``, with the update on the device and on the host
* hooks: as torchao's CPUOffloadOptimizer is built, of public calls: host copies of parameters, each
  with an optimizer of its own; hooks that copy gradients to the host; new weights copied back
* fsdp: FSDP2's CPUOffloadPolicy on one rank, each layer a unit, which Inductor compiles. On a CPU
  that policy moves nothing: its shards lie where the update wants them

All but the last run through memo. It passes when memo with gradients on the host takes no more of
the device than ``hooks`` and ``fsdp``, and no longer.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness
from memo_compile.units import format_bytes

MODULE = "benchmarks.whole_step"
SIZES = {"layers": 16, "hidden": 512, "rows": 512}
WAYS = ("plain", "state", "gradients", "hooks", "fsdp")
PEERS = ("hooks", "fsdp")
NUM_STEPS = 7
WARM_UP = 3
MAX_RATIO = 1.02


def main() -> int:
    """Run every way, print the table, write the results, judge."""
    options = harness.parser(__doc__, sizes=SIZES).parse_args()
    return harness.run_benchmark("whole_step", options, measure, run_child)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All ways, and the verdict."""
    shared = harness.passed_on(options, *SIZES)
    arms = [harness.Arm(name=way, arguments=(f"--child={way}", *shared)) for way in WAYS]
    results = harness.run_in_turns(MODULE, arms)
    ours = results["gradients"]
    rows = [
        [
            way,
            format_bytes(result["device_bytes"]),
            format_bytes(result["host_bytes"]),
            f"{result['step_s']:.3f} s",
            f"{ours['step_s'] / result['step_s']:.2f}",
        ]
        for way, result in results.items()
    ]
    names = ("way", "device", "host", "step", "step with gradients on the host / this")
    harness.print_table("whole steps", names, rows)
    failures = [
        f"{key} is {ours[key] / results[peer][key]:.3f} of {peer}'s"
        for peer in PEERS
        for key in ("device_bytes", "step_s")
        if ours[key] > MAX_RATIO * results[peer][key]
    ]
    settings = {name: getattr(options, name) for name in SIZES}
    return {"settings": settings, "arms": results, "failures": failures}


def stack(num_layers: int, hidden: int) -> Any:
    """Equal residual layers; returns the loss."""
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(hidden)
            self.up = nn.Linear(hidden, 2 * hidden)
            self.down = nn.Linear(2 * hidden, hidden)

        def forward(self, x: Any) -> Any:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x.pow(2).mean()

    torch.manual_seed(0)
    return Stack()


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """One way: the median of its steps, and the physical peak of some more."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = stack(options.layers, options.hidden), torch.randn(options.rows, options.hidden)
    parameters_bytes = sum(parameter.nbytes for parameter in model.parameters())
    run, step, host_bytes = _PREPARED.get(options.child, offloaded)(model, options.child)
    seconds = []
    for number in range(WARM_UP + NUM_STEPS):
        harness.wait_turn()
        start = time.perf_counter()
        loss = run(x)
        loss.backward()
        step()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    held = parameters_bytes * {"plain": 3, "fsdp": 0}.get(options.child, 1)
    with harness.physical_peak("cpu", held) as peak:
        for _ in range(2):
            run(x).backward()
            step()
    return {
        "loss": loss.item(),
        "step_s": statistics.median(seconds),
        "rounds": seconds,
        "device_bytes": peak.peak_bytes,
        "host_bytes": host_bytes(),
    }


Prepared = tuple[Callable[[Any], Any], Callable[[], None], Callable[[], int]]
"""The model, ``step()`` with ``zero_grad()``, and bytes on the host."""


def adamw(parameters: Any) -> Any:
    """The optimizer of all ways."""
    import torch

    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def offloaded(model: Any, way: str) -> Prepared:
    """``plain``, ``state`` or ``gradients``."""
    import torch

    import memo_compile

    optimizer = adamw(model.parameters())
    if way != "plain":
        update = "host" if way == "gradients" else "device"
        optimizer = memo_compile.offload(optimizer, update=update)

    def host_bytes() -> int:
        state = memo_compile.report().training_state
        assert state is not None, "a step has run"
        return state.gradients.host_bytes + state.optimizer_state.host_bytes

    return torch.compile(model, backend="memo"), stepping(optimizer), host_bytes


def hooked(model: Any, _way: str) -> Prepared:
    """As torchao's CPUOffloadOptimizer."""
    import torch

    parameters = list(model.parameters())
    copies = [parameter.detach().clone().share_memory_() for parameter in parameters]
    gradients = [torch.zeros_like(copy).share_memory_() for copy in copies]
    optimizers = [adamw([copy.requires_grad_()]) for copy in copies]
    for parameter, copy, gradient in zip(parameters, copies, gradients, strict=True):

        def accumulated(own: Any, copy: Any = copy, gradient: Any = gradient) -> None:
            copy.grad = gradient.copy_(own.grad)
            own.grad = None

        parameter.register_post_accumulate_grad_hook(accumulated)

    def step() -> None:
        for parameter, copy, optimizer in zip(parameters, copies, optimizers, strict=True):
            optimizer.step()
            share(optimizer.state[copy])
            with torch.no_grad():
                parameter.copy_(copy)

    host_bytes = 4 * sum(copy.nbytes for copy in copies)  # weight, gradient, two of state
    return torch.compile(model, backend="memo"), step, lambda: host_bytes


def sharded(model: Any, _way: str) -> Prepared:
    """FSDP2's CPUOffloadPolicy; its shards are all of the model, on the host."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    file = Path(tempfile.mkdtemp()) / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    mesh = dist.init_device_mesh("cpu", (1,))
    policy = CPUOffloadPolicy(pin_memory=False)
    for layer in model.layers:
        layer.compile()
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = adamw(model.parameters())

    def host_bytes() -> int:
        local = [parameter.to_local() for parameter in model.parameters()]
        return 4 * sum(shard.nbytes for shard in local)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().share_memory_()
    return model, stepping(optimizer), host_bytes


def share(state: dict[str, Any]) -> None:
    """Moves state to shared memory, where the host's is; once there it stays."""
    for value in state.values():
        if value.dim() and not value.is_shared():
            value.share_memory_()


def stepping(optimizer: Any) -> Callable[[], None]:
    """Updates, and lets gradients go."""

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


_PREPARED: dict[str, Callable[[Any, str], Prepared]] = {"hooks": hooked, "fsdp": sharded}


if __name__ == "__main__":
    raise SystemExit(main())
