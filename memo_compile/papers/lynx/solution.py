"""What the programs return: decisions, cost, and, without an answer, what stands in the way."""

from dataclasses import dataclass

from memo_compile.papers.lynx.fields import Number
from memo_compile.planners.solver import SolveStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An operator, or the given fraction of its tokens, recomputed in one window."""

    op: int
    fraction: float = 1.0

    def __post_init__(self) -> None:
        assert 0 < self.fraction <= 1, f"operator {self.op}: fraction {self.fraction}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """The smallest constraint that cannot be met: ``floor`` is the least that it needs."""

    constraint: str
    message: str
    floor: Number
    budget: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class HeuSolution:
    """What one layer keeps, and which operators it recomputes in which phase."""

    status: SolveStatus
    keep: tuple[bool, ...] = ()
    windows: tuple[tuple[Part, ...], ...] = ()
    """Phases 1..5; the fifth is on the critical path."""
    critical_time: Number = 0
    """The objective: time recomputed on demand, per layer and micro-batch."""
    recompute_time: Number = 0
    """Time recomputed in all five phases."""
    peak: Number = 0
    conflict: Conflict | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptSolution:
    """A schedule over phases; row t of each matrix is the phase that first computes operator t."""

    status: SolveStatus
    resident: tuple[tuple[int, ...], ...] = ()
    """S: outputs resident when the phase starts."""
    critical: tuple[tuple[float, ...], ...] = ()
    """Rc: operators (or their fractions) computed before the phase's own, which is always 1."""
    overlapped: tuple[tuple[float, ...], ...] = ()
    """Ro: operators (or their fractions) recomputed behind the phase's own communication."""
    critical_time: Number = 0
    """The objective: time of everything on the critical path, first computations included."""
    peak: Number = 0
    conflict: Conflict | None = None

    @property
    def windows(self) -> tuple[tuple[Part, ...], ...]:
        """For each phase what its communication hides."""
        return tuple(
            tuple(Part(op=i, fraction=x) for i, x in enumerate(row) if x > 0)
            for row in self.overlapped
        )
