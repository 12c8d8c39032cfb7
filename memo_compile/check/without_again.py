"""A step that gathers weights again, as it would be if it kept them, as its graphs do.

What gathers again must be the very calls of the forward once more, on a value that the step is
given and that no call computes with but to convert it for that.
"""

from dataclasses import replace

from memo_compile.step.problem import CallKind, Phase, Problem, StepCall
from memo_compile.step.tilings import WholeStep

_TALKING = (CallKind.ISSUE, CallKind.COMM_WAIT)


def without_again(whole: WholeStep, problem: Problem) -> tuple[Problem, tuple[str, ...]]:
    """``problem`` without the collectives that ``whole`` has not; and what is wrong with those.

    What reads their results reads those of the forward instead.
    """
    names = {call.name for call in whole.calls}
    talking = [call for call in problem.calls if call.kind in _TALKING and call.name not in names]
    if not talking:
        return problem, ()
    makers = {value: call for call in problem.calls for value in call.outputs}
    added = {call.name for call in talking}
    for call in talking:
        maker = makers.get(call.inputs[0])
        if call.kind is CallKind.ISSUE and maker is not None and maker.name not in names:
            added.add(maker.name)
    return _Undone(problem, added).run()


class _Undone:
    def __init__(self, problem: Problem, added: set[str]) -> None:
        self.problem = problem
        self.added = added
        self.faults: list[str] = []
        self.first: dict[tuple[object, ...], StepCall] = {}
        """What a call of a forward does -> the call."""
        self.stands_for: dict[str, str] = {}
        """Value of an added call -> that of the forward."""
        self.converting: set[str] = set()
        """Calls that may compute with what is gathered: those that convert it."""
        self.converted: set[str] = set()
        """What those make."""
        self.given: set[str] = set()
        """What is gathered, or converted for that."""

    def run(self) -> tuple[Problem, tuple[str, ...]]:
        calls: list[StepCall] = []
        for call in self.problem.calls:
            inputs = tuple(self.stands_for.get(value, value) for value in call.inputs)
            own = replace(call, inputs=inputs)
            if call.name in self.added:
                self._take(own)
                continue
            calls.append(own)
            if call.phase is Phase.FORWARD:
                self.first.setdefault(_doing(own), own)
        for call in calls:
            touches = self.given.intersection(call.inputs)
            if touches and call.kind not in _TALKING and call.name not in self.converting:
                self.faults.append(f"{call.name} computes with {touches}, which is gathered again")
        return replace(self.problem, calls=tuple(calls)), tuple(self.faults)

    def _take(self, call: StepCall) -> None:
        """``call`` must do what a call of the forward did."""
        twin = self.first.get(_doing(call))
        if twin is None or call.phase is not Phase.BACKWARD or call.into:
            self.faults.append(f"{call.name} is no call of the step's graphs, nor one again")
            return
        self.stands_for.update(zip(call.outputs, twin.outputs, strict=True))
        if call.kind is CallKind.COMM_WAIT:
            return
        read = set(call.inputs) - self.converted
        if call.kind is CallKind.RUN:
            self.converting.add(twin.name)
            self.converted.update(twin.outputs)
        self.given |= read
        if not read.issubset(self.problem.inputs):
            self.faults.append(f"{call.name} reads {read}, which the step is not given")


def _doing(call: StepCall) -> tuple[object, ...]:
    return call.kind, call.region, call.inputs, call.reads, call.member
