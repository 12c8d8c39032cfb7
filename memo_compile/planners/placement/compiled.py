"""The canonical search and greedy's loop through numba, where numba is installed."""

import functools
import importlib.util
import inspect
import sys
import types
from pathlib import Path
from typing import Any

from memo_compile.planners.placement import greedy_kernel, kernel


def has_numba() -> bool:
    """True when numba can be imported; does not import it."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def compiled_search() -> Any:
    """``kernel.search`` for numpy arrays, compiled on its first call and cached on disk."""
    return _compiled(kernel)["search"]


@functools.cache
def compiled_greedy() -> Any:
    """``greedy_kernel.place_each`` likewise."""
    return _compiled(greedy_kernel)["place_each"]


def numba_is_loaded() -> bool:
    """True where numba has been paid for, so that greedy compiled costs next to nothing."""
    return any(each.cache_info().currsize > 0 for each in (compiled_greedy, compiled_search))


def _compiled(module: types.ModuleType) -> dict[str, Any]:
    """What stands in ``module``, its functions through numba."""
    import numba

    space: dict[str, Any] = dict(vars(module))
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ != module.__name__:
            continue
        # The clone sees the compiled helpers; the plain functions stay usable beside it.
        clone = types.FunctionType(function.__code__, space, name, function.__defaults__)
        clone.__module__ = module.__name__
        try:
            space[name] = numba.njit(cache=True)(clone)
        except RuntimeError:  # numba finds no folder that it may write its cache to
            space[name] = numba.njit(clone)
    return space


def warm_up(tables: kernel.Tables, state: kernel.State) -> None:
    """The compiled search is ready for arguments of these types; says so when it takes seconds."""
    if compiled_search().signatures:
        return
    source = Path(kernel.__file__)
    compiled_files = (source.parent / "__pycache__").glob("kernel.search-*.nbi")
    if not any(path.stat().st_mtime >= source.stat().st_mtime for path in compiled_files):
        print("memo: compiling the placement search, once (about 5 s)", file=sys.stderr)
    compiled_search()(tables, state, 0, 0, 0, 0, False)
