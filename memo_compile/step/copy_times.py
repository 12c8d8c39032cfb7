"""When copies, and collectives, begin and end beside the computation, in simulated time."""

from dataclasses import dataclass


@dataclass(slots=True)
class CopyLane:
    """Copies of one direction, or collectives: first in, first out."""

    free_s: float = 0.0
    """When the last one has ended."""

    def copy(self, issued_s: float, seconds: float) -> tuple[float, float]:
        """Adds a copy that is issued at ``issued_s``; returns when it begins and ends."""
        begin = max(issued_s, self.free_s)
        self.free_s = begin + seconds
        return begin, self.free_s
