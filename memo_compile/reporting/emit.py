"""The nearest settings of other tools for what a plan decided, as commented text.

Those tools keep, recompute or offload whole layers or whole operators, the same in every layer;
memo decides for each tensor. What they cannot say is written beside the setting.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from memo_compile.errors import InputError
from memo_compile.reporting.render import render
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

    @property
    def keeps_everything(self) -> bool:
        """True when nothing is recomputed and nothing goes to the host."""
        return not self.recomputes and not self.offloads

    @property
    def mostly_recomputes(self) -> bool:
        """True when more bytes are recomputed than copied or kept."""
        recomputed = self.bytes_of("RECOMPUTE")
        return recomputed > self.bytes_of("SAVE") + self.bytes_of("OFFLOAD")


TOOLS = ("hf", "torchtitan", "megatron")
"""Each has its text in ``templates/TOOL.j2``."""


def emit(tool: str, settings: Settings) -> str:
    """The settings of ``tool``, one of TOOLS.

    Raises:
        InputError: another tool.
    """
    if tool not in TOOLS:
        raise InputError(f"emit: expected one of {', '.join(TOOLS)}, got {tool!r}")
    offloaded = format_bytes(settings.bytes_of("OFFLOAD"))
    text = render(f"{tool}.j2", plan=settings, summary=_summary(settings), offloaded=offloaded)
    return text.rstrip() + "\n"


def _summary(settings: Settings) -> str:
    counts = Counter(row.decision for row in settings.decisions)
    parts = [
        f"{counts[kind]} {kind} ({format_bytes(settings.bytes_of(kind))} a layer)"
        for kind in ("SAVE", "OFFLOAD", "RECOMPUTE")
        if counts[kind]
    ]
    return ", ".join(parts) or "nothing is saved"
