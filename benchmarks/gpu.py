"""Everything that needs a GPU, in under eight minutes: ``python -m benchmarks.gpu``.

Runs ``tests/gpu``, then one training step of a bf16 Llama at 8K to 64K tokens: eager with
checkpointing, plain Inductor and memo, each in a process of its own. An arm that does not fit is a
row, not a failure. A dated result goes to ``benchmarks/results``.
"""

import argparse
import subprocess
import sys
import time
from typing import Any

from benchmarks import harness
from memo_compile.units import format_bytes

ARMS = ("checkpointing", "inductor", "memo")
TOKENS = (8192, 32768, 65536)
TIME_LIMIT_S = 420.0
"""No new arm starts after this, so that the whole stays under eight minutes."""


def main() -> int:
    """Run tests and arms, print the table, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", default=",".join(str(one) for one in TOKENS))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("benchmarks.gpu: no CUDA device here", file=sys.stderr)
        return 2
    begin = time.monotonic()
    tests = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/gpu"], check=False)
    rows = []
    for tokens in (int(one) for one in options.tokens.split(",")):
        for name in ARMS:
            if time.monotonic() - begin > TIME_LIMIT_S:
                print(f"out of time: {name} at {tokens} tokens not run", file=sys.stderr)
                continue
            rows.append(run_row(name, tokens, options))
    show(rows)
    payload = {"hardware": harness.hardware(), "tests_exit_code": tests.returncode, "rows": rows}
    if not options.no_save:
        print(f"written: {harness.write_results('gpu', payload)}", file=sys.stderr)
    return tests.returncode


def run_row(name: str, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """One arm at one length; what went wrong instead of numbers when it failed."""
    arm = harness.Arm(
        name=name,
        arguments=(
            f"--child={name}",
            f"--layers={options.layers}",
            f"--hidden={options.hidden}",
            f"--tokens={tokens}",
            f"--steps={options.steps}",
            "--device=cuda",
            "--dtype=bfloat16",
            "--optimizer=sgd",
        ),
    )
    row: dict[str, Any] = {"arm": name, "tokens": tokens}
    try:
        row.update(harness.run_arm("benchmarks.step", arm))
    except harness.ChildFailed as error:
        row["failure"] = str(error).splitlines()[-1]
    return row


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    cells = []
    for row in rows:
        if "failure" in row:
            cells.append([row["arm"], str(row["tokens"]), row["failure"][:60], "", "", ""])
            continue
        cells.append(
            [
                row["arm"],
                str(row["tokens"]),
                format_bytes(row["peak_bytes"]),
                format_bytes(row["planned_peak_bytes"]) if "planned_peak_bytes" in row else "-",
                f"{row['tokens'] / row['step_s']:.0f}",
                f"{row['first_step_s']:.1f} s",
            ]
        )
    columns = ["arm", "tokens", "peak", "planned", "tokens/s", "first step"]
    harness.print_table("one GPU, bf16 Llama", columns, cells)


if __name__ == "__main__":
    sys.exit(main())
