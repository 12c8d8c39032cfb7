"""The canonical search through numba, where numba is installed."""

import functools
import importlib.util
import types
from collections.abc import Callable
from typing import Any

from memo_compile.planners.placement import kernel

_FUNCTIONS = (
    kernel.blame_item,
    kernel.blame_section,
    kernel.undo,
    kernel.retreat,
    kernel.open_frame,
    kernel.crowded,
    kernel.next_choice,
    kernel.lift,
    kernel.put,
    kernel.cut_slice,
    kernel.choose,
    kernel.search,
)
"""Callees before their callers: each is compiled against the compiled ones before it."""

_TOLD_AFTER_S = 1.0
"""A compilation that took longer is mentioned on stderr; loading from the cache takes 0.1 s."""


def has_numba() -> bool:
    """True when numba can be imported; does not import it."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def compiled_search() -> Callable[..., tuple[int, int]]:
    """``kernel.search`` for numpy arrays, compiled on its first call and cached on disk."""
    import numba

    space: dict[str, Any] = dict(vars(kernel))
    for function in _FUNCTIONS:
        # The clone sees the compiled helpers; the plain functions stay usable beside it.
        clone = types.FunctionType(
            function.__code__, space, function.__name__, function.__defaults__
        )
        clone.__module__ = kernel.__name__
        space[function.__name__] = numba.njit(cache=True)(clone)
    return space["search"]
