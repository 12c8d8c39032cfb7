"""Exact search for the hard rest: canonical search as a restarted portfolio, anytime.

One run of the kernel with one order of ranks is either lucky within a few nodes for each buffer or
stuck for minutes, so runs are short and many: a handful of static orders, then the same orders with
noise, under a node limit that grows slowly. Every so often a run without backjumps and with a large
limit is made, which can prove that a capacity is out of reach. The kernel runs through numba where
numba is installed and the problem is not small.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from memo_compile.planners.placement import kernel
from memo_compile.planners.placement.compiled import compiled_search, has_numba, warm_up
from memo_compile.planners.placement.effort import (
    COMPILED_NODE_S,
    COMPILED_S,
    PLAIN_NODE_S,
    PLAIN_S,
    Effort,
)
from memo_compile.planners.placement.instance import FREE, Instance, Ints, Overlaps, find_overlaps

_NODES_PER_BUFFER = 2
_LEAST_NODES = 3000
"""The larger of the two limits a first run's nodes. On the hard public instances most successes
need 1 to 4 nodes per buffer, of which there are hundreds; in large steps a descent is dear."""
_LIMIT_GROWTH = 1.1
"""The node limit grows by this factor from one round of all orders to the next."""
_NOISE = 0.1
"""Standard deviation of the logarithmic noise on an order's keys, from the second round on."""
_PROOF_EVERY = 8
_RARE_PROOF_EVERY = 40
"""One run of so many does not jump back, and gets `_PROOF_FACTOR` times the nodes, for a proof:
often with up to `_FEW` buffers, where a proof is in reach, else rarely."""
_FEW = 80
_PROOF_FACTOR = 4
_TINY = 40
"""Up to this many buffers plain Python answers sooner than numba loads."""
_MOST_PLAIN_PAIRS = 200_000
"""With more overlapping pairs the plain search would not end a single descent in time."""
_MOST_PAIRS = 60_000_000
"""With more overlapping pairs the tables would take gigabytes, so greedy stands alone."""
_ANY_WORK = 2**62
"""More work than any run makes."""


class Searcher:
    """Canonical search over one instance, asked again and again for other capacities."""

    def __init__(self, instance: Instance, use_numba: bool | None = None) -> None:
        """Builds the overlap table; quadratic in the number of buffers.

        ``use_numba``: compiled or plain Python; None chooses by what is installed and by size.
        """
        self._instance = instance
        self._overlaps = find_overlaps(instance)
        self._rng = np.random.default_rng(0)
        self._keys = _order_keys(instance, self._overlaps)
        is_large = instance.num_buffers > _TINY
        compiled = has_numba() and is_large if use_numba is None else use_numba
        self._kernel = compiled_search() if compiled else kernel.search
        self._convert: Callable[[Any], Any] = _as_array if compiled else _as_list
        names = "size padded align fixed first last span_start span_lower span_upper".split()
        self._static = {name: self._convert(getattr(instance, name)) for name in names}
        self._static["near_start"] = self._convert(self._overlaps.start)
        self._static["near"] = self._convert(self._overlaps.other)
        pairs = len(self._overlaps.other)
        self.is_practical = pairs <= (_MOST_PAIRS if compiled else _MOST_PLAIN_PAIRS)
        """False when a single descent would take too long or too much memory."""
        if compiled and self.is_practical:
            warm_up(self._tables(np.arange(instance.num_buffers)), self._fresh_state())
        self._unit_s, self._node_s = (
            (COMPILED_S, COMPILED_NODE_S) if compiled else (PLAIN_S, PLAIN_NODE_S)
        )
        self.nodes = 0
        """Choices tried so far, over all runs."""
        self.seconds = 0.0
        """What the kernel's work so far is taken to last."""

    def run(
        self, capacity: int, rank: Ints, max_nodes: int, jump: bool, max_s: float = math.inf
    ) -> tuple[int, Ints]:
        """One run: (FOUND | EXHAUSTED | LIMIT, offsets (N,) that hold on FOUND).

        With ``jump`` a failure goes back to the last choice that had a part in it: no proof. What
        takes about ``max_s``, as work is counted, ends.
        """
        tables, state, slack = self._tables(rank), self._fresh_state(), self._instance.max_slack
        work = int(min(max_s / self._unit_s, _ANY_WORK))
        outcome, nodes = self._kernel(tables, state, capacity, slack, max_nodes, work, jump)
        self.seconds += float(state.tally[kernel.WORK]) * self._unit_s + nodes * self._node_s
        self.nodes += nodes
        return outcome, np.array(state.offset, dtype=np.int64)

    def ranks(self) -> Iterator[Ints]:
        """The static orders, then the same orders with noise, without end; (N,) permutations."""
        noisy = False
        while True:
            for major, minor in self._keys:
                key = minor.astype(np.float64)
                if noisy:
                    key = key * np.exp(self._rng.normal(0.0, _NOISE, len(key)))
                order = np.lexsort((-self._instance.size, -key, -major))
                yield np.argsort(order)
            noisy = True

    def decide(self, capacity: int, effort: Effort, max_runs: int = 0) -> tuple[int, Ints]:
        """Searches until found, proved impossible, or all effort or ``max_runs`` are spent."""
        limit = float(max(_NODES_PER_BUFFER * self._instance.num_buffers, _LEAST_NODES))
        outcome, offsets = kernel.LIMIT, np.zeros(0, dtype=np.int64)
        every = _PROOF_EVERY if self._instance.num_buffers <= _FEW else _RARE_PROOF_EVERY
        for count, rank in enumerate(self.ranks(), start=1):
            proof = count % every == 0
            nodes = int(limit) * (_PROOF_FACTOR if proof else 1)
            outcome, offsets = self._bounded_run(capacity, rank, nodes, not proof, effort)
            is_over = not len(offsets) or effort.is_over  # none: too little was left for a run
            if outcome != kernel.LIMIT or count == max_runs or is_over:
                break
            if count % len(self._keys) == 0:
                limit *= _LIMIT_GROWTH
        return outcome, offsets

    def _bounded_run(
        self, capacity: int, rank: Ints, nodes: int, jump: bool, effort: Effort
    ) -> tuple[int, Ints]:
        """A run whose nodes are also bounded by the effort that is left; none if too few remain."""
        if self.nodes and self.seconds > 0:
            nodes = int(min(nodes, effort.left_s * self.nodes / self.seconds))
        if self.nodes and nodes <= self._instance.num_buffers:  # too few to place them all
            return kernel.LIMIT, np.zeros(0, dtype=np.int64)
        before_s = self.seconds
        result = self.run(capacity, rank, nodes, jump, effort.left_s)
        effort.spend(self.seconds - before_s)
        return result

    def _tables(self, rank: Ints) -> kernel.Tables:
        return kernel.Tables(rank=self._convert(rank), **self._static)

    def _fresh_state(self) -> kernel.State:
        """The kernel's state before its first choice."""
        instance, convert = self._instance, self._convert
        n, num_sections = instance.num_buffers, instance.num_sections
        words = n // kernel.BITS + 1
        # Each pair of buffers lifts at most once on a path.
        num_lifts = len(self._overlaps.other) // 2 + 1
        change = np.zeros(num_sections + 2, dtype=np.int64)
        np.add.at(change, instance.first + 1, 1)
        np.subtract.at(change, np.maximum(instance.last, instance.first + 1), 1)
        tally = np.zeros(kernel.NUM_TALLIES, dtype=np.int64)
        tally[kernel.WORDS] = words
        empty = (
            (n, "placed scratch chosen chosen_trail"),
            (n + 1, "piece_end begin end key_offset key_rank ceiling tightest mark"),
            ((n + 1) * words, "blame"),
            (num_sections, "lowest"),
            (num_sections + 1, "label"),
            (num_sections + 2, "count"),
            (num_lifts, "trail_item trail_value trail_pusher"),
        )
        return kernel.State(
            offset=convert(np.where(instance.fixed == FREE, 0, instance.fixed)),
            left=convert(instance.loads(instance.padded)),
            cross=convert(np.cumsum(change)[: num_sections + 1]),
            items=convert(np.arange(n)),
            pusher=convert(np.full(n, -1)),
            tally=convert(tally),
            **{name: convert(np.zeros(size)) for size, names in empty for name in names.split()},
        )


def _order_keys(instance: Instance, overlaps: Overlaps) -> list[tuple[Ints, Ints]]:
    """(major, minor) keys of the static orders, largest first.

    Load = bytes live in a buffer's busiest section; neighbours = bytes of all that overlap it.
    """
    n = instance.num_buffers
    length = np.add.reduceat(instance.span_upper - instance.span_lower, instance.span_start[:-1])
    load = instance.most_loaded(instance.first, instance.last)
    sums = np.concatenate(([0], np.cumsum(instance.size[overlaps.other])))
    neighbours = sums[overlaps.start[1:]] - sums[overlaps.start[:-1]]
    none = np.zeros(n, dtype=np.int64)
    raw_length = np.array([b.upper - b.lower for b in instance.buffers], dtype=np.int64)
    keys = [
        (none, length * instance.size),
        (load, length),
        (load, raw_length.astype(np.float64) * instance.size),
        (load, neighbours),
        (load, length * instance.size),
        (none, length),
    ]
    if any(b.hint is not None for b in instance.buffers):
        far = max(b.hint or 0 for b in instance.buffers) + 1
        hints = [far if b.hint is None else b.hint for b in instance.buffers]
        keys.insert(0, (none, far + 1 - np.array(hints, dtype=np.int64)))
    return keys


def _as_array(values: Any) -> Any:
    return np.ascontiguousarray(values, dtype=np.int64)


def _as_list(values: Any) -> Any:
    return np.asarray(values).tolist()
