"""When gradients that leave the step are freed, for the checker; shares nothing with the planners.

A gradient is handed to autograd when no later call uses its memory, nor that of the input it is the
gradient of. If the problem lists it as leaving, its memory is free before the next call begins.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from memo_compile.step.problem import Phase, Problem, RegionOutput, StepCall, Storage


@dataclass(slots=True)
class _Gradient:
    """Ordinary memory that a call of the backward made, and the values that lie in it."""

    values: set[str]
    has_left: bool = False


@dataclass(slots=True)
class LeavingGradients:
    """Follows the results of the backward from the call that makes them until they leave."""

    problem: Problem
    _inputs_of: dict[str, set[str]] = field(default_factory=dict)
    """Result of the backward -> the inputs that it is the gradient of."""
    _values_of: dict[str, set[str]] = field(default_factory=dict)
    """Input of the step -> the values that lie in its memory."""
    _owner: dict[str, str] = field(default_factory=dict)
    """Value -> the first value in its memory: a gradient, or an input of the step."""
    _gradients: dict[str, _Gradient] = field(default_factory=dict)

    def __post_init__(self) -> None:
        halves = {half.phase: half for half in self.problem.halves}
        if not self.problem.leaving or len(self.problem.halves) != 2:
            return
        inputs = halves[Phase.FORWARD].arguments
        results = halves[Phase.BACKWARD].results
        if len(inputs) != len(results):
            return
        for name, value in zip(inputs, results, strict=True):
            if value is not None:
                self._inputs_of.setdefault(value, set()).add(name)
        for name in self.problem.inputs:
            self._owner[name] = name
            self._values_of[name] = {name}

    def bind(self, call: StepCall, output: RegionOutput, value: str) -> None:
        """Notes where ``value`` lies, which ``call`` has made."""
        if not self._inputs_of:
            return
        if output.storage is Storage.INPUT and output.index is not None:
            owner = self._owner.get(call.inputs[output.index])
        elif output.storage is Storage.EXTERNAL and call.phase is Phase.BACKWARD:
            first = value if output.same_as is None else call.outputs[output.same_as]
            owner = self._owner.setdefault(first, first)
            self._gradients.setdefault(owner, _Gradient(set()))
        else:
            holder = call.value_around(output.index) if output.storage is Storage.ARENA else None
            owner = None if holder is None else self._owner.get(holder)
        if owner is None:
            return
        self._owner[value] = owner
        if owner in self._gradients:
            self._gradients[owner].values.add(value)
        else:
            self._values_of[owner].add(value)

    def leave_now(self, reads_left: Mapping[str, int]) -> Iterator[str]:
        """Yields the gradients that leave after this call, by the first value in their memory."""
        for owner, gradient in self._gradients.items():
            if not gradient.has_left and self._leaves(gradient, reads_left):
                gradient.has_left = True
                yield owner

    def _leaves(self, gradient: _Gradient, reads_left: Mapping[str, int]) -> bool:
        results = gradient.values & self._inputs_of.keys()
        if not results or not results <= set(self.problem.leaving):
            return False
        used = set(gradient.values)
        for result in results:
            for name in self._inputs_of[result]:
                used |= self._values_of[name]
        return not any(reads_left.get(value, 0) for value in used)
