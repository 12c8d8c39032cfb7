"""What must be known of an optimizer to run it on a part of its parameters: tried on a small one.

Example: AdamW makes two tensors of the parameter's shape, and a parameter that is updated in two
halves comes out as one that is updated whole. Muon's does not: it must be updated whole.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memo_compile.errors import ConfigError

SHAPE = (8, 16)
"""Shape of the parameter that is tried: a matrix, since Muon takes nothing else."""

NUM_STEPS = 3
"""Steps that are tried: what the first one makes, the others read."""

TRIED_LR = 0.1
"""Learning rate of those steps."""

Group = dict[str, Any]
"""A parameter group, as torch.optim has them."""

States = Mapping[torch.Tensor, dict[str, Any]]
"""Optimizer state by parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTraits:
    """How an optimizer keeps state of a parameter of one dtype under one group's options."""

    itemsizes: Mapping[str, int]
    """State tensor of the parameter's shape -> bytes of one element."""
    has_sums: bool
    """It keeps sums over rows and columns too, as Adafactor does."""
    is_elementwise: bool
    """A part of a parameter can be updated by itself, with the same result to the last bit."""

    @property
    def bytes_per_element(self) -> int:
        """Bytes of state for one number of the parameter, sums aside."""
        return sum(self.itemsizes.values())


def traits_of(
    optimizer: torch.optim.Optimizer, group: Group, dtype: torch.dtype, device: torch.device
) -> StateTraits:
    """Tries the optimizer on a small parameter of ``dtype`` with the options of ``group``.

    Raises ConfigError: it cannot be run by parts, such as LBFGS, which needs a closure.
    """
    if not type(optimizer).step.__module__.startswith("torch.optim."):
        raise ConfigError(
            f"offload: expected an optimizer of torch.optim, got {type(optimizer).__name__}, whose "
            "step() is its own; leave it as it is"
        )
    try:
        whole, states = _tried(optimizer, group, _numbers(dtype, device))
    except Exception as error:
        raise ConfigError(
            f"offload: {type(optimizer).__name__} cannot be updated in parts "
            f"({str(error).splitlines()[0]}); leave it as it is"
        ) from error
    state = next(iter(states.values()), {})
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return StateTraits(
        itemsizes={
            name: value.element_size() for name, value in tensors.items() if value.shape == SHAPE
        },
        has_sums=any(1 < value.numel() < whole.numel() for value in tensors.values()),
        is_elementwise=_comes_out_alike(optimizer, group, whole, dtype),
    )


def run_update(optimizer: torch.optim.Optimizer, groups: Sequence[Group], states: States) -> None:
    """Runs the optimizer's update on these groups and their states in place of its own.

    Hooks of ``optimizer.step`` are not called. New state is added to ``states``.
    """
    update = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
    groups_before, states_before = optimizer.param_groups, optimizer.state
    optimizer.param_groups, optimizer.state = list(groups), states  # type: ignore[assignment]
    try:
        update(optimizer)
    finally:
        optimizer.param_groups, optimizer.state = groups_before, states_before


def _comes_out_alike(
    optimizer: torch.optim.Optimizer, group: Group, whole: torch.Tensor, dtype: torch.dtype
) -> bool:
    """Whether two halves, as vectors, are updated to what the whole parameter is."""
    halves = _numbers(dtype, whole.device).view(2, -1).unbind()
    try:
        parts = [_tried(optimizer, group, half)[0] for half in halves]
    except Exception:
        return False
    return torch.equal(torch.cat(parts), whole.view(-1))


def _numbers(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    numel = SHAPE[0] * SHAPE[1]
    return torch.linspace(-1.0, 2.0, numel, device=device).to(dtype).view(SHAPE)


def _tried(
    optimizer: torch.optim.Optimizer, group: Group, start: torch.Tensor
) -> tuple[torch.Tensor, States]:
    """A parameter that begins as ``start`` after a few steps, and its state."""
    parameter = start.clone().requires_grad_()
    states: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
    tried = {**group, "params": [parameter]}
    if "lr" in tried:  # a schedule may begin at 0, where every update comes out alike
        lr = tried["lr"]
        tried["lr"] = torch.full_like(lr, TRIED_LR) if isinstance(lr, torch.Tensor) else TRIED_LR
    for number in range(NUM_STEPS):
        parameter.grad = (start * (0.3 - 0.2 * number)).sin()
        run_update(optimizer, [tried], states)
    return parameter.detach(), states
