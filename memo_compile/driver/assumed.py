"""Assumes how blocks that are compiled one by one will run together, before any of them has."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from memo_compile.config import MemoConfig
from memo_compile.driver.around import (
    compiled_alike,
    fixed_beside,
    parameters_around,
    sharded_around,
)
from memo_compile.driver.knowledge import StepKnowledge
from memo_compile.driver.plan_step import plan_step
from memo_compile.driver.stages import LoweredStep, PlanRequest
from memo_compile.errors import Infeasible, without_frames
from memo_compile.step.joint_step import JointStep, num_user_results
from memo_compile.step.problem import FixedBytes, Half
from memo_compile.units import format_enough

IN_ALL = (
    "This is the floor of {} blocks that are compiled alike, as one group: of one alone it is {}. "
    "What runs between them counts from their first step on"
)


class BlockInfeasible(Infeasible):
    """Raised for a block that does not fit by itself, where other blocks are compiled alike.

    ``of_all`` returns the refusal of all of them together. That takes seconds, so it is called only
    where the block fits in no tiles.
    """

    def __init__(self, error: Infeasible, of_all: Callable[[], Infeasible]) -> None:
        super().__init__(str(error), floor_bytes=error.floor_bytes)
        self.of_all = of_all


def fixed_of(
    lowered: LoweredStep,
    config: MemoConfig,
    parameters: Sequence[torch.nn.Parameter],
    num_members: int,
    gathered: int | None = None,
) -> FixedBytes:
    """Returns what all members of a group hold beside the frame, without the group's inputs."""
    single = lowered.cut.facts.fixed_bytes(0)
    fixed = fixed_beside(parameters, config, gathered)
    libraries = lowered.problem.fixed.libraries
    return replace(fixed, buffers=num_members * single.buffers, libraries=libraries)


def assumed_of(
    lowered: LoweredStep,
    config: MemoConfig,
    parameters: Sequence[Sequence[torch.nn.Parameter]],
    args: Sequence[Any],
) -> JointStep:
    """Returns the joint step of blocks with ``parameters``; the first is called with ``args``."""
    all_parameters = [parameter for member in parameters for parameter in member]
    fixed = fixed_of(lowered, config, all_parameters, len(parameters))
    fixed = replace(fixed, inputs=lowered.cut.facts.fixed_bytes(0).inputs)
    forward, backward = lowered.problem.halves
    num_tangents = len(lowered.problem.tangents)
    return assumed_joint(forward, backward, args, fixed, len(parameters), num_tangents)


def of_block(
    error: Infeasible, lowered: LoweredStep, config: MemoConfig, known: StepKnowledge
) -> Infeasible:
    """Returns ``error``, or a BlockInfeasible if it refuses one of several blocks compiled alike.

    Not for a block that FSDP2 shards: only a step shows how much it gathers at once.
    """
    args = lowered.cut.facts.inputs()
    given = _parameters(args)
    alike = compiled_alike(given)
    if error.floor_bytes is None or len(alike) < 2 or sharded_around(given) is not None:
        return error
    joint = assumed_of(lowered, config, alike, args)
    alone = without_frames(error)
    return BlockInfeasible(alone, lambda: _of_all(alone, joint, lowered, config, known))


def is_part_of_sharded(lowered: LoweredStep) -> bool:
    """True for a part of a model that ``fully_shard()`` shards."""
    given = _parameters(lowered.cut.facts.inputs())
    return bool(given) and sharded_around(given) is not None and bool(parameters_around(given))


def _parameters(args: Sequence[Any]) -> list[torch.nn.Parameter]:
    return [value for value in args if isinstance(value, torch.nn.Parameter)]


def _of_all(
    error: Infeasible,
    joint: JointStep,
    lowered: LoweredStep,
    config: MemoConfig,
    known: StepKnowledge,
) -> Infeasible:
    """The refusal of the joint step of all; ``error``, of one block, where its floor is higher."""
    try:
        plan_step(lowered, config.at_any_speed(), PlanRequest(joint=joint), known)
    except Infeasible as of_all:
        if (of_all.floor_bytes or 0) > (error.floor_bytes or 0):
            alone = format_enough(error.floor_bytes or 0)
            text = f"{of_all}. {IN_ALL.format(joint.num_members, alone)}"
            return Infeasible(text, floor_bytes=of_all.floor_bytes)
    return error


def assumed_joint(
    forward: Half,
    backward: Half,
    args: Sequence[Any],
    fixed: FixedBytes,
    num_members: int,
    num_tangents: int,
) -> JointStep:
    """Returns the joint step of a chain of blocks: each reads what the block before has made.

    A result is freed when the next block has run, and so is the gradient of an input. The first
    step is watched; where it runs otherwise it is planned again.
    """
    last = 2 * num_members - 1
    gone = [
        (half, position, half + 1)
        for half in range(num_members)
        for position in range(num_user_results(forward, backward))
    ]
    gone += [
        (half, position, half + 1)
        for half in range(num_members, last)
        for position in _gradients_of_inputs(args, backward)
    ]
    passed = [(half, at) for half in range(num_members + 1, last + 1) for at in range(num_tangents)]
    return JointStep(graphs=(0,) * num_members, fixed=fixed, gone=tuple(gone), passed=tuple(passed))


def _gradients_of_inputs(args: Sequence[Any], backward: Half) -> Iterator[int]:
    """Yields the positions of the backward's results that are gradients of no parameter."""
    for position, (value, result) in enumerate(zip(args, backward.results, strict=False)):
        if result is not None and not isinstance(value, torch.nn.Parameter):
            yield position
