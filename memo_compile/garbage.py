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
_asked: list[int] = []
"""What is asked for by those that are inside: threads may be at once, and leave in any order."""
_before: list[int] = []
"""The thresholds of the program itself, which the last to leave sets again."""


@contextlib.contextmanager
def seldom_collected(num_objects: int = ENOUGH) -> Iterator[None]:
    """Inside, Python collects cycles once ``num_objects`` are new, or less often if set so."""
    with _lock:
        if not _asked:
            _before[:] = gc.get_threshold()
        _asked.append(num_objects)
        _set()
    try:
        yield
    finally:
        with _lock:
            _asked.remove(num_objects)
            _set()


def _set() -> None:
    first, *others = _before
    gc.set_threshold(max([first, *_asked]) if first else 0, *others)  # 0: never
