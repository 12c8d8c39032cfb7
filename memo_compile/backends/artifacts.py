"""What memo leaves in torch's structured trace, where tlparse shows it beside Inductor's output."""

import functools
from collections.abc import Callable, Mapping

from memo_compile import shim


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
