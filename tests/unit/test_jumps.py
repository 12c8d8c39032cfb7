"""What jumps where a last digit differs: it runs once, in the forward, and its result is kept."""

import pytest
import torch
from torch import fx
from torch._functorch.aot_autograd import aot_function
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional

from memo_compile.analysis.joint_units import forward_nodes, tangent_dependents
from memo_compile.analysis.jumps import jumps
from memo_compile.analysis.purity import must_be_saved
from memo_compile.analysis.structure import op_name
from memo_compile.passes.keep_jumps import KeepJumps

TOKENS, WIDTH = 8, 4


def joint_graph(function) -> fx.GraphModule:
    """The joint graph of ``function`` of a product, as the backend's partitioner gets it."""
    found = []

    def partitioned(joint, inputs, **settings):
        found.append(joint)
        raise KeyboardInterrupt  # nothing else is wanted

    def step(x, w):
        return function(x @ w).sum()

    traced = aot_function(
        step,
        fw_compiler=lambda gm, _: gm,
        partition_fn=partitioned,
        decompositions=select_decomp_table(),
    )
    with pytest.raises(KeyboardInterrupt):
        traced(torch.randn(TOKENS, WIDTH), torch.randn(WIDTH, WIDTH, requires_grad=True))
    return found[0]


def centred(h):
    return h - h.amax(0)


def shared(h):
    """A maximum by hand, as in logsumexp."""
    top = h.amax(1, keepdim=True)
    return (h - top).exp().sum(1).log() + top.squeeze(1)


def straight_through(h):
    return h + (h.round() - h).detach()


def reduced(h):
    index = torch.arange(TOKENS) % 2
    return h.new_zeros(2, WIDTH).index_reduce(0, index, h, "amax")


def scattered(h):
    index = (torch.arange(TOKENS) % 2).unsqueeze(-1).expand(TOKENS, WIDTH)
    return h.new_zeros(2, WIDTH).scatter_reduce(0, index, h, "amax")


def ranked(h):
    return torch.searchsorted(h.sort().values, h) * h


def routed(h):
    weights, experts = h.softmax(-1).topk(2)
    return torch.zeros_like(h).scatter(-1, experts, weights) * h


JUMPING = {
    "amax of tokens": (lambda h: h.amax(0), ["eq"]),
    "amin of a row": (lambda h: h.amin(1), ["eq"]),
    "maximum of all": (lambda h: h.max(), ["eq"]),
    "aminmax": (lambda h: torch.add(*torch.aminmax(h, dim=0)), ["eq", "eq"]),
    "max of a dimension": (lambda h: h.max(0).values, ["max"]),
    "median": (lambda h: h.median(0).values, ["median"]),
    "kthvalue": (lambda h: h.kthvalue(2, 0).values, ["kthvalue"]),
    "mode": (lambda h: h.mode(0).values, ["mode"]),
    "cummax": (lambda h: h.cummax(0).values, ["cummax"]),
    "sort": (lambda h: h.sort(0).values * h, ["sort"]),
    "topk": (routed, ["topk"]),
    "argmax": (lambda h: functional.one_hot(h.argmax(-1), WIDTH) * h, ["argmax"]),
    "largest norm": (lambda h: h.norm(p=float("inf"), dim=0), ["eq"]),
    "index_reduce": (reduced, ["eq"]),
    "scatter_reduce": (scattered, ["eq", "eq"]),
    "logsumexp by hand": (shared, ["eq"]),
    "distance from the largest": (lambda h: centred(h).abs(), ["eq", "sign"]),
    "kink at the largest": (lambda h: functional.relu(centred(h) + 1), ["eq", "le"]),
    "clamped by the largest": (lambda h: h.clamp(max=0.5 * h.amax().detach()), ["le"]),
    "the larger of two": (lambda h: torch.maximum(h, h.roll(1, 0)), ["eq", "eq", "gt", "lt"]),
    "where the largest is": (lambda h: torch.where(h == h.max(), h, 0), ["eq"]),
    "above the mean": (lambda h: torch.where(h > h.mean(0), h, 0), ["gt"]),
    "a hard gate": (lambda h: (h > 0.5).float() * h, ["gt"]),
    "rounded straight through": (lambda h: straight_through(h) ** 2, ["round"]),
    "floor": (lambda h: h.floor() * h, ["floor"]),
    "whole quotients": (lambda h: torch.div(h, 0.3, rounding_mode="floor") * h, ["div"]),
    "remainder": (lambda h: torch.remainder(h, 0.3), ["remainder"]),
    "sign": (lambda h: h.sign() * h, ["sign"]),
    "bucketize": (lambda h: torch.bucketize(h, torch.ones(1)) * h, ["bucketize"]),
    "searchsorted": (
        lambda h: torch.searchsorted(h.sort().values, h) * h,
        ["sort", "searchsorted"],
    ),
    "whole numbers": (lambda h: h.int() * h, ["convert_element_type"]),
    "max_pool": (lambda h: functional.max_pool2d(h[None, None], 2), []),
}


@pytest.mark.parametrize("name", JUMPING)
def test_what_jumps(name):
    function, expected = JUMPING[name]
    found = [op_name(node) for node in jumps(joint_graph(function).graph)]
    if name == "max_pool":
        assert len(found) == 1
        assert "max_pool" in found[0]
    else:
        assert sorted(found) == sorted(expected)


SMOOTH = {
    "relu": functional.relu,
    "leaky relu": functional.leaky_relu,
    "elu": functional.elu,
    "hardswish": functional.hardswish,
    "gelu": functional.gelu,
    "clamp": lambda h: h.clamp(-1, 1),
    "abs": torch.abs,
    "softmax": lambda h: h.softmax(-1),
    "logsumexp": lambda h: h.logsumexp(-1),
    "cross entropy": lambda h: functional.cross_entropy(h, torch.zeros(TOKENS, dtype=torch.long)),
    "layer norm": lambda h: functional.relu(functional.layer_norm(h, (WIDTH,))),
    "dropout": lambda h: functional.dropout(h, 0.5),
    "rotary halves": lambda h: functional.silu(h[:, :2]) * h[:, 2:],
    "a detached maximum": lambda h: (h - h.amax(-1, keepdim=True).detach()).exp(),
    "a mask of positions": lambda h: torch.where(torch.arange(TOKENS)[:, None] > 2, h, 0),
    "a mask of infinities": lambda h: torch.where(h == -torch.inf, 0, h),
    "attention": lambda h: functional.scaled_dot_product_attention(*3 * [h.view(1, 1, -1, 4)]),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_what_does_not_jump(name):
    assert not jumps(joint_graph(SMOOTH[name]).graph)


def test_what_weights_alone_decide_is_made_again():
    def step(x):
        return x.sign() * x

    graph = joint_graph(step).graph
    product = next(node for node in graph.nodes if op_name(node) == "mm")
    assert jumps(graph)
    assert not jumps(graph, product.all_input_nodes)


@pytest.mark.parametrize("name", ["amax of tokens", "largest norm", "median", "a hard gate"])
def test_a_jump_belongs_to_the_forward_and_is_kept(name):
    joint = joint_graph(JUMPING[name][0])
    KeepJumps(weights=frozenset())(joint)
    joint.graph.lint()
    forward, after = forward_nodes(joint), tangent_dependents(joint.graph)
    found = jumps(joint.graph)
    assert set(found) <= set(forward)
    assert all(map(must_be_saved, found))
    if len(found) == 1 and found[0].target is torch.ops.aten.eq.Tensor:
        last = max(found[0].all_input_nodes)
        assert last.next is found[0]  # of a layer, not behind the whole forward
    assert not after.intersection(forward)


def test_what_a_users_checkpoint_must_recompute_is_recomputed():
    joint = joint_graph(lambda h: (h > 0.5).float() * h)
    (jump,) = jumps(joint.graph)
    policy = torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE
    jump.meta["recompute"] = policy
    KeepJumps(weights=frozenset())(joint)
    assert jump.meta["recompute"] is policy
