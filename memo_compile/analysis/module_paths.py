"""Where in the module tree a node came from, as far as Dynamo says."""

import re
from collections import Counter
from collections.abc import Sequence

from torch import fx

_STEP = re.compile(r"\['?\"?([^'\"\]]+)'?\"?\]|\.?([A-Za-z_]\w*|\d+)")
"""One attribute or index of a path such as ``layers._modules['0'].mlp`` or ``layers.0.mlp``."""

_MIN_NODES_SHARE = 0.1
"""A layer owns this share of a unit's named nodes; less is a rotation that reaches over."""

Place = tuple[str, int]


class LayerPaths:
    """The numbered modules around each node of a sequence."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        cache: dict[str, tuple[Place, ...]] = {}
        self._places = [_places(node, cache) for node in nodes]

    def begins_layer(self, position: int) -> bool:
        """True when the outermost module index around ``position`` differs from the one before.

        Nodes without module names (residual additions of a loop body) count to neither side.
        """
        if not 0 < position < len(self._places):
            return False
        here, before = self._places[position], self._places[position - 1]
        return bool(here) and here[:1] != before[:1]

    def place(self, members: Sequence[tuple[int, int]]) -> tuple[str | None, int]:
        """Path of the module list that holds the units of a class, and layers per unit."""
        owners = [self._owners(*where) for where in members]
        prefixes = sorted({prefix for owner in owners for prefix, _ in owner}, key=len)
        for prefix in prefixes:
            layers = [{index for path, index in owner if path == prefix} for owner in owners]
            if all(layers) and len(set.union(*layers)) >= len(members):
                return prefix.partition(".")[2] or prefix, max(
                    1, len(set.union(*layers)) // len(members)
                )
        return None, 1

    def _owners(self, start: int, end: int) -> set[Place]:
        """Module list entries that own a fair share of the range's named nodes."""
        counts = Counter(place for places in self._places[start:end] for place in places)
        named = sum(bool(places) for places in self._places[start:end])
        return {place for place, count in counts.items() if count >= _MIN_NODES_SHARE * named}


def _places(node: fx.Node, cache: dict[str, tuple[Place, ...]]) -> tuple[Place, ...]:
    """(path of the list, index) for each numbered module around ``node``, outermost first.

    The path starts with the local variable that held the model: two models stay apart.
    """
    stack = node.meta.get("nn_module_stack") or {}
    path = next((value[0] for value in reversed(stack.values())), "")
    if path not in cache:
        cache[path] = _parse(path)
    return cache[path]


def _parse(path: str) -> tuple[Place, ...]:
    steps = [bracketed or plain for bracketed, plain in _STEP.findall(path)]
    steps = [step for step in steps if step != "_modules"]
    if steps[:1] in (["L"], ["G"]):
        steps = steps[1:]
    return tuple(
        (".".join(steps[:index]), int(step)) for index, step in enumerate(steps) if step.isdigit()
    )
