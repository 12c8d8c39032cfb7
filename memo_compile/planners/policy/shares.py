"""Kwai's amounts: of every microbatch the same share of what it saves goes to the host.

Source: Kwai (USENIX ATC 24), section 3. Of a microbatch's saved activations the largest go first,
above a share of one half the smallest, until the share is reached. The last is copied whole, where
Kwai cuts it; tensors below 1 MiB, which Kwai keeps, are like all others here.
"""

from collections.abc import Sequence

from memo_compile.planners.policy.modes import Rights
from memo_compile.step.movable import MovableStep
from memo_compile.step.problem import align

HALF_SHARE = 0.5
"""Up to this share the largest slots go first; above it the smallest, so that the largest stay."""


def shared_slots(
    step: MovableStep, rights: Sequence[Rights], shares: Sequence[float]
) -> list[frozenset[int]]:
    """Per layer the slots that go to the host; ``shares`` are those of the members, in [0, 1].

    A share is of the bytes that may move at all, and is rounded up to whole slots.
    """
    member_of = {call.name: call.member for call in step.problem.calls}
    movable_of: dict[int, list[tuple[int, int, int]]] = {}
    for at, (layer, layer_rights) in enumerate(zip(step.layers, rights, strict=True)):
        slots = step.class_of(layer).slots
        movable = sorted(layer_rights.offload)
        sizes = [(align(slots[slot].size_bytes), at, slot) for slot in movable]
        movable_of.setdefault(member_of[layer.forward], []).extend(sizes)
    chosen: list[set[int]] = [set() for _ in step.layers]
    for member, slots_of_member in movable_of.items():
        share = shares[member]
        left_bytes = share * sum(size for size, _, _ in slots_of_member)
        sign = 1 if share > HALF_SHARE else -1  # the smallest first, or the largest
        for size, at, slot in sorted(slots_of_member, key=lambda row: (sign * row[0], *row[1:])):
            if left_bytes <= 0:
                break
            chosen[at].add(slot)
            left_bytes -= size
    return [frozenset(slots) for slots in chosen]
