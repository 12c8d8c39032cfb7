"""The rows of docs/works-with.md, from ``rows.toml``: a name, and what makes a model and inputs."""

import functools
import importlib.util
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import models
from tests.models import ModelCase
from tests.numerics.training import Optimizer, sgd
from tests.works_with import makers

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A training step that is tried under memo beside eager."""

    name: str
    section: str
    packages: tuple[str, ...]
    """Those that it imports beside torch: where one is missing, the row is not tried."""
    make: Callable[[], ModelCase] | None = None
    """Makes a small model, its inputs and its loss; None: the row is an example."""
    example: tuple[str, ...] = ()
    """A program of examples/tools and its arguments, which compares memo with eager itself."""
    optimizer: Optimizer = sgd
    dtype: str = "float32"
    remark: str = ""
    needs: str = ""
    """What no machine had so far: the row is not tried."""

    def missing(self) -> list[str]:
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return [self.needs] if self.needs else absent


def _rows() -> Iterator[Row]:
    read = tomllib.loads((Path(__file__).parent / "rows.toml").read_text())
    for section in read["sections"]:
        title, rows = section.pop("name"), section.pop("rows")
        for name, own in rows.items():
            own_facts, own_fields = _split({"packages": section["packages"], **own})
            if "optimizer" in own_facts:
                own_facts["optimizer"] = getattr(makers, own_facts["optimizer"])
            if not own_facts.keys() & {"example", "needs"}:
                shared = {} if "make" in own and "bases" not in own else _split(section)[1]
                fields = {**shared, **own_fields}
                maker = fields.pop("make", section.get("make"))
                made = getattr(makers, maker, None) or getattr(models, maker)
                in_float64 = {"dtype": "float64"} if own.get("dtype") == "float64" else {}
                fields = _with_bases(fields, read["bases"]) | in_float64
                own_facts["make"] = functools.partial(made, **fields)
            yield Row(name=name, section=title, **own_facts)


def _split(given: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a Row among ``given``, and what is for the function that makes its model."""
    names = Row.__dataclass_fields__.keys() - {"make"}
    facts = {name: value for name, value in given.items() if name in names}
    for name in ("packages", "example"):
        if name in facts:
            facts[name] = tuple(facts[name])
    return facts, {name: value for name, value in given.items() if name not in names}


def _with_bases(fields: dict[str, Any], bases: Fields) -> dict[str, Any]:
    """``fields`` with those of their ``bases`` below, and their ``sub_bases`` in what they hold."""
    inner = {
        name: _with_bases({"bases": names, **fields.get(name, {})}, bases)
        for name, names in fields.pop("sub_bases", {}).items()
    }
    below = {name: value for base in fields.pop("bases", ()) for name, value in bases[base].items()}
    return {**below, **fields, **inner}


ROWS: dict[str, Row] = {row.name: row for row in _rows()}
