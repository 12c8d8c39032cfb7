"""Keeps the user's modes from seeing what memo does to run a step.

A mode (``TorchDispatchMode``, ``TorchFunctionMode``: operator loggers, FLOP counters, selective
checkpointing, a default device) is given each operator that is called while it is active. The code
that Inductor compiles shows dispatch modes the kernels of libraries that it calls, and neither how
it allocates nor its own kernels; function modes see nothing. memo does the same: regions, which are
compiled code, are shown to dispatch modes; frames, handles, copies and counters are not. Modes that
are made to stay active around compiled code (selective checkpointing, which saves results of
operators and gives them back in place of running one) see no region either: a kernel that writes
into a planned buffer must run, and its result is overwritten later.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import (  # torch 2.11 to 2.13
    _disable_current_modes,
    _pop_mode,
    _push_mode,
)


class _Hidden(threading.local):
    modes: tuple[Any, ...] = ()
    """Dispatch modes that are off now and see regions, the outermost first."""


_hidden = _Hidden()


def is_any_mode_active() -> bool:
    """True where a mode of this thread would see a call of an operator."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._ops._len_torch_dispatch_stack_pre_dispatch()
    )


def shows_to_modes() -> bool:
    """True inside ``hidden_from_modes`` where the user's dispatch modes see compiled code."""
    return bool(_hidden.modes)


@contextlib.contextmanager
def hidden_from_modes() -> Iterator[None]:
    """Inside, no mode of the user sees what is called, but for what is ``shown_to_modes``."""
    if not is_any_mode_active():
        yield
        return
    before = _hidden.modes
    with _disable_current_modes() as active, torch._C.DisableTorchFunction():
        shown = (mode for mode in reversed(active) if not mode.ignore_compile_internals())
        _hidden.modes = tuple(shown)
        try:
            yield
        finally:
            _hidden.modes = before


@contextlib.contextmanager
def shown_to_modes() -> Iterator[None]:
    """Inside ``hidden_from_modes``: compiled code runs, which the user's dispatch modes see."""
    shown = _hidden.modes
    for mode in shown:
        _push_mode(mode)  # entering it anew would run the user's __enter__
    try:
        yield
    finally:
        for _ in shown:
            _pop_mode()
