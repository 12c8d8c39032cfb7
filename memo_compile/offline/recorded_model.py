"""Plans a model from records of its lowered step, and traces the model only where none is there.

A plan needs the step, cut into a certain number of tiles, as plain data
(``step_record.StepRecord``). ``RecordedModel`` looks for that record in itself, then in the user's
cache; if it is in neither, it traces and lowers the model and records the result. Plans are always
made from the record, so that they do not depend on where it came from. Neither torch nor Inductor
is loaded before something must be traced.
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
from memo_compile.driver.tile_order import Sizes, first_of, order_of, where_weights_fit
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
from memo_compile.offline.shapes.kinds import is_function, is_shape
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

OPTIONS_OF_PLANS = frozenset(
    (
        "memory_budget host_budget policy alpha placement_solver placement_time_limit_s strict "
        "max_plans cache attempt"
    ).split()
)
"""Options that change the plan and not the lowered step, so that no record depends on them. Whether
there is a budget at all does change the step, and is part of a record's key."""

Say = Callable[[str], None]
"""Is called with a line for people ("tracing the model") before work that may take seconds."""


def say_nothing(_line: str) -> None:
    """A ``Say`` that shows nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The model's name and sizes, as answers print them."""

    name: str
    num_tokens: int | None
    """Tokens of the step on one data-parallel replica; None where that is unknown."""
    parameter_bytes: float
    """Mean bytes of one trainable number; the dtype's where the model is no module."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """Facts of a traced model that do not depend on its tiles, as they are kept on disk."""

    facts: ModelFacts
    products_bytes: tuple[int, int]
    """Bytes of the two widest different results of matrix products."""
    has_attention: bool
    held_bytes: int
    """Bytes of the parameters, and of a gradient for each that is trained."""
    weight_bytes: int
    """Those of the parameters alone."""
    num_trained: int
    """How many numbers are trained with optimizer state on the device."""
    is_shortened: bool
    """True where a few layers were traced and stand for all of the model's."""

    def sizes(self, config: MemoConfig) -> Sizes:
        """Returns the sizes that decide in which order numbers of tiles are tried."""
        state_bytes = config.optimizer_state_bytes_per_parameter
        assert state_bytes is not None, "a forecast says which optimizer trains"
        held_bytes = self.held_bytes - (self.weight_bytes if config.weights != "device" else 0)
        constant_bytes = held_bytes + int(self.num_trained * state_bytes)
        return Sizes(self.products_bytes, constant_bytes, self.has_attention)


@dataclass(kw_only=True)
class RecordedModel:
    """One model with its inputs on one device; a context manager that frees the traced graph."""

    model: str
    seq: int | None
    batch: int
    dtype: str
    """Name of torch's dtype."""
    degrees: Degrees
    hardware: HardwareProfile
    lora: int = 0
    """Rank of the adapters that are trained beside frozen weights; 0: all weights are trained."""
    state_on_host: bool = False
    """The optimizer keeps its state on the host, as ``memo_compile.offload`` does."""
    gradients_on_host: bool = False
    """Gradients go to the host as they are made, and the update runs there."""
    store: FileStore | None = None
    """Where records are kept on disk; None: nowhere."""
    say: Say = say_nothing
    _traced: "TracedModel | None" = None
    _lowered: dict[Tiling, tuple[StepRecord, RegionMaker]] = field(default_factory=dict)
    """What this process lowered: the record, and the maker of its recompute regions."""
    _steps: dict[str, list[RecordedStep]] = field(default_factory=dict)
    """Digest of ``_step_key`` -> the steps with that key, which differ in their two bounds."""
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(None, None, None)

    @functools.cached_property
    def loaded(self) -> "Loaded":
        """Returns the model and its inputs as fake tensors. Raises InputError."""
        from memo_compile.offline.shapes.load import load

        return load(
            self.model,
            seq=self.seq,
            batch=self.batch,
            dtype=self.torch_dtype,
            degrees=self.degrees,
            lora=self.lora,
        )

    @property
    def torch_dtype(self) -> "torch.dtype":
        """Returns the dtype as torch's object; loads torch."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @functools.cached_property
    def facts(self) -> ModelFacts:
        """Returns the model's name and sizes. Raises InputError: the model cannot be used."""
        if self._record is not None:
            return self._record.facts
        return ModelFacts(
            name=self.loaded.name,
            num_tokens=self.loaded.num_tokens,
            parameter_bytes=_parameter_bytes(self.loaded, self.torch_dtype),
            notes=tuple(self.loaded.notes),
        )

    def constant_bytes(self, state_bytes_per_parameter: float, *, weights: bool = True) -> int:
        """Returns bytes of parameters, gradients, optimizer state; 0: the model is a function.

        Without ``weights`` parameters do not count, because they lie on the host.
        """
        import torch

        from memo_compile.driver.facts import GraphFacts

        model = self.loaded.model
        if not isinstance(model, torch.nn.Module):
            return 0
        self._place_state(state_bytes_per_parameter)
        facts = GraphFacts(list(model.parameters()))
        held_bytes = facts.constant_bytes(state_bytes_per_parameter)
        return held_bytes if weights else held_bytes - facts.parameter_bytes

    def plan(self, config: MemoConfig) -> OfflineStep:
        """Plans under ``config``, in the tiles that suit its budget.

        Raises Infeasible: no plan fits; UnsupportedGraph: the model does not trace into one graph.
        """
        if self.hardware.name == "cpu" or config.dump is not None or config.passes:
            # Kernels are chosen for this very processor, or the user wants to see the passes run.
            self.store = None
        self._place_state(config.optimizer_state_bytes_per_parameter or 0.0)
        try:
            return where_weights_fit(offline_config(config, self.hardware), self._planned)
        except NotUniform as error:
            log.info("memo: all layers of %s are traced: %s", self.facts.name, error)
            self._trace_all_layers()
            return self.plan(config)

    def _place_state(self, bytes_per_parameter: float) -> None:
        """Marks parameters, of the model and of the shorter one, with where their state lies."""
        if not self.state_on_host:
            return
        import torch

        from memo_compile.training_state.sizes import keep_on_host

        for part in (self.loaded, self.loaded.shorter):
            if part is not None and isinstance(part.model, torch.nn.Module):
                longer = part.longer_model
                untraced = () if longer is None else longer.untraced
                keep_on_host(
                    [*part.model.parameters(), *untraced],
                    bytes_per_parameter,
                    updates_on_host=self.gradients_on_host,
                    on_cpu=self.hardware.name == "cpu",
                )

    def _planned(self, config: MemoConfig) -> OfflineStep:
        """Tries numbers of tiles in their usual order; returns the first plan that is good."""
        plans: dict[Tiling, tuple[RecordedStep, PlannedStep, OfflineStep]] = {}

        def attempt(options: MemoConfig) -> OfflineStep:
            # Each tiling is planned once: else attempts differ in how slow a plan they accept.
            tiling = tiling_of(options)
            if tiling not in plans:
                plans[tiling] = self._planned_in_tiles(options)
            step, planned_step, offline_step = plans[tiling]
            require_fast(planned_step.plan, options, step)
            return offline_step

        if config.exact or config.token_tiles is not None:
            return attempt(replace(config, token_tiles=1) if config.exact else config)
        budget_bytes = config.budget_bytes(self.hardware.memory_bytes)
        order = order_of(self._sizes(config), config, budget_bytes)
        return first_of(order, config, attempt, self._ends_planning)

    def _ends_planning(self, error: Exception) -> bool:
        """True where ``error`` says that no other number of tiles need be tried."""
        # Without a trace all came from records, and the errors of torch need not be known.
        if self._traced is None or isinstance(error, NotUniform):
            return isinstance(error, ConfigError | NotUniform)
        from memo_compile.driver.tries import ends_planning  # loads Inductor, as tracing did

        return ends_planning(error)

    def _planned_in_tiles(
        self, options: MemoConfig
    ) -> tuple[RecordedStep, PlannedStep, OfflineStep]:
        """Plans the step in the tiles of ``options``; the record keeps regions that it made."""
        step = self._step(options)
        self.say(f"planning, {_in_tiles(options)}")
        try:
            return (step, *planned_offline(step, options, step.record.facts))
        finally:
            if step.maker.has_grown:
                step.maker.has_grown = False
                self._write_step(step.grown_record(), options)

    def _step(self, options: MemoConfig) -> RecordedStep:
        """Returns the step in the tiles of ``options``, from a record if one suits them."""
        steps = self._steps.setdefault(digest_of(self._step_key(options)), [])
        for step in steps:
            if step.record.tiles.suits(options):
                return step
        stored_record = self._read_step(options)
        record = stored_record or self._lowered_in_tiles(options)[0]
        maker = RecordedRegions(
            {region.key: region for region in record.regions},
            lambda: self._lowered_in_tiles(options)[1],
            has_grown=stored_record is None,
        )
        steps.append(RecordedStep(record=record, hardware=self.hardware, maker=maker))
        return steps[-1]

    def _lowered_in_tiles(self, options: MemoConfig) -> tuple[StepRecord, RegionMaker]:
        """Returns a new record of the step, and the maker of its recompute regions."""
        tiling = tiling_of(options)
        if tiling not in self._lowered:
            traced = self._trace()
            self.say(f"lowering, {_in_tiles(options)}")
            self._lowered[tiling] = traced.recorded(options)
        return self._lowered[tiling]

    def _trace(self) -> "TracedModel":
        """Returns the model's Dynamo graph, which can be lowered until this context is left."""
        if self._traced is None:
            from memo_compile.offline.plan_offline import tracing

            self.say("tracing the model")
            # A shorter model, whose equal layers stand for all, is traced in seconds.
            loaded = (self.loaded.shorter if self._is_shortened else None) or self.loaded
            self._traced = self._stack.enter_context(
                tracing(
                    loaded.model,
                    loaded.args,
                    loaded.kwargs,
                    hardware=self.hardware,
                    longer_model=loaded.longer_model,
                )
            )
        return self._traced

    def _trace_all_layers(self) -> None:
        """Forgets the shorter model's graph: from now on the whole model is traced."""
        self._is_shortened, self._traced = False, None
        self._lowered.clear()
        self._stack.close()
        if self._record is not None:
            self._write_model(replace(self._record, is_shortened=False))

    @functools.cached_property
    def _is_shortened(self) -> bool:
        return self._record is None or self._record.is_shortened

    def _sizes(self, config: MemoConfig) -> Sizes:
        """Returns ``ModelRecord.sizes``, for which a model without a record is traced."""
        if self._record is None:
            traced = self._trace()
            facts, sizes = traced.facts(), traced.sizes(config)
            self._write_model(
                ModelRecord(
                    facts=self.facts,
                    products_bytes=sizes.products_bytes,
                    has_attention=sizes.has_attention,
                    held_bytes=facts.constant_bytes(0.0),
                    weight_bytes=facts.parameter_bytes,
                    num_trained=facts.num_with_state,
                    is_shortened=self._is_shortened,
                )
            )
            assert self._record is not None, "it was just made"
        return self._record.sizes(config)

    @functools.cached_property
    def _record(self) -> ModelRecord | None:
        """Returns the model's record on disk; None where there is none yet."""
        for body in self._read({"kind": "model", "content": self._content}):
            with _skipping_bad_records():
                record: ModelRecord = restore(body, ModelRecord, "model")
                return record
        return None

    def _write_model(self, record: ModelRecord) -> None:
        self._record = record
        self._write({"kind": "model", "content": self._content}, plain(record))

    def _read_step(self, options: MemoConfig) -> StepRecord | None:
        """Returns a record on disk whose tiles suit ``options``; None: there is none."""
        for body in self._read(self._step_key(options)):
            with _skipping_bad_records():
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
        """Returns all that a step's record depends on, but for the bounds that are in it."""
        options_of_step = {
            option.name: plain(getattr(options, option.name))
            for option in dataclasses.fields(options)
            if option.name not in OPTIONS_OF_PLANS
        }
        return {
            "kind": "step",
            "content": self._content,
            "has_budget": options.memory_budget is not None,
            "drops": options.drops_above() is not None,
            "by_heads": options.attempt.by_heads,
            "options": options_of_step,
        }

    @functools.cached_property
    def _content(self) -> Mapping[str, Any] | None:
        """Returns model, inputs and device as plain data: equal content, equal step.

        None for a function, whose code may change without being seen here, and for a bad file.
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
            "lora": self.lora,
            "batch": self.batch,
            "dtype": self.dtype,
            "degrees": plain(self.degrees),
            "state_on_host": self.state_on_host,
            "gradients_on_host": self.gradients_on_host,
            "hardware": plain(self.hardware),
            "target": [plain(target_of(self.hardware.name)), version_of("triton")],
        }


def _in_tiles(options: MemoConfig) -> str:
    """Says ``whole``, or ``in 4 tiles``."""
    num_tiles = options.token_tiles or 1
    return "whole" if num_tiles == 1 else f"in {num_tiles} tiles"


def code_version() -> str:
    """Returns a digest of the code that makes records: memo, torch and Python."""
    return digest_of([code_digest(), torch_settings()])


def _file_content(path: Path) -> dict[str, Any]:
    """Returns what stands for a config.json. Raises OSError, PackageNotFoundError."""
    return {
        "name": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "transformers": importlib.metadata.version("transformers"),
    }


@contextlib.contextmanager
def _skipping_bad_records() -> Iterator[None]:
    """Ends the block with a warning where a record on disk cannot be read."""
    try:
        yield
    except (InputError, ValueError, TypeError, KeyError) as error:
        log.warning("memo: what was recorded of a step is not used: %s", error)


def _parameter_bytes(loaded: "Loaded", dtype: "torch.dtype") -> float:
    """Returns mean bytes of one trainable number; those of ``dtype`` where nothing says it."""
    import torch

    if not isinstance(loaded.model, torch.nn.Module):
        return dtype.itemsize
    trainable = [parameter for parameter in loaded.model.parameters() if parameter.requires_grad]
    count = sum(parameter.numel() for parameter in trainable)
    return sum(parameter.nbytes for parameter in trainable) / count if count else dtype.itemsize
