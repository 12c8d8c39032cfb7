"""What a compiled step leaves to look at: the dump folder, and torch's structured trace.

tlparse shows the trace beside Inductor's output.
"""

from collections.abc import Callable

from memo_compile import shim
from memo_compile.driver.assemble import Assembly
from memo_compile.driver.stages import CutStep
from memo_compile.passes.runner import graph_text
from memo_compile.reporting.write import write_pictures
from memo_compile.step.program_text import program_text


def dump_step(step: CutStep, assembly: Assembly) -> None:
    """The dump folder holds the step program, the plan and its pictures; nothing without one."""
    if step.runner.dump is None:
        return
    step.runner.write("step-forward.txt", graph_text(step.forward.program))
    step.runner.write("step-backward.txt", graph_text(step.backward.program))
    step.runner.write("step-program.txt", program_text(assembly.problem))
    write_pictures(step.runner.dump, assembly.problem, assembly.reported, assembly.costs())


def trace_plan(name: str, plan: Callable[[], str]) -> None:
    """What ``plan`` makes is the JSON artifact ``memo_<name>_plan``, if TORCH_TRACE is set."""
    shim.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"memo_{name}_plan", "encoding": "json"},
        payload_fn=plan,
        expect_trace_id=False,
    )
