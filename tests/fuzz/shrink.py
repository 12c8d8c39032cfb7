"""A failing case made smaller, one step at a time, while it still fails in the same way."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tests.fuzz import losses
from tests.fuzz.case import (
    AFTER,
    BEFORE,
    DTYPES,
    KINDS,
    LENGTHS,
    OPTIONS,
    RUN,
    UPDATES,
    Case,
    Group,
    Piece,
    is_allowed,
)
from tests.fuzz.grammar import Kind

Fails = Callable[[Case], bool]


def shrink(case: Case, fails: Fails, *, attempts: int, seconds: float) -> Case:
    """The smallest case found that ``fails``; each step is kept if it does."""
    until = time.monotonic() + seconds
    tried: set[str] = set()
    found = True
    while found:
        found = False
        for smaller in smaller_cases(case):
            if str(smaller) in tried or not is_allowed(smaller):
                continue
            if len(tried) >= attempts or time.monotonic() > until:
                return case
            tried.add(str(smaller))
            if fails(smaller):
                case, found = smaller, True
                break
    return case


def smaller_cases(case: Case) -> Iterator[Case]:
    """One step simpler each, the largest steps first."""
    if case.options["lowering"] != "aten":
        yield replace(case, options={**case.options, "lowering": "aten"})
    yield from _fewer_layers(case)
    yield from _plainer_runs(case)
    yield from _plainer_pieces(case)
    yield from _smaller_sizes(case)


def _fewer_layers(case: Case) -> Iterator[Case]:
    for at, group in enumerate(case.groups):
        if len(case.groups) > 1:
            yield replace(case, groups=case.groups[:at] + case.groups[at + 1 :])
        for number in range(len(group.pieces)):
            if len(group.pieces) > 1:
                rest = group.pieces[:number] + group.pieces[number + 1 :]
                yield _with_group(case, at, replace(group, pieces=rest))
        for repeats in (1, 2, 3):
            if repeats < group.repeats:
                yield _with_group(case, at, replace(group, repeats=repeats))
        if group.shared:
            yield _with_group(case, at, replace(group, shared=False))


def _plainer_runs(case: Case) -> Iterator[Case]:
    for budgets in ((), *((budget,) for budget in case.budgets)):
        if len(budgets) < len(case.budgets):
            yield replace(case, budgets=budgets)
    for name, value in _simpler(case.run, {"lengths": LENGTHS, **RUN, **UPDATES}):
        yield replace(case, run={**case.run, name: value})
    for name, value in _simpler(case.options, OPTIONS):
        yield replace(case, options={**case.options, name: value})
    if case.returns != "nothing":
        yield replace(case, returns="nothing")
    if case.loss.kind != "sum":
        yield replace(case, loss=Piece(kind="sum", options={}))
    for options in _plainer_options(case.loss.options, losses.LOSSES[case.loss.kind]):
        yield replace(case, loss=replace(case.loss, options=options))
    if case.head["weight"] != "self.head.weight" or case.head["form"] != "plain":
        plain = {name: next(iter(values)) for name, values in losses.HEADS.options.items()}
        yield replace(case, head=plain)
    if case.stem != "vectors":
        yield replace(case, stem="vectors")
    if case.dtype != DTYPES[0]:
        yield replace(case, dtype=DTYPES[0])


def _simpler(
    chosen: Mapping[str, Any], known: Mapping[str, tuple[Any, ...]]
) -> Iterator[tuple[str, Any]]:
    """The simplest value of every option that has another one."""
    for name, values in known.items():
        if chosen[name] != values[0]:
            yield name, values[0]


def _plainer_pieces(case: Case) -> Iterator[Case]:
    for at, group in enumerate(case.groups):
        for number, piece in enumerate(group.pieces):
            for plainer in _plainer(piece):
                pieces = (*group.pieces[:number], plainer, *group.pieces[number + 1 :])
                yield _with_group(case, at, replace(group, pieces=pieces))


def _plainer(piece: Piece) -> Iterator[Piece]:
    for options in _plainer_options(piece.options, KINDS[piece.kind]):
        yield replace(piece, options=options)
    if piece.before != next(iter(BEFORE)):
        yield replace(piece, before=next(iter(BEFORE)))
    if piece.after != next(iter(AFTER)):
        yield replace(piece, after=next(iter(AFTER)))


def _plainer_options(chosen: Mapping[str, str], kind: Kind) -> Iterator[dict[str, str]]:
    for name, values in kind.options.items():
        if chosen[name] != next(iter(values)):
            yield {**chosen, name: next(iter(values))}


def _smaller_sizes(case: Case) -> Iterator[Case]:
    for name in (field.name for field in dataclasses.fields(case.sizes)):
        size = getattr(case.sizes, name)
        for smaller in sorted({2, size // 2, size - 1} - {0, 1}):
            if smaller < size:
                yield replace(case, sizes=replace(case.sizes, **{name: smaller}))


def _with_group(case: Case, at: int, group: Group) -> Case:
    return replace(case, groups=(*case.groups[:at], group, *case.groups[at + 1 :]))
