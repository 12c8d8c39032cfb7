"""Which nodes of a joint graph are tagged as kept for the backward; ``passes.equal_cut`` tags."""

from collections.abc import Collection

from torch import fx

SAVED = "memo_saved"
"""Key of ``node.meta``: true for what the forward keeps for the backward."""


def saved_nodes(joint: fx.GraphModule) -> list[fx.Node]:
    """The nodes that are tagged as saved, in graph order."""
    return [node for node in joint.graph.nodes if node.meta.get(SAVED)]


def tag_saved(joint: fx.GraphModule, saved: Collection[fx.Node]) -> bool:
    """``saved`` and nothing else is tagged as saved; False when it was so before."""
    before = saved_nodes(joint)
    for node in joint.graph.nodes:
        node.meta.pop(SAVED, None)
        if node in saved:
            node.meta[SAVED] = True
    return saved_nodes(joint) != before
