"""Tiles in which ``memo plan`` found no fast plan before, for the same question.

They are tried again wherever a question leads to the same budget: what does not fit is answered
with the plan of the smallest budget that does, whatever was asked for.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from memo_compile.errors import InputError, TooSlow
from memo_compile.file_store import FileStore
from memo_compile.step.serialise import plain, restore

log = logging.getLogger("memo")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowTry:
    """What a ``TooSlow`` says."""

    message: str
    step_s: float
    is_bound: bool

    def error(self) -> TooSlow:
        """The same error."""
        return TooSlow(self.message, step_s=self.step_s, is_bound=self.is_bound)


def tried(store: FileStore, key: Mapping[str, Any], attempt: Callable[[], T]) -> T:
    """What ``attempt`` makes; not asked again where it was too slow. Raises TooSlow.

    ``key`` stands for all that the attempt depends on.
    """
    if (known := _known(store, key)) is not None:
        raise known.error()
    try:
        return attempt()
    except TooSlow as error:
        slow = SlowTry(message=str(error), step_s=error.step_s, is_bound=error.is_bound)
        store.write(key, plain(slow))
        raise


def _known(store: FileStore, key: Mapping[str, Any]) -> SlowTry | None:
    for body in store.read(key):
        try:
            found: SlowTry = restore(body, SlowTry, "slow try")
            return found
        except InputError as error:
            log.warning("memo: a remembered try is not used: %s", error)
    return None
