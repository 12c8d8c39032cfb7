"""Two processes that train together over gloo, and what each of them found out."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

SECONDS = 900
"""For all that a test trains, on a machine that is busy with other things."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """What one rank handed back, and all that it wrote on stderr."""

    found: Any
    stderr: str


def run_ranks(
    module: str, folder: Path, arguments: dict[str, Any], num_ranks: int = 2
) -> list[RankOutcome]:
    """``module``'s main on every rank, by rank; each is a process of its own.

    The module ends with ``if __name__ == "__main__": run_as_rank(main)``. The ranks meet at a file
    in ``folder``: ports may be taken.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(folder), str(rank), str(num_ranks)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "RANK_ARGUMENTS": json.dumps(arguments),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        told = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, stderr) in zip(processes, told, strict=True):
        assert process.returncode == 0, stderr
    return [
        RankOutcome(
            found=json.loads((folder / f"found{rank}.json").read_text()), stderr=told[rank][1]
        )
        for rank in range(num_ranks)
    ]


def run_as_rank(main: Any) -> None:
    """``main(**arguments)`` as one of the ranks that ``run_ranks`` started."""
    folder, rank, num_ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=num_ranks
    )
    found = main(**json.loads(os.environ["RANK_ARGUMENTS"]))
    dist.destroy_process_group()
    (folder / f"found{rank}.json").write_text(json.dumps(found))
