"""What a command is doing: a line on stderr, where that is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


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


def saying(progress: Progress) -> Callable[[str], None]:
    """What says, in the line of ``working``, what is done now."""
    return lambda what: progress.update(progress.task_ids[0], description=what)
