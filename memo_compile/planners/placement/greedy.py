"""Greedy placement: buffers in a static order, each at the lowest or the tightest free place.

Several orders are tried and the lowest result is kept. With numpy alone a thousand buffers take
about 30 ms for each order, so this stands in wherever a better solver is absent or out of time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from memo_compile.planners.placement.compiled import compiled_greedy, has_numba, numba_is_loaded
from memo_compile.planners.placement.effort import (
    COMPILED_ORDER_S,
    NEAR_PAIR_S,
    ORDER_PAIR_S,
    ORDER_S,
    Effort,
)
from memo_compile.planners.placement.greedy_kernel import STRETCH
from memo_compile.planners.placement.instance import FREE, Instance, Ints, PlacedSpans

_COMPILED_FROM = 2000
"""From so many buffers on numba is loaded for greedy; fewer are placed before it has loaded."""

_REPAIR_ROUNDS = 100
"""Most rounds of each order in ``repaired_offsets``; of Llama-3-70B, that by load took 9 to 86."""

Order = Callable[[Instance], Ints]
"""Ranks the buffers: (N,) keys, the smallest is placed first."""


def _by_load(instance: Instance) -> Ints:
    """Most loaded section first: what must fit under the peak is placed before it gets crowded."""
    load_of_span = instance.most_loaded(instance.span_lower, instance.span_upper)
    load_of_buffer = np.zeros(instance.num_buffers, dtype=np.int64)
    np.maximum.at(load_of_buffer, instance.owner, load_of_span)
    return -load_of_buffer


def _by_hint(instance: Instance) -> Ints:
    """Given offsets first, from low to high: repairs a placement that nearly holds."""
    far = np.iinfo(np.int64).max
    return np.array([far if b.hint is None else b.hint for b in instance.buffers], dtype=np.int64)


ORDERS: Mapping[str, Order] = {
    "length": lambda instance: instance.first - instance.last,
    "load": _by_load,
    "size": lambda instance: -instance.size,
    "area": lambda instance: -instance.size * (instance.last - instance.first),
    "birth": lambda instance: instance.first,
}
"""The orders of the portfolio; the first to reach the bound is kept. Length comes first because it
stacks saved activations as the step nests them, so that the arena's tail falls free while the
backward runs."""


def greedy_offsets(
    instance: Instance, target: int, effort: Effort, orders: Mapping[str, Order] = ORDERS
) -> Ints:
    """Offsets (N,) of the lowest greedy placement; stops early at ``target`` bytes."""
    if any(buffer.hint is not None for buffer in instance.buffers):
        orders = {"hint": _by_hint, **orders}

    def candidates() -> Iterator[Ints]:
        sequences = []
        for order in orders.values():
            sequences.append(_sequence(instance, order))
            yield place_in_order(instance, sequences[-1], best_fit=False)
        # The tightest hole rarely beats the lowest one, so it has its turn after all orders.
        for sequence in sequences:
            yield place_in_order(instance, sequence, best_fit=True)

    return lowest(instance, candidates(), target, effort)


def repaired_offsets(instance: Instance, offsets: Ints, target: int, effort: Effort) -> Ints:
    """``offsets`` (N,), or lower ones: what ends above ``target`` bytes comes earlier next time.

    Squeaky wheel optimization (Joslin and Clements, 1999): a buffer moves before all that stood out
    less often. Two orders take turns. It mends each layer of a deep step at once, where the exact
    search, whose tables are quadratic in the buffers, is not practical. Nothing is tried without
    compiled code: a round would take too long.
    """
    if not is_compiled_by_size(instance):
        return offsets

    def candidates() -> Iterator[Ints]:
        yield offsets
        takes_turns = [_blamed(instance, target, ORDERS[name]) for name in ("load", "length")]
        for _ in range(_REPAIR_ROUNDS):
            for turns in takes_turns:
                yield next(turns)

    return lowest(instance, candidates(), target, effort)


def _blamed(instance: Instance, target: int, order: Order) -> Iterator[Ints]:
    """Placements without end: what ended above ``target`` most often first, else in ``order``."""
    sequence = _sequence(instance, order)
    rank = np.argsort(sequence)
    blame = np.zeros(instance.num_buffers, dtype=np.int64)
    while True:
        offsets = place_in_order(instance, sequence, best_fit=False)
        yield offsets
        blame += offsets + instance.size > target
        sequence = np.lexsort((rank, -blame))


def _sequence(instance: Instance, order: Order) -> Ints:
    """Indices (N,) in ``order``. Ties: longer life, then larger, then as given."""
    return np.lexsort((-instance.size, instance.first - instance.last, order(instance)))


def lowest(instance: Instance, candidates: Iterable[Ints], target: int, effort: Effort) -> Ints:
    """The lowest of ``candidates``, offsets (N,), which are made one by one.

    No more are made once ``target`` bytes are reached or ``effort`` is over; the first always is.
    """
    best: Ints | None = None
    seconds = order_s(instance)
    for offsets in candidates:
        if best is None or instance.height(offsets) < instance.height(best):
            best = offsets
        effort.spend(seconds)
        if instance.height(best) <= target or effort.is_over:
            break
    assert best is not None, "no candidate was made"
    return best


def place_in_order(instance: Instance, sequence: Ints, *, best_fit: bool) -> Ints:
    """Offsets (N,) when buffers take places in the order ``sequence`` (N,) of indices.

    Each goes to the lowest hole that holds it, with ``best_fit`` to the smallest; fixed ones first.
    """
    sequence = sequence[np.argsort(instance.fixed[sequence] == FREE, kind="stable")]
    if numba_is_loaded() or is_compiled_by_size(instance):
        return _place_compiled(instance, sequence, best_fit)
    placed = PlacedSpans(instance)
    for item in sequence:
        offset = int(instance.fixed[item])
        if offset == FREE:
            size, align = int(instance.size[item]), int(instance.align[item])
            offset = _hole(*placed.walls(item), size, align, best_fit)
        placed.add(item, offset)
    return placed.offsets


def is_compiled_by_size(instance: Instance) -> bool:
    """True where greedy is compiled for ``instance``, whatever was placed before."""
    return instance.num_buffers >= _COMPILED_FROM and has_numba()


def order_s(instance: Instance) -> float:
    """Seconds of placing ``instance`` in one order, by how many pairs of buffers are compared."""
    count = instance.num_buffers
    if not is_compiled_by_size(instance):
        return count * (ORDER_S + ORDER_PAIR_S * count)
    change = np.zeros(instance.num_sections // STRETCH + 2, dtype=np.int64)
    np.add.at(change, instance.first // STRETCH, 1)
    np.subtract.at(change, (instance.last - 1) // STRETCH + 1, 1)
    alive = np.cumsum(change)  # in each stretch (``greedy_kernel``)
    return COMPILED_ORDER_S * count + NEAR_PAIR_S * int((alive * (alive - 1) // 2).sum())


def _place_compiled(instance: Instance, sequence: Ints, best_fit: bool) -> Ints:
    """``place_in_order`` by numba."""
    offsets = np.zeros(instance.num_buffers, dtype=np.int64)
    buffers = instance.size, instance.align, instance.fixed
    spans = instance.span_start, instance.span_lower, instance.span_upper
    compiled_greedy()(sequence, *buffers, *spans, best_fit, offsets)
    return offsets


def _hole(starts: Ints, ends: Ints, size: int, align: int, best_fit: bool) -> int:
    """The lowest (or smallest) free offset for ``size`` bytes between walls (``PlacedSpans``)."""
    floors = np.concatenate(([0], ends))
    if align > 1:
        floors = -(-floors // align) * align
    room = starts - floors[:-1]
    fits = np.flatnonzero(room >= size)
    if not len(fits):
        return int(floors[-1])
    return int(floors[fits[np.argmin(room[fits])] if best_fit else fits[0]])
