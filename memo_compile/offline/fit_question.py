"""What ``memo fit`` is asked: which sizes of a step are searched, for which device and memory."""

from dataclasses import dataclass
from enum import Enum

from memo_compile.costs.hardware import HardwareProfile
from memo_compile.errors import require_at_least
from memo_compile.units import parse_budget, parse_size


class Vary(Enum):
    """Which size of a step's inputs is varied."""

    SEQUENCE = "sequence"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class FitQuestion:
    """Which sizes of a script's step are searched, and for which device."""

    vary: tuple[Vary, ...] = (Vary.SEQUENCE, Vary.BATCH)
    hardware: HardwareProfile | None = None
    """Another device than the one that the script's tensors lie on."""
    memory: str | None = None
    """Bound on the step's device memory; by default the script's budget, or all of the device."""
    host_budget: str | None = None
    multiple_of: int | None = None
    """Sizes are multiples of this."""
    dims: str | None = None
    """Which dimensions vary, where the shapes do not say it: ``input_ids:1,labels:1``."""

    def __post_init__(self) -> None:
        """Refuses what cannot be answered, before the script runs."""
        if self.multiple_of is not None:
            require_at_least(1, {"multiple-of": self.multiple_of})
        total = ANY_DEVICE_BYTES if self.hardware is None else self.hardware.memory_bytes
        if self.memory is not None:
            parse_budget(self.memory, total_bytes=total, what="memory")
        if self.host_budget is not None:
            parse_size(self.host_budget, total_bytes=ANY_DEVICE_BYTES, what="host-budget")


ANY_DEVICE_BYTES = 2**40
"""Stands for the memory of a device that is not known yet, where ``80%`` is only checked."""
