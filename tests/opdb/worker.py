"""Tries entries in a process of its own, which may die: names come in, outcomes go out."""

import gc
import time
from typing import Any

import torch

from benchmarks import harness
from memo_compile.planners.placement.compiled import compiled_greedy, has_numba
from tests.child import answer_lines
from tests.opdb.runs import outcomes_of
from tests.opdb.samples import cases_of, databases, quick_cases_of


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    """Outcomes of all cases of some entries, of the lowerings that are asked for."""
    began = time.process_time()
    cases = (quick_cases_of if question["quick"] else cases_of)(question["entries"])
    outcomes = [
        outcome.as_dict()
        for case in cases
        if case.lowering in question["lowerings"]
        for outcome in outcomes_of(case)
    ]
    return {"outcomes": outcomes, "processor_s": round(time.process_time() - began, 1)}


def main() -> None:
    """The child."""
    torch.set_num_threads(1)
    harness.register_memo()
    databases()
    if has_numba():
        compiled_greedy()  # which places four times as fast
    gc.freeze()  # collections during compilations need not walk what torch keeps for good
    answer_lines(_answer)


if __name__ == "__main__":
    main()
