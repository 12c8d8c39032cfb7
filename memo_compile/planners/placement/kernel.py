"""Canonical search: the inner loop, written once for plain Python (lists) and for numba (arrays).

Every function here uses only integers, one-dimensional indexables and the two named tuples, so that
``portfolio.py`` can hand the same source to numba. Nothing here allocates.

**Canonical form.** In any valid placement each buffer can sink until it stands on the arena's floor
or on another one. Sorted by (offset, rank), such a placement is a sequence in which each buffer
lies exactly at the highest end (aligned) of the earlier buffers that it overlaps. So the search
chooses the NEXT buffer only; its offset follows, and the keys (offset, rank) ascend.

**Cuts.** Dominance: a buffer that fits completely below the candidate's offset makes the candidate
needless, the same placement with that buffer moved down is visited elsewhere. Hatless: a choice
that lifts no other buffer costs nothing, so it has no alternatives. Crowding: in each section, for
each offset x, the buffers that cannot lie below x must fit between x and the capacity. Pieces:
where no unplaced buffer crosses a point in time, both sides are searched one after the other, and a
failure of one is a failure of the choice that parted them. Jump, which can be off: a failure goes
back to the last choice on which a buffer of the failed section stands (conflict-directed
backjumping). The order of keys ties choices together in ways that this reasoning ignores, hence no
proof after a jump.
"""

from typing import Any, NamedTuple

FOUND = 1
EXHAUSTED = 0
LIMIT = 2

BITS = 62
"""How many bits of each word of ``State.blame`` are used: those below the sign of int64."""

# Slots of State.tally.
CHOSEN, TRAIL, JUMPED, DIRTY_LOWER, DIRTY_UPPER, WORDS, WORK = 0, 1, 2, 3, 4, 5, 6
NUM_TALLIES = 7


class Tables(NamedTuple):
    """What does not change during a search; most of it is what Instance has by the same name."""

    size: Any
    padded: Any
    align: Any
    fixed: Any
    rank: Any
    """(N,) a permutation: which of several buffers with equal offsets goes first."""
    first: Any
    last: Any
    span_start: Any
    span_lower: Any
    span_upper: Any
    near_start: Any
    """(N + 1,) rows of the next."""
    near: Any
    """Indices of the buffers that overlap in time."""


class State(NamedTuple):
    """What a search writes to: N buffers, S sections, a stack of frames, one for each choice."""

    offset: Any
    """(N,) lowest possible offset of an unplaced buffer, final offset of a placed one."""
    placed: Any
    """(N,) 1 if placed."""
    lowest: Any
    """(S,) lowest offset of an unplaced buffer of the section, while a frame opens."""
    left: Any
    """(S,) padded bytes of the unplaced buffers in the section."""
    cross: Any
    """(S,) number of unplaced buffers that are alive on both sides of the section's lower edge."""
    items: Any
    """(N,) a permutation of the buffers in which each component is a slice."""
    piece_end: Any
    """(N + 1,) for a component that starts at this position of ``items``: where it ends."""
    scratch: Any
    label: Any
    """(S + 1,) component of each section while a slice is cut."""
    count: Any
    """(S + 2,) buffers of each component while a slice is cut."""
    begin: Any
    """(depth,) where the slice of ``items`` begins that the frame searches; ``end`` alike."""
    end: Any
    key_offset: Any
    """(depth,) key of the last choice tried, with ``key_rank``."""
    key_rank: Any
    ceiling: Any
    """(depth,) largest offset at which a choice leaves room for all sections of the slice."""
    tightest: Any
    """(depth,) the section that sets the ceiling."""
    blame: Any
    """(depth * words,) bits of the placed buffers that had a part in the frame's failures."""
    pusher: Any
    """(N,) the placed buffer that the buffer's lowest offset stands on, or -1."""
    trail_pusher: Any
    """Offsets overwritten: the old pusher."""
    mark: Any
    """(depth,) length of ``chosen`` before the frame's choice."""
    chosen: Any
    """(N,) placed buffers in order of placing."""
    chosen_trail: Any
    """(N,) length of the offset trail before each."""
    trail_item: Any
    """Offsets overwritten: whose."""
    trail_value: Any
    """Offsets overwritten: the old value."""
    tally: Any
    """(NUM_TALLIES,) lengths of ``chosen`` and of the offset trail; whether a jump was made; the
    stretch of sections that the last choice changed; words in a row of blame; turns of inner loops,
    for which the search takes time."""


def search(
    tables: Tables,
    state: State,
    capacity: int,
    slack: int,
    max_nodes: int,
    max_work: int,
    jump: bool,
) -> tuple:
    """Searches for offsets whose height is at most ``capacity``.

    ``slack`` is the most bytes by which padding overstates a stack. ``state`` must be fresh; on
    FOUND its offsets are the placement, on EXHAUSTED there is none. Ends about where ``max_nodes``
    choices were tried, or ``max_work`` turns of inner loops were made.

    Returns:
        (FOUND | EXHAUSTED | LIMIT, number of choices tried).
    """
    num_items = len(tables.size)
    if num_items == 0:
        return FOUND, 0
    roof = capacity + slack
    # A literal 0 would make numba compile every function that is given one a second time.
    zero = state.tally[CHOSEN]
    state.piece_end[0] = num_items
    cut_slice(tables, state, zero, num_items, zero, len(state.left))
    depth = zero
    open_frame(tables, state, depth, zero, zero - 1, zero - 1, roof)
    nodes = 0
    while nodes < max_nodes and state.tally[WORK] < max_work:
        position = next_choice(tables, state, depth)
        if position < 0:
            depth = retreat(tables, state, depth, jump)
            if depth < 0:
                return LIMIT if state.tally[JUMPED] else EXHAUSTED, nodes
            continue
        nodes += 1
        if not place_next(tables, state, depth, position, capacity, roof):
            undo(tables, state, state.mark[depth])
            continue
        start = state.begin[depth] + 1
        if start == state.end[depth]:
            # The piece is done. On with the next piece of the nearest frame that has one left.
            while depth > 0 and state.end[depth] == state.end[depth - 1]:
                depth -= 1
            start = state.end[depth]
            depth -= 1
        if start == num_items:
            return FOUND, nodes
        if depth < 0:
            depth = zero
            open_frame(tables, state, depth, start, zero - 1, zero - 1, roof)
            continue
        depth += 1
        offset, rank = state.key_offset[depth - 1], state.key_rank[depth - 1]
        open_frame(tables, state, depth, start, offset, rank, roof)
    return LIMIT, nodes


def place_next(
    tables: Tables, state: State, depth: int, position: int, capacity: int, roof: int
) -> bool:
    """Places ``items[position]`` and cuts the rest; False when something can no longer fit."""
    begin = state.begin[depth]
    end = state.end[depth]
    item = state.items[position]
    state.items[position] = state.items[begin]
    state.items[begin] = item
    state.mark[depth] = state.tally[CHOSEN]
    if not put(tables, state, item, depth, capacity, roof):
        return False
    if state.tally[TRAIL] == state.chosen_trail[state.tally[CHOSEN] - 1]:
        state.ceiling[depth] = -1
    if begin + 1 == end:
        return True
    if crowded(tables, state, depth, begin + 1, end, roof):
        return False
    state.piece_end[begin + 1] = end
    cut_slice(tables, state, begin + 1, end, tables.first[item], tables.last[item])
    return True


def open_frame(
    tables: Tables, state: State, depth: int, start: int, offset: int, rank: int, roof: int
) -> None:
    """Frame ``depth`` begins to search the piece at ``start``, for keys above (offset, rank)."""
    end = state.piece_end[start]
    state.begin[depth] = start
    state.end[depth] = end
    state.key_offset[depth] = offset
    state.key_rank[depth] = rank
    first = len(state.left)
    last = 0
    for position in range(start, end):
        item = state.items[position]
        first = min(first, tables.first[item])
        last = max(last, tables.last[item])
    state.tally[WORK] += end - start + last - first
    most = 0
    for section in range(first, last):
        if state.left[section] > most:
            most = state.left[section]
            state.tightest[depth] = section
    state.ceiling[depth] = roof - most
    for word in range(state.tally[WORDS]):
        state.blame[depth * state.tally[WORDS] + word] = 0


def crowded(tables: Tables, state: State, depth: int, begin: int, end: int, roof: int) -> bool:
    """True when some section of the slice [begin, end) of ``items`` can no longer hold its buffers.

    They stand on the lowest offset that any of them can still take, at least on that of the last
    choice. The slice is sorted by lowest offset, and looked at from the highest buffer down.
    """
    base = state.key_offset[depth]
    first = state.tally[DIRTY_LOWER]
    last = state.tally[DIRTY_UPPER]
    items = state.items
    state.tally[WORK] += end - begin
    for position in range(begin + 1, end):
        item = items[position]
        low = state.offset[item]
        at = position
        while at > begin and state.offset[items[at - 1]] > low:
            items[at] = items[at - 1]
            at -= 1
        items[at] = item
        state.tally[WORK] += position - at
    lowest = state.lowest
    for section in range(first, last):
        lowest[section] = roof
    for position in range(end - 1, begin - 1, -1):
        item = items[position]
        room = max(base, state.offset[item])
        padded = tables.padded[item]
        for span in range(tables.span_start[item], tables.span_start[item + 1]):
            lower = max(first, tables.span_lower[span])
            upper = min(last, tables.span_upper[span])
            state.tally[WORK] += max(0, upper - lower)
            for section in range(lower, upper):
                lowest[section] -= padded
                if lowest[section] < room:
                    blame_section(tables, state, depth, section, state.offset[item])
                    blame_item(state, depth, state.items[state.begin[depth]])
                    return True
    return False


def next_choice(tables: Tables, state: State, depth: int) -> int:
    """Position in ``items`` of the frame's next choice, and its key recorded; -1 when none is left.

    The lowest offset goes first; nothing may fit completely below it (dominance), and no buffer
    with a fixed offset may be left behind.
    """
    offset, rank = state.offset, tables.rank
    old_offset, old_rank = state.key_offset[depth], state.key_rank[depth]
    best, best_offset, best_rank, lowest_end = -1, 0, 0, -1
    dominator = state.items[state.begin[depth]]
    state.tally[WORK] += state.end[depth] - state.begin[depth]
    for position in range(state.begin[depth], state.end[depth]):
        item = state.items[position]
        low = offset[item]
        end = low + 1 if tables.fixed[item] >= 0 else low + tables.size[item]
        if lowest_end < 0 or end < lowest_end:
            lowest_end = end
            dominator = item
        if low < old_offset or (low == old_offset and rank[item] <= old_rank):
            continue
        if best < 0 or low < best_offset or (low == best_offset and rank[item] < best_rank):
            best = position
            best_offset = low
            best_rank = rank[item]
    if best < 0:
        for position in range(state.begin[depth], state.end[depth]):
            blame_item(state, depth, state.items[position])
        return -1
    if best_offset >= lowest_end:
        blame_item(state, depth, dominator)
        return -1
    if best_offset > state.ceiling[depth]:
        if state.ceiling[depth] >= 0:
            blame_section(tables, state, depth, state.tightest[depth], 0)
        return -1
    state.key_offset[depth] = best_offset
    state.key_rank[depth] = best_rank
    return best


def put(tables: Tables, state: State, item: int, depth: int, capacity: int, roof: int) -> bool:
    """Places ``item`` at its lowest offset and lifts the unplaced buffers that it overlaps.

    False when something can no longer fit; ``undo`` takes back the half-done placing too.
    """
    tally = state.tally
    base = state.offset[item]
    padded = tables.padded[item]
    state.placed[item] = 1
    state.chosen[tally[CHOSEN]] = item
    state.chosen_trail[tally[CHOSEN]] = tally[TRAIL]
    tally[CHOSEN] += 1
    fits = base + tables.size[item] <= capacity
    for span in range(tables.span_start[item], tables.span_start[item + 1]):
        for section in range(tables.span_lower[span], tables.span_upper[span]):
            state.left[section] -= padded  # the rest of a section stands on the item
            if state.left[section] > 0 and base + padded + state.left[section] > roof:
                fits = False
    tally[DIRTY_LOWER] = tables.first[item]
    tally[DIRTY_UPPER] = tables.last[item]
    tally[WORK] += 2 * (tables.last[item] - tables.first[item])
    for section in range(tables.first[item] + 1, tables.last[item]):
        state.cross[section] -= 1
    if not fits:
        blame_item(state, depth, item)
        return False
    return lift(tables, state, item, depth, capacity)


def lift(tables: Tables, state: State, item: int, depth: int, capacity: int) -> bool:
    """The unplaced buffers that overlap the placed ``item`` start above it; False: one cannot."""
    tally = state.tally
    end = state.offset[item] + tables.size[item]
    tally[WORK] += tables.near_start[item + 1] - tables.near_start[item]
    for row in range(tables.near_start[item], tables.near_start[item + 1]):
        other = tables.near[row]
        if state.placed[other] == 1:
            continue
        align = tables.align[other]
        low = -(-end // align) * align if align > 1 else end
        if low <= state.offset[other]:
            continue
        trail = tally[TRAIL]
        state.trail_item[trail] = other
        state.trail_value[trail] = state.offset[other]
        state.trail_pusher[trail] = state.pusher[other]
        tally[TRAIL] = trail + 1
        state.offset[other] = low
        state.pusher[other] = item
        tally[DIRTY_LOWER] = min(tally[DIRTY_LOWER], tables.first[other])
        tally[DIRTY_UPPER] = max(tally[DIRTY_UPPER], tables.last[other])
        if low + tables.size[other] > capacity or 0 <= tables.fixed[other] < low:
            blame_item(state, depth, other)
            return False
    return True


def blame_item(state: State, depth: int, item: int) -> None:
    """Blame ``item``, if placed, and the placed buffers that it stands on for a failure."""
    row = depth * state.tally[WORDS]
    while item >= 0:
        if state.placed[item] == 1:
            word = row + item // BITS
            bit = 1 << (item % BITS)
            if state.blame[word] & bit:
                return
            state.blame[word] |= bit
        item = state.pusher[item]


def blame_section(tables: Tables, state: State, depth: int, section: int, low: int) -> None:
    """Blame what lies below the unplaced buffers of ``section`` at offset ``low`` or above."""
    state.tally[WORK] += state.end[depth] - state.begin[depth]
    for position in range(state.begin[depth], state.end[depth]):
        item = state.items[position]
        if state.placed[item] == 1 or state.offset[item] < low:
            continue
        for span in range(tables.span_start[item], tables.span_start[item + 1]):
            if tables.span_lower[span] <= section < tables.span_upper[span]:
                blame_item(state, depth, item)


def retreat(tables: Tables, state: State, depth: int, jump: bool) -> int:
    """The next frame below ``depth``, with ``jump`` the next one to blame, undone; -1 if none."""
    words = state.tally[WORDS]
    source = depth * words
    while depth > 0:
        depth -= 1
        item = state.chosen[state.mark[depth]]
        undo(tables, state, state.mark[depth])
        bit = 1 << (item % BITS)
        if not jump or state.blame[source + item // BITS] & bit:
            state.blame[source + item // BITS] &= ~bit  # the rest of the blame is passed on
            for word in range(words):
                state.blame[depth * words + word] |= state.blame[source + word]
            return depth
        state.tally[JUMPED] = 1
    return -1


def undo(tables: Tables, state: State, mark: int) -> None:
    """Takes back every placing after the first ``mark`` ones."""
    tally = state.tally
    while tally[CHOSEN] > mark:
        tally[CHOSEN] -= 1
        item = state.chosen[tally[CHOSEN]]
        trail = tally[TRAIL]
        while trail > state.chosen_trail[tally[CHOSEN]]:
            trail -= 1
            state.offset[state.trail_item[trail]] = state.trail_value[trail]
            state.pusher[state.trail_item[trail]] = state.trail_pusher[trail]
        tally[TRAIL] = trail
        padded = tables.padded[item]
        for span in range(tables.span_start[item], tables.span_start[item + 1]):
            for section in range(tables.span_lower[span], tables.span_upper[span]):
                state.left[section] += padded
        for section in range(tables.first[item] + 1, tables.last[item]):
            state.cross[section] += 1
        state.placed[item] = 0


def cut_slice(tables: Tables, state: State, begin: int, end: int, first: int, last: int) -> None:
    """Sorts the slice [begin, end) of ``items`` into pieces that share no time.

    ``first`` and ``last`` are the sections between which new cuts may have appeared.
    """
    for section in range(first + 1, last):
        if state.cross[section] == 0:
            break
    else:  # no cut: it stays one piece
        return
    low = len(state.left)
    high = 0
    for position in range(begin, end):
        item = state.items[position]
        low = min(low, tables.first[item])
        high = max(high, tables.last[item])
    piece = 0
    state.count[0] = 0
    state.label[low] = 0
    for section in range(low + 1, high):
        if state.cross[section] == 0:
            piece += 1
            state.count[piece] = 0
        state.label[section] = piece
    for position in range(begin, end):
        item = state.items[position]
        state.scratch[position] = item
        state.count[state.label[tables.first[item]]] += 1
    start = begin
    for index in range(piece + 1):
        size = state.count[index]
        state.count[index] = start
        if size > 0:
            state.piece_end[start] = start + size
        start += size
    for position in range(begin, end):
        item = state.scratch[position]
        index = state.label[tables.first[item]]
        state.items[state.count[index]] = item
        state.count[index] += 1
