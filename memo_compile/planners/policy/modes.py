"""What one layer of a class can do with its slots: the modes worth considering, and their costs.

A mode is (which slots are recomputed) x (which of the rest are offloaded), or a token-wise mix of
the two. A mode *keeps least* if none leaves fewer bytes on the device. These kinds are offered; the
last four copy what they do not recompute, or a part of it:

    whole        A set is recomputed; of the rest all are copied, none, or what hides behind the
                 layer. Those that are cheapest at prices of bytes kept and copied.
    mix          The first rows of a set are recomputed, and their other rows copied with the rest.
    within room  The quickest that keeps least and allocates little beside the arena.
    apart        A set without slots that would be made long before they are read: of queries and
                 values, made by one product and read first and last, the values are copied.
    late         A set without slots made from what is only read later: an MLP's input, read first
                 but made from the layer's input, which is read last.
    half copied  The quickest that keeps least, with half of its copies: for the end of the host.
    filling      Those that keep least with one copy more, and another: for a short host.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from memo_compile.errors import UnsupportedGraph
from memo_compile.planners.move_rules import (
    RecomputeOf,
    can_split,
    closure_of,
    facts_of,
    joined_parts,
    recomputable,
    recompute_keys,
    recompute_seconds,
    slots_bytes,
    slots_s,
)
from memo_compile.planners.policy.subsets import HullPoint, corner_area, lower_hull, recompute_sets
from memo_compile.step.movable import (
    MEASURED,
    Action,
    LayerClass,
    Mode,
    MovableStep,
    RecomputeKey,
    RecomputeRegion,
    StepCosts,
)
from memo_compile.step.ordinary import outside_bytes
from memo_compile.step.problem import align
from memo_compile.step.residency import ordinary_bytes

MAX_MODES = 12
"""Most modes of one class: the program of the whole step has a variable per mode and layer."""

EIGHTHS = 8
"""Token-wise mixes recompute a multiple of 1/8 of the rows, as with MEMO's alpha."""

MAX_APART_MODES = 3
"""Most modes of kind apart, beside ``MAX_MODES``."""

MAX_LATE_MODES = 2
"""Most modes of kind late, likewise."""

SMALL_SHARE = 0.002
"""A slot of less than this share of its layer's saved bytes is small. Copying it takes no time, and
to make it anew needs what may be a thousand times its size: the scale of a norm is made from an
activation."""

COPIED_WEIGHT = 2
"""A byte that is copied, out and back, counts as many that are made too early."""

MAX_MIXES = 3
"""Most token-wise mixes among ``MAX_MODES``, since a chosen mix needs a region of its own."""

MAX_FILLING_COPIES = 3
"""Most copies more that modes of kind filling make, each beside those of the one before."""

PRICES = (0.0, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 3.0, 10.0, 100.0)
"""Prices for which the cheapest mode is found: of a byte kept, in units of what recomputing the
class costs per byte; of a byte copied, in units of its seconds on both lanes."""

LAUNCH_S = 5e-6
"""Seconds of launching each line of an estimated region, which its operators' seconds do not count.
Without them tiny tensors would be recomputed on paper, until the region is measured."""


def with_launches(step: MovableStep, recompute: RecomputeOf) -> RecomputeOf:
    """``recompute`` with the launches of estimated regions counted; each key is asked for once.

    Only where the step is measured: the seconds of a roofline count no launches at all.
    """
    is_measured = step.costs.source == MEASURED
    regions: dict[RecomputeKey, RecomputeRegion] = {}

    def counted(key: RecomputeKey) -> RecomputeRegion:
        if key not in regions:
            region = recompute(key)
            if is_measured and not region.is_lowered:
                more_s = LAUNCH_S * region.profile.num_lines
                region = replace(region, seconds=region.seconds + more_s)
            regions[key] = region
        return regions[key]

    return counted


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeCost:
    """A mode of one layer, and what it needs."""

    mode: Mode
    kept_bytes: int
    """Bytes on the device between forward and backward, once all copies have ended."""
    host_bytes: int
    """Bytes that are copied out and back, each tensor in a range of its own on the host."""
    num_copies: int
    recompute_s: float = 0.0
    keys: tuple[RecomputeKey, ...] = ()
    """The regions that recompute: the layer's way to do so."""
    recompute_peaks: tuple[int, ...] = ()
    """Arena bytes of each of them at its worst, beyond what lives across it: its temporaries, and
    its results unless they are written into a reloaded buffer."""
    recompute_outside: tuple[int, ...] = ()
    """Bytes that the kernels of each of them allocate themselves."""
    recompute_sources: tuple[tuple[int, ...], ...] = ()
    """The slots that each of them reads."""

    def d2h_s(self, costs: StepCosts) -> float:
        """Seconds of the copies to the host."""
        return costs.d2h_s(self.host_bytes, self.num_copies)

    def h2d_s(self, costs: StepCosts) -> float:
        """Seconds of the copies back."""
        return costs.h2d_s(self.host_bytes, self.num_copies)


def are_few_ways(ways: Set[tuple[RecomputeKey, ...]], most: int) -> bool:
    """True for at most ``most`` ways to recompute; (), to recompute nothing, does not count."""
    return len(ways - {()}) <= most


def mode_cost(cls: LayerClass, mode: Mode, recompute: RecomputeOf) -> ModeCost:
    """What ``mode`` costs a layer. Raises UnsupportedGraph: no region recomputes its slots."""
    keys = recompute_keys(cls, mode)
    regions = [recompute(key) for key in keys]
    copied = [cls.slots[slot].size_bytes for slot in mode.slots(Action.OFFLOAD)]
    if mode.recompute_rows is not None:
        mixed = (cls.slots[slot] for slot in mode.slots(Action.RECOMPUTE))
        copied += [(slot.num_rows - mode.recompute_rows) * slot.row_bytes for slot in mixed]
    own_outputs = mode.recompute_rows is None  # else results lie in buffers that are reloaded
    peaks = (region.profile.most_bytes(own_outputs=own_outputs) for region in regions)
    return ModeCost(
        mode=mode,
        kept_bytes=slots_bytes(cls, mode.slots(Action.SAVE)),
        host_bytes=sum(map(align, copied)),
        num_copies=len(copied),
        recompute_s=sum(region.seconds for region in regions),
        keys=keys,
        recompute_peaks=tuple(peaks),
        recompute_outside=tuple(outside_bytes(region.profile) for region in regions),
        recompute_sources=tuple(
            tuple(source.slot for source in region.inputs if source.slot is not None)
            for region in regions
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """The slots that one layer may move; its class only says what such layers can do."""

    offload: frozenset[int]
    recompute: frozenset[int]


def layer_rights(step: MovableStep) -> tuple[Rights, ...]:
    """Per layer the slots that may be offloaded and recomputed.

    A value that is a slot of two layers is moved by the first one; one that no forward call makes
    in the arena is not copied.
    """
    facts = facts_of(step)
    mover: dict[str, int] = {}  # value -> the first layer of which it is a slot
    rights = []
    for index, layer in enumerate(step.layers):
        slots, values = step.class_of(layer).slots, layer.values
        movable = [at for at, value in enumerate(values) if mover.setdefault(value, index) == index]
        offload = (at for at in movable if slots[at].can_offload and values[at] in facts.size_of)
        recompute = (at for at in movable if recomputable(step, layer, at))
        rights.append(Rights(offload=frozenset(offload), recompute=frozenset(recompute)))
    return tuple(rights)


def layer_modes(
    step: MovableStep, recompute: RecomputeOf, *, exact: bool = False, fills_host: bool = False
) -> tuple[tuple[ModeCost, ...], ...]:
    """Per layer the modes of its class, by the same numbers for all layers of the class.

    ``exact`` and ``fills_host``, for a short host, are those of ``class_modes``. Layers of the same
    rights share one tuple: a mode saves a slot that they may not copy, and saves every slot if they
    may not recompute one.
    """
    by_class = {
        key: class_modes(step, key, recompute, exact=exact, fills_host=fills_host)
        for key in dict.fromkeys(layer.class_key for layer in step.layers)
    }
    shared: dict[tuple[str, Rights], tuple[ModeCost, ...]] = {}
    modes_of_layers = []
    for layer, rights in zip(step.layers, layer_rights(step), strict=True):
        key = (layer.class_key, rights)
        if key not in shared:
            cls, modes = step.class_of(layer), by_class[layer.class_key]
            shared[key] = tuple(
                mode_cost(cls, restricted(cls, cost.mode, rights), recompute) for cost in modes
            )
        modes_of_layers.append(shared[key])
    return tuple(modes_of_layers)


def restricted(cls: LayerClass, mode: Mode, rights: Rights) -> Mode:
    """``mode`` that saves what may not be copied; SAVE of all if a slot may not be recomputed."""
    recomputed = frozenset(mode.slots(Action.RECOMPUTE))
    copied = recomputed if mode.recompute_rows is not None else frozenset[int]()
    if not recomputed <= rights.recompute or not copied <= rights.offload:
        return make_mode(cls)
    moved = rights.offload.intersection(mode.slots(Action.OFFLOAD))
    return make_mode(cls, recompute=recomputed, offload=moved, rows=mode.recompute_rows)


def class_modes(
    step: MovableStep,
    class_key: str,
    recompute: RecomputeOf,
    *,
    exact: bool = False,
    fills_host: bool = False,
) -> tuple[ModeCost, ...]:
    """The modes of one class that plans choose from, SAVE of everything first; see the module.

    ``exact`` leaves token-wise mixes out: a slice of a matrix product may differ in its last bits.
    ``fills_host`` adds kind filling.
    """
    cls = step.classes[class_key]
    hidden_s = _hidden_seconds(step, class_key)
    rates = (step.costs.d2h_bytes_per_s, step.costs.h2d_bytes_per_s)
    hideable = int(min(seconds * rate for seconds, rate in zip(hidden_s, rates, strict=True)))
    sets = recompute_sets(cls)
    mixes = [] if exact else _mixes(cls, sets, hideable, step.token_granule)
    whole = list(_costs(cls, _whole_modes(cls, sets, hideable), recompute))
    num_whole = MAX_MODES - (MAX_MIXES if mixes else 0)
    cheapest = _cheapest_at_prices(step.costs, whole, hidden_s, num_whole)
    offered = {cost.mode: cost for cost in cheapest}

    def offer(modes: Iterable[Mode], most: int | None = None) -> None:
        """Offers the first ``most`` of ``modes`` that are not offered yet."""
        new = [cost for cost in _costs(cls, modes, recompute) if cost.mode not in offered]
        offered.update((cost.mode, cost) for cost in new[:most])

    offer(mixes, MAX_MIXES)
    if (within_room := _within_room(step, class_key, whole)) is not None:
        offered.setdefault(within_room.mode, within_room)
    offer(_apart_modes(cls, sets, hideable), MAX_APART_MODES)
    offer(_late_modes(cls, sets), MAX_LATE_MODES)
    offer([_half_copied_mode(cls, [*offered.values()], step.costs)])
    if fills_host:
        offer(_filling_modes(step, cls, [*offered.values()]))
    first, *others = offered.values()
    others.sort(key=lambda cost: (-cost.kept_bytes, cost.host_bytes, cost.recompute_s))
    return (first, *others)


def _within_room(step: MovableStep, class_key: str, modes: Sequence[ModeCost]) -> ModeCost | None:
    """The quickest of ``modes`` that keeps least and for which there is room beside the arena.

    None where all have room. It is looked for where the backward of the class's last layer runs:
    most gradients are there, and what kernels of other modes allocate may have no room.
    """
    backward_at, layers = facts_of(step).backward_at, enumerate(step.layers)
    last = max(backward_at[at] for at, layer in layers if layer.class_key == class_key)
    room = outside_room(step)[last]

    def exceeds_room(cost: ModeCost) -> bool:
        return max(cost.recompute_outside, default=0) > room

    if not any(map(exceeds_room, modes)):
        return None
    return quickest([cost for cost in modes if not exceeds_room(cost)], step.costs)


def outside_room(step: MovableStep) -> Sequence[float]:
    """Per call the bytes that a region right before it may allocate itself without more memory.

    Where the arena stays in memory as a whole (CUDA), the most that lies beside it counts all the
    time. If that is 8 GiB, a region may allocate 5 where 3 are there, and nothing where 8 are, late
    in the backward. Elsewhere a region counts while it runs: no limit.
    """
    ordinary = ordinary_bytes(step.problem)
    if step.problem.releases_pages:
        return (math.inf,) * (len(ordinary.after) + 1)
    most = max(ordinary.most, default=0)
    return [most - before for before in (0, *ordinary.after)]


def quickest(modes: Sequence[ModeCost], costs: StepCosts) -> ModeCost | None:
    """The quickest of the modes that keep least, mixes left out; None where there is none."""
    least = min((mode.kept_bytes for mode in modes), default=0)
    return min(
        (mode for mode in modes if mode.kept_bytes == least and mode.mode.recompute_rows is None),
        key=lambda mode: mode.recompute_s + mode.d2h_s(costs) + mode.h2d_s(costs),
        default=None,
    )


def _hidden_seconds(step: MovableStep, class_key: str) -> tuple[float, float]:
    """Seconds of one forward and one backward of the class, behind which its copies hide."""
    facts = facts_of(step)
    layer = next(at for at, layer in enumerate(step.layers) if layer.class_key == class_key)
    return facts.forward_s[layer], facts.backward_s[layer]


def _whole_modes(cls: LayerClass, sets: Sequence[frozenset[int]], hideable: int) -> Iterable[Mode]:
    """Each set recomputed; of the rest nothing, what fits ``hideable`` bytes, or all copied."""
    for recomputed in sets:
        order = [slot for slot in offload_order(cls) if slot not in recomputed]
        yield make_mode(cls, recompute=recomputed)
        yield make_mode(cls, recompute=recomputed, offload=_fitting(cls, order, hideable))
        yield make_mode(cls, recompute=recomputed, offload=order)


def _fitting(cls: LayerClass, slots: Iterable[int], most_bytes: int) -> list[int]:
    """Those of ``slots`` that fit ``most_bytes`` together, each taken in turn if it still does."""
    fitting: list[int] = []
    for slot in slots:
        if slots_bytes(cls, (*fitting, slot)) <= most_bytes:
            fitting.append(slot)
    return fitting


def _filling_modes(step: MovableStep, cls: LayerClass, modes: Sequence[ModeCost]) -> Iterator[Mode]:
    """Modes that keep least, each with one slot copied that it recomputes, then two, then three.

    Those slots are copied that save most seconds of recomputation for a byte.
    """
    least = min(mode.kept_bytes for mode in modes)
    for cost in modes:
        if cost.kept_bytes > least or not cost.keys or cost.mode.recompute_rows is not None:
            continue
        mode = cost.mode
        for _ in range(MAX_FILLING_COPIES):
            now_s = _recompute_s(step, cls, mode)
            changes = [_with_copy(cls, mode, slot) for slot in mode.slots(Action.RECOMPUTE)]
            gains = [
                ((now_s - _recompute_s(step, cls, other)) / size_bytes, other)
                for other, size_bytes in filter(None, changes)
            ]
            gain, mode = max(gains, key=lambda pair: pair[0], default=(0.0, mode))
            if gain <= 0:
                break
            yield mode


def _with_copy(cls: LayerClass, mode: Mode, slot: int) -> tuple[Mode, int] | None:
    """``mode`` with ``slot`` copied, and the slot's bytes; None where it cannot be copied."""
    if not cls.slots[slot].can_offload:
        return None
    actions = (*mode.actions[:slot], Action.OFFLOAD, *mode.actions[slot + 1 :])
    return replace(mode, actions=actions), cls.slots[slot].size_bytes


def _recompute_s(step: MovableStep, cls: LayerClass, mode: Mode) -> float:
    """Seconds of the regions with which ``mode`` recomputes, by their operators' seconds."""
    return sum(recompute_seconds(step, key) for key in recompute_keys(cls, mode))


def _half_copied_mode(cls: LayerClass, modes: Sequence[ModeCost], costs: StepCosts) -> Mode:
    """The quickest mode that keeps least, with at most half of its copies; it saves the others."""
    fastest = (quickest(modes, costs) or modes[0]).mode
    copied = fastest.slots(Action.OFFLOAD)
    in_order = filter(copied.__contains__, offload_order(cls))
    half = _fitting(cls, in_order, slots_bytes(cls, copied) // 2)
    return make_mode(cls, recompute=fastest.slots(Action.RECOMPUTE), offload=half)


def _apart_modes(cls: LayerClass, sets: Sequence[frozenset[int]], hideable: int) -> Iterable[Mode]:
    """Modes whose regions make little long before it is read, larger sets first."""
    for recomputed in reversed(sets):
        kept = apart(cls, recomputed, hideable)
        if kept != recomputed:
            yield make_mode(cls, recompute=kept, offload=set(offload_order(cls)) - kept)


def _late_modes(cls: LayerClass, sets: Sequence[frozenset[int]]) -> Iterable[Mode]:
    """Modes whose regions read no slot before the backward reads it, larger sets first."""
    for recomputed in reversed(sets):
        late = reading_late(cls, recomputed)
        if late and late != recomputed:
            yield make_mode(cls, recompute=late, offload=set(offload_order(cls)) - late)


def reading_late(cls: LayerClass, recomputed: frozenset[int]) -> frozenset[int]:
    """``recomputed`` without slots whose region reads another slot before the backward reads it.

    That other slot would have to be at hand while the backward is at its peak, though it is only
    needed later. An example is a layer's input, from which what its MLP reads is made again.
    """
    kept = recomputed
    while True:
        keys = recompute_keys(cls, make_mode(cls, recompute=kept))
        early = frozenset().union(*(_slots_reading_early(cls, key) for key in keys))
        if not early:
            return kept
        kept -= early


def _slots_reading_early(cls: LayerClass, key: RecomputeKey) -> set[int]:
    """The slots of a region for which it needs another slot before the backward reads that one.

    The region runs when the first of its slots is read. Say it makes A, read at call 0, and B, read
    at call 2, from an input that is read at call 3: then A is returned, since without it the region
    runs at 2. Only if nothing that is read at call 0 needs the input, B is returned: it runs too
    early because it shares an operator with A.
    """
    first = min(cls.slots[slot].first_read for slot in key.slots)
    small = small_slots(cls, frozenset(range(len(cls.slots))))
    reads: dict[int, set[int]] = {}
    for slot in key.slots:
        sources = itertools.chain.from_iterable(
            cls.ops[op].inputs for op in closure_of(cls, (slot,), key.passing)
        )
        others = {cls.ops[source].slot for source in sources} - {None, slot, *small, *key.passing}
        reads[slot] = {
            other for other in others if other is not None and cls.slots[other].first_read > first
        }
    reading = {slot for slot in key.slots if reads[slot]}
    read_first = {slot for slot in reading if cls.slots[slot].first_read == first}
    return read_first or {slot for slot in reading if reads[slot].difference(key.slots)}


def apart(cls: LayerClass, recomputed: frozenset[int], hideable: int = 0) -> frozenset[int]:
    """``recomputed`` without slots because of which others are made too early: those are copied.

    Slots that share an operator are made by one region, when the first of them is read, though the
    backward may read the others much later. A slot leaves the set if the bytes that are made too
    early fall by more than its copy counts, or by as much while the copies are ``hideable`` bytes
    at most. The set itself is returned where that gains nothing.
    """
    slots, kept = cls.slots, recomputed - small_slots(cls, recomputed)
    early_bytes = _early_bytes(cls, kept)
    while early_bytes:
        candidates = [slot for slot in sorted(kept) if slots[slot].can_offload]
        gains = [
            early_bytes - _early_bytes(cls, kept - {slot}) - COPIED_WEIGHT * slots[slot].size_bytes
            for slot in candidates
        ]
        gain = max(gains, default=-1)
        if gain < 0:
            break
        fewer = kept - {candidates[gains.index(gain)]}
        if gain == 0 and slots_bytes(cls, recomputed - fewer) > hideable:
            break
        kept, early_bytes = fewer, _early_bytes(cls, fewer)
    return kept if early_bytes < _early_bytes(cls, recomputed) else recomputed


def small_slots(cls: LayerClass, slots: frozenset[int]) -> frozenset[int]:
    """Those of ``slots`` that can be copied and are small (``SMALL_SHARE``)."""
    bound_bytes = SMALL_SHARE * cls.saved_bytes
    return frozenset(
        at for at in slots if cls.slots[at].can_offload and cls.slots[at].size_bytes < bound_bytes
    )


def _early_bytes(cls: LayerClass, recomputed: frozenset[int]) -> int:
    """Bytes of slots that are made too early: by a region that runs for one that is read before.

    All slots that share an operator count as one region (``joined_parts``), even where a cheap
    operator may run twice and part them.
    """
    early_bytes = 0
    for slots in joined_parts(cls, sorted(recomputed)):
        first = min(cls.slots[slot].first_read for slot in slots)
        later = (cls.slots[slot] for slot in slots if cls.slots[slot].first_read > first)
        early_bytes += sum(slot.size_bytes for slot in later)
    return early_bytes


def _mixes(
    cls: LayerClass, sets: Sequence[frozenset[int]], hideable: int, granule: int
) -> list[Mode]:
    """Mixes that copy what they do not recompute, larger sets first.

    First, of each set, that with the fewest rows recomputed whose copies hide; then the halves.
    """
    hidden: list[Mode] = []
    halves: list[Mode] = []
    for recomputed in filter(None, (splittable(cls, whole) for whole in reversed(sets))):
        num_rows = cls.slots[min(recomputed)].num_rows
        rest = [slot for slot in offload_order(cls) if slot not in recomputed]
        rest_bytes, mixed_bytes = slots_bytes(cls, rest), slots_bytes(cls, recomputed)
        is_hidden = False
        for eighth in range(1, EIGHTHS):
            rows = num_rows * eighth // EIGHTHS // granule * granule
            if not 0 < rows < num_rows:
                continue
            mode = make_mode(cls, recompute=recomputed, offload=rest, rows=rows)
            copied_bytes = rest_bytes + mixed_bytes * (num_rows - rows) // num_rows
            if not is_hidden and copied_bytes <= hideable:
                hidden.append(mode)
                is_hidden = True
            if eighth == EIGHTHS // 2:
                halves.append(mode)
    return [*hidden, *halves]


def make_mode(
    cls: LayerClass,
    *,
    recompute: Iterable[int] = (),
    offload: Iterable[int] = (),
    rows: int | None = None,
) -> Mode:
    """The mode that recomputes and offloads these slots and saves the others.

    What the user has pinned is done, whatever is asked for.
    """
    actions = [Action.SAVE] * len(cls.slots)
    for slot in offload:
        actions[slot] = Action.OFFLOAD
    for slot in recompute:
        actions[slot] = Action.RECOMPUTE
    actions = [slot.pinned or action for slot, action in zip(cls.slots, actions, strict=True)]
    if any(slot.pinned is Action.RECOMPUTE for slot in cls.slots):
        rows = None  # all rows of what is pinned, and so of all that is recomputed
    return Mode(actions=tuple(actions), recompute_rows=rows)


def splittable(cls: LayerClass, recomputed: Iterable[int]) -> frozenset[int]:
    """The slots among these that can be recomputed for a part of their rows.

    Empty when they have different numbers of rows. Keys and values of grouped heads are left out,
    for example: they lie in memory head by head, so their rows cannot be copied as one range.
    """
    part = frozenset(slot for slot in recomputed if can_split(cls, (slot,)))
    return part if can_split(cls, part) else frozenset()


def offload_order(cls: LayerClass) -> list[int]:
    """Slots that can be offloaded, those first that cost most to recompute per byte.

    What cannot be recomputed comes first: only a copy takes it off the device.
    """

    def price(slot: int) -> float:
        if not cls.slots[slot].can_recompute:
            return float("inf")
        return slots_s(cls, (slot,)) / max(cls.slots[slot].size_bytes, 1)

    slots = [number for number, slot in enumerate(cls.slots) if slot.can_offload]
    return sorted(slots, key=lambda slot: (-price(slot), slot))


def _costs(cls: LayerClass, modes: Iterable[Mode], recompute: RecomputeOf) -> Iterable[ModeCost]:
    """Costs of each of ``modes`` once, without those for which there is no region."""
    for mode in dict.fromkeys(modes):
        try:
            yield mode_cost(cls, mode, recompute)
        except UnsupportedGraph:
            continue


def _cheapest_at_prices(
    costs: StepCosts, modes: Sequence[ModeCost], hidden_s: tuple[float, float], limit: int
) -> list[ModeCost]:
    """At most ``limit`` modes: four always, then those cheapest at the most pairs of ``PRICES``.

    Always are taken: SAVE of everything, the first that keeps least, the same without copies (for a
    host that is full), and the knee. A mode's seconds are its recomputation and what its copies
    take beyond ``hidden_s``, those of the layer's forward and backward behind which they hide. Each
    byte kept and each byte copied cost a price more.
    """
    longest_s = max((mode.recompute_s for mode in modes), default=0.0)
    freed = max((modes[0].kept_bytes - mode.kept_bytes for mode in modes if mode.keys), default=0)
    copy_price = 1 / costs.d2h_bytes_per_s + 1 / costs.h2d_bytes_per_s
    keep_price = longest_s / freed if freed and longest_s else copy_price
    fixed_s = [
        mode.recompute_s
        + max(0.0, mode.d2h_s(costs) - hidden_s[0], mode.h2d_s(costs) - hidden_s[1])
        for mode in modes
    ]
    numbers, wins = range(len(modes)), [0] * len(modes)  # at how many pairs of prices each is best
    for kept, copied in itertools.product(PRICES, PRICES):
        price = [
            fixed + kept * keep_price * mode.kept_bytes + copied * copy_price * mode.host_bytes
            for fixed, mode in zip(fixed_s, modes, strict=True)
        ]
        wins[min(numbers, key=price.__getitem__)] += 1
    smallest = min(numbers, key=lambda at: modes[at].kept_bytes)
    copying_nothing = (at for at in numbers if not modes[at].host_bytes)
    always = 0, smallest, min(copying_nothing, key=lambda at: modes[at].kept_bytes), *_knee(modes)
    ranked = sorted(numbers, key=lambda at: (at not in always, -wins[at]))
    taken = [at for at in ranked if at in always or wins[at]]
    return [modes[at] for at in sorted(taken[:limit])]


def _knee(modes: Sequence[ModeCost]) -> list[int]:
    """The number of the mode at the sharpest bend of seconds over bytes not copied; or none.

    Of modes that keep least. Beyond the bend each byte that is copied less costs most: attention is
    made again. On a slow link some layers take the mode at the bend and others copy less.
    """
    least = min(mode.kept_bytes for mode in modes)
    points = (
        HullPoint(-mode.host_bytes, mode.recompute_s, at)
        for at, mode in enumerate(modes)
        if mode.kept_bytes == least
    )
    hull = lower_hull(sorted(points))
    bends = [
        (corner_area(*hull[at - 1 : at + 2]), hull[at].number) for at in range(1, len(hull) - 1)
    ]
    return [at for _, at in sorted(bends)[-1:]]
