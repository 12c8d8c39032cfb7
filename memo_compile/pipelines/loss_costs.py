"""Measures a loss that runs outside of the compiled stages: its seconds and its memory."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from memo_compile.analysis.views import bytes_of, results_of, storage_of
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.roofline import graph_seconds
from memo_compile.torch_private import fx_graphs

REPEATS = 3
"""Timed runs, after one to warm up; the median counts."""

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCosts:
    """One microbatch's loss, run operator by operator as torch's schedules do."""

    seconds: float
    """Forward and backward."""
    forward_bytes: int
    """Peak of the forward, without its inputs."""
    saved_bytes: int
    """Kept from the forward for the backward."""
    backward_bytes: int
    """Peak of the backward, without its inputs and its input's gradient."""


def loss_costs(
    loss: Loss, output: torch.Tensor, target: Any, hardware: HardwareProfile | None
) -> LossCosts:
    """Seconds and bytes of ``loss(output, target)`` and its backward.

    Seconds are measured here; with ``hardware`` they are computed, and the tensors may be fakes.
    """

    def run(output: torch.Tensor, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = output.detach().requires_grad_()
        with torch.enable_grad():
            value = loss(leaf, target)
            (gradient,) = torch.autograd.grad(value, leaf)
        return value, gradient

    with fx_graphs.real_tensors(), fx_graphs.fake_mode():
        graph = make_fx(run)(*tree_map(_like, (output, target)))
    if hardware is None:
        seconds = _measured_s(lambda: run(output, target), output.device)
    else:
        seconds = graph_seconds(graph, hardware)
    forward, saved, backward = _memory(graph.graph)
    return LossCosts(
        seconds=seconds, forward_bytes=forward, saved_bytes=saved, backward_bytes=backward
    )


def _like(value: Any) -> Any:
    """A new tensor of the shape, dtype and device of ``value``; what is no tensor as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _measured_s(run: Callable[[], Any], device: torch.device) -> float:
    """The median seconds of ``run``, after one run to warm up."""

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    return statistics.median(once() for _ in range(REPEATS))


def _memory(graph: fx.Graph) -> tuple[int, int, int]:
    """The bytes of LossCosts: forward, saved, backward.

    ``graph`` returns the loss, which ends the forward, and the gradient, which the stage counts.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    value, gradient = results_of(graph)
    border = nodes.index(value) if value in nodes else len(nodes) - 1
    alive = _alive_bytes(nodes, kept=storage_of(gradient))
    forward, backward = max(alive[: border + 1], default=0), max(alive[border + 1 :], default=0)
    saved = sum(
        bytes_of(root)
        for root, last in _last_reads(nodes).items()
        if nodes.index(root) <= border < last
    )
    return forward, saved, max(0, backward - bytes_of(storage_of(gradient)))


def _alive_bytes(nodes: Sequence[fx.Node], kept: fx.Node) -> list[int]:
    """For each node the bytes of results that live while it runs; ``kept`` lives to the end."""
    last_read = _last_reads(nodes)
    last_read[kept] = len(nodes) - 1
    alive, level = [], 0
    for at, node in enumerate(nodes):
        level += bytes_of(node) if storage_of(node) is node else 0
        alive.append(level)
        level -= sum(bytes_of(root) for root, end in last_read.items() if end == at)
    return alive


def _last_reads(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Node whose result is new memory -> index of the last node that reads it or a view of it."""
    last_read = {node: at for at, node in enumerate(nodes) if storage_of(node) is node}
    for at, node in enumerate(nodes):
        for source in node.all_input_nodes:
            root = storage_of(source)
            if root in last_read:
                last_read[root] = at
    return last_read
