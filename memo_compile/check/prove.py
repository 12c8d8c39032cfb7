"""Proves that the calls of a planned step compute what its graphs say; offsets are not needed.

    the graphs' calls = the step in tiles     (``check_program``, and ``second_gathers``)
                      = the step with moves   (``check_moves``)

``check_reads`` adds that calls read what their code was made for. That each value has its bytes is
the proof of a placed plan (``check_plan``).
"""

from collections.abc import Mapping

from memo_compile.check.check_contents import MAX_PROBLEMS, misshapen_calls
from memo_compile.check.check_moves import Recomputation, check_moves
from memo_compile.check.check_program import foreign_calls
from memo_compile.check.check_reads import misread_calls
from memo_compile.check.second_gathers import without_second_gathers
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
    """Returns why ``planned`` may compute something else than ``whole``, a sentence each.

    ``unmoved`` keeps everything; it is ``planned`` itself where nothing moves. ``recomputations``
    says what RECOMPUTE calls make (``check_moves.recomputations_of``).
    """
    misshapen = misshapen_calls(planned)
    if misshapen:
        return CheckVerdict(problems=misshapen[:MAX_PROBLEMS])
    without_gathers, faults = without_second_gathers(whole, unmoved)
    problems = [*faults, *foreign_calls(whole, without_gathers), *misread_calls(planned)]
    num_reads = sum(len(call.reads) for call in planned.calls)
    if planned is not unmoved:
        moved = check_moves(unmoved, planned, recomputations)
        problems += moved.problems
        num_reads += moved.num_reads
    return CheckVerdict(problems=tuple(problems[:MAX_PROBLEMS]), num_reads=num_reads)


def require_proved(
    whole: WholeStep,
    unmoved: Problem,
    planned: Problem,
    recomputations: Mapping[str, Recomputation],
) -> None:
    """Raises InvalidPlan, with the faults, unless ``planned`` computes what ``whole`` does."""
    verdict = prove(whole, unmoved, planned, recomputations)
    if not verdict.ok:
        raise InvalidPlan(f"the planned step is not the step: {verdict}")
