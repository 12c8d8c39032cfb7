"""MEMO's model: a GPT of named width, and its joint graph as autograd writes it down."""

import functools
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from memo_compile.analysis.joint_units import JointUnits, backward_positions, tag_units
from memo_compile.analysis.views import storage_of
from memo_compile.costs.models import ModelShape, find_model


class Layer(nn.Module):
    """Norm, attention, residual; norm, two projections around a GELU, residual."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        h = shape.hidden
        self.num_heads = shape.num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.q, self.k, self.v, self.out = (nn.Linear(h, h) for _ in range(4))
        self.up, self.down = nn.Linear(h, shape.ffn), nn.Linear(shape.ffn, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(x)
        q, k, v = (self._heads(product(normed)) for product in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class GPT(nn.Module):
    def __init__(self, shape: ModelShape, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(num_layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class _StopError(Exception):
    """Ends the compilation when the joint graph is in hand."""


def _joint_graph(model: nn.Module, *args: torch.Tensor) -> fx.GraphModule:
    """The joint graph with no operator decomposed: what eager's autograd would run and save."""
    seen: list[fx.GraphModule] = []

    def partition(joint, joint_inputs, **options):
        seen.append(joint)
        raise _StopError

    backend = aot_autograd(
        fw_compiler=lambda gm, inputs: gm, partition_fn=partition, decompositions={}
    )
    torch._dynamo.reset()
    try:
        torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*args)
    except Exception:
        if not seen:
            raise
    finally:
        torch._dynamo.reset()
    return seen[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A joint graph with its units tagged."""

    joint: fx.GraphModule
    units: JointUnits
    seq: int
    shape: ModelShape


@functools.cache
def trace_gpt(name: str, seq: int, num_layers: int = 2) -> Traced:
    """The step of one sequence in bfloat16, at real width; fake tensors, so no memory."""
    shape = find_model(name)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode():
            model = GPT(shape, num_layers)
            ids = torch.zeros(1, seq, dtype=torch.long)
            joint = _joint_graph(model, ids, ids)
    finally:
        torch.set_default_dtype(before)
    return Traced(joint=joint, units=tag_units(joint), seq=seq, shape=shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What one layer's backward reads of what the forward made, in bytes by MEMO's kinds."""

    input_bytes: int
    attention_bytes: int
    others_bytes: int
    log_sum_exp_bytes: int
    norm_statistics_bytes: int

    @property
    def skeletal_bytes(self) -> int:
        """MEMO's sum, which leaves the statistics out."""
        return self.input_bytes + self.attention_bytes + self.others_bytes


def kept_by_layers(traced: Traced) -> list[Kept]:
    """Per layer what its backward reads; a storage once, parameters and labels not at all."""
    units = traced.units
    made_in = {
        node: index
        for index, unit in enumerate(units.structure.units)
        for node in units.forward[unit.start : unit.end]
    }
    positions = backward_positions(traced.joint.graph, units.num_units)
    read_by: dict[int, dict[fx.Node, None]] = {}
    for node, position in positions.items():
        if node not in made_in:
            reader = units.num_units - 1 - position
            sources = (storage_of(source) for source in node.all_input_nodes)
            read_by.setdefault(reader, {}).update((s, None) for s in sources if s in made_in)
    layers = [i for i, unit in enumerate(units.structure.units) if unit.class_key is not None]
    return [_kinds(layer, read_by[layer], made_in) for layer in layers]


def _kinds(layer: int, kept: dict[fx.Node, None], made_in: dict[fx.Node, int]) -> Kept:
    sums = dict.fromkeys(("input", "attention", "others", "log_sum_exp", "norm_statistics"), 0)
    for node in kept:
        source = str(node.args[0]) if "getitem" in str(node.target) else ""
        statistic = bool(source) and node.args[1] != 0
        if made_in[node] < layer:
            kind = "input"
        elif "attention" in source:
            kind = "log_sum_exp" if statistic else "attention"
        else:
            kind = "norm_statistics" if statistic else "others"
        value = node.meta["val"]
        sums[kind] += value.numel() * value.element_size()
    return Kept(**{f"{kind}_bytes": size for kind, size in sums.items()})
