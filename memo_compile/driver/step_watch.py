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

from memo_compile.driver.around import apart, parameters_around
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
    """(half, position of an argument) that another half has made, or that stays measured."""
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
        """Leaves ``storages`` out, which are there before and after the step. Called first."""
        self.kept = frozenset(storage._cdata for storage in storages)
        self.between.sampler.apart = tuple(storages)

    def begin(self, half: HalfCall, args: Sequence[Any], part: "StepPart | None" = None) -> None:
        """Notes that a half is about to run on ``args``; of a forward ``part`` is the graph."""
        is_backward, _ = half
        args = args if is_backward else owned(args)  # a DTensor in place of its part
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
        made_storages = self._follow_results(index)
        if part is not None:
            member = _member(part, args)
            member.share = stages_around(args).share if self.is_pipeline else None
            if not self.is_pipeline or member.key not in self.keys:  # later ones are this step's
                self._note_existing(_parameters(args))
            self.members.append(member)
        if self.learns:
            self._look_at_parameters(index, is_backward=is_backward)
        self._note_given(index, args, made_storages)

    def _follow_results(self, index: int) -> set[int]:
        """Notes which results are gone before call ``index``; returns storages that halves made."""
        made_storages: set[int] = set()
        for result in self.results:
            result.is_gone |= result.storage.expired()
            if not result.is_gone:
                result.alive_at = index
                if not result.is_given:
                    made_storages.add(result.storage.cdata)
        return made_storages

    def _note_order(self, *, is_backward: bool) -> None:
        """Notes whether a checkpoint has dropped the last forward, or runs one again by this half.

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

    def _note_given(self, index: int, args: Sequence[Any], made_storages: Set[int]) -> None:
        """Notes what a half is given: by other halves, in ``made_storages``, or by the user."""
        half = self.calls[index]
        is_backward, member = half
        names = self.graph_of(member).backward.arguments if is_backward else ()
        tangent_bytes = self.graph_of(member).tangent_bytes if is_backward else {}
        given_storages = set()
        for position, value in enumerate(args):
            if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
                continue
            storage = value.untyped_storage()
            given_storages.add(storage._cdata)
            if storage._cdata in made_storages:
                self.passed.add((half, position))
            elif storage._cdata in self.kept:  # a buffer of the pipeline: an input all the time
                self.inputs[storage._cdata] = storage.nbytes()
                self.passed.add((half, position))
            elif not is_backward:
                self.inputs[storage._cdata] = storage.nbytes()
            elif names[position] in tangent_bytes:
                for reference, num_bytes in autograd.storages_of([value]):
                    self.tangents.append(_Tangent(index, half, position, reference, num_bytes))
        self._given = frozenset(given_storages)

    def end(self, half: HalfCall, results: Sequence[Any]) -> None:
        """Follows the ``results`` that ``half`` has returned."""
        is_backward, _ = half
        if len(self.calls) >= MAX_CALLS or (self.is_brief and not is_backward):
            return
        index = len(self.calls) - 1
        for result in self.results:  # what went while the half ran is not freed by what follows
            result.is_gone |= result.storage.expired()
        seen_storages = set(self._given)
        for position, value in enumerate(results):
            for storage, num_bytes in autograd.storages_of([value]):
                is_given = storage.cdata in seen_storages
                seen_storages.add(storage.cdata)
                self.results.append(_Result(half, position, storage, num_bytes, index, is_given))
        self._given = frozenset()
        if self.samples and not self.is_step():  # else all halves have run: it is over
            freed = (each.num_bytes for each in self.tangents if each.is_freed_in(index))
            self.between.begin(leases.num_live(), sum(freed))
            self._gathered = self._present_bytes()

    def stop(self) -> None:
        """Looks at nothing more."""
        self.between.stop()

    def forget_memory(self) -> None:
        """Forgets what was measured: a graph was compiled while the step ran, in its memory."""
        self.stop()
        self.samples, self.learns = False, True
        self.between.taken.clear()

    def end_interlude(self, arriving: Sequence[torch.nn.Parameter] = ()) -> None:
        """Ends an interlude: what is taken from now on is not the user's code's.

        ``arriving`` are parameters of the member that begins. What FSDP2 has gathered is no user's.
        """
        if not self.between.is_open:
            return
        index = len(self.calls)
        present = (result for result in self.results if not (result.is_gone or result.is_given))
        freed_bytes = sum(result.num_bytes for result in present if result.storage.expired())
        gathered = self._present_bytes(arriving) - self._gathered
        self.between.end(index, freed_bytes, leases.num_live(), gathered)
        for tangent in self.tangents:  # one that user code holds on to is in what was measured
            is_measured = tangent.call in self.between.taken
            if tangent.call == index - 1 and is_measured and not tangent.storage.expired():
                self.passed.add((tangent.half, tangent.position))

    def _look_at_parameters(self, index: int, *, is_backward: bool) -> None:
        """Notes gradients, and what is gathered, when call ``index`` begins."""
        if is_backward:
            self._look_for_gradients(index)
        elif len(self.members) == 2 and not self.checkpointed:
            self._look_around()
        self.most_gathered = max(self.most_gathered, self._present_bytes())

    def _look_around(self) -> None:
        """Notes which parameters of the model around the first two members have no gradient."""
        around = parameters_around(list(alive_values(self.parameters())))
        trained = apart([parameter for parameter in around if parameter.requires_grad])
        self.around = [weakref.ref(parameter) for parameter in trained if parameter.grad is None]
        self._note_existing(trained)

    def _note_existing(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.existing += [
            (weakref.ref(parameter), gradient_bytes([parameter]))
            for parameter in parameters
            if parameter.grad is not None
        ]

    def existing_gradient_bytes(self) -> int:
        """Returns the bytes of gradients that were there before the step."""
        pairs = ((reference(), num_bytes) for reference, num_bytes in self.existing)
        return sum({id(each): num_bytes for each, num_bytes in pairs if each is not None}.values())

    def _look_for_gradients(self, index: int) -> None:
        """Notes for call ``index`` which parameters of ``around`` have a gradient by now."""
        member_ids = {id(reference()) for reference in self.parameters()}
        without_gradient = []
        for parameter in alive_values(self.around):
            if id(parameter) in member_ids:
                continue
            if parameter.grad is not None:
                self.made.append((index, gradient_bytes([parameter])))
            else:
                without_gradient.append(weakref.ref(parameter))
        self.around = without_gradient

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
        """Returns the bytes of the results of backwards that are there still."""
        gradients = (result for result in self.results if result.half[0])
        return sum(result.num_bytes for result in gradients if not result.storage.expired())

    def _present_bytes(self, arriving: Sequence[torch.nn.Parameter] = ()) -> int:
        """Returns the bytes of members' parameters, and of ``arriving``, that are there now.

        FSDP2 gathers a parameter's memory and frees it; 0 without FSDP2.
        """
        if not self.follows_parameters:
            return 0
        storages = {
            part.untyped_storage()._cdata: part.untyped_storage()
            for parameter in (*alive_values(self.parameters()), *arriving)
            for part in autograd.inner_tensors(parameter) or [parameter]
        }
        return sum(storage.nbytes() for storage in storages.values())

    @property
    def parts(self) -> "tuple[StepPart, ...]":
        """Per forward its graph."""
        return tuple(member.part for member in self.members)

    def graph_of(self, number: int) -> SeenGraph:
        """Returns the graph of forward ``number``."""
        return self.members[number].part.graph

    def parameters(self) -> tuple[weakref.ref[Any], ...]:
        """References to those of all members; what two of them share is there twice."""
        return tuple(reference for member in self.members for reference in member.parameters)

    @property
    def num_dropped(self) -> int:
        """How many forwards a checkpoint dropped, some of which these are, run again; 0: none."""
        keys = {key for step in self.checkpointed for key in step.keys}
        is_run_again = len(self.checkpointed) > 1 and keys.issuperset(self.keys)
        return len(self.checkpointed) if is_run_again else 0

    def as_checkpointed(self) -> CheckpointedForward:
        """Returns the step's forwards as those of a checkpoint."""
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
        again bit by bit: each bit is a step like the others. In a pipeline they are microbatches of
        each stage, in any order; so too where a checkpoint reruns some while others wait.
        """
        if self.is_mixed:
            return False
        count, has_several_graphs = self.num_members, len({*self.parts}) > 1
        if self.is_pipeline:
            is_one_module = len({*self.keys}) == 1 and None not in self.keys
            is_whole = count >= max(2, self.num_forwards) and self.has_run()
            return is_whole and (is_one_module or self.is_part or has_several_graphs)
        if not (has_several_graphs or self.are_apart):
            return False
        if self.has_reruns:
            return count > 1 and self.has_run()
        is_round_known = bool(self.checkpointed) or not self.in_backward
        may_be_step = (count > 1 and is_round_known) or self.num_dropped > 0
        return may_be_step and self.order == nested_order(count)

    def joint(self, fixed: FixedBytes) -> JointStep:
        """Returns what was seen, for a plan; ``fixed`` is of all members, without their inputs.

        Gradients of other modules count from when they were seen. Those that were there already
        when the step began are in ``fixed``.
        """
        parts = self.parts[: self.num_members]
        numbers = {part: number for number, part in enumerate(dict.fromkeys(parts))}
        gradients = self._gradients_made()
        inputs = dict(self.inputs)
        for step in self.checkpointed:
            inputs |= step.inputs
        fixed = replace(
            fixed,
            inputs=sum(inputs.values()),
            new_gradients=fixed.new_gradients + sum(gradients.values()),
        )
        return JointStep(
            graphs=tuple(numbers[part] for part in parts),
            fixed=fixed,
            gone=tuple(self._gone()),
            passed=tuple(sorted(self._passed())),
            interludes=tuple(self.between.interludes(gradients, self._given_gradients())),
            shares=self._shares(),
            order=self.order if self.is_ordered else (),
        )

    def _gone(self) -> Iterator[tuple[int, int, int]]:
        """Yields ``JointStep.gone``. The backward of a forward that was dropped leaves nothing."""
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
        """Returns ``JointStep.passed``. The backward of a dropped forward is given nothing."""
        number = {half: at for at, half in enumerate(self.calls)}
        passed = set()
        for half, position in self.passed:
            is_backward, member = half
            graph = self.graph_of(member)
            name = graph.backward.arguments[position] if is_backward else ""
            if name in graph.tangent_bytes:
                passed.add((number[half], list(graph.tangent_bytes).index(name)))
        for member in self.left_out:
            num_tangents = len(self.graph_of(member).tangent_bytes)
            passed |= {(number[True, member], position) for position in range(num_tangents)}
        return passed

    @property
    def order(self) -> HalfOrder:
        """The halves as they ran."""
        return tuple((member, is_backward) for is_backward, member in self.calls)

    def _shares(self) -> tuple[float, ...]:
        shares = [member.share for member in self.members]
        return tuple(share for share in shares if share is not None) if None not in shares else ()

    def _gradients_made(self) -> Mapping[int, int]:
        """Half before which gradients of other modules appear -> bytes; the end for the rest."""
        bytes_at: collections.Counter[int] = collections.Counter()
        for index, num_bytes in self.made:
            bytes_at[index] += num_bytes
        for parameter in alive_values(self.around):
            bytes_at[len(self.calls)] += parameter.nbytes
        return bytes_at

    def _given_gradients(self) -> Mapping[int, int]:
        """Backward -> bytes of gradients that the user's code gave to it and let go of."""
        bytes_at: collections.Counter[int] = collections.Counter()
        for tangent in self.tangents:
            if (tangent.half, tangent.position) not in self.passed:
                bytes_at[tangent.call] += tangent.num_bytes
        return bytes_at


def alive_values(references: Iterable[weakref.ref[Any]]) -> Iterator[Any]:
    """Yields what ``references`` lead to, without what is freed."""
    return (value for value in (reference() for reference in references) if value is not None)


def _parameters(args: Sequence[Any]) -> list[torch.nn.Parameter]:
    return [value for value in args if isinstance(value, torch.nn.Parameter)]


def key_of(parameter: torch.nn.Parameter) -> int:
    """Identifies a parameter by its storage; one that FSDP2 gathers anew in each step has one key.

    An address is no such key: parameters of two blocks may be gathered in the same place.
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
