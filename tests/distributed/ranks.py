"""Processes that train together over gloo, and what each of them found out."""

import atexit
import functools
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.child import OBJECTS_BETWEEN_COLLECTIONS

SECONDS = 900
"""For all that a test trains, on a machine that is busy with other things."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """What one rank handed back, and all that it wrote meanwhile."""

    found: Any
    written: str


def run_ranks(
    module: str, folder: Path, arguments: dict[str, Any], num_ranks: int = 2
) -> list[RankOutcome]:
    """``module.main(**arguments)`` on every rank, by rank; each is a process of its own.

    The processes stay for the next test: importing torch and compiling for the first time take
    longer than many a test. A process group is made for each run. Its ranks meet at a file in
    ``folder``, since ports may be taken.
    """
    ranks = _ranks(num_ranks)
    try:
        return ranks.run(module, Path(tempfile.mkdtemp(dir=folder)), arguments)
    except BaseException:
        ranks.kill()
        _ranks.cache_clear()
        raise


class _Ranks:
    """Processes that wait for a module to run."""

    def __init__(self, num_ranks: int) -> None:
        self._written = [tempfile.TemporaryFile("a+") for _ in range(num_ranks)]
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.distributed.ranks", str(rank), str(num_ranks)],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "lo",
                    "LOCAL_WORLD_SIZE": str(num_ranks),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=written,
                text=True,
            )
            for rank, written in enumerate(self._written)
        ]
        atexit.register(self.kill)

    def run(self, module: str, folder: Path, arguments: dict[str, Any]) -> list[RankOutcome]:
        """The outcomes of the ranks."""
        begins = [os.fstat(written.fileno()).st_size for written in self._written]
        task = json.dumps({"module": module, "folder": str(folder), "arguments": arguments})
        timer = threading.Timer(SECONDS, self.kill)
        timer.start()
        try:
            for process in self._processes:
                process.stdin.write(task + "\n")
                process.stdin.flush()
            answers = [process.stdout.readline() for process in self._processes]
        finally:
            timer.cancel()
        written = [
            os.pread(file.fileno(), os.fstat(file.fileno()).st_size, begin).decode()
            for file, begin in zip(self._written, begins, strict=True)
        ]
        assert all(answers), "\n\n".join(written)
        return [
            RankOutcome(found=json.loads(answer), written=text)
            for answer, text in zip(answers, written, strict=True)
        ]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@functools.cache
def _ranks(num_ranks: int) -> _Ranks:
    return _Ranks(num_ranks)


def _run_what_comes(rank: int, num_ranks: int) -> None:
    """What a module prints is among what the rank has written; answers alone go to the test."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        task = json.loads(line)
        dist.init_process_group(
            "gloo", init_method=f"file://{task['folder']}/meet", rank=rank, world_size=num_ranks
        )
        found = importlib.import_module(task["module"]).main(**task["arguments"])
        dist.destroy_process_group()
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    _run_what_comes(int(sys.argv[1]), int(sys.argv[2]))
