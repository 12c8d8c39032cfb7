"""Seconds of an optimizer whose state is on the host: they come on top of a step's.

Nothing of them runs beside forward and backward: gradients are copied between two parts of the
backward, and ``optimizer.step()`` begins when it has ended.
"""

from dataclasses import dataclass

from memo_compile.step.movable import StepCosts
from memo_compile.step.problem import FixedBytes

HOST_BYTES_PER_S = 100e9
"""What an update on the host reads and writes, declared: a fused kernel of torch on the cores of
one socket, whose memory it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSeconds:
    """What the update of an optimizer with state on the host adds to forward and backward."""

    gradients_s: float = 0.0
    """Copies of gradients to the host, as they are made."""
    step_s: float = 0.0
    """``optimizer.step()``."""

    @property
    def sum_s(self) -> float:
        """All of it."""
        return self.gradients_s + self.step_s


def update_seconds(fixed: FixedBytes, costs: StepCosts) -> UpdateSeconds:
    """Returns what the update adds to a step; 0 where the optimizer's state is on the device.

    With gradients on the host it runs there, as fast as the host's memory; copies run beside it.
    """
    state, gradients = fixed.state_on_host, fixed.gradients_on_host
    if not gradients:  # it runs on the device: state comes there, and goes back
        return UpdateSeconds(step_s=max(costs.d2h_s(state), costs.h2d_s(state)) if state else 0.0)
    weights = gradients  # as many bytes
    host_s = (2 * state + gradients + 2 * weights) / HOST_BYTES_PER_S  # 2: read and written
    copied = max(0, weights - fixed.parameters_on_host)  # to the host, and back when updated
    copies_s = max(costs.d2h_s(copied), costs.h2d_s(copied)) if copied else 0.0
    return UpdateSeconds(gradients_s=costs.d2h_s(gradients), step_s=max(host_s, copies_s))
