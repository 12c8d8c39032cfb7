"""``memo_compile.pipeline_split``: finds where to cut a model into pipeline stages.

Source: Lynx (arXiv 2406.08756), section 5: the slowest stage is to be as fast as possible, and a
stage's speed depends on how much it must recompute in the memory that its microbatches in flight
leave. The paper moves layers one by one; here the best split of all is found, and proved
(``papers.lynx.partition.split_ranges``), from the plans of few stages.
"""

import copy
import functools
import inspect
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from memo_compile.analysis.views import results_of
from memo_compile.config import resolve
from memo_compile.costs.hardware import HardwareProfile, find_hardware
from memo_compile.errors import ConfigError, Infeasible
from memo_compile.offline.offline_step import offline_config
from memo_compile.offline.plan_offline import raise_bare, tracing
from memo_compile.papers.lynx.partition import split_ranges
from memo_compile.pipelines.loss_costs import Loss, LossCosts, loss_costs
from memo_compile.pipelines.model_units import ModelUnits, units_of
from memo_compile.pipelines.split_result import PipelineSplit, SplitStage
from memo_compile.pipelines.stage_orders import StageOrders
from memo_compile.pipelines.stage_plans import StageCost, StagePlans
from memo_compile.reporting.decision_lines import decision_lines
from memo_compile.step.serialise import plain, restore
from memo_compile.torch_private import distributed, fx_graphs
from memo_compile.units import format_bytes, format_enough

Cut = tuple[int, ...]
"""How many units each stage has."""

Worth = tuple[float, float, float]
"""How good a cut is, smaller is better: bytes by which ranks exceed the budget, seconds of the
slowest rank, seconds of the slowest stage."""


def ranges_of(cut: Cut) -> list[tuple[int, int]]:
    """Per stage its units, ``[begin, end)``."""
    ends = [sum(cut[: stage + 1]) for stage in range(len(cut))]
    return [(end - count, end) for count, end in zip(cut, ends, strict=True)]


def rank_costs(plans: StagePlans, cut: Cut) -> list[StageCost]:
    """The cost of each rank with all its stages."""
    num_ranks, ranges = plans.orders.num_ranks, ranges_of(cut)
    return [plans.rank_cost(rank, tuple(ranges[rank::num_ranks])) for rank in range(num_ranks)]


def looped_split(plans: StagePlans) -> Cut:
    """Finds a split for ranks that have several stages, which share the rank's memory.

    What a stage must recompute depends on its rank's other stages, so that no table of stage times
    holds it. As in the paper, the search begins at the split that is best without recomputation,
    and moves one unit to a neighbouring stage while that helps: first the ranks come closer to
    fitting, then the slowest rank gets faster, then the slowest stage. The ranks of the result may
    still not fit the budget.
    """

    def least(_: int, begin: int, end: int) -> float | None:
        return plans.least_s(begin, end) if end > begin else None

    num_stages = plans.orders.num_stages
    cut = split_ranges(len(plans.units.units), num_stages, least, least)
    assert cut is not None, "there are as many layers as stages"
    worth = _worth(plans, cut)
    while True:
        better = _better(plans, cut, worth)
        if better is None:
            return cut
        cut, worth = better


def _better(plans: StagePlans, cut: Cut, worth: Worth) -> tuple[Cut, Worth] | None:
    """The first better neighbour of ``cut``, fast ones first; None where no neighbour is better.

    Seconds without recomputation bound a neighbour's worth: the search stops at the first whose
    bound is no better, once ``cut`` fits.
    """
    for neighbour in sorted(_neighbours(cut), key=lambda other: _least_seconds(plans, other)):
        if worth[0] == 0 and _least_seconds(plans, neighbour) >= worth[1:]:
            return None
        if (neighbour_worth := _worth(plans, neighbour)) < worth:
            return neighbour, neighbour_worth
    return None


def _neighbours(cut: Cut) -> Iterator[Cut]:
    """The cuts in which one unit has moved to a neighbouring stage."""
    for border in range(len(cut) - 1):
        for change in (-1, 1):
            moved = list(cut)
            moved[border] += change
            moved[border + 1] -= change
            if min(moved) > 0:
                yield tuple(moved)


def _least_seconds(plans: StagePlans, cut: Cut) -> tuple[float, float]:
    """Seconds of the slowest rank, and of the slowest stage, if nothing were recomputed."""
    seconds = [plans.least_s(begin, end) for begin, end in ranges_of(cut)]
    num_ranks = plans.orders.num_ranks
    return max(math.fsum(seconds[rank::num_ranks]) for rank in range(num_ranks)), max(seconds)


def _worth(plans: StagePlans, cut: Cut) -> Worth:
    """How good ``cut`` is. A rank without a plan lacks a byte, where its floor is unknown."""
    costs, budget = rank_costs(plans, cut), plans.budget_bytes() or 0
    lacking = sum(max(1, (cost.floor_bytes or 0) - budget) for cost in costs if not cost.fits)
    _, slowest_stage = _least_seconds(plans, cut)
    return lacking, max(cost.seconds for cost in costs), slowest_stage


_call_numbers = itertools.count()
"""Numbers the calls of ``pipeline_split`` in this process: the n-th calls of all ranks agree."""


def pipeline_split(
    model: torch.nn.Module,
    num_stages: int,
    mb_args: Sequence[Any] = (),
    mb_kwargs: Mapping[str, Any] | None = None,
    *,
    num_microbatches: int,
    schedule: str = "1f1b",
    num_ranks: int | None = None,
    memory_budget: int | str | None = None,
    loss_fn: Loss | None = None,
    mb_target: Any = None,
    hardware: str | HardwareProfile | None = None,
    **options: Any,
) -> PipelineSplit:
    """Cuts ``model`` into stages so that the slowest is as fast as possible.

    Args:
        model: The whole model. It must trace into one graph and hold a list of layers. Weights and
            inputs may lie on ``meta`` where ``hardware`` is named.
        num_stages: Stages of the pipeline, all ranks together.
        mb_args: What the model is called with for one microbatch, as for torch's ``pipeline()``.
        mb_kwargs: The same by name.
        num_microbatches: Microbatches of a step.
        schedule: ``"1f1b"``, ``"gpipe"`` or ``"interleaved"``, as torch's of these names.
        num_ranks: Of ``"interleaved"``, where stage s lies on rank ``s % num_ranks``.
        memory_budget: Bytes that each rank may take, as ``memo_compile.pipeline`` has it.
        loss_fn: The schedule's: called with the model's result, which must be one tensor, and
            ``mb_target``. It runs on the last rank, and counts there.
        mb_target: The target of one microbatch.
        hardware: A device to plan for, by name or profile. Without it costs are measured here.
        options: Of ``torch.compile(..., backend="memo", options=...)``.

    Seconds include recomputation. Embedding and head are units beside the layers: the first and the
    last stage may have fewer layers for them, or none. Under torch.distributed each rank may call
    this: all return the split of the rank that was first.

    Raises:
        Infeasible: no split fits ``memory_budget``; ``floor_bytes`` is the smallest that does.
        ConfigError: more stages than layers, nothing that repeats, an unknown schedule or option.
        UnsupportedGraph: the model does not trace into one graph, or nothing needs a gradient.
    """
    call_number = next(_call_numbers)
    profile = find_hardware(hardware) if isinstance(hardware, str) else hardware
    orders = StageOrders(
        kind=schedule,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_ranks=num_stages if num_ranks is None else num_ranks,
    )
    if memory_budget is not None:
        options["memory_budget"] = memory_budget
    config = resolve({"gradients": "fresh", **options}, None)
    _require_usable(model, profile, loss_fn, mb_target)
    kwargs = dict(mb_kwargs or {})
    _require_arguments(model, mb_args, kwargs)
    model, args, kwargs, mb_target = _without_meta(model, mb_args, kwargs, mb_target)
    runs = profile is None
    if not runs:
        config = offline_config(config, profile)
    with tracing(model, args, kwargs, hardware=profile, runs=runs) as traced:
        try:
            units = units_of(model, traced.gm, traced.examples)
            _require_enough(units, num_stages)
            loss = None if loss_fn is None else _loss(loss_fn, traced.gm, mb_target, profile)
            plans = StagePlans(
                units=units,
                orders=orders,
                config=config,
                hardware=profile,
                gpu=traced.gpu,
                loss=loss,
            )
            return _agreed(_split(plans), call_number)
        except Exception as error:
            raise_bare(error)


def _require_usable(
    model: Any, profile: HardwareProfile | None, loss_fn: Any, mb_target: Any
) -> None:
    """Raises ConfigError where an argument lacks what another needs."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"pipeline_split: expected a module, got {type(model).__name__}")
    if profile is None and any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            "pipeline_split: the model lies on meta, where nothing can be measured; name the "
            "hardware that it is to train on"
        )
    if loss_fn is not None and mb_target is None:
        raise ConfigError("pipeline_split: loss_fn needs mb_target, the target of a microbatch")


def _require_arguments(model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raises ConfigError where ``model`` cannot be called with a microbatch's arguments."""
    if isinstance(args, torch.Tensor):
        raise ConfigError("mb_args: expected a tuple of arguments, got one tensor; write (tensor,)")
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"mb_args, mb_kwargs: {type(model).__name__} cannot be called with them: {error}"
        ) from None


def _require_enough(units: ModelUnits, num_stages: int) -> None:
    if num_stages > units.num_layers:
        raise ConfigError(
            f"num_stages: {num_stages} stages, but the model has {units.num_layers} layers to cut "
            "between"
        )


def _split(plans: StagePlans) -> PipelineSplit:
    """The best split that fits the budget. Raises Infeasible: none fits."""
    units, orders = plans.units, plans.orders
    if orders.num_chunks > 1:
        cut = looped_split(plans)
        _require_fits(plans, cut)
    elif (best_cut := _proved_split(plans)) is not None:
        cut = best_cut
    else:
        raise _no_split(plans)
    return PipelineSplit(
        stages=_stages(plans, cut),
        even=_stages(plans, _even_cut(units, orders.num_stages)),
        schedule=orders.kind,
        num_microbatches=orders.num_microbatches,
        budget_bytes=plans.budget_bytes(),
        is_proved=orders.num_chunks == 1,
        notes=tuple(_notes(plans, cut)),
    )


def _proved_split(plans: StagePlans) -> Cut | None:
    """The best of all splits with one stage on each rank; None where none fits."""
    budget = plans.budget_bytes() or math.inf

    @functools.cache
    def least(stage: int, begin: int, end: int) -> float | None:
        may_fit = end > begin and plans.least_bytes(stage, begin, end) <= budget
        return plans.least_s(begin, end) if may_fit else None

    def exact(stage: int, begin: int, end: int) -> float | None:
        cost = plans.cost(stage, begin, end)
        return cost.seconds if cost.fits else None

    return split_ranges(len(plans.units.units), plans.orders.num_stages, least, exact)


def _require_fits(plans: StagePlans, cut: Cut) -> None:
    """Raises Infeasible where a rank with several stages has no plan."""
    floors = [cost.floor_bytes for cost in rank_costs(plans, cut) if not cost.fits]
    if floors:
        floor = None if None in floors else max(floor for floor in floors if floor is not None)
        needs = "" if floor is None else f"; the smallest that was found is {format_enough(floor)}"
        raise Infeasible(f"{_unfit(plans)}{needs}", floor_bytes=floor)


def _unfit(plans: StagePlans) -> str:
    budget = plans.budget_bytes()
    bound = "the memory that is left" if budget is None else f"memory_budget {format_bytes(budget)}"
    return f"no split into {plans.orders.num_stages} stages fits {bound} on each rank"


def _even_cut(units: ModelUnits, num_stages: int) -> Cut:
    """Equal numbers of layers in all stages; a unit that is no layer stays with the one before."""
    each, extra = divmod(units.num_layers, num_stages)
    stage_of_layer = [stage for stage in range(num_stages) for _ in range(each + (stage < extra))]
    counts, layer = [0] * num_stages, -1
    for unit in units.units:
        layer += unit.is_layer
        counts[stage_of_layer[max(layer, 0)]] += 1
    return tuple(counts)


def _stages(plans: StagePlans, cut: Cut) -> tuple[SplitStage, ...]:
    """What each stage holds and takes; a rank's stages share its recomputation by their seconds."""
    orders, ranges = plans.orders, ranges_of(cut)
    if orders.num_chunks > 1:
        costs = [rank_costs(plans, cut)[stage % orders.num_ranks] for stage in range(len(cut))]
    else:
        costs = [plans.cost(stage, begin, end) for stage, (begin, end) in enumerate(ranges)]
    stages = []
    for stage, ((begin, end), cost) in enumerate(zip(ranges, costs, strict=True)):
        rank_ranges = ranges[stage % orders.num_ranks :: orders.num_ranks]
        rank_s = math.fsum(plans.least_s(*stage_range) for stage_range in rank_ranges)
        share = plans.least_s(begin, end) / (rank_s or 1.0)
        stages.append(_stage(plans, stage, (begin, end), cost, share))
    return tuple(stages)


def _stage(
    plans: StagePlans, stage: int, units: tuple[int, int], cost: StageCost, share: float
) -> SplitStage:
    """What stage number ``stage`` holds and takes; ``share`` of the recomputation is its own."""
    stage_units, plan = plans.units.units[slice(*units)], cost.plan
    lines = () if plan is None else decision_lines(plan.decisions, plan.layer_classes)
    return SplitStage(
        modules=tuple(dict.fromkeys(name for unit in stage_units for name in unit.modules)),
        begins_at=stage_units[0].module,
        num_layers=sum(unit.is_layer for unit in stage_units),
        num_in_flight=plans.orders.num_in_flight(stage),
        seconds=None if plan is None else plans.least_s(*units) + share * cost.more_s,
        more_s=share * cost.more_s,
        peak_bytes=None if plan is None else plan.peak_bytes,
        floor_bytes=cost.floor_bytes,
        host_bytes=0 if plan is None else plan.host_bytes,
        decisions=tuple(line for line in lines if " kept" not in line),
    )


def _no_split(plans: StagePlans) -> Infeasible:
    """The error that no split fits, with the smallest budget that one fits."""
    budget = plans.budget_bytes()

    @functools.cache
    def least(stage: int, begin: int, end: int) -> int | None:
        return plans.least_bytes(stage, begin, end) if end > begin else None

    def exact(stage: int, begin: int, end: int) -> int | None:
        cost = plans.cost(stage, begin, end)
        return (budget or 0) if cost.fits else cost.floor_bytes  # a stage that fits asks no more

    cut = split_ranges(len(plans.units.units), plans.orders.num_stages, least, exact)
    text = _unfit(plans)
    if cut is None:
        return Infeasible(text)
    needs = [exact(stage, begin, end) or 0 for stage, (begin, end) in enumerate(ranges_of(cut))]
    return Infeasible(
        f"{text}; the smallest that fits one is {format_enough(max(needs))}. Raise memory_budget, "
        "take more stages or smaller microbatches",
        floor_bytes=max(needs),
    )


def _notes(plans: StagePlans, cut: Cut) -> Sequence[str]:
    """A sentence for each weight that stages share."""
    stage_of = {
        name: stage
        for stage, (begin, end) in enumerate(ranges_of(cut))
        for unit in plans.units.units[begin:end]
        for name in unit.modules
    }
    notes = []
    for weight, modules in plans.units.shared.items():
        stages = sorted({stage_of[name] for name in modules if name in stage_of})
        if len(stages) > 1:
            notes.append(
                f"{weight} is read by stages {', '.join(map(str, stages))}: each has a copy, which "
                "counts, and nothing in torch.distributed.pipelining adds up their gradients"
            )
    return notes


def _loss(
    loss_fn: Loss, gm: fx.GraphModule, target: Any, profile: HardwareProfile | None
) -> LossCosts:
    """Seconds and bytes of a microbatch's loss. Raises ConfigError: the model returns no tensor."""
    results = results_of(gm.graph)
    if len(results) != 1:
        raise ConfigError(
            f"loss_fn: the model must return one tensor, and returns {len(results)}; wrap it so "
            "that it does"
        )
    value = results[0].meta["example_value"]
    if profile is not None:
        return loss_costs(loss_fn, value, target, profile)
    with fx_graphs.real_tensors():
        output = torch.randn(value.shape, dtype=value.dtype, device=value.device)
        return loss_costs(loss_fn, output, target, None)


def _without_meta(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    """Model and inputs as fakes on the CPU where the model lies on ``meta``; else unchanged."""
    tensors = [*model.parameters(), *model.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return model, tuple(args), dict(kwargs), target
    with fx_graphs.fake_mode(real_inputs=True):

        def faked(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            fake = torch.empty_like(value, device="cpu")
            if isinstance(value, torch.nn.Parameter):
                return torch.nn.Parameter(fake, requires_grad=value.requires_grad)
            return fake

        # deepcopy takes each tensor's copy from here.
        fakes = {id(tensor): faked(tensor) for tensor in tensors}
        copied = copy.deepcopy(model, fakes)
        return copied, *tree_map(faked, (tuple(args), dict(kwargs), target))


def _agreed(split: PipelineSplit, call_number: int) -> PipelineSplit:
    """``split``, or the split of the rank that finished call ``call_number`` first."""
    if distributed.num_ranks() < 2:
        return split
    key = f"memo/pipeline_split/{call_number}"
    text = distributed.job_store().setdefault(key, json.dumps(plain(split)))
    first_split: PipelineSplit = restore(json.loads(text), PipelineSplit, "split")
    return first_split
