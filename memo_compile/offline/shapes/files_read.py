"""Which files a user's code reads while its module is imported and its function is called."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CODE = (".py", ".pyc")
"""Loaded code is known from the loaded modules."""

OF_SYSTEM = ("/proc/", "/sys/", "/dev/")
"""Files that are other ones each time they are looked at."""


class FilesRead:
    """Files that were read so far in this process, inside ``watched``."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.modules: set[str] = set()
        """Names: of all modules at the end of the first time, then of those loaded inside."""
        self._is_watching = False
        self._is_hooked = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """What is read inside is noted."""
        if not self._is_hooked:
            sys.addaudithook(self._hook)  # there is no way to take one back
            self._is_hooked = True
        before = set(sys.modules) if self.modules else set()
        self._is_watching = True
        try:
            yield
        finally:
            self._is_watching = False
            self.modules |= set(sys.modules) - before

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_watching or event != "open":
            return
        path, _, flags = arguments
        is_made = flags & os.O_CREAT or flags & os.O_ACCMODE == os.O_WRONLY
        if is_made or not isinstance(path, str | bytes | os.PathLike):
            return
        name = str(Path(os.fsdecode(path)).absolute())
        if not name.endswith(CODE) and not name.startswith(OF_SYSTEM):
            self.paths.add(name)


FILES_READ = FilesRead()
"""Of this process: a module is imported once."""
