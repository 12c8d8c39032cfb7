"""The proof that a planned step computes what its graphs say; without a plan, of its calls alone.

    the graphs' calls = the step in tiles     (``check_program``, and ``without_again``)
                      = the step with moves   (``check_moves``)

Calls read what their code takes (``check_reads``), and the plan's bytes hold it (``check``).
"""

from collections.abc import Mapping

from memo_compile.check.check_contents import MAX_PROBLEMS, misshapen_calls
from memo_compile.check.check_moves import Recomputation, check_moves
from memo_compile.check.check_program import foreign_calls
from memo_compile.check.check_reads import misread_calls
from memo_compile.check.without_again import without_again
from memo_compile.errors import InvalidPlan
from memo_compile.step.plans import CheckVerdict
from memo_compile.step.problem import Problem
from memo_compile.step.tilings import WholeStep


def prove(
    whole: WholeStep,
    unmoved: Problem,
    planned: Problem,
    recomputations: Mapping[str, Recomputation],
) -> CheckVerdict:
    """Why ``planned`` may compute something else than ``whole``, in words.

    ``unmoved`` keeps everything; it is ``planned`` itself where nothing moves. ``recomputations``
    says what RECOMPUTE calls make (``check_moves.recomputations_of``).
    """
    misshapen = misshapen_calls(planned)
    if misshapen:
        return CheckVerdict(problems=misshapen[:MAX_PROBLEMS])
    kept, faults = without_again(whole, unmoved)
    found = [*faults, *foreign_calls(whole, kept), *misread_calls(planned)]
    num_reads = sum(len(call.reads) for call in planned.calls)
    if planned is not unmoved:
        moved = check_moves(unmoved, planned, recomputations)
        found += moved.problems
        num_reads += moved.num_reads
    return CheckVerdict(problems=tuple(found[:MAX_PROBLEMS]), num_reads=num_reads)


def require_proved(
    whole: WholeStep,
    unmoved: Problem,
    planned: Problem,
    recomputations: Mapping[str, Recomputation],
) -> None:
    """``planned`` computes what ``whole`` does. Raises InvalidPlan, with the calls: it may not."""
    verdict = prove(whole, unmoved, planned, recomputations)
    if not verdict.ok:
        raise InvalidPlan(f"the planned step is not the step: {verdict}")
