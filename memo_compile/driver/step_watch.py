"""Watches how autograd calls one graph: which live steps belong together, what lies between them.

In the step that is watched nothing is assumed. What a half returns is followed until it is gone;
what it is given is looked up among the results of earlier halves; on a CPU memory is read between
the halves, while the user's own code runs.
"""

import collections
import gc
import itertools
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from memo_runtime.leases import leases

from memo_compile.driver.around import parameters_around
from memo_compile.driver.between import Between
from memo_compile.driver.checkpoints import CheckpointedForward
from memo_compile.driver.declared import stages_around
from memo_compile.driver.owners import owned
from memo_compile.step.group import Group, HalfOrder
from memo_compile.step.problem import FixedBytes, Half
from memo_compile.torch_private import autograd

MAX_CALLS = 4096
"""A step of more halves is no group: something keeps it from ever ending."""

HalfCall = tuple[bool, int]
"""(is a backward, member)."""


@dataclass(slots=True)
class _Result:
    """A result of a half in memory, and the last half at whose begin it was still there."""

    half: HalfCall
    position: int
    storage: Any
    num_bytes: int
    alive_at: int
    is_given: bool
    """It lies in memory that the half was given, or that an earlier result of it lies in."""
    is_gone: bool = False


@dataclass(slots=True)
class Member:
    """One forward that was seen."""

    key: int | None
    """Where its first parameter lies."""
    parameters: list[weakref.ref[Any]] = field(default_factory=list)
    share: float | None = None
    """Of a pipeline's microbatch: the part of what it saves that goes to the host, if said."""


class _Tangent(NamedTuple):
    """A gradient that the user's code gave to a backward."""

    call: int
    """Of the backward, its place among the calls."""
    half: HalfCall
    position: int
    storage: Any
    num_bytes: int

    def is_freed_in(self, call: int) -> bool:
        """True where ``call`` was given it, and let go of it."""
        return self.call == call and bool(self.storage.expired())


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
    tangent_bytes: Mapping[str, int]
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
    between: Between = field(default_factory=Between)
    """What the user's code took between the halves."""
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
    kept: frozenset[int] = frozenset()
    """Storages of the user that stay from step to step: inputs, also where gradients come in."""
    tangents: list[_Tangent] = field(default_factory=list)
    in_backward: bool = False
    """The step began inside of a backward: a checkpoint runs its forwards again."""
    checkpointed: tuple[CheckpointedForward, ...] = ()
    """Those of the round that are there beside this step, as ``CheckpointRound`` tells."""
    is_first_again: bool = False
    """``checkpointed`` are all of their round."""
    has_reruns: bool = False
    """A checkpoint runs forwards again while others wait for their backward: the members are all
    forwards, in the order that was seen. One that was dropped counts as if its backward had come at
    once."""
    left_out: set[int] = field(default_factory=set)
    """Forwards that were dropped while others waited."""
    lease: int | None = None
    """Of the last forward, by its number."""
    is_brief: bool = False
    """The step runs as planned: the order of its halves is noted, and what backwards return."""
    _given: frozenset[int] = frozenset()
    """Storages that the half that runs was given."""
    _gathered: int = 0
    """Bytes of members' parameters that were there when the user's code began."""

    def keep(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """``storages`` are there before the step and behind it. Called before the first half."""
        self.kept = frozenset(storage._cdata for storage in storages)
        self.between.sampler.apart = tuple(storages)

    def begin(self, half: HalfCall, args: Sequence[Any]) -> None:
        """A half is about to run on ``args``."""
        is_backward, _ = half
        args = args if is_backward else owned(args)
        self._note_order(is_backward=is_backward)
        self.end_interlude(() if is_backward else _parameters(args))
        if len(self.calls) >= MAX_CALLS:
            self.is_mixed, self.samples = True, False
            return
        self.is_mixed |= not is_backward and self.thread != threading.get_ident()
        index = len(self.calls)
        self.calls.append(half)
        if self.is_brief:
            self.members += () if is_backward else (_member(args),)
            return
        self.samples &= not is_backward or len(self.members) > 1  # one alone is no group
        if self.samples and index == 1:
            gc.collect()  # what waits for it is not the step's, and would hide what is taken
        made: set[int] = set()
        for result in self.results:
            if not result.is_gone and result.storage.expired():
                result.is_gone = True
            if not result.is_gone:
                result.alive_at = index
                if not result.is_given:
                    made.add(result.storage.cdata)
        if not is_backward:
            member = _member(args)
            member.share = stages_around(args).share if self.is_pipeline else None
            if not self.is_pipeline or member.key not in self.keys:  # later it has some of its own
                self._note_existing(_parameters(args))
            self.members.append(member)
        if self.learns:
            self._look_at_parameters(index, is_backward=is_backward)
        self._note_given(index, args, made)

    def _note_order(self, *, is_backward: bool) -> None:
        """A half begins: see whether a checkpoint has dropped the last forward, or runs one again.

        What it drops is gone before anything else runs.
        """
        if not self.calls or self.is_pipeline:
            return
        was_backward, last = self.calls[-1]
        if not was_backward and self.lease is not None and not leases.is_live(self.lease):
            self.left_out.add(last)
            self.calls.append((True, last))
        runs_again = not is_backward and not self.in_backward and autograd.in_backward()
        self.has_reruns |= bool(self.left_out) or runs_again

    def _note_given(self, index: int, args: Sequence[Any], made: Set[int]) -> None:
        """Note what a half is given: by other halves, in storages ``made``, or by the user."""
        half = self.calls[index]
        is_backward, member = half
        names = self.graph_of(member).backward.arguments if is_backward else ()
        tangent_bytes = self.graph_of(member).tangent_bytes if is_backward else {}
        given = set()
        for position, value in enumerate(args):
            if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
                continue
            storage = value.untyped_storage()
            given.add(storage._cdata)
            if storage._cdata in made:
                self.passed.add((half, position))
            elif storage._cdata in self.kept:
                self.inputs[storage._cdata] = storage.nbytes()
                self.passed.add((half, position))
            elif not is_backward:
                self.inputs[storage._cdata] = storage.nbytes()
            elif names[position] in tangent_bytes:
                for reference, num_bytes in autograd.storages_of([value]):
                    self.tangents.append(_Tangent(index, half, position, reference, num_bytes))
        self._given = frozenset(given)

    def end(self, half: HalfCall, results: Sequence[Any]) -> None:
        """The half has returned ``results``."""
        if len(self.calls) >= MAX_CALLS or (self.is_brief and not half[0]):
            return
        index = len(self.calls) - 1
        for result in self.results:  # what went while the half ran is not freed by what follows
            result.is_gone |= result.storage.expired()
        known = set(self._given)
        for position, value in enumerate(results):
            for storage, num_bytes in autograd.storages_of([value]):
                is_given = storage.cdata in known
                known.add(storage.cdata)
                self.results.append(_Result(half, position, storage, num_bytes, index, is_given))
        self._given = frozenset()
        if self.samples and not self.is_group():  # all halves of a group have run: it is over
            freed = (own.num_bytes for own in self.tangents if own.is_freed_in(index))
            self.between.begin(leases.num_live(), sum(freed))
            self._gathered = self._parameters_there()

    def stop(self) -> None:
        """Nothing more is looked at."""
        self.between.stop()

    def end_interlude(self, arriving: Sequence[torch.nn.Parameter] = ()) -> None:
        """The user's code has ended: what is taken from now on is not its.

        ``arriving`` are parameters of the member that begins. What FSDP2 has gathered is no user's.
        """
        if not self.between.is_open:
            return
        index = len(self.calls)
        gone = (own for own in self.results if not (own.is_gone or own.is_given))
        freed_bytes = sum(own.num_bytes for own in gone if own.storage.expired())
        gathered = self._parameters_there(arriving) - self._gathered
        self.between.end(index, freed_bytes, leases.num_live(), gathered)
        self._note_what_stays(index)

    def _note_what_stays(self, index: int) -> None:
        """Gradients that the user's code holds on to: measured like all that it holds."""
        for own in self.tangents:
            is_known = own.call in self.between.found
            if own.call == index - 1 and is_known and not own.storage.expired():
                self.passed.add((own.half, own.position))

    def _look_at_parameters(self, index: int, *, is_backward: bool) -> None:
        if is_backward:
            self._look_for_gradients(index)
        elif len(self.members) == 2 and not self.checkpointed:
            self._look_around()
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
    def is_ordered(self) -> bool:
        """True where the halves come in an order of their own; else backwards in the opposite."""
        return self.is_pipeline or self.has_reruns

    @property
    def num_members(self) -> int:
        """How many forwards began before the first backward; if they are ordered, all count."""
        if self.is_ordered:
            return len(self.members)
        backwards = (at for at, (is_backward, _) in enumerate(self.calls) if is_backward)
        return next(backwards, len(self.calls))

    @property
    def keys(self) -> tuple[int | None, ...]:
        """Where the first parameter of each member lies."""
        return tuple(member.key for member in self.members)

    @property
    def are_apart(self) -> bool:
        """True where members are of different modules, but for what a checkpoint has dropped."""
        keys = [key for at, key in enumerate(self.keys) if at not in self.left_out]
        return len({*keys}) == len(keys) and None not in keys

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

    def _parameters_there(self, arriving: Sequence[torch.nn.Parameter] = ()) -> int:
        """Bytes of members' parameters, and of ``arriving``, where FSDP2 gathers them; else none.

        It keeps a parameter and frees its memory.
        """
        if not self.follows_parameters:
            return 0
        alive = (*(reference() for reference in self.parameters()), *arriving)
        found = (
            part
            for own in alive
            if own is not None
            for part in autograd.inner_tensors(own) or [own]
        )
        storages = {part.untyped_storage()._cdata: part.untyped_storage() for part in found}
        return sum(storage.nbytes() for storage in storages.values())

    def graph_of(self, number: int) -> SeenGraph:
        """The graph of forward ``number``."""
        return SeenGraph(self.backward, self.num_outputs, self.tangent_bytes)

    def parameters(self) -> tuple[weakref.ref[Any], ...]:
        """Of all members; what two of them share is there twice."""
        return tuple(own for member in self.members for own in member.parameters)

    @property
    def is_run_again(self) -> bool:
        """True where a checkpoint runs forwards again, which are some of several."""
        keys = {key for step in self.checkpointed for key in step.keys}
        return len(self.checkpointed) > 1 and keys.issuperset(self.keys)

    def as_checkpointed(self) -> CheckpointedForward:
        """The step's forwards as those of a checkpoint."""
        return CheckpointedForward(self.keys, self.parameters(), self.inputs)

    @property
    def has_backward(self) -> bool:
        """True once a backward began."""
        return any(is_backward for is_backward, _ in self.calls)

    def has_run(self) -> bool:
        """True where every forward had its backward, and no half ran twice."""
        count = len(self.members)
        halves = [(is_backward, at) for is_backward in (False, True) for at in range(count)]
        return sorted(self.calls) == halves

    def is_group(self) -> bool:
        """True for forwards of several modules, and their backwards in the opposite order.

        One module is enough where a checkpoint has dropped forwards of several and runs them again
        bit by bit: each bit is a group, which the others are like, once these are told. In a
        pipeline for several forwards of one module, each with its backward, in any order. Where a
        checkpoint has some run again while others wait, in any order as well.
        """
        count = self.num_members
        if self.is_pipeline:
            alike = len({*self.keys}) == 1 and None not in self.keys
            whole = count >= max(2, self.num_forwards) and self.has_run()
            return whole and alike and not (self.is_mixed or self.is_part)
        if self.has_reruns:
            return count > 1 and self.has_run() and self.are_apart and not self.is_mixed
        order = [(False, at) for at in range(count)] + [(True, at) for at in range(count)][::-1]
        is_told = bool(self.checkpointed) or not self.in_backward
        is_one_of_several = (count > 1 and is_told) or self.is_run_again
        return is_one_of_several and self.calls == order and self.are_apart and not self.is_mixed

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
        for at in self.left_out:  # its backward takes nothing, and leaves nothing
            half, graph = number((True, at)), self.graph_of(at)
            passed |= {(half, position) for position in range(len(graph.tangent_bytes))}
            gone += tuple((half, position, half) for position in range(len(graph.backward.results)))
        made = self._gradients_made()
        new_gradients = fixed.new_gradients + sum(made.values())
        kept = itertools.chain(
            *(step.inputs.items() for step in self.checkpointed), self.inputs.items()
        )
        inputs = sum(dict(kept).values())
        return Group(
            num_members=count,
            fixed=replace(fixed, inputs=inputs, new_gradients=new_gradients),
            gone=gone,
            passed=tuple(sorted(passed)),
            interludes=tuple(self.between.interludes(made, self._given_gradients())),
            shares=self._shares(),
            order=self.order if self.is_ordered else (),
        )

    @property
    def order(self) -> HalfOrder:
        """The halves as they ran."""
        return tuple((member, is_backward) for is_backward, member in self.calls)

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

    def _given_gradients(self) -> Mapping[int, int]:
        """Backward -> bytes of gradients that the user's code gave to it and let go of."""
        found: collections.Counter[int] = collections.Counter()
        for own in self.tangents:
            if (own.half, own.position) not in self.passed:
                found[own.call] += own.num_bytes
        return found


def _parameters(args: Sequence[Any]) -> list[torch.nn.Parameter]:
    return [value for value in args if isinstance(value, torch.nn.Parameter)]


def key_of(parameter: torch.nn.Parameter) -> int:
    """Where a parameter lies; of one that FSDP2 gathers anew in each step always the same.

    Its address is no such thing: parameters of two blocks may be gathered in the same place.
    """
    return hash((parameter.untyped_storage()._cdata, parameter.storage_offset()))


def first_key(args: Sequence[Any]) -> int | None:
    """Where the first parameter of a forward lies; None: it has none."""
    parameters = _parameters(owned(args))
    return key_of(parameters[0]) if parameters else None


def _member(args: Sequence[Any]) -> Member:
    parameters = _parameters(args)
    key = key_of(parameters[0]) if parameters else None
    return Member(key=key, parameters=[weakref.ref(parameter) for parameter in parameters])
