"""A step that gathers its weights again for the backward, instead of keeping them.

Rewrite, where ``w`` is a shard that the step is given and ``v`` the whole weight:

    issue w; wait -> v; F(x, v); ...; B(g, v)
      ->    issue w; wait -> v; F(x, v); ...; issue w; wait -> again.v; B(g, again.v)

What is gathered for the first unit of the backward stays: it would be gathered at once again. All
ranks must do the same: a step is planned both ways where its budget is short (``instead``), and the
faster one stays for good.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from memo_compile.planners.begin_order import Gather, gathers_of, in_begin_order, unit_of
from memo_compile.step.hand_over import storage_roots
from memo_compile.step.problem import CallKind, Phase, Problem, StepCall
from memo_compile.step.simulate import peak_live_bytes

AGAIN = "again."
"""Prefix to the names of what is gathered again, and of the calls that do it."""


def gathered_again(problem: Problem) -> Problem:
    """``problem``, which keeps everything, with every gathered weight gathered again where it can.

    Cost: linear.
    """
    first_read, computed_with = _first_reads(problem), _computed_with(problem)
    gathers = {
        gather.wait.outputs[0]: gather
        for gather in gathers_of(problem).values()
        if gather.wait.outputs[0] in first_read and _is_only_gathered(gather, computed_with)
    }
    if not gathers:
        return problem
    before_call: dict[int, list[Gather]] = {}
    for weight, gather in gathers.items():
        before_call.setdefault(first_read[weight], []).append(gather)
    new_name = {weight: AGAIN + weight for weight in gathers}
    calls: list[StepCall] = []
    for at, call in enumerate(problem.calls):
        for gather in before_call.get(at, ()):
            calls += _second_gather(gather, call)
        is_read = call.phase is Phase.BACKWARD and not gathers.keys().isdisjoint(call.inputs)
        inputs = tuple(new_name.get(value, value) for value in call.inputs)
        calls.append(replace(call, inputs=inputs) if is_read else call)
    tensors = {new_name[name]: info for name, info in problem.tensors.items() if name in new_name}
    return replace(problem, calls=tuple(calls), tensors={**problem.tensors, **tensors})


def instead(problem: Problem, budget_bytes: int | None) -> Problem | None:
    """``problem`` with its weights gathered again; None where it holds the budget, or has none."""
    if budget_bytes is None or not gathers_of(problem):
        return None
    if peak_live_bytes(in_begin_order(problem)) <= budget_bytes:
        return None
    again = gathered_again(problem)
    return None if again is problem else again


def values_again(problem: Problem) -> Mapping[str, str]:
    """What the forward gathers -> what is gathered again in its place."""
    return {
        value.removeprefix(AGAIN): value
        for call in problem.calls
        if call.kind is CallKind.COMM_WAIT
        for value in call.outputs
        if value.startswith(AGAIN)
    }


def _first_reads(problem: Problem) -> dict[str, int]:
    """Value -> the first call of the backward that reads it, where the forward need not keep it.

    Not so what the user gets, what a view shows as well, and what the first unit of the backward
    reads.
    """
    results = {value for half in problem.halves for value in half.results}
    waits = (call for call in problem.calls if call.kind is CallKind.COMM_WAIT)
    gathered = {value for call in waits for value in call.outputs}
    roots = storage_roots(problem)
    viewed = {root for value, root in roots.items() if value not in gathered}
    first_unit: object = None
    first_read: dict[str, int] = {}
    for at, call in enumerate(problem.calls):
        if call.phase is Phase.BACKWARD:
            first_unit = first_unit or unit_of(call)
            for value in call.inputs if call.kind is CallKind.RUN else ():
                is_kept = roots.get(value, value) in viewed or value in results
                if is_kept or unit_of(call) == first_unit:
                    first_read[value] = -1
                else:
                    first_read.setdefault(value, at)
    return {value: at for value, at in first_read.items() if at >= 0}


def _computed_with(problem: Problem) -> dict[str, set[str]]:
    """What the step is given -> the calls that compute with it, or write into it."""
    readers: dict[str, set[str]] = {value: set() for value in problem.inputs}
    for call in problem.calls:
        if call.kind in (CallKind.RUN, CallKind.RECOMPUTE):
            for value in call.touched:
                if value in readers:
                    readers[value].add(call.name)
    return readers


def _is_only_gathered(gather: Gather, computed_with: Mapping[str, set[str]]) -> bool:
    """True where nothing computes with what ``gather`` reads, but what converts it."""
    converting = {call.name for call in gather.calls}
    return all(computed_with[value] <= converting for value in gather.calls[0].inputs)


def _second_gather(gather: Gather, reader: StepCall) -> Iterator[StepCall]:
    """The calls of ``gather`` once more, under new names, in the unit of ``reader``."""
    made = {value for call in (*gather.calls, gather.wait) for value in call.outputs}
    for call in (*gather.calls, gather.wait):
        yield replace(
            call,
            name=AGAIN + call.name,
            phase=Phase.BACKWARD,
            inputs=tuple(AGAIN + value if value in made else value for value in call.inputs),
            outputs=tuple(AGAIN + value for value in call.outputs),
            layer_class=reader.layer_class,
            instance=reader.instance,
            waits_for=None if call.waits_for is None else AGAIN + call.waits_for,
        )
