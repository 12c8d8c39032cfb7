"""Masks as large as attention's scores are named, and are not needed where the note says so."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import memo_compile
from memo_compile.analysis import masks, position_masks
from memo_compile.analysis.position_masks import Allowed
from memo_compile.passes.needless_masks import NeedlessMasks, needless_masks
from memo_compile.reporting import state
from tests import models
from tests.numerics.training import gradients_of, in_ci, memo_compiled

TOKENS = 48


@pytest.fixture(autouse=True)
def _small_masks(monkeypatch):
    monkeypatch.setattr(masks, "LARGE_NUMBERS", TOKENS**2)
    torch._dynamo.reset()
    state.reset()
    yield
    state.reset()


def mask_notes() -> list[str]:
    return [note for note in memo_compile.report().notes if "reads a mask" in note]


def left_out() -> int:
    """How many calls of attention run without the mask that the graph made for them."""
    notes = [note for note in memo_compile.report().notes if "calls of attention run" in note]
    return sum(int(note.split()[0]) for note in notes)


def gradients(model, inputs, loss, **options):
    planned = memo_compiled(model, lowering="aten", **options)
    model.zero_grad()
    loss(planned, **inputs).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_a_mask_of_positions_that_stays_is_named_and_attention_without_it_is_the_same():
    model, inputs, loss = models.llama(num_layers=1, seq=TOKENS)
    twin = copy.deepcopy(model)
    with_mask = gradients(model, inputs, loss, passes="-needless-masks")
    (note,) = mask_notes()
    assert f"a mask of {TOKENS} x {TOKENS} numbers" in note
    assert "positions alone" in note
    state.reset()
    AttentionInterface.register("sdpa-causal", sdpa_attention_forward)
    twin.set_attn_implementation("sdpa-causal")
    without = gradients(twin, inputs, loss)
    assert mask_notes() == []
    for name, gradient in with_mask.items():
        torch.testing.assert_close(without[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_a_mask_that_is_made_of_an_input_names_it():
    model, inputs, loss = models.llama(num_layers=1, seq=TOKENS)
    given = torch.ones(inputs["input_ids"].shape, dtype=torch.long)
    gradients(model, {**inputs, "attention_mask": given}, loss)
    (note,) = mask_notes()
    assert "an attention_mask" in note


class Biased(nn.Module):
    """Attention with a bias that is learned, or given."""

    def __init__(self) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.zeros(TOKENS, TOKENS))
        self.weight = nn.Linear(16, 16)

    def forward(self, x, bias=None):
        query = self.weight(x).unflatten(-1, (2, 8)).transpose(1, 2)
        bias = self.learned * 2 if bias is None else bias
        return functional.scaled_dot_product_attention(query, query, query, bias).sum()


@pytest.mark.parametrize("given", [False, True])
def test_a_bias_that_the_model_means_is_not_named(given):
    bias = (torch.zeros(TOKENS, TOKENS, dtype=torch.bool).logical_not(),) if given else ()
    planned = memo_compiled(Biased(), lowering="aten")
    planned(torch.randn(1, TOKENS, 16), *bias).backward()
    assert mask_notes() == []


@pytest.mark.parametrize("dynamic", in_ci([None, True], None))
def test_lengths_within_a_window_need_no_mask_and_longer_ones_do(dynamic):
    from transformers import MistralConfig

    torch.manual_seed(0)
    window = 12
    sizes = models._sizes(1, sliding_window=window)
    model, _, loss = models._decoder(MistralConfig(**sizes), 8)
    planned = torch.compile(
        model, backend="memo", dynamic=dynamic, options={"lowering": "aten", "strict": True}
    )
    twin = copy.deepcopy(model)
    for tokens in (window, window + 1):
        inputs = models.causal_inputs(tokens)
        for each, of in ((planned, model), (twin, twin)):
            of.zero_grad()
            loss(each, **inputs).backward()
        wanted = gradients_of(twin)
        for name, found in gradients_of(model).items():
            torch.testing.assert_close(found, wanted[name], rtol=1e-4, atol=1e-6, msg=name)
    assert left_out() == 1
    assert memo_compile.report().unplanned_steps == 0


T = 16


def positions():
    return torch.arange(T)


def triangle():
    return torch.ones(T, T, dtype=torch.bool).tril()


def written_through_a_view():
    mask = triangle()
    mask[3].fill_(True)
    return mask


def written():
    mask = triangle()
    mask[1:, 0] = False
    return mask


def narrowed():
    mask = triangle()
    mask &= torch.ones(T, T, dtype=torch.bool).triu(-3)
    return mask


def window(width):
    rows, columns = positions()[:, None], positions()[None, :]
    return (columns <= rows) & (columns > rows - width)


CAUSAL = {
    "ones.tril": triangle,
    "~ones.triu": lambda: ~torch.ones(T, T, dtype=torch.bool).triu(1),
    "le": lambda: positions() <= positions()[:, None],
    "ge": lambda: positions()[:, None] >= positions(),
    "lt": lambda: positions() < positions()[:, None] + 1,
    "not gt": lambda: (positions() > positions()[:, None]).logical_not(),
    "wide window": lambda: window(T),
    "expanded": lambda: triangle()[None, None].expand(1, 2, T, T),
    "where": lambda: torch.where(torch.ones(T, T).tril() > 0.5, 1, 0).bool(),
    "filled": lambda: torch.zeros(T, T).masked_fill(torch.ones(T, T).triu(1).bool(), -1.0) == 0,
    "offset": lambda: (positions() + 3)[None] <= (positions() + 3)[:, None],
}
OTHER = {
    "narrow window": lambda: window(T - 1),
    "strict": lambda: positions() < positions()[:, None],
    "reversed": lambda: positions() >= positions()[:, None],
    "falling": lambda: positions().flip(0) <= positions().flip(0)[:, None],
    "transposed": lambda: triangle().transpose(0, 1),
    "one more": lambda: torch.ones(T, T, dtype=torch.bool).tril(1),
    "shifted": lambda: positions()[None] <= positions()[:, None] + 1,
    "rows apart": lambda: (positions() // 8 == positions()[:, None] // 8) & triangle(),
    "of a batch": lambda: (
        positions()[None, None] <= positions()[:, None] * torch.tensor([1, 2])[:, None, None]
    )[:, None],
    "rounded": lambda: positions() * 0.1 <= positions()[:, None] * 0.1,
    "random": lambda: (torch.rand(T, T) > 0.01) & triangle(),
    "written": written,
    "written through a view": written_through_a_view,
    "narrowed in place": narrowed,
    "nothing": lambda: torch.zeros(T, T, dtype=torch.bool),
    "float": lambda: torch.zeros(T, T).masked_fill(~triangle(), float("-inf")),
}


@pytest.mark.parametrize("kind", [*CAUSAL, *OTHER, "all"])
def test_what_a_mask_says(kind, monkeypatch):
    """Followed in vectors, and computed."""
    make = {**CAUSAL, **OTHER, "all": lambda: torch.ones(T, T, dtype=torch.bool)}[kind]
    seen = []

    def backend(gm, _):
        for computed in (T, T * T):
            monkeypatch.setattr(position_masks, "COMPUTED_NUMBERS", computed)
            seen.append(needless_masks(gm))
        NeedlessMasks(allowed=seen[-1])(gm)
        gm.graph.lint()
        gm.recompile()
        return gm

    def attend(query):
        return functional.scaled_dot_product_attention(query, query, query, attn_mask=make())

    query = torch.randn(2, 2, T, 8)
    found = torch.compile(attend, backend=backend, fullgraph=True)(query)
    said = [] if kind in OTHER else [Allowed.ALL if kind == "all" else Allowed.CAUSAL]
    assert [list(each.values()) for each in seen] == [said, said]
    if kind != "random":
        torch.testing.assert_close(found, attend(query), equal_nan=True)


def test_unmodified_attention_runs_causal_without_its_mask():
    model, inputs, loss = models.llama(num_layers=2, seq=TOKENS)
    twin = copy.deepcopy(model)
    found = gradients(model, inputs, loss)
    assert left_out() == 2
    assert mask_notes() == []
    loss(twin, **inputs).backward()
    for name, gradient in gradients_of(twin).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@torch.library.custom_op("memo_tests::schedule", mutates_args=())
def schedule(tokens: int) -> torch.Tensor:
    """What a user's operator makes once says nothing of the next time."""
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


@schedule.register_fake
def _(tokens):
    return torch.empty(tokens, tokens, dtype=torch.bool)


def tall():
    """Where tokens are one, they are no triangle of others."""
    return (torch.ones(4, 1, 1, dtype=torch.bool).tril() & torch.ones(4, T, T, dtype=torch.bool))[0]


def not_numbers():
    rows = positions().float().masked_fill(positions() == T - 1, float("nan"))
    return positions().float() <= rows[:, None]


def normalised():
    mask = torch.ones(T, T).tril()
    torch.norm(torch.ones(T, T), 2, 1, False, mask[0])
    return mask > 0.5


@pytest.mark.parametrize(
    "make",
    [lambda: schedule(T), tall, not_numbers, normalised],
    ids=["schedule", "tall", "nan", "out"],
)
@pytest.mark.parametrize("computed", [0, 4, T])
def test_what_cannot_be_known_is_left(make, computed, monkeypatch):
    monkeypatch.setattr(position_masks, "COMPUTED_NUMBERS", computed)
    seen = []

    def backend(gm, _):
        seen.append(needless_masks(gm))
        return gm

    def attend(query):
        return functional.scaled_dot_product_attention(query, query, query, attn_mask=make())

    torch.compile(attend, backend=backend)(torch.randn(1, 2, T, 8))
    assert not any(Allowed.CAUSAL in each.values() for each in seen)


@pytest.mark.parametrize("shape", [(1, 2, T, 8), (2, T, 8), (3, 2, 1, 8)])
def test_a_mask_that_is_wider_than_the_scores_stays(shape):
    """Of the compiled graph torch makes results as wide as the mask; eager attention refuses."""

    def attend(query):
        key = torch.ones(T, 8).expand(*shape[:-2], T, 8) * query
        mask = triangle().expand(3, 1, T, T)
        return functional.scaled_dot_product_attention(query, key, key, attn_mask=mask).cos()

    query = torch.randn(shape, requires_grad=True)
    options = {"lowering": "aten", "strict": True}
    found = torch.compile(attend, backend="memo", options=options)(query)
    torch.testing.assert_close(found, torch.compile(attend, backend="aot_eager")(query))


def test_a_graph_in_which_nothing_tells_of_memory_keeps_its_masks():
    seen = []

    def backend(gm, _):
        seen.append(needless_masks(gm))
        return gm

    def attend(query):
        hidden = torch.func.vmap(torch.sin)(query)
        return functional.scaled_dot_product_attention(hidden, query, query, attn_mask=triangle())

    torch.compile(attend, backend=backend, fullgraph=True)(torch.randn(1, 2, T, 8))
    assert seen == [{}]
