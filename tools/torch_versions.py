"""Run the quick tests and the core of the numerics with several versions of torch.

    python tools/torch_versions.py 2.11.0 2.12.0 2.13.0 newest
    python tools/torch_versions.py --suite quick --suite numerics 2.12.0

Each version gets an environment of its own, ``.venv-torch/VERSION``, and keeps it. torch comes from
PyTorch's CPU index where that can be reached; from PyPI the Linux builds are CUDA's, of several
gigabytes each. The result is ``benchmarks/results/torch_versions-DATE.json``. It is written after
each suite and says of which commit it was; a suite that passed on this very commit is not run
again. The exit code is 0 when everything that was asked has passed.

Environment: ``WORKERS`` is the number of pytest's processes.
"""

import argparse
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
    "quick": ("tests/unit", "tests/graph"),
    "numerics": (
        *("tests/numerics/test_models.py", "tests/numerics/test_survival.py"),
        *("tests/numerics/test_moves_survival.py", "tests/numerics/test_budget.py"),
        *("tests/numerics/test_tiles.py", "tests/numerics/test_variants.py"),
    ),
}
"""What ``make quick`` runs, and the core of the numerics: models against eager, steps in unusual
order, budgets, tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one suite ended with one version."""

    asked: str
    torch: str
    suite: str
    commit: str
    """Of the checkout, ``+`` behind it where files differ from it."""
    exit_code: int
    summary: str
    """pytest's last line, or why nothing ran."""


def main(arguments: list[str]) -> int:
    """Test every version; the result is on disk after each suite, so that a stop loses little."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="+", help="such as 2.13.0, or newest")
    parser.add_argument("--suite", action="append", choices=SUITES, help="by default all")
    options = parser.parse_args(arguments)
    commit, outcomes = checked_out(), read()
    asked = [(name, suite) for name in options.versions for suite in options.suite or SUITES]
    for version, suite in asked:
        known = outcomes.get((version, suite))
        if known is None or known.exit_code != 0 or known.commit != commit or "+" in commit:
            outcomes[version, suite] = tested(version, suite, commit)
            write(outcomes)
    for key in asked:
        print(f"torch {outcomes[key].torch} {key[1]}: {outcomes[key].summary}")
    return 0 if all(outcomes[key].exit_code == 0 for key in asked) else 1


def tested(version: str, suite: str, commit: str) -> Outcome:
    """The outcome of ``suite`` with torch ``version``, in a fresh or a kept environment."""
    try:
        python = installed(version)
    except subprocess.CalledProcessError as error:
        why = f"was not installed: {error}"
        return Outcome(
            asked=version, torch=version, suite=suite, commit=commit, exit_code=2, summary=why
        )
    shown = [python, "-c", "import torch; print(torch.__version__)"]
    torch = subprocess.run(shown, capture_output=True, text=True, check=True).stdout.strip()
    run = [python, "-m", "pytest", "-q", "-n", os.environ.get("WORKERS", "2")]
    run += ["--dist", "worksteal", "-m", "not full", *SUITES[suite]]
    done = subprocess.run(
        run,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout, flush=True)
    return Outcome(
        asked=version,
        torch=torch,
        suite=suite,
        commit=commit,
        exit_code=done.returncode,
        summary=(done.stdout.strip().splitlines() or ["no output"])[-1],
    )


def checked_out() -> str:
    """The commit that is tested, and whether tracked files differ from it."""
    git = ("git", "-C", str(ROOT))
    shown = (*git, "rev-parse", "--short", "HEAD")
    commit = subprocess.run(shown, capture_output=True, text=True, check=True).stdout.strip()
    changed = (*git, "status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results")
    return commit + ("+" if subprocess.run(changed, capture_output=True).stdout else "")


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


def read() -> dict[tuple[str, str], Outcome]:
    """The outcomes of today so far, by version and suite."""
    path = result_path()
    if not path.exists():
        return {}
    rows = json.loads(path.read_text())["rows"]
    return {(row["asked"], row["suite"]): Outcome(**{"commit": "", **row}) for row in rows}


def write(outcomes: dict[tuple[str, str], Outcome]) -> None:
    """The result of today holds ``outcomes``."""
    path = result_path()
    rows = [asdict(outcome) for _, outcome in sorted(outcomes.items())]
    text = json.dumps({"date": path.stem.removeprefix("torch_versions-"), "rows": rows}, indent=2)
    path.write_text(f"{text}\n")


def result_path() -> Path:
    """Where the result of today lies."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return RESULTS / f"torch_versions-{today}.json"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
