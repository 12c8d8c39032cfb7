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
    Rights,
    apart,
    layer_rights,
    make_mode,
    small_slots,
    splittable,
)
from memo_compile.planners.policy.shares import shared_slots
from memo_compile.step.movable import Action, LayerClass, Mode, MovableStep, Moves, Schedule
from memo_compile.step.problem import align

QUANTA = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""MEMO's alpha is rounded down to one of these, so that row splits stay multiples of 128 tokens."""

ROTATING_BUFFERS = Schedule(layers=1)
"""A copy may last one more layer, which is what MEMO's two rotating buffers allow."""

COPIES_AT_ONCE = Schedule(layers=0)
"""Computation waits for each copy."""

KEPT_LAYERS = 2
"""Layers at the end that policy ``memo`` leaves alone, because their backward comes first."""

ModeOf = Callable[[LayerClass, Rights], Mode]
"""The mode that a policy gives a layer of a class, which has these rights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPlan:
    """The decisions of a named policy, and what it could not do."""

    moves: Moves
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """A step, and the options by which a named policy decides it."""

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
    """The decisions of ``policy``, one of ``NAMED``.

    Without ``alpha`` ``memo`` takes ``memo_alpha``; ``kwai``, for which it is the share of every
    member, takes the shares of the step, or everything. Raises ConfigError: the policy is unknown,
    or alpha is none of ``QUANTA``.
    """
    if policy not in _POLICIES:
        raise ConfigError(f"policy: expected one of {', '.join(NAMED)}, got {policy!r}")
    return _POLICIES[policy](PolicyRequest(step, recompute, alpha, host_budget_bytes, exact))


def save(request: PolicyRequest) -> NamedPlan:
    """Everything stays."""
    return NamedPlan(moves=request.step.save_all())


def full_recompute(request: PolicyRequest) -> NamedPlan:
    """What can be recomputed from the layer's input and its other slots is."""
    return _plan_per_layer(request, "full-recompute", Schedule(), _recompute_all)


def full_offload(request: PolicyRequest) -> NamedPlan:
    """Everything goes to the host."""
    return _plan_per_layer(request, "full-offload", ROTATING_BUFFERS, _offload_all)


def memo(request: PolicyRequest) -> NamedPlan:
    """MEMO's token-wise mix, of all layers that repeat but the last two."""
    step, alpha = request.step, request.alpha
    if alpha is None:
        alpha = memo_alpha(step, host_budget_bytes=request.host_budget_bytes)
    elif alpha not in QUANTA:
        raise ConfigError(f"alpha: expected one of {QUANTA}, got {alpha!r}")
    notes: tuple[str, ...] = ()
    if request.exact and 0 < alpha < 1:
        notes = (f"policy memo: exact=True forbids alpha {alpha}: all tokens are recomputed",)
        alpha = 0.0
    mode_of = functools.partial(_memo_mode, alpha=alpha, granule=step.token_granule)
    repeating = repeating_layers(step)
    moved = repeating[:-KEPT_LAYERS]
    plan = _plan_per_layer(request, "memo", ROTATING_BUFFERS, mode_of, only=moved)
    return replace(plan, notes=(*notes, *plan.notes, *_kept_by_memo(step, repeating)))


def kwai(request: PolicyRequest) -> NamedPlan:
    """A share of what each microbatch saves goes to the host (``shares``).

    ``alpha`` is that share of all; without it those that the user has declared, else everything.
    """
    step, alpha = request.step, request.alpha
    num_members = 1 + max((call.member for call in step.problem.calls), default=0)
    shares = (step.shares or (1.0,)) if alpha is None else (alpha,)
    if len(shares) != num_members:  # a step by itself: one share for all
        shares = shares[:1] * num_members
    slots = shared_slots(step, layer_rights(step), shares)
    modes = tuple(
        make_mode(step.class_of(layer), offload=shared)
        for layer, shared in zip(step.layers, slots, strict=True)
    )
    return NamedPlan(moves=Moves(modes=modes, schedule=ROTATING_BUFFERS, policy="kwai"))


_POLICIES: Mapping[str, Callable[[PolicyRequest], NamedPlan]] = {
    "save": save,
    "full-recompute": full_recompute,
    "full-offload": full_offload,
    "memo": memo,
    "kwai": kwai,
}
NAMED = tuple(_POLICIES)
"""Policies that are one plan, or for ``memo`` and ``kwai`` one plan for each alpha."""


def steady_moves(step: MovableStep, recompute: RecomputeOf) -> list[Moves]:
    """Five plans of few bytes, slow, whose moves depend on no measured second.

    So the floor that an error names is kept in the next process too. One copies everything; two
    recompute: all that can be, or all but attention's results; two more do the same but copy what
    would have to be made long before it is read.
    """
    recomputed_sets: tuple[Callable[[LayerClass, Rights], frozenset[int]], ...] = (
        lambda _, rights: rights.recompute,
        _all_but_attention,
        lambda cls, rights: _apart_slots(cls, rights, rights.recompute),
        lambda cls, rights: _apart_slots(cls, rights, _all_but_attention(cls, rights)),
    )
    recomputing = [
        functools.partial(_recompute_or_offload, slots_of) for slots_of in recomputed_sets
    ]
    modes_of: tuple[ModeOf, ...] = (_offload_all, *recomputing)
    request = PolicyRequest(step, recompute)
    plans = (_plan_per_layer(request, "steady", COPIES_AT_ONCE, mode_of) for mode_of in modes_of)
    return list(dict.fromkeys(plan.moves for plan in plans))


def _kept_by_memo(step: MovableStep, repeating: list[int]) -> Iterator[str]:
    """Notes on what policy ``memo`` leaves alone, beside the last two of many layers."""
    alone = {step.layers[at].class_key for at in set(range(len(step.layers))) - set(repeating)}
    for key in sorted(alone):
        yield f"{key}: is kept, policy memo moves layers that repeat"
    if len(repeating) <= KEPT_LAYERS:
        yield f"nothing moves: of {len(repeating)} layers policy memo keeps the last {KEPT_LAYERS}"


def _plan_per_layer(
    request: PolicyRequest,
    policy: str,
    schedule: Schedule,
    mode_of: ModeOf,
    *,
    only: Iterable[int] | None = None,
) -> NamedPlan:
    """The plan in which ``mode_of`` decides each layer of ``only``; the others save everything."""
    step = request.step
    decided = set(range(len(step.layers)) if only is None else only)
    modes: list[Mode] = []
    notes: dict[str, None] = {}
    for index, (layer, rights) in enumerate(zip(step.layers, layer_rights(step), strict=True)):
        cls = step.class_of(layer)
        if index not in decided:
            modes.append(make_mode(cls))
            continue
        mode = _with_regions(cls, mode_of(cls, rights), request.recompute, notes)
        modes.append(mode)
        # Slots that a mix copies whole although the policy would recompute some of their rows.
        whole = _all_but_attention(cls, rights).intersection(mode.slots(Action.OFFLOAD))
        for slot in sorted(whole) if mode.recompute_rows is not None else ():
            notes[f"{cls.key}: {cls.slots[slot].name} is copied whole, its rows lie apart"] = None
        for slot in mode.slots(Action.SAVE):
            if policy == "full-recompute" and cls.slots[slot].is_input:
                continue  # the policy itself keeps it
            notes[f"{cls.key}: {cls.slots[slot].name} is kept, it cannot be moved"] = None
    moves = Moves(modes=tuple(modes), schedule=schedule, policy=policy)
    return NamedPlan(moves=moves, notes=tuple(notes))


def _with_regions(
    cls: LayerClass, mode: Mode, recompute: RecomputeOf, notes: dict[str, None]
) -> Mode:
    """``mode``; without a region for it, it saves what it would recompute, and a note says so."""
    try:
        for key in recompute_keys(cls, mode):
            recompute(key)
    except UnsupportedGraph as error:
        notes[f"{cls.key}: nothing is recomputed: {error}"] = None
        actions = (Action.SAVE if action is Action.RECOMPUTE else action for action in mode.actions)
        return replace(mode, actions=tuple(actions), recompute_rows=None)
    return mode


def repeating_layers(step: MovableStep) -> list[int]:
    """Indices of layers whose class has more than one layer; all layers where no class has."""
    count = Counter(layer.class_key for layer in step.layers)
    repeating = [at for at, layer in enumerate(step.layers) if count[layer.class_key] > 1]
    return repeating or list(range(len(step.layers)))


def _offload_all(cls: LayerClass, rights: Rights) -> Mode:
    return make_mode(cls, offload=rights.offload)


def _recompute_or_offload(
    slots_of: Callable[[LayerClass, Rights], frozenset[int]], cls: LayerClass, rights: Rights
) -> Mode:
    """The mode that recomputes what ``slots_of`` gives, small slots aside, and copies the rest."""
    recomputed = slots_of(cls, rights)
    small = small_slots(cls, recomputed & rights.offload)
    return make_mode(cls, offload=rights.offload, recompute=recomputed - small)


def _apart_slots(cls: LayerClass, rights: Rights, recompute: frozenset[int]) -> frozenset[int]:
    """``apart`` of ``recompute``; all of it where the layer may not copy what that leaves out."""
    fewer = apart(cls, recompute)
    return fewer if recompute - fewer <= rights.offload else recompute


def _recompute_all(cls: LayerClass, rights: Rights) -> Mode:
    return make_mode(cls, recompute=rights.recompute)


def _memo_mode(cls: LayerClass, rights: Rights, alpha: float, granule: int) -> Mode:
    """MEMO's mode: inputs and attention are copied, and of the other slots the last rows.

    That is the part ``alpha`` of their rows; the first rows, a multiple of ``granule``, are
    recomputed. Slots whose rows cannot be split are copied whole.
    """
    others = _all_but_attention(cls, rights)
    if alpha == 1 or not others:
        return make_mode(cls, offload=rights.offload)
    split = splittable(cls, others & rights.offload)
    num_rows = max((cls.slots[slot].num_rows for slot in split), default=0)
    rows = math.ceil(num_rows * (1 - alpha) / granule) * granule
    if rows >= num_rows:  # all rows, or no slot can be split
        return make_mode(cls, offload=rights.offload - others, recompute=others)
    return make_mode(cls, offload=rights.offload - split, recompute=split, rows=rows)


def _all_but_attention(cls: LayerClass, rights: Rights) -> frozenset[int]:
    """What policy ``memo`` recomputes, wholly or in part: 14 bsh in MEMO's layer."""
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
    others = _all_but_attention(cls, rights)
    others_bytes = sum(align(cls.slots[slot].size_bytes) for slot in others)
    if not others_bytes:
        return 1.0
    always_bytes = sum(align(cls.slots[slot].size_bytes) for slot in rights.offload - others)
    forward_s = facts_of(step).forward_s[layers[-1]]
    bounds = [(forward_s * step.costs.d2h_bytes_per_s - always_bytes) / others_bytes]
    if host_budget_bytes is not None:
        bounds.append((host_budget_bytes / len(moved) - always_bytes) / others_bytes)
    return quantise(max(0.0, min(1.0, *bounds)))


def quantise(alpha: float) -> float:
    """``alpha`` rounded down to one of QUANTA."""
    return max(quantum for quantum in QUANTA if quantum <= alpha + 1e-12)
