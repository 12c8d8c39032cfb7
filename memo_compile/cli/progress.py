"""Shows what a command is doing, as a line on stderr where that is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def working(what: str) -> Iterator[Progress]:
    """Shows ``what`` with a spinner and the seconds so far until the block ends.

    The line is on stderr, if that is a terminal, and is removed at the end of the block.
    """
    console = Console(stderr=True, highlight=False)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        progress.add_task(what)
        yield progress


def saying(progress: Progress) -> Callable[[str], None]:
    """Returns a function that replaces the text of the line of ``working``."""
    return lambda what: progress.update(progress.task_ids[0], description=what)
