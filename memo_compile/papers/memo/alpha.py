"""MEMO's closed form for alpha, the share of a layer's other activations that is offloaded.

Source: MEMO (arXiv 2407.12117), section 4.1, recomputed. Symbols: h, n, s = hidden size, layers,
sequence length; F = achieved FLOP/s of a layer's forward; B = device-to-host bytes/s per GPU;
shard = tp * cp; 2-byte elements. Per token a layer keeps 16 h elements: the layer input h and the
attention output h, always offloaded, and 14 h others, of which alpha is offloaded.
"""

import math
from dataclasses import dataclass

from memo_compile.costs.models import ELEMENT_BYTES
from memo_compile.errors import InputError
from memo_compile.planners.policy.named import quantise

OTHERS = 14
"""Elements per token and hidden unit that are offloaded for the share alpha of the tokens."""

ALWAYS = 2
"""Elements per token and hidden unit that are always offloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alpha:
    """The two bounds, unclipped, and the alpha that obeys both."""

    bandwidth_bound: float
    host_bound: float | None
    """None when no layer of the stage is offloaded: at most two layers, which stay."""

    @property
    def value(self) -> float:
        """The smaller bound, in [0, 1]."""
        host = math.inf if self.host_bound is None else self.host_bound
        return max(0.0, min(1.0, self.bandwidth_bound, host))

    @property
    def quantised(self) -> float:
        """``value`` rounded down to one of QUANTA."""
        return quantise(self.value)

    @property
    def fits_host(self) -> bool:
        """False when not even what is always offloaded fits the host's memory."""
        return self.host_bound is None or self.host_bound >= 0


def compute_alpha(
    *,
    hidden: int,
    num_layers: int,
    seq: int,
    tp: int,
    cp: int,
    pp: int,
    bandwidth_bytes_per_s: float,
    host_bytes: float,
    flops_per_s: float,
) -> Alpha:
    """Returns the largest alpha whose copies hide behind a layer's forward and fit the host.

    ``host_bytes`` and ``bandwidth_bytes_per_s`` are per GPU. The last two layers of a stage are
    never offloaded: their backward comes first. Raises InputError: an argument is not positive (the
    host's bytes: negative); it is named.
    """
    sizes = {"hidden": hidden, "layers": num_layers, "seq": seq, "tp": tp, "cp": cp, "pp": pp}
    if not (math.isfinite(host_bytes) and host_bytes >= 0):
        raise InputError(f"host-bytes: expected a number of at least 0, got {host_bytes}")
    rates = {"bandwidth": bandwidth_bytes_per_s, "flops": flops_per_s}
    for name, value in {**sizes, **rates}.items():
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name}: expected a positive number, got {value}")
    # Elements copied per token and hidden unit, in the time of the forward's 24 h + 2 s FLOPs.
    copied = (24 * hidden + 2 * seq) * bandwidth_bytes_per_s / (ELEMENT_BYTES * flops_per_s)
    if not math.isfinite(copied):
        raise InputError("hidden, seq, bandwidth, flops: together beyond the range of floats")
    offloaded_layers = num_layers / pp - 2
    host_bound = None
    if offloaded_layers > 0:
        one_element_bytes = offloaded_layers * ELEMENT_BYTES * seq * hidden / (tp * cp)
        host_bound = (host_bytes / one_element_bytes - ALWAYS) / OTHERS
    return Alpha(bandwidth_bound=(copied - ALWAYS) / OTHERS, host_bound=host_bound)
