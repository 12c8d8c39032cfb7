"""Keeps collectives where the program begins them, and lets each be waited for once."""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.analysis.joint_units import forward_part
from memo_compile.analysis.purity import in_flight, is_collective, is_wait
from memo_compile.analysis.views import storage_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCollectives:
    """Marks each collective that only the backward begins, so that no partitioner takes it forward.

    Ring attention sends keys and values around in both halves. The second time needs no incoming
    gradient, so a partitioner may run it in the forward. Whether it does depends on what a rank
    computes: under a causal mask the first rank reads nothing of what comes. Ranks would then begin
    their collectives in different orders, and get each other's tensors.

    Rewrite: the second wait for a collective falls away. Tracing adds a wait behind each functional
    collective, and an ``autograd.Function`` that waits itself, where it reads, has another one:
        w = wait_tensor(all_to_all(x))         w = wait_tensor(all_to_all(x))
        v = view(w, [4, 8])             ->     v = view(w, [4, 8])
        y = mul(wait_tensor(v), 2)             y = mul(v, 2)
    """

    name: ClassVar[str] = "traced-collectives"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        arrived = [node for node in gm.graph.nodes if is_wait(node) and _has_arrived(node)]
        for node in arrived:
            node.replace_all_uses_with(node.all_input_nodes[0])
            gm.graph.erase_node(node)
        forward = forward_part(gm.graph)
        for node in gm.graph.nodes:
            if is_collective(node) and node not in forward:
                node.meta["partitioner_tag"] = "must_be_in_backward"
        return PassResult(gm, bool(arrived))


def _has_arrived(wait: fx.Node) -> bool:
    """True if what ``wait`` reads was waited for, or computed."""
    root = storage_of(wait.all_input_nodes[0])
    return root.op == "call_function" and not in_flight(root)
