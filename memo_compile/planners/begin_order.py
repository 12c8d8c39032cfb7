"""When the collectives of a step begin: one whose input the step is given may run ahead.

Rewrite, where ``w1`` is another layer's shard, which the step is given, and ``g`` a gradient:

    B0(y) -> g; issue g; ...; issue w1; wait w1 -> v; B1(v)
      ->    B0(y) -> g; issue w1; issue g; ...; wait w1 -> v; B1(v)

What gathers sharded parameters (FSDP) needs nothing that the step computes, but that their shards
are converted. ``in_begin_order`` lets it begin before all other collectives of the unit before the
one that reads it, and otherwise as late as that allows. This order goes by the graph alone, so that
it is the same on all ranks, and no plan changes it. ``ahead`` then begins each as early as hides
it, between the collectives before and behind it.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from memo_compile.step.communication import comm_bytes, layouts_bytes, value_sizes
from memo_compile.step.copy_times import CopyBack, issues_of
from memo_compile.step.halves import halves_of_calls
from memo_compile.step.problem import CallKind, Problem, StepCall, Storage
from memo_compile.step.timed import TimedProgram

AHEAD_UNITS = 2
"""So many times the most that one unit gathers may be gathered and not yet waited for."""

_ORDERED = (CallKind.RUN, CallKind.ISSUE)

_Unit = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """A collective that needs nothing of the step but what it is given."""

    calls: tuple[StepCall, ...]
    """What converts its input, if anything does, and its beginning."""
    wait: StepCall
    unit: _Unit
    """Where it is first read."""

    @property
    def issue(self) -> StepCall:
        """Its beginning."""
        return self.calls[-1]


def gathers_of(problem: Problem) -> dict[str, Gather]:
    """The collectives of ``problem`` that may run ahead, by the names of their beginnings.

    Nothing in the same half that comes before may write what one reads.
    """
    given = frozenset(problem.inputs)
    waits = {call.waits_for: call for call in problem.calls if call.kind is CallKind.COMM_WAIT}
    issues = [call for call in problem.calls if call.kind is CallKind.ISSUE and call.name in waits]
    converted = {call.inputs[0] for call in issues if makes_more(problem, call)}
    makers = _makers(problem, converted - given)
    chains = [_chain(call, makers.get(call.inputs[0])) for call in issues]
    chains = [calls for calls in chains if given.issuperset(calls[0].inputs)]
    asked = {value for calls in chains for call in calls for value in (*call.inputs, *call.outputs)}
    asked.update(waits[calls[-1].name].outputs[0] for calls in chains)
    readers = _readers(problem, asked)
    found: dict[str, Gather] = {}
    for calls in chains:
        call, wait = calls[-1], waits[calls[-1].name]
        converts = len(calls) == 1 or _converts(problem, calls[0], readers)
        if converts and not _is_touched(readers, calls[0].inputs, calls):
            (shown,) = wait.outputs
            reader = next((own for own in readers.get(shown, ()) if own.kind in _ORDERED), call)
            found[call.name] = Gather(calls=calls, wait=wait, unit=unit_of(reader))
    return found


def makes_more(problem: Problem, issue: StepCall) -> bool:
    """True for a collective that gathers: its result is larger than what each rank gives to it.

    What comes before another one is no conversion of a shard: an embedding before its sum is
    scattered computes for as long as any layer does.
    """
    return layouts_bytes(problem.regions[issue.region].output_layouts) > layouts_bytes(issue.reads)


def _chain(issue: StepCall, maker: StepCall | None) -> tuple[StepCall, ...]:
    """A beginning, behind what makes its input."""
    return (issue,) if maker is None else (maker, issue)


def _makers(problem: Problem, values: Collection[str]) -> dict[str, StepCall]:
    """Value -> the call that makes it."""
    if not values:
        return {}
    return {value: call for call in problem.calls for value in call.outputs if value in values}


def _readers(problem: Problem, values: Set[str]) -> dict[str, list[StepCall]]:
    """Value -> the calls that read it or write into it, in order."""
    found: dict[str, list[StepCall]] = {}
    for call in problem.calls if values else ():
        if not values.isdisjoint(call.inputs) or call.into:
            for value in (*call.inputs, *(into.value for into in call.into)):
                if value in values:
                    found.setdefault(value, []).append(call)
    return found


def _converts(problem: Problem, maker: StepCall, readers: dict[str, list[StepCall]]) -> bool:
    """True for a call that makes nothing but one collective's input, in memory of its own."""
    outputs = problem.regions[maker.region].outputs
    talking = (CallKind.ISSUE, CallKind.COMM_WAIT)
    return (
        maker.kind is CallKind.RUN
        and len(outputs) == 1
        and outputs[0].storage is Storage.ARENA
        and not maker.into
        and all(reader.kind in talking for reader in readers[maker.outputs[0]])
    )


def _is_touched(
    readers: dict[str, list[StepCall]], values: Collection[str], calls: Sequence[StepCall]
) -> bool:
    """True where a call of the same half computes with one of ``values``, and might write it."""
    computing = (CallKind.RUN, CallKind.RECOMPUTE)
    return any(
        reader.kind in computing and reader not in calls and _half(reader) == _half(calls[-1])
        for value in values
        for reader in readers[value]
    )


def _half(call: StepCall) -> _Unit:
    return call.phase, call.member


def unit_of(call: StepCall) -> _Unit:
    """The half and the layer that ``call`` is of."""
    return *_half(call), call.layer_class, call.instance


def in_begin_order(problem: Problem) -> Problem:
    """``problem`` whose gathers begin in the order that all ranks keep, as late as it allows.

    What is ordered so before stays as it is. Cost: linear, and the sorting of collectives.
    """
    gathers = gathers_of(problem)
    if not gathers:
        return problem
    return replace(problem, calls=tuple(_in_order(problem, gathers)))


def _begin_order(problem: Problem, gathers: dict[str, Gather]) -> list[str]:
    """The names of all beginnings, half by half: a unit's gathers before the others of the last."""
    own = {call.name for gather in gathers.values() for call in gather.calls}
    units: dict[_Unit, int] = {}
    for call in problem.calls:
        if call.kind in _ORDERED and call.name not in own:
            units.setdefault(unit_of(call), len(units))
    halves: dict[_Unit, int] = {}
    keys: dict[str, tuple[int, int, bool]] = {}
    for call in problem.calls:
        if call.kind is CallKind.ISSUE:
            half = halves.setdefault(_half(call), len(halves))
            gather = gathers.get(call.name)
            unit = (
                units[unit_of(call)] if gather is None else units.get(gather.unit, len(units)) - 1
            )
            keys[call.name] = half, unit, gather is None
    return sorted(keys, key=keys.__getitem__)


def _in_order(problem: Problem, gathers: dict[str, Gather]) -> Iterator[StepCall]:
    order = _begin_order(problem, gathers)
    rank = {name: at for at, name in enumerate(order)}
    own = {call.name for gather in gathers.values() for call in gather.calls}
    by_wait = {gather.wait.name: gather for gather in gathers.values()}
    shown = {gather.wait.outputs[0]: gather for gather in gathers.values()}
    last_of = {gathers[name].unit: name for name in order if name in gathers}
    begun, waited = 0, set[str]()

    def up_to(name: str) -> Iterator[StepCall]:
        nonlocal begun
        while begun <= rank[name]:
            gather = gathers.get(order[begun])
            begun += 1
            yield from () if gather is None else gather.calls

    def arrived(gather: Gather) -> Iterator[StepCall]:
        if gather.wait.name not in waited:
            waited.add(gather.wait.name)
            yield from up_to(last_of[gather.unit])
            yield gather.wait

    for call in problem.calls:
        if call.name in own:
            continue
        for value in call.inputs:
            if value in shown and call.name not in by_wait:
                yield from arrived(shown[value])
        if call.name in by_wait:
            yield from arrived(by_wait[call.name])
            continue
        if call.kind is CallKind.ISSUE:
            yield from up_to(call.name)
        yield call


def gathered_bytes(problem: Problem) -> int:
    """The most bytes that may be gathered and not waited for: those of ``AHEAD_UNITS`` units."""
    gathers = gathers_of(problem)
    return _gathered_bytes(gathers, value_sizes(problem)) if gathers else 0


def _gathered_bytes(gathers: dict[str, Gather], sizes: Mapping[str, int]) -> int:
    units = dict[_Unit, int]()
    for gather in gathers.values():
        size_bytes = sizes.get(gather.issue.outputs[0], 0)
        units[gather.unit] = units.get(gather.unit, 0) + size_bytes
    return AHEAD_UNITS * max(units.values(), default=0)


def ahead(program: TimedProgram, *, limit_bytes: int) -> TimedProgram:
    """``program`` that gathers as early as it takes, and no earlier.

    No more than ``limit_bytes`` are alive at one time then, or as many as before, and no more than
    ``gathered_bytes`` are gathered and not waited for. The order of collectives stays. The program
    is as it was where the step takes no less time.

    Raises:
        InputError: a region has no seconds.
    """
    gathers = gathers_of(program.problem) if program.timeline.exposed_comm_s > 0 else {}
    if not gathers:
        return program
    better = program.in_order(_Ahead(program, gathers, limit_bytes).run())
    return better if better.is_better_than(program, limit_bytes) else program


def earliest(problem: Problem) -> Problem:
    """``problem`` that gathers as early as the order of collectives allows."""
    gathers = gathers_of(problem)
    if not gathers:
        return problem
    own = {call.name for gather in gathers.values() for call in gather.calls}
    calls: list[StepCall] = []
    last: dict[int, int] = {}
    """Half -> behind which place the next gather of it can begin."""
    for half, call in zip(halves_of_calls(problem), problem.calls, strict=True):
        at = last.setdefault(half, len(calls))
        if call.name in gathers:
            calls[at:at] = gathers[call.name].calls
            last[half] = at + len(gathers[call.name].calls)
        elif call.name not in own:
            calls.append(call)
            if call.kind is CallKind.ISSUE:
                last[half] = len(calls)
    return replace(problem, calls=tuple(calls))


class _Ahead:
    """Places between the calls of a step, its gathers taken out, at which these begin."""

    def __init__(self, program: TimedProgram, gathers: dict[str, Gather], limit_bytes: int) -> None:
        self.program = program
        self.gathers = gathers
        problem, sizes = program.problem, program.sizes
        own = {call.name for gather in gathers.values() for call in gather.calls}
        is_rest = [call.name not in own for call in problem.calls]
        self.rest = [*itertools.compress(problem.calls, is_rest)]
        self.room = max(limit_bytes, program.peak_bytes) - program.alive
        """Per call of the rest the bytes that are free."""
        self.room = self.room[is_rest]
        self.sizes = {
            name: sum(sizes.get(call.outputs[0], 0) for call in gather.calls)
            for name, gather in gathers.items()
        }
        self.order: list[str] = []
        """All beginnings."""
        self.latest: dict[str, int] = {}
        """Where each stands now, by place in the rest."""
        self.first: dict[str, int] = {}
        """Where the half of each begins."""
        begins: dict[int, int] = {}
        num_rest = 0
        for half, call in zip(halves_of_calls(problem), problem.calls, strict=True):
            begins.setdefault(half, num_rest)
            if call.kind is CallKind.ISSUE:
                self.order.append(call.name)
                self.latest[call.name] = num_rest
                self.first[call.name] = begins[half]
            num_rest += call.name not in own
        self.index = {call.name: at for at, call in enumerate(self.rest)}
        self.waited = {
            call.waits_for: at
            for at, call in enumerate(self.rest)
            if call.kind is CallKind.COMM_WAIT
        }

    def run(self) -> tuple[StepCall, ...]:
        problem, costs = self.program.problem, self.program.costs
        regions = {call.name: call for call in problem.calls if call.name in self.latest}
        computes = (CallKind.RUN, CallKind.RECOMPUTE)
        call_s = [costs.call_s(call) if call.kind in computes else 0.0 for call in self.rest]
        earliest = self._earliest()
        copies = [
            CopyBack(
                earliest[name],
                self.latest[name],
                self.waited[name],
                costs.comm_s(regions[name].region, comm_bytes(problem, regions[name])),
            )
            for name in self.order
        ]
        wanted = dict(zip(self.order, issues_of(call_s, copies), strict=True))
        return tuple(self._placed(wanted))

    def _earliest(self) -> dict[str, int]:
        """Per beginning the first place that order and the bound on what is gathered allow."""
        bound, found = _gathered_bytes(self.gathers, self.program.sizes), dict[str, int]()
        least, unread = 0, list[str]()
        for name in self.order:
            if name in self.gathers:
                unread.append(name)
                least = max(least, self.first[name])
                while sum(self.sizes[own] for own in unread) > bound and len(unread) > 1:
                    least = max(least, self.waited[unread.pop(0)] + 1)
            found[name] = least = min(least, self.latest[name])
            if name not in self.gathers:
                found[name], least = self.latest[name], self.latest[name] + 1
        return found

    def _placed(self, wanted: dict[str, int]) -> Iterator[StepCall]:
        """The program; a gather begins where it is wanted, or later where bytes are short."""
        at_place: dict[int, list[StepCall]] = {}
        least = 0
        for name in self.order:
            if name not in self.gathers:
                least = self.latest[name] + 1
                continue
            place, size_bytes = self.latest[name], self.sizes[name]
            while place > max(least, wanted[name]) and self.room[place - 1] >= size_bytes:
                place -= 1
            self.room[place : self.latest[name]] -= size_bytes
            at_place.setdefault(place, []).extend(self.gathers[name].calls)
            least = place
        for at, call in enumerate(self.rest):
            yield from at_place.get(at, ())
            yield call
