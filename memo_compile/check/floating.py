"""Which collectives a plan may begin earlier or later than the graphs do, and in which order.

A collective *floats* within its half if the step is given its input (a shard of a weight) and no
call of the half computes with that. A gather may also float together with one call that makes its
input of what the step is given (it converts the shard's dtype), if nobody else reads that.

All ranks must begin collectives in one order. The calls of one layer (or of the prologue, middle,
epilogue) in one half are a *unit*. A floating collective whose result unit u reads first begins
behind all fixed collectives of units before u - 1, and before those of unit u - 1 and later ones.
Two that float, and two that do not, stay in the order of the graphs.
"""

import itertools
from collections.abc import Sequence

from memo_compile.step.problem import CallKind, Problem, StepCall, Storage

_TALKING = (CallKind.ISSUE, CallKind.COMM_WAIT)


class FloatingCalls:
    """The floating collectives of a step without moves, and the order of all of them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._given = frozenset(problem.inputs)
        self._readers: dict[str, list[StepCall]] = {}
        for call in problem.calls:
            for value in set(call.touched):
                self._readers.setdefault(value, []).append(call)
        self._maker = {value: call for call in problem.calls for value in call.outputs}
        self.names: set[str] = set()
        """Floating calls: issues, and the calls that convert their inputs."""
        self.brings: dict[str, tuple[StepCall, ...]] = {}
        """Result of a floating collective -> its calls: conversion, if any, issue and wait."""
        for call in problem.calls:
            if call.kind is CallKind.ISSUE:
                floating_calls = self._floating_with(call)
                self.names.update(floating_call.name for floating_call in floating_calls)
                readers = self._readers.get(call.outputs[0], ())
                wait = next((reader for reader in readers if reader.waits_for == call.name), None)
                if floating_calls and wait is not None:
                    self.brings[wait.outputs[0]] = (*floating_calls, wait)
        self._unit_numbers: dict[tuple[object, ...], int] = {}
        """Unit -> its number, in the order of the first calls that do not float."""
        for call in problem.calls:
            if call.kind in (CallKind.RUN, CallKind.ISSUE) and call.name not in self.names:
                self._unit_numbers.setdefault(_unit(call), len(self._unit_numbers))
        self._place_of = {call.name: at for at, call in enumerate(problem.calls)}

    def _floating_with(self, issue: StepCall) -> tuple[StepCall, ...]:
        """Returns ``issue``, behind the call that converts its input; empty: it does not float."""
        calls = [issue]
        maker = self._maker.get(issue.inputs[0])
        if maker is not None and self._gathers(issue) and self._only_converts(maker):
            calls.insert(0, maker)
        names = {call.name for call in calls}
        computes = any(
            reader.half == issue.half and reader.kind not in _TALKING
            for value in calls[0].inputs
            for reader in self._readers[value]
            if reader.name not in names
        )
        floats = self._given.issuperset(calls[0].inputs) and not computes
        return tuple(calls) if floats else ()

    def _gathers(self, issue: StepCall) -> bool:
        """True if its result is larger than its input."""
        input_bytes, result_bytes = (
            sum(layout.num_elements * layout.item_bytes for layout in layouts if layout is not None)
            for layouts in (issue.reads, self.problem.regions[issue.region].output_layouts)
        )
        return result_bytes > input_bytes

    def _only_converts(self, maker: StepCall) -> bool:
        """True if the call makes one value in the arena, which only collectives read."""
        outputs = self.problem.regions[maker.region].outputs
        readers = [reader for value in maker.outputs for reader in self._readers.get(value, ())]
        makes_one = len(outputs) == 1 and outputs[0].storage is Storage.ARENA and not maker.into
        is_run = maker.kind is CallKind.RUN
        return makes_one and is_run and all(reader.kind in _TALKING for reader in readers)

    def disordered(self, issues: Sequence[StepCall]) -> str | None:
        """Returns the first fault in the order of these issues; None: there is none."""
        for before, after in itertools.pairwise(issues):
            if before.half == after.half and not self._precedes(before, after):
                return f"{after.name} begins behind {before.name}, on other ranks before it"
        return None

    def _precedes(self, before: StepCall, after: StepCall) -> bool:
        """True if all ranks begin ``before`` ahead of ``after``: the order of this module."""
        first_floats, second_floats = before.name in self.names, after.name in self.names
        if first_floats == second_floats:
            return self._place_of[before.name] < self._place_of[after.name]
        if first_floats:
            return self._reading_unit(before) - 1 <= self._unit_numbers[_unit(after)]
        return self._unit_numbers[_unit(before)] < self._reading_unit(after) - 1

    def _reading_unit(self, issue: StepCall) -> int:
        """Returns the number of the unit that first reads the result of ``issue``."""
        wait = next(call for call in self._readers[issue.outputs[0]] if call.waits_for)
        reading = (CallKind.RUN, CallKind.ISSUE)
        readers = self._readers.get(wait.outputs[0], [])
        reader = next((call for call in readers if call.kind in reading), issue)
        return self._unit_numbers.get(_unit(reader), len(self._unit_numbers))


def _unit(call: StepCall) -> tuple[object, ...]:
    """Returns what the calls of one layer in one half have in common."""
    return *call.half, call.layer_class, call.instance
