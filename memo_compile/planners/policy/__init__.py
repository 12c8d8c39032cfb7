"""What is kept, offloaded and recomputed: the policies, and the choice under a bound in bytes."""

from memo_compile.planners.policy.frontier import Choice, choose
from memo_compile.planners.policy.reasons import reasons

__all__ = ["Choice", "choose", "reasons"]
