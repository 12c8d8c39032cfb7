"""When the collectives of a step begin: one whose input the step is given may run ahead.

Rewrite, where ``w1`` is another layer's shard, which the step is given, and ``g`` a gradient:

    B0(y) -> g; issue g; ...; issue w1; wait w1 -> v; B1(v)
      ->    B0(y) -> g; issue w1; issue g; ...; wait w1 -> v; B1(v)

What gathers sharded parameters (FSDP) needs nothing that the step computes, but that their shards
are converted. ``in_begin_order`` lets it begin before all other collectives of the unit before the
one that reads it, and otherwise as late as that allows. This order goes by the graph alone, so that
it is the same on all ranks, and no plan changes it. ``transfers`` then begins each as early as
hides it, between the collectives before and behind it.
"""

from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from memo_compile.step.communication import layouts_bytes, value_sizes
from memo_compile.step.problem import CallKind, Problem, StepCall, Storage

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
    """The unit that first reads its result."""

    @property
    def issue(self) -> StepCall:
        """Its beginning."""
        return self.calls[-1]


def gathers_of(problem: Problem) -> dict[str, Gather]:
    """The collectives of ``problem`` that may run ahead, by the names of their beginnings.

    They read what the step is given, as it is or converted, and what no call of their half writes.
    """
    given = frozenset(problem.inputs)
    waits = {call.waits_for: call for call in problem.calls if call.kind is CallKind.COMM_WAIT}
    issues = [call for call in problem.calls if call.kind is CallKind.ISSUE and call.name in waits]
    # What makes another collective's input converts no shard: an embedding before its sum is
    # scattered computes for as long as any layer does.
    converted = {call.inputs[0] for call in issues if _is_gather(problem, call)} - given
    calls = problem.calls if converted else ()
    makers = {value: (call,) for call in calls for value in call.outputs if value in converted}
    chains = [(*makers.get(issue.inputs[0], ()), issue) for issue in issues]
    chains = [chain for chain in chains if given.issuperset(chain[0].inputs)]
    values = {
        value for chain in chains for call in chain for value in (*call.inputs, *call.outputs)
    }
    values.update(waits[chain[-1].name].outputs[0] for chain in chains)
    readers = _readers(problem, values)
    gathers: dict[str, Gather] = {}
    for chain in chains:
        issue, wait = chain[-1], waits[chain[-1].name]
        only_converts = len(chain) == 1 or _converts(problem, chain[0], readers)
        if only_converts and not _is_computed_with(readers, chain[0].inputs, chain):
            (gathered,) = wait.outputs
            reading = (reader for reader in readers.get(gathered, ()) if reader.kind in _ORDERED)
            reader = next(reading, issue)
            gathers[issue.name] = Gather(calls=chain, wait=wait, unit=unit_of(reader))
    return gathers


def _is_gather(problem: Problem, issue: StepCall) -> bool:
    """True for a collective whose result is larger than what each rank gives to it."""
    return layouts_bytes(problem.regions[issue.region].output_layouts) > layouts_bytes(issue.reads)


def _readers(problem: Problem, values: Set[str]) -> dict[str, list[StepCall]]:
    """Value -> the calls that read it or write into it, in order."""
    readers: dict[str, list[StepCall]] = {}
    for call in problem.calls if values else ():
        if not values.isdisjoint(call.inputs) or call.into:
            for value in call.touched:
                if value in values:
                    readers.setdefault(value, []).append(call)
    return readers


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


def _is_computed_with(
    readers: dict[str, list[StepCall]], values: Collection[str], chain: Sequence[StepCall]
) -> bool:
    """True where other calls in the half of ``chain`` compute with ``values`` or may write them."""
    computing = (CallKind.RUN, CallKind.RECOMPUTE)
    return any(
        reader.kind in computing and reader not in chain and reader.half == chain[-1].half
        for value in values
        for reader in readers[value]
    )


def unit_of(call: StepCall) -> _Unit:
    """The half and the layer that ``call`` is of."""
    return *call.half, call.layer_class, call.instance


def in_begin_order(problem: Problem) -> Problem:
    """``problem`` whose gathers begin in the order that all ranks keep, as late as it allows.

    What is ordered so before stays as it is. Cost: linear, and the sorting of collectives.
    """
    gathers = gathers_of(problem)
    if not gathers:
        return problem
    return replace(problem, calls=tuple(_in_order(problem, gathers)))


def _begin_order(problem: Problem, gathers: dict[str, Gather]) -> list[str]:
    """The names of all beginnings, half by half: what unit u gathers, then others of unit u - 1."""
    gather_calls = {call.name for gather in gathers.values() for call in gather.calls}
    units: dict[_Unit, int] = {}
    for call in problem.calls:
        if call.kind in _ORDERED and call.name not in gather_calls:
            units.setdefault(unit_of(call), len(units))
    halves: dict[_Unit, int] = {}
    keys: dict[str, tuple[int, int, bool]] = {}
    for call in problem.calls:
        if call.kind is CallKind.ISSUE:
            half = halves.setdefault(call.half, len(halves))
            gather = gathers.get(call.name)
            unit = (
                units[unit_of(call)] if gather is None else units.get(gather.unit, len(units)) - 1
            )
            keys[call.name] = half, unit, gather is None
    return sorted(keys, key=keys.__getitem__)


def _in_order(problem: Problem, gathers: dict[str, Gather]) -> Iterator[StepCall]:
    """The calls, with each gather right before the first call for which its turn must have come.

    That is the next collective in the order of beginnings, or a wait for one of its own unit.
    """
    order = _begin_order(problem, gathers)
    place_of = {name: at for at, name in enumerate(order)}
    gather_calls = {call.name for gather in gathers.values() for call in gather.calls}
    by_wait = {gather.wait.name: gather for gather in gathers.values()}
    by_result = {gather.wait.outputs[0]: gather for gather in gathers.values()}
    last_of = {gathers[name].unit: name for name in order if name in gathers}
    num_begun, waited = 0, set[str]()

    def gathers_up_to(name: str) -> Iterator[StepCall]:
        """The gathers that have not begun and come no later than collective ``name``."""
        nonlocal num_begun
        while num_begun <= place_of[name]:
            gather = gathers.get(order[num_begun])
            num_begun += 1
            yield from () if gather is None else gather.calls

    def wait_of(gather: Gather) -> Iterator[StepCall]:
        """Its wait, if none stands yet, behind all that its unit gathers."""
        if gather.wait.name not in waited:
            waited.add(gather.wait.name)
            yield from gathers_up_to(last_of[gather.unit])
            yield gather.wait

    for call in problem.calls:
        if call.name in gather_calls:
            continue
        for value in call.inputs:
            if value in by_result and call.name not in by_wait:
                yield from wait_of(by_result[value])
        if call.name in by_wait:
            yield from wait_of(by_wait[call.name])
            continue
        if call.kind is CallKind.ISSUE:
            yield from gathers_up_to(call.name)
        yield call


def gathered_bytes(problem: Problem) -> int:
    """The most bytes that may be gathered and not waited for: those of ``AHEAD_UNITS`` units."""
    gathers = gathers_of(problem)
    sizes, units = value_sizes(problem) if gathers else {}, dict[_Unit, int]()
    for gather in gathers.values():
        size_bytes = sizes.get(gather.issue.outputs[0], 0)
        units[gather.unit] = units.get(gather.unit, 0) + size_bytes
    return AHEAD_UNITS * max(units.values(), default=0)
