"""A GPT's step as the policies see it, with the sizes and seconds of ``papers.layer_costs``.

``num_layers`` layers L, then the head H; a layer reads x and leaves n1, q, k, v, o, x2, n2, fc1,
gelu for its backward, which also reads x.
"""

from benchmarks.memo_steps import Rates, Training, layer_times
from memo_compile.papers.layer_costs import layer_tensors
from memo_compile.step.movable import MovableStep, StepCosts
from tests.steps.movable import LayerKind, repeated

READS = {
    "x": (),
    "n1": ("x",),
    "q": ("n1",),
    "k": ("n1",),
    "v": ("n1",),
    "o": ("q", "k", "v"),
    "x2": ("x", "o"),
    "n2": ("x2",),
    "fc1": ("n2",),
    "gelu": ("fc1",),
}
"""Tensor -> what makes it reads."""

TRANSIENT_BYTES = 512
EDGE_S = 1e-9
"""Of the calls before and after the layers: nothing hides there."""


def gpt_step(training: Training, rates: Rates, num_layers: int) -> MovableStep:
    """The step of one device; attention mixes tokens, all else is row by row."""
    tokens = int(training.tokens_per_device)
    tensors = {cost.name: cost for cost in layer_tensors(training.shape, training.seq)}
    assert tuple(tensors) == tuple(READS)
    device = (rates.hardware, rates.efficiency)
    kind = LayerKind(
        reads=READS,
        sizes={name: cost.bytes_per_token * tokens for name, cost in tensors.items()},
        seconds={name: cost.seconds_per_token(*device) * tokens for name, cost in tensors.items()},
        num_rows=tokens,
        kept=frozenset("x"),
        attention="o",
        dot=".",
    )
    times = layer_times(training, rates)
    region_s = {name: EDGE_S for name in ("P", "H", "Hb", "Pb")}
    costs = StepCosts(
        region_s=region_s | {"L": times.forward_s, "Lb": times.backward_s},
        d2h_bytes_per_s=rates.copy_bytes_per_s,
        h2d_bytes_per_s=rates.copy_bytes_per_s,
    )
    return repeated(kind, num_layers, costs, TRANSIENT_BYTES)
