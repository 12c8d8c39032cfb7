"""Models with experts: planned and right, with no more graph breaks than Dynamo makes anyway."""

import copy
import itertools
from collections import Counter

import pytest
import torch
from torch._dynamo.utils import counters

import memo_compile
from memo_compile.reporting import state
from tests import models
from tests.numerics.closeness import assert_equals_eager
from tests.numerics.training import ATEN, assert_planned, in_ci, sgd

transformers = pytest.importorskip("transformers")

CHOSEN = {"num_experts_per_tok": 2}
MODELS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "head_dim": 16, "moe_intermediate_size": 32},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 0,
        "num_key_value_heads": 4,
        "num_mtp_layers": 0,
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "v_head_dim"), 16),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    },
    "GptOss": {"num_local_experts": 4, "head_dim": 16, "sliding_window": 8},
    "Olmoe": {"num_experts": 4},
}
WITH_SINKS = ("GptOss",)
"""Their attention is written out."""


def case(name: str, implementation: str) -> models.ModelCase:
    torch.manual_seed(0)
    sizes = models._sizes(2, **CHOSEN) | MODELS[name]
    config = getattr(transformers, f"{name}Config")(**sizes, experts_implementation=implementation)
    return models._decoder(config, 16, "eager" if name in WITH_SINKS else "sdpa")


def trained(name: str, implementation: str, num_steps: int = 2, **options: object) -> None:
    """Gradients of steps equal eager's; memo breaks the graph where Dynamo does for any backend."""
    model, inputs, loss = case(name, implementation)
    eager = copy.deepcopy(model)
    before = Counter(counters["graph_break"])
    loss(torch.compile(copy.deepcopy(model), backend="eager"), **inputs)
    of_dynamo = Counter(counters["graph_break"]) - before
    torch._dynamo.reset()
    state.reset()
    before = Counter(counters["graph_break"])
    compiled = torch.compile(model, backend="memo", options={"lowering": "aten", **options})
    optimizers = [sgd(model), sgd(eager)]
    for _ in range(num_steps):
        for each, optimizer in zip((compiled, eager), optimizers, strict=True):
            optimizer.zero_grad()
            loss(each, **inputs).backward()
        assert_equals_eager(model, eager)
        for optimizer in optimizers:
            optimizer.step()
        model.load_state_dict(eager.state_dict())
    assert Counter(counters["graph_break"]) - before <= of_dynamo


CASES = list(itertools.product(MODELS, ("batched_mm", "grouped_mm")))


@pytest.mark.parametrize(("name", "implementation"), in_ci(CASES, ("GptOss", "grouped_mm")))
def test_experts_are_planned_with_the_rest(name, implementation):
    trained(name, implementation, **ATEN, policy="full-recompute")
    assert_planned()
    assert sum(found.num_layers for found in memo_compile.report().plans[-1].layer_classes) >= 2


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at each input's
@pytest.mark.parametrize("name", MODELS)
def test_counts_that_depend_on_data_cut_the_graph_no_more_often(name):
    """The loop over experts: each multiplies the tokens that chose it, however many these are."""
    trained(name, "eager", num_steps=1, debug="poison", max_inflight=16)
    report = memo_compile.report()
    assert report.active  # an expert's graph lives once for each expert and layer
    assert any("run eagerly" in note for note in report.notes), report.notes
