"""Finds the longest sequence and the largest batch of a script's step that fit on a device.

The step is planned with inputs of other sizes, and never runs. Of each size the smallest plan is
made first, as ``forecast.longest`` does.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memo_compile.config import MemoConfig, resolve
from memo_compile.costs.host import host_memory
from memo_compile.driver.facts import GraphFacts
from memo_compile.driver.pipeline import first_request
from memo_compile.driver.tile_order import TOKEN_TILES
from memo_compile.driver.tries import first_that_fits
from memo_compile.errors import ConfigError, Infeasible, InputError, described
from memo_compile.offline.first_call import FirstCall, parameter_names
from memo_compile.offline.fit_question import FitQuestion, Vary
from memo_compile.offline.forecast import CONTEXT_BYTES
from memo_compile.offline.length_search import LengthSearch, Need, need_of
from memo_compile.offline.offline_step import OfflineStep, offline_config, planned_offline
from memo_compile.offline.plan_offline import (
    TracedModel,
    offline_facts,
    plan_step_offline,
    tracing,
)
from memo_compile.offline.room import Room
from memo_compile.offline.scaled_inputs import Arguments, Varied
from memo_compile.units import format_bytes, parse_budget

TOKEN_GRANULE = 128
"""Sequences are searched in multiples of this, or of the script's own length if that is less."""

ROUNDER = TOKEN_TILES
"""Counts of granules that are multiples of this divide into tiles."""

MAX_TRIES = 20
"""Most sizes that are tried, of all kinds together; mostly three to eight of a kind are enough."""

PRECISION = 0.01
"""The answer is searched to this share of it: next to the limit a size takes longest to decide."""

SEARCH_S, SLOW_TRIES = 30.0, 20
"""Processor seconds of all searches together; where one size takes seconds, the time of so many."""

MAX_SIZE = 2**40
"""No size above this is tried: a step that takes it is not bounded by memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The largest size of one kind that fits."""

    varied: Varied
    multiple_of: int
    size: int
    """0 where not even the smallest size fits."""
    step: OfflineStep | None
    """The plan of that size."""
    floor_bytes: int | None = None
    """Bytes that the smallest size needs, where it does not fit; None where that is unknown."""
    refused: str = ""
    """Why a larger size fails, where the user's code and not memory is the bound."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FitAnswer:
    """The largest sizes that fit, and the options under which they do."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    """The step's inputs in the script."""
    device: str
    budget_bytes: int
    options: Mapping[str, Any]
    """For torch.compile, so that the step is planned like this."""
    largest: tuple[Fitted, ...]
    """One for each kind of size."""

    @property
    def fits(self) -> bool:
        """True when some size of each kind fits."""
        return all(fitted.size > 0 for fitted in self.largest)


Tried = Callable[[Vary, int, bool], None]
"""Is called after each size that was tried, with whether it fits."""


class Fitting:
    """Plans one script's step with other sizes of its inputs than the script's."""

    def __init__(self, call: FirstCall, question: FitQuestion) -> None:
        self._call, self._question = call, question
        names = parameter_names(call.function, len(call.args))
        self._arguments = Arguments(args=call.args, kwargs=call.kwargs, names=names)
        self._device = self._main_device()
        self._config = self._configured(resolve(call.options, call.mode))
        self._budget_bytes = self._budget(self._config)

    def answer(self, say: Callable[[str], None], tried: Tried) -> FitAnswer:
        """Finds the largest sizes. ``say`` is called before slow work, ``tried`` after each size.

        Raises:
            InputError: no input of the step has such a size, or the step fails with other sizes.
            UnsupportedGraph: the step does not trace into one graph.
        """
        dims = [self._varied(what) for what in self._question.vary]
        existing_dims = [varied for varied in dims if varied is not None]
        if not existing_dims:
            raise InputError(
                f"{self._call.name} is called with no tensor that has a "
                f"{' or a '.join(what.value for what in self._question.vary)}; pass the inputs as "
                "arguments of what is compiled, or name what varies: --dims NAME:DIM"
            )
        largest = tuple(self._fitted(varied, say, tried) for varied in existing_dims)
        hardware = self._question.hardware
        return FitAnswer(
            name=self._call.name,
            shapes={path: (*value.shape,) for path, value in self._arguments.tensors().items()},
            device=str(self._device) if hardware is None else hardware.name,
            budget_bytes=self._budget_bytes,
            options=self.options(),
            largest=largest,
        )

    def _main_device(self) -> torch.device:
        return GraphFacts([*self._parameters(), *self._arguments.tensors().values()]).device

    def _parameters(self) -> Sequence[torch.Tensor]:
        module = self._call.module
        return [] if module is None else [*module.parameters()]

    def _varied(self, what: Vary) -> Varied | None:
        if self._question.dims is not None:
            return self._arguments.named(what, self._question.dims)
        return self._arguments.varied(what)

    def _configured(self, config: MemoConfig) -> MemoConfig:
        """``config`` with the question's host budget; 0 where the host is the device itself."""
        host = self._question.host_budget
        if host is None and config.host_budget is None and config.host_is_device(self._target()):
            host = "0"
        return config if host is None else replace(config, host_budget=host)

    def _target(self) -> str:
        """The type of the device that is asked about, or the name of its profile."""
        hardware = self._question.hardware
        return self._device.type if hardware is None else hardware.name

    def _budget(self, config: MemoConfig) -> int:
        """The question's bound in bytes, else the script's, else what the device has free."""
        hardware, memory = self._question.hardware, self._question.memory
        total = self._total_bytes()
        if memory is not None:
            budget = parse_budget(memory, total_bytes=total, what="memory")
        elif hardware is None and config.memory_budget is not None:
            budget = parse_budget(config.memory_budget, total_bytes=total, what="memory_budget")
        else:
            budget = self._free_bytes()
        if budget <= 0:  # of what the device has
            raise InputError("memory: expected more than 0 bytes")
        return budget

    def _total_bytes(self) -> int | None:
        hardware = self._question.hardware
        if hardware is not None:
            return hardware.memory_bytes
        return GraphFacts([torch.empty(0, device=self._device)]).device_bytes()

    def _free_bytes(self) -> int:
        """Bytes that the step may take on an idle device; what it already holds there counts."""
        hardware = self._question.hardware
        if hardware is not None:
            taken = 0 if hardware.name == "cpu" else CONTEXT_BYTES
            return hardware.memory_bytes - taken
        if self._device.type == "cuda":
            free_bytes = GraphFacts([torch.empty(0, device=self._device)]).bytes_left()
        else:
            usable = host_memory().usable_bytes
            held = sum(parameter.nbytes for parameter in self._parameters())
            free_bytes = None if usable is None else usable + held
        if free_bytes is None:
            raise InputError("memory: the host does not say what is free; give --memory SIZE")
        return free_bytes

    @property
    def room(self) -> Room:
        """The budget, and what counts under it beside a plan's peak."""
        hardware = self._question.hardware
        if hardware is None or hardware.name == self._device.type:
            return Room(budget_bytes=self._budget_bytes)
        return Room.on(hardware, self._budget_bytes)

    def options(self) -> Mapping[str, Any]:
        """Options for torch.compile, so that the step is planned for the same memory."""
        options: dict[str, Any] = {"memory_budget": self._budget_bytes}
        if self._config.host_budget is not None:
            options["host_budget"] = self._config.host_budget
        return {**(self._call.options or {}), **options}

    def _granule(self, varied: Varied) -> int:
        if self._question.multiple_of is not None:
            return self._question.multiple_of
        return 1 if varied.what is Vary.BATCH else min(TOKEN_GRANULE, varied.size)

    def _fitted(self, varied: Varied, say: Callable[[str], None], tried: Tried) -> Fitted:
        """Finds the largest size of one kind, and makes the backend's plan of it."""
        granule, what = self._granule(varied), varied.what
        sizes = _TriedSizes(self, varied)

        def need(size: int) -> Need:
            say(f"{what.value} of {size:,}: tracing and planning")
            step_need = sizes.need(size)
            tried(what, size, step_need.fits)
            return step_need

        size, untried_notes = self._largest(need, granule, varied.size)
        step = None
        if size:
            say(f"{what.value} of {size:,}: the fastest plan")
        while size and (step := sizes.fastest(size)) is None:
            # The size was found to fit, but a placement may run out of time in this second plan.
            size -= granule
        return Fitted(
            varied=varied,
            multiple_of=granule,
            size=size,
            step=step,
            floor_bytes=None if size else sizes.floor_bytes(granule),
            refused=sizes.refusal(size),
            notes=(*untried_notes, *self._notes(varied, size)),
        )

    def _largest(
        self, need: Callable[[int], Need], granule: int, script_size: int
    ) -> tuple[int, tuple[str, ...]]:
        """The largest multiple of ``granule`` that fits (0: none), and a note if a larger one may.

        Bytes grow with sizes, except where a size divides into no tiles (a batch of 17 short
        sequences). So multiples of ROUNDER granules are tried first.
        """
        search = LengthSearch(
            start=script_size // granule,
            budget_bytes=self.room.available_bytes,
            constant_bytes=self._constant_bytes(),
            rounder=ROUNDER,
            precision=PRECISION if self._question.multiple_of is None else 0.0,
        )
        effort = _Effort(share=1 / len(self._question.vary))
        untried = search.largest(
            lambda count: need(count * granule),
            MAX_SIZE // granule,
            lambda num_tried: effort.is_spent(num_tried, fits=search.low > 0),
        )
        size, too_large = search.low * granule, (search.least_too_large or 0) * granule
        if untried is not None:
            return size, (
                f"{search.num_tried} sizes were tried: one between {size:,} and "
                f"{untried * granule:,} may fit as well, --multiple-of asks for fewer",
            )
        if size and too_large - size > granule:
            return size, (
                f"found to {PRECISION:.0%}: one below {too_large:,} may fit as well, "
                f"--multiple-of {granule} searches it",
            )
        return size, ()

    def _constant_bytes(self) -> int:
        """Bytes of parameters, gradients, optimizer state; 0 where a function is compiled."""
        parameters = self._parameters()
        state = self._config.optimizer_state_bytes_per_parameter
        return GraphFacts(parameters).constant_bytes(state) if parameters else 0

    def _notes(self, varied: Varied, size: int) -> Sequence[str]:
        notes = [
            f"{path} is {varied.size} and stays that, whatever the {varied.what.value}"
            for path in self._arguments.numbers_like(varied.size)
        ]
        most = _declared_length(self._call.module)
        if varied.what is Vary.SEQUENCE and most is not None and size > most:
            notes.append(
                f"the model's configuration has max_position_embeddings={most}: longer sequences "
                "are planned, and may fail or train badly"
            )
        return notes

    def need(self, varied: Varied, size: int) -> Need:
        """The need of the step at ``size``. Raises what the user's code raises there."""
        available = self.room.available_bytes
        if self._arguments.bytes_with(varied, size) > available:
            return Need(math.inf, False)
        inputs = self._arguments.with_size(varied, size)
        function, hardware = self._call.function, self._question.hardware
        with tracing(function, inputs.args, inputs.kwargs, hardware=hardware) as traced:
            config = offline_config(self._config, hardware)
            within = self.room.configured(config)
            return need_of(
                available,
                lambda: self._bytes_of(lambda: _smallest(traced, config)),
                lambda: self._bytes_of(lambda: _any_that_fits(traced, within)),
            )

    def least_bytes(self, varied: Varied, size: int) -> float:
        """Bytes of greedy's smallest plan at ``size``; infinite where that is unknown."""
        inputs, hardware = self._arguments.with_size(varied, size), self._question.hardware
        with tracing(self._call.function, inputs.args, inputs.kwargs, hardware=hardware) as traced:
            config = offline_config(self._config, hardware)
            return self._bytes_of(lambda: _smallest(traced, config))

    def _bytes_of(self, plan: Callable[[], OfflineStep]) -> float:
        """Bytes of ``plan()``, or of the floor that its refusal names; infinite without a floor."""
        try:
            return self.room.taken_bytes(plan().plan)
        except Infeasible as error:
            if error.floor_bytes is None:
                return math.inf
            return self.room.counted_bytes(error.floor_bytes, self._constant_bytes())

    def fastest(self, varied: Varied, size: int) -> OfflineStep:
        """The plan that the backend makes. Raises Infeasible."""
        inputs = self._arguments.with_size(varied, size)
        return plan_step_offline(
            self._call.function,
            inputs.args,
            inputs.kwargs,
            config=self.room.configured(self._config),
            hardware=self._question.hardware,
        )


class _Effort:
    """What one search may cost: sizes that are tried, and processor time."""

    def __init__(self, share: float) -> None:
        """``share`` of what all searches of an answer may cost."""
        self._share, self._began_s = share, time.process_time()
        self._trial_s = 0.0

    def is_spent(self, num_tried: int, *, fits: bool) -> bool:
        """True after enough sizes, or seconds if some size ``fits``; called before each size."""
        took_s = time.process_time() - self._began_s
        if num_tried == 1:
            self._trial_s = took_s
        limit_s = self._share * max(SEARCH_S, SLOW_TRIES * self._trial_s)
        return num_tried >= self._share * MAX_TRIES or (fits and took_s >= limit_s)


def _smallest(traced: TracedModel, config: MemoConfig) -> OfflineStep:
    """Greedy's plan of the fewest bytes, in tiles where they are allowed."""
    tiles = 1 if config.exact else config.token_tiles or TOKEN_TILES
    policy = "greedy" if config.policy == "auto" else config.policy
    return _planned(traced, replace(config, memory_budget=1, policy=policy, token_tiles=tiles))


def _any_that_fits(traced: TracedModel, config: MemoConfig) -> OfflineStep:
    """A plan within the budget, in whatever tiles and at whatever speed."""
    facts = traced.facts()
    return first_that_fits(traced.gm, facts, config, lambda _, options: _planned(traced, options))


def _planned(traced: TracedModel, options: MemoConfig) -> OfflineStep:
    step = traced.lowered(options)
    facts, request = offline_facts(step), first_request(step)
    _, planned = planned_offline(step, options.at_any_speed(), facts, request)
    return planned


class _TriedSizes:
    """The sizes of one kind that were tried: what they need, and with which the step fails."""

    def __init__(self, fitting: Fitting, varied: Varied) -> None:
        self._fitting, self._varied = fitting, varied
        self.needs: dict[int, Need] = {}
        self._refused: dict[int, str] = {}

    def need(self, size: int) -> Need:
        """What ``size`` needs. Raises InputError: the step fails with another size."""
        try:
            need = self._fitting.need(self._varied, size)
        except ConfigError:
            raise
        except Exception as error:  # the user's code may raise anything at an unusual size
            self._refuse(size, error)
            return Need(math.inf, False)
        self.needs[size] = need
        return need

    def _refuse(self, size: int, error: Exception) -> None:
        """Notes why a larger size fails; raises for the script's size, and for smaller ones."""
        if size == self._varied.size:
            raise error
        if size < self._varied.size:
            raise InputError(
                f"{self._varied} of {size} instead of {self._varied.size} fails: "
                f"{described(error)}; name all dimensions that vary together: --dims NAME:DIM,..."
            ) from error
        self._refused[size] = described(error)

    def fastest(self, size: int) -> OfflineStep | None:
        """The plan of ``size`` that the backend makes; None where none fits."""
        try:
            return self._fitting.fastest(self._varied, size)
        except Infeasible:
            return None

    def floor_bytes(self, size: int) -> int | None:
        """The budget that ``size``, which does not fit, needs; None where that is unknown."""
        num_bytes = self.needs[size].num_bytes if size in self.needs else math.inf
        if math.isinf(num_bytes):  # not planned, as where the inputs alone do not fit
            try:
                num_bytes = self._fitting.least_bytes(self._varied, size)
            except Exception as error:  # as in ``need``
                self._refuse(size, error)
        return None if math.isinf(num_bytes) else int(num_bytes) + self._fitting.room.missed_bytes

    def refusal(self, size: int) -> str:
        """Why the step fails with the next larger size tried; empty where memory is the bound."""
        larger = [other for other in (*self.needs, *self._refused) if other > size]
        return "" if not larger else self._refused.get(min(larger), "")


def _declared_length(module: torch.nn.Module | None) -> int | None:
    """``max_position_embeddings`` of a Hugging Face model; None where it has none."""
    length = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    return length if isinstance(length, int) else None


def require_fits(fit: FitAnswer) -> None:
    """Raises Infeasible: not even the smallest size of some kind fits; the message says which."""
    for fitted in fit.largest:
        if fitted.size:
            continue
        what, least = fitted.varied.what.value, fitted.multiple_of
        floor = fitted.floor_bytes
        needs = "" if floor is None else f", which needs {format_bytes(floor)}"
        raise Infeasible(
            f"not even a {what} of {least} fits into {format_bytes(fit.budget_bytes)}{needs}; "
            "give it more memory, name a larger hardware, or train a smaller model",
            floor_bytes=floor,
        )
