"""How much memory the host lets this process use: physical, control group, locked pages.

Reads Linux's /proc and /sys/fs/cgroup, versions 1 and 2. What a system does not say is None. All
sizes in bytes. No torch here.
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
    """The limits of host memory that hold for this process."""

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
        """What this process may still take: the smaller of available and left in the group."""
        bounds = [] if self.available_bytes is None else [self.available_bytes]
        if self.cgroup_limit_bytes is not None:
            bounds.append(max(0, self.cgroup_limit_bytes - (self.cgroup_used_bytes or 0)))
        return min(bounds, default=None)


def host_memory(root: Path = _ROOT) -> HostMemory:
    """The limits as the system under ``root`` states them (another root than ``/`` for tests)."""
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
    """Limit and use of that group, of this process's and its parents, which has the least room.

    Cached files that nobody has read lately go when memory is short, and do not count as used. In a
    container the group's own path is often not visible; then the mount's root is the group.
    """
    found: list[tuple[int, int | None]] = []
    for mount, group, limit_name, used_name in _hierarchies(root):
        relative = PurePosixPath(group.lstrip("/"))
        for part in (relative, *relative.parents):
            limit = _number(mount / part / limit_name)
            if limit is not None:
                found.append((limit, _used(mount / part, used_name)))
    return min(found, key=lambda bound: bound[0] - (bound[1] or 0), default=(None, None))


def _used(group: Path, used_name: str) -> int | None:
    """Bytes that ``group`` holds and cannot give back at once."""
    used = _number(group / used_name)
    if used is None:
        return None
    names = ("total_inactive_file", "inactive_file")  # version 1 with its children, version 2
    stat = dict(line.split(maxsplit=1) for line in _lines(group / "memory.stat") if " " in line)
    cached = next((int(stat[name]) for name in names if name in stat), 0)
    return max(0, used - cached)


def _hierarchies(root: Path) -> list[tuple[Path, str, str, str]]:
    """(mount, group, limit file, use file) of each hierarchy that counts memory."""
    base = root / "sys/fs/cgroup"
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _id, controllers, group = line.split(":", 2)
        if controllers == "":
            found.append((base, group, "memory.max", "memory.current"))
            found.append((base / "unified", group, "memory.max", "memory.current"))
        elif "memory" in controllers.split(","):
            v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            found.append((base / "memory", group, *v1))
    return found


def _meminfo(path: Path) -> dict[str, int]:
    """``Name: 123 kB`` lines as bytes."""
    pairs = (line.split() for line in _lines(path))
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in pairs if len(words) == 3}


def _number(path: Path) -> int | None:
    """The count of bytes in ``path``; None for "max", "no limit" or a file that is not there."""
    lines = _lines(path)
    if not lines or lines[0].strip() == "max":
        return None
    try:
        value = int(lines[0])
    except ValueError as error:
        raise InputError(f"{path}: expected a number of bytes, got {lines[0]!r}") from error
    return value if value < UNLIMITED_BYTES else None


def _lines(path: Path) -> list[str]:
    """The lines of ``path``; none where the system does not have it."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def processor_name(root: Path = _ROOT) -> str:
    """What the maker calls the processor."""
    for line in _lines(root / "proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "cpu"


RESERVE_FRACTION = 0.1
"""Share of free host memory or disk that is not used: data loaders and checkpoints need some."""


def missing_store(host_store: str) -> str:
    """What is wrong with the folder that activations would be offloaded to; empty: nothing."""
    kind, _, folder = host_store.partition(":")
    if kind != "file":
        return ""
    if Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return ""
    return f"host_store: expected a folder that can be written, got {folder!r}"


def require_store(host_store: str) -> None:
    """Raise ConfigError where nothing can be offloaded, because the folder to do it is missing."""
    if wrong := missing_store(host_store):
        raise ConfigError(f"{wrong}; the step does not fit without moving activations")


def default_file_budget_bytes(folder: str, local_ranks: int) -> int:
    """What one rank may take of the file system that ``folder`` lies on, or will."""
    path = Path(folder).absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return int(shutil.disk_usage(existing).free * (1 - RESERVE_FRACTION)) // local_ranks


def default_host_budget_bytes(memory: HostMemory, local_ranks: int) -> int | None:
    """What one rank may take for offloaded activations: its share of what is left, less a reserve.

    None where the host does not say what it has.
    """
    usable = memory.usable_bytes
    return None if usable is None else int(usable * (1 - RESERVE_FRACTION)) // local_ranks
