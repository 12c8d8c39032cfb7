"""What the user's own code takes and leaves between the halves of a step that is watched (CPU).

The process's memory is read when a half has ended and when the next one begins. What was taken
between two halves may be freed between two others: so a level is followed, and not what each leaves
by itself. Free heap is given back before memory is read, else what a half frees would stay, or hide
what is taken behind it.
"""

import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from memo_runtime.heap import anonymous_bytes
from memo_runtime.pages import resident_bytes, trim_heap

from memo_compile.step.interludes import IGNORED_BYTES, MEASURED_BYTES
from memo_compile.step.problem import Interlude

SAMPLE_S = 0.0001
"""Between two looks at the process's memory; a block's work takes some milliseconds."""

SAMPLES_OF_ALL = 200
"""What has taken longer is looked at so many times in all, so that looking costs it nothing."""

MAX_SAMPLE_S = 0.05

MAX_READS = 20
"""Of the process's memory, until what does not count has stayed the same meanwhile."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class MemorySampler:
    """The most anonymous memory of the process since ``begin``, as far as it was looked at."""

    apart: tuple[torch.UntypedStorage, ...] = ()
    """These do not count: when their pages come into memory says nothing."""
    most_bytes: int = 0
    _stop: threading.Event | None = None

    def begin(self) -> int:
        """Looks from now on; returns the bytes that are there now."""
        self.end()
        self.most_bytes = now = self.read()
        stop = self._stop = threading.Event()
        threading.Thread(target=_look, args=(weakref.ref(self), stop), daemon=True).start()
        return now

    def end(self) -> int:
        """Stops looking; returns the most bytes that were seen."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None
            self.most_bytes = max(self.most_bytes, self.read())
        return self.most_bytes

    def read(self) -> int:
        """Returns the bytes that are there now."""
        before = self._apart_bytes()
        for _ in range(MAX_READS):  # another rank may be sending into them
            now, after = anonymous_bytes(), self._apart_bytes()
            if before == after:
                break
            before = after
        return now - after

    def _apart_bytes(self) -> int:
        return sum(resident_bytes(part.data_ptr(), part.nbytes()) for part in self.apart)


def _look(sampler: "weakref.ref[MemorySampler]", stop: threading.Event) -> None:
    """Samples memory until ``stop`` is set, or ``sampler`` is gone."""
    began = time.monotonic()
    pause = SAMPLE_S
    while not stop.wait(pause):
        target = sampler()
        if target is None:
            return
        target.most_bytes = max(target.most_bytes, target.read())
        del target
        pause = pause_s(time.monotonic() - began)


def pause_s(elapsed_s: float) -> float:
    """Returns how long to wait before the next look, ``elapsed_s`` after the first."""
    return min(max(SAMPLE_S, elapsed_s / SAMPLES_OF_ALL), MAX_SAMPLE_S)


class TakenBetween(NamedTuple):
    """Memory between two halves, above what was there when the first had ended."""

    most_bytes: int
    left_bytes: int
    """When the second began; below 0 where more was freed than taken."""


@dataclass(slots=True, eq=False)
class Between:
    """What was measured between the halves of a step so far."""

    sampler: MemorySampler = field(default_factory=MemorySampler)
    taken: dict[int, TakenBetween] = field(default_factory=dict)
    """By the index of the half that followed."""
    _after: int | None = None
    """Bytes that were there when the last half had ended; None: the next one has begun."""
    _num_frames: int = 0
    _freed_bytes: int = 0
    """The arguments of ``begin``."""

    def begin(self, num_frames: int, freed_bytes: int) -> None:
        """Looks at memory from now on: a half has ended.

        It freed ``freed_bytes`` of what the user's code had taken; ``num_frames`` live steps have
        memory of their own.
        """
        trim_heap()
        self._num_frames, self._freed_bytes = num_frames, freed_bytes
        self._after = self.sampler.begin()

    @property
    def is_open(self) -> bool:
        """True between two halves."""
        return self._after is not None

    def end(self, half: int, freed_bytes: int, num_frames: int, gathered_bytes: int = 0) -> None:
        """Notes what was taken before ``half``, which begins now.

        Of what halves had made ``freed_bytes`` are gone since ``begin``, and ``gathered_bytes`` of
        parameters have come, which the plan counts all the time. Where a live step's frame went as
        well nobody knows how much of it was in memory: then no less is there than before.
        """
        after_bytes, self._after = self._after, None
        if after_bytes is None:
            return
        most_bytes = self.sampler.end() - max(0, gathered_bytes)
        trim_heap()
        left_bytes = self.sampler.read() - after_bytes + freed_bytes - gathered_bytes
        if num_frames != self._num_frames:  # a frame went as well
            left_bytes = max(0, left_bytes)
        self.taken[half] = TakenBetween(
            max(0, most_bytes - after_bytes), left_bytes - self._freed_bytes
        )

    def stop(self) -> None:
        """Nothing more is looked at."""
        self.sampler.end()
        self._after = None

    def interludes(self, made: Mapping[int, int], given: Mapping[int, int]) -> Iterator[Interlude]:
        """Yields what was measured, in whole units, and gradients that were made.

        ``made``: half -> bytes of gradients of other modules that are there from then on.
        ``given``: half -> bytes that are there when it begins and that the plan counts in it.
        """
        held = gradients = counted = 0  # so far: measured; gradients in it; of the rest, yielded
        for half in sorted({*self.taken, *made}):
            held_before, stays = held - gradients, 0
            gradients += made.get(half, 0)
            most = 0
            if half in self.taken:
                measured = self.taken[half]
                most = _in_units(held_before + measured.most_bytes - counted)
                held = max(0, held + measured.left_bytes)
                stays = _in_units(held - gradients - given.get(half, 0)) - counted
                counted += stays
            left = made.get(half, 0) + stays
            most = max(most, left)
            if most or left:
                yield Interlude(half=half, most_bytes=most, left_bytes=left)


def _in_units(num_bytes: int) -> int:
    """Returns what is counted of ``num_bytes`` that were measured."""
    whole = -(-num_bytes // MEASURED_BYTES) * MEASURED_BYTES
    return whole if num_bytes >= IGNORED_BYTES else 0
