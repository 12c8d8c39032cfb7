"""Reading a JSON object and its fields.

A file or field that is missing without a default, or is not what its reader says, is an InputError
that names it, and the index of an entry.
"""

import graphlib
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memo_compile.errors import InputError
from memo_compile.text_files import read_json

Number = int | float

_COLLECTIONS = ("heu", "opt", "partition")
"""Fields of a file that collects instances of each kind."""

MAX_NUMBER = 1e100
"""Larger numbers are refused: they are nonsense in any unit, and products would overflow floats."""

_log = logging.getLogger(__name__)


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in ``path``."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def unwrap_instance(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns ``data``, or the object under its key ``instance``. Raises InputError: it is many."""
    instance = data.get("instance", data)
    if not isinstance(instance, Mapping):
        raise InputError(f"instance: expected an object, got {type(instance).__name__}")
    lists = [name for name in _COLLECTIONS if isinstance(instance.get(name), list)]
    if lists:
        raise InputError(
            f"{lists[0]}: a list of instances; expected one instance, so write one of its entries "
            "to a file of its own"
        )
    return instance


def warn_unknown(data: Mapping[str, Any], names: frozenset[str]) -> None:
    """Logs a warning about fields of ``data`` that are not among ``names``: often a misspelling."""
    unknown = sorted(set(data) - names)
    if unknown:
        _log.warning("memo: ignoring unknown fields: %s", ", ".join(unknown))


def number(data: Mapping[str, Any], name: str, default: Number | None = None) -> Number:
    """Returns the finite, non-negative number under ``name``."""
    if name not in data:
        if default is None:
            raise InputError(f"{name}: missing")
        return default
    return _checked_number(data[name], name)


def whole(data: Mapping[str, Any], name: str, *, minimum: int) -> int:
    """Returns the whole number of at least ``minimum`` under ``name``."""
    value = number(data, name)
    if value != int(value) or value < minimum:
        raise InputError(f"{name}: expected a whole number >= {minimum}, got {value}")
    return int(value)


def flag(data: Mapping[str, Any], name: str, default: bool) -> bool:
    """Returns the truth value under ``name``; 0 and 1 count."""
    value = data.get(name, default)
    if value not in (True, False, 0, 1) or isinstance(value, str):
        raise InputError(f"{name}: expected true or false, got {value!r}")
    return bool(value)


def numbers(data: Mapping[str, Any], name: str, length: int | None = None) -> tuple[Number, ...]:
    """Returns the list of finite, non-negative numbers under ``name``, of the given length."""
    values = _checked_list(data, name, length)
    return tuple(_checked_number(value, f"{name}[{i}]") for i, value in enumerate(values))


def indices(data: Mapping[str, Any], name: str, num_ops: int) -> tuple[int, ...]:
    """Returns the sorted set of operator indices under ``name``, each in ``[0, num_ops)``."""
    return _checked_indices(_checked_list(data, name, None), name, num_ops)


def dependencies(data: Mapping[str, Any], num_ops: int) -> tuple[tuple[int, ...], ...]:
    """Returns for each operator the ones that it reads, all of them earlier in the list."""
    deps = []
    for i, row in enumerate(_checked_list(data, "deps", num_ops)):
        if not isinstance(row, list):
            raise InputError(f"deps[{i}]: expected a list of operators, got {row!r}")
        deps.append(_checked_indices(row, f"deps[{i}]", num_ops))
    try:
        graphlib.TopologicalSorter(dict(enumerate(deps))).prepare()
    except graphlib.CycleError as error:
        cycle = " -> ".join(map(str, reversed(error.args[1])))
        raise InputError(f"deps: cyclic: {cycle} (reads -> is read)") from None
    for i, j in [(i, j) for i, row in enumerate(deps) for j in row if j > i]:
        raise InputError(
            f"deps[{i}]: operator {i} reads operator {j}, which is listed after it; "
            "list the operators in execution order"
        )
    return tuple(deps)


def _checked_list(data: Mapping[str, Any], name: str, length: int | None) -> list[Any]:
    """Returns the list under ``name``, of ``length`` entries if that is given."""
    if name not in data:
        raise InputError(f"{name}: missing")
    values = data[name]
    if not isinstance(values, list):
        raise InputError(f"{name}: expected a list, got {values!r}")
    if length is not None and len(values) != length:
        raise InputError(f"{name}: expected {length} entries, got {len(values)}")
    return values


def _checked_number(value: Any, name: str) -> Number:
    """Returns ``value`` of field ``name``, a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{name}: expected a number, got {value!r}")
    if not 0 <= value < math.inf:
        raise InputError(f"{name}: expected a finite number >= 0, got {value}")
    if value > MAX_NUMBER:
        raise InputError(f"{name}: expected a number of at most {MAX_NUMBER:g}, got a larger one")
    return value


def _checked_indices(values: list[Any], name: str, num_ops: int) -> tuple[int, ...]:
    """Returns the sorted set of ``values`` of field ``name``, operators in ``[0, num_ops)``."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_ops:
            raise InputError(f"{name}: expected an operator in 0..{num_ops - 1}, got {value!r}")
    return tuple(sorted(set(values)))
