"""Launches and host seconds of a step, with and without CUDA graphs.

    python -m tests.cuda_emulated run tests.cuda_emulated.graph_launches

The device is emulated: what it launches is real, kernels take no time of the host. The host's
seconds are processor time of one step of GPT-2 in small layers, through Inductor.
"""

import gc
import statistics
import sys
import time
from typing import NamedTuple

import torch

from benchmarks import harness
from tests import models
from tests.cuda_emulated.device_calls import counts
from tests.cuda_emulated.offline_plans import OwnLoss

WARM_UP, STEPS = 4, 9
MODES = {"call by call": {}, "CUDA graphs": {"mode": "reduce-overhead"}}
COLUMNS = ("steps", "kernels", "graphs", "copies to or from the host", "host")


class Measured(NamedTuple):
    """Of one step."""

    kernels: int
    graphs: int
    host_copies: int
    host_s: float


def measured(policy: str, options: dict[str, object], num_layers: int) -> Measured:
    """The median of later steps."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    step = OwnLoss(lambda seq: models.gpt2(num_layers=num_layers, seq=seq))
    step.to("cuda", torch.bfloat16)
    given = tuple(value.cuda() for value in step.inputs.values())
    fixed = {"strict": True, "token_tiles": 1, "costs": "roofline", "policy": policy}
    compiled = torch.compile(step, backend="memo", options=fixed | options)
    found = []
    for _ in range(WARM_UP + STEPS):
        step.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        before, begin_s = counts(), time.process_time()
        compiled(*given).backward()
        host_s = time.process_time() - begin_s
        torch.cuda.synchronize()
        end = counts()
        kernels = end.launches + end.triton_launches - before.launches - before.triton_launches
        graphs = end.graph_launches - before.graph_launches
        found.append(Measured(kernels, graphs, end.host_copies - before.host_copies, host_s))
    later = found[WARM_UP:]
    return later[-1]._replace(host_s=statistics.median(each.host_s for each in later))


def main() -> int:
    """Print the table."""
    for policy in ("save", "full-offload"):
        rows = []
        for name, options in MODES.items():
            step = measured(policy, options, num_layers=8)
            numbers = (str(number) for number in step[:3])
            rows.append((name, *numbers, f"{step.host_s * 1e3:.1f} ms"))
        harness.print_table(f"GPT-2, 8 layers, policy {policy}", COLUMNS, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
