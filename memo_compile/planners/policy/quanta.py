"""The shares of a layer's other activations that MEMO's policy may offload."""

QUANTA = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Values that alpha is rounded down to: row splits stay multiples of 128 tokens."""


def quantise(alpha: float) -> float:
    """``alpha`` rounded down to one of QUANTA."""
    return max(quantum for quantum in QUANTA if quantum <= alpha + 1e-12)
