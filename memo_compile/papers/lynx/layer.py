"""A layer's operators with the lengths of its windows, as the split over stages needs them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memo_compile.papers.layer_costs import BACKWARD_FACTOR
from memo_compile.papers.lynx import fields
from memo_compile.papers.lynx.fields import Number
from memo_compile.papers.lynx.lynx_instance import HeuInstance, Operators


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """One layer's operators with the lengths of its windows."""

    ops: Operators
    need: tuple[bool, ...]
    """Outputs that the layer's backward reads."""
    windows: tuple[Number, ...]
    """Lengths of the windows 1..4."""
    backward_s: Number
    """Time of the layer's backward without recomputation, communication included."""

    @property
    def forward_s(self) -> Number:
        """Time of the layer's forward, communication included."""
        return sum(self.ops.times)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "LayerCosts":
        """The layer that ``data`` describes: a HEU instance without stage, with backward_time.

        Without ``backward_time`` the backward takes twice the compute and the communication again.

        Raises:
            InputError: a field is missing or cannot be used; it is named.
        """
        stage = {"nl": 1, "nb": 1, "budget": 0}
        layer = {k: v for k, v in data.items() if k != "backward_time"}
        instance = HeuInstance.from_json({**layer, **stage})
        return LayerCosts(
            ops=instance.ops,
            need=instance.need,
            windows=instance.windows,
            backward_s=fields.number(data, "backward_time", backward_seconds(instance.ops)),
        )


def backward_seconds(ops: Operators) -> Number:
    """Backward of a layer whose compute takes twice as long and which communicates as often."""
    compute = sum(time for i, time in enumerate(ops.times) if i not in ops.comm)
    return BACKWARD_FACTOR * compute + sum(ops.times[i] for i in ops.comm)
