"""Cuts a layer beside its attention: that runs in tiles of heads, the rest in tiles of tokens.

Rewrite, one piece of a layer:
    h = x + attention(norm(x)); y = h + mlp(norm(h))
                                                   ->    h = x + attention(norm(x))
                                                         y = h + mlp(norm(h))

The backward is cut in front of its attention, the forward behind it, where the fewest bytes are
read across the cut.
"""

from collections.abc import Collection, Sequence

from torch import fx

from memo_compile.analysis.row_rules import is_attention
from memo_compile.analysis.structure import is_matmul
from memo_compile.analysis.views import bytes_of, is_item, storage_of
from memo_compile.step.problem import Phase


def beside_attention(
    nodes: Sequence[fx.Node], phase: Phase, static_inputs: Collection[str]
) -> list[tuple[fx.Node, ...]]:
    """Returns ``nodes``, which are in order, as one piece, or as two with attention in one.

    ``static_inputs``: names of parameters, which are there anyway. Cost: nodes times nodes.
    """
    attention = [at for at, node in enumerate(nodes) if is_attention(node)]
    products = [at for at, node in enumerate(nodes) if is_matmul(node) and not is_attention(node)]
    if not attention or not products:
        return [tuple(nodes)]
    first, last = attention[-1] + 1, products[-1]
    if phase is Phase.BACKWARD:
        first, last = products[0] + 1, attention[0]
    cuts = [at for at in range(first, last + 1) if not is_item(nodes[at])]
    if not cuts:
        return [tuple(nodes)]

    def border_bytes(at: int) -> int:
        behind = set(nodes[at:])
        read = {storage_of(source) for node in nodes[at:] for source in node.all_input_nodes}
        return sum(bytes_of(node) for node in read - behind if node.name not in static_inputs)

    cut = min(cuts, key=border_bytes)
    return [tuple(nodes[:cut]), tuple(nodes[cut:])]
