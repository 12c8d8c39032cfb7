"""The nearest settings of other tools for what a plan decided, as commented text.

Those tools keep, recompute or offload whole layers or whole operators, the same in every layer;
memo decides for each tensor. What they cannot say is written beside the setting.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memo_compile.errors import InputError
from memo_compile.step.plans import Decision
from memo_compile.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the emitted settings must know of a plan."""

    model: str
    num_layers: int
    seq: int | None
    batch: int
    tp: int
    cp: int
    pp: int
    decisions: Sequence[Decision]

    def bytes_of(self, decision: str) -> int:
        """Bytes of one layer with ``decision``, over the rows of all classes."""
        rows = (row for row in self.decisions if row.decision == decision)
        return round(sum(row.bytes * row.token_fraction for row in rows))

    @property
    def recomputes(self) -> bool:
        """True when something is recomputed."""
        return self.bytes_of("RECOMPUTE") > 0

    @property
    def offloads(self) -> bool:
        """True when something goes to the host."""
        return self.bytes_of("OFFLOAD") > 0

    def mostly_recomputes(self) -> bool:
        """True when more bytes are recomputed than copied or kept."""
        recomputed = self.bytes_of("RECOMPUTE")
        return recomputed > self.bytes_of("SAVE") + self.bytes_of("OFFLOAD")


def emit(tool: str, settings: Settings) -> str:
    """The settings of ``tool``: ``hf``, ``torchtitan`` or ``megatron``.

    Raises:
        InputError: another tool.
    """
    if tool not in EMITTERS:
        raise InputError(f"emit: expected one of {', '.join(EMITTERS)}, got {tool!r}")
    head = [
        f"# memo's plan for {settings.model}: {_summary(settings)}.",
        "# The nearest that this tool can say; memo itself decides tensor by tensor.",
    ]
    return "\n".join([*head, *EMITTERS[tool](settings)]) + "\n"


def _summary(settings: Settings) -> str:
    counts = Counter(row.decision for row in settings.decisions)
    parts = [
        f"{counts[kind]} {kind} ({format_bytes(settings.bytes_of(kind))} a layer)"
        for kind in ("SAVE", "OFFLOAD", "RECOMPUTE")
        if counts[kind]
    ]
    return ", ".join(parts) or "nothing is saved"


def _hf(settings: Settings) -> list[str]:
    lines = ["from transformers import TrainingArguments", "", "arguments = TrainingArguments("]
    lines.append(f"    per_device_train_batch_size={settings.batch},")
    lines.append("    bf16=True,")
    if not settings.recomputes and not settings.offloads:
        lines.append("    gradient_checkpointing=False,  # everything is kept")
    else:
        lines.append("    gradient_checkpointing=True,  # recomputes whole layers")
        lines.append('    gradient_checkpointing_kwargs={"use_reentrant": False},')
    lines.append("    torch_compile=True,")
    lines.append('    torch_compile_backend="memo",  # or leave the checkpointing to memo')
    lines.append(")")
    if settings.offloads:
        lines += [
            "# Layer inputs on the host, as memo offloads them:",
            "# with torch.autograd.graph.save_on_cpu(pin_memory=True):",
            "#     trainer.train()",
        ]
    return lines


def _torchtitan(settings: Settings) -> list[str]:
    if not settings.recomputes and not settings.offloads:
        mode, remark = "none", "everything is kept"
    elif settings.mostly_recomputes():
        mode, remark = "full", "most bytes are recomputed"
    else:
        mode, remark = "selective", "a part of each layer is recomputed"
    lines = ["[activation_checkpoint]", f'mode = "{mode}"  # {remark}']
    if mode == "selective":
        lines.append('selective_ac_option = "op"  # keeps matrix products and attention')
    if settings.offloads:
        size = format_bytes(settings.bytes_of("OFFLOAD"))
        lines.append(f"# torchtitan has no planned offload: memo moves {size} a layer to the host.")
    lines += [
        "",
        "[parallelism]",
        f"tensor_parallel_degree = {settings.tp}",
        f"context_parallel_degree = {settings.cp}",
        f"pipeline_parallel_degree = {settings.pp}",
        "",
        "[training]",
        f"local_batch_size = {settings.batch}",
    ]
    if settings.seq is not None:
        lines.append(f"seq_len = {settings.seq}")
    return lines


def _megatron(settings: Settings) -> list[str]:
    flags = [
        f"--tensor-model-parallel-size {settings.tp}",
        f"--context-parallel-size {settings.cp}",
        f"--pipeline-model-parallel-size {settings.pp}",
        f"--micro-batch-size {settings.batch}",
        "--use-distributed-optimizer  # ZeRO-1",
    ]
    if settings.seq is not None:
        flags.append(f"--seq-length {settings.seq}")
    if settings.tp > 1:
        flags.append("--sequence-parallel")
    if not settings.recomputes and not settings.offloads:
        flags.append("# no --recompute-*: everything is kept")
    elif settings.mostly_recomputes():
        flags.append("--recompute-granularity full")
        flags.append("--recompute-method uniform")
        flags.append("--recompute-num-layers 1")
    elif settings.recomputes:
        flags.append("--recompute-granularity selective")
        flags.append("--recompute-modules layernorm mlp")
    if settings.offloads:
        size = format_bytes(settings.bytes_of("OFFLOAD"))
        flags.append(f"--cpu-offloading-num-layers {max(1, settings.num_layers - 2)}")
        flags.append(f"# memo offloads {size} a layer; the last layers stay on the device")
    return flags


EMITTERS: dict[str, Callable[[Settings], list[str]]] = {
    "hf": _hf,
    "torchtitan": _torchtitan,
    "megatron": _megatron,
}
"""Tool -> what writes its settings."""
