"""Replaces attributes of torch's modules, classes and objects for a while."""

import contextlib
from collections.abc import Iterator
from typing import Any

_MISSING = object()


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Inside, ``owner`` has these attributes; one that it did not have itself goes at the end."""
    before = {name: vars(owner).get(name, _MISSING) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
