"""Writes Problem, Plan and StepCosts as JSON and reads them. A file has the schema's version."""

import dataclasses
import enum
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Never, TypeVar

from memo_compile.errors import InputError, MemoError
from memo_compile.step.movable import StepCosts
from memo_compile.step.plans import SCHEMA_VERSION, Observed, Plan, ReportedPlan
from memo_compile.step.problem import Problem
from memo_compile.text_files import parse_json

Data = TypeVar("Data", Problem, Plan, ReportedPlan, StepCosts)

_OBSERVED = frozenset(field.name for field in dataclasses.fields(Observed))


def to_json(data: Problem | Plan | StepCosts) -> str:
    """Returns ``data`` as JSON; equal data have equal texts. A Plan gets an empty ``Observed``."""
    if isinstance(data, Plan) and not isinstance(data, ReportedPlan):
        data = ReportedPlan.of(data, Observed())
    content = {"schema": SCHEMA_VERSION, "kind": _kind_name(type(data)), **plain(data)}
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def from_json(text: str, kind: type[Data], *, where: str = "input") -> Data:
    """Returns the ``kind`` that ``text`` holds; a Plan comes without its ``Observed`` fields.

    Raises InputError: not JSON, another kind or version, or a field that is missing or wrong.
    """
    content = parse_json(text, where)
    if not isinstance(content, dict) or content.get("kind") != _kind_name(kind):
        raise InputError(f"{where}: expected a {_kind_name(kind)}")
    if content.get("schema") != SCHEMA_VERSION:
        raise InputError(
            f"{where}: expected schema {SCHEMA_VERSION}, got {content.get('schema')!r}; "
            "write the file again with this version of memo"
        )
    ignored = {"schema", "kind"} | (_OBSERVED if kind is Plan else set())
    fields = {key: value for key, value in content.items() if key not in ignored}
    try:
        data = restore(fields, kind, kind.__name__.lower())
        if isinstance(data, Problem):
            _require_regions(data)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    return data


def _require_regions(problem: Problem) -> None:
    """Raises InputError unless each call's region exists and has as many inputs and outputs."""
    for at, call in enumerate(problem.calls):
        region = problem.regions.get(call.region)
        if region is None:
            raise InputError(f"problem.calls[{at}].region: there is no region {call.region}")
        counts = len(call.inputs), len(call.outputs)
        expected = len(region.input_ends), len(region.outputs)
        if counts != expected:
            raise InputError(
                f"problem.calls[{at}]: {call.region} has {expected[0]} inputs and {expected[1]} "
                f"outputs, got {counts[0]} and {counts[1]}"
            )


def _kind_name(kind: type) -> str:
    return Plan.__name__ if issubclass(kind, Plan) else kind.__name__


_JSON_SCALARS = frozenset((int, float, str, bool, type(None)))


def plain(value: Any) -> Any:
    """Returns ``value`` as JSON has it: dataclasses and mappings as dicts, tuples as lists."""
    kind: Any = type(value)
    return _converter(kind)(value)


@functools.cache
def _converter(kind: Any) -> Callable[[Any], Any]:
    """Returns ``plain`` for values of ``kind``, made once, as it runs for every call of a step."""
    if dataclasses.is_dataclass(kind):
        fields = dataclasses.fields(kind)
        names = [field.name for field in fields]
        may_lack = [(field.name, field.default) for field in fields if field.metadata]

        def of_dataclass(value: Any) -> dict[str, Any]:
            lacking = [name for name, default in may_lack if getattr(value, name) == default]
            return {
                name: item if type(item) in _JSON_SCALARS else plain(item)
                for name in names
                if name not in lacking
                for item in (getattr(value, name),)
            }

        return of_dataclass
    if issubclass(kind, enum.Enum):
        return lambda value: value.value
    if issubclass(kind, Mapping):
        return lambda value: {key: plain(item) for key, item in value.items()}
    if issubclass(kind, tuple | list):
        return lambda value: [
            item if type(item) in _JSON_SCALARS else plain(item) for item in value
        ]
    return lambda value: value


_SCALARS: dict[Any, tuple[Any, str]] = {
    int: (int, "an integer"),
    float: ((int, float), "a number"),
    str: (str, "a text"),
}


def restore(value: Any, kind: Any, where: str) -> Any:
    """Returns ``value`` of JSON as ``kind``: a dataclass, enum, tuple, mapping, or optional.

    Raises InputError: a field is missing, unknown or of another type; its path begins with
    ``where``.
    """
    try:
        return _restorer(kind)(value)
    except (ValueError, TypeError, AttributeError, MemoError):
        return _slowly_restored(value, kind, where)  # which says what is wrong, and where


@functools.cache
def _restorer(kind: Any) -> Callable[[Any], Any]:
    """Returns a function that restores values of ``kind``, several times as fast.

    It raises one of the errors that ``restore`` catches, and does not say where the fault is.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = _restorer(next(argument for argument in arguments if argument is not type(None)))
        return lambda value: None if value is None else inner(value)
    if origin is tuple and arguments[-1] is ... and arguments[0] in _SCALARS:
        kinds = _kinds_of(arguments[0])
        return lambda value: tuple(
            _exactly(list, value) if kinds.issuperset(map(type, value)) else _refuse(value)
        )
    if origin is tuple and arguments[-1] is ...:
        item_of = _restorer(arguments[0])
        return lambda value: tuple([item_of(item) for item in _exactly(list, value)])
    if origin is tuple:
        items_of = [_restorer(argument) for argument in arguments]
        return lambda value: tuple(
            [make(item) for make, item in zip(items_of, _exactly(list, value), strict=True)]
        )
    if origin is not None and issubclass(origin, Mapping):
        value_of = _restorer(arguments[1])
        return lambda value: {key: value_of(item) for key, item in _exactly(dict, value).items()}
    if dataclasses.is_dataclass(kind):
        return _dataclass_restorer(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind
    if kind in _SCALARS:
        allowed = _kinds_of(kind)
        return lambda value: value if type(value) in allowed else _refuse(value)
    return lambda value: value


def _kinds_of(scalar: Any) -> frozenset[type]:
    """Returns the types of JSON values that a ``scalar`` may have."""
    kinds = _SCALARS[scalar][0]
    return frozenset(kinds if isinstance(kinds, tuple) else (kinds,))


def _dataclass_restorer(kind: Any) -> Callable[[Any], Any]:
    fields = {name: _restorer(hint) for name, hint in _hints(kind).items()}
    missing = dataclasses.MISSING
    needed = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is missing and field.default_factory is missing
    }

    def of_dataclass(value: Any) -> Any:
        names = _exactly(dict, value).keys()
        if not needed <= names <= fields.keys():
            _refuse(value)
        return kind(**{name: fields[name](item) for name, item in value.items()})

    return of_dataclass


def _exactly(kind: type, value: Any) -> Any:
    return value if type(value) is kind else _refuse(value)


def _refuse(value: Any) -> Never:
    raise ValueError(f"{value!r:.40} is not of the kind that is restored")


def _slowly_restored(value: Any, kind: Any, where: str) -> Any:
    """Returns or raises what ``restore`` does; ``where`` is the path of ``value`` in the file."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if value is None else _slowly_restored(value, inner, where)
    if origin is tuple:
        items = _require(value, list, "a list", where)
        kinds = arguments[:1] * len(items) if arguments[-1] is ... else arguments
        if len(items) != len(kinds):
            raise InputError(f"{where}: expected {len(kinds)} entries, got {len(items)}")
        pairs = enumerate(zip(items, kinds, strict=True))
        return tuple(_slowly_restored(item, inner, f"{where}[{at}]") for at, (item, inner) in pairs)
    if origin is not None and issubclass(origin, Mapping):
        items = _require(value, dict, "an object", where)
        return {
            key: _slowly_restored(item, arguments[1], f"{where}.{key}")
            for key, item in items.items()
        }
    if dataclasses.is_dataclass(kind):
        return _restore_fields(_require(value, dict, "an object", where), kind, where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        values = [member.value for member in kind]
        if value not in values:
            raise InputError(f"{where}: expected one of {values}, got {value!r}")
        return kind(value)
    types_of, text = _SCALARS.get(kind, (object, ""))
    if not isinstance(value, types_of) or (isinstance(value, bool) and kind in _SCALARS):
        raise InputError(f"{where}: expected {text}, got {value!r}")
    return value


def _restore_fields(values: dict[str, Any], kind: Any, where: str) -> Any:
    hints = _hints(kind)
    if unknown := sorted(values.keys() - hints.keys()):
        expected = ", ".join(sorted(hints))
        raise InputError(f"{where}.{unknown[0]}: unknown field; expected {expected}")
    missing = dataclasses.MISSING
    for field in dataclasses.fields(kind):
        optional = field.default is not missing or field.default_factory is not missing
        if field.name not in values and not optional:
            raise InputError(f"{where}.{field.name}: is missing")
    return kind(
        **{
            key: _slowly_restored(item, hints[key], f"{where}.{key}")
            for key, item in values.items()
        }
    )


_hints = functools.cache(typing.get_type_hints)


def _require(value: Any, kind: type, text: str, where: str) -> Any:
    if not isinstance(value, kind):
        raise InputError(f"{where}: expected {text}, got {type(value).__name__}")
    return value
