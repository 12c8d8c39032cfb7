"""GPUs that are not here: what is known of them, and graphs that are traced for them on a CPU."""

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.nn import functional

from memo_compile import gpus
from memo_compile.costs.hardware import HARDWARE
from memo_compile.gpus import GPUS, target_of
from memo_compile.lowering.cublas import libraries_bytes
from memo_compile.offline.cuda_attention import Kernel, kernel_for
from memo_compile.offline.cuda_operators import for_gpu
from memo_compile.passes.retarget import Retarget

CUDA = torch.device("cuda", 0)


def test_every_named_gpu_is_known():
    assert set(GPUS) == set(HARDWARE) - {"cpu"}


@pytest.mark.parametrize(
    ("versions", "missing"),
    [
        ({"torch": "2.13.0+cpu", "triton": "3.7.0"}, "a CUDA build of torch"),
        ({"torch": "2.13.0"}, "triton"),
        ({"torch": "2.13.0", "triton": "3.7.0"}, ""),
    ],
)
def test_what_is_missing_for_an_exact_plan_is_named(monkeypatch, versions, missing):
    monkeypatch.setattr(gpus, "version_of", versions.get)
    assert gpus.missing_for_target() == missing
    assert target_of("h200") == (None if missing else GPUS["h200"])
    assert target_of("my own") is None


def test_an_h200_s_libraries_take_what_the_backend_counts():
    assert libraries_bytes(GPUS["h200"].major, GPUS["h200"].l2_bytes) == 126 * 2**20
    assert libraries_bytes(GPUS["a100"].major, 0) < 20 * 2**20


@pytest.mark.parametrize(
    ("kind", "dtype", "width", "rows", "mask", "settings", "kernel"),
    [
        ("h200", torch.bfloat16, 64, 16, None, {}, Kernel.CUDNN),
        ("a100", torch.bfloat16, 64, 16, None, {}, Kernel.FLASH),
        ("4090", torch.float16, 208, 16, None, {"dropout_p": 0.1}, Kernel.EFFICIENT),
        ("4090", torch.float16, 256, 16, None, {}, Kernel.FLASH),
        ("h200", torch.bfloat16, 192, 16, None, {}, Kernel.CUDNN),
        ("b200", torch.bfloat16, 192, 16, None, {}, Kernel.FLASH),
        ("h200", torch.bfloat16, 64, 1, None, {}, Kernel.CUDNN),
        ("h200", torch.bfloat16, 64, 1, None, {"dropout_p": 0.1}, Kernel.FLASH),
        ("a100", torch.float32, 64, 16, None, {}, Kernel.EFFICIENT),
        ("a100", torch.float32, 6, 16, None, {}, Kernel.MATH),
        ("a100", torch.float64, 64, 16, None, {}, Kernel.MATH),
        ("a100", torch.bfloat16, 64, 16, torch.zeros(16, 16), {}, Kernel.EFFICIENT),
        ("a100", torch.bfloat16, 64, 8, None, {"is_causal": True}, Kernel.EFFICIENT),
    ],
)
def test_attention_is_what_torch_takes(
    monkeypatch, kind, dtype, width, rows, mask, settings, kernel
):
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    query = torch.empty(2, 4, rows, width, dtype=dtype)
    key = torch.empty(2, 4, 16, width, dtype=dtype)
    given = {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False, **settings}
    assert kernel_for(GPUS[kind], query, key, key, mask, **given) is kernel


def test_cudnn_is_left_where_torch_is_told_so(monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    query = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16)
    given = {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False}
    assert kernel_for(GPUS["h200"], query, query, query, None, **given) is Kernel.FLASH


def test_fewer_heads_of_keys_need_flash_attention_or_cudnn():
    query, key = (torch.empty(2, heads, 16, 64, dtype=torch.float32) for heads in (4, 2))
    given = {"dropout_p": 0.0, "is_causal": False, "enable_gqa": True}
    assert kernel_for(GPUS["a100"], query, key, key, None, **given) is Kernel.MATH
    halves = [each.half() for each in (query, key, key)]
    assert kernel_for(GPUS["a100"], *halves, None, **given) is Kernel.FLASH


def test_a_norm_as_cuda_traces_it_is_the_norm():
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("x", "weight")]
    graph.output(graph.call_function(functional.rms_norm, (given[0], (8,), given[1], 1e-5)))
    gm = fx.GraphModule({}, graph)
    x, weight = (torch.randn(*size, requires_grad=True) for size in ((3, 8), (8,)))
    plain = torch.autograd.grad(gm(x, weight).square().sum(), (x, weight))
    for_gpu(gm, GPUS["h200"])
    found = torch.autograd.grad(gm(x, weight).square().sum(), (x, weight))
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_norm_as_cuda_traces_it_is_the_layer_norm(dtype):
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("x", "weight", "bias")]
    graph.output(graph.call_function(functional.layer_norm, (given[0], (8,), *given[1:], 1e-5)))
    gm = fx.GraphModule({}, graph)
    torch.manual_seed(0)
    inputs = [torch.randn(*size, dtype=dtype, requires_grad=True) for size in ((3, 8), (8,), (8,))]
    plain = torch.autograd.grad(gm(*inputs).square().sum(), inputs)
    for_gpu(gm, GPUS["h200"])
    found = torch.autograd.grad(gm(*inputs).square().sum(), inputs)
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)


def test_a_graph_of_the_cpu_becomes_one_of_cuda():
    graph, mode = fx.Graph(), FakeTensorMode()
    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(4, 6).t()[1:]
        made = torch.arange(4, device="cpu")
    settings = {"device": torch.device("cpu")}
    arange = graph.call_function(torch.ops.aten.arange.default, (4,), settings)
    arange.meta["val"] = made
    graph.output((x, arange))
    gm = fx.GraphModule({}, graph)
    shape, stride, offset = (5, 4), (1, 6), 1
    assert Retarget(device=CUDA)(gm).modified
    value = x.meta["val"]
    assert value.device == arange.meta["val"].device == arange.kwargs["device"] == CUDA
    assert (value.shape, value.stride(), value.storage_offset()) == (shape, stride, offset)
    assert value.untyped_storage().nbytes() == 4 * 6 * 4
