"""The model that a question is about, and its plans: what was recorded of it is not traced again.

A plan needs the step in certain tiles as plain data (``step_record.StepRecord``). It is looked for
in this object, then in the user's cache, and made from the traced model if it is in neither. Either
way the plan is made of the record, so that it is the same. Neither torch nor Inductor is loaded
before something must be traced.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from memo_compile.config import MemoConfig, torch_settings
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.models import find_model
from memo_compile.driver.recompute_library import RegionMaker
from memo_compile.driver.stages import PlannedStep
from memo_compile.driver.step_planner import require_fast
from memo_compile.driver.tile_order import Sizes, first_of, order_of
from memo_compile.errors import ConfigError, InputError
from memo_compile.file_store import FileStore, code_digest, digest_of
from memo_compile.gpus import target_of, version_of
from memo_compile.offline.offline_step import (
    NotUniform,
    OfflineStep,
    offline_config,
    planned_offline,
)
from memo_compile.offline.shapes.degrees import Degrees
from memo_compile.offline.step_record import (
    RecordedRegions,
    RecordedStep,
    StepRecord,
    TilesRecord,
    Tiling,
    tiling_of,
)
from memo_compile.step.serialise import plain, restore

if TYPE_CHECKING:
    import torch

    from memo_compile.offline.plan_offline import TracedModel
    from memo_compile.offline.shapes.load import Loaded

log = logging.getLogger("memo")

CHOSEN_LATER = frozenset(
    (
        "memory_budget host_budget policy alpha placement_solver placement_time_limit_s strict "
        "max_plans cache tile_above_bytes drop_above_bytes max_over_compute max_step_s "
        "enough_s arena_percent"
    ).split()
)
"""Options that no record depends on. Of the budget only counts whether there is one."""

Say = Callable[[str], None]
"""Told what is done next, where that may take seconds."""


def nobody_watches(_what: str) -> None:
    """A ``Say`` that tells nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What an answer says of the model."""

    name: str
    num_tokens: int | None
    """Tokens of the step on one data-parallel replica; None where that is unknown."""
    parameter_bytes: float
    """Mean bytes of a trainable number; those of the dtype if there is no module."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """What is recorded of a model once it was traced, whatever its tiles."""

    facts: ModelFacts
    products_bytes: tuple[int, int]
    """Bytes of the widest two products' results, which differ."""
    held_bytes: int
    """Parameters, and a gradient for each that is trained."""
    num_trained: int
    """Trained numbers, each with its optimizer state."""
    is_shortened: bool
    """True where fewer layers were traced, and told of all of them."""

    def sizes(self, config: MemoConfig) -> Sizes:
        """What the order of tiles is made of."""
        state = config.optimizer_state_bytes_per_parameter
        assert state is not None, "a forecast says which optimizer trains"
        return Sizes(self.products_bytes, self.held_bytes + int(self.num_trained * state))


@dataclass(kw_only=True)
class AskedModel:
    """One model with its inputs on one device; a context, at whose end what was traced is gone."""

    model: str
    seq: int | None
    batch: int
    dtype: str
    """Name of torch's dtype."""
    degrees: Degrees
    hardware: HardwareProfile
    store: FileStore | None = None
    """Where records are kept; None: nowhere."""
    say: Say = nobody_watches
    _traced: "TracedModel | None" = None
    _lowered: dict[Tiling, tuple[StepRecord, RegionMaker]] = field(default_factory=dict)
    """What was lowered in this process, and what makes its recompute regions."""
    _steps: dict[str, list[RecordedStep]] = field(default_factory=dict)
    """By all that a record depends on but its two bounds."""
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(None, None, None)

    @functools.cached_property
    def loaded(self) -> "Loaded":
        """The model as fakes. Raises InputError."""
        from memo_compile.offline.shapes.load import load

        return load(
            self.model,
            seq=self.seq,
            batch=self.batch,
            dtype=self.torch_dtype,
            degrees=self.degrees,
        )

    @property
    def torch_dtype(self) -> "torch.dtype":
        """The dtype itself; loads torch."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @functools.cached_property
    def facts(self) -> ModelFacts:
        """What an answer says of the model. Raises InputError: it cannot be used."""
        if self._record is not None:
            return self._record.facts
        return ModelFacts(
            name=self.loaded.name,
            num_tokens=self.loaded.num_tokens,
            parameter_bytes=_parameter_bytes(self.loaded, self.torch_dtype),
            notes=tuple(self.loaded.notes),
        )

    def constant_bytes(self, state_bytes_per_parameter: float) -> int:
        """Parameters, their gradients and optimizer state; 0 where the model is a function."""
        import torch

        from memo_compile.driver.facts import GraphFacts

        model = self.loaded.model
        if not isinstance(model, torch.nn.Module):
            return 0
        return GraphFacts(list(model.parameters())).constant_bytes(state_bytes_per_parameter)

    def plan(self, config: MemoConfig) -> OfflineStep:
        """The plan under ``config``, in the tiles that suit its budget.

        Raises:
            Infeasible: no plan fits.
            UnsupportedGraph: the model does not trace into one graph.
        """
        if self.hardware.name == "cpu" or config.dump is not None or config.passes:
            self.store = None  # it goes by this processor, or what is done is to be seen
        try:
            return self._planned(offline_config(config, self.hardware))
        except NotUniform as error:
            log.info("memo: all layers of %s are traced: %s", self.facts.name, error)
            self._trace_all_layers()
            return self.plan(config)

    def _planned(self, config: MemoConfig) -> OfflineStep:
        planned: dict[Tiling, tuple[RecordedStep, PlannedStep, OfflineStep]] = {}

        def attempt(options: MemoConfig) -> OfflineStep:
            tiles = tiling_of(options)
            if tiles not in planned:
                planned[tiles] = self._planned_in_tiles(options)
            step, made, answer = planned[tiles]
            require_fast(made.plan, options, step)
            return answer

        if config.exact or config.token_tiles is not None:
            return attempt(replace(config, token_tiles=1) if config.exact else config)
        budget_bytes = config.budget_bytes(self.hardware.memory_bytes)
        order = order_of(self._sizes(config), config, budget_bytes)
        return first_of(order, config, attempt, self._ends_planning)

    def _ends_planning(self, error: Exception) -> bool:
        if self._traced is None or isinstance(error, NotUniform):
            return isinstance(error, ConfigError | NotUniform)
        from memo_compile.driver.tries import ends_planning  # loads Inductor, as tracing has

        return ends_planning(error)

    def _planned_in_tiles(
        self, options: MemoConfig
    ) -> tuple[RecordedStep, PlannedStep, OfflineStep]:
        step = self._step(options)
        self.say(f"planning, {_in_tiles(options)}")
        try:
            return (step, *planned_offline(step, options, step.record.facts))
        finally:
            if step.maker.has_grown:
                step.maker.has_grown = False
                self._write_step(step.grown_record(), options)

    def _step(self, options: MemoConfig) -> RecordedStep:
        """The step in the tiles of ``options``, from a record if there is one."""
        steps = self._steps.setdefault(digest_of(self._step_key(options)), [])
        for step in steps:
            if step.record.tiles.suits(options):
                return step
        recorded = self._read_step(options)
        record = recorded or self._lowered_in_tiles(options)[0]
        maker = RecordedRegions(
            {region.key: region for region in record.regions},
            lambda: self._lowered_in_tiles(options)[1],
            has_grown=recorded is None,
        )
        steps.append(RecordedStep(record=record, hardware=self.hardware, maker=maker))
        return steps[-1]

    def _lowered_in_tiles(self, options: MemoConfig) -> tuple[StepRecord, RegionMaker]:
        """The step as a new record, and what makes its recompute regions."""
        tiling = tiling_of(options)
        if tiling not in self._lowered:
            traced = self._trace()
            self.say(f"lowering, {_in_tiles(options)}")
            self._lowered[tiling] = traced.recorded(options)
        return self._lowered[tiling]

    def _trace(self) -> "TracedModel":
        """The model's graph, in which it can be lowered until this object is left."""
        if self._traced is None:
            from memo_compile.offline.plan_offline import tracing

            self.say("tracing the model")
            part = self._traced_part()
            self._traced = self._stack.enter_context(
                tracing(part.model, part.args, part.kwargs, hardware=self.hardware, more=part.more)
            )
        return self._traced

    def _traced_part(self) -> "Loaded":
        """What is traced: fewer equal layers in the model's place, where they tell of all."""
        return (self.loaded.shorter if self._is_shortened else None) or self.loaded

    def _trace_all_layers(self) -> None:
        self._is_shortened, self._traced = False, None
        self._lowered.clear()
        self._stack.close()
        if self._record is not None:
            self._write_model(replace(self._record, is_shortened=False))

    @functools.cached_property
    def _is_shortened(self) -> bool:
        return self._record is None or self._record.is_shortened

    def _sizes(self, config: MemoConfig) -> Sizes:
        """What the order of tiles is made of."""
        if self._record is None:
            traced = self._trace()
            facts = traced.facts()
            self._write_model(
                ModelRecord(
                    facts=self.facts,
                    products_bytes=traced.sizes(config).products_bytes,
                    held_bytes=facts.constant_bytes(0.0),
                    num_trained=facts.num_trained,
                    is_shortened=self._is_shortened,
                )
            )
            assert self._record is not None, "it was just made"
        return self._record.sizes(config)

    @functools.cached_property
    def _record(self) -> ModelRecord | None:
        """What was recorded of the model; None: nothing yet."""
        for body in self._read({"kind": "model", "content": self._content}):
            with _ignored_if_wrong():
                record: ModelRecord = restore(body, ModelRecord, "model")
                return record
        return None

    def _write_model(self, record: ModelRecord) -> None:
        self._record = record
        self._write({"kind": "model", "content": self._content}, plain(record))

    def _read_step(self, options: MemoConfig) -> StepRecord | None:
        for body in self._read(self._step_key(options)):
            with _ignored_if_wrong():
                tiles: TilesRecord = restore(body["tiles"], TilesRecord, "tiles")
                if tiles.suits(options):
                    record: StepRecord = restore(body, StepRecord, "step")
                    return record
        return None

    def _write_step(self, record: StepRecord, options: MemoConfig) -> None:
        self._write(self._step_key(options), plain(record), digest_of(plain(record.tiles))[:16])

    def _read(self, key: Mapping[str, Any]) -> Iterator[Any]:
        if self.store is not None and self._content is not None:
            yield from self.store.read(key)

    def _write(self, key: Mapping[str, Any], body: Any, variant: str = "0") -> None:
        if self.store is not None and self._content is not None:
            self.store.write(key, body, variant)

    def _step_key(self, options: MemoConfig) -> dict[str, Any]:
        """All that a record depends on, but for the two bounds that it holds itself."""
        chosen = {
            option.name: plain(getattr(options, option.name))
            for option in dataclasses.fields(options)
            if option.name not in CHOSEN_LATER
        }
        return {
            "kind": "step",
            "content": self._content,
            "has_budget": options.memory_budget is not None,
            "drops": options.drops_above() is not None,
            "options": chosen,
        }

    @functools.cached_property
    def _content(self) -> Mapping[str, Any] | None:
        """What stands for the model, its inputs and the device.

        None for a function, whose code may change unseen.
        """
        if is_shape(self.model):
            model: Mapping[str, Any] = plain(find_model(self.model))
        elif is_function(self.model):
            return None
        else:
            try:
                model = _file_content(Path(self.model))
            except (OSError, ImportError):
                return None
        return {
            "code": code_version(),
            "model": model,
            "seq": self.seq,
            "batch": self.batch,
            "dtype": self.dtype,
            "degrees": plain(self.degrees),
            "hardware": plain(self.hardware),
            "target": [plain(target_of(self.hardware.name)), version_of("triton")],
        }


def _in_tiles(options: MemoConfig) -> str:
    """How a step runs, for people."""
    number = options.token_tiles or 1
    return "whole" if number == 1 else f"in {number} tiles"


def is_function(model: str) -> bool:
    """True for ``package.module:function``."""
    return ":" in model and not Path(model).exists()


def is_shape(model: str) -> bool:
    """True for the name of a shape, false for a file or a function of the user's."""
    return ":" not in model and not model.endswith(".json") and not Path(model).exists()


def code_version() -> str:
    """What stands for all that a record depends on beside the question: memo, torch, Python."""
    return digest_of([code_digest(), torch_settings()])


def _file_content(path: Path) -> dict[str, Any]:
    """What stands for a config.json. Raises OSError, PackageNotFoundError (an ImportError)."""
    return {
        "name": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "transformers": importlib.metadata.version("transformers"),
    }


@contextlib.contextmanager
def _ignored_if_wrong() -> Iterator[None]:
    """What is recorded and is no such data is as good as not recorded."""
    try:
        yield
    except (InputError, ValueError, TypeError, KeyError) as error:
        log.warning("memo: what was recorded of a step is not used: %s", error)


def _parameter_bytes(loaded: "Loaded", dtype: "torch.dtype") -> float:
    """Mean bytes of a trainable number of the model; those of ``dtype`` if there is no module."""
    import torch

    if not isinstance(loaded.model, torch.nn.Module):
        return dtype.itemsize
    trainable = [parameter for parameter in loaded.model.parameters() if parameter.requires_grad]
    numbers = sum(parameter.numel() for parameter in trainable)
    return sum(parameter.nbytes for parameter in trainable) / numbers if numbers else dtype.itemsize
