"""Begins to pin host memory while a step is lowered, which takes longer, and before it is planned.

What a plan will copy is not known then, but how much cannot stay on the device is: what is saved
and does not fit beside parameters, gradients and optimizer state, within the budget or else within
the device's memory. So many bytes are pinned in the background; all that is saved where the policy
is ``full-offload``. ``HostPool.acquire`` gives that memory to the plan: it returns what is too much
and pins what is missing.
"""

import contextlib
from collections.abc import Iterator

from memo_runtime.arena import arena_of
from memo_runtime.host_store import PREPARED

from memo_compile.analysis.views import bytes_of
from memo_compile.config import MemoConfig, local_world_size
from memo_compile.costs.host import default_host_budget_bytes, host_memory
from memo_compile.driver.stages import CutStep


@contextlib.contextmanager
def pinned_early(step: CutStep, config: MemoConfig) -> Iterator[None]:
    """Pins host memory beside the block, in which ``step`` is lowered, planned and bound."""
    size_bytes = _leaving_bytes(step, config)
    if size_bytes == 0:
        yield
        return
    pool = arena_of(step.facts.device).host
    pool.prepare(size_bytes)
    try:
        yield
    finally:
        pool.forget(PREPARED)


def _leaving_bytes(step: CutStep, config: MemoConfig) -> int:
    """Returns the saved bytes that cannot stay on the device, as far as the host has room."""
    kind, facts = config.host_kind(step.facts.device.type), step.facts
    if kind != "pinned" or not config.moves or facts.gpu is not None:
        return 0
    budget_bytes = config.budget_bytes(facts.device_bytes())
    if budget_bytes is None:
        budget_bytes = facts.bytes_left()
    if budget_bytes is None:
        return 0
    nodes = step.forward.nodes
    saved_bytes = sum(bytes_of(nodes[name]) for name in step.forward.leased if name in nodes)
    held_bytes = facts.constant_bytes(config.optimizer_state_bytes_per_parameter)
    memory = host_memory()
    bounds = (
        default_host_budget_bytes(memory, local_world_size()),
        config.declared_host_budget_bytes(memory.total_bytes),
    )
    if config.policy == "full-offload":
        held_bytes = budget_bytes
    leaving_bytes = min(saved_bytes, held_bytes + saved_bytes - budget_bytes)
    return max(0, min(leaving_bytes, *(bound for bound in bounds if bound is not None)))
