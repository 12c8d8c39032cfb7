"""How often Python looks for garbage that refers to itself, while memo traces and compiles.

Graphs refer to their nodes and these to them, so each graph that was done with is found that way
only. To find it Python goes through all objects that are not new any more, a second for a traced
model of eight layers, about once for ten graphs. Where that comes seldom, a graph goes while it is
new.
"""

import contextlib
import gc
from collections.abc import Iterator

ENOUGH = 100_000
"""So many new objects of a trace take 100 MiB; a new length of 8 layers makes a tenth of them."""


@contextlib.contextmanager
def seldom_collected(num_objects: int = ENOUGH) -> Iterator[None]:
    """Inside, cycles are looked for once ``num_objects`` are new, or as seldom as before."""
    before = gc.get_threshold()
    if 0 < before[0] < num_objects:  # 0: never
        gc.set_threshold(num_objects, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
