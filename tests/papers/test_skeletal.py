"""MEMO's skeletal activations, counted in the traced graph of a GPT and not by a formula."""

import pytest

from tests.steps.gpt_graph import Kept, kept_by_layers, trace_gpt

GIB = 2**30
MILLION = 2**20
NUM_LAYERS_7B = 32


@pytest.mark.parametrize(
    ("name", "seq"),
    [("gpt-7b", 1024), ("gpt-7b", MILLION), ("gpt-65b", 512)],
)
def test_a_layer_keeps_sixteen_units(name, seq):
    traced = trace_gpt(name, seq)
    unit_bytes = 2 * seq * traced.shape.hidden
    layers = kept_by_layers(traced)
    assert len(layers) == 2
    for kept in layers:
        assert kept.input_bytes == unit_bytes
        assert kept.attention_bytes == unit_bytes
        assert kept.others_bytes == 14 * unit_bytes


def test_a_million_tokens_of_7b_keep_four_tebibytes():
    layers = kept_by_layers(trace_gpt("gpt-7b", MILLION))
    assert NUM_LAYERS_7B * layers[0].skeletal_bytes == 4096 * GIB
    assert NUM_LAYERS_7B * layers[0].input_bytes == 256 * GIB


def test_short_sequences_scale_to_a_million_tokens():
    short, long = (kept_by_layers(trace_gpt("gpt-7b", seq))[1] for seq in (1024, MILLION))
    for field in Kept.__slots__:
        assert getattr(short, field) * (MILLION // 1024) == getattr(long, field)


def test_the_statistics_that_the_paper_leaves_out():
    """4 bytes per head and token of log-sum-exp, and two numbers per token of each norm.

    On CPU the latter are bfloat16; a GPU keeps them in float32.
    """
    seq = 1024
    kept = kept_by_layers(trace_gpt("gpt-7b", seq))[0]
    assert kept.log_sum_exp_bytes == 4 * 32 * seq
    assert kept.norm_statistics_bytes == 2 * 2 * 2 * seq
    left_out = kept.log_sum_exp_bytes + kept.norm_statistics_bytes
    assert left_out / kept.skeletal_bytes == pytest.approx(0.00104, abs=0.00001)
