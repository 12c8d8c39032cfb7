"""Runs a script and records what its memo-compiled training steps compute: for ``memo verify``.

    main([ARM, OUT.json, NUM_STEPS, SCRIPT.py, ARGS...])

ARM is ``memo``; ``eager`` or ``eager-again``, which replace the backend by eager execution of the
very same graphs; or ``inductor``, which replaces it by torch's own. A step is a backward
after at least one compiled forward; the script is ended after NUM_STEPS of them.
"""

import contextlib
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from memo_runtime.arena import arena_of
from torch import fx

from memo_compile.backends import entry
from memo_compile.costs.measure import MemoryWatch, watch_memory
from memo_compile.offline.script import EnoughError, run_script
from memo_compile.reporting.state import report
from memo_compile.torch_private import dynamo, inductor_api

WARM_STEPS = 2
"""Steps before the peak is followed: the first compiles and makes gradients and moments."""

SEED = 0


class Recorder:
    """Collects losses, gradients and the physical peak of the steps of this process."""

    def __init__(self, num_steps: int, *, measures: bool) -> None:
        self.num_steps, self.measures = num_steps, measures
        self.steps: list[dict[str, Any]] = []
        self.peak_bytes = 0
        self._parameters: dict[int, torch.Tensor] = {}
        self._pending = False
        self._watching: contextlib.ExitStack | None = None
        self._watch: MemoryWatch | None = None
        self._held_bytes = 0

    def wrap(self, run: Callable[..., Any], examples: Sequence[Any]) -> Callable[..., Any]:
        """Returns ``run`` so that its first call with gradients begins a step."""
        for example in examples:
            if isinstance(example, torch.nn.Parameter) and example.requires_grad:
                self._parameters.setdefault(id(example), example)

        def call(*args: Any) -> Any:
            if torch.is_grad_enabled() and not self._pending:
                self._begin(args)
            return run(*args)

        return call

    def _begin(self, args: Sequence[Any]) -> None:
        self._pending = True
        if not self.measures or len(self.steps) < WARM_STEPS:
            return
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        tensors += [p.grad for p in self._parameters.values() if p.grad is not None]
        unique = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._held_bytes = sum(tensor.nbytes for tensor in unique.values())
        self._watching = contextlib.ExitStack()
        device = next(iter(self._parameters.values())).device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            arena_of(device).release_pages()
            self._watch = self._watching.enter_context(watch_memory())

    def step_ended(self, roots: Sequence[torch.Tensor]) -> None:
        """Records the step whose backward began at ``roots``. Raises EnoughError after the last."""
        if not self._pending:
            return
        self._pending = False
        self._end_watch()
        parameters = self._parameters.values()
        self.steps.append(
            {
                "losses": [float(root.detach()) for root in roots if root.numel() == 1],
                "gradients": [None if p.grad is None else _digest(p.grad) for p in parameters],
                "half": any(p.dtype.itemsize < 4 for p in parameters),
            }
        )
        if len(self.steps) >= self.num_steps:
            raise EnoughError

    def _end_watch(self) -> None:
        """Notes the step's peak; on a CPU its inputs, growth, and optimizer state as planned."""
        if self._watching is None:
            return
        self._watching.close()
        self._watching = None
        device = next(iter(self._parameters.values())).device
        if device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(device)
        else:
            assert self._watch is not None, "on CPU memory is followed by a watch"
            planned = report().plans
            state_bytes = planned[-1].fixed.optimizer_state if planned else 0
            peak_bytes = self._held_bytes + self._watch.growth_bytes + state_bytes
        self.peak_bytes = max(self.peak_bytes, peak_bytes)

    def as_dict(self) -> dict[str, Any]:
        """The record as plain data, with what memo reports."""
        memo = report()
        return {
            "steps": self.steps,
            "active": memo.active,
            "unplanned_steps": memo.unplanned_steps,
            "notes": list(memo.notes),
            "measured_peak_bytes": self.peak_bytes or None,
            "planned_peak_bytes": max((plan.peak_bytes for plan in memo.plans), default=None),
            "check": [str(plan.check) for plan in memo.plans if not plan.check.ok],
        }


def _digest(gradient: torch.Tensor) -> tuple[float, float]:
    """Norm, and sum with alternating signs, in float64: enough to tell two gradients apart."""
    flat = gradient.detach().flatten()
    norm = math.sqrt(float(flat.square().sum(dtype=torch.float64)))
    signed = flat[::2].sum(dtype=torch.float64) - flat[1::2].sum(dtype=torch.float64)
    return norm, float(signed)


def install(recorder: Recorder, arm: str) -> None:
    """Replaces backend ``memo`` by one that ``recorder`` watches and that runs as ``arm`` says."""
    compiled = entry.memo

    def memo(gm: fx.GraphModule, examples: Sequence[Any], **settings: Any) -> Callable[..., Any]:
        if arm == "memo":
            run = compiled(gm, examples, **settings)
        elif arm == "inductor":
            run = inductor_api.compile_fx(gm, examples)
        else:
            run = gm.forward
        return recorder.wrap(run, examples)

    setattr(entry, "memo", memo)  # noqa: B010 - a function is replaced on purpose
    dynamo.register_backend("memo", memo)
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        original(tensors, *args, **kwargs)
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        recorder.step_ended(roots)

    torch.autograd.backward = backward


def main(argv: list[str]) -> int:
    """Run the script of ``argv`` and write what was recorded; the exit code is the script's."""
    arm, out, num_steps, script, *rest = argv
    recorder = Recorder(int(num_steps), measures=arm == "memo")
    install(recorder, arm)
    random.seed(SEED)
    torch.manual_seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    # Eager's random numbers, where Inductor would draw its own: dropout is then the same.
    with inductor_api.inductor_patch({"fallback_random": True}):
        code = run_script(Path(script), rest, passes=(EnoughError,))
    Path(out).write_text(json.dumps(recorder.as_dict()))
    sys.stdout.flush()
    return code
