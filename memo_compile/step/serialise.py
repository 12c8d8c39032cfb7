"""Problem, Plan and StepCosts as JSON, both ways. A file carries the schema's version."""

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from memo_compile.errors import InputError
from memo_compile.step.movable import StepCosts
from memo_compile.step.plans import SCHEMA_VERSION, Plan
from memo_compile.step.problem import Problem

Data = TypeVar("Data", Problem, Plan, StepCosts)


def to_json(data: Problem | Plan | StepCosts) -> str:
    """``data`` as JSON text; equal data gives equal text."""
    content = {"schema": SCHEMA_VERSION, "kind": type(data).__name__, **_plain(data)}
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def from_json(text: str, kind: type[Data], *, where: str = "input") -> Data:
    """The ``kind`` that ``text`` holds.

    Raises:
        InputError: not JSON, another kind or version, or a field that is missing or wrong.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise InputError(f"{where}: not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("kind") != kind.__name__:
        raise InputError(f"{where}: expected a {kind.__name__}")
    if content.get("schema") != SCHEMA_VERSION:
        raise InputError(
            f"{where}: expected schema {SCHEMA_VERSION}, got {content.get('schema')!r}; "
            "write the file again with this version of memo"
        )
    fields = {key: value for key, value in content.items() if key not in ("schema", "kind")}
    try:
        return _restore(fields, kind)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where}: {error}") from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _restore(value: Any, kind: Any) -> Any:
    """``value`` from JSON as ``kind``: a dataclass, enum, tuple, mapping, or optional of these."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        return None if value is None else _restore(value, inner[0])
    if origin is tuple:
        return tuple(_restore(item, arguments[0]) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        return {key: _restore(item, arguments[1]) for key, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{key: _restore(item, hints[key]) for key, item in value.items()})  # type: ignore[operator]
    return value
