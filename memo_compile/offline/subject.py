"""The model that a question is about: loaded when it must be, else known from an earlier answer."""

import contextlib
import functools
import hashlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from memo_compile.config import MemoConfig
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.models import find_model
from memo_compile.errors import InputError
from memo_compile.file_store import FileStore
from memo_compile.gpus import target_of
from memo_compile.offline import preparing
from memo_compile.offline.long_length import (
    GRANULE,
    LEAST_PER_WIDTH,
    LONG,
    MAX_BATCH,
    MOST_WORDS,
)
from memo_compile.offline.long_steps import LongSteps
from memo_compile.offline.model_plans import ModelPlans
from memo_compile.offline.offline_step import NotUniform, OfflineStep
from memo_compile.offline.remembered_keys import Memory, Say, code_version, log, nobody_watches
from memo_compile.offline.shapes.degrees import Degrees
from memo_compile.step.serialise import plain, restore

if TYPE_CHECKING:
    import torch

    from memo_compile.offline.other_length import TracedLengths
    from memo_compile.offline.plan_offline import OfflineModel, TracedModel
    from memo_compile.offline.shapes.load import Loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What an answer says of the model."""

    name: str
    num_tokens: int | None
    """Tokens of the step on one data-parallel replica; None where that is unknown."""
    parameter_bytes: float
    """Mean bytes of a trainable number; those of the dtype if there is no module."""
    is_shortened: bool
    """True where a model of fewer equal layers is traced in its place."""
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class ModelLengths:
    """What questions about one model have in common that differ in the length of the sequence.

    A context, at whose end what was traced is gone.
    """

    facts: ModelFacts | None = None
    """Of the length that was asked for first."""
    traced: "dict[bool, TracedLengths]" = field(default_factory=dict)
    """Of the shortened model, and of the whole one."""
    long: dict[bool, LongSteps] = field(default_factory=dict)
    """Likewise."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for steps in self.long.values():
            steps.close()


@dataclass(kw_only=True)
class Subject:
    """One model with its inputs on one device; a context, at whose end what was traced is gone."""

    model: str
    seq: int | None
    batch: int
    dtype: str
    """Name of torch's dtype."""
    degrees: Degrees
    hardware: HardwareProfile
    store: FileStore | None = None
    """Where steps are remembered; None: nowhere."""
    say: Say = nobody_watches
    lengths: ModelLengths | None = None
    """Shared with other lengths of the same model; for a named shape only, whose code is memo's."""
    _stack: ExitStack = field(default_factory=ExitStack)
    _plans: dict[bool, ModelPlans] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(None, None, None)

    @functools.cached_property
    def loaded(self) -> "Loaded":
        """The model as fakes. Raises InputError."""
        return self._loaded_at(self.seq)

    @functools.cached_property
    def _loaded_long(self) -> "Loaded":
        """The same where all lengths are told from."""
        return self._loaded_at(LONG * self.degrees.tp * self.degrees.cp)

    def _loaded_at(self, seq: int | None) -> "Loaded":
        from memo_compile.offline.shapes.load import load

        return load(
            self.model,
            seq=seq,
            batch=self.batch,
            dtype=self.torch_dtype,
            degrees=self.degrees,
        )

    @functools.cached_property
    def _is_told(self) -> bool:
        """True where the step is told from the one of a long sequence (``long_length``).

        Not for a GPU whose operators are chosen by their sizes.
        """
        length = self._length
        if length is None or not is_shape(self.model) or self.batch > MAX_BATCH:
            return False
        if length % GRANULE or target_of(self.hardware.name) is not None:
            return False
        shape = find_model(self.model)
        if self.batch * shape.vocab >= MOST_WORDS:
            return False
        return length >= LEAST_PER_WIDTH * shape.hidden

    @property
    def torch_dtype(self) -> "torch.dtype":
        """The dtype itself; loads torch."""
        import torch

        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @functools.cached_property
    def facts(self) -> ModelFacts:
        """What an answer says of the model. Raises InputError: it cannot be used."""
        memory = self._lasting
        if memory is None:
            return self._facts()
        key = {"kind": "facts", "content": dict(memory.content)}
        for body in memory.store.read(key):
            try:
                known: ModelFacts = restore(body, ModelFacts, "facts")
                return self._with_tokens(known)
            except InputError as error:
                log.warning("memo: what was remembered of a model is not used: %s", error)
        found = self._facts()
        memory.store.write(key, plain(found))
        return found

    def _facts(self) -> ModelFacts:
        if self.lengths is not None and self.lengths.facts is not None:
            return self._with_tokens(self.lengths.facts)
        loaded = self._any_loaded
        found = ModelFacts(
            name=loaded.name,
            num_tokens=loaded.num_tokens,
            parameter_bytes=_parameter_bytes(loaded, self.torch_dtype),
            is_shortened=loaded.shorter is not None,
            notes=tuple(loaded.notes),
        )
        found = self._with_tokens(found)
        if self.lengths is not None:
            self.lengths.facts = found
        return found

    def _with_tokens(self, facts: ModelFacts) -> ModelFacts:
        """``facts`` of this length, which may be known from another one of a named shape."""
        if self.seq is None or not is_shape(self.model):
            return facts
        return replace(facts, num_tokens=self.seq * self.batch)

    @property
    def _any_loaded(self) -> "Loaded":
        """The model with inputs of some length."""
        return self._loaded_long if self._is_told else self.loaded

    @functools.cached_property
    def _memory(self) -> Memory | None:
        """For this length."""
        content = None if self.store is None else self._content()
        if self.store is None or content is None:
            return None
        return Memory(store=self.store, content=content)

    @property
    def _lasting(self) -> Memory | None:
        """For all lengths that are told from one; else for this one."""
        memory = self._memory
        if memory is None or not self._is_told:
            return memory
        return replace(memory, content={**memory.content, "seq": "all"})

    def _content(self) -> Mapping[str, Any] | None:
        """What stands for the model and its inputs; None where that is not known."""
        is_file = self.model.endswith(".json") or Path(self.model).exists()
        try:
            if is_file:
                model: Mapping[str, Any] | None = _file_content(Path(self.model))
            elif ":" in self.model:
                model = self._function_content()
            else:
                model = plain(find_model(self.model))
        except (OSError, ImportError):
            return None
        if model is None:
            return None
        return {
            "code": code_version(),
            "model": model,
            "seq": self.seq,
            "batch": self.batch,
            "dtype": self.dtype,
            "degrees": plain(self.degrees),
        }

    def _function_content(self) -> Mapping[str, Any] | None:
        from memo_compile.offline.function_content import function_content

        return function_content(self.model, self.loaded)

    def constant_bytes(self, state_bytes_per_parameter: float) -> int:
        """Parameters, their gradients and optimizer state; 0 where the model is a function."""
        memory = self._lasting
        if memory is None:
            return self._constant_bytes(state_bytes_per_parameter)
        key = {"kind": "constant", "content": dict(memory.content)}
        key["state"] = repr(state_bytes_per_parameter)
        for body in memory.store.read(key):
            if type(body) is int:
                return body
        found = self._constant_bytes(state_bytes_per_parameter)
        memory.store.write(key, found)
        return found

    def _constant_bytes(self, state_bytes_per_parameter: float) -> int:
        import torch

        from memo_compile.driver.facts import GraphFacts

        model = self._any_loaded.model
        if not isinstance(model, torch.nn.Module):
            return 0
        return GraphFacts(list(model.parameters())).constant_bytes(state_bytes_per_parameter)

    def plan(self, config: MemoConfig) -> OfflineStep:
        """The plan under ``config``. Raises as ``plan_offline.plan_step_offline``."""
        if self.hardware.name == "cpu" or config.dump is not None or config.passes:
            return self._plan_traced(config)
        if self.facts.is_shortened:
            try:
                return self._plans_of(shortened=True).plan(config)
            except NotUniform as error:
                log.info("memo: all layers of %s are traced: %s", self.facts.name, error)
        return self._plans_of(shortened=False).plan(config)

    def prepare(self, answer_s: float) -> None:
        """Remember what the next smaller budgets need; ``answer_s`` as ``preparing.briefly``."""
        for plans in self._plans.values():
            preparing.briefly(plans, answer_s)

    def lacks(self) -> bool:
        """True where ``prepare_all`` has something to do."""
        return any(map(preparing.lacks, self._plans.values()))

    def prepare_all(self) -> None:
        """Remember what every other budget needs."""
        for plans in self._plans.values():
            preparing.fully(plans)

    def _plan_traced(self, config: MemoConfig) -> OfflineStep:
        """The plan for the device of the tensors, or with a dump; nothing is remembered."""
        from memo_compile.offline.plan_offline import plan_step_offline

        planned = functools.partial(plan_step_offline, config=config, hardware=self.hardware)
        loaded = self.loaded
        if (shorter := loaded.shorter) is not None:
            try:
                return planned(shorter.model, shorter.args, {}, more=shorter.more)
            except NotUniform as error:
                log.info("memo: all layers of %s are traced: %s", loaded.name, error)
        return planned(loaded.model, loaded.args, loaded.kwargs)

    def _plans_of(self, *, shortened: bool) -> ModelPlans:
        if shortened not in self._plans:
            self._plans[shortened] = self._stack.enter_context(
                ModelPlans(
                    trace=self._trace_of(shortened=shortened),
                    hardware=self.hardware,
                    memory=_of_part(self._memory, shortened=shortened),
                    say=self.say,
                    long=self._long_steps(shortened=shortened),
                    length=self._length or 0,
                    for_budgets=self.lengths is None,
                )
            )
        return self._plans[shortened]

    def _long_steps(self, *, shortened: bool) -> LongSteps | None:
        """What tells of this length, shared with other lengths; None: it is traced."""
        if not self._is_told:
            return None
        if self.lengths is not None and shortened in self.lengths.long:
            return self.lengths.long[shortened]
        made = LongSteps(
            trace=lambda: self._tracing(self._loaded_long, shortened=shortened),
            long=LONG,
            hardware=self.hardware,
            memory=_of_part(self._lasting, shortened=shortened),
            say=self.say,
        )
        if self.lengths is not None:
            self.lengths.long[shortened] = made
        else:
            self._stack.callback(made.close)
        return made

    def _trace_of(self, *, shortened: bool) -> "Callable[[], AbstractContextManager[OfflineModel]]":
        @contextlib.contextmanager
        def trace() -> "Iterator[OfflineModel]":
            from memo_compile.offline.other_length import TracedLengths
            from memo_compile.offline.plan_offline import not_tracing

            known, length = None, self._length
            if self.lengths is not None and length is not None:
                known = self.lengths.traced.setdefault(shortened, TracedLengths())
                if (other := known.at(length)) is not None:
                    with not_tracing(other, hardware=self.hardware) as made:
                        yield made
                    return
            with self._tracing(self.loaded, shortened=shortened) as traced:
                yield traced
                if known is not None and length is not None:
                    known.add(traced.at_length(length))

        return trace

    @property
    def _length(self) -> int | None:
        """Tokens of a sequence on one device; None where devices have different numbers."""
        tokens, rest = divmod(self.seq or 0, self.degrees.tp * self.degrees.cp)
        return tokens if tokens and not rest else None

    def _tracing(
        self, loaded: "Loaded", *, shortened: bool
    ) -> "AbstractContextManager[TracedModel]":
        """``loaded`` is traced, or what stands for it with fewer layers."""
        from memo_compile.offline.plan_offline import tracing

        if not shortened:
            return tracing(loaded.model, loaded.args, loaded.kwargs, hardware=self.hardware)
        assert loaded.shorter is not None, "a shortened model has fewer layers"
        model, args, more = loaded.shorter.model, loaded.shorter.args, loaded.shorter.more
        return tracing(model, args, {}, hardware=self.hardware, more=more)


def _of_part(memory: Memory | None, *, shortened: bool) -> Memory | None:
    if memory is None:
        return None
    return replace(memory, content={**memory.content, "shortened": shortened})


def is_shape(model: str) -> bool:
    """True for the name of a shape, false for a file or a function of the user's."""
    return ":" not in model and not model.endswith(".json") and not Path(model).exists()


def _file_content(path: Path) -> dict[str, Any]:
    """What stands for a config.json. Raises OSError, PackageNotFoundError (an ImportError)."""
    return {
        "name": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "transformers": importlib.metadata.version("transformers"),
    }


def _parameter_bytes(loaded: "Loaded", dtype: "torch.dtype") -> float:
    """Mean bytes of a trainable number of the model; those of ``dtype`` if there is no module."""
    import torch

    if not isinstance(loaded.model, torch.nn.Module):
        return dtype.itemsize
    trainable = [parameter for parameter in loaded.model.parameters() if parameter.requires_grad]
    numbers = sum(parameter.numel() for parameter in trainable)
    return sum(parameter.nbytes for parameter in trainable) / numbers if numbers else dtype.itemsize
