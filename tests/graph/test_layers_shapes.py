"""Layers in models of unusual shape: mixed classes, nested lists, loops inside of layers."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from memo_compile.analysis.layers import find_layers
from memo_compile.passes.hoist import hoist_invariants
from tests.numerics.training import in_ci
from tests.steps.joint_graphs import capture_joint

WIDTH = 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        heads = self.qkv(self.norm(x)).view(batch, tokens, 3, 4, WIDTH // 4)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q = self.query(self.norm(x)).view(batch, tokens, 4, 16).transpose(1, 2)
        k, v = self.kv(memory).view(batch, -1, 2, 4, 16).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return x + mixed.transpose(1, 2).reshape(batch, tokens, WIDTH)


class Mlp(nn.Module):
    def __init__(self, inner: int = 128) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class ExpertLoop(nn.Module):
    """A mixture of experts as an eager loop: a repeat inside of every layer."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
            for _ in range(num_experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        weights = self.router(normed).softmax(-1)
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mixed = mixed + expert(normed) * weights[..., index : index + 1]
        return x + mixed


def layer(inner: int = 128) -> nn.Module:
    return nn.Sequential(Attention(), Mlp(inner))


def layers(*inners: int) -> list[nn.Module]:
    return [layer(inner) for inner in inners]


def narrow_and_wide(*inners: int) -> list[nn.Module]:
    """Layers without attention, which are traced twice as fast."""
    return [Mlp(inner) for inner in inners]


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class TwoTowers(nn.Module):
    """Two encoders side by side: equal layers, but two chains."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.left = nn.ModuleList(narrow_and_wide(128, 128, 128))
        self.right = nn.ModuleList(narrow_and_wide(128, 128, 128))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, y = self.embedding(ids), self.embedding(labels)
        for block in self.left:
            x = block(x)
        for block in self.right:
            y = block(y)
        return (x.mean((0, 1)) * y.mean((0, 1))).sum()


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.encoder = nn.ModuleList(layers(128, 128, 128))
        self.own = nn.ModuleList(Attention() for _ in range(3))
        self.cross = nn.ModuleList(Cross() for _ in range(3))
        self.mlp = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        memory, x = self.embedding(ids), self.embedding(labels)
        for block in self.encoder:
            memory = block(memory)
        for own, cross, mlp in zip(self.own, self.cross, self.mlp, strict=True):
            x = mlp(cross(own(x), memory))
        return x.square().mean()


class DropoutOnlyInLayers(Stack):
    """The seeds of all dropouts are drawn inside of the first layer."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(
            [nn.Sequential(Attention(), nn.Dropout(0.1), Mlp()) for _ in range(num_layers)]
        )


def dense(width_in: int, width_out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width_in, width_out), nn.ReLU())


CASES: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, str]]]] = {
    "one layer has no repeat": (lambda: Stack(layers(128)), []),
    "one layer with a loop over experts": (
        lambda: Stack([nn.Sequential(Attention(), ExpertLoop(8))]),
        [],
    ),
    "loop over experts": (
        lambda: Stack([nn.Sequential(Attention(), ExpertLoop(4)) for _ in range(3)]),
        [(3, "blocks")],
    ),
    "two kinds take turns": (
        lambda: Stack(layers(128, 256, 128, 256)),
        [(2, "blocks"), (2, "blocks")],
    ),
    "two local, one global, and a rest": (
        lambda: Stack(narrow_and_wide(128, 128, 256, 128, 128, 256, 128, 128)),
        [(6, "blocks"), (2, "blocks")],
    ),
    "a single stranger": (
        lambda: Stack(narrow_and_wide(128, 128, 128, 256, 128, 128)),
        [(5, "blocks")],
    ),
    "a trailing single layer": (
        lambda: Stack(layers(128, 128, 256, 128)),
        [(3, "blocks")],
    ),
    "first layers dense": (
        lambda: Stack(narrow_and_wide(128, 128, 256, 256, 256)),
        [(2, "blocks"), (3, "blocks")],
    ),
    "MLP, attention, MLP is one layer": (
        lambda: Stack([nn.Sequential(Mlp(), Attention(), Mlp()) for _ in range(3)]),
        [(3, "blocks")],
    ),
    "stages of layers": (
        lambda: Stack([nn.Sequential(*narrow_and_wide(128, 128, 128)) for _ in range(2)]),
        [(6, "blocks.*")],
    ),
    "shared weights": (lambda: Stack([layer()] * 4), [(4, "blocks")]),
    "two towers": (TwoTowers, [(6, "left, right")]),
    "encoder and decoder": (EncoderDecoder, [(3, "encoder"), (3, "cross")]),
    "dropout in three layers": (lambda: DropoutOnlyInLayers(3), [(3, "blocks")]),
    "a plain MLP": (lambda: Stack([dense(64, 64) for _ in range(6)]), [(6, "blocks")]),
    "a head of two equal linear layers": (lambda: Stack([dense(64, 64) for _ in range(2)]), []),
}


IN_CI = (
    "two local, one global, and a rest",
    "MLP, attention, MLP is one layer",
    "stages of layers",
    "two towers",
    "dropout in three layers",
    "encoder and decoder",
)
"""The others are such chains too; small hand-made ones: tests/unit/test_layers_repeats.py."""


@pytest.mark.parametrize("case", in_ci(CASES, *IN_CI))
def test_classes_with_and_without_names(case):
    build, expected = CASES[case]
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (2, 32))
    _, _, nodes = capture_joint(build(), ids, ids.clone())
    assert classes(nodes) == expected
    for node in nodes:
        node.meta.pop("nn_module_stack", None)
    assert classes(nodes) == [(num_layers, None) for num_layers, _ in expected]


def classes(nodes) -> list[tuple[int, str | None]]:
    structure = find_layers(hoist_invariants(nodes))
    return [(found.num_layers, found.module_path) for found in structure.classes]


def test_a_checkpoint_policy_separates_layers():
    """Tagged layers obey the user's policy, so they cannot share a region with untagged ones."""
    _, _, nodes = capture_joint(
        Stack(layers(*[128] * 4)), *[torch.zeros(2, 32, dtype=torch.long)] * 2
    )
    units = [unit for unit in find_layers(nodes).units if unit.class_key is not None]
    assert len(units) == 4
    for unit in units[2:]:
        for node in nodes[unit.start : unit.end]:
            node.meta["recompute"] = "MUST_RECOMPUTE"
    assert [found.num_layers for found in find_layers(nodes).classes] == [2, 2]
