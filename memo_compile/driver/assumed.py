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
from memo_compile.step.problem import Half
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


def assumed_of(
    lowered: LoweredStep,
    config: MemoConfig,
    parameters: Sequence[Sequence[torch.nn.Parameter]],
    args: Sequence[Any],
) -> JointStep:
    """Returns the joint step of a chain of blocks: each reads what the block before has made.

    A result is freed when the next block has run, and so is the gradient of an input. Each block
    has its entry of ``parameters``; the first is called with ``args``. The first step is watched;
    where it runs otherwise it is planned again.
    """
    of_block, num_members = lowered.cut.facts.fixed_bytes(0), len(parameters)
    fixed = replace(
        fixed_beside([parameter for member in parameters for parameter in member], config),
        buffers=num_members * of_block.buffers,
        libraries=lowered.problem.fixed.libraries,
        inputs=of_block.inputs,
    )
    forward, backward = lowered.problem.halves
    last = 2 * num_members - 1  # index of the last half: F0 F1 .. Fn-1 Bn-1 .. B0
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
    num_tangents = len(lowered.problem.tangents)
    passed = [(half, at) for half in range(num_members + 1, last + 1) for at in range(num_tangents)]
    return JointStep(graphs=(0,) * num_members, fixed=fixed, gone=tuple(gone), passed=tuple(passed))


def explained_for_block(
    error: Infeasible, config: MemoConfig, knowledge: StepKnowledge
) -> Infeasible:
    """Returns ``error``, or a BlockInfeasible if it refuses one of several blocks compiled alike.

    Not for a block that FSDP2 shards: only a step shows how much it gathers at once.
    """
    args = knowledge.lowered.cut.facts.inputs()
    parameters = _parameters(args)
    alike = compiled_alike(parameters)
    if error.floor_bytes is None or len(alike) < 2 or sharded_around(parameters) is not None:
        return error
    joint = assumed_of(knowledge.lowered, config, alike, args)
    alone = without_frames(error)
    return BlockInfeasible(alone, lambda: _refusal_of_all(alone, joint, config, knowledge))


def is_part_of_sharded(lowered: LoweredStep) -> bool:
    """True for a part of a model that ``fully_shard()`` shards."""
    parameters = _parameters(lowered.cut.facts.inputs())
    is_sharded = bool(parameters) and sharded_around(parameters) is not None
    return is_sharded and bool(parameters_around(parameters))


def _parameters(args: Sequence[Any]) -> list[torch.nn.Parameter]:
    return [value for value in args if isinstance(value, torch.nn.Parameter)]


def _refusal_of_all(
    error: Infeasible, joint: JointStep, config: MemoConfig, knowledge: StepKnowledge
) -> Infeasible:
    """Returns the refusal of the ``joint`` step of all blocks, or ``error``, which refuses one.

    Whichever has the higher floor; ``error`` also where the joint step fits.
    """
    try:
        request = PlanRequest(joint=joint)
        plan_step(knowledge.lowered, config.at_any_speed(), request, knowledge)
    except Infeasible as joint_error:
        if (joint_error.floor_bytes or 0) > (error.floor_bytes or 0):
            alone = format_enough(error.floor_bytes or 0)
            text = f"{joint_error}. {IN_ALL.format(joint.num_members, alone)}"
            return Infeasible(text, floor_bytes=joint_error.floor_bytes)
    return error


def _gradients_of_inputs(args: Sequence[Any], backward: Half) -> Iterator[int]:
    """Yields the positions of the backward's results that are gradients of no parameter."""
    for position, (value, result) in enumerate(zip(args, backward.results, strict=False)):
        if result is not None and not isinstance(value, torch.nn.Parameter):
            yield position
