"""What one layer of a class can do with its slots: the modes worth considering, and their costs.

A mode is (which slots are recomputed) x (which of the rest are offloaded), or a token-wise mix of
the two. Worth considering are modes that are cheapest for some price of a byte kept on the device
and some price of a byte copied, and mixes whose copy just hides behind one layer's forward.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
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
    slots_s,
)
from memo_compile.planners.policy.subsets import lower_hull, recompute_sets, triangle
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

MAX_APART = 3
"""Most modes, beside ``MAX_MODES``, whose regions make nothing before it is read."""

MAX_LATE = 2
"""Likewise, whose regions read nothing before the backward does."""

SMALL = 0.002
"""Share of a layer's saved bytes. Copying a tensor of less takes no time, and to make it anew needs
what may be a thousand times its size: the scale of a norm is made from an activation."""

COPIED = 2
"""A byte that is offloaded, out and back, counts as many that exist too early."""

MAX_MIXES = 3
"""Most token-wise mixes among ``MAX_MODES``, since a chosen mix needs a region of its own."""

MAX_FILLING = 3
"""Most slots that are copied one after the other beside what a mode copies, to fill a host."""

PRICES = (0.0, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 3.0, 10.0, 100.0)
"""Prices for which the cheapest mode is found: of a byte kept, in units of what recomputing the
class costs per byte; of a byte copied, in units of its seconds on both lanes."""

LAUNCH_S = 5e-6
"""Seconds of launching each line of an estimated region, which its operators' seconds do not count.
Without them tiny tensors would be recomputed on paper, until the region is measured."""


def with_launches(step: MovableStep, recompute: RecomputeOf) -> RecomputeOf:
    """``recompute`` with the launches of estimated regions counted; each key is asked for once.

    Only where regions are measured: the seconds of a roofline count no launches at all.
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
    """The regions that recompute."""
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


def mode_cost(cls: LayerClass, mode: Mode, recompute: RecomputeOf) -> ModeCost:
    """What ``mode`` costs a layer. Raises UnsupportedGraph: no region recomputes its slots."""
    keys = recompute_keys(cls, mode)
    regions = [recompute(key) for key in keys]
    moved = [cls.slots[slot].size_bytes for slot in mode.slots(Action.OFFLOAD)]
    if mode.recompute_rows is not None:
        mixed = (cls.slots[slot] for slot in mode.slots(Action.RECOMPUTE))
        moved += [(slot.num_rows - mode.recompute_rows) * slot.row_bytes for slot in mixed]
    own_outputs = mode.recompute_rows is None
    return ModeCost(
        mode=mode,
        kept_bytes=sum(cls.slots[slot].size_bytes for slot in mode.slots(Action.SAVE)),
        host_bytes=sum(map(align, moved)),
        num_copies=len(moved),
        recompute_s=sum(region.seconds for region in regions),
        keys=keys,
        recompute_peaks=tuple(
            region.profile.most_bytes(own_outputs=own_outputs) for region in regions
        ),
        recompute_outside=tuple(outside_bytes(region.profile) for region in regions),
        recompute_sources=tuple(
            tuple(source.slot for source in region.inputs if source.slot is not None)
            for region in regions
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What one layer may do with its own values; its class only says what such layers can do."""

    offload: frozenset[int]
    recompute: frozenset[int]


def layer_rights(step: MovableStep) -> tuple[Rights, ...]:
    """Per layer the slots that may be offloaded and recomputed.

    A value that is a slot of two layers is moved by the first one; one that no forward call makes
    in the arena is not copied.
    """
    facts = facts_of(step)
    owner: dict[str, int] = {}
    rights = []
    for index, layer in enumerate(step.layers):
        slots, values = step.class_of(layer).slots, layer.values
        owned = [at for at, value in enumerate(values) if owner.setdefault(value, index) == index]
        copied = (at for at in owned if slots[at].can_offload and values[at] in facts.size_of)
        recomputed = (at for at in owned if recomputable(step, layer, at))
        rights.append(Rights(offload=frozenset(copied), recompute=frozenset(recomputed)))
    return tuple(rights)


def layer_modes(
    step: MovableStep, recompute: RecomputeOf, *, exact: bool = False, fills_host: bool = False
) -> tuple[tuple[ModeCost, ...], ...]:
    """Per layer the modes of its class, by the same numbers for all layers of the class.

    With ``fills_host`` there are more, for a host that has room for some copies of each layer.
    A mode saves a slot that its layer may not copy, and saves every slot if the layer may not
    recompute one. Layers with the same rights share one tuple.
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
    """``mode`` as far as ``rights`` allow it."""
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
    """The modes of one class that plans choose from, SAVE of everything first.

    ``exact`` leaves token-wise mixes out: a slice of a matrix product may differ in its last bits.
    """
    cls = step.classes[class_key]
    hidden_s = _hidden_seconds(step, class_key)
    rates = (step.costs.d2h_bytes_per_s, step.costs.h2d_bytes_per_s)
    hideable = int(min(seconds * rate for seconds, rate in zip(hidden_s, rates, strict=True)))
    sets = recompute_sets(cls)
    mixes = [] if exact else _mixes(cls, sets, hideable, step.token_granule)
    costs = list(_costs(cls, _whole_modes(cls, sets, hideable), recompute))
    limit = MAX_MODES - (MAX_MIXES if mixes else 0)
    picked = _supported(step.costs, costs, hidden_s, limit)
    picked += list(_costs(cls, mixes, recompute))[:MAX_MIXES]
    picked_modes = {cost.mode for cost in picked}
    if (inside := _inside(step, class_key, costs)) is not None and inside.mode not in picked_modes:
        picked.append(inside)
    picked_modes = {cost.mode for cost in picked}
    apart_modes = _costs(cls, _apart_modes(cls, sets, hideable), recompute)
    picked += [cost for cost in apart_modes if cost.mode not in picked_modes][:MAX_APART]
    picked_modes = {cost.mode for cost in picked}
    late_modes = _costs(cls, _late_modes(cls, sets), recompute)
    picked += [cost for cost in late_modes if cost.mode not in picked_modes][:MAX_LATE]
    picked_modes = {cost.mode for cost in picked}
    half = _half_copied(cls, picked, step.costs)
    picked += [cost for cost in _costs(cls, [half], recompute) if cost.mode not in picked_modes]
    if fills_host:
        picked_modes = {cost.mode for cost in picked}
        filling = _costs(cls, _filling(step, cls, picked), recompute)
        picked += [cost for cost in filling if cost.mode not in picked_modes]
    first, *others = picked
    others.sort(key=lambda cost: (-cost.kept_bytes, cost.host_bytes, cost.recompute_s))
    return (first, *others)


def _inside(step: MovableStep, class_key: str, modes: Sequence[ModeCost]) -> ModeCost | None:
    """The quickest mode that keeps least, and whose kernels never take more beside the arena.

    Only where those of others do. For the layers whose backward comes last: most gradients are
    there, and that others recompute may have no room.
    """
    backward_at, layers = facts_of(step).backward_at, enumerate(step.layers)
    last = max(backward_at[at] for at, layer in layers if layer.class_key == class_key)
    room = outside_room(step)[last]

    def raises(cost: ModeCost) -> bool:
        return max(cost.recompute_outside, default=0) > room

    if not any(map(raises, modes)):
        return None
    inside = [cost for cost in modes if not raises(cost)]
    return quickest(inside, step.costs)


def outside_room(step: MovableStep) -> Sequence[float]:
    """Per call the bytes that a region right before it may allocate itself, and none are added.

    Where the arena stays in memory as a whole (CUDA), it has the most of what kernels allocate
    beside it all the time. So a region counts where it makes that most larger, and then everywhere:
    late in the backward, when most gradients are there. Elsewhere it counts while it runs.
    """
    ordinary = ordinary_bytes(step.problem)
    if step.problem.releases_pages:
        return (math.inf,) * (len(ordinary.after) + 1)
    most = max(ordinary.most, default=0)
    return [most - before for before in (0, *ordinary.after)]


def quickest(modes: Sequence[ModeCost], costs: StepCosts) -> ModeCost | None:
    """Of the modes that keep least; token-wise mixes do not count. None where there is none."""
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
    """Every recompute set with none, all, or a hideable prefix of the rest offloaded."""
    for recomputed in sets:
        order = [slot for slot in offload_order(cls) if slot not in recomputed]
        prefix, taken = [], 0
        for slot in order:
            if taken + cls.slots[slot].size_bytes <= hideable:
                prefix.append(slot)
                taken += cls.slots[slot].size_bytes
        yield make_mode(cls, recompute=recomputed)
        yield make_mode(cls, recompute=recomputed, offload=prefix)
        yield make_mode(cls, recompute=recomputed, offload=order)


def _filling(step: MovableStep, cls: LayerClass, modes: Sequence[ModeCost]) -> Iterator[Mode]:
    """Modes that keep least and copy little, and of each some that copy one more slot, and another.

    Those slots are copied that save most seconds of recomputation for a byte.
    """
    least = min(mode.kept_bytes for mode in modes)
    for cost in modes:
        if cost.kept_bytes > least or not cost.keys or cost.mode.recompute_rows is not None:
            continue
        mode = cost.mode
        for _ in range(MAX_FILLING):
            changes = [_copying(cls, mode, slot) for slot in mode.slots(Action.RECOMPUTE)]
            gains = [
                ((_again_s(step, cls, mode) - _again_s(step, cls, other)) / size_bytes, other)
                for other, size_bytes in filter(None, changes)
            ]
            gain, mode = max(gains, key=lambda pair: pair[0], default=(0.0, mode))
            if gain <= 0:
                break
            yield mode


def _copying(cls: LayerClass, mode: Mode, slot: int) -> tuple[Mode, int] | None:
    """``mode`` with ``slot`` offloaded, and its bytes; None where it may not be."""
    if not cls.slots[slot].can_offload:
        return None
    actions = (*mode.actions[:slot], Action.OFFLOAD, *mode.actions[slot + 1 :])
    return replace(mode, actions=actions), cls.slots[slot].size_bytes


def _again_s(step: MovableStep, cls: LayerClass, mode: Mode) -> float:
    return sum(recompute_seconds(step, key) for key in recompute_keys(cls, mode))


def _half_copied(cls: LayerClass, modes: Sequence[ModeCost], costs: StepCosts) -> Mode:
    """Of the modes that keep least, the quickest, and half of its copies: to fill the host with."""
    fastest = (quickest(modes, costs) or modes[0]).mode
    copied, taken = [], 0
    moved = fastest.slots(Action.OFFLOAD)
    most = _bytes_of(cls, moved) // 2
    for slot in filter(moved.__contains__, offload_order(cls)):
        if taken + cls.slots[slot].size_bytes <= most:
            copied.append(slot)
            taken += cls.slots[slot].size_bytes
    return make_mode(cls, recompute=fastest.slots(Action.RECOMPUTE), offload=copied)


def _apart_modes(cls: LayerClass, sets: Sequence[frozenset[int]], hideable: int) -> Iterable[Mode]:
    """Larger sets first, everything else offloaded."""
    for recomputed in reversed(sets):
        parts = apart(cls, recomputed, hideable)
        if parts != recomputed:
            yield make_mode(cls, recompute=parts, offload=set(offload_order(cls)) - parts)


def _late_modes(cls: LayerClass, sets: Sequence[frozenset[int]]) -> Iterable[Mode]:
    """Larger sets first, everything else offloaded; of two alike only the first."""
    for recomputed in reversed(sets):
        late = reading_late(cls, recomputed)
        if late and late != recomputed:
            yield make_mode(cls, recompute=late, offload=set(offload_order(cls)) - late)


def reading_late(cls: LayerClass, recomputed: frozenset[int]) -> frozenset[int]:
    """``recomputed`` without slots whose region reads another slot before the backward reads it.

    That one would have to be at hand while the backward is at its peak, though it is only needed
    later: a layer's input, from which what its MLP reads is made again.
    """
    kept = recomputed
    while True:
        early = frozenset().union(*(_reading_early(cls, key) for key in _keys_of(cls, kept)))
        if not early:
            return kept
        kept -= early


def _keys_of(cls: LayerClass, recomputed: frozenset[int]) -> Sequence[RecomputeKey]:
    return recompute_keys(cls, make_mode(cls, recompute=recomputed))


def _reading_early(cls: LayerClass, key: RecomputeKey) -> set[int]:
    """The slots of a region which need that it reads or makes another slot too early.

    First those for whose sake it runs so early; of the others, those that share an operator.
    """
    part, first = key.slots, min(cls.slots[slot].first_read for slot in key.slots)
    small = _small(cls, frozenset(range(len(cls.slots))))
    reads: dict[int, set[int]] = {}
    for slot in part:
        sources = itertools.chain.from_iterable(
            cls.ops[op].inputs for op in closure_of(cls, (slot,), key.passing)
        )
        others = {cls.ops[source].slot for source in sources} - {None, slot, *small, *key.passing}
        reads[slot] = {
            other for other in others if other is not None and cls.slots[other].first_read > first
        }
    early = {slot for slot in part if reads[slot] and cls.slots[slot].first_read == first}
    return early or {slot for slot in part if reads[slot].difference(part)}


def apart(cls: LayerClass, recomputed: frozenset[int], hideable: int = 0) -> frozenset[int]:
    """``recomputed`` without slots that make it exist too early; those are to be offloaded.

    Slots that share an operator are made by one region, when the first of them is read, though the
    backward may read the others much later. Offloading what is made between lets each be made in
    time. What gains as much as it costs is copied up to ``hideable`` bytes in all.
    The set itself is returned where that gains nothing.
    """
    kept = recomputed - _small(cls, recomputed)
    early = _early_bytes(cls, kept)
    while early:
        fewer = [kept - {slot} for slot in sorted(kept) if cls.slots[slot].can_offload]
        gains = [
            (early - _early_bytes(cls, slots) - COPIED * _bytes_of(cls, kept - slots), slots)
            for slots in fewer
        ]
        gain, best = max(gains, key=lambda pair: pair[0], default=(-1, kept))
        hides = _bytes_of(cls, recomputed - best) <= hideable
        if gain < 0 or (gain == 0 and not hides):
            break
        kept, early = best, _early_bytes(cls, best)
    return kept if early < _early_bytes(cls, recomputed) else recomputed


def _small(cls: LayerClass, slots: frozenset[int]) -> frozenset[int]:
    """Those of ``slots`` that it takes no time to copy."""
    most = SMALL * cls.saved_bytes
    return frozenset(
        at for at in slots if cls.slots[at].can_offload and cls.slots[at].size_bytes < most
    )


def _early_bytes(cls: LayerClass, recomputed: frozenset[int]) -> int:
    """Bytes of slots that regions make for another slot that is read earlier.

    What could be made from them later counts too: a copy of what joins it saves its recomputation.
    """
    early_bytes = 0
    for slots in joined_parts(cls, sorted(recomputed)):
        first = min(cls.slots[slot].first_read for slot in slots)
        later = (cls.slots[slot] for slot in slots if cls.slots[slot].first_read > first)
        early_bytes += sum(slot.size_bytes for slot in later)
    return early_bytes


def _bytes_of(cls: LayerClass, slots: Iterable[int]) -> int:
    return sum(cls.slots[slot].size_bytes for slot in slots)


def _mixes(
    cls: LayerClass, sets: Sequence[frozenset[int]], hideable: int, granule: int
) -> list[Mode]:
    """Mixes that offload what they do not recompute: those whose copy just hides, then halves."""
    hidden: list[Mode] = []
    halves: list[Mode] = []
    for recomputed in filter(None, (splittable(cls, whole) for whole in reversed(sets))):
        num_rows = cls.slots[min(recomputed)].num_rows
        rest = [slot for slot in offload_order(cls) if slot not in recomputed]
        rest_bytes = sum(cls.slots[slot].size_bytes for slot in rest)
        mixed_bytes = sum(cls.slots[slot].size_bytes for slot in recomputed)
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
    for mode in dict.fromkeys(modes):
        try:
            yield mode_cost(cls, mode, recompute)
        except UnsupportedGraph:
            continue


def _supported(
    costs: StepCosts, modes: Sequence[ModeCost], hidden_s: tuple[float, float], limit: int
) -> list[ModeCost]:
    """At most ``limit`` modes: SAVE, the smallest, and the cheapest for the most pairs of prices.

    There are two smallest, one of which copies nothing, and the knee. Copies cost their price;
    seconds beyond ``hidden_s``, those of the layer's forward and backward behind which they hide,
    count in full.
    """
    full = max((mode.recompute_s for mode in modes), default=0.0)
    freed = max((modes[0].kept_bytes - mode.kept_bytes for mode in modes if mode.keys), default=0)
    copy_price = 1 / costs.d2h_bytes_per_s + 1 / costs.h2d_bytes_per_s
    keep_price = full / freed if freed and full else copy_price
    fixed_s = [
        mode.recompute_s
        + max(0.0, mode.d2h_s(costs) - hidden_s[0], mode.h2d_s(costs) - hidden_s[1])
        for mode in modes
    ]
    numbers, wins = range(len(modes)), [0] * len(modes)
    for kept, copied in itertools.product(PRICES, PRICES):
        score = [
            fixed + kept * keep_price * mode.kept_bytes + copied * copy_price * mode.host_bytes
            for fixed, mode in zip(fixed_s, modes, strict=True)
        ]
        wins[min(numbers, key=score.__getitem__)] += 1
    smallest = min(numbers, key=lambda at: modes[at].kept_bytes)
    bare = (at for at in numbers if not modes[at].host_bytes)  # for a host that is full
    always = 0, smallest, min(bare, key=lambda at: modes[at].kept_bytes), *_knee(modes)
    ranked = sorted(numbers, key=lambda at: (at not in always, -wins[at]))
    picked = [at for at in ranked if at in always or wins[at]]
    return [modes[at] for at in sorted(picked[:limit])]


def _knee(modes: Sequence[ModeCost]) -> list[int]:
    """Of the modes that keep least the one beyond which copying less costs most; or none.

    Beyond it attention is made again. On a slow link some layers take it and others copy less.
    """
    least = min(mode.kept_bytes for mode in modes)
    numbers = (at for at, mode in enumerate(modes) if mode.kept_bytes == least)
    hull = lower_hull(sorted((-modes[at].host_bytes, modes[at].recompute_s, at) for at in numbers))
    bends = [(triangle(*hull[at - 1 : at + 2]), hull[at][2]) for at in range(1, len(hull) - 1)]
    return [at for _, at in sorted(bends)[-1:]]
