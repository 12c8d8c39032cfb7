"""The plans of one model on one device, for any budget: what is remembered is not traced again.

A plan needs a step in certain tiles as plain data (``remembered_step.StepRecord``). It is looked
for in this object, then in the user's cache, and made from the traced model if it is in neither.
Either way the plan is made of the record, so that it is the same. Neither Dynamo nor Inductor is
loaded before something must be traced.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from memo_compile.config import MemoConfig
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.driver.step_planner import propose_known, require_fast
from memo_compile.driver.tile_order import (
    Sizes,
    Tiles,
    budgets_below,
    first_of,
    order_of,
    orders_below,
)
from memo_compile.errors import ConfigError, MemoError
from memo_compile.file_store import digest_of
from memo_compile.offline.long_length import NotAtLengthError
from memo_compile.offline.long_steps import LongSteps
from memo_compile.offline.offline_step import (
    OfflineFacts,
    OfflineStep,
    offline_config,
    planned_offline,
)
from memo_compile.offline.preparing import awaited
from memo_compile.offline.remembered_keys import (
    Memory,
    Say,
    code_version,
    ignored_if_wrong,
    in_tiles,
    log,
    nobody_watches,
    step_key,
)
from memo_compile.offline.remembered_places import RememberedPlaces
from memo_compile.offline.remembered_searches import RememberedSearches
from memo_compile.offline.remembered_step import (
    NotRemembered,
    RememberedRegions,
    RememberedStep,
    RowsBetween,
    StepRecord,
    Threshold,
)
from memo_compile.offline.remembered_tries import tried
from memo_compile.planners.policy.candidates import SearchMemory
from memo_compile.step.serialise import plain, restore

if TYPE_CHECKING:
    from memo_compile.driver.knowledge import StepKnowledge
    from memo_compile.offline.plan_offline import OfflineModel

_Recording = Callable[
    [StepRecord | None, MemoConfig],
    AbstractContextManager[tuple[StepRecord, RememberedRegions]],
]
"""A step as a record, from an earlier one or the model, and what makes its regions."""


@dataclass(kw_only=True)
class ModelPlans:
    """Plans of one model; a context, at whose end what was traced is gone."""

    trace: Callable[[], AbstractContextManager["OfflineModel"]]
    """Traces the model. Inside, it can be lowered."""
    hardware: HardwareProfile
    """Another device than the one that the fake tensors lie on."""
    memory: Memory | None = None
    say: Say = nobody_watches
    long: LongSteps | None = None
    """Tells of this and of other lengths, where one trace can."""
    length: int = 0
    """Tokens of a sequence on one device, for ``long``."""
    for_budgets: bool = True
    """False where the next questions are about other lengths: nothing is made for other budgets."""
    _stack: ExitStack = field(default_factory=ExitStack)
    _records: dict[str, list[StepRecord]] = field(default_factory=dict)
    """Traced at this length."""
    _told: dict[str, list[StepRecord]] = field(default_factory=dict)
    """Told by ``long``."""
    _known: dict[str, "StepKnowledge"] = field(default_factory=dict)
    _sizes: dict[str, Sizes] = field(default_factory=dict)
    answered: MemoConfig | None = None
    """Asked last, once there is an answer."""
    waited_s: float = 0.0
    """Seconds that were spent waiting for what another process prepares."""
    _prepares: bool = False
    """True while other budgets are prepared for."""
    _has_read: bool = False
    """True where a step was remembered before."""
    _last: RememberedStep | None = None
    """What ``_step_of`` made last."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(None, None, None)

    @functools.cached_property
    def traced(self) -> "OfflineModel":
        """The model's graph."""
        self.say("tracing the model", 2)
        return self._stack.enter_context(self.trace())

    @functools.cached_property
    def places(self) -> RememberedPlaces:
        """Places buffers; the same ones once."""
        store = None if self.memory is None else self.memory.store
        return RememberedPlaces(store=store, code=code_version())

    @functools.cached_property
    def searches(self) -> RememberedSearches:
        """What was found of a step under any budget."""
        return RememberedSearches(store=None if self.memory is None else self.memory.store)

    def plan(self, config: MemoConfig) -> OfflineStep:
        """The plan under ``config``, in the tiles that suit its budget.

        Raises:
            Infeasible: no plan fits.
            UnsupportedGraph: the model does not trace into one graph.
            NotUniform: as ``plan_offline.plan_step_offline``.
        """
        planned: dict[tuple[int | None, ...], Any] = {}
        names: dict[int | None, str] = {}

        def attempt(options: MemoConfig) -> OfflineStep:
            drops = options.drops_above()
            if drops not in names:
                names[drops] = f"graph{len(names)}"
            tiles = options.token_tiles, options.tile_above_bytes, drops

            def made() -> OfflineStep:
                if tiles not in planned:
                    planned[tiles] = self._planned(options, names[drops])
                known, found, step = planned[tiles]
                require_fast(found.plan, options, known)
                return step

            return self._tried(options, made)

        config = offline_config(config, self.hardware)
        if config.exact or config.token_tiles is not None:
            return attempt(replace(config, token_tiles=1) if config.exact else config)
        order = order_of(self._sizes_for(config), config, self._budget_bytes(config))
        made = first_of(order, config, attempt, self._ends_planning)
        self.answered = replace(config, arena_percent=100)  # smaller budgets are those of plans
        return made

    def _tried(self, options: MemoConfig, attempt: Callable[[], OfflineStep]) -> OfflineStep:
        if self.memory is None:
            return attempt()
        key = {**self._step_key(options), "kind": "slow try", "asked": plain(options)}
        return tried(self.memory.store, key, attempt)

    def _budget_bytes(self, config: MemoConfig) -> int | None:
        return config.budget_bytes(self.hardware.memory_bytes)

    def _ends_planning(self, error: Exception) -> bool:
        if not self.is_traced:
            return isinstance(error, ConfigError)
        from memo_compile.driver.tries import ends_planning  # loads Inductor, as tracing has

        return ends_planning(error)

    @property
    def prepares_for(self) -> MemoConfig | None:
        """The question whose other budgets can be prepared for; None: none, or it is not traced."""
        if self.memory is None or not self.for_budgets or not self.is_traced:
            return None
        return self.answered if self.memory.store.is_writable() else None

    def missing(
        self, config: MemoConfig, failed: Collection[Tiles], wanted: Sequence[Tiles] = ()
    ) -> Tiles | None:
        """The first tiles but ``failed`` that a smaller budget may need, and nothing remembers.

        Those that are ``wanted`` come before all others.
        """
        budget_bytes = self._budget_bytes(config)
        if budget_bytes is None:
            return None
        order = orders_below(self._sizes_for(config), config, budget_bytes, self._bounds())
        order = (*wanted, *order)
        return next((own for own in order if own not in failed and self._lacks(own, config)), None)

    def smaller_budgets(self, config: MemoConfig) -> list[int]:
        """One for each order of tiles that is known, the largest first."""
        budget_bytes = self._budget_bytes(config)
        if budget_bytes is None:
            return []
        return budgets_below(self._sizes_for(config), budget_bytes, self._bounds())

    def _bounds(self) -> set[int]:
        """Bytes that decide what runs in tiles, and what is saved."""
        return {
            size
            for records in (*self._records.values(), *self._told.values())
            for record in records
            for size in (*record.tile_above.sizes, *record.drop_above.sizes)
        }

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Inside, each step is remembered with what plans under other budgets recompute with."""
        self._prepares = True
        try:
            yield
        finally:
            self._prepares = False

    def prepare(self, tiles: Tiles, config: MemoConfig) -> None:
        """The step in ``tiles`` is remembered. Raises what tracing or lowering does."""
        options = tiles.options(config)
        recording = self._recording_told if self.long is not None else self._recording
        with self.preparing(), recording(None, options) as (record, maker):
            self._step_of(record, options, "prepared", maker)

    @property
    def lasting(self) -> Memory | None:
        """Where the records lie that this length is told from."""
        return self.memory if self.long is None else self.long.memory

    def record_key(self, options: MemoConfig) -> dict[str, Any]:
        """Under which steps like that of ``options`` are remembered there."""
        return self._step_key(options) if self.long is None else self.long.step_key(options)

    def claim_key(self, config: MemoConfig, kind: str) -> dict[str, Any]:
        """What one process at a time does for all budgets of a question."""
        untiled = replace(config, token_tiles=None, tile_above_bytes=0, drop_above_bytes=0)
        return {**self._step_key(untiled), "kind": kind}

    @property
    def is_traced(self) -> bool:
        """True once the model was traced in this process."""
        return "traced" in vars(self) or (self.long is not None and self.long.is_traced)

    def _lacks(self, tiles: Tiles, config: MemoConfig) -> bool:
        options = tiles.options(config)
        return self._record(options) is None and self._told_record(options) is None

    def _planned(self, options: MemoConfig, name: str) -> tuple[Any, Any, OfflineStep]:
        """The step in the tiles of ``options``: what is known of it, its plan, the answer."""
        find = self._record if self.long is None else self._told_record
        awaited(self, options, find)
        record = self._record(options)
        if record is None and self.long is not None:
            try:
                told = self._told_record(options)
                return self._planned_from(told, options, name, self._recording_told)
            except NotAtLengthError as error:
                log.info("memo: the model is traced at its own length: %s", error)
        return self._planned_from(record, options, name, self._recording)

    def _planned_from(
        self, record: StepRecord | None, options: MemoConfig, name: str, recording: _Recording
    ) -> tuple[Any, Any, OfflineStep]:
        """As ``_planned``, from ``record`` if its regions are enough."""
        if record is not None:
            regions = {region.key: region for region in record.regions}
            maker = RememberedRegions(regions, RowsBetween(known=dict(regions)))
            try:
                return self._plan_of(record, options, name, maker)
            except NotRemembered as error:
                log.info("memo: the model is traced: %s", error)
        try:
            with recording(record, options) as (record, maker):
                return self._plan_of(record, options, name, maker)
        except NotAtLengthError:
            raise
        except Exception as error:
            from memo_compile.offline.plan_offline import raise_bare

            raise_bare(error)

    def _step_of(
        self, record: StepRecord, options: MemoConfig, name: str, maker: RememberedRegions
    ) -> RememberedStep:
        """The step of ``record``; what searches find of it is kept."""
        tiles = digest_of(plain((record.tile_above, record.drop_above)))
        step = {**self._step_key(options), "tiles": tiles}

        def searches_of(host_budget_bytes: int | None, exact: bool) -> SearchMemory:
            return self.searches.of({**step, "host": host_budget_bytes, "exact": exact})

        self._last = RememberedStep(
            record=record,
            name=name,
            hardware=self.hardware,
            maker=maker,
            places=self.places,
            searches_of=searches_of,
        )
        return self._last

    def _plan_of(
        self, record: StepRecord, options: MemoConfig, name: str, maker: RememberedRegions
    ) -> tuple[RememberedStep, Any, OfflineStep]:
        self.say(f"planning, {in_tiles(options)}", 0)
        known = self._step_of(record, options, name, maker)
        facts = OfflineFacts(
            costs=record.costs,
            model_flops=record.model_flops,
            exact=record.exact,
            tiled=record.tiled,
        )
        try:
            return (known, *planned_offline(known, options, facts))
        finally:
            self.searches.write()

    @contextlib.contextmanager
    def _recording(
        self, record: StepRecord | None, options: MemoConfig
    ) -> Iterator[tuple[StepRecord, RememberedRegions]]:
        """The step as a record, from ``record`` or the traced model, and what makes its regions.

        At the end it is remembered with all that was made, and ``_complete`` unless that would put
        off a first answer.
        """
        from memo_compile.offline import plan_offline, record_step

        tiles = repr((options.token_tiles, options.tile_above_bytes, options.drops_above()))
        if tiles not in self._known:
            _ = self.traced
            self.say(f"lowering, {in_tiles(options)}", 1)
            self._known[tiles] = self.traced.lowered(options)
        traced = self._known[tiles]
        if record is None:
            facts = plan_offline.offline_facts(traced)
            captured = self.traced.captured(options)
            record = record_step.record_of(traced, captured, facts, options)
        maker = RememberedRegions(
            {region.key: region for region in record.regions},
            record_step.region_maker(traced),
        )
        try:
            with self._completing(options):
                yield record, maker
        finally:
            if maker.num_made or record not in self._records.get(self._key(options), []):
                whole = replace(record, regions=tuple(maker.known.values()))
                self._remember(options, whole)

    @contextlib.contextmanager
    def _recording_told(
        self, _: StepRecord | None, options: MemoConfig
    ) -> Iterator[tuple[StepRecord, RememberedRegions]]:
        """As ``_recording``, at the length that tells of this one. Raises NotAtLengthError."""
        assert self.long is not None, "there is such a length"
        with self.long.recording(options, self.length) as (record, maker):
            try:
                with self._completing(options):
                    yield record, maker
            finally:
                _keep(replace(record, regions=tuple(maker.known.values())), self._told_of(options))

    @contextlib.contextmanager
    def _completing(self, options: MemoConfig) -> Iterator[None]:
        """At the end the step is ``_complete``, unless that would put off a first answer.

        Not after an interrupt: who makes it does not want to wait.
        """
        try:
            yield
        except Exception:
            self._complete_last(options)
            raise
        self._complete_last(options)

    def _complete_last(self, options: MemoConfig) -> None:
        has_read = self._has_read or (self.long is not None and self.long.has_read)
        if self._last is not None and (has_read or self._prepares):
            self._complete(self._last, options)

    def _complete(self, step: RememberedStep, options: MemoConfig) -> None:
        """What plans of ``step`` under other budgets recompute with is lowered."""
        if self.memory is None or not self.for_budgets:
            return
        try:
            propose_known(step, options)
            step.lower_found()
        except (MemoError, NotAtLengthError) as error:
            log.info("memo: what other budgets need is not remembered: %s", error)
        self.searches.write()

    def _key(self, options: MemoConfig) -> str:
        return digest_of(self._step_key(options))

    def _step_key(self, options: MemoConfig) -> dict[str, Any]:
        content = {} if self.memory is None else self.memory.content
        return step_key(content, options, self.hardware)

    def _record(self, options: MemoConfig) -> StepRecord | None:
        """What is remembered of the step in the tiles of ``options``."""
        mine = self._records.setdefault(self._key(options), [])
        for record in mine:
            if _suits(record.tile_above, record.drop_above, options):
                return record
        for body in () if self.memory is None else self.memory.store.read(self._step_key(options)):
            with ignored_if_wrong():
                above, drops = (
                    restore(body[name], Threshold, name) for name in ("tile_above", "drop_above")
                )
                if _suits(above, drops, options):
                    mine.append(restore(body, StepRecord, "step"))
                    self._has_read = True
                    return mine[-1]
        return None

    def _told_record(self, options: MemoConfig) -> StepRecord | None:
        """What is remembered of the step at the length that tells of this one."""
        mine = self._told_of(options)
        for record in mine:
            if _suits(record.tile_above, record.drop_above, options):
                return record
        found = None if self.long is None else self.long.record(options, self.length)
        if found is not None:
            mine.append(found)
        return found

    def _told_of(self, options: MemoConfig) -> list[StepRecord]:
        return self._told.setdefault(self._key(options), [])

    def _remember(self, options: MemoConfig, record: StepRecord) -> None:
        _keep(record, self._records.setdefault(self._key(options), []))
        if self.memory is not None:
            variant = digest_of(plain((record.tile_above, record.drop_above)))[:16]
            self.memory.store.write(self._step_key(options), plain(record), variant)

    def _sizes_for(self, config: MemoConfig) -> Sizes:
        state = repr(config.optimizer_state_bytes_per_parameter)
        if state not in self._sizes:
            self._sizes[state] = self._remembered_sizes(config, state)
        return self._sizes[state]

    def _remembered_sizes(self, config: MemoConfig, state: str) -> Sizes:
        if self.long is not None:
            try:
                return self.long.sizes(config, state, self.length)
            except NotAtLengthError as error:
                log.info("memo: the model is traced at its own length: %s", error)
        key = {"kind": "sizes", "state": state}
        if self.memory is not None:
            key["content"] = dict(self.memory.content)  # type: ignore[assignment]
            for body in self.memory.store.read(key):
                with ignored_if_wrong():
                    products, constant = body
                    first, second = map(int, products)
                    return Sizes((first, second), int(constant))
        found = self.traced.sizes(config)
        if self.memory is not None:
            self.memory.store.write(key, plain(found))
        return found


def _suits(above: Threshold, drops: Threshold, options: MemoConfig) -> bool:
    """True where the bounds of ``options`` make the same tiles, and save the same."""
    return above.tells_like(options.tile_above_bytes) and drops.tells_like(
        options.drops_above() or 0
    )


def _keep(record: StepRecord, known: list[StepRecord]) -> None:
    """``record`` in place of one that it is the same as but for more regions."""
    same = (record.tile_above.sizes, record.drop_above.sizes, record.tile_above.bound_bytes)
    known[:] = [
        own
        for own in known
        if (own.tile_above.sizes, own.drop_above.sizes, own.tile_above.bound_bytes) != same
    ]
    known.append(record)
