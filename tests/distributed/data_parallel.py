"""DistributedDataParallel around a model under memo, beside the model alone in one process.

Each rank trains on its half of a batch, the eager model on the whole of it. What happens is kept as
events in order: a layer's backward, a parameter's hook, a bucket on its way.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memo_compile
from memo_compile.reporting import state

HIDDEN, LAYERS, ROWS = 32, 3, 12
BUCKET_MB = 0.008
"""A little less than a layer's gradients."""

events: list[str] = []


@torch.library.custom_op("memo_tests::seen", mutates_args=())
def seen(x: torch.Tensor) -> torch.Tensor:
    """A copy of ``x``; its backward is an event."""
    return x.clone()


@seen.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("memo_tests::seen_backward", mutates_args=())
def seen_backward(gradient: torch.Tensor) -> torch.Tensor:
    """A copy of ``gradient``, and an event."""
    events.append("layer")
    return gradient.clone()


@seen_backward.register_fake
def _(gradient: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gradient)


seen.register_autograd(lambda ctx, gradient: seen_backward(gradient))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(seen(x)))))


class Stack(nn.Module):
    """Residual layers, of which one may be unused; returns the loss."""

    def __init__(self, *, has_unused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.unused = nn.Linear(HIDDEN, HIDDEN) if has_unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


Train = Callable[[nn.Module, Callable[[int], torch.Tensor]], None]
"""Steps of a model on the batches of its steps."""


def plainly(model: nn.Module, batch: Callable[[int], torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).backward()
        optimizer.step()


def accumulating(model: nn.Module, batch: Callable[[int], torch.Tensor]) -> None:
    """Two micro-batches without a reduction, a third with one; twice."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        with getattr(model, "no_sync", contextlib.nullcontext)():
            model(batch(3 * step)).backward()
            model(batch(3 * step + 1)).backward()
        model(batch(3 * step + 2)).backward()
        optimizer.step()


def scaled(model: nn.Module, batch: Callable[[int], torch.Tensor]) -> None:
    """GradScaler, and the norm of all gradients clipped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(batch(step))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()


def failing(model: nn.Module, batch: Callable[[int], torch.Tensor]) -> None:
    """A step whose backward fails half way, between two that do not.

    Nothing is reduced in the one that fails: DistributedDataParallel itself does not recover then.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = dict(model.named_parameters())
    name = next(name for name in parameters if name.endswith("layers.1.up.weight"))

    def fail(_: torch.Tensor) -> None:
        raise ValueError("half way")

    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            hook = parameters[name].register_post_accumulate_grad_hook(fail)
            with getattr(model, "no_sync", contextlib.nullcontext)():
                try:
                    model(batch(step)).backward()
                except ValueError:
                    events.append("failed")
            hook.remove()
            optimizer.zero_grad()
        model(batch(step)).backward()
        optimizer.step()


TRAININGS: dict[str, Train] = {
    "plainly": plainly,
    "accumulating": accumulating,
    "scaled": scaled,
    "failing": failing,
}


def main(*, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each setting's training gives, one after the other in the same processes."""
    return [trained(**setting) for setting in settings]


def trained(
    *,
    train: str,
    arguments: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    optimize_ddp: bool | str = False,
    inside: bool = False,
) -> dict[str, Any]:
    """``train`` under memo and in eager; ``inside``: what is compiled is inside of the wrapper."""
    torch._dynamo.reset()
    state.reset()
    torch.manual_seed(0)
    ours = Stack(has_unused=bool(arguments and arguments.get("find_unused_parameters")))
    eager = copy.deepcopy(ours)
    for name, parameter in ours.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    chosen = {"lowering": "aten", "strict": True, "costs": "roofline", **(options or {})}
    rank = dist.get_rank()
    first_bucket = mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", int(BUCKET_MB * 2**20))
    with first_bucket, torch._dynamo.config.patch(optimize_ddp=optimize_ddp):
        if inside:
            ours.compile(backend="memo", options=chosen)
        parallel = DistributedDataParallel(ours, bucket_cap_mb=BUCKET_MB, **(arguments or {}))
        parallel.register_comm_hook(None, _reduced)
        events.clear()
        model = parallel if inside else torch.compile(parallel, backend="memo", options=chosen)
        with _eagerly_named(model, parallel):
            TRAININGS[train](model, lambda step: _batch(step)[rank::2])
    ours_events = list(events)
    TRAININGS[train](eager, _batch)
    report = memo_compile.report()
    return {
        "errors": dict(_errors(ours, eager)),
        "events": ours_events,
        "active": report.active,
        "unplanned_steps": report.unplanned_steps,
        "num_plans": len(report.plans),
        "sum_of_peaks": sum(plan.peak_bytes for plan in report.plans),
        "groups": [
            {
                "num_instances": group.num_instances,
                "peak_bytes": group.peak_bytes,
                "budget_bytes": group.budget_bytes,
            }
            for group in report.groups
        ],
        "notes": list(report.notes),
    }


@contextlib.contextmanager
def _eagerly_named(model: nn.Module, parallel: DistributedDataParallel) -> Iterator[None]:
    """``model`` has the ``no_sync`` of what it wraps."""
    if model is not parallel:
        object.__setattr__(model, "no_sync", parallel.no_sync)
    yield


def _batch(step: int) -> torch.Tensor:
    return torch.randn(2 * ROWS, HIDDEN, generator=torch.Generator().manual_seed(step))


def _reduced(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean over the ranks, as without a hook, and an event."""
    events.append(f"bucket {bucket.index()}")
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _errors(ours: nn.Module, eager: nn.Module) -> Iterator[tuple[str, float]]:
    """The largest difference of each parameter and of its gradient, relative to the largest."""
    for (name, mine), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
        if theirs.grad is None:
            yield name, 0.0 if mine.grad is None or not mine.grad.any() else float("inf")
            continue
        assert mine.grad is not None, name
        for got, wanted in ((mine.grad, theirs.grad), (mine.detach(), theirs.detach())):
            yield name, float((got - wanted).abs().max() / wanted.abs().max())
