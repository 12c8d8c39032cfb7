"""After which call of the backward a gradient can be handed to autograd.

A gradient may leave the step after the last call that adds to it or reads it. A hook that runs then
may change the parameter, so no later call may read the parameter either. Where autograd adds the
gradient to an existing one, or a hook uses it up, its memory is free before the next call.
"""

from collections.abc import Mapping

from memo_compile.step.problem import Phase, Problem, Storage


def last_uses(problem: Problem, roots: Mapping[str, str] | None = None) -> dict[str, int]:
    """Returns the last call that makes, reads or writes in a storage, by its ``storage_roots``.

    A copy reads its input until the step has waited for it. ``roots``: the problem's
    ``storage_roots``, if the caller has them already.
    """
    roots = storage_roots(problem) if roots is None else roots
    last_use: dict[str, int] = {}
    copied: dict[str, tuple[str, ...]] = {}
    for index, call in enumerate(problem.calls):
        if call.copy is not None:
            copied[call.name] = call.inputs
        for value in (*call.touched, *call.outputs, *copied.get(call.waits_for or "", ())):
            last_use[roots.get(value, value)] = index
    return last_use


def storage_roots(problem: Problem) -> dict[str, str]:
    """Returns for each value that lies in another's storage the first value there, its root."""
    roots: dict[str, str] = {}
    sharing = {name for name, region in problem.regions.items() if region.shares_storage}
    for call in problem.calls:
        for output, value in problem.made_by(call) if call.into or call.region in sharing else ():
            holder = call.value_around(output.index) if output.storage is Storage.ARENA else None
            if output.storage is Storage.INPUT and output.index is not None:
                holder = call.inputs[output.index]
            elif output.same_as is not None:
                holder = call.outputs[output.same_as]
            if holder is not None and holder != value:
                roots[value] = roots.get(holder, holder)
    return roots


def ready_after(problem: Problem, roots: Mapping[str, str] | None = None) -> tuple[int, ...] | None:
    """Returns for each result of the backward the index of the call after which it may leave.

    -1: before all calls. None where the backward's results are not one for each argument of the
    forward, and in a group, whose gradients leave at the end of each half. ``roots`` as of
    ``last_uses``.
    """
    if len(problem.halves) != 2:
        return None
    forward, backward = problem.halves
    if len(forward.arguments) != len(backward.results):
        return None
    roots = storage_roots(problem) if roots is None else roots
    last = last_uses(problem, roots)
    ready: dict[str, int] = {}
    for gradient, parameter in zip(backward.results, forward.arguments, strict=True):
        if gradient is not None:
            root = roots.get(gradient, gradient)
            uses = (last.get(root, -1), last.get(parameter, -1), ready.get(root, -1))
            ready[root] = max(uses)
    return tuple(
        -1 if gradient is None else ready[roots.get(gradient, gradient)]
        for gradient in backward.results
    )


def leaving_after(problem: Problem) -> dict[str, int]:
    """Returns for each gradient of ``problem.leaving`` the call after which its memory is free.

    A gradient is named by the root of its storage; all results in one storage must leave.
    """
    roots = storage_roots(problem) if problem.leaving else {}
    ready = ready_after(problem, roots) if problem.leaving else None
    if ready is None:
        return {}
    backward = next(half for half in problem.halves if half.phase is Phase.BACKWARD)
    free_after: dict[str, int] = {}
    staying = set()
    for value, after in zip(backward.results, ready, strict=True):
        if value is not None:
            root = roots.get(value, value)
            free_after[root] = after
            if value not in problem.leaving:
                staying.add(root)
    return {root: after for root, after in free_after.items() if root not in staying}
