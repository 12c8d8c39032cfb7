"""What two plans, or two problems, do not have in common. What was observed does not count."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from memo_compile.step.plans import Plan
from memo_compile.step.problem import Problem
from memo_compile.step.serialise import plain

MAX_ENTRIES = 6
"""Most changed entries of one sequence (``resident_bytes``, ``timeline.spans``) in a list."""


class Difference(NamedTuple):
    """One thing that changed; None stands for what is not there."""

    what: str
    first: Any
    second: Any


Differences = Mapping[str, list[Difference]]
"""What changed: ``numbers``, a plan's ``decisions`` and ``offsets``, a problem's ``parts``."""


def differences(first: Plan | Problem, second: Plan | Problem) -> Differences:
    """What changed from ``first`` to ``second``, which are of one kind."""
    before, after = (_grouped(data) for data in (first, second))
    return {
        group: [
            change
            for name in dict.fromkeys([*before[group], *after[group]])
            for change in _changes(name, before[group].get(name), after[group].get(name))
        ]
        for group in before
    }


def _grouped(data: Plan | Problem) -> dict[str, dict[str, Any]]:
    """``data`` as JSON has it, in the groups of ``Differences``, each part under its name."""
    fields = dataclasses.fields(Plan if isinstance(data, Plan) else Problem)
    numbers = {field.name: plain(getattr(data, field.name)) for field in fields}
    decisions: dict[str, str] = {}
    parts: dict[str, Any] = {}
    if isinstance(data, Plan):
        for row in numbers.pop("decisions"):
            name = f"{row['layer_class']}: {row['tensor']}"
            words = f"{row['decision']} of {row['token_fraction']:.1%} of tokens, {row['bytes']} B"
            decisions[name] = f"{decisions[name]} + {words}" if name in decisions else words
    else:
        for kind in ("region", "tensor"):
            of_kind = numbers.pop(f"{kind}s")
            parts.update((f"{kind} {name}", part) for name, part in of_kind.items())
        calls = numbers.pop("calls")
        parts.update((f"call {call['name']}", call) for call in calls)
        parts["order of calls"] = [call["name"] for call in calls]
    offsets = numbers.pop("offsets", {})
    return {"numbers": numbers, "decisions": decisions, "offsets": offsets, "parts": parts}


def _changes(what: str, first: Any, second: Any) -> Iterator[Difference]:
    """The innermost entries that differ; of a long sequence the first, and how many follow."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in dict.fromkeys([*first, *second]):
            yield from _changes(f"{what}.{key}", first.get(key), second.get(key))
    elif isinstance(first, list) and isinstance(second, list):
        pairs = enumerate(itertools.zip_longest(first, second))
        found = [change for at, pair in pairs for change in _changes(f"{what}[{at}]", *pair)]
        if len(found) > MAX_ENTRIES:
            found = [found[0]._replace(what=f"{found[0].what} and {len(found) - 1} more")]
        yield from found
    elif first != second:
        yield Difference(what, *("there" if isinstance(v, dict) else v for v in (first, second)))
