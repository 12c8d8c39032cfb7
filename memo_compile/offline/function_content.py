"""What stands for a step that a user's function makes: its steps are remembered under that.

The function is called each time; what it made is described, with all code that was loaded for it.
"""

import contextlib
import enum
import functools
import os
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
from memo_compile.offline.shapes.load import Loaded

VOLATILE = frozenset({"_", "SHLVL", "COLUMNS", "LINES", "OLDPWD"})
"""Variables of the environment that differ from one command to the next."""

OWN = frozenset(
    "memo_compile memo_runtime rich typer click pygments markdown_it mdurl shellingham".split()
)
"""Packages that the command itself loads, sooner or later."""

MAX_FILES = 2000
"""Of a folder with more Python files nothing is remembered."""

RANDOM = frozenset({"_original_object_hash"})
"""Attributes that are other numbers in each process: transformers keeps a hash of Python's."""

_PLAIN = (bool, int, str, bytes, type(None))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, range, slice, complex, Path)
_SEQUENCES = (list, tuple, deque)


class _Unknown(Exception):
    """A value that cannot be described by what it holds."""


def function_content(text: str, loaded: Loaded) -> Mapping[str, Any] | None:
    """What the step of ``package.module:function`` depends on, beside memo and torch.

    Its model and inputs with all that they hold, numbers of tensors apart; the files of all loaded
    modules and of the function's folder, by size and time of change; plain global values of the
    user's modules; the environment. None where the model holds what cannot be described.
    """
    module = sys.modules[text.partition(":")[0]]
    environment = {name: own for name, own in os.environ.items() if name not in VOLATILE}
    try:
        made = _Described().of((loaded.model, loaded.args, dict(loaded.kwargs)))
        files = sorted(_loaded_files()) + sorted(_files_beside(module))
    except Exception as error:  # a user's objects do what they like when they are looked at
        log.info("memo: steps of %s are not remembered: %s: %s", text, type(error).__name__, error)
        return None
    parts = {"made": made, "files": files, "globals": _globals(), "environment": environment}
    return {
        "function": text,
        "folder": str(Path.cwd()),
        **{k: digest_of(v) for k, v in parts.items()},
    }


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
        elif isinstance(value, Mapping):
            yield [[self.of(key), self.of(own)] for key, own in value.items()]
        elif isinstance(value, set | frozenset):
            yield sorted(digest_of(self.of(own)) for own in value)
        elif isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            yield [_name(value), self.of(cells), self.of(value.__defaults__)]
            yield self.of(value.__kwdefaults__)
        elif isinstance(value, types.BuiltinFunctionType | types.ModuleType):
            yield value.__name__
        elif isinstance(value, types.MethodType):
            yield [self.of(value.__func__), self.of(value.__self__)]
        elif isinstance(value, functools.partial):
            yield [self.of(value.func), self.of(value.args), self.of(value.keywords)]
        elif isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            yield str(value)
        else:
            yield from self._parts(value)

    def _parts(self, value: Any) -> Iterator[Any]:
        """Of a sequence its values, and of an object its attributes."""
        is_sequence = isinstance(value, _SEQUENCES)
        if is_sequence:
            yield [self.of(own) for own in value]
        attributes = getattr(value, "__dict__", None)
        slots = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ())]
        if attributes is None and not slots and not is_sequence:
            raise _Unknown(_name(type(value)))
        found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        for name, own in sorted({**found, **(attributes or {})}.items()):
            if name not in RANDOM:
                yield [name, self.of(own)]


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _loaded_files() -> Iterator[tuple[str, int, int]]:
    """Files of loaded modules, but those of Python, torch and memo, whose versions are known."""
    packages, python = sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")
    torch_folder = str(Path(torch.__file__).parent)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        is_known = name.partition(".")[0] in OWN
        if is_known or not isinstance(file, str) or file.startswith(torch_folder):
            continue
        if file.startswith(packages) or not file.startswith(python):
            with contextlib.suppress(FileNotFoundError):  # torch.ops has the name of none
                yield _stamp(Path(file))


def _files_beside(module: types.ModuleType) -> Collection[tuple[str, int, int]]:
    """Python files below the function's: a forward may import one of them."""
    file = getattr(module, "__file__", None)
    if file is None:
        raise _Unknown(module.__name__)
    found = []
    for path in Path(file).parent.rglob("*.py"):
        found.append(_stamp(path))
        if len(found) > MAX_FILES:
            raise _Unknown(f"{path.parent} and what is beside it")
    return found


def _stamp(path: Path) -> tuple[str, int, int]:
    about = path.stat()
    return str(path), about.st_size, about.st_mtime_ns


def _globals() -> list[Any]:
    """Plain global values of modules that are in no package that was installed."""
    installed = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
    found = []
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        is_known = name.partition(".")[0] in OWN
        if is_known or not isinstance(file, str) or file.startswith(installed):
            continue
        values = ((key, own) for key, own in sorted(vars(module).items()) if key[:2] != "__")
        found += [[name, key, repr(own)] for key, own in values if type(own) in (*_PLAIN, float)]
    return found
