"""``memo plan --cp``: attention of one sequence over several devices, as a ring or by Ulysses."""

import dataclasses
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from memo_compile.cli.plan_text import plan_lines
from memo_compile.costs import models
from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import ModelShape
from memo_compile.costs.roofline import node_cost
from memo_compile.costs.work import roofline_s
from memo_compile.errors import InputError
from memo_compile.offline import forecast as forecasting
from memo_compile.offline.forecast import Question, forecast, longest, sweep
from memo_compile.offline.shapes import parallel
from memo_compile.offline.shapes.degrees import CP_KINDS, RING, ULYSSES, Degrees
from memo_compile.offline.shapes.transformer import Attention, one_device
from memo_compile.step.communication import comm_bytes, value_sizes
from memo_compile.step.problem import CallKind, Phase

SHAPE = ModelShape(
    name="tiny-llama",
    hidden=64,
    num_layers=2,
    ffn=256,
    num_heads=4,
    num_kv_heads=2,
    vocab=512,
    gated=True,
)
SEQ, CP, WIDTH, BYTES = 1024, 2, 16, 2
H100 = find_hardware("h100")


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(models.MODELS, SHAPE.name, SHAPE)
    monkeypatch.setenv("MEMO_LOWERING", "aten")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def question(kind=None, cp=CP, seq=SEQ, **more):
    degrees = Degrees(cp=cp, cp_kind=kind)
    return Question(model=SHAPE.name, seq=seq, hardware=H100, degrees=degrees, **more)


@pytest.fixture(scope="module")
def answers():
    """Both kinds with everything on the host that can be there; weights of layers go, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.MODELS, SHAPE.name, SHAPE)
        patch.setenv("MEMO_LOWERING", "aten")
        patch.setattr(forecasting, "user_store", lambda: None)
        return {kind: forecast(question(kind, offload="weights")) for kind in CP_KINDS}


def test_bytes_of_each_all_to_all_and_of_its_buffer(answers):
    """A layer's queries, keys and values go, and its result comes back; backwards all four and
    the result's gradient go, and three gradients come back."""
    query = SEQ // CP * SHAPE.num_heads * WIDTH * BYTES
    key = SEQ // CP * SHAPE.num_kv_heads * WIDTH * BYTES
    problem, num_layers = answers[ULYSSES].step.problem, SHAPE.num_layers
    issues = [call for call in problem.calls if call.kind is CallKind.ISSUE]
    sent = {
        phase: Counter(comm_bytes(problem, call) for call in issues if call.phase is phase)
        for phase in Phase
    }
    three = query + 2 * key
    assert sent[Phase.FORWARD] == {three: num_layers, query: num_layers}
    assert sent[Phase.BACKWARD] == {three + 2 * query: num_layers, three: num_layers}
    assert answers[ULYSSES].step.plan.num_collectives == len(issues)
    sizes = value_sizes(problem)
    assert all(sizes[call.outputs[0]] == comm_bytes(problem, call) for call in issues)
    assert not any(call.kind is CallKind.ISSUE for call in answers[RING].step.problem.calls)


def test_a_backward_that_exchanges_runs_its_mlp_in_tiles():
    """Its chain of wide values ends before what is sent, and holds the weights' gradients."""
    setting = question(ULYSSES, policy="greedy")
    with forecasting._recorded_model(setting) as model:
        tiles = forecasting._plan(setting, model, token_tiles=8).plan.tiles
    assert tiles["layer0_bwd.part"] == 8


def test_weights_of_a_step_with_collectives_lie_on_the_host(answers):
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 256
    expected = SHAPE.num_layers * layer * BYTES
    for answer in answers.values():
        assert answer.step.plan.training_state.parameters.host_bytes == expected
        assert answer.step.plan.check.ok


def test_both_kinds_compute_and_keep_the_same(answers):
    ring, ulysses = (answers[kind].step for kind in CP_KINDS)
    assert ring.model_flops == ulysses.model_flops
    assert ring.model_flops == pytest.approx(SHAPE.flops_per_token(SEQ) * SEQ / CP, rel=1e-3)
    kept = [sorted(row.bytes for row in step.plan.decisions) for step in (ring, ulysses)]
    assert kept[0] == kept[1]


def test_flops_of_attention_are_those_of_a_share_of_the_heads_or_of_the_queries():
    """Two products of each query with each key, five backwards."""
    batch, heads, cp = 3, 8, 4
    counted = {}
    for kind in CP_KINDS:
        with FakeTensorMode(), FlopCounterMode(display=False) as counter:
            query, key, value = (
                torch.empty(batch, heads, SEQ // cp, WIDTH, requires_grad=True) for _ in range(3)
            )
            if kind == RING:
                out, _ = parallel.attention(query, key, value, cp, False)
            else:
                out = parallel.Ulysses.apply(query, key, value, cp, False)
            out.backward(torch.empty_like(out))
        assert query.grad.shape == key.grad.shape == value.grad.shape == query.shape
        counted[kind] = counter.get_total_flops()
    product = 2 * batch * heads * SEQ * SEQ * WIDTH // cp
    assert counted == {RING: 7 * product, ULYSSES: 7 * product}


def test_keys_with_fewer_heads_than_devices_are_copied():
    cp = 4
    degrees = Degrees(cp=cp, cp_kind=ULYSSES)
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        module = Attention(one_device(SHAPE, degrees), degrees)
        x = torch.empty(1, SEQ // cp, SHAPE.hidden, requires_grad=True)
        module(x, None).sum().backward()
    assert x.grad.shape == x.shape
    width, kv = SHAPE.hidden, SHAPE.hidden // 2
    linear = 3 * 2 * SEQ // cp * width * (2 * width + 2 * kv)
    attention = 7 * 2 * SHAPE.num_heads * SEQ * SEQ * WIDTH // cp
    assert counter.get_total_flops() == linear + attention


def test_keys_go_around_the_ring_while_it_computes():
    """Three times of four devices: keys and values, and backwards their gradients as well."""

    def step(query, key, value):
        out, sums = parallel.attention(query, key, value, 4, True)
        return parallel.attention_backward(out, query, key, value, out, sums, 4, True)

    with FakeTensorMode():
        heads = [torch.empty(1, number, 512, WIDTH) for number in (8, 2, 2)]
        graph = make_fx(step)(*heads).graph
    sent = [node_cost(node).link_bytes for node in graph.nodes if "attention" in node.name]
    once = 3 * 2 * heads[1].nbytes
    assert sent == [once, 2 * once]
    (node,) = (node for node in graph.nodes if "attention_backward" in node.name)
    cost = dataclasses.replace(node_cost(node), flops=0, bytes=0)
    assert roofline_s(cost, H100) == 2 * once / H100.link_bytes_per_s


def exchanging(num_devices):
    """An ``_exchange`` of threads, one for each device."""
    barrier, here, boxes = threading.Barrier(num_devices), threading.local(), {}

    def exchange(parts):
        boxes[here.number] = parts
        barrier.wait()
        arrived = [
            torch.stack([each[here.number] for each in sent])
            for sent in zip(*(boxes[number] for number in range(num_devices)), strict=True)
        ]
        barrier.wait()
        return arrived

    return here, exchange


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_ulysses_has_the_gradients_of_one_device(monkeypatch, batch, is_causal):
    """With torch's attention in place of the planned one, on threads in place of devices."""
    num_devices, heads, kv, seq, width = 2, 4, 2, 14, 6

    def attention(query, key, value, _world=1, _is_causal=True):
        out = scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
        return out, None

    def backward(grad, query, key, value, *_):
        given = [each.detach().requires_grad_() for each in (query, key, value)]
        return torch.autograd.grad(attention(*given)[0], given, grad)

    here, exchange = exchanging(num_devices)
    monkeypatch.setattr(parallel, "_exchange", exchange)
    monkeypatch.setattr(parallel, "attention", attention)
    monkeypatch.setattr(parallel, "attention_backward", backward)
    numbers = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(batch, number, seq, width, dtype=torch.float64, generator=numbers)
        for number in (heads, kv, kv, heads)
    ]
    results = {}

    def device(number):
        here.number = number
        *given, grad = (each.chunk(num_devices, 2)[number] for each in whole)
        context = SimpleNamespace()
        context.save_for_backward = lambda *kept: setattr(context, "saved_tensors", kept)
        out = parallel.Ulysses.forward(context, *given, num_devices, is_causal)
        results[number] = [out, *parallel.Ulysses.backward(context, grad)[:3]]

    threads = [threading.Thread(target=device, args=(number,)) for number in range(num_devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    *given, grad = whole
    expected = [attention(*given)[0], *backward(grad, *given)]
    parts = zip(*(results[number] for number in range(num_devices)), strict=True)
    for each, pieces in zip(expected, parts, strict=True):
        torch.testing.assert_close(torch.cat(pieces, 2), each, rtol=1e-12, atol=1e-12)


def test_the_faster_kind_is_taken_and_the_other_is_told(monkeypatch, answers, golden):
    monkeypatch.setattr(forecasting, "_forecast", lambda each, _: answers[each.degrees.cp_kind])
    answer = forecast(question())
    fast, slow = sorted(answers.values(), key=lambda each: each.step_s)
    assert fast.step_s < slow.step_s
    assert answer == dataclasses.replace(fast, other_kind=slow)
    golden("plan_context_parallel", "\n".join(plan_lines(answer, None)))


@pytest.mark.parametrize("budget", [250 * 2**20, 100 * 2**20])
def test_the_kind_that_fits_is_taken(monkeypatch, answers, budget):
    """The slower one, or where none fits the one that needs less."""
    fast, slow = sorted(CP_KINDS, key=lambda kind: answers[kind].step_s)
    peaks = {fast: 300 * 2**20, slow: 200 * 2**20}

    def planned(setting, _model):
        return dataclasses.replace(
            answers[setting.degrees.cp_kind],
            question=setting,
            budget_bytes=setting.budget_bytes,
            peak_bytes=peaks[setting.degrees.cp_kind],
        )

    monkeypatch.setattr(forecasting, "_forecast", planned)
    answer = forecast(question(budget=budget))
    (line,) = (line for line in plan_lines(answer, None) if line.startswith("  attention "))
    assert f"{slow} over 2 devices; a step with {fast} takes" in line
    assert line.endswith(", which does not fit")


def test_the_longest_sequence_is_that_of_either_kind(monkeypatch):
    most = {RING: 6 * 2048, ULYSSES: 9 * 2048}

    def needed(setting):
        fits = setting.seq <= most[setting.degrees.cp_kind]
        return forecasting.Need(float(setting.seq), fits)

    monkeypatch.setattr(forecasting, "needed", needed)
    assert longest(question(seq=None), lambda *_: None) == 9 * 2048
    assert longest(question(RING, seq=None), lambda *_: None) == 6 * 2048


def test_heads_that_do_not_divide_leave_the_ring():
    few = dataclasses.replace(question(cp=8), seq=8192)
    assert [each.degrees.cp_kind for each in forecasting._cp_kinds(few)] == [RING]
    with pytest.raises(InputError, match=r"8 devices do not divide 4 attention heads \(2 of keys"):
        forecast(question(ULYSSES, cp=8, seq=8192))


def test_a_sweep_is_of_one_kind():
    with pytest.raises(InputError, match="sweep: give --cp-kind one of ring, ulysses with it"):
        next(sweep(question(), 3))
