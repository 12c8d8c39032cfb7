"""Removes from a step the collectives that gather weights a second time, for the comparison.

The step's graphs gather a sharded weight once and keep it to the backward; a planned step may drop
it and gather it again. The second gather must repeat calls of the forward exactly, on a value that
the step is given and that no call computes with, except to convert it for the gather.
"""

from dataclasses import replace

from memo_compile.step.problem import CallKind, Phase, Problem, StepCall
from memo_compile.step.tilings import WholeStep

_TALKING = (CallKind.ISSUE, CallKind.COMM_WAIT)


def without_second_gathers(whole: WholeStep, problem: Problem) -> tuple[Problem, tuple[str, ...]]:
    """Returns ``problem`` without the collectives that ``whole`` lacks, and their faults."""
    names = {call.name for call in whole.calls}
    gathers = [call for call in problem.calls if call.kind in _TALKING and call.name not in names]
    if not gathers:
        return problem, ()
    makers = {value: call for call in problem.calls for value in call.outputs}
    added = {call.name for call in gathers}
    for call in gathers:
        maker = makers.get(call.inputs[0])
        if call.kind is CallKind.ISSUE and maker is not None and maker.name not in names:
            added.add(maker.name)
    return _WithoutAdded(problem, added).run()


class _WithoutAdded:
    """Leaves the calls named ``added`` out of ``problem``, and checks that they repeat others."""

    def __init__(self, problem: Problem, added: set[str]) -> None:
        self.problem = problem
        self.added = added
        self.faults: list[str] = []
        self.first: dict[tuple[object, ...], StepCall] = {}
        """What a call of a forward does (``_work_of``) -> the call."""
        self.stands_for: dict[str, str] = {}
        """Value of an added call -> that of the forward."""
        self.converting: set[str] = set()
        """Calls that may read a shard to convert it for the gather."""
        self.converted: set[str] = set()
        """Their outputs."""
        self.shards: set[str] = set()
        """Values that are gathered a second time, or converted for that."""

    def run(self) -> tuple[Problem, tuple[str, ...]]:
        """Leaves the added calls out, whose readers then read values of the forward."""
        calls: list[StepCall] = []
        for call in self.problem.calls:
            inputs = tuple(self.stands_for.get(value, value) for value in call.inputs)
            call = replace(call, inputs=inputs)
            if call.name in self.added:
                self._require_repeated(call)
                continue
            calls.append(call)
            if call.phase is Phase.FORWARD:
                self.first.setdefault(_work_of(call), call)
        for call in calls:
            touches = self.shards.intersection(call.inputs)
            if touches and call.kind not in _TALKING and call.name not in self.converting:
                self.faults.append(f"{call.name} computes with {touches}, which is gathered again")
        return replace(self.problem, calls=tuple(calls)), tuple(self.faults)

    def _require_repeated(self, call: StepCall) -> None:
        """Checks that ``call`` does what a call of the forward did; its results stand for those."""
        twin = self.first.get(_work_of(call))
        if twin is None or call.phase is not Phase.BACKWARD or call.into:
            self.faults.append(f"{call.name} is no call of the step's graphs, nor one again")
            return
        self.stands_for.update(zip(call.outputs, twin.outputs, strict=True))
        if call.kind is CallKind.COMM_WAIT:
            return
        read = set(call.inputs) - self.converted  # shards: what else a gather reads is converted
        if call.kind is CallKind.RUN:
            self.converting.add(twin.name)
            self.converted.update(twin.outputs)
        self.shards |= read
        if not read.issubset(self.problem.inputs):
            self.faults.append(f"{call.name} reads {read}, which the step is not given")


def _work_of(call: StepCall) -> tuple[object, ...]:
    """Returns what a call has in common with one that computes the same again."""
    return call.kind, call.region, call.inputs, call.reads, call.member
