"""Steps of one model at any length: traced at a length that tells all, looked for before that.

``long_length`` says how. A step that was traced, and every recompute region that was asked for, is
kept in this object and in the user's cache, for all lengths; a length is put in when it is known.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from memo_compile.config import MemoConfig
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.driver.recompute_library import Estimated, Lowered, RegionMaker
from memo_compile.driver.tile_order import Sizes
from memo_compile.errors import UnsupportedGraph, described
from memo_compile.file_store import digest_of
from memo_compile.offline.long_length import (
    LongRegion,
    LongStep,
    LongWork,
    NotAtLengthError,
    Numbers,
    region_at,
)
from memo_compile.offline.offline_step import NotUniform
from memo_compile.offline.remembered_keys import (
    Memory,
    Say,
    ignored_if_wrong,
    in_tiles,
    nobody_watches,
    step_key,
)
from memo_compile.offline.remembered_step import RegionRecord, RememberedRegions, StepRecord
from memo_compile.step.movable import RecomputeKey
from memo_compile.step.serialise import plain, restore

if TYPE_CHECKING:
    from memo_compile.driver.knowledge import StepKnowledge
    from memo_compile.offline.plan_offline import OfflineModel


@dataclass(kw_only=True)
class LongSteps:
    """What is known of a model at ``long`` tokens of a sequence on one device."""

    trace: Callable[[], AbstractContextManager["OfflineModel"]]
    """Traces the model at that length."""
    long: int
    hardware: HardwareProfile
    memory: Memory | None = None
    say: Say = nobody_watches
    has_read: bool = False
    """True where a step was remembered before."""
    _stack: ExitStack = field(default_factory=ExitStack)
    _traced: "OfflineModel | None" = None
    _error: str | None = None
    """Why it cannot be traced at that length."""
    _steps: dict[str, list[LongStep]] = field(default_factory=dict)
    _known: dict[str, "StepKnowledge"] = field(default_factory=dict)
    _sizes: dict[str, Sizes] = field(default_factory=dict)

    def close(self) -> None:
        """What was traced is gone."""
        self._stack.close()

    @property
    def is_traced(self) -> bool:
        """True once the model was traced in this process."""
        return self._traced is not None

    def traced(self) -> "OfflineModel":
        """The model's graph. Raises NotAtLengthError: it has none at this length."""
        if self._error is not None:
            raise NotAtLengthError(self._error)
        if self._traced is None:
            self.say("tracing the model", 2)
            try:
                self._traced = self._stack.enter_context(self.trace())
            except Exception as error:  # of torch at such sizes: the model is traced at its own
                self._error = described(error)
                raise NotAtLengthError(self._error) from error
        return self._traced

    def sizes(self, config: MemoConfig, state: str, length: int) -> Sizes:
        """What the order of tiles is made of, with the optimizer state ``state``."""
        if state not in self._sizes:
            self._sizes[state] = self._read_sizes(config, state)
        found, numbers = self._sizes[state], Numbers(long=self.long, length=length)
        first, second = map(numbers.of, found.products_bytes)
        return found._replace(products_bytes=(first, second))

    def _read_sizes(self, config: MemoConfig, state: str) -> Sizes:
        if self.memory is None:
            return self.traced().sizes(config)
        key = {"kind": "sizes", "state": state, "content": dict(self.memory.content)}
        for body in self.memory.store.read(key):
            with ignored_if_wrong():
                (first, second), constant = body
                return Sizes((int(first), int(second)), int(constant))
        found = self.traced().sizes(config)
        self.memory.store.write(key, plain(found))
        return found

    def record(self, options: MemoConfig, length: int) -> StepRecord | None:
        """What is remembered of the step in the tiles of ``options``."""
        found = self._found(options, length)
        return None if found is None else found.at(length, self.hardware)

    @contextlib.contextmanager
    def recording(
        self, options: MemoConfig, length: int
    ) -> Iterator[tuple[StepRecord, RememberedRegions]]:
        """The step as a record, and what makes its regions; at the end both are remembered."""
        from memo_compile.offline import record_step

        at_long = self._at_long(options, length)
        tiles = repr((at_long.token_tiles, at_long.tile_above_bytes, at_long.drops_above()))
        if tiles not in self._known:
            traced = self.traced()
            self.say(f"lowering, {in_tiles(options)}", 1)
            with not_at_length():
                self._known[tiles] = traced.lowered(at_long)
        known, found = self._known[tiles], self._found(options, length)
        if found is None:
            captured = self.traced().captured(at_long)
            with not_at_length():
                found = record_step.long_step_of(known, captured, at_long, self.long)
            if not _suits(found, options, length):
                raise NotAtLengthError("its sizes are divided otherwise")
        maker = _MakerAtLength(
            maker=record_step.region_maker(known),
            work_of=record_step.region_work,
            numbers=Numbers(long=self.long, length=length),
            hardware=self.hardware,
            found={region.key: region for region in found.regions},
        )
        record = found.at(length, self.hardware)
        try:
            yield record, RememberedRegions({own.key: own for own in record.regions}, maker)
        finally:
            whole = replace(found, regions=tuple(maker.found.values()))
            if whole != found or found not in self._steps.get(self._key(options), []):
                self._remember(options, whole)

    def _at_long(self, options: MemoConfig, length: int) -> MemoConfig:
        """``options`` with bounds that divide sizes at ``long`` as theirs at ``length``."""
        bounds = {
            name: getattr(options, name) * self.long // length
            for name in ("tile_above_bytes", "drop_above_bytes")
        }
        return replace(options, **bounds)

    def step_key(self, options: MemoConfig) -> dict[str, object]:
        """Under which steps like that of ``options`` are remembered."""
        content = {} if self.memory is None else self.memory.content
        return {**step_key(content, options, self.hardware), "kind": "long step"}

    def _key(self, options: MemoConfig) -> str:
        return digest_of(self.step_key(options))

    def _found(self, options: MemoConfig, length: int) -> LongStep | None:
        mine = self._steps.setdefault(self._key(options), [])
        for known in mine:
            if _suits(known, options, length):
                return known
        for body in () if self.memory is None else self.memory.store.read(self.step_key(options)):
            with ignored_if_wrong():
                step: LongStep = restore(body, LongStep, "step")
                if step.long == self.long and _suits(step, options, length):
                    mine.append(step)
                    self.has_read = True
                    return step
        return None

    def _remember(self, options: MemoConfig, step: LongStep) -> None:
        mine = self._steps.setdefault(self._key(options), [])
        mine[:] = [known for known in mine if _division(known) != _division(step)]
        mine.append(step)
        if self.memory is not None:
            variant = digest_of(_division(step))[:16]
            self.memory.store.write(self.step_key(options), plain(step), variant)


@contextlib.contextmanager
def not_at_length() -> Iterator[None]:
    """What torch or memo cannot do with a sequence of such a length may work with the user's."""
    try:
        yield
    except (NotAtLengthError, NotUniform):
        raise
    except Exception as error:  # of torch or memo
        raise NotAtLengthError(described(error)) from error


def _suits(step: LongStep, options: MemoConfig, length: int) -> bool:
    try:
        return step.suits(length, options.tile_above_bytes, options.drops_above() or 0)
    except NotAtLengthError:
        return False


def _division(step: LongStep) -> list[object]:
    """Which sizes are above the bounds."""
    return [
        [above.sizes, above.above(above.bound_bytes)]
        for above in (step.tile_above, step.drop_above)
    ]


@dataclass(slots=True, kw_only=True)
class _MakerAtLength:
    """Makes recompute regions at the long length, and tells of them at another."""

    maker: RegionMaker
    work_of: Callable[[RegionMaker, RecomputeKey, int], LongWork]
    numbers: Numbers
    hardware: HardwareProfile
    found: dict[RecomputeKey, LongRegion]
    """All that is known, by its key at the long length."""
    _made: dict[RecomputeKey, Estimated] = field(default_factory=dict)
    """What has a graph."""

    def estimated(self, key: RecomputeKey) -> Estimated:
        """The region of ``key`` before it is lowered. Raises UnsupportedGraph: there is none."""
        long_key = self._at_long(key)
        if long_key not in self._made:
            try:
                self._made[long_key] = self.maker.estimated(long_key)
            except UnsupportedGraph as error:
                self._tell(RegionRecord(key=long_key, unsupported=str(error)))
                raise
        told = self._told(long_key) if long_key in self.found else self._tell(self._bare(long_key))
        assert told.estimate is not None, "it was made"
        return Estimated(told.estimate, told.inputs)

    def lowered(self, keys: Sequence[RecomputeKey]) -> Mapping[RecomputeKey, Lowered | str]:
        """Each of ``keys`` lowered, or why it cannot be used. All were estimated before."""
        long_keys = {key: self._at_long(key) for key in keys}
        found = self.maker.lowered([*long_keys.values()])
        return {
            key: self._lowered(long_key, found[long_key]) for key, long_key in long_keys.items()
        }

    def _lowered(self, key: RecomputeKey, made: Lowered | str) -> Lowered | str:
        if isinstance(made, str):
            self._tell(replace(self._bare(key), refused=made))
            return made
        work = self.work_of(self.maker, key, self.numbers.base)
        record = self._tell(replace(self._bare(key), profile=made.profile), work)
        assert record.profile is not None, "it was lowered"
        return Lowered(record.profile, record.seconds)

    def _bare(self, key: RecomputeKey) -> RegionRecord:
        made = self._made[key]
        return RegionRecord(key=key, estimate=made.profile, inputs=made.inputs)

    def _at_long(self, key: RecomputeKey) -> RecomputeKey:
        if key.rows is None:
            return key
        rows, rest = divmod(key.rows * self.numbers.base, self.numbers.parts)
        if rest:
            raise NotAtLengthError(f"{key.rows} rows are no part of the length")
        return replace(key, rows=rows)

    def _tell(self, record: RegionRecord, work: LongWork = ()) -> RegionRecord:
        """``record``, which is kept, at the length in question."""
        text = json.dumps(plain(record), separators=(",", ":"))
        self.found[record.key] = LongRegion(key=record.key, text=text, work=work)
        return self._told(record.key)

    def _told(self, key: RecomputeKey) -> RegionRecord:
        return region_at(self.found[key], self.numbers, self.hardware)
