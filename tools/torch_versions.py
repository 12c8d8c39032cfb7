"""Run the quick tests and the core of the numerics with several versions of torch.

    python tools/torch_versions.py 2.11.0 2.12.0 2.13.0 newest

Each version gets an environment of its own, ``.venv-torch/VERSION``, and keeps it. torch comes from
PyTorch's CPU index where that can be reached; from PyPI the Linux builds are CUDA's, of several
gigabytes each. The result is ``benchmarks/results/torch_versions-DATE.json``; the exit code is 0
when every version passed.
"""

import datetime
import json
import os
import re
import subprocess
import sys
import venv
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.bootstrap import REQUIREMENTS, torch_index  # noqa: E402  (run as a file)

RESULTS = ROOT / "benchmarks" / "results"
SUITES = {
    "quick": ("tests/unit", "tests/graph", "tests/commands"),
    "numerics": (
        *("tests/numerics/test_models.py", "tests/numerics/test_survival.py"),
        *("tests/numerics/test_moves_survival.py", "tests/numerics/test_budget.py"),
        *("tests/numerics/test_tiles.py", "tests/numerics/test_variants.py"),
    ),
}
"""The core of the numerics: models against eager, steps in unusual order, budgets, tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one suite ended with one version."""

    asked: str
    torch: str
    suite: str
    exit_code: int
    summary: str
    """pytest's last line, or why nothing ran."""


def main(versions: list[str]) -> int:
    """Test every version; the result is on disk after each, so that a stop loses little."""
    if not versions:
        print("torch_versions: expected versions, such as 2.13.0 or newest", file=sys.stderr)
        return 2
    outcomes: list[Outcome] = []
    for version in versions:
        outcomes += tested(version)
        write(outcomes)
    for outcome in outcomes:
        print(f"torch {outcome.torch} {outcome.suite}: {outcome.summary}")
    return 0 if all(outcome.exit_code == 0 for outcome in outcomes) else 1


def tested(version: str) -> list[Outcome]:
    """The outcome of every suite with torch ``version``, in a fresh or a kept environment."""
    try:
        python = installed(version)
    except subprocess.CalledProcessError as error:
        why = f"was not installed: {error}"
        return [Outcome(asked=version, torch=version, suite="install", exit_code=2, summary=why)]
    shown = [python, "-c", "import torch; print(torch.__version__)"]
    torch = subprocess.run(shown, capture_output=True, text=True, check=True).stdout.strip()
    outcomes = []
    for suite, paths in SUITES.items():
        run = [python, "-m", "pytest", "-q", "-n", os.environ.get("WORKERS", "2")]
        run += ["--dist", "worksteal", "-m", "not full", *paths]
        done = subprocess.run(
            run,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        print(done.stdout, flush=True)
        outcomes.append(
            Outcome(
                asked=version,
                torch=torch,
                suite=suite,
                exit_code=done.returncode,
                summary=(done.stdout.strip().splitlines() or ["no output"])[-1],
            )
        )
    return outcomes


def installed(version: str) -> Path:
    """The interpreter of an environment with torch ``version`` and the development pins."""
    folder = ROOT / ".venv-torch" / version
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    wanted = "torch" if version == "newest" else f"torch=={version}"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--upgrade", wanted, *torch_index()], check=True)
    pins = folder / "pins.txt"
    pins.write_text(free_of_torch(REQUIREMENTS.read_text()))
    subprocess.run([*pip, "-r", str(pins)], check=True)
    subprocess.run([*pip, "--no-build-isolation", "--no-deps", "-e", str(ROOT)], check=True)
    return python


def free_of_torch(requirements: str) -> str:
    """``requirements`` without pins of what each torch brings in its own version."""
    return re.sub(r"^(?:torch|triton|sympy|mpmath)==.*\n", "", requirements, flags=re.MULTILINE)


def write(outcomes: list[Outcome]) -> None:
    """The result of today holds ``outcomes``."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    rows = [asdict(outcome) for outcome in outcomes]
    text = json.dumps({"date": today, "rows": rows}, indent=2)
    (RESULTS / f"torch_versions-{today}.json").write_text(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
