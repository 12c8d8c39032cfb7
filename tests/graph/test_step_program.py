"""Joint graph -> regions and step program, on fake tensors; the text is the golden."""

import re
import time

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional

from memo_compile.passes.own_outputs import OwnOutputs
from memo_compile.passes.runner import graph_text
from tests.steps.flash_attention import flash_attn_func
from tests.steps.programs import Programs, step_programs


def parameter(*shape: int) -> torch.Tensor:
    return torch.empty(shape).requires_grad_()


def layers(num_layers: int, width: int = 16):
    """A functional model: an entry, then residual layers of two products, weights in lists."""
    entry = parameter(width, width)
    ups = [parameter(width, 2 * width) for _ in range(num_layers)]
    downs = [parameter(2 * width, width) for _ in range(num_layers)]

    def loss(x, entry, *weights):
        x = (x @ entry).tanh()
        for up, down in zip(weights[:num_layers], weights[num_layers:], strict=True):
            x = x + functional.gelu(x @ up) @ down
        return x.pow(2).mean()

    return loss, [torch.empty(8, width), entry, *ups, *downs]


def masked(num_layers: int = 3, width: int = 16):
    """Every layer makes the same mask anew, as unmodified models do."""
    entry, *weights = [parameter(width, width) for _ in range(num_layers + 1)]

    def loss(x, keep, entry, *weights):
        x = (x @ entry).tanh()
        for weight in weights:
            bias = torch.where(keep > 0, 0.0, float("-inf"))
            scores = (x @ weight @ x.t() + bias).softmax(-1)
            x = x + scores @ x
        return x.mean()

    return loss, [torch.empty(8, width), torch.empty(8, 8), entry, *weights]


def shared_bias(num_layers: int = 3, width: int = 16):
    """The first layer makes a bias for all, as T5 does."""
    entry, *weights = [parameter(width, width) for _ in range(num_layers + 1)]
    table = parameter(8, 8)

    def loss(x, table, entry, *weights):
        x, bias = (x @ entry).tanh(), None
        for weight in weights:
            keys = x @ weight
            if bias is None:
                bias = table.sin()
            x = x + (keys @ x.t() + bias).softmax(-1) @ x
        return x.mean()

    return loss, [torch.empty(8, width), table, entry, *weights]


def one_mask(num_layers: int = 3, width: int = 16):
    """All layers read one mask, which attention on CUDA needs for each of its heads."""
    entry, *weights = [parameter(width, width) for _ in range(num_layers + 1)]

    def loss(x, mask, entry, *weights):
        x = (x @ entry).tanh()
        mask = mask.expand(2, 4, 8, 8)
        for weight in weights:
            keys = (x @ weight).view(2, 8, 4, 4).transpose(1, 2)
            found = functional.scaled_dot_product_attention(keys, keys, keys, mask)
            x = x + found.transpose(1, 2).reshape(x.shape)
        return x.mean()

    return loss, [torch.empty(2, 8, width), torch.empty(2, 1, 8, 8), entry, *weights]


def loss_head(num_layers: int = 3, tokens: int = 64, width: int = 16, vocabulary: int = 4096):
    """Layers and a language model's loss, whose logits are by far the largest tensor."""
    entry, head = parameter(width, width), parameter(width, vocabulary)
    shapes = [(width, 2 * width), (2 * width, width)] * num_layers
    weights = [parameter(*shape) for shape in shapes]

    def loss(x, targets, entry, head, *weights):
        x = (x @ entry).tanh()
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            x = x + functional.gelu(x @ up) @ down
        return functional.cross_entropy(x.tanh() @ head, targets)

    targets = torch.empty(tokens, dtype=torch.int64)
    return loss, [torch.empty(tokens, width), targets, entry, head, *weights]


def one_weight(num_layers: int = 4, width: int = 16):
    """Every layer and the entry read the same matrix, as in ALBERT; its gradient has many parts."""
    weight = parameter(width, width)

    def loss(x, weight):
        x = (x @ weight).tanh()
        for _ in range(num_layers):
            x = x + (x @ weight).cos()
        return x.pow(2).mean()

    return loss, [torch.empty(8, width), weight]


def text_of(programs: Programs) -> str:
    """Both programs, then every region; numbering of anonymous nodes is torch's."""
    parts = []
    for half in (programs.forward, programs.backward):
        parts.append(f"== {half.phase.value}\n{graph_text(half.half_graph)}")
        for name, region in half.regions.items():
            parts.append(f"-- {name} external {sorted(region.external_outputs)}")
            parts.append(graph_text(region.gm))
    return re.sub(r"memo_compile\.passes\.cut\._|memo_runtime\.ops\.", "", "\n".join(parts))


@pytest.mark.parametrize("num_layers", [2, 3])
def test_layers_become_calls_of_one_region(golden, num_layers):
    programs = step_programs(lambda: layers(num_layers))
    golden(f"layers_{num_layers}", text_of(programs))
    forward = [name for name in programs.order() if name.endswith("_fwd")]
    backward = programs.order()[len(forward) :]
    assert forward.count("layer0_fwd") == num_layers
    assert backward.count("layer0_bwd") == num_layers
    assert all("fwd" not in name for name in backward)


def test_a_loss_head_in_tiles_of_tokens(golden):
    """No tensor of the program has more than a tile's logits."""
    programs = step_programs(loss_head, token_tiles=4)
    golden("loss_head_in_tiles", text_of(programs))
    sizes = [
        value.numel()
        for half in (programs.forward, programs.backward)
        for region in half.regions.values()
        for node in region.gm.graph.nodes
        if isinstance(value := node.meta.get("val"), torch.Tensor)
    ]
    assert max(sizes) == 64 // 4 * 4096


def test_a_parameter_that_is_not_aligned_has_a_region_of_its_own():
    """Kernels are specialised on the alignment of what they were compiled for."""

    def odd(num_layers: int):
        loss, (x, entry, *weights) = layers(num_layers)
        flat = torch.empty(weights[1].numel() + 1)
        weights[1] = flat[1:].view(weights[1].shape).requires_grad_()
        return loss, [x, entry, *weights]

    assert step_programs(lambda: odd(4)).num_regions > step_programs(lambda: layers(4)).num_regions


def test_order_of_a_step():
    """The backward calls what the forward called, in reverse."""
    order = step_programs(lambda: layers(3)).order()
    half = len(order) // 2
    mirrored = [name.replace("_fwd", "_bwd") for name in reversed(order[:half])]
    assert order[half:] == mirrored


def test_more_layers_are_no_more_regions():
    counts = {n: step_programs(lambda n=n: layers(n)).num_regions for n in (3, 6)}
    assert counts[3] == counts[6] <= 6


def test_a_view_for_all_layers_is_made_alike_in_each():
    """It stands in the backward that comes first, and in another order than that reads it."""
    programs = step_programs(one_mask)
    assert programs.order().count("layer0_bwd") == 3


def test_an_equal_mask_is_made_once_for_all_layers(golden):
    programs = step_programs(masked)
    golden("masked", text_of(programs))
    assert programs.order().count("layer0_fwd") == 3
    owners = [
        name
        for name, region in programs.forward.regions.items()
        if "aten.where" in graph_text(region.gm)
    ]
    assert len(owners) == 1
    assert not owners[0].startswith("layer")


def test_what_the_first_layer_makes_for_all_is_moved_out(golden):
    programs = step_programs(shared_bias)
    golden("shared_bias", text_of(programs))
    assert programs.order().count("layer0_fwd") == 3
    assert "aten.sin" not in graph_text(programs.forward.regions["layer0_fwd"].gm)


def test_a_gradient_in_parts_is_summed_in_the_memory_of_its_first_part(golden):
    programs = step_programs(one_weight)
    golden("one_weight", text_of(programs))
    _, first, *others = programs.backward.calls
    (at,) = programs.backward.regions[first.region].external_outputs
    total = first.outputs[at]
    for call in others:
        region = programs.backward.regions[call.region]
        assert total in call.inputs
        assert graph_text(region.gm).count("aten.copy_") == 1
        (at,) = region.external_outputs
        total = call.outputs[at]
    assert total in programs.backward.results


def test_a_graph_without_layers_is_one_region_each_way():
    def plain():
        weight = parameter(16, 4)
        return lambda x, w: (x @ w).sigmoid().sum(), [torch.empty(8, 16), weight]

    programs = step_programs(plain)
    assert programs.order() == ["step_fwd", "step_bwd"]


def test_the_backward_fetches_exactly_what_the_forward_leases():
    programs = step_programs(lambda: layers(3))
    assert programs.forward.leased == programs.backward.leased
    assert len(programs.forward.leased) == len(set(programs.forward.leased))
    assert not set(programs.forward.leased) & set(programs.forward.arguments)


def flash_layers(num_layers: int = 3, width: int = 64, heads: int = 4):
    entry = parameter(width, width)
    mixes = [parameter(width, 3 * width) for _ in range(num_layers)]
    outs = [parameter(width, width) for _ in range(num_layers)]

    def loss(x, entry, *weights):
        x = (x @ entry).tanh()
        for mix, out in zip(weights[:num_layers], weights[num_layers:], strict=True):
            q, k, v = (x @ mix).view(2, 32, 3, heads, width // heads).unbind(2)
            x = x + flash_attn_func(q, k, v, causal=True).reshape(2, 32, width) @ out
        return x.pow(2).mean()

    return loss, [torch.empty(2, 32, width), entry, *mixes, *outs]


def test_flash_attention_is_recognised():
    """Its output and log-sum-exp are saved, never run again, and lie in planned buffers."""
    programs = step_programs(flash_layers)
    assert programs.order().count("layer0_fwd") == 3
    assert programs.order().count("layer0_bwd") == 3
    backward = "".join(graph_text(region.gm) for region in programs.backward.regions.values())
    assert "_flash_attn_forward" not in backward
    assert "_flash_attn_backward" in backward

    saved = [programs.forward.nodes[name].meta["val"] for name in programs.forward.leased]
    shapes = [tuple(value.shape) for value in saved]
    assert shapes.count((2, 4, 32)) == 3  # log-sum-exp
    assert shapes.count((2, 32, 4, 16)) + shapes.count((2, 32, 64)) >= 3  # output

    region = programs.forward.regions["layer0_fwd"]
    OwnOutputs(external_outputs=region.external_outputs)(region.gm)
    text = graph_text(region.gm)
    assert "memo.flash_attn__flash_attn_forward" in text
    assert "torch.ops.flash_attn._flash_attn_forward" not in text
    assert text.count("aten.empty_strided") >= 2


class Llama(nn.Module):
    """As many parameters as the 7B model, in an eighth of its layers; bfloat16."""

    def __init__(self, num_layers: int = 4, width: int = 8192, inner: int = 56_320) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32000, width)
        self.layers = nn.ModuleList()
        for _ in range(num_layers):
            shapes = {"q": width, "k": width, "v": width, "o": width, "gate": inner, "up": inner}
            layer = nn.ModuleDict(
                {name: nn.Linear(width, out, bias=False) for name, out in shapes.items()}
            )
            layer["down"] = nn.Linear(inner, width, bias=False)
            layer["norm1"], layer["norm2"] = nn.RMSNorm(width), nn.RMSNorm(width)
            self.layers.append(layer)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 32000, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            y = layer["norm1"](x)
            q, k, v = (
                layer[name](y).unflatten(-1, (-1, 128)).transpose(1, 2) for name in ("q", "k", "v")
            )
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["o"](mixed.transpose(1, 2).flatten(2))
            y = layer["norm2"](x)
            x = x + layer["down"](functional.silu(layer["gate"](y)) * layer["up"](y))
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def llama_7b():
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Llama()
    finally:
        torch.set_default_dtype(torch.float32)
    ids = torch.zeros(1, 4096, dtype=torch.int64)
    return model, [ids, ids]


def test_seven_billion_parameters_are_cut_without_memory():
    """Traced, partitioned and cut on fakes; their 14 GB never exist."""
    step_programs(lambda: layers(2))  # torch's own imports and caches
    process = psutil.Process()
    before, start = process.memory_info().rss, time.process_time()
    programs = step_programs(llama_7b)
    grown = process.memory_info().rss - before
    assert grown < 500 * 2**20
    assert time.process_time() - start < 240
    assert programs.order().count("layer0_fwd") == 4
    assert programs.order().count("layer0_bwd") == 4
    assert programs.num_regions == 6
