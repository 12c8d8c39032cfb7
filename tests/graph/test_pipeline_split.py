"""``memo_compile.pipeline_split``: where a model can be cut, what is refused, whose plans count."""

import math

import pytest
import torch
from torch import nn

import memo_compile
from memo_compile.errors import ConfigError, Infeasible, UnsupportedGraph
from memo_compile.offline.plan_offline import tracing
from memo_compile.pipelines.model_units import units_of
from memo_compile.pipelines.stage_orders import StageOrders
from tests.numerics.small import Block

ROWS, HIDDEN, VOCAB = 128, 16, 512
OPTIONS = {
    "costs": "roofline",
    "lowering": "aten",
    "num_microbatches": 4,
    "optimizer_state_bytes_per_parameter": 0,
}


class Decoder(nn.Module):
    """Embedding, blocks with a gate that all of them read, norm and a large head."""

    def __init__(self, num_layers=4, is_tied=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block(HIDDEN, 2 + at % 2) for at in range(num_layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        low, high = x.detach().tanh().chunk(2, dim=-1)
        for layer in self.layers:
            x = layer(x) * torch.cat((high, low), dim=-1)
        return self.head(self.norm(x))


def ids():
    return torch.randint(VOCAB, (ROWS,))


def rows():
    return torch.randn(2 * ROWS, HIDDEN)


def loss(logits, target):
    return nn.functional.cross_entropy(logits, target)


def units(model, *args):
    with tracing(model, args, {}, hardware=None) as traced:
        found = units_of(model, traced.gm, traced.examples)
        return [(unit.module, unit.is_layer) for unit in found.units], found


def test_units_begin_at_layers_and_behind_the_last():
    names, found = units(Decoder(), ids())
    layers = [(f"layers.{at}", True) for at in range(4)]
    assert names == [("", False), *layers, ("norm", False)]
    assert found.units[0].modules == ("embed",)
    assert found.units[-1].modules == ("norm", "head")
    signatures = [unit.signature for unit in found.units]
    assert signatures[1] == signatures[3] != signatures[2] == signatures[4]
    assert not found.shared


def test_the_graphs_of_ranges_compute_what_the_whole_does():
    model, x = Decoder(), ids()
    with tracing(model, (x,), {}, hardware=None) as traced:
        found = units_of(model, traced.gm, traced.examples)
        known = {"x": x}
        for begin, end in ((0, 2), (2, 5), (5, 6)):
            gm, examples = found.graph(begin, end)
            names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
            given = [
                known[name] if name in known else x if value.dtype == torch.long else value
                for name, value in zip(names, examples, strict=True)
            ]
            results = gm(*given)
            (made,) = gm.graph.output_node().args
            known.update(zip((node.name for node in made), results, strict=True))
    torch.testing.assert_close(results[0], model(x))


def test_nested_lists_are_opened_until_something_repeats():
    blocks = nn.Sequential(*(Block(HIDDEN) for _ in range(3)))
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), blocks, nn.LayerNorm(HIDDEN))
    names, _ = units(model, torch.randn(ROWS, HIDDEN))
    assert names == [("", False), *((f"1.{at}", True) for at in range(3)), ("2", False)]
    names, _ = units(blocks[:2], torch.randn(ROWS, HIDDEN))
    assert names == [("", True), ("1", True)]


def test_other_modules_of_a_sequential_are_no_layers():
    blocks = (Block(HIDDEN) for _ in range(3))
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), *blocks, nn.LayerNorm(HIDDEN), nn.ReLU())
    names, found = units(model, torch.randn(ROWS, HIDDEN))
    layers = [(str(at), True) for at in (1, 2, 3)]
    assert names == [("", False), *layers, ("4", False), ("5", False)]
    assert found.num_layers == 3


def test_what_needs_no_gradient_is_with_the_first_layer_that_does():
    model = Decoder()
    model.embed.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    names, found = units(model, ids())
    assert names[:2] == [("", True), ("layers.2", True)]
    assert found.units[0].modules == ("embed", "layers.0", "layers.1")


@pytest.mark.parametrize(
    ("kind", "num_stages", "num_ranks", "in_flight"),
    [
        ("1f1b", 4, 4, [4, 3, 2, 1]),
        ("gpipe", 2, 2, [8, 8]),
        ("interleaved", 4, 2, [4, 3, 2, 1]),
    ],
)
def test_microbatches_in_flight(kind, num_stages, num_ranks, in_flight):
    orders = StageOrders(kind=kind, num_stages=num_stages, num_microbatches=8, num_ranks=num_ranks)
    assert [orders.num_in_flight(stage) for stage in range(num_stages)] == in_flight


def test_a_heavy_head_has_fewer_layers_beside_it():
    split = memo_compile.pipeline_split(
        Decoder(), 2, (ids(),), loss_fn=loss, mb_target=ids(), **OPTIONS
    )
    assert [stage.num_layers for stage in split.even] == [2, 2]
    assert split.slowest_s < split.even_slowest_s
    assert split.split_points == ("norm",)
    assert list(split.split_spec()) == ["norm"]
    assert split.modules_per_stage == [
        ["embed", *(f"layers.{at}" for at in range(4))],
        ["norm", "head"],
    ]
    assert "slowest stage" in str(split)
    assert f"{split.slowest_s / split.even_slowest_s:.3f} x that of the even split" in str(split)


def test_a_stage_is_planned_as_the_backend_plans_it():
    """The last one of 1F1B, which runs its microbatches one by one."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(HIDDEN) for _ in range(4))), torch.randn(4 * ROWS, HIDDEN)
    budget = 700_000
    split = memo_compile.pipeline_split(model, 2, (x,), memory_budget=budget, **OPTIONS)
    options = {**OPTIONS, "memory_budget": budget, "gradients": "accumulated", "microbatches": 4}
    del options["num_microbatches"]
    last = model[int(split.split_points[0]) :]
    compiled = torch.compile(last, backend="memo", dynamic=False, options=options)
    compiled(x.requires_grad_()).sum().backward()
    assert split.stages[1].peak_bytes == memo_compile.report().plans[-1].peak_bytes <= budget


def test_less_memory_is_more_time_until_nothing_fits():
    model, x = nn.Sequential(*(Block(HIDDEN) for _ in range(3))), torch.randn(4 * ROWS, HIDDEN)

    def split(budget):
        options = {**OPTIONS, "num_microbatches": 2, "token_tiles": 1}
        return memo_compile.pipeline_split(
            model, 2, (x,), memory_budget=budget, schedule="gpipe", **options
        )

    free = split(None)
    assert all(stage.more_s == 0 for stage in free.stages)
    with pytest.raises(
        Infeasible, match=r"no split into 2 stages fits .* the smallest that"
    ) as none:
        split(100_000)
    floor = none.value.floor_bytes
    tight = split(floor)
    assert max(stage.peak_bytes for stage in tight.stages) <= floor
    assert free.slowest_s < tight.slowest_s < math.inf
    assert any("recomputed" in line or "host" in line for line in tight.stages[0].decisions)


def test_stages_of_one_rank_share_its_budget():
    """Interleaved: what the rank keeps of one stage leaves less to the other."""
    model, x = nn.Sequential(*(Block(HIDDEN, 2 + 6 * (at == 4)) for at in range(5))), rows()
    options = {**OPTIONS, "num_microbatches": 2, "schedule": "interleaved", "num_ranks": 2}

    def split(model, budget):
        return memo_compile.pipeline_split(model, 4, (x,), memory_budget=budget, **options)

    free = split(model, None)
    assert [stage.num_in_flight for stage in free.stages] == [2, 2, 2, 1]
    assert sum(stage.num_layers for stage in free.stages) == 5
    assert free.stages[-1].num_layers == 1
    assert free.stages[0].peak_bytes == free.stages[2].peak_bytes
    assert not free.is_proved
    budget = int(0.9 * max(stage.peak_bytes for stage in free.stages))
    tight = split(model, budget)
    assert max(stage.peak_bytes for stage in tight.stages) <= budget
    assert any(stage.decisions for stage in tight.stages)
    with pytest.raises(Infeasible, match=r"no split into 4 stages .* the smallest that was found"):
        split(model[:4], 100_000)


def test_a_model_on_meta_is_split_for_named_hardware():
    with torch.device("meta"):
        model, x = Decoder(), torch.zeros(ROWS, dtype=torch.long)
    split = memo_compile.pipeline_split(
        model, 2, (x,), hardware="cpu", loss_fn=loss, mb_target=x, **OPTIONS
    )
    assert all(own.is_meta for own in model.parameters())
    assert split.slowest_s < split.even_slowest_s
    with pytest.raises(ConfigError, match=r"lies on meta.* name the hardware"):
        memo_compile.pipeline_split(model, 2, (x,), num_microbatches=4)


def test_tied_weights_on_two_stages_are_named():
    split = memo_compile.pipeline_split(Decoder(is_tied=True), 2, (ids(),), **OPTIONS)
    assert any("embed.weight is read by stages 0, 1" in note for note in split.notes)


@pytest.mark.parametrize(
    ("model", "arguments", "error", "reason"),
    [
        (Decoder(2), {"num_stages": 3}, ConfigError, "3 stages, but the model has 2 layers"),
        (
            nn.Sequential(nn.Embedding(VOCAB, 4), nn.Linear(4, 4)),
            {},
            ConfigError,
            "no list of modules",
        ),
        (Decoder(), {"schedule": "zb"}, ConfigError, r"expected one of 1f1b, gpipe.* got 'zb'"),
        (Decoder(), {"num_ranks": 1}, ConfigError, "1f1b has one stage on each rank, got 2"),
        (Decoder(), {"schedule": "interleaved"}, ConfigError, "two or more on each of 2 ranks"),
        (
            Decoder(),
            {"num_stages": 4, "schedule": "interleaved", "num_ranks": 2, "num_microbatches": 3},
            ConfigError,
            "expects a multiple of the 2 ranks, got 3",
        ),
        (Decoder(), {"num_microbatches": 0}, ConfigError, "num_microbatches: expected at least 1"),
        (Decoder(), {"loss_fn": loss}, ConfigError, "loss_fn needs mb_target"),
        (Decoder(), {"memory_budgets": 1}, ConfigError, "memory_budgets"),
        (lambda x: x, {}, ConfigError, "expected a module, got function"),
        (Decoder(), {"mb_args": ()}, ConfigError, "Decoder cannot be called with them: missing"),
        (Decoder(), {"mb_args": ids()}, ConfigError, r"got one tensor; write \(tensor,\)"),
        (Decoder().requires_grad_(False), {}, UnsupportedGraph, "nothing in this step needs"),
    ],
)
def test_what_cannot_be_split_is_refused(model, arguments, error, reason):
    given = {"num_stages": 2, "mb_args": (ids(),), **OPTIONS, **arguments}
    with pytest.raises(error, match=reason):
        memo_compile.pipeline_split(model, **given)
