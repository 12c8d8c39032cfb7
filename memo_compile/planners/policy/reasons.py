"""Why each slot moves or stays: one sentence from the numbers of its class.

It is written after the choice, which compares seconds and peaks of whole steps (``frontier.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from memo_compile.planners.move_rules import facts_of, recomputable, slots_s
from memo_compile.step.movable import Action, Layer, LayerClass, Mode, MovableStep, Moves, Schedule
from memo_compile.units import format_bytes, format_seconds


def reasons(step: MovableStep, moves: Moves) -> Mapping[tuple[str, int, Mode], str]:
    """(class key, slot, mode) -> why layers of that mode do what they do with the slot."""
    texts = {}
    facts = facts_of(step)
    for class_key in dict.fromkeys(layer.class_key for layer in step.layers):
        layers = [at for at, layer in enumerate(step.layers) if layer.class_key == class_key]
        runs_next = min(layers[0] + 1, len(step.layers) - 1)
        weighed = _Weighed(
            cls=step.classes[class_key],
            layer=step.layers[layers[0]],
            modes=[moves.modes[at] for at in layers],
            step=step,
            forward_s=facts.forward_s[runs_next],
            schedule=moves.schedule,
        )
        for mode in dict.fromkeys(weighed.modes):
            for slot in range(len(weighed.cls.slots)):
                texts[class_key, slot, mode] = weighed.reason(slot, mode)
    return texts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weighed:
    """One class with the modes of its layers and what its copies can hide behind."""

    cls: LayerClass
    layer: Layer
    modes: list[Mode]
    """Those of all layers of the class."""
    step: MovableStep
    forward_s: float
    """Seconds of the next layer's forward, behind which copies of ``layer`` hide."""
    schedule: Schedule

    def reason(self, slot: int, mode: Mode) -> str:
        """The sentence for ``slot`` in layers of ``mode``."""
        action, total = mode.actions[slot], len(self.modes)
        count = sum(other.actions[slot] is action for other in self.modes)
        where = "" if count == total else f"in {count} of {total} layers: "
        if self.cls.slots[slot].pinned is action:
            return f"{where}pinned: by a policy_rule, or by the model's checkpoint policy"
        if action is Action.SAVE:
            return where + self._kept(slot, moves_elsewhere=count != total)
        if action is Action.OFFLOAD:
            return where + self._offloaded(slot, mode)
        return where + self._recomputed(slot, mode)

    def _recompute_s(self, slot: int) -> float:
        """Seconds to recompute the slot alone."""
        return slots_s(self.cls, (slot,))

    def _copy_s(self, slot: int) -> float:
        return self.step.costs.d2h_s(self.cls.slots[slot].size_bytes)

    def _layer_copy_s(self, mode: Mode) -> float:
        """Seconds of all copies of a layer to the host."""
        total = sum(self._copy_s(slot) for slot in mode.slots(Action.OFFLOAD))
        if mode.recompute_rows is not None:
            for slot in mode.slots(Action.RECOMPUTE):
                share = 1 - mode.recompute_rows / self.cls.slots[slot].num_rows
                total += share * self._copy_s(slot)
        return total

    def _can_recompute(self, slot: int) -> bool:
        return recomputable(self.step, self.layer, slot)

    def _kept(self, slot: int, *, moves_elsewhere: bool) -> str:
        """What keeping ``slot`` saves, or why it must be kept."""
        tensor = self.cls.slots[slot]
        if not tensor.can_offload and not self._can_recompute(slot):
            return "cannot be moved: it can be neither copied nor recomputed in its layer"
        if all(set(mode.actions) == {Action.SAVE} for mode in self.modes):
            return "nothing of these layers needs to move"
        options = []
        if self._can_recompute(slot):
            options.append(f"recomputing it costs {format_seconds(self._recompute_s(slot))}")
        if tensor.can_offload:
            options.append(f"its copy takes {format_seconds(self._copy_s(slot))}")
        costs = " and ".join(options)
        if moves_elsewhere:
            return f"kept here, so that less moves: {costs}"
        return f"kept: the plan fits without freeing its {format_bytes(tensor.size_bytes)}; {costs}"

    def _offloaded(self, slot: int, mode: Mode) -> str:
        """Behind what the copy of ``slot`` hides, and what recomputing it would cost."""
        copies_s, window_s = self._layer_copy_s(mode), self.forward_s
        copy = format_seconds(self._copy_s(slot))
        if not self.schedule.layers and not self.schedule.widen:
            hides = f"its copy takes {copy} and ends before the next layer begins, for a small peak"
        elif copies_s <= window_s:
            hides = (
                f"its copy {copy} hides: the layer's copies take {format_seconds(copies_s)}, the "
                f"next layer's forward {format_seconds(window_s)}"
            )
        else:
            hides = (
                f"its copy takes {copy}; the layer's copies together, {format_seconds(copies_s)}, "
                f"are longer than the next layer's forward, {format_seconds(window_s)}"
            )
        if not self._can_recompute(slot):
            return f"{hides}; it cannot be recomputed in its layer"
        return f"{hides}; recomputing it costs {format_seconds(self._recompute_s(slot))}"

    def _recomputed(self, slot: int, mode: Mode) -> str:
        """What recomputing ``slot`` costs, and why it is not copied."""
        copy_s, tensor = self._copy_s(slot), self.cls.slots[slot]
        copy = format_seconds(copy_s)
        if mode.recompute_rows is not None:
            rows = f"rows 0 to {mode.recompute_rows} of {tensor.num_rows} are recomputed"
            copies = format_seconds(self._layer_copy_s(mode))
            return (
                f"{rows}, the rest is offloaded: the layer's copies take {copies} of the "
                f"{format_seconds(self.forward_s)} of the next layer's forward"
            )
        price = f"recompute costs {format_seconds(self._recompute_s(slot))}"
        if not tensor.can_offload:
            return f"{price}; it cannot be copied to the host"
        copies_s = self._layer_copy_s(mode) + copy_s
        if copies_s <= self.forward_s:
            return f"{price}; copying it would take {copy} each way, and host memory"
        return (
            f"{price}, its copy {copy} does not hide behind the next layer "
            f"({format_seconds(copies_s)} of copies in {format_seconds(self.forward_s)})"
        )
