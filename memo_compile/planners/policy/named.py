"""The papers' policies by name: what each does to this step, to compare with or to choose.

    save            everything stays.
    full-recompute  what can be recomputed from the layer's input and its other slots is; inputs
                    stay.
    full-offload    everything is copied to the host, from every layer.
    memo            MEMO's token-wise mix (arXiv 2407.12117, section 4.1): the layer's input and
                    what attention returns are copied; of the other slots' rows the part alpha is
                    copied and the rest recomputed; the last two layers stay; two rotating buffers.
    kwai            of every microbatch of a pipeline the share alpha of what may move is copied to
                    the host, the largest first (``shares``). Of a step by itself the same share.

A slot that cannot do what its policy wants stays, and a note says so.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from memo_compile.errors import ConfigError, UnsupportedGraph
from memo_compile.planners.move_rules import RecomputeOf, facts_of, recompute_keys
from memo_compile.planners.policy.modes import (
    SMALL,
    Rights,
    apart,
    layer_rights,
    make_mode,
    splittable,
)
from memo_compile.planners.policy.shares import shared_slots
from memo_compile.step.movable import Action, LayerClass, Mode, MovableStep, Moves, Schedule
from memo_compile.step.problem import align

QUANTA = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""MEMO's alpha is rounded down to one of these, so that row splits stay multiples of 128 tokens."""

ROTATING = Schedule(layers=1)
"""A copy may last one more layer, which is what MEMO's two rotating buffers allow."""

AT_ONCE = Schedule(layers=0)

KEPT_LAYERS = 2
"""Layers at the end that policy ``memo`` leaves alone, because their backward comes first."""

ModeOf = Callable[[LayerClass, Rights], Mode]
"""The mode that a policy gives a layer of a class, which has these rights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPlan:
    """The decisions of a named policy, and what it could not do."""

    moves: Moves
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A step, and what a named policy is asked about it."""

    step: MovableStep
    recompute: RecomputeOf
    alpha: float | None = None
    host_budget_bytes: int | None = None
    exact: bool = False


def named_moves(
    step: MovableStep,
    policy: str,
    recompute: RecomputeOf,
    *,
    alpha: float | None = None,
    host_budget_bytes: int | None = None,
    exact: bool = False,
) -> NamedPlan:
    """The decisions of ``policy``; ``alpha`` is for ``memo``, None means MEMO's own program.

    For ``kwai`` it is the share of every member, None means those of the step, else everything.
    Raises ConfigError: the policy is unknown, or alpha is not one of MEMO's.
    """
    if policy not in _POLICIES:
        raise ConfigError(f"policy: expected one of {', '.join(NAMED)}, got {policy!r}")
    return _POLICIES[policy](
        Asked(
            step=step,
            recompute=recompute,
            alpha=alpha,
            host_budget_bytes=host_budget_bytes,
            exact=exact,
        )
    )


def save(asked: Asked) -> NamedPlan:
    """Everything stays."""
    return NamedPlan(moves=asked.step.save_all())


def full_recompute(asked: Asked) -> NamedPlan:
    """What can be recomputed from the layer's input and its other slots is."""
    return _per_layer(asked.step, "full-recompute", Schedule(), asked.recompute, _all_recomputed)


def full_offload(asked: Asked) -> NamedPlan:
    """Everything goes to the host."""
    return _per_layer(asked.step, "full-offload", ROTATING, asked.recompute, _all_offloaded)


def memo(asked: Asked) -> NamedPlan:
    """MEMO's token-wise mix of layers that repeat, but for the last two."""
    step, alpha = asked.step, asked.alpha
    if alpha is None:
        alpha = memo_alpha(step, host_budget_bytes=asked.host_budget_bytes)
    elif alpha not in QUANTA:
        raise ConfigError(f"alpha: expected one of {QUANTA}, got {alpha!r}")
    notes: tuple[str, ...] = ()
    if asked.exact and 0 < alpha < 1:
        notes = (f"policy memo: exact=True forbids alpha {alpha}: all tokens are recomputed",)
        alpha = 0.0
    mode_of = functools.partial(_memo, alpha=alpha, granule=step.token_granule)
    repeating = repeating_layers(step)
    only = repeating[:-KEPT_LAYERS]
    plan = _per_layer(step, "memo", ROTATING, asked.recompute, mode_of, only=only)
    return replace(plan, notes=(*notes, *plan.notes, *_kept_by_memo(step, repeating)))


def kwai(asked: Asked) -> NamedPlan:
    """Of each microbatch a share; a copy may last until the next layer of it has run."""
    step, alpha = asked.step, asked.alpha
    count = 1 + max((call.member for call in step.problem.calls), default=0)
    shares = step.shares if alpha is None and step.shares else (1.0 if alpha is None else alpha,)
    shares = shares if len(shares) == count else shares[:1] * count
    slots = shared_slots(step, layer_rights(step), shares)
    modes = tuple(
        make_mode(step.class_of(layer), offload=shared)
        for layer, shared in zip(step.layers, slots, strict=True)
    )
    return NamedPlan(moves=Moves(modes=modes, schedule=ROTATING, policy="kwai"))


_POLICIES: Mapping[str, Callable[[Asked], NamedPlan]] = {
    "save": save,
    "full-recompute": full_recompute,
    "full-offload": full_offload,
    "memo": memo,
    "kwai": kwai,
}
NAMED = tuple(_POLICIES)
"""Policies that are one plan, or for ``memo`` and ``kwai`` one plan for each alpha."""


def steady_moves(step: MovableStep, recompute: RecomputeOf) -> list[Moves]:
    """Slow plans of few bytes that are the same however long regions and copies take.

    One of these keeps in the next process a floor that is named in this one. They copy everything
    to the host, or recompute what they can, with or without what attention returns, and with or
    without what has to be copied so that nothing is made long before it is read.
    """
    modes_of: tuple[ModeOf, ...] = (
        _all_offloaded,
        lambda cls, may: _recomputed_first(cls, may, may.recompute),
        lambda cls, may: _recomputed_first(cls, may, _others(cls, may)),
        lambda cls, may: _recomputed_first(cls, may, _apart(cls, may, may.recompute)),
        lambda cls, may: _recomputed_first(cls, may, _apart(cls, may, _others(cls, may))),
    )
    made = (_per_layer(step, "steady", AT_ONCE, recompute, mode_of) for mode_of in modes_of)
    return list(dict.fromkeys(plan.moves for plan in made))


def _kept_by_memo(step: MovableStep, repeating: list[int]) -> Iterator[str]:
    """What policy ``memo`` leaves alone beyond the last two of many layers, as notes."""
    alone = {step.layers[at].class_key for at in set(range(len(step.layers))) - set(repeating)}
    for key in sorted(alone):
        yield f"{key}: is kept, policy memo moves layers that repeat"
    if len(repeating) <= KEPT_LAYERS:
        yield f"nothing moves: of {len(repeating)} layers policy memo keeps the last {KEPT_LAYERS}"


def _per_layer(
    step: MovableStep,
    policy: str,
    schedule: Schedule,
    recompute: RecomputeOf,
    mode_of: ModeOf,
    *,
    only: Iterable[int] | None = None,
) -> NamedPlan:
    """Every layer's mode and the notes; layers that are not among ``only`` save everything."""
    moved = set(range(len(step.layers)) if only is None else only)
    modes: list[Mode] = []
    notes: dict[str, None] = {}
    for index, (layer, rights) in enumerate(zip(step.layers, layer_rights(step), strict=True)):
        cls = step.class_of(layer)
        if index not in moved:
            modes.append(make_mode(cls))
            continue
        mode = _with_region(cls, mode_of(cls, rights), recompute, notes)
        modes.append(mode)
        # Slots that a mix copies whole although the policy would recompute some of their rows.
        whole = _others(cls, rights).intersection(mode.slots(Action.OFFLOAD))
        for slot in sorted(whole) if mode.recompute_rows is not None else ():
            notes[f"{cls.key}: {cls.slots[slot].name} is copied whole, its rows lie apart"] = None
        for slot in mode.slots(Action.SAVE):
            if policy == "full-recompute" and cls.slots[slot].is_input:
                continue  # the policy itself keeps it
            notes[f"{cls.key}: {cls.slots[slot].name} is kept, it cannot be moved"] = None
    moves = Moves(modes=tuple(modes), schedule=schedule, policy=policy)
    return NamedPlan(moves=moves, notes=tuple(notes))


def _with_region(
    cls: LayerClass, mode: Mode, recompute: RecomputeOf, notes: dict[str, None]
) -> Mode:
    """``mode``, or without its recomputation where there is no region for it."""
    try:
        for key in recompute_keys(cls, mode):
            recompute(key)
    except UnsupportedGraph as error:
        notes[f"{cls.key}: nothing is recomputed: {error}"] = None
        actions = tuple(Action.SAVE if a is Action.RECOMPUTE else a for a in mode.actions)
        return replace(mode, actions=actions, recompute_rows=None)
    return mode


def repeating_layers(step: MovableStep) -> list[int]:
    """Indices of layers whose class has more than one layer; all layers where no class has."""
    count = Counter(layer.class_key for layer in step.layers)
    repeating = [i for i, layer in enumerate(step.layers) if count[layer.class_key] > 1]
    return repeating or list(range(len(step.layers)))


def _all_offloaded(cls: LayerClass, rights: Rights) -> Mode:
    return make_mode(cls, offload=rights.offload)


def _recomputed_first(cls: LayerClass, rights: Rights, recompute: frozenset[int]) -> Mode:
    """``recompute`` recomputed and the rest offloaded, as is what is too small to be made anew."""
    small = {
        slot
        for slot in recompute & rights.offload
        if cls.slots[slot].size_bytes < SMALL * cls.saved_bytes
    }
    return make_mode(cls, offload=rights.offload, recompute=recompute - small)


def _apart(cls: LayerClass, rights: Rights, recompute: frozenset[int]) -> frozenset[int]:
    """``recompute`` without what makes it exist too early, where the layer may copy that."""
    fewer = apart(cls, recompute)
    return fewer if recompute - fewer <= rights.offload else recompute


def _all_recomputed(cls: LayerClass, rights: Rights) -> Mode:
    return make_mode(cls, recompute=rights.recompute)


def _memo(cls: LayerClass, rights: Rights, alpha: float, granule: int) -> Mode:
    """Inputs and attention offloaded, ``alpha`` of the others' rows too, the rest recomputed."""
    others = _others(cls, rights)
    if alpha == 1 or not others:
        return make_mode(cls, offload=rights.offload)
    split = splittable(cls, others & rights.offload)
    num_rows = max((cls.slots[slot].num_rows for slot in split), default=0)
    rows = math.ceil(num_rows * (1 - alpha) / granule) * granule
    if rows >= num_rows:  # all of them, or no slot can be split
        return make_mode(cls, offload=rights.offload - others, recompute=others)
    return make_mode(cls, offload=rights.offload - split, recompute=split, rows=rows)


def _others(cls: LayerClass, rights: Rights) -> frozenset[int]:
    """Slots that are recomputed, wholly or in part: MEMO's 14 bsh."""
    attention = (slot for slot in rights.offload if cls.slots[slot].is_attention)
    return rights.recompute.difference(attention)


def memo_alpha(step: MovableStep, *, host_budget_bytes: int | None) -> float:
    """MEMO's alpha for this step: the largest quantum within both bounds.

        alpha_bw   = (T B - S_always) / S_others    a layer's copy hides behind the next forward
        alpha_host = (M / (n - 2) - S_always) / S_others    all copies fit the host

    T, S: forward seconds and slot bytes of the class with the most bytes; n: its layers; B:
    device-to-host bytes/s; M: the host budget.
    """
    moved = repeating_layers(step)[:-KEPT_LAYERS]
    if not moved:
        return 1.0
    by_class: dict[str, list[int]] = {}
    for index in moved:
        by_class.setdefault(step.layers[index].class_key, []).append(index)
    key, layers = max(
        by_class.items(), key=lambda item: len(item[1]) * step.classes[item[0]].saved_bytes
    )
    cls, rights = step.classes[key], layer_rights(step)[layers[-1]]
    others = _others(cls, rights)
    others_bytes = sum(align(cls.slots[slot].size_bytes) for slot in others)
    if not others_bytes:
        return 1.0
    always_bytes = sum(align(cls.slots[slot].size_bytes) for slot in rights.offload - others)
    facts = facts_of(step)
    forward_s = facts.forward_s[layers[-1]]
    bounds = [(forward_s * step.costs.d2h_bytes_per_s - always_bytes) / others_bytes]
    if host_budget_bytes is not None:
        bounds.append((host_budget_bytes / len(moved) - always_bytes) / others_bytes)
    return quantise(max(0.0, min(1.0, *bounds)))


def quantise(alpha: float) -> float:
    """``alpha`` rounded down to one of QUANTA."""
    return max(quantum for quantum in QUANTA if quantum <= alpha + 1e-12)
