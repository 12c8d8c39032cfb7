"""A fixed tenth of torch's databases of operators and modules; ``make opdb`` tries all of them.

Eight entries share a model: a compilation takes little longer for them than for one.
"""

import pytest
from torch._inductor import config as inductor_config

from tests.opdb.runs import Arms, usable_call
from tests.opdb.samples import FORMS, Sample, databases, usual_dtype

NUM_MODELS = 8

LEFT_OUT = {
    "op corrcoef": "torch's decomposition asks whether a tensor equals another",
    "op div.floor_rounding": "its gradient is zero",
    "op linalg.lstsq.grad_oriented": "the shape of a result depends on numbers",
    "op linalg.tensorinv": "an expanded matrix has no inverse",
    "op nn.functional.batch_norm.without_cudnn": "only for bfloat16 and float16",
    "op normal": "its gradient is zero",
    "op sparse.mm.reduce": "its matrices are sparse",
    "op zero_": "its gradient is zero",
}
"""Entries of the tenth that cannot be tried so, and why."""


def tenth() -> list[tuple[str, str]]:
    """Entries, and how their inputs lie in memory."""
    return [
        (name, FORMS[number % len(FORMS)])
        for number, name in enumerate(list(databases())[::10])
        if name not in LEFT_OUT
    ]


@pytest.mark.filterwarnings("ignore")  # torch's own, about the odd things that samples do
@pytest.mark.parametrize("model", range(NUM_MODELS))
def test_a_tenth_of_torchs_databases_is_right_in_repeated_blocks(model):
    mode = ("recompute", "offload")[model % 2]
    tried = []
    for name, form in tenth()[model::NUM_MODELS]:
        sample = Sample(entry=name, dtype=usual_dtype(name), form=form)
        call, lean, refusal = usable_call(sample)
        assert call is not None, f"{name}: {refusal}"
        tried.append((sample, call, lean))
    samples, calls, leans = zip(*tried, strict=True)
    with inductor_config.patch(fallback_random=True):
        outcome = Arms(samples, calls, min(leans)).judged(mode)
    assert outcome.verdict == "right", f"{outcome.reason}\n{outcome.detail}"
