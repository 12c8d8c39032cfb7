"""Tries the rows of docs/works-with.md and writes its tables: ``python -m tests.works_with``.

What was tried with the same versions is not tried again, so that a run that ended goes on. A row
whose packages are missing keeps what another machine found.
"""

import argparse
import gc
import json
import sys

import torch

from benchmarks import harness
from memo_compile.planners.placement.compiled import compiled_greedy, has_numba
from tests.child import OBJECTS_BETWEEN_COLLECTIONS, Child, Lost, answer_lines
from tests.works_with.page import PAGE, kept, results, written
from tests.works_with.row import ROWS, Row
from tests.works_with.tried import Tried, tried, versions

COMMAND = (sys.executable, "-m", "tests.works_with", "--child")
TIMEOUT_S = 900.0
ROWS_PER_PROCESS = 40
"""Then a fresh one, so that what torch caches does not add up."""


def main() -> int:
    options = _options()
    if options.child:
        return _answer_names(options)
    if not options.page:
        _try(options)
    PAGE.write_text(written())
    tried_rows = kept(options.lowering).items()
    wrong = [name for name, outcome in tried_rows if outcome["right"] is False]
    print("\n".join(f"WRONG: {name}" for name in wrong), file=sys.stderr)
    return 1 if wrong else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="*", default=[], help="those whose name has these words")
    parser.add_argument("--again", action="store_true", help="also what was tried already")
    parser.add_argument("--no-floors", action="store_true", help="no budgets: a third of the time")
    parser.add_argument("--page", action="store_true", help="try nothing, only write the page")
    parser.add_argument("--lowering", choices=("aten", "inductor"), default="aten")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _try(options: argparse.Namespace) -> None:
    command = [*COMMAND, f"--lowering={options.lowering}"]
    command += ["--no-floors"] if options.no_floors else []
    with Child(command, timeout_s=TIMEOUT_S, questions_per_process=ROWS_PER_PROCESS) as child:
        for row in ROWS.values():
            if options.rows and not any(word in row.name for word in options.rows):
                continue
            if row.missing():
                print(f"{row.name}: needs {', '.join(row.missing())}", file=sys.stderr)
                continue
            outcomes = kept(options.lowering)
            before = outcomes.get(row.name, {})
            is_done = before.get("versions") == versions(row) and (
                options.no_floors or "bounded" in before
            )
            if is_done and not options.again:
                continue
            answer = child.ask(row.name)
            if isinstance(answer, Lost):
                answer = {"failed": f"{answer.seconds:.0f} s; {answer.log[-2000:]}"}
            print(row.name, json.dumps(answer), file=sys.stderr, flush=True)
            if "failed" not in answer:
                outcomes[row.name] = answer
                text = json.dumps(outcomes, indent=1, sort_keys=True) + "\n"
                results(options.lowering).write_text(text)


def _answer_names(options: argparse.Namespace) -> int:
    """The child, in which memory is not the point: few collections, placement compiled."""
    torch.set_num_threads(1)
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    harness.register_memo()
    if has_numba():
        compiled_greedy()
    answer_lines(lambda name: _answer(ROWS[name], options))
    return 0


def _answer(row: Row, options: argparse.Namespace) -> Tried:
    """The outcome; ``failed`` where the row itself does not run in eager."""
    try:
        return tried(row, lowering=options.lowering, finds_floor=not options.no_floors)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main())
