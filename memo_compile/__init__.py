"""memo: a torch.compile backend that plans activation memory.

    model = torch.compile(model, backend="memo")
    ...
    print(memo_compile.report())

Public are the names in ``__all__`` and the exceptions of ``memo_compile.errors``; torch is loaded
only when a name that needs it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from memo_compile import errors
from memo_compile.config import MemoConfig, configure
from memo_compile.reporting.state import Report, report
from memo_compile.step.policy_rules import clear_policy_rules, policy_rule

if TYPE_CHECKING:
    from memo_runtime.arena import release

    from memo_compile.analysis.purity import register_recomputable
    from memo_compile.backends.declare_group import group
    from memo_compile.backends.declare_pipeline import pipeline
    from memo_compile.backends.entry import memo as backend
    from memo_compile.backends.metrics import metrics
    from memo_compile.offline.longest import longest
    from memo_compile.offline.plan_offline import plan
    from memo_compile.pipelines.pipeline_split import pipeline_split
    from memo_compile.training_state.offloaded_optimizer import offload
    from memo_compile.training_state.parameters_on_host import parameters_on_host

__all__ = [
    "MemoConfig",
    "Report",
    "backend",
    "clear_policy_rules",
    "configure",
    "errors",
    "group",
    "longest",
    "metrics",
    "offload",
    "parameters_on_host",
    "pipeline",
    "pipeline_split",
    "plan",
    "policy_rule",
    "register_recomputable",
    "release",
    "report",
]

_LAZY = {
    "backend": ("memo_compile.backends.entry", "memo"),
    "group": ("memo_compile.backends.declare_group", "group"),
    "longest": ("memo_compile.offline.longest", "longest"),
    "metrics": ("memo_compile.backends.metrics", "metrics"),
    "offload": ("memo_compile.training_state.offloaded_optimizer", "offload"),
    "parameters_on_host": (
        "memo_compile.training_state.parameters_on_host",
        "parameters_on_host",
    ),
    "pipeline": ("memo_compile.backends.declare_pipeline", "pipeline"),
    "pipeline_split": ("memo_compile.pipelines.pipeline_split", "pipeline_split"),
    "plan": ("memo_compile.offline.plan_offline", "plan"),
    "register_recomputable": ("memo_compile.analysis.purity", "register_recomputable"),
    "release": ("memo_runtime.arena", "release"),
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(importlib.import_module(module), attribute)
    raise AttributeError(f"module 'memo_compile' has no attribute {name!r}")
