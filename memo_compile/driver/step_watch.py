"""Watches how autograd calls one graph: which live steps belong together, what lies between them.

In the step that is watched nothing is assumed. What a half returns is followed until it is gone;
what it is given is looked up among the results of earlier halves; on a CPU memory is read between
the halves, while the user's own code runs.
"""

import collections
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from memo_runtime.heap import anonymous_bytes

from memo_compile import shim
from memo_compile.driver.around import parameters_around
from memo_compile.driver.declared import stages_around
from memo_compile.step.group import Group
from memo_compile.step.interludes import MEASURED_BYTES
from memo_compile.step.problem import FixedBytes, Half, Interlude

SAMPLE_S = 0.0001
"""Between two looks at the process's memory; a block's work takes some milliseconds."""

SAMPLES_OF_ALL = 200
"""What has taken longer is looked at so many times in all, so that looking costs it nothing."""

MAX_SAMPLE_S = 0.05

MAX_CALLS = 4096
"""A step of more halves is no group: something keeps it from ever ending."""

HalfCall = tuple[bool, int]
"""(is a backward, member)."""


class MemorySampler:
    """The most anonymous memory of the process since ``begin``, as far as it was looked at."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._stop: threading.Event | None = None

    def begin(self) -> int:
        """Look from now on; returns the bytes that are there now."""
        self.end()
        self.most_bytes = now = anonymous_bytes()
        stop = self._stop = threading.Event()
        threading.Thread(target=_look, args=(weakref.ref(self), stop), daemon=True).start()
        return now

    def end(self) -> int:
        """The most bytes that were seen; nobody looks any more."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None
            self.most_bytes = max(self.most_bytes, anonymous_bytes())
        return self.most_bytes


def _look(sampler: "weakref.ref[MemorySampler]", stop: threading.Event) -> None:
    """Look at memory until someone stops it, or nobody is there who wants to know."""
    began = time.monotonic()
    pause = SAMPLE_S
    while not stop.wait(pause):
        target = sampler()
        if target is None:
            return
        target.most_bytes = max(target.most_bytes, anonymous_bytes())
        del target
        pause = min(max(SAMPLE_S, (time.monotonic() - began) / SAMPLES_OF_ALL), MAX_SAMPLE_S)


@dataclass(slots=True)
class _Result:
    """A result of a half in memory, and the last half at whose begin it was still there."""

    half: HalfCall
    position: int
    storage: Any
    num_bytes: int
    alive_at: int
    is_gone: bool = False


@dataclass(slots=True)
class Member:
    """One forward that was seen."""

    key: int | None
    """Where its first parameter lies."""
    parameters: list[weakref.ref[Any]] = field(default_factory=list)
    share: float | None = None
    """Of a pipeline's microbatch: the part of what it saves that goes to the host, if said."""


class SeenGraph(NamedTuple):
    """What a watch must know of the graph of a forward."""

    backward: Half
    num_outputs: int
    tangent_bytes: Mapping[str, int]


@dataclass(slots=True, eq=False)
class StepWatch:
    """What was seen of a graph since no step of it was live."""

    backward: Half
    num_outputs: int
    """How many of a forward's results are the user's; what is saved for the backward follows."""
    tangent_bytes: dict[str, int]
    samples: bool
    """Memory is read between the halves."""
    learns: bool = True
    """What is seen is planned for."""
    thread: int = field(default_factory=threading.get_ident)
    members: list[Member] = field(default_factory=list)
    calls: list[HalfCall] = field(default_factory=list)
    """The halves that began, in order."""
    passed: set[tuple[HalfCall, int]] = field(default_factory=set)
    results: list[_Result] = field(default_factory=list)
    inputs: dict[int, int] = field(default_factory=dict)
    """Storage -> bytes of what forwards were given and no half had made; parameters excepted."""
    interludes: list[tuple[HalfCall, int, int]] = field(default_factory=list)
    """(the half that followed, most bytes, bytes that stayed)."""
    around: list[weakref.ref[Any]] = field(default_factory=list)
    """Parameters of the model that no member has, and that had no gradient when the step began."""
    made: list[tuple[int, int]] = field(default_factory=list)
    """Gradients of those: (index of the call before which they were first seen, bytes)."""
    existing: list[tuple[weakref.ref[Any], int]] = field(default_factory=list)
    """Parameters that had a gradient before their forward, or before the second, and its bytes."""
    is_learned: bool = False
    """A plan was made for it."""
    is_mixed: bool = False
    """Several threads ran it."""
    is_pipeline: bool = False
    """The forwards are microbatches of a pipeline's stage: of one module, in any order."""
    num_forwards: int = 0
    """In a pipeline how many a whole step has, as declared."""
    is_part: bool = False
    """The rank has more stages than this one: all of them are a step, and this is none."""
    follows_parameters: bool = False
    """Parameters are gathered before a half and freed behind it (FSDP2)."""
    most_gathered: int = 0
    """Bytes of members' parameters that were there at once."""
    _after: int | None = None
    _sampler: MemorySampler = field(default_factory=MemorySampler)

    def begin(self, half: HalfCall, args: Sequence[Any]) -> None:
        """A half is about to run on ``args``."""
        is_backward, _ = half
        self._end_interlude(half)
        if len(self.calls) >= MAX_CALLS:
            self.is_mixed, self.samples = True, False
            return
        self.is_mixed |= not is_backward and self.thread != threading.get_ident()
        index = len(self.calls)
        self.calls.append(half)
        self.samples &= not is_backward or len(self.members) > 1  # one alone is no group
        alive: dict[int, _Result] = {}
        for result in self.results:
            if not result.is_gone and result.storage.expired():
                result.is_gone = True
            if not result.is_gone:
                result.alive_at = index
                alive[result.storage.cdata] = result
        if not is_backward:
            member = _member(args)
            member.share = stages_around(args).share if self.is_pipeline else None
            if not self.is_pipeline or member.key not in self.keys:  # later it has some of its own
                self._note_existing(_parameters(args))
            self.members.append(member)
        if self.learns:
            self._look_at_parameters(index, is_backward=is_backward)
        for position, value in enumerate(args):
            if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
                continue
            storage = value.untyped_storage()
            if storage._cdata in alive:
                self.passed.add((half, position))
            elif not is_backward:
                self.inputs[storage._cdata] = storage.nbytes()

    def end(self, half: HalfCall, results: Sequence[Any]) -> None:
        """The half has returned ``results``."""
        if len(self.calls) >= MAX_CALLS:
            return
        index = len(self.calls) - 1
        for result in self.results:  # what went while the half ran is not freed by what follows
            result.is_gone |= result.storage.expired()
        for position, value in enumerate(results):
            for storage, num_bytes in shim.storages_of([value]):
                self.results.append(_Result(half, position, storage, num_bytes, index))
        if self.samples and not self.is_group():  # all halves of a group have run: it is over
            self._after = self._sampler.begin()

    def stop(self) -> None:
        """Nothing more is looked at."""
        self._sampler.end()
        self._after = None

    def _end_interlude(self, half: HalfCall) -> None:
        if self._after is None:
            return
        most, now = self._sampler.end(), anonymous_bytes()
        gone = sum(
            result.num_bytes
            for result in self.results
            if not result.is_gone and result.storage.expired()
        )
        most -= self._after
        left = now - self._after + gone
        self.interludes.append((half, max(0, most), max(0, left)))
        self._after = None

    def _look_at_parameters(self, index: int, *, is_backward: bool) -> None:
        if is_backward:
            self._look_for_gradients(index)
        elif len(self.members) == 2:
            self._look_around()
        if self.follows_parameters:
            self.most_gathered = max(self.most_gathered, self._parameters_there())

    def _look_around(self) -> None:
        """Remember which parameters of the model around the first two members have no gradient."""
        found = [own for own in (reference() for reference in self.parameters()) if own is not None]
        trained = [own for own in parameters_around(found) if own.requires_grad]
        apart = {own.untyped_storage()._cdata: own for own in trained}.values()
        self.around = [weakref.ref(own) for own in apart if own.grad is None]
        self._note_existing(apart)

    def _note_existing(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.existing += [
            (weakref.ref(own), own.grad.nbytes) for own in parameters if own.grad is not None
        ]

    def existing_gradient_bytes(self) -> int:
        """Bytes of gradients that were there before the step."""
        found = ((reference(), num_bytes) for reference, num_bytes in self.existing)
        return sum({id(own): num_bytes for own, num_bytes in found if own is not None}.values())

    def _look_for_gradients(self, index: int) -> None:
        members = {id(own()) for own in self.parameters()}
        waiting = []
        for reference in self.around:
            own = reference()
            if own is None or id(own) in members:
                continue
            if own.grad is not None:
                self.made.append((index, own.grad.nbytes))
            else:
                waiting.append(reference)
        self.around = waiting

    @property
    def num_members(self) -> int:
        """How many forwards began before the first backward; in a pipeline all of them count."""
        if self.is_pipeline:
            return len(self.members)
        backwards = (at for at, (is_backward, _) in enumerate(self.calls) if is_backward)
        return next(backwards, len(self.calls))

    @property
    def keys(self) -> tuple[int | None, ...]:
        """Where the first parameter of each member lies."""
        return tuple(member.key for member in self.members)

    @property
    def gathered_bytes(self) -> int | None:
        """The most bytes of members' parameters that were there at once; None: nobody looked."""
        return self.most_gathered if self.follows_parameters else None

    def waiting_gradient_bytes(self) -> int:
        """Bytes that backwards returned and that are there still."""
        return sum(
            result.num_bytes
            for result in self.results
            if result.half[0] and not result.storage.expired()
        )

    def _parameters_there(self) -> int:
        """FSDP2 keeps a parameter and frees its memory."""
        alive = (reference() for reference in self.parameters())
        storages = {
            own.untyped_storage()._cdata: own.untyped_storage() for own in alive if own is not None
        }
        return sum(storage.nbytes() for storage in storages.values())

    def graph_of(self, number: int) -> SeenGraph:
        """The graph of forward ``number``."""
        return SeenGraph(self.backward, self.num_outputs, self.tangent_bytes)

    def parameters(self) -> tuple[weakref.ref[Any], ...]:
        """Of all members; what two of them share is there twice."""
        return tuple(own for member in self.members for own in member.parameters)

    def has_run(self) -> bool:
        """True where every forward had its backward, and no half ran twice."""
        count = len(self.members)
        halves = [(is_backward, at) for is_backward in (False, True) for at in range(count)]
        return sorted(self.calls) == halves

    def is_group(self) -> bool:
        """True for forwards of several modules, and their backwards in the opposite order.

        In a pipeline for several forwards of one module, each with its backward, in any order.
        """
        count = self.num_members
        if self.is_pipeline:
            alike = len({*self.keys}) == 1 and None not in self.keys
            whole = count >= max(2, self.num_forwards) and self.has_run()
            return whole and alike and not (self.is_mixed or self.is_part)
        order = [(False, at) for at in range(count)] + [(True, at) for at in range(count)][::-1]
        apart = len({*self.keys}) == len(self.members) and None not in self.keys
        return count > 1 and self.calls == order and apart and not self.is_mixed

    def group(self, fixed: FixedBytes) -> Group:
        """What was seen, for a plan; ``fixed`` is of all members, without their inputs.

        Gradients of other modules count from when they were seen. Those that were there already
        when the step began are in ``fixed``.
        """
        count = self.num_members
        number = {half: at for at, half in enumerate(self.calls)}.__getitem__
        last = 2 * count - 1
        gone = tuple(
            (number(result.half), result.position, result.alive_at)
            for result in self.results
            if result.is_gone and result.alive_at < last
            if result.half[0] or result.position < self.graph_of(result.half[1]).num_outputs
        )
        passed = {
            (number(half), list(graph.tangent_bytes).index(name))
            for half, position in self.passed
            for graph in (self.graph_of(half[1]),)
            if half[0] and (name := graph.backward.arguments[position]) in graph.tangent_bytes
        }
        made = self._gradients_made()
        new_gradients = fixed.new_gradients + sum(made.values())
        inputs = sum(self.inputs.values())
        return Group(
            num_members=count,
            fixed=replace(fixed, inputs=inputs, new_gradients=new_gradients),
            gone=gone,
            passed=tuple(sorted(passed)),
            interludes=tuple(self._interludes(number, made)),
            shares=self._shares(),
            order=tuple((at, is_backward) for is_backward, at in self.calls)
            if self.is_pipeline
            else (),
        )

    def _shares(self) -> tuple[float, ...]:
        found = [member.share for member in self.members]
        return tuple(share for share in found if share is not None) if None not in found else ()

    def _gradients_made(self) -> Mapping[int, int]:
        """Half before which gradients of other modules appear -> bytes; the end for the rest."""
        found: collections.Counter[int] = collections.Counter()
        for index, num_bytes in self.made:
            found[index] += num_bytes
        for own in (reference() for reference in self.around):
            if own is not None:
                found[len(self.calls)] += own.nbytes
        return found

    def _interludes(
        self, number: Callable[[HalfCall], int], made: Mapping[int, int]
    ) -> Iterator[Interlude]:
        """What was measured, in whole units, and the gradients that were made."""
        seen = {number(half): (half, most, left) for half, most, left in self.interludes}
        for at in sorted({*seen, *made}):
            half, most, left = seen.get(at, ((False, 0), 0, 0))
            graph = self.graph_of(half[1])
            new = sum(
                graph.tangent_bytes.get(name, 0)
                for position, name in enumerate(graph.backward.arguments if half[0] else ())
                if (half, position) not in self.passed
            )
            stays = made.get(at, 0)
            stays += _in_units(left - new - stays)
            most = max(stays, _in_units(most))
            if most:
                yield Interlude(half=at, most_bytes=most, left_bytes=stays)


def _in_units(num_bytes: int) -> int:
    """What is counted of ``num_bytes`` that were measured.

    Less than a unit is not: a plan's slack covers as much, and a first step's threads and imports
    take it.
    """
    whole = -(-num_bytes // MEASURED_BYTES) * MEASURED_BYTES
    return whole if num_bytes >= MEASURED_BYTES else 0


def _parameters(args: Sequence[Any]) -> list[torch.nn.Parameter]:
    return [value for value in args if isinstance(value, torch.nn.Parameter)]


def key_of(parameter: torch.nn.Parameter) -> int:
    """Where a parameter lies; of one that FSDP2 gathers anew in each step always the same.

    Its address is no such thing: parameters of two blocks may be gathered in the same place.
    """
    return hash((parameter.untyped_storage()._cdata, parameter.storage_offset()))


def _member(args: Sequence[Any]) -> Member:
    parameters = _parameters(args)
    key = key_of(parameters[0]) if parameters else None
    return Member(key=key, parameters=[weakref.ref(parameter) for parameter in parameters])
