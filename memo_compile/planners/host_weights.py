"""Weights on the host: copied to the device before each pass of their layer, dropped behind it.

    L(x, w)    ->    reload w -> loaded0.w;  wait;  L(x, loaded0.w)

A weight that is read in the forward and again in the backward of its layer comes twice. Here a copy
begins right before the first call that reads it; ``transfers.with_time`` lets it begin earlier.
"""

from dataclasses import dataclass, field, replace

from memo_compile.step.problem import (
    COPY_REGION,
    CallKind,
    Copy,
    Problem,
    StepCall,
    align,
    copy_regions,
    weight_region,
)

_LOADED = "loaded"
_COMPUTES = (CallKind.RUN, CallKind.RECOMPUTE)


def all_on_host(problem: Problem) -> Problem:
    """``problem`` with all its ``layer_weights`` on the host."""
    moved_bytes = sum(
        size for value, size in problem.layer_weights.items() if value not in problem.host_weights
    )
    fixed = replace(
        problem.fixed,
        parameters=problem.fixed.parameters - moved_bytes,
        parameters_on_host=problem.fixed.parameters_on_host + moved_bytes,
    )
    return replace(problem, host_weights=tuple(problem.layer_weights), fixed=fixed)


def weight_of(value: str) -> str:
    """The weight that ``value`` is a copy of on the device; else itself."""
    prefix, _, weight = value.partition(".")
    return weight if prefix.startswith(_LOADED) and prefix[len(_LOADED) :].isdigit() else value


@dataclass(slots=True)
class WeightCopies:
    """The calls that bring weights and those that read them, which programs of one step share."""

    _calls: dict[object, StepCall] = field(default_factory=dict)
    """What a call does, and for which call -> the call."""

    def copied_in(self, problem: Problem) -> Problem:
        """``problem`` whose calls read weights where copies have brought them. Cost: linear."""
        if not problem.host_weights:
            return problem
        weights = frozenset(problem.host_weights)
        passes = _Passes()
        calls: list[StepCall] = []
        for call in problem.calls:
            if call.kind not in _COMPUTES:
                calls.append(call)
                continue
            passes.enter(call)
            read = [value for value in dict.fromkeys(call.inputs) if value in weights]
            missing = [value for value in read if passes.lacks(value)]  # before they get a name
            names = {value: passes.name_of(value) for value in read}
            calls += [self._reload(problem, call, value, names[value]) for value in missing]
            calls += [self._wait(call, names[value]) for value in missing]
            calls.append(self._reading(call, names) if read else call)
        sizes = {align(problem.layer_weights[value]) for value in weights}
        regions = {**problem.regions, **copy_regions((), sorted(sizes))}
        return replace(problem, calls=tuple(calls), regions=regions)

    def _reload(self, problem: Problem, owner: StepCall, weight: str, name: str) -> StepCall:
        """The copy of ``weight`` to the device as ``name``, for call ``owner`` that reads it."""
        key = "reload", name, owner.name
        if key not in self._calls:
            size_bytes = problem.layer_weights[weight]
            self._calls[key] = StepCall(
                name=f"reload.{name}",
                region=weight_region(align(size_bytes)),
                inputs=(weight,),
                outputs=(name,),
                kind=CallKind.RELOAD,
                copy=Copy(start_bytes=0, end_bytes=size_bytes, host_offset=0),
                phase=owner.phase,
                layer_class=owner.layer_class,
                instance=owner.instance,
                member=owner.member,
            )
        return self._calls[key]

    def _wait(self, owner: StepCall, name: str) -> StepCall:
        """The wait for that copy."""
        key = "wait", name, owner.name
        if key not in self._calls:
            self._calls[key] = StepCall(
                name=f"wait.reload.{name}",
                region=COPY_REGION,
                inputs=(name,),
                outputs=(),
                kind=CallKind.WAIT,
                waits_for=f"reload.{name}",
                phase=owner.phase,
                layer_class=owner.layer_class,
                instance=owner.instance,
                member=owner.member,
            )
        return self._calls[key]

    def _reading(self, call: StepCall, names: dict[str, str]) -> StepCall:
        """``call``, which reads weights by their ``names`` on the device."""
        inputs = tuple([names.get(value, value) for value in call.inputs])
        key = call.name, call.region, inputs
        if key not in self._calls or not _is_same(self._calls[key], call):
            self._calls[key] = replace(call, inputs=inputs)
        return self._calls[key]


def _is_same(cached: StepCall, call: StepCall) -> bool:
    """True where the two differ in their inputs' names at most."""
    return replace(cached, inputs=call.inputs) == call


@dataclass(slots=True)
class _Passes:
    """Which weights are on the device while the calls of one pass of a layer run."""

    _owner: tuple[object, ...] = ()
    _here: dict[str, str] = field(default_factory=dict)
    """Weight -> its name on the device, in the pass that runs."""
    _numbers: dict[str, int] = field(default_factory=dict)
    """How often it has been brought before."""

    def enter(self, call: StepCall) -> None:
        """``call`` runs next: weights of another pass are gone."""
        owner = call.layer_class, call.instance, call.phase, call.member
        if owner != self._owner:
            self._owner = owner
            self._here.clear()

    def lacks(self, weight: str) -> bool:
        """True where ``weight`` is not on the device."""
        return weight not in self._here

    def name_of(self, weight: str) -> str:
        """Its name on the device, a new one where it is to be brought."""
        if weight not in self._here:
            number = self._numbers[weight] = self._numbers.get(weight, -1) + 1
            self._here[weight] = f"{_LOADED}{number}.{weight}"
        return self._here[weight]
