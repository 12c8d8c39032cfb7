"""What two plans, or two problems, do not have in common. What was observed does not count."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memo_compile.step.plans import Decision, Plan
from memo_compile.step.problem import Problem

MAX_ENTRIES = 6
"""Most changed entries of one sequence (``resident_bytes``, ``timeline.spans``) in a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that changed; None stands for what is not there."""

    what: str
    first: Any
    second: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """What changed from the first to the second."""

    numbers: tuple[Difference, ...] = ()
    """Fields with one value, and entries of small mappings (``fixed.parameters``)."""
    decisions: tuple[Difference, ...] = ()
    """Differences of a Plan's decisions, by layers and tensor."""
    offsets: tuple[Difference, ...] = ()
    """Differences of a Plan's offsets, by buffer."""
    parts: tuple[Difference, ...] = ()
    """A Problem's regions, calls and tensors that differ, with the fields that changed."""

    @property
    def equal(self) -> bool:
        """Whether nothing changed."""
        return not (self.numbers or self.decisions or self.offsets or self.parts)


def differences(first: Plan | Problem, second: Plan | Problem) -> Differences:
    """What changed from ``first`` to ``second``, which are of one kind."""
    numbers = _collapsed(_changed(_numbers(first), _numbers(second)))
    if isinstance(first, Plan) and isinstance(second, Plan):
        return Differences(
            numbers=numbers,
            decisions=_changed(_decisions(first), _decisions(second)),
            offsets=_changed(first.offsets, second.offsets),
        )
    assert isinstance(first, Problem) and isinstance(second, Problem), (first, second)  # noqa: PT018
    return Differences(numbers=numbers, parts=tuple(_parts_of_problems(first, second)))


_APART = frozenset({"offsets", "decisions", "regions", "calls", "tensors"})
"""Fields that are not compared as a whole."""


def _parts_of_problems(first: Problem, second: Problem) -> list[Difference]:
    before, after = ({call.name: call for call in each.calls} for each in (first, second))
    parts = [
        *_parts("region", first.regions, second.regions),
        *_parts("call", before, after),
        *_parts("tensor", first.tensors, second.tensors),
    ]
    if before.keys() == after.keys():
        moved = (
            Difference(what=f"order of calls from {at}", first=name, second=other)
            for at, (name, other) in enumerate(zip(before, after, strict=True))
            if name != other
        )
        parts.extend(itertools.islice(moved, 1))
    return parts


def _numbers(data: Plan | Problem) -> dict[str, Any]:
    """Field -> value; fields of fields and entries of mappings by path, collections by index."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(Plan if isinstance(data, Plan) else data):
        if field.name not in _APART:
            found.update(_leaves(field.name, getattr(data, field.name)))
    if isinstance(data, Problem):
        found["num_calls"], found["num_regions"] = len(data.calls), len(data.regions)
    else:
        found["num_buffers"] = len(data.offsets)
    return found


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _leaves(f"{path}.{field.name}", getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item)
    else:
        yield path, value


def _collapsed(changes: tuple[Difference, ...]) -> tuple[Difference, ...]:
    """For a long sequence in which much changed, only the first change and how many follow."""
    groups: dict[str, list[Difference]] = {}
    for change in changes:
        groups.setdefault(change.what.split("[")[0], []).append(change)
    found: list[Difference] = []
    for first, *rest in groups.values():
        if len(rest) < MAX_ENTRIES:
            found += [first, *rest]
        else:
            found.append(dataclasses.replace(first, what=f"{first.what} and {len(rest)} more"))
    return tuple(found)


def _decisions(plan: Plan) -> dict[str, str]:
    """``layers: tensor`` -> the decision in words; a mix along tokens has several."""
    found: dict[str, list[str]] = {}
    for decision in plan.decisions:
        found.setdefault(f"{decision.layer_class}: {decision.tensor}", []).append(_words(decision))
    return {key: " + ".join(words) for key, words in found.items()}


def _words(decision: Decision) -> str:
    tokens = (
        "" if decision.token_fraction == 1.0 else f" of {decision.token_fraction:.1%} of the tokens"
    )
    return f"{decision.decision}{tokens}, {decision.bytes} B"


def _changed(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[Difference, ...]:
    return tuple(
        Difference(what=key, first=first.get(key), second=second.get(key))
        for key in dict.fromkeys([*first, *second])
        if key not in first or key not in second or first[key] != second[key]
    )


def _parts(kind: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """Parts that are in one only, and of changed ones the first field that differs."""
    found = []
    for change in _changed(first, second):
        if change.first is None or change.second is None:
            there = [None if side is None else "there" for side in (change.first, change.second)]
            found.append(Difference(what=f"{kind} {change.what}", first=there[0], second=there[1]))
            continue
        before, after = (dict(_leaves("", side)) for side in (change.first, change.second))
        found += [
            dataclasses.replace(inner, what=f"{kind} {change.what}{inner.what}")
            for inner in _changed(before, after)
        ]
    return found
