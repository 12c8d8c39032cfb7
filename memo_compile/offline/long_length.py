"""A step at any length from the one that was traced at a length that tells all others.

What a step's numbers (sizes, strides, offsets, bytes, operations) are of the length are polynomials
with integers that are small beside LONG. So the digits of a number at length LONG, in base LONG,
are the polynomial (Kronecker's substitution). Tiles have a part of the tokens, so that the base is
a sixteenth of it. Seconds are made of operations and bytes (``costs.work``). A digit that is not
small raises NotAtLengthError: such a model is traced at its own length.

Which tensors are saved, and in which order the operators of a region run, are those of a long
sequence: torch's partitioner and Inductor compare sizes of tokens with sizes of weights. A sequence
of fewer tokens than LEAST_PER_WIDTH of the model's width may be partitioned differently and is
traced itself. No torch here.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.work import NodeCost, roofline_s, work_seconds
from memo_compile.errors import InputError
from memo_compile.offline.remembered_step import (
    ClassRecord,
    RegionRecord,
    StepRecord,
    Threshold,
)
from memo_compile.planners.comm_windows import whole_compute_s
from memo_compile.step.movable import RecomputeKey, StepCosts
from memo_compile.step.problem import LEFT_OUT, align
from memo_compile.step.serialise import restore

LONG = 2**42
"""Tokens of a sequence on one device. A sixteenth of it is many times a weight's bytes. Logits of a
few sequences have under 2^63 bytes, which torch's integers hold (``MOST_WORDS``)."""

PARTS = 16
"""Most tiles: a number may be a multiple of such a part of the tokens."""

GRANULE = 1024
"""Lengths that are multiples of this are cut into the same tiles as LONG."""

LEAST_PER_WIDTH = 2
"""Tokens for each number of the hidden state, at least."""

MOST_WORDS = 2**63 // (4 * LONG)
"""Of the vocabulary, times sequences: with more, float32 logits have too many bytes at LONG."""

MAX_BATCH = 8
"""Of more sequences, a product's operations may be as many as those of a longer one."""

SMALL = 4
"""A digit is at most the base over this: a larger one may be a carry."""


class NotAtLengthError(Exception):
    """What was traced does not tell of this length."""


def _digits(number: int, base: int) -> list[int]:
    """In base ``base``, lowest first, each between minus and plus half of it."""
    found = []
    while number:
        digit = (number + base // 2) % base - base // 2
        if abs(digit) > base // SMALL:
            raise NotAtLengthError(f"{number} is no polynomial of the length")
        found.append(digit)
        number = (number - digit) // base
    return found


class Numbers(dict[str, int]):
    """Numbers, as text, of a step at ``long`` tokens -> those at ``length``, in JSON's parser."""

    def __init__(self, *, long: int, length: int) -> None:
        super().__init__()
        self.base, self.parts = long // PARTS, length // PARTS
        self._most = self.base // SMALL

    def __missing__(self, text: str) -> int:
        self[text] = found = self.of(int(text))
        return found

    def of(self, number: int) -> int:
        """Raises NotAtLengthError: it is no polynomial."""
        if abs(number) <= self._most:
            return number
        return sum(
            digit * self.parts**power for power, digit in enumerate(_digits(number, self.base))
        )

    def restored(self, text: str, kind: Any, what: str) -> Any:
        """Data of ``kind`` whose JSON at ``long`` is ``text``. Raises NotAtLengthError."""
        try:
            body = json.loads(text, parse_int=self.__getitem__)
            _align(body)
            return restore(body, kind, what)
        except (InputError, ValueError) as error:
            raise NotAtLengthError(str(error)) from error


def _align(body: Any) -> None:
    """Bytes of buffers are multiples of what they are aligned to, at each length."""
    regions = [*body.get("problem", {}).get("regions", {}).values()]
    regions += filter(None, (body.get(name) for name in ("estimate", "profile")))
    sized = [part for region in regions for part in (*region["buffers"], *region["outputs"])]
    sized += [slot for own in body.get("classes", ()) for slot in own["slots"]]
    for part in sized:
        part["size_bytes"] = align(part["size_bytes"])


@dataclass(frozen=True, slots=True, kw_only=True)
class LongCost:
    """Work of one operator, in parts of the tokens."""

    flops: tuple[int, ...]
    """The polynomial, lowest power first."""
    bytes: tuple[int, ...]
    looked_up: tuple[tuple[int, ...], ...] = field(default=(), metadata=LEFT_OUT)
    """Bytes of which the fewer are read as well."""

    @classmethod
    def of(cls, cost: NodeCost, base: int, looked_up: Sequence[int] = ()) -> Self:
        """Of an operator on PARTS times ``base`` tokens. Raises NotAtLengthError.

        Operations are a multiple of the tokens or of their square, so that their one digit may be
        as large as the base.
        """
        flops, powers = cost.flops, 0
        while flops and flops % base == 0:
            flops, powers = flops // base, powers + 1
        if flops >= base:
            raise NotAtLengthError(f"{cost.flops} operations are no power of the length")
        counts = (0,) * powers + (flops,) if flops else ()
        return cls(
            flops=counts,
            bytes=tuple(_digits(cost.bytes - min(looked_up, default=0), base)),
            looked_up=tuple(tuple(_digits(some, base)) for some in looked_up),
        )

    def at(self, parts: int) -> NodeCost:
        """At a length of PARTS times ``parts``."""
        fewer = min((_value(some, parts) for some in self.looked_up), default=0)
        return NodeCost(flops=_value(self.flops, parts), bytes=_value(self.bytes, parts) + fewer)


def _value(digits: Iterable[int], parts: int) -> int:
    return sum(digit * parts**power for power, digit in enumerate(digits))


LongWork = tuple[LongCost, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassWork:
    """What a layer class computes."""

    all: LongWork
    """Of every operator of the forward, views left out."""
    ops: LongWork
    """Of each of ``ClassRecord.ops``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedFlops:
    """Operations of an operator that several calls run."""

    flops: tuple[int, ...]
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRegion:
    """A recompute region at ``long`` tokens."""

    key: RecomputeKey
    text: str
    """A RegionRecord."""
    work: LongWork = ()
    """Where it was lowered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongStep:
    """A step at ``long`` tokens of a sequence on one device."""

    long: int
    tile_above: Threshold
    drop_above: Threshold
    text: str
    """The StepRecord, without thresholds and recompute regions."""
    region_work: Mapping[str, LongWork]
    whole_work: Mapping[str, LongWork]
    """Of what runs in tiles, as it was before."""
    class_work: tuple[ClassWork, ...]
    model_flops: tuple[RepeatedFlops, ...]
    regions: tuple[LongRegion, ...] = ()

    def suits(self, length: int, tile_above_bytes: int, drop_above_bytes: int) -> bool:
        """True where these bounds make the same tiles at ``length``, and save the same."""
        numbers = Numbers(long=self.long, length=length)
        above = threshold_at(self.tile_above, numbers), threshold_at(self.drop_above, numbers)
        return above[0].tells_like(tile_above_bytes) and above[1].tells_like(drop_above_bytes)

    def at(self, length: int, profile: HardwareProfile) -> StepRecord:
        """The step at ``length``. Raises NotAtLengthError."""
        numbers = Numbers(long=self.long, length=length)
        step: StepRecord = numbers.restored(self.text, StepRecord, "step")
        region_s = self._seconds(self.region_work, numbers.parts, profile)
        costs = replace(step.costs, region_s=region_s)
        flops = (own.times * _value(own.flops, numbers.parts) for own in self.model_flops)
        whole_s = self._seconds(self.whole_work, numbers.parts, profile)
        step = replace(
            step,
            tile_above=threshold_at(self.tile_above, numbers),
            drop_above=threshold_at(self.drop_above, numbers),
            costs=costs,
            model_flops=sum(flops),
            whole_compute_s=whole_compute_s(step.problem, step.whole, costs, whole_s),
            regions=tuple(region_at(region, numbers, profile) for region in self.regions),
        )
        return replace(step, classes=tuple(self._classes(step, costs, numbers.parts, profile)))

    @staticmethod
    def _seconds(
        work: Mapping[str, LongWork], parts: int, profile: HardwareProfile
    ) -> dict[str, float]:
        return {
            name: work_seconds((cost.at(parts) for cost in own), profile)
            for name, own in work.items()
        }

    def _classes(
        self, step: StepRecord, costs: StepCosts, parts: int, profile: HardwareProfile
    ) -> Iterable[ClassRecord]:
        """As ``driver.movable_step`` shares the seconds of a layer's calls among its operators."""
        calls = {call.name: call for call in step.problem.calls}
        for own, work in zip(step.classes, self.class_work, strict=True):
            layer = next(layer for layer in step.layers if layer.class_key == own.key)
            total = sum(roofline_s(cost.at(parts), profile) for cost in work.all)
            calls_s = sum(costs.call_s(calls[name]) for name in layer.calls)
            scale = calls_s / total if total > 0 else 0.0
            ops = (
                replace(op, seconds=roofline_s(cost.at(parts), profile) * scale)
                for op, cost in zip(own.ops, work.ops, strict=True)
            )
            yield replace(own, ops=tuple(ops))


def threshold_at(above: Threshold, numbers: Numbers) -> Threshold:
    """``above`` with the sizes of another length, and the least bound that divides them alike.

    Raises NotAtLengthError: none does.
    """
    flags = above.above(above.bound_bytes)
    sizes = tuple(map(numbers.of, above.sizes))
    kept = [size for size, is_above in zip(sizes, flags, strict=True) if not is_above]
    found = Threshold(bound_bytes=max(kept, default=0), sizes=sizes)
    if found.above(found.bound_bytes) != flags:
        raise NotAtLengthError("sizes are in another order")
    return found


def region_at(region: LongRegion, numbers: Numbers, profile: HardwareProfile) -> RegionRecord:
    """A recompute region at another length. Raises NotAtLengthError."""
    record: RegionRecord = numbers.restored(region.text, RegionRecord, "region")
    name = record.key.region  # tells the rows
    work = (cost.at(numbers.parts) for cost in region.work)
    return replace(
        record,
        estimate=record.estimate and replace(record.estimate, name=name),
        profile=record.profile and replace(record.profile, name=name),
        seconds=work_seconds(work, profile),
    )
