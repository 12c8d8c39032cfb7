"""Joint graphs of unmodified models, as Inductor hands them to a partitioner."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

Arguments = dict[str, object]
ModelBuilder = Callable[[], tuple[torch.nn.Module, Arguments, Callable[..., torch.Tensor]]]


class _CapturedError(Exception):
    """Carries nothing: ends the compilation as soon as the joint graph is in hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointGraph:
    gm: fx.GraphModule
    num_fwd_outputs: int
    forward_nodes: tuple[fx.Node, ...]


class _Recorder(CustomPartitionerFn):
    def __init__(self) -> None:
        self.seen: tuple[fx.GraphModule, int] | None = None

    def __call__(self, gm, joint_inputs, **options):
        self.seen = (gm, options["num_fwd_outputs"])
        raise _CapturedError

    def uuid(self):
        return None


def forward_part(gm: fx.GraphModule, num_fwd_outputs: int) -> tuple[fx.Node, ...]:
    """The call_function nodes of the forward, in graph order.

    Those that a forward output needs, and those that need no tangent and that autograd made in
    the forward (a log-sum-exp that only the backward reads).
    """
    outputs = gm.graph.output_node().args[0][:num_fwd_outputs]
    needed: set[fx.Node] = set()
    stack = [node for node in outputs if isinstance(node, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    after_tangents: set[fx.Node] = set()
    for node in gm.graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or any(source in after_tangents for source in node.all_input_nodes):
            after_tangents.add(node)
    return tuple(
        node
        for node in gm.graph.nodes
        if node.op == "call_function"
        and (
            node in needed
            or (node not in after_tangents and node.meta.get("partitioner_tag") != "is_backward")
        )
    )


def capture_joint(
    model: Callable[..., torch.Tensor], *args: object, **kwargs: object
) -> tuple[fx.GraphModule, int, tuple[fx.Node, ...]]:
    """The joint graph of ``model(*args, **kwargs)``, its forward outputs and forward nodes."""
    recorder = _Recorder()

    def backend(gm, example_inputs, **_options):
        patches = {"custom_partitioner_fn": recorder, "force_disable_caches": True}
        return compile_fx(gm, example_inputs, config_patches=patches)

    torch._dynamo.reset()
    try:
        torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*args, **kwargs)
    except Exception:
        if recorder.seen is None:
            raise
    finally:
        torch._dynamo.reset()
    assert recorder.seen is not None, "the model needs no gradient: nothing reached the partitioner"
    gm, num_fwd_outputs = recorder.seen
    return gm, num_fwd_outputs, forward_part(gm, num_fwd_outputs)


@functools.cache
def capture_model(builder: ModelBuilder, **sizes: int) -> JointGraph:
    """The joint graph of a builder of ``tests.models``: traced once per process and sizes."""
    torch.manual_seed(0)
    model, inputs, loss = builder(**sizes)
    gm, num_fwd_outputs, nodes = capture_joint(lambda **kwargs: loss(model, **kwargs), **inputs)
    return JointGraph(gm=gm, num_fwd_outputs=num_fwd_outputs, forward_nodes=nodes)
