"""A region in tiles computes what the region computes, with less memory in between."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from memo_compile.analysis.purity import is_check
from memo_compile.analysis.regions import RegionGraph
from memo_compile.analysis.tile_chains import transient_bytes
from memo_compile.analysis.views import results_of
from memo_compile.costs.roofline import graph_cost
from memo_compile.lowering.aten import estimate, interpret
from memo_compile.passes.tiles import TiledRegion, tilings
from memo_compile.step.tilings import Operand, Ref, Slice, Source, TileRun, Tiling
from tests import models
from tests.steps.programs import step_programs

TOKENS, WIDTH, VOCABULARY, INNER = 256, 16, 32768, 2048
TILES = 8


def region(
    function: Callable[..., object], *args: torch.Tensor, external: tuple[int, ...] = ()
) -> RegionGraph:
    gm = make_fx(function, tracing_mode="fake")(*args)
    gm.graph.eliminate_dead_code()
    return RegionGraph(
        name="part",
        gm=gm,
        external_outputs=frozenset(external),
        static_inputs=(),
        is_backward=False,
        device=torch.device("cpu"),
    )


def rows_of(value: torch.Tensor, part: Slice | None, number: int) -> torch.Tensor:
    if part is None:
        return value
    return value.narrow(part.dim, part.start + number * part.length, part.length)


def tiles_of(tiling: Tiling) -> Iterator[tuple[TileRun, int]]:
    for run in tiling.runs:
        yield from ((run, number) for number in range(run.num_tiles))


def run_part(part: RegionGraph, inputs: list[Any]) -> list[Any]:
    for given, node in zip(inputs, part.example_inputs(), strict=True):
        assert (given.shape, given.dtype) == (node.shape, node.dtype)
    return list(interpret(part.gm)(list(inputs)))


def run_tiled(tiled: TiledRegion, inputs: list[torch.Tensor]) -> list[Any]:
    """Plain torch in place of the step program: slices of rows, and sums in place."""
    tiling = tiled.tiling
    made: dict[Source, list[Any]] = {Source.REGION_INPUT: list(inputs)}

    def value(ref: Ref) -> Any:
        return made[ref.source][ref.index]

    def slices(operands: Iterable[Operand], number: int) -> list[Any]:
        """Operands are read as ``whole``: a view of all of the value, where it is not that."""
        found = []
        for operand in operands:
            seen, whole = value(operand.value), operand.whole
            assert whole is not None
            seen = seen.as_strided(whole.size, whole.stride, seen.storage_offset())
            found.append(rows_of(seen, operand.slice, number))
        return found

    given = [inputs[at] for at in tiling.before_inputs]
    made[Source.BEFORE] = run_part(tiled.parts[tiling.before], given)
    for run, number in tiles_of(tiling):
        made[Source.TILE] = run_part(tiled.parts[run.region], slices(run.inputs, number))
        for rows, result in zip(run.rows, made[Source.TILE], strict=False):
            rows_of(made[Source.BEFORE][rows.whole], rows.slice, number).copy_(result)
        for running_sum in run.sums:
            total = made[Source.BEFORE][running_sum.total]
            terms = slices(running_sum.terms, number)
            total.copy_(*run_part(tiled.parts[running_sum.region], [total, *terms]))
    if tiling.after is not None:
        given = [value(ref) for ref in tiling.after_inputs]
        made[Source.AFTER] = run_part(tiled.parts[tiling.after], given)
    return [value(ref) for ref in tiling.outputs]


def total_shapes(tiled: TiledRegion) -> list[torch.Size]:
    """Of what the sums are written over."""
    made = results_of(tiled.parts[tiled.tiling.before].gm.graph)
    return [made[running_sum.total].meta["val"].shape for running_sum in tiled.tiling.runs[0].sums]


def tile(region: RegionGraph, tiles: int) -> TiledRegion | None:
    return next(iter(tilings(region, tiles)), None)


def check(whole: RegionGraph, inputs: list[torch.Tensor], tiles: int = TILES) -> TiledRegion:
    tiled = tile(whole, tiles)
    assert tiled is not None
    for part in tiled.parts.values():
        part.gm.graph.lint()
    expected = interpret(whole.gm)(list(inputs))
    for got, wanted in zip(run_tiled(tiled, inputs), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    return tiled


def targets(part: RegionGraph) -> list[str]:
    return [str(node.target) for node in part.gm.graph.nodes if node.op == "call_function"]


def head(x, weight, labels):
    """Loss and what its backward keeps, as Inductor's decompositions write them."""
    logits = (x.view(-1, x.shape[-1]) @ weight.t()).float()
    top = logits.amax(1, keepdim=True)
    norm = (logits - top).exp().sum(1, keepdim=True).log() + top
    flat = labels.view(-1)
    kept = flat != -100
    at = torch.where(kept, flat, 0).unsqueeze(1)
    losses = torch.where(kept, (norm - logits.gather(1, at)).squeeze(1), 0.0)
    count = kept.sum().float()
    return losses.sum() / count, norm, count


def head_backward(x, weight, labels, norm, count, tangent):
    flat_x, flat = x.view(-1, x.shape[-1]), labels.view(-1)
    logits = flat_x @ weight.t()
    kept = flat != -100
    at = torch.where(kept, flat, 0).unsqueeze(1)
    scale = torch.where(kept, tangent / count, 0.0).unsqueeze(1)
    one_hot = torch.arange(weight.shape[0]) == at
    grad = ((logits - norm).exp() - torch.where(one_hot, 1.0, 0.0)) * scale
    return (grad @ weight).view(x.shape), grad.t() @ flat_x


@pytest.fixture
def head_inputs():
    torch.manual_seed(0)
    labels = torch.randint(0, VOCABULARY, (1, TOKENS))
    labels[0, -3:] = -100
    return [torch.randn(1, TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH), labels]


def test_the_loss_head_never_has_all_logits(head_inputs):
    whole = region(head, *head_inputs, external=(0,))
    tiled = check(whole, head_inputs)
    all_logits = TOKENS * VOCABULARY * 4
    assert transient_bytes(whole.gm) >= 2 * all_logits
    assert tiled.tiling.num_tiles == TILES
    assert tiled.num_rows == TOKENS
    assert tiled.transient_bytes <= transient_bytes(whole.gm) * 1.05 / TILES
    assert transient_bytes(tiled.parts["part.tile"].gm) <= tiled.transient_bytes
    assert total_shapes(tiled) == [(), ()]
    (rows,) = tiled.tiling.runs[0].rows
    assert rows.slice == Slice(dim=0, length=TOKENS // TILES)
    whole_rows = tiled.parts["part.before"].output_layouts()[rows.whole]
    assert whole_rows is not None
    assert whole_rows.size == (TOKENS, 1)


def test_the_backward_of_the_loss_head_makes_the_logits_again_in_tiles(head_inputs):
    count = torch.tensor(float(TOKENS - 3))
    norm = head(*head_inputs)[1]
    inputs = [*head_inputs, norm, count, torch.tensor(1.0)]
    whole = region(head_backward, *inputs, external=(1,))
    tiled = check(whole, inputs)
    assert tiled.transient_bytes <= transient_bytes(whole.gm) * 1.05 / TILES
    (total,) = tiled.tiling.runs[0].sums
    products = [name for name in targets(tiled.parts[total.region]) if "mm" in name]
    assert products == ["aten.addmm.default"]
    assert total_shapes(tiled) == [(VOCABULARY, WIDTH)]
    assert tiled.tiling.outputs[1] == Ref(source=Source.BEFORE, index=total.total)
    before = tiled.parts["part.before"]
    assert before.external_outputs, "the gradient's memory is the user's from the start"


def swiglu(x, gate, up, down):
    return (x + (functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t(),)


def mlp_inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    weights = [torch.randn(INNER, WIDTH), torch.randn(INNER, WIDTH), torch.randn(WIDTH, INNER)]
    return [torch.randn(1, TOKENS, WIDTH), *(0.1 * weight for weight in weights)]


def test_an_mlp_in_tiles():
    inputs = mlp_inputs()
    whole = region(swiglu, *inputs)
    tiled = check(whole, inputs)
    assert tiled.transient_bytes <= transient_bytes(whole.gm) * 1.1 / TILES
    (rows,) = tiled.tiling.runs[0].rows
    assert rows.slice == Slice(dim=1, length=TOKENS // TILES)


def test_the_backward_of_an_mlp_recomputes_in_tiles():
    inputs = mlp_inputs()

    def backward(x, gate, up, down, tangent):
        flat = x.view(-1, WIDTH)
        grad = tangent.view(-1, WIDTH)
        opened, raised = flat @ gate.t(), flat @ up.t()
        sigmoid = opened.sigmoid()
        inner = grad @ down
        d_down = grad.t() @ (opened * sigmoid * raised)
        d_raised = inner * opened * sigmoid
        d_opened = inner * raised * sigmoid * (1 + opened * (1 - sigmoid))
        d_x = (tangent + (d_opened @ gate + d_raised @ up).view(x.shape)).relu()
        return d_x, d_opened.t() @ flat, d_raised.t() @ flat, d_down, d_x.sum((0, 1)), d_x.mean(1)

    inputs.append(torch.randn(1, TOKENS, WIDTH))
    whole = region(backward, *inputs, external=(1, 2, 3))
    tiled = check(whole, inputs)
    assert tiled.transient_bytes <= transient_bytes(whole.gm) * 1.1 / TILES
    assert len(tiled.tiling.runs[0].sums) == 5


def short_product(num_tokens: int) -> tuple[RegionGraph, list[torch.Tensor]]:
    """The gradient of a weight, which the user gets, and of its bias, in bfloat16."""

    def backward(x, weight, tangent):
        wide = torch.sigmoid(x @ weight) * (tangent @ weight)
        return wide.t() @ x, wide.sum(0), (wide.float() ** 2).sum()

    torch.manual_seed(0)
    shapes = [(num_tokens, WIDTH), (WIDTH, INNER), (num_tokens, WIDTH)]
    inputs = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    return region(backward, *inputs, external=(0,)), inputs


def total_types(tiled: TiledRegion) -> list[torch.dtype]:
    made = results_of(tiled.parts["part.before"].gm.graph)
    return [made[running_sum.total].meta["val"].dtype for running_sum in tiled.tiling.runs[0].sums]


def farther(tiled: TiledRegion, whole: RegionGraph, inputs: list[torch.Tensor]) -> float:
    """How many times as far from float64 as the whole its first result is in tiles."""
    exact = interpret(whole.gm)([value.double() for value in inputs])[0]
    runs = run_tiled(tiled, inputs), interpret(whole.gm)(list(inputs))
    ours, theirs = (float((made[0].double() - exact).norm()) for made in runs)
    return ours / theirs


def test_sums_of_16_bit_numbers_are_added_up_in_float32_and_rounded_once():
    whole, inputs = short_product(16 * WIDTH)
    tiled = check(whole, inputs)
    assert tiled.tiling.num_tiles == TILES
    assert set(total_types(tiled)) == {torch.float32}
    assert tiled.transient_bytes >= 4 * INNER * WIDTH, "the sum exists beside the gradient"
    assert not tiled.parts["part.before"].external_outputs
    assert tiled.parts["part.after"].external_outputs == {0}
    assert farther(tiled, whole, inputs) < 1.05


def test_two_tiles_where_a_sum_in_float32_takes_what_more_would_save():
    whole, inputs = short_product(WIDTH // 2)
    tiled = tile(whole, TILES)
    assert tiled is not None
    assert tiled.tiling.num_tiles == 2
    assert farther(tiled, whole, inputs) < 1.2
    assert total_types(tiled) == [torch.bfloat16, torch.float32, torch.float32]
    assert tiled.transient_bytes < transient_bytes(whole.gm) * 0.7
    assert tiled.parts["part.before"].external_outputs, "added up in the gradient's own memory"


def test_a_gpu_adds_products_of_16_bit_numbers_to_float32():
    whole, _ = short_product(16 * WIDTH)
    tiled = tile(replace(whole, device=torch.device("cuda")), TILES)
    assert tiled is not None
    (product,) = (part for name, part in tiled.parts.items() if "addmm" in str(targets(part)))
    assert targets(product) == ["aten.t.default", "aten.addmm.dtype"]
    cost = graph_cost(product.gm)
    assert cost.flops == 2 * 16 * WIDTH * INNER * WIDTH // TILES
    assert not estimate(replace(product, device=torch.device("cpu"))).outside


def test_a_chain_behind_attention_reads_what_before_made():
    def layer(x, qkv, gate, down):
        q, k, v = (x @ qkv).view(1, TOKENS, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(1, TOKENS, WIDTH)
        place = torch.arange(TOKENS).view(1, -1, 1) / TOKENS
        return x + functional.gelu(x @ gate) @ down * place, q

    torch.manual_seed(0)
    shapes = [(1, TOKENS, WIDTH), (WIDTH, 48), (WIDTH, INNER), (INNER, WIDTH)]
    inputs = [torch.randn(shape) * 0.2 for shape in shapes]
    whole = region(layer, *inputs)
    tiled = check(whole, inputs)
    assert any("attention" in target for target in targets(tiled.parts["part.before"]))
    assert not any("attention" in target for target in targets(tiled.parts["part.tile"]))
    assert tiled.transient_bytes <= transient_bytes(whole.gm) / 2


def test_a_sum_of_a_result_that_tiles_cannot_fill():
    """What is summed is given to the tile, before which its sums so far are given as well."""

    def both(turned, x, w):
        made = (turned * 2).sin()
        wide = (x @ w).sin() * (made @ w)
        return made, made.sum(0), wide @ w.t(), wide.sum(0)

    torch.manual_seed(0)
    shapes = [(16, TOKENS), (TOKENS, 16), (16, INNER)]
    turned, *others = (torch.randn(shape) * 0.2 for shape in shapes)
    inputs = [turned.t(), *others]
    tiled = check(region(both, *inputs), inputs)
    assert len(tiled.tiling.runs[0].sums) == 2


def test_a_result_that_tiles_cannot_fill_is_made_before_them():
    """The gradient of attention's input; the rotated keys' lies in memory by tokens, then heads."""

    def d_input(d_q, d_k, cos, query, key):
        d_key = d_k * cos - torch.cat([d_k[..., 4:] * cos[:, 4:], d_k[..., :4]], 3)
        rows = d_key.permute(0, 2, 1, 3).reshape(TOKENS, 16)
        return d_key, d_q @ query + rows @ key

    torch.manual_seed(0)
    d_k = torch.randn(1, TOKENS, 2, 8).permute(0, 2, 1, 3)
    shapes = [(TOKENS, 32), (TOKENS, 8), (32, INNER), (16, INNER)]
    d_q, *others = (torch.randn(shape) * 0.2 for shape in shapes)
    whole = region(d_input, d_q, d_k, *others)
    tiled = check(whole, [d_q, d_k, *others])
    assert not results_of(whole.gm.graph)[0].meta["val"].is_contiguous()
    assert not any("cat" in target for target in targets(tiled.parts["part.tile"]))
    assert tiled.transient_bytes < transient_bytes(whole.gm) / 4


def test_several_sequences_split_along_the_flattened_tokens(head_inputs):
    x, weight, labels = head_inputs
    inputs = [x.view(2, -1, WIDTH), weight, labels.view(2, -1)]
    tiled = check(region(head, *inputs), inputs)
    assert tiled.num_rows == TOKENS


def lengths(tiled: TiledRegion) -> list[int]:
    """Rows of each tile of a head, by its labels."""
    labels = [
        next(
            operand.slice.length
            for operand in run.inputs
            if operand.whole is not None and operand.whole.dtype == "int64" and operand.slice
        )
        for run, _ in tiles_of(tiled.tiling)
    ]
    return labels


def test_the_last_tile_is_shorter_where_tiles_do_not_divide_the_rows(head_inputs):
    tiled = check(region(head, *head_inputs), head_inputs, tiles=7)
    assert lengths(tiled) == [48, 48, 48, 48, 48, 16]


@pytest.mark.parametrize("num_rows", [TOKENS - 1, TOKENS - 2, 241, 131])
def test_any_number_of_rows_runs_in_tiles(head_inputs, num_rows):
    """255 and 254 are a shifted loss's, 241 would leave one row to the last tile, 131 is prime."""
    x, weight, labels = head_inputs
    inputs = [x[:, :num_rows].clone(), weight, labels[:, :num_rows].clone()]
    whole = region(head, *inputs, external=(0,))
    tiled = check(whole, inputs)
    (length, *others), rest = lengths(tiled)[:-1], lengths(tiled)[-1]
    assert set(others) <= {length}
    assert length % 16 == 0
    assert 1 < rest <= length
    assert sum(lengths(tiled)) == num_rows
    assert tiled.transient_bytes <= transient_bytes(whole.gm) * 1.2 * length / num_rows
    backward = [*inputs, *head(*inputs)[1:], torch.tensor(1.0)]
    assert check(region(head_backward, *backward, external=(1,)), backward)
    means = region(lambda x, weight: ((x @ weight.t()).sin().mean(1),), *inputs[:2])
    assert check(means, inputs[:2]).tiling.runs[0].sums


@pytest.mark.full
def test_the_head_of_a_real_model_sums_its_weight_gradient_over_tiles():
    def make():
        model, inputs, loss = models.llama(num_layers=2)
        names = list(inputs)

        def call(*values):
            return loss(model, **dict(zip(names, values, strict=True)))

        return call, [value[:1] for value in inputs.values()]

    whole = step_programs(make).backward.regions["epilogue_bwd"]
    torch.manual_seed(0)
    inputs = [
        torch.randint(0, 8, tensor.shape)
        if tensor.dtype is torch.int64
        else torch.rand(tensor.shape)
        for tensor in whole.example_inputs()
    ]
    tiled = check(whole, inputs)
    assert set(total_shapes(tiled)) == {(models.VOCABULARY, models.HIDDEN), (1, 1, models.HIDDEN)}
    before = tiled.parts[tiled.tiling.before]
    assert len(before.external_outputs) == len(whole.external_outputs)


def refused(function, *args, external=()):
    assert tile(region(function, *args, external=external), TILES) is None


def test_nothing_is_tiled_where_nothing_would_be_saved(head_inputs):
    x, weight, _ = head_inputs
    refused(lambda x, weight: ((x @ weight.t()),), x, weight)
    refused(lambda x, weight: ((x @ weight.t()),), x, weight, external=(0,))
    refused(lambda x: (x.cumsum(1).cumsum(1) * 2,), torch.randn(1, TOKENS, WIDTH))
    refused(lambda x: (x.exp().softmax(0),), torch.randn(TOKENS, WIDTH))
    refused(lambda x: (x + 1,), x)
    assert tile(region(head, *head_inputs), 1) is None


def test_a_region_that_writes_into_its_inputs_is_left_alone(head_inputs):
    def program(x, weight, labels):
        loss, norm, _ = head(x, weight, labels)
        torch.ops.aten.copy_.default(x, x + 1)
        return loss, norm

    gm = make_fx(program, tracing_mode="fake")(*head_inputs)
    whole = region(head, *head_inputs)
    assert tile(whole, TILES) is not None
    written = RegionGraph(
        name="part",
        gm=gm,
        external_outputs=frozenset(),
        static_inputs=(),
        is_backward=False,
        device=torch.device("cpu"),
    )
    assert tile(written, TILES) is None


def require(is_right: torch.Tensor) -> None:
    torch.ops.aten._assert_async.msg(is_right.all(), "a wrong value")


def checked_head(x, weight, labels):
    require(weight < 1e4)
    require(labels < VOCABULARY)
    loss, norm, count = head(x, weight, labels)
    require(norm < 1e4)
    return loss, norm, count


def test_checks_of_inputs_and_results_are_made_once_around_the_tiles(head_inputs):
    tiled = check(region(checked_head, *head_inputs), head_inputs)
    parts = {name: sum(map(is_check, part.gm.graph.nodes)) for name, part in tiled.parts.items()}
    assert {name: number for name, number in parts.items() if number} == {
        "part.before": 2,
        "part.after": 1,
    }

    x, weight, labels = head_inputs
    for wrong in (
        [x, weight + 2e4, labels],
        [x, weight, labels + VOCABULARY],
        [x * 1e6, weight, labels],
    ):
        with pytest.raises(RuntimeError, match="a wrong value"):
            run_tiled(tiled, wrong)


def test_a_region_that_prints_is_left_alone(head_inputs):
    whole = region(checked_head, *head_inputs)
    assert tile(whole, TILES) is not None
    printed = next(filter(is_check, whole.gm.graph.nodes))
    printed.target, printed.args = torch.ops.aten._print.default, ("some text",)
    assert tile(whole, TILES) is None


def test_transient_bytes_counts_storages_once_and_outputs_never():
    graph = fx.Graph()
    value = torch.empty(4, 8, device="meta")
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.exp.default, (x,))
    seen = graph.call_function(torch.ops.aten.view.default, (y, [32]))
    z = graph.call_function(torch.ops.aten.sin.default, (seen,))
    out = graph.call_function(torch.ops.aten.cos.default, (z,))
    graph.output((out,))
    for node in (x, y):
        node.meta["val"] = value
    for node in (seen, z, out):
        node.meta["val"] = value.view(32)
    gm = fx.GraphModule({}, graph)
    assert transient_bytes(gm) == 2 * 32 * 4
