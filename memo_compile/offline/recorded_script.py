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
        """By id."""
        self._is_in_step = False
        """A forward has begun, and no backward has ended."""
        self._watch_stack: contextlib.ExitStack | None = None
        """Ends the watch; None: the peak of this step is not measured."""
        self._watch: MemoryWatch | None = None
        self._input_bytes = 0
        """Bytes of the step's inputs and gradients as it begins."""

    def wrap(self, run: Callable[..., Any], examples: Sequence[Any]) -> Callable[..., Any]:
        """Returns ``run`` so that its first call with gradients begins a step."""
        for example in examples:
            if isinstance(example, torch.nn.Parameter) and example.requires_grad:
                self._parameters.setdefault(id(example), example)

        def call(*args: Any) -> Any:
            if torch.is_grad_enabled() and not self._is_in_step:
                self._begin(args)
            return run(*args)

        return call

    def _begin(self, args: Sequence[Any]) -> None:
        """Begins a step, which is called with ``args``, and after WARM_STEPS to follow its peak."""
        self._is_in_step = True
        if not self.measures or len(self.steps) < WARM_STEPS:
            return
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        tensors += [p.grad for p in self._parameters.values() if p.grad is not None]
        unique = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._input_bytes = sum(tensor.nbytes for tensor in unique.values())
        self._watch_stack = contextlib.ExitStack()
        device = next(iter(self._parameters.values())).device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            arena_of(device).release_pages()  # so that the arena counts as growth
            self._watch = self._watch_stack.enter_context(watch_memory())

    def step_ended(self, roots: Sequence[torch.Tensor]) -> None:
        """Records the step whose backward began at ``roots``. Raises EnoughError after the last."""
        if not self._is_in_step:
            return
        self._is_in_step = False
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
        """Notes the step's peak.

        On a CPU it is the sum of inputs, the process's growth, and the optimizer's state as
        planned, which is there before the step and is none of its inputs.
        """
        if self._watch_stack is None:
            return
        self._watch_stack.close()
        self._watch_stack = None
        device = next(iter(self._parameters.values())).device
        if device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(device)
        else:
            assert self._watch is not None, "on CPU memory is followed by a watch"
            plans = report().plans
            state_bytes = plans[-1].fixed.optimizer_state if plans else 0
            peak_bytes = self._input_bytes + self._watch.growth_bytes + state_bytes
        self.peak_bytes = max(self.peak_bytes, peak_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Returns the record as plain data, with what memo reports."""
        reported = report()
        return {
            "steps": self.steps,
            "active": reported.active,
            "unplanned_steps": reported.unplanned_steps,
            "notes": list(reported.notes),
            "measured_peak_bytes": self.peak_bytes or None,
            "planned_peak_bytes": max((plan.peak_bytes for plan in reported.plans), default=None),
            "check": [str(plan.check) for plan in reported.plans if not plan.check.ok],
        }


def _digest(gradient: torch.Tensor) -> tuple[float, float]:
    """Returns the norm, and the sum with alternating signs: they tell two gradients apart."""
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
    """Runs the script of ``argv`` and writes what was recorded; returns the script's exit code."""
    arm, out, num_steps, script, *arguments = argv
    recorder = Recorder(int(num_steps), measures=arm == "memo")
    install(recorder, arm)
    random.seed(SEED)
    torch.manual_seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    # Eager's random numbers, where Inductor would draw its own: dropout is then the same.
    with inductor_api.inductor_patch({"fallback_random": True}):
        code = run_script(Path(script), arguments, passes=(EnoughError,))
    Path(out).write_text(json.dumps(recorder.as_dict()))
    sys.stdout.flush()
    return code
