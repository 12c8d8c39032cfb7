"""Will a model fit on a device under a budget? Answered by a plan of its step that never runs."""

import bisect
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memo_compile.config import resolve, user_store
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.models import find_model
from memo_compile.costs.update_costs import UpdateSeconds, update_seconds
from memo_compile.driver.tile_order import TOKEN_TILES
from memo_compile.errors import Infeasible, InputError, require_at_least
from memo_compile.gpus import missing_for_target, target_of, version_of
from memo_compile.offline.length_search import LengthSearch, Need, need_of
from memo_compile.offline.offline_step import OfflineStep
from memo_compile.offline.recorded_model import RecordedModel, Say, say_nothing
from memo_compile.offline.room import Room, is_exact
from memo_compile.offline.shapes.degrees import CP_KINDS, RING, ULYSSES, Degrees
from memo_compile.offline.shapes.kinds import (
    is_function,
    is_shape,
    require_plannable,
    shape_of,
)
from memo_compile.step.plans import Plan
from memo_compile.step.problem import CallKind, arena_buffers, arena_values, call_starts
from memo_compile.step.simulate import memory_level
from memo_compile.units import format_bytes, parse_budget, parse_size

CONTEXT_BYTES = 2**30
"""A GPU's memory that no step can have: CUDA's context and loaded kernels take 0.5 to 0.8 GiB."""

OPTIMIZERS = {"adamw": 2.0, "adamw-fp32": None, "sgd": 0.0, "sgd-momentum": 1.0, "none": 0.0}
"""Optimizer -> its state, in tensors of a parameter's dtype; None: ``ADAMW_FP32_BYTES``."""

OFFLOADS = ("none", "state", "gradients", "weights")
"""What may be kept on the host beside activations, each with those before it."""

ADAMW_FP32_BYTES = 12.0
"""Bytes per parameter of master weight and two moments in float32, as Megatron keeps them."""

SEQ_GRANULE = 1024
"""``longest`` searches multiples of this for each device that shares the tokens."""

MAX_SEQ = 2**30
"""``longest`` tries none above: no model reads so long a sequence, so that its step ignores it."""

START_SEQ = 32_768
"""The first length that ``longest`` tries where none is given."""

MAX_FRAME_PLANS = 4
"""How often a step with several frames is planned, each time with a better estimate of what it
holds beside its arena."""

PLACEMENT_S = 2.0
"""Most seconds for a placement: one that is not found by then mostly takes minutes."""

UNBOUNDED_BYTES = 2**60
"""A budget in bytes under which everything is kept."""

NUM_LARGEST = 5
"""How many tensors are named at the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Which model is planned, for which device and budget."""

    model: str
    hardware: HardwareProfile
    seq: int | None = None
    batch: int = 1
    dtype: str = "bfloat16"
    degrees: Degrees = Degrees()  # noqa: RUF009 - frozen
    lora: int | None = None
    """Rank of adapters that are trained beside frozen weights; None: all weights are trained."""
    budget: str | int | None = None
    host_budget: str | int | None = None
    optimizer: str = "adamw"
    offload: str = "none"
    """What lies on the host: ``none``, optimizer ``state``, ``gradients`` and the update too,
    ``weights`` of layers too; ``auto``: the first of these with which the step fits."""
    policy: str = "auto"
    remembers: bool = True
    """True where lowered steps are kept in the user's cache and read from there."""

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise InputError(
                f"optimizer: expected one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}"
            )
        if self.offload not in (*OFFLOADS, "auto"):
            raise InputError(
                f"offload: expected one of {', '.join(OFFLOADS)}, auto, got {self.offload!r}"
            )
        require_at_least(1, {"batch": self.batch})
        if self.seq is not None:
            require_at_least(1, {"seq": self.seq})
        # These raise ConfigError.
        _ = self.budget_bytes, self.host_budget_bytes
        resolve({"policy": self.policy}, None)

    @property
    def budget_bytes(self) -> int:
        """Device memory that the step may take; by default what CUDA's context leaves."""
        total = self.hardware.memory_bytes
        if self.budget is not None:
            return parse_budget(self.budget, total_bytes=total)
        return total if self.hardware.name == "cpu" else total - CONTEXT_BYTES

    def on_host(self, kind: str) -> bool:
        """True where ``kind`` of training state lies on the host; ``auto``: where it may."""
        return self.offload == "auto" or OFFLOADS.index(self.offload) >= OFFLOADS.index(kind)

    @property
    def host_budget_bytes(self) -> int | None:
        """Host memory that activations and the optimizer's state may take; None: no bound."""
        if self.host_budget is None:
            return None
        total = self.hardware.host_memory_bytes
        return parse_size(self.host_budget, total_bytes=total, what="host-budget")

    @property
    def can_be_cut(self) -> bool:
        """True where the model can be divided over devices: it is a named shape."""
        return is_shape(self.model)

    def tp_of(self, least: float) -> int | None:
        """Returns the smallest tp of at least ``least`` that divides the model.

        Only the question's tp times 2, 4, 8... are tried. None: none of these does, or the model is
        no named shape.
        """
        if not self.can_be_cut or self.seq is None:
            return None
        shape, tp = find_model(self.model), 2 * self.degrees.tp
        while tp <= shape.num_heads:
            with contextlib.suppress(InputError):
                replace(self.degrees, tp=tp).require_divides(shape, self.seq)
                if tp >= least:
                    return tp
            tp *= 2
        return None

    @property
    def room(self) -> Room:
        """Returns the budget, and what counts under it beside a plan's peak."""
        return Room.on(self.hardware, self.budget_bytes, self.degrees.pp)

    def state_bytes_per_parameter(self, parameter_bytes: float) -> float:
        """Returns the state of a parameter of that size, sharded over dp x cp (ZeRO-1)."""
        num_tensors = OPTIMIZERS[self.optimizer]
        state_bytes = ADAMW_FP32_BYTES if num_tensors is None else num_tensors * parameter_bytes
        return state_bytes / (self.degrees.dp * self.degrees.cp)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAtPeak:
    """A buffer that is alive at the peak."""

    name: str
    size_bytes: int
    source: str | None
    label: str
    """For people: the tensor's role, or its name; ``temporary`` where only one call needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakAt:
    """The call of the step during which most memory is in use."""

    call: str
    region: str
    phase: str
    layer: int | None
    """Number of the layer within its class; None where the call is no layer's."""
    tensors: tuple[TensorAtPeak, ...]
    """The largest ones in the arena, largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The plan that answers a question, with the sizes and seconds of the whole job."""

    question: Question
    name: str
    step: OfflineStep
    peak_bytes: int
    """Peak of all micro-batches in flight, including what an estimate may miss."""
    budget_bytes: int
    outside_bytes: int
    host_bytes: int
    in_flight: int
    tokens_per_s: float | None
    """Tokens per second of the whole job."""
    peak_at: PeakAt | None
    notes: tuple[str, ...]
    other_kind: "Forecast | None" = None
    """The plan with the other kind of context parallelism, where none was asked for."""

    @property
    def fits(self) -> bool:
        """True when the peak is within the budget."""
        return self.peak_bytes <= self.budget_bytes

    @property
    def step_s(self) -> float:
        """Simulated seconds of one micro-batch, forward and backward."""
        timeline = self.step.plan.timeline
        assert timeline is not None, "an offline plan is simulated"
        return timeline.step_s

    @property
    def update(self) -> UpdateSeconds:
        """What the update of parameters takes more, where optimizer state is on the host."""
        return update_seconds(self.step.plan.fixed, self.step.costs)

    @property
    def lowered_by(self) -> dict[str, str | None]:
        """Versions of torch and triton where they lowered the step for the GPU; else empty."""
        if target_of(self.question.hardware.name) is None:
            return {}
        return {name: version_of(name) for name in ("torch", "triton")}

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that go to the host in one micro-batch."""
        offloads = (call for call in self.step.problem.calls if call.kind is CallKind.OFFLOAD)
        return sum(call.copy.num_bytes for call in offloads if call.copy is not None)

    @property
    def recompute_s(self) -> float:
        """Seconds of one micro-batch in which activations are recomputed."""
        recomputing = (call for call in self.step.problem.calls if call.kind is CallKind.RECOMPUTE)
        return sum(map(self.step.costs.call_s, recomputing))

    @property
    def mfu(self) -> float:
        """Model FLOPs without recomputation over the device's peak FLOPs in a step; in [0, 1]."""
        rate = self.question.hardware.peak_flops_per_s
        return self.step.model_flops / (self.step_s * rate) if self.step_s else 0.0


def forecast(question: Question, say: Say = say_nothing) -> Forecast:
    """Plans the step of ``question``; where no plan fits, returns the plan of the smallest peak.

    ``say`` is called before each slow part of the work. Raises InputError: the model or a degree
    cannot be used; MemoError: the model cannot be planned.
    """
    if question.offload == "auto":
        return _with_least_on_host(question, say)
    if len(kinds := _cp_kinds(question)) > 1:
        return _in_faster_kind(kinds, say)
    (question,) = kinds
    with _recorded_model(question, say) as model:
        return _forecast(question, model)


def _with_least_on_host(question: Question, say: Say) -> Forecast:
    """Returns the answer with as little on the host as fits; with all of it where none fits."""
    for offload in OFFLOADS:
        say(f"planning with --offload {offload}")
        try:
            answer = forecast(replace(question, offload=offload), say)
        except Infeasible:
            if offload == OFFLOADS[-1]:
                raise
        else:
            if answer.fits or offload == OFFLOADS[-1]:
                return answer
    raise AssertionError("the last one has returned, or raised")


def _cp_kinds(question: Question) -> list[Question]:
    """``question`` with each kind of context parallelism that it leaves open and the model has."""
    degrees, shape = question.degrees, shape_of(question.model)
    if degrees.cp == 1 or degrees.cp_kind is not None or shape is None:
        return [question]
    kinds = [replace(degrees, cp_kind=RING)]
    with contextlib.suppress(InputError):
        degrees.require_heads_divide(shape)
        kinds.append(replace(degrees, cp_kind=ULYSSES))
    return [replace(question, degrees=kind) for kind in kinds]


def _in_faster_kind(kinds: Sequence[Question], say: Say) -> Forecast:
    """The answer that fits and is fastest, or needs least where none fits, with the other one."""
    answers: list[Forecast] = []
    for question in kinds:
        say(f"planning with --cp-kind {question.degrees.cp_kind}")
        try:
            answers.append(forecast(question, say))
        except Infeasible:
            if question is kinds[-1] and not answers:
                raise
    answers.sort(key=lambda each: (not each.fits, each.step_s if each.fits else each.peak_bytes))
    return replace(answers[0], other_kind=answers[1] if len(answers) > 1 else None)


def _forecast(question: Question, model: RecordedModel) -> Forecast:
    """Answers with a plan within the budget or, where the refusal says its floor, that plan."""
    try:
        return _within_budget(question, model)
    except Infeasible as error:
        floor_bytes, room = error.floor_bytes, question.room
        # Of one arena a floor within the budget says that something else than it refuses the plan.
        is_one_arena = room.arena_percent == 100
        if floor_bytes is None or (is_one_arena and floor_bytes <= room.available_bytes):
            raise
        return _answer(question, model, _plan(question, model, plan_bytes=floor_bytes))


def sweep(question: Question, num_budgets: int) -> Iterator[Forecast]:
    """Plans at ``num_budgets`` evenly spaced budgets, from the smallest possible to no budget.

    Yields each as it is made. The first and the last have their own peak as the budget. Raises as
    ``forecast``, and InputError for fewer than two budgets.
    """
    if question.offload == "auto":
        raise InputError(f"sweep: give --offload one of {', '.join(OFFLOADS)} with it")
    if len(kinds := _cp_kinds(question)) > 1:
        raise InputError(f"sweep: give --cp-kind one of {', '.join(CP_KINDS)} with it")
    (question,) = kinds
    if num_budgets < 2:
        raise InputError(f"budgets: expected at least 2, got {num_budgets}")
    with _recorded_model(question) as model:
        least, most = (
            _forecast(replace(question, budget=budget), model) for budget in (1, UNBOUNDED_BYTES)
        )
        range_bytes = most.peak_bytes - least.peak_bytes
        yield replace(least, budget_bytes=least.peak_bytes)
        for number in range(1, num_budgets - 1 if range_bytes else 0):
            budget = least.peak_bytes + range_bytes * number // (num_budgets - 1)
            yield _forecast(replace(question, budget=budget), model)
        yield replace(most, budget_bytes=most.peak_bytes)


def needed(question: Question) -> Need:
    """Returns the bytes that the step needs, and whether any plan of it fits."""
    with _recorded_model(question) as model:
        available_bytes = question.room.available_bytes
        searched = functools.partial(_searched_bytes, question, model)
        if question.degrees.pp > 1:  # greedy's smallest plan counts one frame only
            return need_of(available_bytes, searched, lambda: math.inf)
        return need_of(available_bytes, lambda: _least_bytes(question, model), searched)


def _searched_bytes(question: Question, model: RecordedModel) -> float:
    """Returns bytes of ``forecast``'s plan, or of the floor where none fits; infinite: unknown."""
    try:
        return question.room.taken_bytes(_forecast(question, model).step.plan)
    except Infeasible as error:
        return error.floor_bytes or math.inf


def _least_bytes(question: Question, model: RecordedModel) -> float:
    """Returns bytes of the smallest plan in tiles, made without solvers; infinite: unknown.

    A refusal's floor does not say how much of it lies beside the arena. Where that decides whether
    the floor fits, the floor's plan is made.
    """
    room, policy = question.room, "greedy" if question.policy == "auto" else question.policy
    question = replace(question, policy=policy)
    try:
        smallest = _plan(question, model, plan_bytes=1, token_tiles=TOKEN_TILES)
        return room.taken_bytes(smallest.plan)
    except Infeasible as error:
        floor_bytes = error.floor_bytes
    if floor_bytes is None:
        return math.inf
    if floor_bytes <= room.available_bytes < room.counted_bytes(floor_bytes, 0):
        smallest = _plan(question, model, plan_bytes=floor_bytes, token_tiles=TOKEN_TILES)
        return room.taken_bytes(smallest.plan)
    return room.counted_bytes(floor_bytes, _held_bytes(question, model))


def longest(question: Question, tried: Callable[[int, bool], None]) -> int:
    """Finds the longest sequence that fits, a multiple of SEQ_GRANULE x tp x cp; 0 where none does.

    Mostly four to six lengths are traced, none above MAX_SEQ; ``tried`` is called with each and
    whether it fits. Raises as ``forecast``, and InputError: the length does not change the step.
    Where the kind of context parallelism is left open, it is the longest of any kind.
    """
    if len(kinds := _cp_kinds(question)) > 1:
        return max(longest(kind, tried) for kind in kinds)
    (question,) = kinds
    granule = SEQ_GRANULE * question.degrees.tp * question.degrees.cp
    most = max(1, MAX_SEQ // granule)
    search = LengthSearch(
        start=min(most, (question.seq or START_SEQ) // granule),
        budget_bytes=question.room.available_bytes,
        constant_bytes=_constant_bytes(replace(question, seq=granule)),
    )

    def need(count: int) -> Need:
        step_need = needed(replace(question, seq=count * granule))
        tried(count * granule, step_need.fits)
        return step_need

    search.largest(need, most)
    if search.low == most and search.is_flat:
        raise InputError(
            f"max-seq: the step needs as many bytes with {most * granule} tokens as with fewer: "
            "the length changes nothing"
        )
    return search.low * granule


def _constant_bytes(question: Question) -> int:
    """Returns ``_held_bytes``. Raises InputError: the model is a function that takes no length."""
    with _recorded_model(question) as model:
        if model.facts.num_tokens is None:
            raise InputError(f"max-seq: {question.model} takes no seq; leave out --max-seq")
        return _held_bytes(question, model)


def _held_bytes(question: Question, model: RecordedModel) -> int:
    """Returns bytes of parameters, gradients and optimizer state on the device; 0: a function's."""
    weights = not question.on_host("weights")
    return model.constant_bytes(_state_bytes(question, model), weights=weights)


def _state_bytes(question: Question, model: RecordedModel) -> float:
    """Returns optimizer state per parameter, in bytes."""
    return question.state_bytes_per_parameter(model.facts.parameter_bytes)


def _recorded_model(question: Question, say: Say = say_nothing) -> RecordedModel:
    """Returns the model of ``question``, not loaded yet. Raises InputError: there is none."""
    require_plannable(question.model, question.degrees, question.seq, question.lora)
    if question.seq is None and not is_function(question.model):
        raise InputError("seq: missing; give --seq N, the number of tokens of one sequence")
    return RecordedModel(
        model=question.model,
        seq=question.seq,
        batch=question.batch,
        dtype=question.dtype,
        degrees=question.degrees,
        lora=question.lora or 0,
        hardware=question.hardware,
        state_on_host=question.on_host("state"),
        gradients_on_host=question.on_host("gradients"),
        store=user_store() if question.remembers else None,
        say=say,
    )


def _within_budget(question: Question, model: RecordedModel) -> Forecast:
    """Plans one micro-batch so that all micro-batches in flight together are within the budget.

    An arena counts k times, for each micro-batch and what an estimate may miss. With F bytes beside
    it (peak - arena) a peak of F + (budget - F) / k is within the budget. But F is known of a plan
    only: first that of the step that keeps everything is used, then that of the last plan.
    """
    answer, room = _answer(question, model, _plan(question, model)), question.room
    for _ in range(MAX_FRAME_PLANS):
        plan = answer.step.plan
        plan_bytes = room.plan_bytes(plan.peak_bytes - plan.arena_bytes)
        if room.arena_percent == 100 or (answer.fits and not _has_faster(plan, plan_bytes)):
            break
        # Its smaller F left too large an arena, or its larger F allows a faster plan.
        other = _answer(question, model, _plan(question, model, plan_bytes=plan_bytes))
        if answer.fits:
            return other if other.fits and other.step_s < answer.step_s else answer
        answer = other
    return answer


def _has_faster(plan: Plan, plan_bytes: int) -> bool:
    """True where the frontier of ``plan`` has a faster plan with a peak of at most these bytes."""
    step_s = plan.step_s or 0.0
    return any(
        point.step_s < step_s and plan.peak_bytes < point.peak_bytes <= plan_bytes
        for point in plan.frontier
    )


def _plan(
    question: Question, model: RecordedModel, *, plan_bytes: int | None = None, **extra: Any
) -> OfflineStep:
    """Plans within the budget, or for a peak of at most ``plan_bytes``; ``extra`` are options."""
    options: dict[str, Any] = {
        **extra,
        "policy": question.policy,
        "weights": "host" if question.on_host("weights") else "device",
        "placement_time_limit_s": PLACEMENT_S,
        "optimizer_state_bytes_per_parameter": _state_bytes(question, model),
    }
    if question.host_budget_bytes is not None:
        options["host_budget"] = question.host_budget_bytes
    config = resolve(options, None)
    if plan_bytes is None:
        return model.plan(question.room.configured(config))
    return model.plan(replace(config, memory_budget=plan_bytes))


def _answer(question: Question, model: RecordedModel, step: OfflineStep) -> Forecast:
    """Returns the forecast of a planned micro-batch: sizes of all in flight, the job's speed."""
    plan, room = step.plan, question.room
    assert plan.timeline is not None, "an offline plan is simulated"
    frames_bytes = plan.peak_bytes + (room.num_frames - 1) * plan.arena_bytes
    peak_bytes = room.taken_bytes(plan) + room.missed_bytes
    tokens_per_s = None
    if model.facts.num_tokens is not None and plan.timeline.step_s:
        step_s = plan.timeline.step_s + update_seconds(plan.fixed, step.costs).sum_s
        tokens_per_s = model.facts.num_tokens * question.degrees.dp / step_s
    return Forecast(
        question=question,
        name=model.facts.name,
        step=step,
        peak_bytes=peak_bytes,
        budget_bytes=question.budget_bytes,
        outside_bytes=plan.outside_bytes + peak_bytes - frames_bytes,
        host_bytes=room.num_frames * step.problem.host_bytes + plan.fixed.on_host,
        in_flight=room.num_frames,
        tokens_per_s=tokens_per_s,
        peak_at=_peak_at(step),
        notes=(
            *_above_device(question),
            *model.facts.notes,
            *step.notes,
            *_why_estimated(question.hardware),
        ),
    )


def _above_device(question: Question) -> tuple[str, ...]:
    """Notes that the budget is above what the device has, if it is."""
    name, device_bytes = question.hardware.name, question.hardware.memory_bytes
    if question.budget is None or question.budget_bytes <= device_bytes:
        return ()
    return (f"the budget is above the {format_bytes(device_bytes)} that {name} has",)


def _why_estimated(hardware: HardwareProfile) -> tuple[str, ...]:
    """Notes why plans for ``hardware`` are estimates, if they are."""
    if is_exact(hardware):
        return ()
    missing = missing_for_target()
    if not missing:
        return (f"{hardware.name}: not a GPU that is known, so that buffers are estimated",)
    return (
        f"buffers are estimated from the CPU's, because {missing} is not installed; with it they "
        f"are lowered for {hardware.name}, and are exact",
    )


def _peak_at(step: OfflineStep) -> PeakAt | None:
    """Finds the call during which most bytes are alive, and the largest buffers there."""
    problem = step.problem
    if not problem.calls:
        return None
    line = int(memory_level(problem).argmax())
    call = problem.calls[bisect.bisect_right(call_starts(problem)[:-1], line) - 1]
    alive = [buffer for buffer in arena_buffers(problem) if buffer.start <= line < buffer.end]
    alive.sort(key=lambda buffer: (-buffer.size_bytes, buffer.id))
    # The first value of a buffer names it.
    values = {buffer.id: buffer.value for buffer in reversed([*arena_values(problem)])}
    tensors = []
    for buffer in alive[:NUM_LARGEST]:
        value = values.get(buffer.id)
        info = None if value is None else problem.tensors.get(value)
        tensors.append(
            TensorAtPeak(
                name=f"{problem.calls[buffer.call].name}/{value}" if value else buffer.id,
                size_bytes=buffer.size_bytes,
                source=None if info is None else info.source,
                label=(info.role if info is not None else "") or value or "temporary",
            )
        )
    return PeakAt(
        call=call.name,
        region=call.region,
        phase=call.phase.value,
        layer=None if call.layer_class is None else call.instance,
        tensors=tuple(tensors),
    )
