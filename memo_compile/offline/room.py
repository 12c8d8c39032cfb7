"""The bytes of a budget that a plan may take, where several arenas or an estimate's error count."""

from dataclasses import dataclass, replace

from memo_compile.config import MemoConfig
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.gpus import GPUS, target_of
from memo_compile.lowering.cublas import libraries_bytes
from memo_compile.step.plans import Plan

LARGEST = GPUS["b200"]
"""Stands for a GPU that is not known: the libraries take more memory on it than on others."""

ESTIMATE_PERCENT = 1
"""Percent of the arena added where a GPU's step is estimated from the CPU's lowering: Triton splits
long reductions in two, with partial sums of 1/128 of the tensor; all other differences are
smaller."""


def is_exact(hardware: HardwareProfile) -> bool:
    """True where a plan for ``hardware`` equals the backend's, lowered for that very device."""
    return hardware.name == "cpu" or target_of(hardware.name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A budget, and what counts under it beside a plan's own peak."""

    budget_bytes: int
    num_frames: int = 1
    """Arenas that exist at once, one for each micro-batch in flight."""
    missed_bytes: int = 0
    """Bytes that libraries take on a GPU, which an estimate does not count."""
    missed_percent: int = 0
    """Percent of the arenas that an estimate may miss."""

    @classmethod
    def on(cls, hardware: HardwareProfile, budget_bytes: int, num_frames: int = 1) -> "Room":
        """Returns the room for plans on ``hardware``, where they are estimates less their error."""
        if is_exact(hardware):  # a plan is the one that runs there: it misses nothing
            return cls(budget_bytes=budget_bytes, num_frames=num_frames)
        gpu = GPUS.get(hardware.name, LARGEST)
        return cls(
            budget_bytes=budget_bytes,
            num_frames=num_frames,
            missed_bytes=libraries_bytes(gpu.major, gpu.l2_bytes),
            missed_percent=ESTIMATE_PERCENT,
        )

    @property
    def available_bytes(self) -> int:
        """Returns the bytes of the budget that a plan with its frames may take."""
        return max(0, self.budget_bytes - self.missed_bytes)

    @property
    def arena_percent(self) -> int:
        """Returns how much a plan's arena counts, in percent: 200 for two exact frames."""
        return self.num_frames * (100 + self.missed_percent)

    def configured(self, config: MemoConfig) -> MemoConfig:
        """Returns ``config`` with this budget, and with how much of it an arena takes."""
        config = replace(config, memory_budget=self.available_bytes)
        return config.trying(arena_percent=self.arena_percent)

    def plan_bytes(self, beside_bytes: int) -> int:
        """Returns the peak that a plan may have if ``beside_bytes`` lie beside its arena."""
        return self.configured(MemoConfig()).plan_bytes(self.available_bytes, beside_bytes)

    def counted_bytes(self, peak_bytes: int, beside_bytes: int) -> int:
        """Returns the bytes that a plan with this peak takes of ``available_bytes``.

        ``beside_bytes`` of its peak lie beside the arena and count once. Peak 10, 2 beside, arenas
        of 200 %: 18.
        """
        arena_bytes = max(0, peak_bytes - beside_bytes)
        further_arenas_bytes = -(-arena_bytes * (self.arena_percent - 100) // 100)  # rounded up
        return peak_bytes + further_arenas_bytes

    def taken_bytes(self, plan: Plan) -> int:
        """Returns the bytes that ``plan`` takes of ``available_bytes``."""
        return self.counted_bytes(plan.peak_bytes, plan.peak_bytes - plan.arena_bytes)
