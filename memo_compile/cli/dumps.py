"""Reading the files of a dump folder, with one line for what is wrong with them."""

from pathlib import Path
from typing import TypeVar

from memo_compile.errors import InputError
from memo_compile.step.movable import StepCosts
from memo_compile.step.plans import Plan, ReportedPlan
from memo_compile.step.problem import Problem
from memo_compile.step.serialise import from_json

Data = TypeVar("Data", Problem, Plan, ReportedPlan, StepCosts)


def read_text(path: Path) -> str:
    """What ``path`` holds.

    Raises:
        InputError: it cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not text; expected JSON that memo wrote") from error


def read_data(path: Path, kind: type[Data]) -> Data:
    """The ``kind`` in ``path``.

    Raises:
        InputError: it cannot be read, or holds something else.
    """
    return from_json(read_text(path), kind, where=str(path))
