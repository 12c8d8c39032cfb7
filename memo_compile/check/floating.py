"""Which calls of a step may run elsewhere than its graphs say, and in which order all ranks begin.

A collective may begin elsewhere in its half where the step is given what it reads, or, if it
gathers, where one call, which is read by nobody else, makes that of what the step is given; and
where nothing computes with that in the same half. It comes before the other collectives of the unit
before its reader's, and of later units; behind those of earlier ones. Two of one kind stay in
order.
"""

import itertools
from collections.abc import Sequence

from memo_compile.step.problem import CallKind, Problem, StepCall, Storage

_TALKING = (CallKind.ISSUE, CallKind.COMM_WAIT)


class FloatingCalls:
    """The calls of a step without moves that may run elsewhere."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._given = frozenset(problem.inputs)
        self._readers: dict[str, list[StepCall]] = {}
        for call in problem.calls:
            for value in {*call.inputs, *(into.value for into in call.into)}:
                self._readers.setdefault(value, []).append(call)
        self._maker = {value: call for call in problem.calls for value in call.outputs}
        self.names: set[str] = set()
        """Beginnings, and what makes their inputs."""
        self.brings: dict[str, tuple[StepCall, ...]] = {}
        """What such a collective brings -> the calls that do it, its wait among them."""
        for call in problem.calls:
            if call.kind is CallKind.ISSUE:
                own = self._floating(call)
                self.names.update(found.name for found in own)
                waits = (found for found in self._readers.get(call.outputs[0], ()))
                wait = next((found for found in waits if found.waits_for == call.name), None)
                if own and wait is not None:
                    self.brings[wait.outputs[0]] = (*own, wait)
        self._units: dict[tuple[object, ...], int] = {}
        for call in problem.calls:
            if call.kind in (CallKind.RUN, CallKind.ISSUE) and call.name not in self.names:
                self._units.setdefault(_unit(call), len(self._units))
        self._numbers = {call.name: at for at, call in enumerate(problem.calls)}

    def _floating(self, issue: StepCall) -> tuple[StepCall, ...]:
        """``issue`` behind what makes its input, where they float."""
        first = issue
        maker = self._maker.get(issue.inputs[0])
        if maker is not None and self._gathers(issue) and self._makes_one(maker):
            first = maker
        own = {first.name, issue.name}
        others = (reader for value in first.inputs for reader in self._readers[value])
        if any(self._computes(other, issue, own) for other in others):
            return ()
        is_given = self._given.issuperset(first.inputs)
        return (first, issue)[first is issue :] if is_given else ()

    def _gathers(self, issue: StepCall) -> bool:
        """What it brings is larger than what it is given."""
        given, brought = (
            sum(each.num_elements * each.item_bytes for each in layouts if each is not None)
            for layouts in (issue.reads, self.problem.regions[issue.region].output_layouts)
        )
        return brought > given

    def _makes_one(self, maker: StepCall) -> bool:
        outputs = self.problem.regions[maker.region].outputs
        readers = [own for made in maker.outputs for own in self._readers.get(made, ())]
        is_one = len(outputs) == 1 and outputs[0].storage is Storage.ARENA and not maker.into
        is_run = maker.kind is CallKind.RUN
        return is_one and is_run and all(reader.kind in _TALKING for reader in readers)

    def _computes(self, other: StepCall, issue: StepCall, own: set[str]) -> bool:
        is_near = (other.phase, other.member) == (issue.phase, issue.member)
        return is_near and other.name not in own and other.kind not in _TALKING

    def disordered(self, begun: Sequence[StepCall]) -> str | None:
        """What is wrong with the order of these beginnings, if anything."""
        for before, after in itertools.pairwise(begun):
            is_same_half = (before.phase, before.member) == (after.phase, after.member)
            if is_same_half and not self._precedes(before, after):
                return f"{after.name} begins behind {before.name}, on other ranks before it"
        return None

    def _precedes(self, before: StepCall, after: StepCall) -> bool:
        floats = before.name in self.names, after.name in self.names
        if floats[0] == floats[1]:
            return self._numbers[before.name] < self._numbers[after.name]
        if floats[0]:
            return self._read_in(before) - 1 <= self._units[_unit(after)]
        return self._units[_unit(before)] < self._read_in(after) - 1

    def _read_in(self, issue: StepCall) -> int:
        """The unit that first reads what ``issue`` brings."""
        wait = next(call for call in self._readers[issue.outputs[0]] if call.waits_for)
        reading = (CallKind.RUN, CallKind.ISSUE)
        readers = self._readers.get(wait.outputs[0], [])
        reader = next((call for call in readers if call.kind in reading), issue)
        return self._units.get(_unit(reader), len(self._units))


def _unit(call: StepCall) -> tuple[object, ...]:
    return call.phase, call.member, call.layer_class, call.instance
