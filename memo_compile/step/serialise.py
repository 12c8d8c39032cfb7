"""Writes Problem, Plan and StepCosts as JSON and reads them. A file has the schema's version."""

import dataclasses
import enum
import functools
import itertools
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Never, TypeVar

from memo_compile.errors import InputError
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
        may_lack = [(field.name, _default_of(field)) for field in fields if field.metadata]

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


def _default_of(field: dataclasses.Field[Any]) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


_SCALARS: dict[Any, tuple[frozenset[type], str]] = {
    int: (frozenset((int,)), "an integer"),
    float: (frozenset((int, float)), "a number"),
    str: (frozenset((str,)), "a text"),
}


class _Misfit(Exception):
    """A value is not of the kind that is restored; ``path`` leads to it, such as ``.calls[3]``."""

    def __init__(self, text: str, path: str = "") -> None:
        super().__init__(text)
        self.text, self.path = text, path


def restore(value: Any, kind: Any, where: str) -> Any:
    """Returns ``value`` of JSON as ``kind``: a dataclass, enum, tuple, mapping, or optional.

    Raises InputError: a field is missing, unknown or of another type; its path begins with
    ``where``.
    """
    try:
        return _restorer(kind)(value)
    except _Misfit as misfit:
        raise InputError(f"{where}{misfit.path}: {misfit.text}") from misfit


@functools.cache
def _restorer(kind: Any) -> Callable[[Any], Any]:
    """Returns the function that restores values of ``kind``, made once. It raises _Misfit.

    A union is ``kind | None``. Values of other kinds than those of ``restore`` pass as they are.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        restored = _restorer(next(argument for argument in arguments if argument is not type(None)))
        return lambda value: None if value is None else restored(value)
    if origin is tuple:
        return _tuple_restorer(arguments)
    if origin is not None and issubclass(origin, Mapping):
        restorers = itertools.repeat(_restorer(arguments[1]))
        return lambda value: _restored(".{}", _require(value, dict, "an object").items(), restorers)
    if dataclasses.is_dataclass(kind):
        return _dataclass_restorer(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _enum_restorer(kind)
    return _scalar_restorer(kind) if kind in _SCALARS else lambda value: value


def _restored(
    path_format: str, entries: Iterable[tuple[Any, Any]], restorers: Iterable[Callable[[Any], Any]]
) -> dict[Any, Any]:
    """Restores each entry's value; a misfit's path begins with its key in ``path_format``."""
    restored: dict[Any, Any] = {}
    key = None
    try:
        for (key, value), restorer in zip(entries, restorers, strict=False):
            restored[key] = restorer(value)
    except _Misfit as misfit:
        raise _Misfit(misfit.text, f"{path_format.format(key)}{misfit.path}") from None
    return restored


def _tuple_restorer(kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Returns the restorer of a tuple of fixed or, ending in ``...``, any length."""
    restorers = [_restorer(kind) for kind in kinds if kind is not ...]
    has_any_length = kinds[-1] is ...
    scalars = (
        _SCALARS[kinds[0]][0] if has_any_length and kinds[0] in _SCALARS else frozenset[type]()
    )

    def of_list(value: Any) -> Any:
        items = _require(value, list, "a list")
        if scalars and scalars.issuperset(
            map(type, items)
        ):  # many numbers: without a call for each
            return tuple(items)
        if not has_any_length and len(items) != len(restorers):
            _refuse(f"expected {len(restorers)} entries, got {len(items)}")
        item_of = itertools.repeat(restorers[0]) if has_any_length else restorers
        return tuple(_restored("[{}]", enumerate(items), item_of).values())

    return of_list


def _dataclass_restorer(kind: Any) -> Callable[[Any], Any]:
    """Returns the restorer of a dataclass from an object with its fields."""
    fields = {name: _restorer(hint) for name, hint in typing.get_type_hints(kind).items()}
    missing = dataclasses.MISSING
    needed = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is missing and field.default_factory is missing
    ]

    def of_dict(value: Any) -> Any:
        values = _require(value, dict, "an object")
        if not values.keys() <= fields.keys():
            unknown = min(values.keys() - fields.keys())
            _refuse(f"unknown field; expected {', '.join(sorted(fields))}", f".{unknown}")
        for name in needed:
            if name not in values:
                _refuse("is missing", f".{name}")
        return kind(**_restored(".{}", values.items(), map(fields.__getitem__, values)))

    return of_dict


def _enum_restorer(kind: type[enum.Enum]) -> Callable[[Any], Any]:
    """Returns the restorer of an enum from the value of a member."""

    def member(value: Any) -> Any:
        try:
            return kind(value)
        except ValueError:
            expected = [member.value for member in kind]
            _refuse(f"expected one of {expected}, got {value!r}")

    return member


def _scalar_restorer(kind: Any) -> Callable[[Any], Any]:
    """Returns the restorer of a number or text: a type that JSON has, or one derived from it."""
    allowed, text = _SCALARS[kind]

    def scalar(value: Any) -> Any:
        if type(value) in allowed:
            return value
        is_subclass = isinstance(value, tuple(allowed)) and not isinstance(value, bool)
        return value if is_subclass else _refuse(f"expected {text}, got {value!r}")

    return scalar


def _require(value: Any, kind: type, text: str) -> Any:
    if not isinstance(value, kind):
        _refuse(f"expected {text}, got {type(value).__name__}")
    return value


def _refuse(text: str, path: str = "") -> Never:
    raise _Misfit(text, path)
