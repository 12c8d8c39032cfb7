"""Attention's kernels on CUDA: what they return, and where it lies."""

import sys
import types
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

import memo_compile
from memo_compile.analysis import masks
from memo_compile.lowering.workspace import _efficient_bytes
from memo_compile.reporting import state
from tests import models
from tests.cuda_emulated.device_calls import counts
from tests.cuda_emulated.test_memory import Training
from tests.steps import flash_attention

WIDTH, HEADS, TOKENS, NUM_LAYERS = 256, 4, 128, 4


class Attention(nn.Module):
    """One layer of attention, with dropout and with fewer heads of keys where asked."""

    def __init__(self, dropout: float, key_heads: int) -> None:
        super().__init__()
        self.dropout, self.key_heads = dropout, key_heads
        self.queries = nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, 2 * key_heads * WIDTH // HEADS)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        query = self.queries(x).view(batch, tokens, HEADS, -1).transpose(1, 2)
        keys = self.keys(x).view(batch, tokens, self.key_heads, 2, -1)
        key, value = keys.permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            dropout_p=self.dropout,
            enable_gqa=self.key_heads != HEADS,
        )
        return x + self.output(mixed.transpose(1, 2).reshape(x.shape))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def attention_model(dtype: torch.dtype, dropout: float, key_heads: int = HEADS):
    layers = [Attention(dropout, key_heads) for _ in range(NUM_LAYERS)]
    model = nn.Sequential(*layers).to("cuda", dtype)
    return model, torch.zeros(2, TOKENS, WIDTH, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # efficient, and flash
def test_random_states_reach_the_backward_where_the_kernel_put_them(dtype, dropout):
    model, x = attention_model(dtype, dropout)
    planned = torch.compile(model, backend="memo", options={"strict": True})
    planned(x).sum().backward()
    before = counts().host_copies
    planned(x).sum().backward()
    assert counts().host_copies == before  # each would hold up the host
    torch.cuda.synchronize()
    report = memo_compile.report()
    assert report.active
    assert report.unplanned_steps == 0
    assert all(plan.check.ok for plan in report.plans)


@pytest.mark.parametrize("policy", ["full-offload", "full-recompute"])
def test_fewer_heads_of_keys_than_of_queries_have_a_cost(policy):
    """By torch's own formulas, without which nothing is moved."""
    model, x = attention_model(torch.bfloat16, 0.0, key_heads=2)
    options = {"strict": True, "policy": policy, "costs": "roofline", "lowering": "aten"}
    planned = torch.compile(model, backend="memo", options=options)
    planned(x).sum().backward()
    torch.cuda.synchronize()
    report = memo_compile.report()
    assert report.active
    assert all(plan.check.ok for plan in report.plans)
    plan = report.plans[-1]
    assert plan.offloaded_bytes + plan.recomputed_bytes > 0


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_regions_are_timed_with_random_states_where_their_kernels_read_them(lowering):
    """Memory-efficient attention reads them in the host's memory; on the device they end it."""
    model, x = attention_model(torch.float32, 0.1)
    options = {"strict": True, "policy": "full-offload", "lowering": lowering}
    planned = torch.compile(model, backend="memo", options=options)
    for _ in range(2):
        planned(x).sum().backward()
    torch.cuda.synchronize()
    report = memo_compile.report()
    assert report.active
    assert report.plans[-1].offloaded_bytes > 0
    assert report.plans[-1].check.ok


def test_a_mask_as_large_as_the_scores_is_named(monkeypatch):
    """As transformers makes it for a compiled step: flash attention would need none."""
    monkeypatch.setattr(masks, "LARGE_NUMBERS", 64**2)
    state.reset()
    Training(models.llama, lowering="aten", passes="-needless-masks").step()
    (note,) = [note for note in memo_compile.report().notes if "reads a mask" in note]
    assert "a mask of 64 x 64 numbers" in note
    assert "does-not-fit.md" in note


class Biased(Attention):
    """A learned bias on every score, as a relative position's."""

    def __init__(self) -> None:
        super().__init__(0.0, HEADS)
        self.bias = nn.Parameter(torch.zeros(HEADS, TOKENS, TOKENS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        query = self.queries(x).view(batch, tokens, HEADS, -1).transpose(1, 2)
        keys = self.keys(x).view(batch, tokens, HEADS, 2, -1)
        key, value = keys.permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, self.bias)
        return x + self.output(mixed.transpose(1, 2).reshape(x.shape))


class CudnnAttention(Attention):
    """As torch 2.11 chooses it for a long sequence on an H200."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        query = self.queries(x).view(batch, tokens, HEADS, -1).transpose(1, 2)
        keys = self.keys(x).view(batch, tokens, HEADS, 2, -1)
        key, value = keys.permute(3, 0, 2, 1, 4)
        attention = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        mixed = attention(query, key, value, None, True, self.dropout, True)[0]
        return x + self.output(mixed.transpose(1, 2).reshape(x.shape))


class FlashPackage(Attention):
    """By the package flash-attn, with fewer heads of keys."""

    def __init__(self) -> None:
        super().__init__(0.0, HEADS // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.queries(x).unflatten(-1, (HEADS, -1))
        key, value = self.keys(x).unflatten(-1, (2, self.key_heads, -1)).unbind(-3)
        mixed = flash_attention.flash_attn_func(query, key, value, causal=True)
        return x + self.output(mixed.flatten(-2))


class FlashKernels(types.ModuleType):
    """The package's module; its kernels make their results, in what they are given."""

    def __init__(self) -> None:
        super().__init__("flash_attn.flash_attn_interface")
        self.flash_attn_gpu = self
        self.num_outputs_made = 0

    def fwd(self, query, key, value, out, *settings):
        self.num_outputs_made += out is None
        given = torch.empty_like(query) if out is None else out
        sums = torch.empty(*query.shape[:2], query.shape[2], device="cuda").transpose(1, 2)
        state = torch.empty(2, dtype=torch.int64, device="cuda")
        return given, sums.contiguous(), torch.empty(0, device="cuda"), state


@pytest.fixture(scope="module")
def flash_package():
    """Kernels that allocate what those of flash-attn 2.8 do (``mha_bwd``), and compute nothing."""
    library = torch.library.Library("flash_attn", "IMPL")
    kernels = FlashKernels()

    def forward(query, key, value, *settings):
        return kernels.fwd(query, key, value, None)

    def backward(gradient, query, key, value, out, sums, *rest):
        batch, rows, heads, width = query.shape
        in_blocks = (batch, -(-rows // 128) * 128, heads)
        taken = torch.empty(*in_blocks, -(-width // 32) * 32, device="cuda")
        expanded = [torch.empty(batch, rows, heads, width, dtype=query.dtype, device="cuda")] * 2
        del taken, expanded
        return torch.empty_like(sums)

    library.impl("_flash_attn_forward", forward, "CUDA")
    library.impl("_flash_attn_backward", backward, "CUDA")
    with mock.patch.dict(sys.modules, {kernels.__name__: kernels}):
        yield kernels
    del library


@pytest.fixture(scope="module")
def cudnn():
    """cuDNN is not emulated: kernels that allocate what it does, and compute nothing."""
    library = torch.library.Library("aten", "IMPL")

    def forward(query, key, value, *settings, **more):
        out = torch.empty_like(query.transpose(1, 2)).transpose(1, 2)
        sums = torch.empty(*query.shape[:3], 1, dtype=torch.float32, device=query.device)
        state = torch.empty((), dtype=torch.int64, device=query.device)
        lengths = (query.shape[2], key.shape[2])
        return out, sums, None, None, *lengths, state, torch.empty_like(state), None

    def backward(gradient, query, key, value, *settings, **more):
        made = [torch.empty_like(given) for given in (query, key, value)]
        float32 = {"dtype": torch.float32, "device": query.device}
        workspace = torch.empty(query.numel(), **float32), torch.empty(*query.shape[:3], **float32)
        del workspace
        return tuple(made)

    name = "_scaled_dot_product_cudnn_attention"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced is the point
        library.impl(name, forward, "CUDA", allow_override=True)
        library.impl(f"{name}_backward", backward, "CUDA", allow_override=True)
    yield
    del library


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
@pytest.mark.parametrize("policy", ["save", "full-recompute", "full-offload"])
@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        *((Biased, torch.bfloat16), (Biased, torch.float32)),
        *((CudnnAttention, torch.bfloat16), (FlashPackage, torch.bfloat16)),
    ],
)
def test_what_attention_allocates_is_planned(layer, dtype, policy, lowering, cudnn, flash_package):
    """With a bias torch takes memory-efficient attention, whose host code is torch's own."""
    made = [layer(0.0, HEADS) if layer is CudnnAttention else layer() for _ in range(NUM_LAYERS)]
    model = nn.Sequential(*made).to("cuda", dtype)
    x = torch.zeros(2, TOKENS, WIDTH, device="cuda", dtype=dtype)
    options = {"strict": True, "policy": policy, "lowering": lowering}
    options |= {"optimizer_state_bytes_per_parameter": 0, "token_tiles": 1}
    planned = torch.compile(model, backend="memo", options=options)
    outputs_before = flash_package.num_outputs_made
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        planned(x).sum().backward()
    torch.cuda.synchronize()
    if lowering == "inductor":  # the package's forward writes into the arena
        assert flash_package.num_outputs_made == outputs_before
    plan = memo_compile.report().plans[-1]
    assert memo_compile.report().active
    assert plan.check.ok
    assert plan.outside_bytes_by_kind["attention workspace"] > 0
    fixed = plan.fixed
    rest = plan.peak_bytes - fixed.libraries - fixed.parameters - fixed.buffers - fixed.inputs
    peak = torch.cuda.max_memory_allocated() - held + plan.arena_bytes
    assert 0.95 * rest <= peak <= 1.005 * rest, (peak, rest, plan)


def taken(run) -> int:
    """The most that ``run`` asks for beside its results; a block may be larger by up to 1 MiB."""

    def asked(what: str) -> int:
        return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    results = run()
    kept = asked("current")
    del results
    return asked("peak") - kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 32, 40, 64, 72, 96, 128, 136, 200, 256])
def test_what_memory_efficient_attention_allocates(width, dtype):
    """By its own host code: never more than is counted, and mostly as much."""
    attention = torch.ops.aten._scaled_dot_product_efficient_attention
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    for batch, heads, rows, columns in ((1, 2, 64, 64), (2, 4, 200, 72), (3, 7, 130, 513)):
        query = torch.empty(batch, heads, rows, width, dtype=dtype, device="cuda")
        key = torch.empty(batch, heads, columns, width, dtype=dtype, device="cuda")
        query, key = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (query, key))
        found = attention(query, key, key, None, True)
        counted = [_efficient_bytes(query, key, is_backward=way) for way in (False, True)]
        given = (torch.empty_like(found[0]), query, key, key, None, *found)
        own = [
            taken(lambda query=query, key=key: attention(query, key, key, None, True)),
            taken(lambda given=given: backward(*given, 0.0, [True, True, True, False])),
        ]
        for most, measured in zip(counted, own, strict=True):
            assert measured <= most, (batch, heads, rows, columns, own, counted)
            assert measured >= 0.4 * most, (batch, heads, rows, columns, own, counted)
