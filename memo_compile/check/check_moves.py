"""The independent check that a step with moves computes what the step without them computes.

``moved`` must run the regions of ``original`` in the same order, and begin its collectives in the
order that all ranks keep (``floating.py``), on values that hold the same bytes. It may wait for a
collective anywhere before the result is read. Both steps are replayed side by side
(``check_contents.py``): every byte is named by the buffer that wrote it and by its place in the
storage; a copy takes these names along, and a RECOMPUTE call writes the names that its
``Recomputation`` declares.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from memo_compile.check.check_contents import MAX_PROBLEMS, Pieces, StepContents, misshapen_calls
from memo_compile.check.floating import FloatingCalls
from memo_compile.step.movable import Layer, MovableStep, RecomputeRegion
from memo_compile.step.plans import CheckVerdict
from memo_compile.step.problem import ALIGNMENT_BYTES, CallKind, Problem, StepCall, Storage

_ORDERED = (CallKind.RUN, CallKind.ISSUE)
"""Calls that stay in the order of the step without moves, unless they float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """What a RECOMPUTE call reads and makes, by position, in names of the step without moves.

    An output of fewer rows than the value it stands for holds the first rows. ``makers`` are the
    calls of the forward whose operators are recomputed, several where a region ran in tiles. What
    other calls write into the outputs of these is not recomputed.
    """

    makers: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def recomputations_of(
    step: MovableStep, moved: Problem, regions: Iterable[RecomputeRegion]
) -> dict[str, Recomputation]:
    """Returns what each RECOMPUTE call of ``moved`` must make, by the call's name.

    The call's layer is the one of the region's class that has a slot among the values of the
    *reader*: the first call of the backward that reads what was recomputed, or, if none does by
    that name, the next call. The names of the recomputed values themselves prove nothing. A call
    without such a layer is left out, so that its result matches no value.
    """
    by_name = {region.key.region: region for region in regions}
    owners: dict[tuple[str, str], Layer] = {}
    for layer in step.layers:
        for value in layer.values:
            owners.setdefault((layer.class_key, value), layer)
    original = {call.name: call for call in step.problem.calls}
    recomputations: dict[str, Recomputation] = {}
    following: StepCall | None = None
    first_reader: dict[str, StepCall] = {}
    for call in reversed(moved.calls):
        if call.kind in _ORDERED:
            following = original.get(call.name, following)
            if following is not None:
                first_reader.update(dict.fromkeys(call.touched, following))
        region = by_name.get(call.region)
        written = (*call.outputs, *(into.value for into in call.into))
        reader = next(
            (first_reader[value] for value in written if value in first_reader), following
        )
        if call.kind is not CallKind.RECOMPUTE or region is None or reader is None:
            continue
        layers = (owners.get((region.key.class_key, value)) for value in reader.touched)
        for layer in filter(None, layers):
            recomputed = _recomputation(layer, region)
            if not set(reader.touched).isdisjoint(recomputed.outputs):
                recomputations[call.name] = recomputed
                break
    return recomputations


def _recomputation(layer: Layer, region: RecomputeRegion) -> Recomputation:
    """Returns what ``region`` reads and makes where it recomputes slots of ``layer``."""
    inputs = []
    for source in region.inputs:
        if source.slot is not None:
            inputs.append(layer.values[source.slot])
        else:
            assert source.forward_input is not None, f"{region.key.region}: an input from nowhere"
            inputs.append(layer.inputs[source.forward_input])
    outputs = tuple(layer.values[slot] for slot in region.key.slots)
    return Recomputation(makers=layer.calls, inputs=tuple(inputs), outputs=outputs)


def check_moves(
    original: Problem, moved: Problem, recomputations: Mapping[str, Recomputation] | None = None
) -> CheckVerdict:
    """Returns why ``moved`` may compute something else than ``original``, a sentence each.

    ``recomputations`` says by call name what RECOMPUTE calls make; without it nothing that was
    recomputed may be read.
    """
    misshapen = (*misshapen_calls(original), *misshapen_calls(moved))
    if misshapen:
        return CheckVerdict(problems=misshapen[:MAX_PROBLEMS])
    return _Comparison(original, moved, recomputations or {}).run()


class _Comparison:
    """Replays both steps side by side."""

    def __init__(
        self, original: Problem, moved: Problem, recomputations: Mapping[str, Recomputation]
    ) -> None:
        self.problems: list[str] = []
        self._complain = self.problems.append
        self.recomputations = recomputations
        self.problem = original
        on_device = replace(original, host_weights=())  # its calls read weights wherever they are
        self.original = StepContents(on_device, lambda text: self._complain(f"unmoved: {text}"))
        self.moved = StepContents(moved, self._complain, self._recomputed)
        self.stands_for: dict[str, str] = {}
        """Value of the moved step -> the value of the original that it must equal."""
        self.num_reads = 0
        """How many values were compared."""
        self._calls_left = list(reversed(original.calls))
        """Calls of the original that have not run, the next one last."""
        waits = (call for call in original.calls if call.kind is CallKind.COMM_WAIT)
        self._waits_left = {call.name: call for call in waits}
        """Waits for collectives that the moved step has not come to yet."""
        self._floating = FloatingCalls(original)
        """Calls around collectives that need not keep their place among the other calls."""
        self._float_reads: dict[str, tuple[StepCall, list[Pieces]]] = {}
        """Floating calls that only one step has come to: the call, and the bytes that it reads."""
        self._replayed: set[str] = set()
        """Calls of the original that were replayed before their turn (``_require_gathered``)."""

    def run(self) -> CheckVerdict:
        """Replays the moved step, each ordered call of it beside the original's next one."""
        self._compare_surroundings()
        for call in self.moved.problem.calls:
            if call.kind is CallKind.COMM_WAIT:
                self._wait_for_ranks(call)
            elif call.name in self._floating.names:
                self._replay_floating(call, self.moved)
            elif call.kind in _ORDERED:
                if not self._replay_both(call, self._next_of_original()):
                    break
            else:
                self._replay_added(call)
            if len(self.problems) >= MAX_PROBLEMS:
                break
        else:  # to the end: what is left of the original is missing
            self.moved.finish()
            while (missing := self._next_of_original()) is not None:
                self._complain(f"{missing.name} is missing")
            left = (*self._waits_left, *self._float_reads)
            self.problems += [f"{name} is missing" for name in left]
            calls = self.moved.problem.calls
            issues = [call for call in calls if call.kind is CallKind.ISSUE]
            fault = self._floating.disordered(issues)
            self.problems += [] if fault is None else [fault]
        return CheckVerdict(problems=tuple(self.problems[:MAX_PROBLEMS]), num_reads=self.num_reads)

    def _next_of_original(self) -> StepCall | None:
        """Returns the original's next ordered call; replays floating calls and waits before it."""
        while self._calls_left:
            call = self._calls_left.pop()
            if call.name in self._replayed:
                continue
            if call.name in self._floating.names:
                self._replay_floating(call, self.original)
            elif call.kind is CallKind.COMM_WAIT:
                self.original.replay(call)
            else:
                return call
        return None

    def _require_gathered(self, value: str) -> None:
        """Replays the gather of ``value`` in the original: a recomputation may read it earlier."""
        if value in self.original.storage_of:
            return
        for call in self._floating.brings.get(value, ()):
            if call.kind is CallKind.COMM_WAIT:
                self.original.replay(call)
            elif call.name not in self._replayed:
                self._replay_floating(call, self.original)
            self._replayed.add(call.name)

    def _replay_floating(self, call: StepCall, step: StepContents) -> None:
        """Replays a floating call in one step; the second of both steps compares what it reads."""
        pieces = [step.pieces_of(value) for value in call.inputs]
        if call.name not in self._float_reads:
            self._float_reads[call.name] = call, pieces
        elif self._float_reads.pop(call.name) != (call, pieces):
            self._complain(f"{call.name} reads something else than in the step without moves")
        step.replay(call)
        self.num_reads += len(pieces)

    def _wait_for_ranks(self, call: StepCall) -> None:
        """Replays a wait of the moved step, which must be a wait of the original elsewhere."""
        expected = self._waits_left.pop(call.name, None)
        inputs = tuple(self.stands_for.get(value, value) for value in call.inputs)
        got = (_work_of(call), call.waits_for, inputs)
        if expected is None or got != (_work_of(expected), expected.waits_for, expected.inputs):
            self._complain(f"{call.name} is no wait of the step without moves")
        self.moved.replay(call)

    def _compare_surroundings(self) -> None:
        """Checks that the steps have the same inputs, halves, memory and regions, moves aside."""
        original, moved = self.problem, self.moved.problem
        for name in ("inputs", "halves", "fixed", "layer_weights", "host_weights"):
            if getattr(original, name) != getattr(moved, name):
                self._complain(f"the moved step has other {name}")
        for name, region in original.regions.items():
            if moved.regions.get(name, region) != region:
                self._complain(f"region {name} is not the same in the moved step")

    def _replay_both(self, call: StepCall, expected: StepCall | None) -> bool:
        """Replays ``call`` in both steps; returns False if they run different regions."""
        if expected is None or _work_of(call) != _work_of(expected):
            what = "nothing" if expected is None else expected.name
            self._complain(f"{call.name} runs where the step without moves runs {what}")
            return False
        for value, stand_in in zip(expected.inputs, call.inputs, strict=True):
            self._compare(call, value, stand_in)
        for into, stand_in_into in zip(expected.into, call.into, strict=True):
            self._compare(call, into.value, stand_in_into.value)
        self.original.replay(expected)
        self.moved.replay(call)
        return True

    def _replay_added(self, call: StepCall) -> None:
        """Replays a copy, a wait or a recomputation of the moved step alone."""
        recomputation = self.recomputations.get(call.name)
        if call.kind is CallKind.RECOMPUTE and recomputation is not None:
            counts = (len(recomputation.inputs), len(recomputation.outputs))
            if counts != (len(call.inputs), len(call.outputs)):
                self._complain(f"{call.name}: expected (inputs, outputs) {counts}")
                return
            for value, stand_in in zip(recomputation.inputs, call.inputs, strict=True):
                self._compare(call, value, stand_in)
            self.stands_for.update(zip(call.outputs, recomputation.outputs, strict=True))
        self.moved.replay(call)
        if call.kind is CallKind.RELOAD:
            source = self.moved.source_of.get(call.outputs[0])
            if source is not None:
                self.stands_for[call.outputs[0]] = self.stands_for.get(source, source)

    def _recomputed(self, call: StepCall, buffer: int) -> Pieces | None:
        """Returns what ``buffer`` holds after the RECOMPUTE ``call``: the original's value."""
        recomputation = self.recomputations.get(call.name)
        if recomputation is None or call.kind is not CallKind.RECOMPUTE:
            return None
        outputs = self.moved.problem.regions[call.region].outputs
        for output, value in zip(outputs, recomputation.outputs, strict=True):
            if output.storage is Storage.ARENA and output.index == buffer:
                pieces = self.original.pieces_of(value)
                makers = tuple(f"{maker}/" for maker in recomputation.makers)
                is_recomputed = all(tag.startswith(makers) for _, _, tag in pieces)
                return pieces if is_recomputed else None
        return None

    def _compare(self, call: StepCall, value: str, stand_in: str) -> None:
        """Complains unless ``stand_in`` of the moved step is, bit by bit, ``value``."""
        self.num_reads += 1
        represented = self.stands_for.get(stand_in, stand_in)
        if represented != value:
            self._complain(
                f"{call.name} reads {stand_in}, which is {represented}, where it must read {value}"
            )
            return
        self._require_gathered(value)
        expected, got = self.original.pieces_of(value), self.moved.pieces_of(stand_in)
        maker = self.original.maker_of(value)
        if expected != got and not _lacks_only_alignment(got, expected, maker):
            self._complain(
                f"{call.name} reads {stand_in} for {value}: expected bytes {_text(expected)}, "
                f"got {_text(got)}"
            )


def _work_of(call: StepCall) -> tuple[object, ...]:
    """Returns what must be equal in both steps: all but the names of values that it touches."""
    into = tuple((target.buffer, target.offset_bytes) for target in call.into)
    work = (call.name, call.kind, call.region, call.half)
    return *work, len(call.inputs), call.outputs, into, call.reads


def _lacks_only_alignment(got: Pieces, expected: Pieces, maker: str | None) -> bool:
    """True when ``got`` equals ``expected`` up to its end, which is short by less than alignment.

    The missing bytes must be of the last writer of ``got``, or those that ``maker`` left at the end
    of its buffer: a last tile's size, rounded up, need not reach the end of the whole's.
    ``check_reads.py`` checks that copies bring all elements of a value.
    """
    if not got or not expected:
        return False
    _, end, writer = got[-1]
    beginning = [(first, min(last, end), tag) for first, last, tag in expected if first < end]
    missing = {tag for _, last, tag in expected if last > end}
    is_short = 0 < expected[-1][1] - end < ALIGNMENT_BYTES
    return is_short and beginning == got and missing <= {writer, maker}


def _text(pieces: Pieces) -> str:
    return ", ".join(f"[{start}, {end}) of {tag}" for start, end, tag in pieces) or "none"
