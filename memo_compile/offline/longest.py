"""The longest sequence, or the largest batch, that a call can take: ``memo fit`` from Python."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memo_compile.costs.hardware import HardwareProfile, find_hardware
from memo_compile.errors import InputError
from memo_compile.offline.first_call import FirstCall
from memo_compile.offline.fit import Fitting, require_fits
from memo_compile.offline.fit_question import FitQuestion, Vary
from memo_compile.step.plans import ReportedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestFit:
    """The largest size that fits, and its plan."""

    size: int
    """Tokens of a sequence, or samples of a batch."""
    multiple_of: int
    """``size + multiple_of`` was not found to fit."""
    budget_bytes: int
    plan: ReportedPlan
    """Of a step of ``size``, as the backend makes it with ``costs="roofline"``."""
    options: Mapping[str, Any]
    """For ``torch.compile(..., backend="memo")``, to get this plan."""
    refused: str = ""
    """Why a larger size fails, where the model's code and not memory is the bound."""
    notes: tuple[str, ...] = ()
    """What was not checked of the plan, because nothing ran."""


def longest(
    call: Callable[[], Any],
    budget: str | int | None = None,
    *,
    vary: str = "sequence",
    options: Mapping[str, Any] | None = None,
    hardware: str | HardwareProfile | None = None,
    multiple_of: int | None = None,
    dims: str | None = None,
) -> LongestFit:
    """Finds the longest sequence for which a training step of ``call`` fits; nothing runs.

    Args:
        call: ``functools.partial(model, ids, labels=labels)``: what is compiled, and what it is
            called with. Its inputs are made longer; the model's weights are not copied.
        budget: Bytes of the step, as option ``memory_budget`` has them. By default that of
            ``options``, else what the device has free.
        vary: ``"sequence"``, or ``"batch"`` for the largest one.
        options: Of ``torch.compile(..., backend="memo")``.
        hardware: Another device than the one that the tensors lie on: a name or a profile.
        multiple_of: Sizes are multiples of this: 128 tokens by default, or 1 sample.
        dims: Which dimensions vary, where shapes do not say it: ``"input_ids:1,labels:1"``.

    Raises:
        Infeasible: not even the smallest size fits; ``floor_bytes`` says what that needs.
        InputError: no input has such a dimension, or other sizes than the call's are no step.
        UnsupportedGraph: the step does not trace into one graph, or nothing needs a gradient.
        ConfigError: an option is unknown or cannot be used.
    """
    what = {kind.value: kind for kind in Vary}.get(vary)
    if what is None:
        raise InputError(f'vary: expected "sequence" or "batch", got {vary!r}')
    if multiple_of is not None and multiple_of < 1:
        raise InputError(f"multiple_of: expected at least 1, got {multiple_of}")
    question = FitQuestion(
        vary=(what,),
        hardware=find_hardware(hardware) if isinstance(hardware, str) else hardware,
        memory=None if budget is None else str(budget),
        multiple_of=multiple_of,
        dims=dims,
    )
    answer = Fitting(_first_call(call, options), question).answer(lambda _: None, lambda *_: None)
    require_fits(answer)
    (fitted,) = answer.largest
    assert fitted.step is not None, "what fits has a plan"
    return LongestFit(
        size=fitted.size,
        multiple_of=fitted.multiple_of,
        budget_bytes=answer.budget_bytes,
        plan=fitted.step.plan,
        options=answer.options,
        refused=fitted.refused,
        notes=tuple(dict.fromkeys((*fitted.notes, *fitted.step.notes))),
    )


def _first_call(call: Callable[[], Any], options: Mapping[str, Any] | None) -> FirstCall:
    """Takes ``call`` apart. Raises InputError: it is no ``functools.partial`` with inputs."""
    if not isinstance(call, functools.partial) or not (call.args or call.keywords):
        raise InputError(
            "longest: expected functools.partial(model, *args, **kwargs), whose inputs are made "
            f"longer, got {type(call).__name__}"
        )
    function = call.func
    if isinstance(function, torch.nn.Module):
        function = getattr(function, "_orig_mod", function)  # of what was compiled
    return FirstCall(
        function=function, args=call.args, kwargs=call.keywords, options=options, mode=None
    )
