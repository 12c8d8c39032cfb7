"""A failing case as a script that stands alone: ``python SCRIPT.py`` shows what is wrong."""

import inspect

from tests.fuzz import driver, judge
from tests.fuzz.case import Case
from tests.fuzz.oracle import Finding, has_no_size_limits
from tests.fuzz.source import model_source

_MAIN = '''

# ----- the case ---------------------------------------------------------------------------------
import copy

from memo_compile import offload

RUN = {run!r}
OPTIONS = {options!r}
DTYPE = "{dtype}"
DEVICE = "{device}"


{limits}

def main():
    """Train eagerly, in float64, with plain Inductor and with memo; print what differs."""
    dtype = getattr(torch, DTYPE)
    torch.manual_seed({seed})
    model = Model().to(DEVICE, dtype)

    def run(precise, starts, offload=None, **how):
        copied = copy.deepcopy(model).to(precise)
        compile = (lambda one: torch.compile(one, **how)) if how else (lambda one: one)
        torch._dynamo.reset()
        return train(copied, globals(), RUN, dtype, compile, starts, offload)

    eager = run(dtype, None)
    other = run(torch.float32 if DTYPE == "float64" else torch.float64, eager.starts)
    exact, own = (eager, other) if DTYPE == "float64" else (other, eager)
    allowed = tolerances(exact.steps, own.steps, "{judged}")
    memo = dict(backend="memo", options=OPTIONS)
    if RUN["offload"]:
        memo["offload"] = lambda optimizer: offload(optimizer, update=RUN["offload"])
    same = DEVICE == "cpu" or RUN["offload"] == "device"
    for name, how in (("inductor", dict(backend="inductor")), ("memo", memo)):
        ours = run(dtype, eager.starts, **how)
        wrong = faults(ours.steps, exact.steps, eager.steps, allowed)
        wrong += wrong_updates(ours.updates, "{judged}", are_same_kernels=same)
        wrong += [f"shared memory: {{pair}}" for pair in sorted(ours.shared - eager.shared)]
        print(name, "equals eager" if not wrong else "IS WRONG:", *wrong, sep="\\n    ")


if __name__ == "__main__":
    main()
'''


_NO_SIZE_LIMITS = """
from memo_compile.driver import tile_order
from memo_compile.passes import loss_gradient

loss_gradient.MIN_BYTES = tile_order.HEAD_BYTES = tile_order.HEAD_FACTOR = 0  # as if all were large
"""


def script(case: Case, finding: Finding, judged: str) -> str:
    """Runnable source with the model, the loop, the comparison and what was found."""
    found = "\n".join(f"# {line}" for line in f"{finding.signature}\n{finding.detail}".splitlines())
    main = _MAIN.format(
        run=dict(case.run),
        options=dict(finding.options),
        dtype=case.dtype,
        device=case.device,
        judged=judged,
        seed=case.seed,
        limits=_NO_SIZE_LIMITS if has_no_size_limits(case) else "",
    )
    parts = [found, inspect.getsource(driver), inspect.getsource(judge), model_source(case), main]
    return "\n\n".join(parts)
