"""Reads how much memory the host lets this process use: physical, control group, locked pages.

From Linux's /proc and /sys/fs/cgroup, versions 1 and 2. Unknown limits are None; sizes are in
bytes. No torch here.
"""

import os
import platform
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from memo_compile.errors import ConfigError, InputError

_ROOT = Path("/")
UNLIMITED_BYTES = 2**60
"""A limit of an exbibyte or more is none: version 1 writes "no limit" as 2^63 less a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The limits of host memory for this process."""

    total_bytes: int | None
    available_bytes: int | None
    """MemAvailable: what can be had without swapping, for all processes of the host together."""
    cgroup_limit_bytes: int | None
    """Limit of the control group of this process with the least room; None without a limit."""
    cgroup_used_bytes: int | None
    """Bytes used in the group that has that limit."""
    locked_limit_bytes: int | None
    """``ulimit -l``; None is unlimited."""

    @property
    def usable_bytes(self) -> int | None:
        """The bytes that this process may still take, of the host and of its control group."""
        bounds = [] if self.available_bytes is None else [self.available_bytes]
        if self.cgroup_limit_bytes is not None:
            bounds.append(max(0, self.cgroup_limit_bytes - (self.cgroup_used_bytes or 0)))
        return min(bounds, default=None)


def host_memory(root: Path = _ROOT) -> HostMemory:
    """Reads the limits of the system under ``root`` (tests pass another than ``/``)."""
    meminfo = _meminfo(root / "proc/meminfo")
    limit, used = cgroup_memory(root)
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostMemory(
        total_bytes=meminfo.get("MemTotal"),
        available_bytes=meminfo.get("MemAvailable"),
        cgroup_limit_bytes=limit,
        cgroup_used_bytes=used,
        locked_limit_bytes=None if soft == resource.RLIM_INFINITY else soft,
    )


def cgroup_memory(root: Path = _ROOT) -> tuple[int | None, int | None]:
    """Returns limit and use of the control group with the least room: this process's or a parent.

    Cached files that nobody has read lately do not count as used: they go when memory is short. In
    a container the group's own path is often not visible; then the mount's root is the group.
    """
    bounds: list[tuple[int, int | None]] = []
    for mount, group, limit_name, used_name in _hierarchies(root):
        relative = PurePosixPath(group.lstrip("/"))
        for part in (relative, *relative.parents):
            limit = _number(mount / part / limit_name)
            if limit is not None:
                bounds.append((limit, _used(mount / part, used_name)))
    return min(bounds, key=lambda bound: bound[0] - (bound[1] or 0), default=(None, None))


def _used(group: Path, used_name: str) -> int | None:
    """Returns the bytes that ``group`` holds and cannot give back at once."""
    used = _number(group / used_name)
    if used is None:
        return None
    names = ("total_inactive_file", "inactive_file")  # version 1 with its children, version 2
    stat = dict(line.split(maxsplit=1) for line in _lines(group / "memory.stat") if " " in line)
    cached = next((int(stat[name]) for name in names if name in stat), 0)
    return max(0, used - cached)


def _hierarchies(root: Path) -> list[tuple[Path, str, str, str]]:
    """Returns (mount, group, limit file, use file) of each hierarchy that counts memory."""
    base = root / "sys/fs/cgroup"
    hierarchies = []
    for line in _lines(root / "proc/self/cgroup"):
        _id, controllers, group = line.split(":", 2)
        if controllers == "":
            for mount in (base, base / "unified"):
                hierarchies.append((mount, group, "memory.max", "memory.current"))
        elif "memory" in controllers.split(","):
            v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            hierarchies.append((base / "memory", group, *v1))
    return hierarchies


def _meminfo(path: Path) -> dict[str, int]:
    """Returns the values of ``Name: 123 kB`` lines in bytes."""
    pairs = (line.split() for line in _lines(path))
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in pairs if len(words) == 3}


def _number(path: Path) -> int | None:
    """Returns the bytes in ``path``; None for "max", no limit, or a missing file."""
    lines = _lines(path)
    if not lines or lines[0].strip() == "max":
        return None
    try:
        value = int(lines[0])
    except ValueError as error:
        raise InputError(f"{path}: expected a number of bytes, got {lines[0]!r}") from error
    return value if value < UNLIMITED_BYTES else None


def _lines(path: Path) -> list[str]:
    """Returns the lines of ``path``; none where the system does not have it."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def processor_name(root: Path = _ROOT) -> str:
    """Returns the processor's name."""
    for line in _lines(root / "proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "cpu"


def processor_instructions(root: Path = _ROOT) -> tuple[str, ...]:
    """Returns the processor's flags as the system names them, such as ``avx2``; empty: unknown."""
    for line in _lines(root / "proc/cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):  # of x86, of ARM
            return tuple(sorted(value.split()))
    return ()


RESERVE_FRACTION = 0.1
"""Share of free host memory or disk that is left to data loaders and checkpoints."""


def missing_store(host_store: str) -> str:
    """Says what is wrong with the folder for offloaded activations; empty: nothing."""
    kind, _, folder = host_store.partition(":")
    if kind != "file":
        return ""
    if Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return ""
    return f"host_store: expected a folder that can be written, got {folder!r}"


def require_store(host_store: str, why: str) -> None:
    """Raises ConfigError where the folder for activations is missing; ``why`` it is needed."""
    if wrong := missing_store(host_store):
        raise ConfigError(f"{wrong}; {why}")


def free_disk_bytes(folder: str) -> int:
    """Returns what the file system of ``folder``, which need not exist yet, has free."""
    path = Path(folder).absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(existing).free


def default_file_budget_bytes(folder: str, local_ranks: int) -> int:
    """Returns what one rank may take of the file system of ``folder``, which need not exist yet."""
    return int(free_disk_bytes(folder) * (1 - RESERVE_FRACTION)) // local_ranks


def default_host_budget_bytes(memory: HostMemory, local_ranks: int) -> int | None:
    """Returns a rank's share of the host memory that is left, less a reserve; None: unknown."""
    usable = memory.usable_bytes
    return None if usable is None else int(usable * (1 - RESERVE_FRACTION)) // local_ranks
