"""What ``memo doctor`` looks at. Each probe is a small function that yields findings.

A probe tries the thing itself (solves a model, compiles a file) instead of asking for a version.
torch is imported by the probes that need it, so that a missing torch is a finding, not a crash.
"""

import functools
import importlib
import os
import platform
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import memo_compile
from memo_compile.config import local_world_size
from memo_compile.costs.host import host_memory, processor_name
from memo_compile.errors import MemoError
from memo_compile.gpus import version_of
from memo_compile.planners import solver
from memo_compile.units import format_bytes

OLDEST_TORCH = (2, 11)
NEWEST_TRIED_TORCH = (2, 15)
COMPILE_TIMEOUT_S = 60.0
"""Seconds to compile three lines: only a hanging compiler takes so long."""
_LOCKED_BYTES_WANTED = 2**30
"""A lower limit of locked memory, where it is enforced, refuses any useful pinned host pool."""
_CPP_PROBE = (
    '#include <Python.h>\n#include <omp.h>\nextern "C" int f() { return omp_get_max_threads(); }\n'
)


class Health(Enum):
    """How good a finding is."""

    OK = "ok"
    LIMITED = "limited"
    """memo runs, but slower or without a feature."""
    BROKEN = "broken"
    """memo cannot run until this is mended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the table."""

    group: str
    name: str
    value: str | int | None
    """The value in JSON; sizes in bytes."""
    text: str
    """The value in the table."""
    health: Health = Health.OK
    remedy: str = ""
    """What to do; empty where nothing is missing."""


def examine() -> Iterator[Finding]:
    """Yields all findings, in the order of the table."""
    yield from _versions()
    yield from _devices()
    yield from _entry_point()
    yield from _compiler()
    yield from _solvers()
    yield from _memory()


def _versions() -> Iterator[Finding]:
    """Yields the versions of Python and of the packages that memo uses."""
    finding = functools.partial(Finding, group="versions")

    def package(name: str, installed: str | None, absent: str, **fault: Any) -> Finding:
        """Returns a package's line; ``absent`` and ``fault`` apply where it is not installed."""
        fault = {} if installed else fault
        return finding(name=name, value=installed, text=installed or absent, **fault)

    yield package("python", platform.python_version(), "")
    yield package("memo", version_of("memo-compile"), "not installed (running from a folder)")
    yield _torch_version()
    triton = version_of("triton") or version_of("pytorch-triton")
    if _has_cuda():
        remedy = "Inductor needs it on CUDA: pip install triton"
        yield package("triton", triton, "not installed", health=Health.BROKEN, remedy=remedy)
    else:
        yield package("triton", triton, "not needed without CUDA")
    remedy = "placement searches faster with it: pip install numba"
    numba = version_of("numba")
    yield package("numba", numba, "not installed", health=Health.LIMITED, remedy=remedy)


def _torch_version() -> Finding:
    """Says whether torch is here, and of a version that memo supports."""
    finding = functools.partial(Finding, group="versions", name="torch")
    span = "{}.{} to {}.{}".format(*OLDEST_TORCH, *NEWEST_TRIED_TORCH)
    try:
        version = str(importlib.import_module("torch").__version__)
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries is not there
        remedy = f"install torch {span}: https://pytorch.org/get-started"
        health = Health.BROKEN
        return finding(value=None, text=f"cannot import: {error}", health=health, remedy=remedy)
    numbers = tuple(int(part) for part in version.split(".")[:2])  # of 2.13.0+cpu: 2, 13
    health, remedy = Health.OK, ""
    if numbers < OLDEST_TORCH:
        health, remedy = Health.BROKEN, f"memo supports torch {span}: pip install -U torch"
    elif numbers > NEWEST_TRIED_TORCH:
        health = Health.LIMITED
        remedy = f"memo was tried with torch {span}; on trouble install one of those"
    return finding(value=version, text=version, health=health, remedy=remedy)


def _devices() -> Iterator[Finding]:
    """Yields the processor, and each GPU with its free memory."""
    finding = functools.partial(Finding, group="devices")
    name = f"{processor_name()}, {os.cpu_count()} threads"
    yield finding(name="cpu", value=name, text=name)
    if not _has_cuda():
        yield finding(name="cuda", value=None, text="none; memo plans for the CPU's memory")
        return
    import torch

    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        text = f"{properties.name}, {format_bytes(total)}, {format_bytes(free)} free"
        yield finding(name=f"cuda:{index}", value=total, text=text)


def _entry_point() -> Iterator[Finding]:
    """Yields whether ``torch.compile(backend="memo")`` finds and loads the backend."""
    finding = functools.partial(Finding, group="backend", name="memo")
    remedy = f"install memo into this Python: pip install {_where_memo_is_from()}"
    try:
        import torch
    except (ImportError, OSError):
        yield finding(value=None, text="unknown without torch", health=Health.BROKEN)
        return
    if "memo" not in torch.compiler.list_backends(exclude_tags=()):
        text = "torch.compile does not know it"
        yield finding(value=None, text=text, health=Health.BROKEN, remedy=remedy)
        return
    try:
        torch.compile(torch.nn.Identity(), backend="memo")  # loads the backend, compiles nothing
    # Loading runs memo's own modules and torch's private ones: whatever it raises is the finding.
    except Exception as error:
        text = f"found, but does not load: {type(error).__name__}: {error}"
        remedy = (
            f"memo and torch do not fit together: a newer memo ({remedy} --upgrade), or torch "
            + "{}.{} to {}.{}".format(*OLDEST_TORCH, *NEWEST_TRIED_TORCH)
        )
        yield finding(value=None, text=text, health=Health.BROKEN, remedy=remedy)
        return
    yield finding(value="loaded", text='torch.compile(backend="memo") finds it')


def _where_memo_is_from() -> str:
    """Returns what pip installs memo from: the folder that this code runs from, or the package."""
    folder = Path(memo_compile.__file__).parents[1]
    return str(folder) if (folder / "pyproject.toml").is_file() else "memo-compile"


def _compiler() -> Iterator[Finding]:
    """Tries the C++ compiler that Inductor uses for the CPU, on a file with OpenMP."""
    finding = functools.partial(Finding, group="compiler", name="C++")
    remedy = "install g++ (with OpenMP) and Python's headers, e.g. apt install g++ python3-dev"
    command: str | None = None
    try:
        from memo_compile.torch_private import inductor_api

        command = inductor_api.cpp_compiler()
    except (ImportError, OSError):
        return
    # Inductor raises InvalidCxxCompiler, a RuntimeError, when it finds none.
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
    else:
        problem = try_compiler(command)
    if problem:
        # Nothing compiles for the CPU then; with CUDA only host code is affected.
        health = Health.LIMITED if _has_cuda() else Health.BROKEN
        yield finding(value=command, text=problem, health=health, remedy=remedy)
    else:
        yield finding(value=command, text=f"{command} compiles with OpenMP")


def try_compiler(command: str) -> str:
    """Compiles a shared object with OpenMP and Python's headers; says why it fails, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(_CPP_PROBE)
        include = sysconfig.get_path("include")
        flags = ["-shared", "-fPIC", "-fopenmp", f"-I{include}", "-o", f"{folder}/probe.so"]
        try:
            done = subprocess.run(
                [command, str(source), *flags],
                capture_output=True,
                text=True,
                timeout=COMPILE_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{command}: {error}"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr.strip()]
    return f"{command} fails: {lines[0]}"


def _solvers() -> Iterator[Finding]:
    """Yields for each engine of integer programs whether it solves a small one."""
    finding = functools.partial(Finding, group="solvers")
    for engine in solver.Engine:
        package = "highspy" if engine is solver.Engine.HIGHS else "mip"
        missing = solver.missing_engine(engine)
        if missing and engine is not solver.Engine.HIGHS:
            yield finding(name=engine.name, value=None, text=f"not needed beside HiGHS ({missing})")
            continue
        problem = missing or try_engine(engine)
        version = f"{package} {version_of(package)}"
        yield finding(
            name=engine.name,
            value=None if problem else version,
            text=problem or f"solves ({version})",
            health=Health.LIMITED if problem else Health.OK,
            remedy=f"install {package} again" if problem else "",
        )


def try_engine(engine: solver.Engine) -> str:
    """Solves min -x - 2y, x + y <= 3, integers up to 2; says what went wrong, or ""."""
    program = solver.LinearProgram(engine=engine)
    x, y = (program.variable(high=2, is_integer=True) for _ in range(2))
    program.require(x + y <= 3)
    program.minimise(-x - 2 * y)
    try:
        status = program.solve(time_limit_s=10.0)
        solution = tuple(map(program.integer_value, (x, y))) if status.has_solution else None
    # Engines fail in ways of their own (ctypes, cffi, assertion): all are the same finding.
    except Exception as error:
        return f"fails: {type(error).__name__}: {error}"
    if solution == (1, 2):
        return ""
    return f"wrong answer {solution} ({status.value}) to a known model"


def _memory() -> Iterator[Finding]:
    """Yields how much host memory there is, and what limits the use of it."""
    finding = functools.partial(Finding, group="host memory")
    try:
        host = host_memory()
        ranks = local_world_size()
    except MemoError as error:
        yield finding(name="limits", value=None, text=str(error), health=Health.LIMITED)
        return
    sizes = {
        "total": host.total_bytes,
        "available": host.available_bytes,
        "cgroup limit": host.cgroup_limit_bytes,
        "usable": host.usable_bytes,
    }
    for name, size in sizes.items():
        absent = "none" if name == "cgroup limit" else "unknown"
        yield finding(name=name, value=size, text=absent if size is None else format_bytes(size))
    locked = host.locked_limit_bytes
    is_too_small = locked is not None and locked < _LOCKED_BYTES_WANTED and _has_cuda()
    yield finding(
        name="locked limit",
        value=locked,
        text="unlimited" if locked is None else format_bytes(locked),
        health=Health.LIMITED if is_too_small else Health.OK,
        remedy="pinned memory may be refused: ulimit -l unlimited" if is_too_small else "",
    )
    yield finding(name="ranks on this host", value=ranks, text=f"{ranks} (LOCAL_WORLD_SIZE)")


def _has_cuda() -> bool:
    try:
        import torch
    except (ImportError, OSError):
        return False
    return torch.cuda.is_available()
