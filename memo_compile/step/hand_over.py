"""When a step has no more use for a gradient, and for what it is the gradient of.

A gradient may leave the step after the last call that adds to it or reads it. A hook that runs then
may change the parameter, so that no later call may read that one either. Autograd adds a gradient
that leaves to the one that exists, or a hook uses it up: then it is gone before the next call.
"""

from memo_compile.step.problem import Half, Phase, Problem, Storage


def last_uses(problem: Problem) -> dict[str, int]:
    """Value at the root of a storage -> the last call that makes, reads or writes what lies there.

    The roots are of ``storage_roots``. Calls are counted over both halves.
    """
    roots = storage_roots(problem)
    found: dict[str, int] = {}
    for index, call in enumerate(problem.calls):
        for value in (*call.inputs, *call.outputs, *(into.value for into in call.into)):
            found[roots.get(value, value)] = index
    return found


def storage_roots(problem: Problem) -> dict[str, str]:
    """Value that lies in another's storage -> the first value there."""
    roots: dict[str, str] = {}
    sharing = {name for name, region in problem.regions.items() if region.shares_storage}
    for call in problem.calls:
        for output, value in problem.made_by(call) if call.into or call.region in sharing else ():
            around = call.value_around(output.index) if output.storage is Storage.ARENA else None
            if output.storage is Storage.INPUT and output.index is not None:
                around = call.inputs[output.index]
            elif output.same_as is not None:
                around = call.outputs[output.same_as]
            if around is not None and around != value:
                roots[value] = roots.get(around, around)
    return roots


def ready_after(problem: Problem) -> tuple[int, ...] | None:
    """Per result of the backward the index of the call after which it may leave; -1: before all.

    None where results and the forward's arguments do not belong together one by one, and in a
    group, whose gradients leave at the end of each half.
    """
    if len(problem.halves) != 2:
        return None
    forward, backward = problem.halves
    if not _are_gradients(forward, backward):
        return None
    roots, last = storage_roots(problem), last_uses(problem)
    made: dict[str, int] = {}
    for value, parameter in zip(backward.results, forward.arguments, strict=True):
        if value is not None:
            root = roots.get(value, value)
            uses = (last.get(root, -1), last.get(parameter, -1), made.get(root, -1))
            made[root] = max(uses)
    return tuple(
        -1 if value is None else made[roots.get(value, value)] for value in backward.results
    )


def leaving_after(problem: Problem) -> dict[str, int]:
    """Value that the backward makes in ordinary memory -> the call after which it is gone.

    Only of ``problem.leaving``; where another result lies in the same storage, both must leave.
    """
    ready = ready_after(problem) if problem.leaving else None
    if ready is None:
        return {}
    roots = storage_roots(problem)
    backward = next(half for half in problem.halves if half.phase is Phase.BACKWARD)
    gone: dict[str, int] = {}
    stays = set()
    for value, after in zip(backward.results, ready, strict=True):
        if value is None:
            continue
        root = roots.get(value, value)
        gone[root] = after
        if value not in problem.leaving:
            stays.add(root)
    return {root: after for root, after in gone.items() if root not in stays}


def _are_gradients(forward: Half, backward: Half) -> bool:
    return len(forward.arguments) == len(backward.results)
