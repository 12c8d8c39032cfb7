"""Writes the settings of other tools that come nearest to a plan's decisions, with comments.

Those tools keep, recompute or offload whole layers or whole operators, the same in every layer;
memo decides for each tensor. Where a setting cannot express a decision, a comment says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from memo_compile.errors import InputError
from memo_compile.reporting.render import render
from memo_compile.step.plans import Decision
from memo_compile.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The facts of a plan that the templates use."""

    model: str
    num_layers: int
    seq: int | None
    batch: int
    tp: int
    cp: int
    cp_kind: str | None
    pp: int
    decisions: Sequence[Decision]


TOOLS = ("hf", "torchtitan", "megatron")
"""Tools that a text is written for; each has its own in ``templates/TOOL.j2``."""

KINDS = ("SAVE", "OFFLOAD", "RECOMPUTE")


def emit(tool: str, settings: Settings) -> str:
    """Returns the settings of ``tool`` as text. Raises InputError: it is not one of TOOLS."""
    if tool not in TOOLS:
        raise InputError(f"emit: expected one of {', '.join(TOOLS)}, got {tool!r}")
    rows = {kind: [row for row in settings.decisions if row.decision == kind] for kind in KINDS}
    # Bytes of one layer of each class, by decision.
    sizes = {k: round(sum(row.bytes * row.token_fraction for row in rows[k])) for k in KINDS}
    parts = [
        f"{len(rows[kind])} {kind} ({format_bytes(sizes[kind])} a layer)"
        for kind in KINDS
        if rows[kind]
    ]
    text = render(
        f"{tool}.j2",
        plan=settings,
        summary=", ".join(parts) or "nothing is saved",
        recomputes=sizes["RECOMPUTE"] > 0,
        mostly_recomputes=sizes["RECOMPUTE"] > sizes["SAVE"] + sizes["OFFLOAD"],
        offloads=sizes["OFFLOAD"] > 0,
        offloaded=format_bytes(sizes["OFFLOAD"]),
    )
    return text.rstrip() + "\n"
