"""Finds the longest sequence and the largest batch of a script's step that fit on a device.

The step is planned with inputs of other sizes, and never runs. Of each size the smallest plan is
made first, as ``forecast.longest`` does.
"""

import contextlib
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
from memo_compile.offline.plan_offline import TracedModel, offline_facts, plan_step_offline, tracing
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
        self._device = GraphFacts([*self._parameters(), *self._arguments.tensors().values()]).device
        self._config = self._configured(resolve(call.options, call.mode))
        self._budget_bytes = self._budget(self._config)

    def answer(self, say: Callable[[str], None], tried: Tried) -> FitAnswer:
        """Finds the largest sizes. ``say`` is called before slow work, ``tried`` after each size.

        Raises InputError: no input of the step has such a size, or the step fails with other sizes;
        UnsupportedGraph: the step does not trace into one graph.
        """
        dims = [varied for what in self._question.vary if (varied := self._varied(what))]
        if not dims:
            raise InputError(
                f"{self._call.name} is called with no tensor that has a "
                f"{' or a '.join(what.value for what in self._question.vary)}; pass the inputs as "
                "arguments of what is compiled, or name what varies: --dims NAME:DIM"
            )
        largest = tuple(self._fitted(varied, say, tried) for varied in dims)
        hardware = self._question.hardware
        return FitAnswer(
            name=self._call.name,
            shapes={path: (*value.shape,) for path, value in self._arguments.tensors().items()},
            device=str(self._device) if hardware is None else hardware.name,
            budget_bytes=self._budget_bytes,
            options=self.options(),
            largest=largest,
        )

    def _parameters(self) -> Sequence[torch.Tensor]:
        module = self._call.module
        return [] if module is None else [*module.parameters()]

    def _varied(self, what: Vary) -> Varied | None:
        """Returns the dimensions of kind ``what``; None: no input has one."""
        if self._question.dims is not None:
            return self._arguments.named(what, self._question.dims)
        return self._arguments.varied(what)

    def _configured(self, config: MemoConfig) -> MemoConfig:
        """Returns ``config`` with the question's host budget; 0 where the host is the device."""
        host, hardware = self._question.host_budget, self._question.hardware
        device = self._device.type if hardware is None else hardware.name
        if host is None and config.host_budget is None and config.host_is_device(device):
            host = "0"
        return config if host is None else replace(config, host_budget=host)

    def _budget(self, config: MemoConfig) -> int:
        """Returns the question's bound in bytes, else the script's, else what the device has."""
        hardware, memory = self._question.hardware, self._question.memory
        if hardware is None:
            device_bytes = GraphFacts([torch.empty(0, device=self._device)]).device_bytes()
        else:
            device_bytes = hardware.memory_bytes
        if memory is not None:
            budget = parse_budget(memory, total_bytes=device_bytes, what="memory")
        elif hardware is None and config.memory_budget is not None:
            text = config.memory_budget
            budget = parse_budget(text, total_bytes=device_bytes, what="memory_budget")
        else:
            budget = self._free_bytes()
        if budget <= 0:  # of what the device has
            raise InputError("memory: expected more than 0 bytes")
        return budget

    def _free_bytes(self) -> int:
        """Returns what the step may take of an idle device; what it already holds there counts."""
        hardware = self._question.hardware
        if hardware is not None:
            return hardware.memory_bytes - (0 if hardware.name == "cpu" else CONTEXT_BYTES)
        if self._device.type == "cuda":
            free_bytes = GraphFacts([torch.empty(0, device=self._device)]).bytes_left()
        else:
            usable_bytes = host_memory().usable_bytes
            held_bytes = sum(parameter.nbytes for parameter in self._parameters())
            free_bytes = None if usable_bytes is None else usable_bytes + held_bytes
        if free_bytes is None:
            raise InputError("memory: the host does not say what is free; give --memory SIZE")
        return free_bytes

    @property
    def room(self) -> Room:
        """Returns the budget, and what counts under it beside a plan's peak."""
        hardware = self._question.hardware
        if hardware is None or hardware.name == self._device.type:
            return Room(budget_bytes=self._budget_bytes)
        return Room.on(hardware, self._budget_bytes)

    def options(self) -> Mapping[str, Any]:
        """Returns options for torch.compile, so that the step is planned for the same memory."""
        options: dict[str, Any] = {"memory_budget": self._budget_bytes}
        if self._config.host_budget is not None:
            options["host_budget"] = self._config.host_budget
        return {**(self._call.options or {}), **options}

    def _granule(self, varied: Varied) -> int:
        """Returns the number of which only multiples are tried."""
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
        while size and (step := self.fastest(varied, size)) is None:
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
        """Finds the largest multiple of ``granule`` that fits (0: none), and notes if others may.

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
        next_count = search.largest(
            lambda count: need(count * granule),
            MAX_SIZE // granule,
            lambda num_tried: effort.is_spent(num_tried, fits=search.low > 0),
        )
        size, too_large = search.low * granule, (search.least_too_large or 0) * granule
        if next_count is not None:  # the effort is spent before this count was tried
            return size, (
                f"{search.num_tried} sizes were tried: one between {size:,} and "
                f"{next_count * granule:,} may fit as well, --multiple-of asks for fewer",
            )
        if size and too_large - size > granule:
            return size, (
                f"found to {PRECISION:.0%}: one below {too_large:,} may fit as well, "
                f"--multiple-of {granule} searches it",
            )
        return size, ()

    def _constant_bytes(self) -> int:
        """Returns bytes of parameters, gradients, optimizer state; 0: a function is compiled."""
        parameters = self._parameters()
        state = self._config.optimizer_state_bytes_per_parameter
        return GraphFacts(parameters).constant_bytes(state) if parameters else 0

    def _notes(self, varied: Varied, size: int) -> Sequence[str]:
        """Notes what may break at ``size``: numbers that do not vary, the model's longest input."""
        notes = [
            f"{path} is {varied.size} and stays that, whatever the {varied.what.value}"
            for path in self._arguments.numbers_like(varied.size)
        ]
        declared = _declared_length(self._call.module)
        if varied.what is Vary.SEQUENCE and declared is not None and size > declared:
            notes.append(
                f"the model's configuration has max_position_embeddings={declared}: longer "
                "sequences are planned, and may fail or train badly"
            )
        return notes

    def need(self, varied: Varied, size: int) -> Need:
        """Returns what the step needs at ``size``. Raises what the user's code raises there."""
        available = self.room.available_bytes
        if self._arguments.bytes_with(varied, size) > available:  # the inputs alone do not fit
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
        """Returns bytes of greedy's smallest plan at ``size``; infinite where that is unknown."""
        inputs, hardware = self._arguments.with_size(varied, size), self._question.hardware
        with tracing(self._call.function, inputs.args, inputs.kwargs, hardware=hardware) as traced:
            config = offline_config(self._config, hardware)
            return self._bytes_of(lambda: _smallest(traced, config))

    def _bytes_of(self, plan: Callable[[], OfflineStep]) -> float:
        """Returns what ``plan()``, or the floor that refuses it, takes; infinite: no floor."""
        try:
            return self.room.taken_bytes(plan().plan)
        except Infeasible as error:
            if error.floor_bytes is None:
                return math.inf
            return self.room.counted_bytes(error.floor_bytes, self._constant_bytes())

    def fastest(self, varied: Varied, size: int) -> OfflineStep | None:
        """Returns the plan of ``size`` that the backend makes; None where none fits."""
        inputs, config = self._arguments.with_size(varied, size), self.room.configured(self._config)
        function, hardware = self._call.function, self._question.hardware
        with contextlib.suppress(Infeasible):
            return plan_step_offline(
                function, inputs.args, inputs.kwargs, config=config, hardware=hardware
            )
        return None


class _Effort:
    """What one search may cost: sizes that are tried, and processor time."""

    def __init__(self, share: float) -> None:
        """``share``: of what all searches of an answer may cost."""
        self._share, self._began_s = share, time.process_time()
        self._trial_s = 0.0

    def is_spent(self, num_tried: int, *, fits: bool) -> bool:
        """True after enough sizes, or seconds if some size ``fits``; called before each size."""
        took_s = time.process_time() - self._began_s
        if num_tried == 1:  # the first size tells how slow the others are
            self._trial_s = took_s
        limit_s = self._share * max(SEARCH_S, SLOW_TRIES * self._trial_s)
        return num_tried >= self._share * MAX_TRIES or (fits and took_s >= limit_s)


def _smallest(traced: TracedModel, config: MemoConfig) -> OfflineStep:
    """Returns greedy's plan of the fewest bytes, in tiles where they are allowed."""
    tiles = 1 if config.exact else config.token_tiles or TOKEN_TILES
    policy = "greedy" if config.policy == "auto" else config.policy
    return _planned(traced, replace(config, memory_budget=1, policy=policy, token_tiles=tiles))


def _any_that_fits(traced: TracedModel, config: MemoConfig) -> OfflineStep:
    """Returns a plan within the budget, in whatever tiles and at whatever speed."""
    facts = traced.facts()
    return first_that_fits(traced.gm, facts, config, lambda _, options: _planned(traced, options))


def _planned(traced: TracedModel, options: MemoConfig) -> OfflineStep:
    """Plans the step in the tiles of ``options``, at whatever speed."""
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
        """Returns what ``size`` needs. Raises InputError: the step fails at a smaller size."""
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
        """Notes why a larger size fails; raises for the script's size, and for smaller ones.

        A larger size may be above the model's limits. Where a smaller one fails, there is another
        dimension that varies with it.
        """
        if size == self._varied.size:
            raise error
        if size < self._varied.size:
            raise InputError(
                f"{self._varied} of {size} instead of {self._varied.size} fails: "
                f"{described(error)}; name all dimensions that vary together: --dims NAME:DIM,..."
            ) from error
        self._refused[size] = described(error)

    def floor_bytes(self, size: int) -> int | None:
        """Returns the budget that ``size``, which does not fit, needs; None where it is unknown."""
        num_bytes = self.needs[size].num_bytes if size in self.needs else math.inf
        if math.isinf(num_bytes):  # not planned, as where the inputs alone do not fit
            try:
                num_bytes = self._fitting.least_bytes(self._varied, size)
            except Exception as error:  # as in ``need``
                self._refuse(size, error)
        # Needs are of what the room has available, which is less than the budget by what is missed.
        return None if math.isinf(num_bytes) else int(num_bytes) + self._fitting.room.missed_bytes

    def refusal(self, size: int) -> str:
        """Says why the step fails with the next larger size tried; empty: memory is the bound."""
        larger = [other for other in (*self.needs, *self._refused) if other > size]
        return "" if not larger else self._refused.get(min(larger), "")


def _declared_length(module: torch.nn.Module | None) -> int | None:
    """Returns ``max_position_embeddings`` of a Hugging Face model; None where it has none."""
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
