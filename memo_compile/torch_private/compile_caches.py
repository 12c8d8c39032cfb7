"""Private torch APIs of Inductor's and AOTAutograd's caches. Read in torch 2.11.0 and 2.13.0.

An entry is a pickle of torch's, in torch's folder, under a key that is a digest of the graph, its
inputs, the settings and torch's sources. Inductor's entries hold a graph's generated code and its
metadata; AOTAutograd's hold what runs around forward and backward, and a name for each of these.
A file's name is the digest of its content, which torch itself does not compare.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._functorch._aot_autograd.autograd_cache import (
    AOTAutogradCache,
    BypassAOTAutogradCache,
    FXGraphCacheMiss,
)
from torch._functorch._aot_autograd.functional_utils import ViewMetaSequence
from torch._inductor import cpp_builder, cpu_vec_isa
from torch._inductor.codecache import FxGraphCache, get_path, sha256_hash
from torch._inductor.output_code import OutputCode
from torch._inductor.runtime import cache_dir_utils

from memo_compile.file_store import say_unused
from memo_compile.torch_private.patches import replaced


def cache_folder() -> Path:
    """Returns the folder of Inductor's and AOTAutograd's caches, which is made if missing."""
    return Path(cache_dir_utils.cache_dir())


def caches_graphs() -> bool:
    """True where the user lets Inductor cache graphs, which is its default."""
    return bool(inductor_config.fx_graph_cache) and not inductor_config.force_disable_caches


@contextlib.contextmanager
def graph_cache(tag: str) -> Iterator[None]:
    """Inside, graphs come from Inductor's cache on this machine, or go there.

    ``tag`` is part of their keys, beside the user's own tag. Memo's partitioner is turned off: it
    would keep every graph out of the cache, and has no part in one half. Damaged files are dropped
    before torch reads them.
    """
    settings = {
        "fx_graph_cache": True,
        "fx_graph_remote_cache": False,
        "custom_partitioner_fn": None,
    }
    users_tag = torch.compiler.config.cache_key_tag
    with (
        _checked_entries(FxGraphCache),
        inductor_config.patch(settings),
        torch.compiler.config.patch(cache_key_tag=f"{users_tag}{tag}"),  # type: ignore[attr-defined]
    ):
        yield


@contextlib.contextmanager
def _checked_entries(cache: Any) -> Iterator[list[str]]:
    """Inside, damaged entries of ``cache`` are dropped before torch reads them.

    Yields the folders of the keys that torch looks for.
    """
    torchs_own = vars(cache)["_get_tmp_dir_for_key"]
    folders: list[str] = []

    def checked(cls: Any, key: str) -> str:
        folder: str = torchs_own.__get__(None, cls)(key)
        folders.append(folder)
        for path in _entries(folder):
            _drop_damaged(path)
        return folder

    with replaced(cache, _get_tmp_dir_for_key=classmethod(checked)):
        yield folders


def _entries(folder: str) -> list[Path]:
    """Returns the files of a key; a name with a leading dot is of a file that is being written."""
    with contextlib.suppress(FileNotFoundError):
        return [path for path in Path(folder).iterdir() if not path.name.startswith(".")]
    return []


def _drop_damaged(path: Path) -> None:
    """Removes an entry whose name is not the digest of its content. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if sha256_hash(path.read_bytes()) != path.name:
            say_unused(path, "it is damaged")
            path.unlink()


def graph_cache_key(compiled: object) -> str | None:
    """Returns the cache key of what Inductor compiled or found; None: it is not cached."""
    return getattr(compiled, "_fx_graph_cache_key", None)


def generated_code(compiled: object) -> str | None:
    """Returns the wrapper's source; None for a graph without kernels."""
    return getattr(compiled, "source_code", None)


def vector_instructions(compiles: bool) -> str:
    """Names the vector instructions of code for this processor; no part of torch's keys.

    Those of Inductor's kernels only where it ``compiles`` for the CPU anyway: torch finds them out
    by compiling.
    """
    isa = cpu_vec_isa.pick_vec_isa() if compiles else ""
    return f"{torch.backends.cpu.get_cpu_capability()} {isa}"


def vector_probe() -> list[str] | None:
    """Returns what torch's probe of vector instructions depends on; None: torch runs none.

    Torch compiles a program for each instruction set that the processor has, and loads it in a
    process of its own: a second at the start of every process.
    """
    flags, compiler = cpu_vec_isa.x86_isa_checker(), shutil.which(cpp_builder.get_cpp_compiler())
    if not flags or compiler is None or inductor_config.cpp.vec_isa_ok is not None:
        return None
    path = Path(compiler).resolve()
    stat = path.stat()
    return [*flags, str(path), str(stat.st_size), str(stat.st_mtime_ns)]


def probe_vectors(all_work: bool) -> bool:
    """Makes torch probe the vector instructions; True: all that the processor has work.

    With ``all_work`` that is believed, and no program runs. Else the widest set is probed first,
    which includes the others: if it works, no program runs for them. Torch asks once in a process.
    """
    flags = set(cpu_vec_isa.x86_isa_checker())
    sets = [isa for isa in cpu_vec_isa.supported_vec_isa_list if set(str(isa).split()) <= flags]
    all_work = all_work or bool(sets and sets[0])
    with inductor_config.patch({"cpp.vec_isa_ok": True} if all_work else {}):
        return len(cpu_vec_isa.valid_vec_isa_list()) == len(sets)


def other_code(compiled: Any) -> Path | None:
    """Returns the file that torch loaded for a hit, if its code is not the entry's; else None."""
    path = Path(get_path(compiled.cache_key, "py")[2])
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() != compiled.source_code.encode():
            return path
    return None


def forget(key: str, damaged: Path | None) -> None:
    """Removes what is cached under ``key``, and the file ``damaged``, as far as possible."""
    _remove(*_entries(FxGraphCache._get_tmp_dir_for_key(key)), *([damaged] if damaged else []))


def _remove(*paths: Path) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


Half = Callable[[list[Any]], Any]
"""Runs a forward or a backward; empties the list that it is given."""

Recall = Callable[[str], tuple[Half, Half] | None]
"""Returns the forward and the backward kept under a name; None: nothing usable."""

_recalls: list[tuple[Recall, list[str]]] = []
"""For the graph that is being compiled, on top: its ``Recall``, and the folders of its keys."""


@dataclasses.dataclass(eq=False)
class RememberedHalf(OutputCode):
    """A forward or a backward that AOTAutograd's cache keeps by a name only.

    In another process, where AOTAutograd finds its entry, the ``Recall`` says what runs.
    """

    run: Half | None
    is_backward: bool = False
    record: str = ""
    """The name under which it is kept; empty: neither it nor its entry is."""
    _boxed_call: bool = True
    """Of the object, not of the class: torch's wrappers copy the object's attributes."""

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Runs it; ``inputs`` is a list, which is emptied."""
        assert self.run is not None, "what is pickled does not run"
        return self.run(inputs)  # type: ignore[arg-type]

    def prepare_for_serialization(self) -> None:
        """Called on a copy that is pickled. Raises BypassAOTAutogradCache: it is not kept."""
        if not self.record:
            raise BypassAOTAutogradCache("memo does not remember this graph")
        self.run = None

    def post_compile(self, *_: Any, **__: Any) -> None:
        """Called when AOTAutograd has found its entry: recalls what runs, as torch wants it.

        Raises FXGraphCacheMiss: memo does not have it any more, and the entry goes.
        """
        recall, folders = _recalls[-1] if _recalls else (lambda _: None, [])
        halves = recall(self.record)
        if halves is None:
            for folder in folders:
                _remove(*_entries(folder))
            raise FXGraphCacheMiss("memo does not remember this graph any more")
        self.run = halves[self.is_backward]

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Kernels are in the caches of the regions."""


def remembers_autograd() -> bool:
    """True where the user lets AOTAutograd cache graphs, which is torch's default."""
    return bool(functorch_config.enable_autograd_cache)


@contextlib.contextmanager
def autograd_cache(recall: Recall) -> Iterator[None]:
    """Inside, AOTAutograd's cache on this machine is used for a graph whose halves are memo's.

    They are ``RememberedHalf``s, and the partitioner's ``uuid`` is a digest of what they depend on
    beside torch's own key. On a hit neither partitioner nor inner compiler is called.
    """
    settings = {
        "enable_autograd_cache": True,
        "enable_remote_autograd_cache": False,
        "bundled_autograd_cache": True,
        "strict_autograd_cache": False,
    }
    with (
        _checked_entries(AOTAutogradCache) as folders,
        functorch_config.patch(settings),
        inductor_config.patch(fx_graph_cache=True),  # else AOTAutograd's cache is not asked
    ):
        _recalls.append((recall, folders))
        try:
            yield
        finally:
            _recalls.pop()


UNSAFE_VIEWS = ("_unsafe_view_ViewMeta", "resize__ViewMeta")


def store_no_unsafe_views() -> None:
    """Keeps graphs out of AOTAutograd's cache whose results it would later compute wrongly.

    A result that is a view of another is made again from it, by the views between them. Two kinds
    of views are pickled from freed memory: the process dies, or the entry has random shapes (torch
    2.11 to 2.13; issue 185630, fixed after them). The product of a hidden state of three dimensions
    and a transposed weight is such a view. This stays on: plain Inductor stores a graph once its
    backward was compiled, which may be after all that memo does.
    """
    ViewMetaSequence.__getstate__ = _only_safe_views  # type: ignore[assignment,method-assign]


def _only_safe_views(sequence: Any) -> dict[str, Any]:
    if any(type(view).__name__ in UNSAFE_VIEWS for view in sequence.sequence):
        raise BypassAOTAutogradCache("torch stores such views wrongly")
    return dict(vars(sequence))


def lacks_compiler(error: Exception) -> bool:
    """True where Inductor found no C++ compiler that works, which it needs on a CPU."""
    from torch._inductor.exc import InvalidCxxCompiler  # 2.11 to 2.13

    causes = (error, error.__cause__, error.__context__, getattr(error, "inner_exception", None))
    return any(isinstance(cause, InvalidCxxCompiler) for cause in causes)
