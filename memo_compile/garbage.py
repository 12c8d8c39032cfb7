"""Makes Python collect reference cycles less often while memo traces and compiles.

Graphs refer to their nodes and these to them, so each graph that was done with is found that way
only. To find it Python goes through all objects that are not new any more, a second for a traced
model of eight layers, about once for ten graphs. Where that comes seldom, a graph goes while it is
new.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

ENOUGH = 100_000
"""So many new objects of a trace take 100 MiB."""

_lock = threading.Lock()
_wished_counts: list[int] = []
"""``num_objects`` of each block that is running: threads may be inside, and leave in any order."""
_program_thresholds: list[int] = []
"""The thresholds of the program itself, which hold again when the last block has ended."""


@contextlib.contextmanager
def seldom_collected(num_objects: int = ENOUGH) -> Iterator[None]:
    """Inside, Python collects cycles once ``num_objects`` are new, or less often if set so."""
    with _lock:
        if not _wished_counts:
            _program_thresholds[:] = gc.get_threshold()
        _wished_counts.append(num_objects)
        _set_thresholds()
    try:
        yield
    finally:
        with _lock:
            _wished_counts.remove(num_objects)
            _set_thresholds()


def _set_thresholds() -> None:
    """Applies the largest wish of the running blocks, or the program's threshold if larger."""
    new_objects, *older_generations = _program_thresholds
    # 0 means that the program has switched the collector off.
    most = max([new_objects, *_wished_counts]) if new_objects else 0
    gc.set_threshold(most, *older_generations)
