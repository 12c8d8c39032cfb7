"""Watches how autograd calls graphs: which live steps belong together, what lies between them.

In the step that is watched nothing is assumed. What a half returns is followed until it is gone;
what it is given is looked up among the results of earlier halves; on a CPU memory is read between
the halves, while the user's own code runs.
"""

import collections
import gc
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from memo_runtime.leases import leases

from memo_compile.driver.around import parameters_around
from memo_compile.driver.between import Between
from memo_compile.driver.checkpoints import CheckpointedForward
from memo_compile.driver.declared import stages_around
from memo_compile.driver.facts import gradient_bytes
from memo_compile.driver.owners import owned
from memo_compile.step.joint_step import HalfOrder, JointStep, nested_order
from memo_compile.step.problem import FixedBytes, Half
from memo_compile.torch_private import autograd

if TYPE_CHECKING:
    from memo_compile.driver.part import StepPart

MAX_CALLS = 4096
"""A step of more halves is not planned: something keeps it from ever ending."""

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

    part: "StepPart"
    """Its graph."""
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
    """How many of a forward's results are the user's; what is saved for the backward follows."""
    tangent_bytes: Mapping[str, int]


@dataclass(slots=True, eq=False)
class StepWatch:
    """What was seen of some graphs since no step of any was live."""

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
    """The forwards are microbatches of a pipeline's stages, in any order."""
    num_forwards: int = 0
    """In a pipeline how many a whole step has, as declared."""
    is_part: bool = False
    """The rank has several stages, and all of them are a step."""
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

    def begin(self, half: HalfCall, args: Sequence[Any], part: "StepPart | None" = None) -> None:
        """A half is about to run on ``args``; of a forward ``part`` is the graph."""
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
            self.members += () if part is None else (_member(part, args),)
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
        if part is not None:
            member = _member(part, args)
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
        if self.samples and not self.is_step():  # else all halves have run: it is over
            freed = (own.num_bytes for own in self.tangents if own.is_freed_in(index))
            self.between.begin(leases.num_live(), sum(freed))
            self._gathered = self._parameters_there()

    def stop(self) -> None:
        """Nothing more is looked at."""
        self.between.stop()

    def forget_memory(self) -> None:
        """A graph was compiled while the step ran: what that took of memory is not the step's."""
        self.stop()
        self.samples, self.learns = False, True
        self.between.found.clear()

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
            (weakref.ref(own), gradient_bytes([own])) for own in parameters if own.grad is not None
        ]

    def existing_gradient_bytes(self) -> int:
        """Bytes of gradients that were there before the step."""
        found = ((reference(), num_bytes) for reference, num_bytes in self.existing)
        return sum({id(own): num_bytes for own, num_bytes in found if own is not None}.values())

    def _look_for_gradients(self, index: int) -> None:
        """Notes for call ``index`` which parameters of ``around`` have a gradient by now."""
        members = {id(own()) for own in self.parameters()}
        waiting = []
        for reference in self.around:
            own = reference()
            if own is None or id(own) in members:
                continue
            if own.grad is not None:
                self.made.append((index, gradient_bytes([own])))
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
        """Bytes of the results of backwards that are there still."""
        gradients = (result for result in self.results if result.half[0])
        return sum(result.num_bytes for result in gradients if not result.storage.expired())

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

    @property
    def parts(self) -> "tuple[StepPart, ...]":
        """Per forward its graph."""
        return tuple(member.part for member in self.members)

    def graph_of(self, number: int) -> SeenGraph:
        """The graph of forward ``number``."""
        return self.members[number].part.graph

    def parameters(self) -> tuple[weakref.ref[Any], ...]:
        """Of all members; what two of them share is there twice."""
        return tuple(own for member in self.members for own in member.parameters)

    @property
    def num_dropped(self) -> int:
        """Of how many forwards that a checkpoint dropped these are some, run again; 0: of none."""
        keys = {key for step in self.checkpointed for key in step.keys}
        is_run_again = len(self.checkpointed) > 1 and keys.issuperset(self.keys)
        return len(self.checkpointed) if is_run_again else 0

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

    def is_step(self) -> bool:
        """True for forwards that can be planned as one step: told apart, each with its backward.

        They are of several modules or of several graphs, and their backwards come in the opposite
        order. One module is enough where a checkpoint has dropped forwards of several and runs them
        again bit by bit: each bit is a step, which the others are like, once these are told. In a
        pipeline they are microbatches of each stage, in any order. Where a checkpoint has some run
        again while others wait, in any order as well.
        """
        if self.is_mixed:
            return False
        count, are_several = self.num_members, len({*self.parts}) > 1
        if self.is_pipeline:
            is_of_one = len({*self.keys}) == 1 and None not in self.keys
            is_whole = count >= max(2, self.num_forwards) and self.has_run()
            return is_whole and (is_of_one or self.is_part or are_several)
        if not (are_several or self.are_apart):
            return False
        if self.has_reruns:
            return count > 1 and self.has_run()
        is_told = bool(self.checkpointed) or not self.in_backward
        is_one_of_several = (count > 1 and is_told) or self.num_dropped > 0
        return is_one_of_several and self.order == nested_order(count)

    def joint(self, fixed: FixedBytes) -> JointStep:
        """What was seen, for a plan; ``fixed`` is of all members, without their inputs.

        Gradients of other modules count from when they were seen. Those that were there already
        when the step began are in ``fixed``.
        """
        parts = self.parts[: self.num_members]
        numbers = {part: number for number, part in enumerate(dict.fromkeys(parts))}
        made = self._gradients_made()
        inputs = dict(self.inputs)
        for step in self.checkpointed:
            inputs |= step.inputs
        fixed = replace(
            fixed,
            inputs=sum(inputs.values()),
            new_gradients=fixed.new_gradients + sum(made.values()),
        )
        return JointStep(
            graphs=tuple(numbers[part] for part in parts),
            fixed=fixed,
            gone=tuple(self._gone()),
            passed=tuple(sorted(self._passed())),
            interludes=tuple(self.between.interludes(made, self._given_gradients())),
            shares=self._shares(),
            order=self.order if self.is_ordered else (),
        )

    def _gone(self) -> Iterator[tuple[int, int, int]]:
        """As of ``JointStep``. The backward of a forward that was dropped leaves nothing."""
        number = {half: at for at, half in enumerate(self.calls)}
        for result in self.results:
            is_backward, member = result.half
            is_users = is_backward or result.position < self.graph_of(member).num_outputs
            if is_users and result.is_gone and result.alive_at < 2 * self.num_members - 1:
                yield number[result.half], result.position, result.alive_at
        for member in self.left_out:
            half = number[True, member]
            for position in range(len(self.graph_of(member).backward.results)):
                yield half, position, half

    def _passed(self) -> set[tuple[int, int]]:
        """As of ``JointStep``. The backward of a forward that was dropped is given nothing."""
        number = {half: at for at, half in enumerate(self.calls)}
        found = set()
        for half, position in self.passed:
            graph = self.graph_of(half[1])
            name = graph.backward.arguments[position] if half[0] else ""
            if name in graph.tangent_bytes:
                found.add((number[half], list(graph.tangent_bytes).index(name)))
        for member in self.left_out:
            num_tangents = len(self.graph_of(member).tangent_bytes)
            found |= {(number[True, member], position) for position in range(num_tangents)}
        return found

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


def _member(part: "StepPart", args: Sequence[Any]) -> Member:
    parameters = _parameters(args)
    key = key_of(parameters[0]) if parameters else None
    return Member(
        part=part, key=key, parameters=[weakref.ref(parameter) for parameter in parameters]
    )
