"""How far a plan is: a bar on stderr, where that is a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


@contextmanager
def working(what: str) -> Iterator[Progress]:
    """Says ``what`` is done, and since when, where nobody knows how much of it there is.

    On stderr, if that is a terminal; the line is gone at the end of the block.
    """
    console = Console(stderr=True, highlight=False)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        progress.add_task(what)
        yield progress


class StepBar:
    """A bar of steps, whose total grows where a further step turns out to be needed.

    A context; the bar is gone at its end. Called with what is done next, and with how many steps
    follow that at least (``memo_compile.offline.asked_model.Say``).
    """

    def __init__(self, console: Console, total: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._progress.add_task("planning", total=total)
        self._begun = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def __call__(self, what: str, following: int = 0) -> None:
        """``what`` begins now, so that what began before it has ended."""
        total = self._begun + 1 + following
        self._progress.update(
            self._task, description=what, completed=self._begun, total=max(total, self.total)
        )
        self._begun += 1

    @property
    def total(self) -> int:
        """How many steps there are, as far as that is known."""
        return int(self._progress.tasks[0].total or 0)

    @property
    def done(self) -> int:
        """How many of them have ended."""
        return int(self._progress.tasks[0].completed)
