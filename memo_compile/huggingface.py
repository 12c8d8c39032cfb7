"""memo by its name in Hugging Face's tools, and its numbers in the Trainer's logs.

    import memo_compile.huggingface

    memo_compile.huggingface.enable(memory_budget="60GiB")
    TrainingArguments(..., torch_compile=True, torch_compile_backend="memo")

accelerate, through which the Trainer compiles, takes the names of a closed enumeration only. No
entry point adds to it, so ``enable()`` does; nothing is changed when this module is imported.
"""

import importlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memo_compile.backends.metrics import metrics
from memo_compile.config import configure
from memo_compile.errors import RuntimeMisuse
from memo_compile.gpus import version_of
from memo_compile.reporting import state

if TYPE_CHECKING:
    from transformers import Trainer

log = logging.getLogger("memo")

TRIED = {"accelerate": ("1.15",), "transformers": ("5.23",)}
"""Package -> versions that ``enable`` was tried with, by the tests of ``examples``."""

NAME = "MEMO"
"""Of the enumeration's new member; its value is the same, as of all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enabled:
    """What ``enable`` did; ``print`` it for a sentence."""

    changed: bool
    """False where accelerate knew the name already: from an earlier call, or of its own."""
    versions: dict[str, str]
    """Package -> the version that is installed here."""
    untried: tuple[str, ...]
    """Those of them in a version that this was not tried with."""

    def __str__(self) -> str:
        here = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        did = (
            f"accelerate.utils.DynamoBackend has the new member {NAME}"
            if self.changed
            else f"accelerate.utils.DynamoBackend had the member {NAME} already"
        )
        tried = ", ".join(f"{name} {' and '.join(tries)}" for name, tries in TRIED.items())
        return (
            f"{did}, and Dynamo leaves warnings of transformers out of graphs; nothing else was "
            f"changed. Here: {here}. Tried with {tried}"
        )


def enable(**options: Any) -> Enabled:
    """Makes the Trainer and accelerate take "memo" for a backend; sets ``options`` by configure().

    After it ``TrainingArguments(torch_compile_backend="memo")`` and
    ``TorchDynamoPlugin(backend="memo")`` compile with memo. A second call sets its options and
    changes nothing else. The sentence of what it returns is a note of the report, too.

    Raises:
        RuntimeMisuse: accelerate is not installed, or its enumeration is another than those tried.
        ConfigError: an option is unknown or cannot be used.
    """
    configure(**options)
    backends = _backends()
    changed = NAME not in backends.__members__
    if changed:
        _add_member(backends)
    _leave_warnings_out()
    versions = {name: version for name in TRIED if (version := version_of(name))}
    untried = tuple(name for name, text in versions.items() if not text.startswith(TRIED[name]))
    enabled = Enabled(changed=changed, versions=versions, untried=untried)
    if changed:
        state.add_note(f"huggingface.enable(): {enabled}")
        log.log(logging.WARNING if untried else logging.INFO, "memo: %s", enabled)
    return enabled


def _backends() -> Any:
    """Returns accelerate's enumeration of backends. Raises RuntimeMisuse: there is none."""
    try:
        return importlib.import_module("accelerate.utils").DynamoBackend
    except ImportError as error:
        raise RuntimeMisuse(
            "huggingface.enable: accelerate cannot be imported, through which the Trainer "
            f"compiles ({error}); pip install accelerate"
        ) from error
    except AttributeError as error:
        raise RuntimeMisuse(
            f"huggingface.enable: accelerate {version_of('accelerate') or ''} has no enumeration "
            "DynamoBackend; compile before instead: model.compile(backend='memo')"
        ) from error


def _leave_warnings_out() -> None:
    """Makes Dynamo leave transformers' warnings out of graphs, which they would break."""
    from memo_compile.torch_private import dynamo

    for name in ("warning_once", "info_once"):  # transformers adds both to Python's loggers
        if method := getattr(logging.Logger, name, None):
            dynamo.ignore_logging(method)


def _add_member(backends: Any) -> None:
    """Adds a member NAME to the enumeration ``backends``, as if it had been written with it."""
    member = str.__new__(backends, NAME)
    member._name_, member._value_ = NAME, NAME
    backends._member_map_[NAME] = member
    backends._member_names_.append(NAME)
    backends._value2member_map_[NAME] = member
    type.__setattr__(backends, NAME, member)
    if backends(NAME) is not member or backends[NAME] is not member:
        raise RuntimeMisuse(
            f"huggingface.enable: Python's enumerations do not take {NAME}; compile before "
            "instead: model.compile(backend='memo')"
        )


def log_metrics(trainer: "Trainer") -> None:
    """Adds ``memo_compile.metrics()`` to whatever ``trainer`` logs from now on.

    The numbers stand beside the loss in its log history and in its reports (TensorBoard, Weights &
    Biases, the console), named ``memo/...``. A second call changes nothing.
    """
    from transformers import TrainerCallback

    class MemoMetrics(TrainerCallback):
        """Adds memo's numbers to what the callbacks behind it report."""

        def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
            if logs is not None and "loss" in logs:
                numbers = metrics()
                logs.update(numbers)
                state.log_history[-1].update(numbers)

    callbacks = trainer.callback_handler.callbacks
    # By name: each call of this function makes another class.
    if not any(type(callback).__name__ == MemoMetrics.__name__ for callback in callbacks):
        callbacks.insert(0, MemoMetrics())  # before those that report what they are given
