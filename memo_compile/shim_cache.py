"""Private torch APIs of Inductor's cache of compiled graphs. Read in torch 2.11.0 and 2.13.0.

An entry is a pickle of torch's own, in torch's own folder, under a key that is a digest of the
graph, its inputs, Inductor's settings and torch's sources. It holds a graph's generated code and
what Inductor knows of it. A file's name is the digest of its content, which torch itself does not
compare.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch._inductor import cpu_vec_isa
from torch._inductor.codecache import FxGraphCache, get_path, sha256_hash

from memo_compile.file_store import say_unused


def caches_graphs() -> bool:
    """True where the user lets Inductor cache graphs, which is its default."""
    return bool(inductor_config.fx_graph_cache) and not inductor_config.force_disable_caches


@contextlib.contextmanager
def graph_cache(tag: str) -> Iterator[None]:
    """Inside, graphs come from Inductor's cache on this machine, or go there.

    ``tag`` is part of their keys, beside the user's own tag. A partitioner has no part in one
    graph, and memo's own would keep every graph out of the cache. A file whose content is not that
    of its name is dropped before torch reads it.
    """
    settings = {
        "fx_graph_cache": True,
        "fx_graph_remote_cache": False,
        "custom_partitioner_fn": None,
    }
    own = torch.compiler.config.cache_key_tag
    caches: Any = FxGraphCache
    plain = vars(FxGraphCache)["_get_tmp_dir_for_key"]

    def checked(cls: type[FxGraphCache], key: str) -> str:
        folder: str = plain.__get__(None, cls)(key)
        for path in _entries(folder):
            _drop_damaged(path)
        return folder

    caches._get_tmp_dir_for_key = classmethod(checked)
    try:
        with (
            inductor_config.patch(settings),
            torch.compiler.config.patch(cache_key_tag=f"{own}{tag}"),  # type: ignore[attr-defined]
        ):
            yield
    finally:
        caches._get_tmp_dir_for_key = plain


def _entries(folder: str) -> list[Path]:
    """The files of a key; names with a dot are of files that are being written."""
    with contextlib.suppress(FileNotFoundError):
        return [path for path in Path(folder).iterdir() if not path.name.startswith(".")]
    return []


def _drop_damaged(path: Path) -> None:
    """Remove an entry whose name is not the digest of its content. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if sha256_hash(path.read_bytes()) != path.name:
            say_unused(path, "it is damaged")
            path.unlink()


def graph_cache_key(compiled: object) -> str | None:
    """The key of what Inductor compiled, or found; None where it is not to be cached."""
    return getattr(compiled, "_fx_graph_cache_key", None)


def generated_code(compiled: object) -> str | None:
    """The source of the wrapper; None for a graph without kernels, whose forward is returned."""
    return getattr(compiled, "source_code", None)


def vector_instructions(compiles: bool) -> str:
    """Which vector instructions code for this processor uses; no part of torch's keys.

    Torch finds out by compiling for each, which where ``compiles`` it does for its kernels too.
    """
    found = cpu_vec_isa.pick_vec_isa() if compiles else ""
    return f"{torch.backends.cpu.get_cpu_capability()} {found}"


def other_code(compiled: Any) -> Path | None:
    """The file whose code torch loaded for a hit, where it is another than the entry's code."""
    path = Path(get_path(compiled.cache_key, "py")[2])
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() != compiled.source_code.encode():
            return path
    return None


def forget(key: str, damaged: Path | None) -> None:
    """Nothing is cached under ``key``, and ``damaged`` is gone, where files can be removed."""
    entries = _entries(FxGraphCache._get_tmp_dir_for_key(key))
    for path in (*entries, *([] if damaged is None else [damaged])):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
