"""What stands for a step that a user's function makes: its steps are remembered under that.

The function is called each time; what it made is described, with all code that was loaded for it.
"""

import contextlib
import enum
import functools
import logging
import os
import re
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from memo_compile.file_store import digest_of
from memo_compile.offline.remembered_keys import log
from memo_compile.offline.shapes.files_read import FILES_READ
from memo_compile.offline.shapes.load import Loaded

VOLATILE = frozenset({"_", "SHLVL", "COLUMNS", "LINES", "OLDPWD"})
"""Variables of the environment that differ from one command to the next."""

OWN = frozenset(
    "memo_compile memo_runtime rich typer click pygments markdown_it mdurl shellingham".split()
)
"""Packages that the command itself loads, sooner or later."""

NO_CODE = ("__pycache__", "site-packages")
"""Folders that hold none of the user's code; nor do hidden ones, an environment's mostly."""

MAX_FILES = 2000
"""With more folders and Python files beside a function nothing is remembered."""

RANDOM = frozenset({"_original_object_hash"})
"""Attributes that are other numbers in each process: transformers keeps a hash of Python's."""

_PLAIN = (bool, int, str, bytes, type(None))
_NAMED = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    range,
    slice,
    complex,
    Path,
    re.Pattern,
)
_SEQUENCES = (list, tuple, deque)
_BUILT_IN = (bool, int, str, bytes, float, complex)
"""What a class of the user's may be made from."""


class _Unknown(Exception):
    """A value that cannot be described by what it holds."""


def function_content(text: str, loaded: Loaded) -> Mapping[str, Any] | None:
    """What the step of ``package.module:function`` depends on, beside memo and torch.

    Its model and inputs with all that they hold, numbers of tensors apart; the files of all loaded
    modules, of the function's package and of data that was read, by size and time of change; plain
    global values of the user's modules; the environment. None where the model holds what cannot be
    described.
    """
    name = text.partition(":")[0]
    environment = {name: own for name, own in os.environ.items() if name not in VOLATILE}
    try:
        parts = {
            "made": _Described().of((loaded.model, loaded.args, dict(loaded.kwargs))),
            "files": sorted({*_loaded_files(), *_files_beside(name), *_files_read()}),
            "globals": _globals(),
            "environment": environment,
        }
        digests = {key: digest_of(part) for key, part in parts.items()}
    except Exception as error:  # a user's objects do what they like when they are looked at
        log.info("memo: steps of %s are not remembered: %s: %s", text, type(error).__name__, error)
        return None
    return {"function": text, "folder": str(Path.cwd()), **digests}


class _Described:
    """Values as plain data; what occurs twice is a number the second time."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []

    def of(self, value: Any) -> Any:
        """``value`` as plain data. Raises _Unknown."""
        if isinstance(value, enum.Enum):
            return [_name(type(value)), value.name]
        if type(value) in _PLAIN:
            return value if not isinstance(value, bytes) else value.hex()
        if isinstance(value, (float, *_NAMED)):
            return [type(value).__name__, repr(value)]
        if isinstance(value, type):
            return ["class", _name(value)]
        if id(value) in self._numbers:
            return ["again", self._numbers[id(value)]]
        self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)  # an id is another value's once its own is gone
        return [_name(type(value)), *self._inside(value)]

    def _inside(self, value: Any) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            yield [list(value.shape), list(value.stride()), str(value.dtype), str(value.device)]
            yield [value.requires_grad, value.is_leaf]
        elif isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            code = value.__code__
            plain = [repr(own) for own in code.co_consts if not isinstance(own, types.CodeType)]
            yield [_name(value), code.co_firstlineno, code.co_code.hex(), code.co_names, plain]
            yield self.of([cells, value.__defaults__, value.__kwdefaults__, vars(value)])
        elif isinstance(value, types.ModuleType):
            yield value.__name__
        elif isinstance(value, logging.Logger):
            yield value.name
        elif isinstance(value, types.BuiltinFunctionType):
            yield [value.__name__, self.of(value.__self__)]
        elif isinstance(value, types.MethodType):
            yield [self.of(value.__func__), self.of(value.__self__)]
        elif isinstance(value, functools.partial):
            yield [self.of(value.func), self.of(value.args), self.of(value.keywords)]
        elif isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            yield str(value)
        else:
            yield from self._parts(value)

    def _parts(self, value: Any) -> Iterator[Any]:
        """What a value contains, and its attributes."""
        attributes, slots = getattr(value, "__dict__", None), dict(_slots(value))
        if isinstance(value, _SEQUENCES):
            yield [self.of(own) for own in value]
        elif isinstance(value, Mapping):
            yield [[self.of(key), self.of(own)] for key, own in value.items()]
            yield self.of(getattr(value, "default_factory", None))
        elif isinstance(value, set | frozenset):
            yield sorted(digest_of(self.of(own)) for own in value)
        elif isinstance(value, _BUILT_IN):
            base: Any = next(own for own in _BUILT_IN if isinstance(value, own))
            yield base.__repr__(value)
        elif attributes is None and not slots:
            raise _Unknown(_name(type(value)))
        for name, own in sorted({**slots, **(attributes or {})}.items()):
            if name not in RANDOM:
                yield [name, self.of(own)]


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    """Values in ``__slots__``, by their names in the class, which are other ones for ``__x``."""
    classes = [vars(cls) for cls in type(value).__mro__ if "__slots__" in vars(cls)]
    for name, slot in (item for own in classes for item in own.items()):
        if isinstance(slot, types.MemberDescriptorType):
            with contextlib.suppress(AttributeError):  # it is not filled
                yield name, slot.__get__(value)


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _loaded_files() -> Iterator[tuple[str, int, int]]:
    """Files of loaded modules, but those of Python, torch and memo, whose versions are known.

    Of packages only those that were there once a user's function was called: a trace loads others.
    """
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in {*OWN, "torch"} or not isinstance(file, str):
            continue
        if name in FILES_READ.modules or not _is_installed(file):
            with contextlib.suppress(FileNotFoundError):  # torch.ops has the name of none
                yield _stamp(Path(file))


def _files_beside(name: str) -> Collection[tuple[str, int, int]]:
    """Python files of the function's package or folder: a forward may import one of them."""
    file = getattr(sys.modules[name], "__file__", None)
    if file is None:
        raise _Unknown(name)
    folder = Path(file).absolute().parent
    is_package = Path(file).stem == "__init__"
    above = name.count(".") - (0 if is_package else 1)
    if above > 0:
        folder = folder.parents[above - 1]
    found: list[tuple[str, int, int]] = []
    for number, (at, folders, files) in enumerate(os.walk(folder)):
        folders[:] = [own for own in folders if own[0] != "." and own not in NO_CODE]
        found += [_stamp(Path(at, own)) for own in files if own.endswith(".py")]
        if number + len(found) > MAX_FILES:
            raise _Unknown(f"{folder} and what is in it")
    return found


def _files_read() -> Iterator[tuple[str, int, int]]:
    """Other files that were read: data that the user's code may have taken values from."""
    for path in FILES_READ.paths:
        with contextlib.suppress(FileNotFoundError):
            yield _stamp(Path(path))


def _stamp(path: Path) -> tuple[str, int, int]:
    about = path.stat()
    return str(path), about.st_size, about.st_mtime_ns


def _is_installed(file: str) -> bool:
    """True for what Python or a package installer put there."""
    return file.startswith(_installed_folders())


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    return tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "stdlib"))


def _globals() -> list[Any]:
    """Plain global values of modules that are in no package that was installed."""
    found = []
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        is_known = name.partition(".")[0] in OWN
        if is_known or not isinstance(file, str) or _is_installed(file):
            continue
        values = ((key, own) for key, own in sorted(vars(module).items()) if key[:2] != "__")
        found += [[name, key, repr(own)] for key, own in values if type(own) in (*_PLAIN, float)]
    return found
