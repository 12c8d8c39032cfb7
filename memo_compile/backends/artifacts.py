"""What a compiled step leaves to look at: the dump folder, and torch's structured trace.

tlparse shows the trace beside Inductor's output.
"""

import functools
from collections.abc import Callable, Mapping

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


def emit_artifacts(plan_name: str, texts: Mapping[str, Callable[[], str]]) -> None:
    """Every text of ``texts`` (name -> what makes it) is an artifact ``memo_<plan_name>_<name>``.

    No text is made unless TORCH_TRACE is set. A name that ends in ``.json`` is shown as JSON.
    """
    for name, text in texts.items():
        stem, _, ending = name.rpartition(".")
        metadata = {
            "name": f"memo_{plan_name}_{stem or name}",
            "encoding": "json" if ending == "json" else "string",
        }
        shim.trace_structured(
            "artifact",
            metadata_fn=functools.partial(dict, metadata),
            payload_fn=text,
            expect_trace_id=False,
        )
