"""A planned step that is changed anywhere is refused, or computes the same numbers.

``make mutate`` does the same for thousands of mutations of more steps.
"""

import dataclasses
import random
from functools import cache

import pytest

from memo_compile.check.prove import require_proved
from memo_compile.errors import InvalidPlan
from memo_compile.step.problem import CallKind, Problem
from memo_compile.step.serialise import from_json, to_json
from tests.steps import mutations
from tests.steps.running import SETUPS, Ready, same

NUM = {"slices": 35, "tiles": 45}


@cache
def ready(name: str) -> Ready:
    return SETUPS[name].ready()


def named(problem: Problem, ending: str) -> int:
    return next(at for at, call in enumerate(problem.calls) if call.name.endswith(ending))


def refused(name: str, problem: Problem, match: str) -> None:
    """What production calls says what is wrong, and in which call."""
    step = ready(name)
    recomputations = step.planner.recomputations(problem)
    with pytest.raises(InvalidPlan, match=match):
        require_proved(step.lowered.whole, step.unmoved(problem), problem, recomputations)


def changed(problem: Problem, at: int, **changes: object) -> Problem:
    call = dataclasses.replace(problem.calls[at], **changes)
    return dataclasses.replace(problem, calls=(*problem.calls[:at], call, *problem.calls[at + 1 :]))


@pytest.mark.parametrize("name", NUM)
def test_no_mutation_that_changes_a_number_passes(name):
    found = mutations.outcomes(ready(name), NUM[name], seed=1)
    assert [mutation for mutation in found if mutation.verdict == "changed"] == []
    assert sum(mutation.verdict == "refused" for mutation in found) > NUM[name] // 2


def test_what_calls_read_is_what_runs():
    """Without the proof, steps that read otherwise run, and many compute other numbers."""
    step = ready("tiles")
    problem, plan = step.planned.problem, step.planned.plan
    expected = step.numbers(problem, plan)
    assert same(step.numbers(problem, plan), expected)
    draw, num_changed = random.Random(0), 0
    for _ in range(20):
        broken, _ = mutations.read_otherwise(draw, problem, plan)
        try:
            num_changed += not same(step.numbers(broken, plan), expected)
        except (AssertionError, RuntimeError):
            num_changed += 1
    assert num_changed >= 10


def test_a_problem_with_reads_and_halves_survives_json():
    problem = ready("tiles").planned.problem
    assert problem.halves
    assert all(call.reads for call in problem.calls if call.inputs)
    assert from_json(to_json(problem), Problem) == problem


def test_a_tile_that_reads_the_rows_of_another():
    problem = ready("tiles").planned.problem
    first, second = named(problem, ".tile1"), named(problem, ".tile2")
    broken = changed(problem, first, reads=problem.calls[second].reads)
    refused("tiles", broken, rf"{problem.calls[first].name} reads .*, expected ")


def test_a_tile_that_writes_the_rows_of_another():
    problem = ready("tiles").planned.problem
    at = next(i for i, call in enumerate(problem.calls) if "tile1" in call.name and call.into)
    into = [dataclasses.replace(target, offset_bytes=0) for target in problem.calls[at].into]
    if into == list(problem.calls[at].into):
        into = into[1:]
    refused("tiles", changed(problem, at, into=tuple(into)), r"tile1.* writes .*, expected ")


def test_a_term_of_another_tile():
    problem = ready("tiles").planned.problem
    first, second = named(problem, ".tile1.sum0"), named(problem, ".tile2.sum0")
    inputs = problem.calls[second].inputs
    assert inputs != problem.calls[first].inputs
    refused("tiles", changed(problem, first, inputs=inputs), r"tile1.sum0 reads .*, expected ")


def test_a_term_that_is_left_out_or_added_twice():
    problem = ready("tiles").planned.problem
    at = named(problem, ".tile1.sum0")
    without = dataclasses.replace(problem, calls=(*problem.calls[:at], *problem.calls[at + 1 :]))
    refused("tiles", without, "must run")
    twice = (*problem.calls[: at + 1], *problem.calls[at:])
    refused(
        "tiles", dataclasses.replace(problem, calls=twice), r"tile1.sum0 is a run of .*must run"
    )


def test_two_outputs_that_changed_places():
    problem = ready("tiles").planned.problem
    at = next(
        i
        for i, call in enumerate(problem.calls)
        if call.name.endswith(".before") and len(set(call.outputs)) > 1
    )
    outputs = tuple(reversed(problem.calls[at].outputs))
    refused("tiles", changed(problem, at, outputs=outputs), "expected ")


def test_tiles_that_leave_rows_out():
    lowered = ready("tiles").lowered
    region, tiling = next(iter(lowered.whole.tilings.items()))
    (run,) = tiling.runs
    fewer = dataclasses.replace(
        tiling, runs=(dataclasses.replace(run, num_tiles=run.num_tiles - 1),)
    )
    whole = dataclasses.replace(lowered.whole, tilings={**lowered.whole.tilings, region: fewer})
    with pytest.raises(InvalidPlan, match=rf"{region}: 3 tiles of \d+ rows"):
        require_proved(whole, lowered.problem, lowered.problem, {})


def test_a_wrong_stride_of_a_recomputation():
    problem = ready("slices").planned.problem
    at = next(i for i, call in enumerate(problem.calls) if call.kind is CallKind.RECOMPUTE)
    reads = list(problem.calls[at].reads)
    position = next(i for i, read in enumerate(reads) if read is not None and len(read.size) > 1)
    read = reads[position]
    assert read is not None
    reads[position] = dataclasses.replace(read, stride=tuple(2 * step for step in read.stride))
    broken = changed(problem, at, reads=tuple(reads))
    refused("slices", broken, rf"{problem.calls[at].name} reads .* takes ")


@pytest.mark.parametrize("kind", [CallKind.OFFLOAD, CallKind.RELOAD])
def test_a_copy_that_leaves_the_last_number_out(kind):
    """A buffer's size is rounded up, but not here."""
    problem = ready("slices").planned.problem
    at = next(i for i, call in enumerate(problem.calls) if call.kind is kind)
    copy = problem.calls[at].copy
    assert copy is not None
    shorter = dataclasses.replace(copy, end_bytes=copy.end_bytes - 4)
    refused(
        "slices", changed(problem, at, copy=shorter), f"{problem.calls[at].name} copies to byte"
    )


def test_a_gap_between_rows_made_again_and_rows_reloaded():
    problem = ready("slices").planned.problem
    again = next(call for call in problem.calls if call.into)
    at = next(
        i
        for i, call in enumerate(problem.calls)
        if call.kind is CallKind.RELOAD and call.outputs[0] == again.into[0].value
    )
    copy = problem.calls[at].copy
    assert copy is not None
    later = dataclasses.replace(
        copy, start_bytes=copy.start_bytes + 4, host_offset=copy.host_offset + 4
    )
    refused("slices", changed(problem, at, copy=later), f"{again.name} leaves bytes .* unwritten")


def test_a_buffer_that_is_not_there():
    problem = ready("slices").planned.problem
    at = next(i for i, call in enumerate(problem.calls) if call.into)
    into = tuple(dataclasses.replace(target, buffer=99) for target in problem.calls[at].into)
    refused("slices", changed(problem, at, into=into), "writes a buffer that")


def test_results_that_changed_places():
    problem = ready("slices").planned.problem
    forward, backward = problem.halves
    results = tuple(reversed(backward.results))
    halves = (forward, dataclasses.replace(backward, results=results))
    refused("slices", dataclasses.replace(problem, halves=halves), "other halves")
