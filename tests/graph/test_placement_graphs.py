"""Steps of real models, as the backend plans them, are placed within 0.1 % of their bound."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import memo_compile
from benchmarks.moved import moved_step
from memo_compile.planners.place_step import placement_problem
from memo_compile.planners.placement import check_placement, place
from memo_compile.step.problem import Phase, Problem, call_starts
from memo_compile.step.serialise import from_json
from tests import models
from tests.numerics.training import in_ci

BUILDERS: dict[str, Callable[[], models.ModelCase]] = {
    "gpt2": lambda: models.gpt2(num_layers=2),
    "llama": lambda: models.llama(num_layers=2),
    "mixtral": lambda: models.mixtral(num_layers=2),
}


class Planned(Exception):
    """The plan stands; the step need not run."""


@pytest.fixture(scope="module", params=in_ci(BUILDERS, "mixtral"))
def step(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Problem:
    """The Problem that the backend plans for a model of two layers."""
    folder: Path = tmp_path_factory.mktemp(request.param)

    def plan_and_stop(gm: Any, examples: Any) -> Any:
        options = {"lowering": "aten", "strict": True, "dump": str(folder)}
        memo_compile.backend(gm, examples, options=options)
        raise Planned

    torch.manual_seed(0)
    torch._dynamo.reset()
    model, inputs, loss = BUILDERS[request.param]()
    with pytest.raises(BackendCompilerFailed, match="Planned"):
        loss(torch.compile(model, backend=plan_and_stop), **inputs)
    (path,) = folder.glob("*/problem.json")
    return from_json(path.read_text(), Problem)


def test_saved_step_reaches_its_bound(step: Problem) -> None:
    problem = placement_problem(step)
    found = place(problem, time_limit_s=2.0)
    check_placement(problem, found)
    assert found.lower_bound_bytes <= found.height_bytes <= 1.001 * found.lower_bound_bytes


@pytest.mark.parametrize("by_layer", [False, True])
def test_moved_step_reaches_its_bound(step: Problem, by_layer: bool) -> None:
    problem = placement_problem(moved_step(step, 1, by_layer=by_layer))
    found = place(problem, time_limit_s=2.0)
    check_placement(problem, found)
    assert found.height_bytes <= 1.01 * found.lower_bound_bytes


def test_moved_tensors_have_two_lives(step: Problem) -> None:
    moved = moved_step(step, 1)
    names = [call.name for call in moved.calls]
    reload = next(call for call in moved.calls if call.name.startswith("h2d."))
    value = reload.outputs[0].removeprefix("reloaded.")
    copied = next(call for call in moved.calls if value in call.inputs and "d2h" in call.name)
    readers = [call for call in moved.calls if reload.outputs[0] in call.inputs]
    assert readers
    assert all(call.phase is Phase.BACKWARD for call in readers)
    assert names.index(copied.name) < names.index(reload.name) < names.index(readers[0].name)
    late = moved.calls[names.index(reload.name) :]
    assert not any(value in call.inputs for call in late)


def test_moving_lowers_what_the_saved_activations_take(step: Problem) -> None:
    turn = {False: 0, True: 0}
    for is_moved, variant in ((False, step), (True, moved_step(step, 1))):
        problem = placement_problem(variant)
        first_backward = call_starts(variant)[variant.first_backward]
        alive = [b for b in problem.buffers if b.lower < first_backward < b.upper]
        turn[is_moved] = sum(b.size for b in alive)
    assert 0 < turn[True] < turn[False]
