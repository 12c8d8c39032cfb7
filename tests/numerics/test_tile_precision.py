"""A step in tiles is as near to float64 as eager is, in 16 bits too, in however many tiles."""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memo_compile
from tests.numerics.closeness import in_float64
from tests.numerics.training import in_ci

WIDTH, INNER, VOCABULARY = 16, 256, 384
FARTHER = 1.2
"""Times eager's distance from float64."""


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        x = self.norm(x)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class MlpsAndHead(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Mlp() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.loss = loss

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.head(self.norm(x)), labels)


def labelled(logits, labels, **options):
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), **options)


def with_z(logits, labels):
    short = labelled(logits, labels, label_smoothing=0.1)
    return short + 1e-2 * logits.float().logsumexp(-1).square().mean()


def shifted(logits, labels):
    return labelled(logits[:, :-1].contiguous(), labels[:, 1:], reduction="sum")


def shifted_views(logits, labels):
    """Soft-capped in float32 before they are sliced."""
    logits = 5 * torch.tanh(logits.float() / 5)
    shift = logits[..., :-1, :].reshape(-1, VOCABULARY)
    return F.cross_entropy(shift, labels[..., 1:].reshape(-1)) + 1e-3 * shift.square().mean()


def padded(logits, labels):
    """As transformers does: all tokens have logits, the last one no label."""
    return labelled(logits, F.pad(labels, (0, 1), value=-100)[..., 1:])


mean = functools.partial(labelled, reduction="mean")
total = functools.partial(labelled, reduction="sum")


def tokens(num: int, batch: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randint, VOCABULARY, (batch, num // batch), generator=generator)
    labels = draw()
    return {"ids": draw(), "labels": labels.masked_fill(labels % 5 == 0, -100)}


def gradients(model, inputs, run):
    run(model, **inputs).backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


def assert_as_near_as_eager(loss, dtype, inputs, tiles, **options):
    torch.manual_seed(0)
    torch._dynamo.reset()
    case = MlpsAndHead(loss).to(dtype), inputs, lambda model, **inputs: model(**inputs)
    exact = gradients(*in_float64(case))
    eager = gradients(copy.deepcopy(case[0]), *case[1:])
    options = {"lowering": "aten", "debug": "poison", **options}
    options |= {"token_tiles": tiles, "costs": "roofline", "strict": True}
    ours = gradients(torch.compile(case[0], backend="memo", options=options), *case[1:])
    ours = {name.removeprefix("_orig_mod."): gradient for name, gradient in ours.items()}
    assert max(memo_compile.report().plans[-1].tiles.values()) == tiles
    far = {name: float((ours[name] - exact[name]).norm()) for name in exact}
    allowed = {name: FARTHER * float((eager[name] - exact[name]).norm()) for name in exact}
    faults = {name: far[name] / allowed[name] for name in exact if not far[name] <= allowed[name]}
    assert not faults
    assert all(map(math.isfinite, far.values()))


CASES = {
    "bfloat16, 64 tiles": (mean, torch.bfloat16, 64),
    "bfloat16, 8 tiles": (total, torch.bfloat16, 8),
    "bfloat16, 2 tiles": (with_z, torch.bfloat16, 2),
    "float16, 64 tiles": (total, torch.float16, 64),
    "float16, 8 tiles": (mean, torch.float16, 8),
}


@pytest.mark.parametrize("name", in_ci(CASES, "bfloat16, 8 tiles"))
def test_sums_over_tiles(name):
    loss, dtype, tiles = CASES[name]
    assert_as_near_as_eager(loss, dtype, tokens(1024), tiles)


SHIFTED = {
    "shifted": (shifted, torch.bfloat16, tokens(1024), 8),
    "shifted, 2 sequences": (shifted, torch.float16, tokens(1024, batch=2), 8),
    "reshaped": (shifted_views, torch.bfloat16, tokens(257), 2),
    "padded": (padded, torch.bfloat16, tokens(1024), 64),
}


@pytest.mark.parametrize("name", in_ci(SHIFTED, "shifted"))
def test_a_shifted_loss_runs_in_tiles(name):
    loss, dtype, inputs, tiles = SHIFTED[name]
    assert_as_near_as_eager(loss, dtype, inputs, tiles)
    head = memo_compile.report().plans[-1].tiles
    assert head["epilogue_fwd"] == head["epilogue_bwd"] == tiles


@pytest.mark.full
def test_sums_over_tiles_by_inductor():
    assert_as_near_as_eager(with_z, torch.float16, tokens(250), 4, lowering="inductor")
