"""Random mutations of planned steps: what the checker lets pass must change no number.

``python -m tests.steps.mutations --mutations 2000`` prints how many were refused, how many passed
and were harmless, and how many passed and changed a number (``make mutate``).
"""

import argparse
import collections
import dataclasses
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from memo_compile.errors import InputError
from memo_compile.step.plans import Plan
from memo_compile.step.problem import CallKind, Copy, Into, Layout, Phase, Problem, StepCall
from tests.steps.byte_machine import roomy
from tests.steps.running import SETUPS, Ready, same
from tests.steps.running_group import GroupReady, half_order

SCHEDULES = ("normal", "early", "late")
GRANULE = 512
ROOMY_SHARE = 0.5
"""Of the mutations: no two buffers share bytes, so that lives and places say nothing."""
TWICE_SHARE = 0.15
"""Of the mutations: two at once, which might make up for each other."""

PIPELINES = {
    "pipeline that offloads": ("offload", "F0 F1 B0 F2 B1 B2"),
    "pipeline that recomputes": ("recompute", "F0 F1 B1 F2 B0 B2"),
    "pipeline of slices": ("slices", "F0 F1 F2 B0 B1 B2"),
}
"""Name -> the set-up of one microbatch, and the order of their halves."""

Mutation = Callable[[random.Random, Problem, Plan], tuple[Problem, Plan]]
"""Another problem or plan; the same one where there is nothing to change."""


def _with_call(problem: Problem, at: int, **changes: Any) -> Problem:
    calls = list(problem.calls)
    calls[at] = dataclasses.replace(calls[at], **changes)
    return dataclasses.replace(problem, calls=tuple(calls))


def _pick(
    draw: random.Random, problem: Problem, wanted: Callable[[StepCall], object]
) -> int | None:
    found = [at for at, call in enumerate(problem.calls) if wanted(call)]
    return draw.choice(found) if found else None


def _swapped(draw: random.Random, items: Sequence[Any]) -> tuple[Any, ...]:
    """``items`` with two of them in each other's place."""
    found = list(items)
    first, second = draw.sample(range(len(found)), 2)
    found[first], found[second] = found[second], found[first]
    return tuple(found)


def drop_call(draw: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    at = draw.randrange(len(problem.calls))
    calls = problem.calls[:at] + problem.calls[at + 1 :]
    return dataclasses.replace(problem, calls=calls), plan


def repeat_call(draw: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """A tile, or a sum, that runs twice."""
    at = draw.randrange(len(problem.calls))
    calls = (*problem.calls[: at + 1], problem.calls[at], *problem.calls[at + 1 :])
    return dataclasses.replace(problem, calls=calls), plan


def move_call(draw: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    at = draw.randrange(len(problem.calls))
    rest = problem.calls[:at] + problem.calls[at + 1 :]
    to = min(max(0, at + draw.choice([-6, -3, -2, -1, 1, 2, 3, 6])), len(rest))
    calls = (*rest[:to], problem.calls[at], *rest[to:])
    return dataclasses.replace(problem, calls=calls), plan


def wait_for_another(draw: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    at = _pick(draw, problem, lambda call: call.waits_for)
    other = _pick(draw, problem, lambda call: call.copy)
    if at is None or other is None:
        return problem, plan
    return _with_call(problem, at, waits_for=problem.calls[other].name), plan


def copy_other_bytes(draw: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    at = _pick(draw, problem, lambda call: call.copy)
    copy = None if at is None else problem.calls[at].copy
    if at is None or copy is None:
        return problem, plan
    field = draw.choice(["start_bytes", "end_bytes", "host_offset"])
    shift = draw.choice([-4096, -GRANULE, -4, 4, GRANULE, 4096])
    try:
        changed = dataclasses.replace(copy, **{field: getattr(copy, field) + shift})
    except InputError:
        return problem, plan
    return _with_call(problem, at, copy=changed), plan


def exchange_copies(draw: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    first = _pick(draw, problem, lambda call: call.copy)
    second = _pick(draw, problem, lambda call: call.copy)
    if first is None or second is None:
        return problem, plan
    copies: list[Copy | None] = [problem.calls[at].copy for at in (second, first)]
    problem = _with_call(problem, first, copy=copies[0])
    return _with_call(problem, second, copy=copies[1]), plan


def read_another(draw: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """Another value in an input's place, mostly one that lies alike."""
    at = _pick(draw, problem, lambda call: call.inputs)
    if at is None:
        return problem, plan
    call = problem.calls[at]
    position = draw.randrange(len(call.inputs))
    alike = {
        value
        for other in problem.calls
        for value, read in zip(other.inputs, other.reads, strict=False)
        if call.reads and read == call.reads[position]
    }
    every = {value for other in problem.calls for value in (*other.inputs, *other.outputs)}
    values = sorted((alike if draw.random() < 0.7 else every) - {call.inputs[position]})
    if not values:
        return problem, plan
    inputs = (*call.inputs[:position], draw.choice(values), *call.inputs[position + 1 :])
    return _with_call(problem, at, inputs=inputs), plan


def swap_inputs(draw: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    at = _pick(draw, problem, lambda call: len(call.inputs) > 1)
    if at is None:
        return problem, plan
    return _with_call(problem, at, inputs=_swapped(draw, problem.calls[at].inputs)), plan


def swap_outputs(draw: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    at = _pick(draw, problem, lambda call: len(call.outputs) > 1)
    if at is None:
        return problem, plan
    return _with_call(problem, at, outputs=_swapped(draw, problem.calls[at].outputs)), plan


def _of_one_region(draw: random.Random, problem: Problem) -> tuple[int, int] | None:
    """Two calls of one region."""
    first = _pick(draw, problem, lambda call: call.inputs or call.outputs)
    if first is None:
        return None
    region = problem.calls[first].region
    others = [i for i, call in enumerate(problem.calls) if call.region == region and i != first]
    return (first, draw.choice(others)) if others else None


def exchange_fields(draw: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """Two layers, tiles or sums read, make or write what the other should."""
    pair = _of_one_region(draw, problem)
    if pair is None:
        return problem, plan
    first, second = pair
    fields = draw.choice([("inputs",), ("reads",), ("into",), ("outputs",), ("inputs", "reads")])
    calls = problem.calls
    problem = _with_call(problem, first, **{name: getattr(calls[second], name) for name in fields})
    return _with_call(
        problem, second, **{name: getattr(calls[first], name) for name in fields}
    ), plan


def _other_layout(draw: random.Random, layout: Layout) -> Layout:
    """``layout`` with something else in it."""
    kind = draw.choice(["offset", "slice", "size", "stride", "transposed", "dtype"])
    if kind == "offset":
        shift = draw.choice([-1, 1, 4, 16, -layout.num_elements, layout.num_elements])
        return dataclasses.replace(layout, offset=max(0, layout.offset + shift))
    if kind == "dtype":
        dtype = "int32" if layout.dtype == "float32" else "float32"
        return dataclasses.replace(layout, dtype=dtype)
    if not layout.size:
        return layout
    dim = draw.randrange(len(layout.size))
    if kind == "slice":
        shift = draw.choice([-1, 1]) * layout.size[dim] * layout.stride[dim]
        return dataclasses.replace(layout, offset=max(0, layout.offset + shift))
    size, stride = list(layout.size), list(layout.stride)
    if kind == "size":
        size[dim] = max(1, size[dim] + draw.choice([-1, 1]))
    elif kind == "stride":
        stride[dim] = max(0, draw.choice([0, 1, stride[dim] - 1, stride[dim] // 2]))
    else:
        other = draw.randrange(len(size))
        stride[dim], stride[other] = stride[other], stride[dim]
    return dataclasses.replace(layout, size=tuple(size), stride=tuple(stride))


def read_otherwise(draw: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """Other bytes, another shape, other strides of the same value."""
    at = _pick(draw, problem, lambda call: any(call.reads))
    if at is None:
        return problem, plan
    reads = list(problem.calls[at].reads)
    position = draw.choice([i for i, read in enumerate(reads) if read is not None])
    read = reads[position]
    assert read is not None
    reads[position] = _other_layout(draw, read)
    return _with_call(problem, at, reads=tuple(reads)), plan


def forget_reads(draw: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    at = _pick(draw, problem, lambda call: any(call.reads))
    if at is None:
        return problem, plan
    reads = problem.calls[at].reads
    shorter = draw.choice([(), reads[:-1], (None, *reads[1:]), (*reads[:-1], None)])
    return _with_call(problem, at, reads=shorter), plan


def write_elsewhere(draw: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """A tile's rows, a sum, or the first rows of a mix, in other bytes."""
    at = _pick(draw, problem, lambda call: call.into)
    if at is None:
        return problem, plan
    into = list(problem.calls[at].into)
    position = draw.randrange(len(into))
    target = into[position]
    others = sorted({x.value for call in problem.calls for x in call.into} - {target.value})
    changed: list[Into | None] = [None]
    for shift in (-4096, -GRANULE, -16, 16, GRANULE, 4096):
        changed.append(
            dataclasses.replace(target, offset_bytes=max(0, target.offset_bytes + shift))
        )
    changed += [dataclasses.replace(target, value=value) for value in others]
    chosen = draw.choice(changed)
    into[position : position + 1] = [] if chosen is None else [chosen]
    return _with_call(problem, at, into=tuple(into)), plan


def change_kind(draw: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """Another mode: what ran is made again, what was copied out comes in, or in the other half."""
    at = draw.randrange(len(problem.calls))
    if draw.random() < 0.7:
        return _with_call(problem, at, kind=draw.choice(list(CallKind))), plan
    return _with_call(problem, at, phase=draw.choice(list(Phase))), plan


def run_another_region(draw: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """One with as many inputs and outputs."""
    at = draw.randrange(len(problem.calls))
    mine = problem.regions[problem.calls[at].region]
    alike = [
        name
        for name, region in sorted(problem.regions.items())
        if len(region.input_ends) == len(mine.input_ends)
        and len(region.outputs) == len(mine.outputs)
    ]
    return _with_call(problem, at, region=draw.choice(alike)), plan


def change_halves(draw: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """Results or arguments that changed places."""
    halves = list(problem.halves)
    at = draw.randrange(len(halves))
    field = draw.choice(["results", "arguments"])
    items = getattr(halves[at], field)
    if len(items) < 2:
        return problem, plan
    halves[at] = dataclasses.replace(halves[at], **{field: _swapped(draw, items)})
    return dataclasses.replace(problem, halves=tuple(halves)), plan


def place_elsewhere(draw: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    buffer = draw.choice(sorted(plan.offsets))
    offset = draw.choice(
        [
            plan.offsets[draw.choice(sorted(plan.offsets))],
            plan.offsets[buffer] + draw.choice([-8, -1, 1, 8]) * GRANULE,
            plan.offsets[buffer] + draw.choice([-16, 4, 64]),
            GRANULE * draw.randrange(plan.arena_bytes // GRANULE + 1),
        ]
    )
    return problem, dataclasses.replace(plan, offsets={**plan.offsets, buffer: offset})


def exchange_places(draw: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    first, second = draw.sample(sorted(plan.offsets), 2)
    offsets = {**plan.offsets, first: plan.offsets[second], second: plan.offsets[first]}
    return problem, dataclasses.replace(plan, offsets=offsets)


def keep_less(draw: random.Random, problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """Less of the arena, or of the host's frame, than is used."""
    if problem.host_bytes and draw.random() < 0.3:
        less = problem.host_bytes - draw.choice([4, GRANULE, 4096])
        return dataclasses.replace(problem, host_bytes=max(0, less)), plan
    at = draw.randrange(len(plan.resident_bytes))
    lower = max(0, plan.resident_bytes[at] - draw.choice([GRANULE, 4096, 16384]))
    resident = tuple(
        min(size, lower) if index >= at else size for index, size in enumerate(plan.resident_bytes)
    )
    return problem, dataclasses.replace(plan, resident_bytes=resident)


MUTATIONS: tuple[Mutation, ...] = (
    drop_call,
    repeat_call,
    move_call,
    wait_for_another,
    copy_other_bytes,
    exchange_copies,
    read_another,
    swap_inputs,
    swap_outputs,
    exchange_fields,
    read_otherwise,
    forget_reads,
    write_elsewhere,
    change_kind,
    run_another_region,
    change_halves,
    place_elsewhere,
    exchange_places,
    keep_less,
)

OF_THE_PLAN = (place_elsewhere, exchange_places, keep_less)
"""These need a plan that is tight."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one mutation: ``refused``, ``harmless`` or ``changed``."""

    names: tuple[str, ...]
    verdict: str
    why: str = ""


def mutate(draw: random.Random, ready: Ready, expected: list[Any]) -> Outcome:
    """One mutation of the planned step, judged, and run where the checker lets it pass."""
    start = (ready.planned.problem, ready.planned.plan)
    while True:
        problem, plan = start
        chosen = draw.sample(MUTATIONS, 2 if draw.random() < TWICE_SHARE else 1)
        for mutation in chosen:
            problem, plan = mutation(draw, problem, plan)
        if (problem, plan) != start:
            break
    if not set(chosen) & set(OF_THE_PLAN) and draw.random() < ROOMY_SHARE:
        plan = dataclasses.replace(roomy(problem), peak_bytes=2**60)
    names = tuple(mutation.__name__ for mutation in chosen)
    complaints = ready.complaints(problem, plan)
    if complaints:
        return Outcome(names=names, verdict="refused", why=complaints[0])
    for schedule in SCHEDULES:
        try:
            found = ready.numbers(problem, plan, schedule)
        except Exception as error:  # whatever it is: the checker should have said so
            return Outcome(names=names, verdict="changed", why=f"{type(error).__name__}: {error}")
        if not same(found, expected):
            return Outcome(names=names, verdict="changed", why=f"numbers differ, copies {schedule}")
    return Outcome(names=names, verdict="harmless")


def outcomes(ready: Ready, num: int, seed: int) -> list[Outcome]:
    """``num`` random mutations of one step."""
    expected = ready.numbers(ready.planned.problem, ready.planned.plan)
    draw = random.Random(seed)
    return [mutate(draw, ready, expected) for _ in range(num)]


def ready_for(name: str) -> Ready:
    """The step called ``name``."""
    if name in PIPELINES:
        setup, order = PIPELINES[name]
        return GroupReady.of(SETUPS[setup].ready(), half_order(order))
    return SETUPS[name].ready()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=2000, help="over all set-ups")
    parser.add_argument("--seed", type=int, default=0)
    every = (*SETUPS, *PIPELINES)
    parser.add_argument("--setups", default=",".join(every), help="separated by commas")
    options = parser.parse_args()
    names = [name for name in every if name in options.setups.split(",")]
    totals: collections.Counter[str] = collections.Counter()
    print("| set-up | mutations | refused | harmless | changed and passed | s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for number, name in enumerate(names):
        share = options.mutations // len(names) + (number < options.mutations % len(names))
        ready = ready_for(name)
        start = time.perf_counter()
        found = outcomes(ready, share, options.seed + number)
        seconds = time.perf_counter() - start
        counts = collections.Counter(mutation.verdict for mutation in found)
        totals += counts
        print(_row(name, counts, seconds), flush=True)
        for mutation in _changed(found):
            print(f"  {name}: {'+'.join(mutation.names)}: {mutation.why}", file=sys.stderr)
    print(_row("all", totals, None))
    return 1 if totals["changed"] else 0


def _row(name: str, counts: collections.Counter[str], seconds: float | None) -> str:
    cells = [name, counts.total(), counts["refused"], counts["harmless"], counts["changed"]]
    return "| " + " | ".join(map(str, [*cells, "" if seconds is None else f"{seconds:.0f}"])) + " |"


def _changed(found: Iterable[Outcome]) -> list[Outcome]:
    return [mutation for mutation in found if mutation.verdict == "changed"]


if __name__ == "__main__":
    sys.exit(main())
