"""The result of ``memo_compile.pipeline_split``, and its table."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from memo_compile.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from torch.distributed.pipelining import SplitPoint

_WIDTH = 110
"""Of the table, as that of the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStage:
    """One stage of a split: its modules, and the figures of its plan."""

    modules: tuple[str, ...]
    """Fully qualified names: layers, and others that hold no layers."""
    begins_at: str
    """The first of these names; empty for the first stage."""
    num_layers: int
    num_in_flight: int
    """How many microbatches wait for their backward, at most."""
    seconds: float | None
    """Of a microbatch's forward and backward with recomputation and waits; None: no plan fits."""
    more_s: float
    """The part of ``seconds`` that is recomputation and waits for copies."""
    peak_bytes: int | None
    """Peak of its rank in a step, with all its stages and optimizer state."""
    floor_bytes: int | None
    """The smallest budget that a plan fits, where none fits this one."""
    host_bytes: int
    """Peak of the bytes that lie on the host."""
    decisions: tuple[str, ...]
    """What is recomputed and what goes to the host, as lines for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSplit:
    """The best cut of a model into stages, and the even one beside it.

    ``print`` shows a table: ``time`` is of one microbatch, ``more`` what of it is recomputation and
    waits, and ``even`` the layers of the even split, with their time and peak.
    """

    stages: tuple[SplitStage, ...]
    even: tuple[SplitStage, ...]
    """As many layers in each stage, to compare with."""
    schedule: str
    num_microbatches: int
    budget_bytes: int | None
    is_proved: bool
    """True where no split has a faster slowest stage; with several stages on a rank unknown."""
    notes: tuple[str, ...] = ()

    @property
    def split_points(self) -> tuple[str, ...]:
        """Modules at which stages begin, without the first stage's."""
        return tuple(stage.begins_at for stage in self.stages[1:])

    def split_spec(self) -> "dict[str, SplitPoint]":
        """For torch's ``pipeline(module, mb_args, split_spec=...)``."""
        from torch.distributed.pipelining import SplitPoint

        return dict.fromkeys(self.split_points, SplitPoint.BEGINNING)

    @property
    def modules_per_stage(self) -> list[list[str]]:
        """Names of modules for each stage, as torchtitan's ``module_fqns_per_model_part``."""
        return [list(stage.modules) for stage in self.stages]

    @property
    def slowest_s(self) -> float:
        """Seconds of a microbatch on the slowest stage."""
        return _slowest(self.stages)

    @property
    def even_slowest_s(self) -> float:
        """Seconds of a microbatch on the even split's slowest stage; infinite: it does not fit."""
        return _slowest(self.even)

    def __str__(self) -> str:
        text = io.StringIO()
        console = Console(file=text, width=_WIDTH, highlight=False, no_color=True)
        console.print(self._table())
        comparison = f", {self.slowest_s / self.even_slowest_s:.3f} x that of the even split"
        if math.isinf(self.even_slowest_s):
            comparison = "; the even split does not fit"
        lines = [f"slowest stage {format_seconds(self.slowest_s)}{comparison}"]
        for number, stage in enumerate(self.stages):
            lines += [f"stage {number}: {line}" for line in stage.decisions]
        lines += [f"note: {note}" for note in self.notes]
        for line in lines:
            console.print(line, markup=False)
        return text.getvalue().rstrip()

    def _table(self) -> Table:
        """A row for each stage, with the even split's figures behind it."""
        budget = "no budget" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        title = f"{self.schedule}, {self.num_microbatches} microbatches, {budget} on each rank"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("stage", no_wrap=True)
        table.add_column("begins at", overflow="fold")
        for name in ("layers", "in flight", "time", "more", "peak", "even", "time", "peak"):
            table.add_column(name, justify="right", no_wrap=True)
        for number, (stage, even) in enumerate(zip(self.stages, self.even, strict=True)):
            table.add_row(
                str(number),
                stage.begins_at or stage.modules[0],
                str(stage.num_layers),
                str(stage.num_in_flight),
                *_figures(stage),
                format_bytes(stage.peak_bytes or 0),
                str(even.num_layers),
                *_even_figures(even),
            )
        return table


def _slowest(stages: Sequence[SplitStage]) -> float:
    return max(math.inf if stage.seconds is None else stage.seconds for stage in stages)


def _figures(stage: SplitStage) -> tuple[str, str]:
    return format_seconds(stage.seconds or 0.0), format_seconds(stage.more_s)


def _even_figures(stage: SplitStage) -> tuple[str, str]:
    """Seconds and peak; of a stage without a plan, what it needs at least."""
    if stage.seconds is not None:
        return format_seconds(stage.seconds), format_bytes(stage.peak_bytes or 0)
    needs = "?" if stage.floor_bytes is None else format_bytes(stage.floor_bytes)
    return "none", f"> {needs}"
