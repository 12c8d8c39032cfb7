"""Private torch APIs that compile Inductor's kernels. Read in torch 2.11.0 and 2.13.0.

The C++ compiler takes 0.1 s for a kernel and 2 s for its headers, or 0.6 where they are
precompiled, which takes 6. So kernels of regions that are lowered together share a file, where
torch has a file for each: torch's source and torch's Python binding, under a name for each kernel.
The compiler makes the same instructions of them. The library lies in torch's cache, with a hard
link under the name of each kernel in it, by which the next process finds those that it needs.
"""

import contextlib
import functools
import hashlib
import logging
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sympy
import torch
from torch._inductor import codecache, cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile, get_compile_threads, kernel_code_log
from torch._inductor.codecache import CppPythonBindingsCodeCache, LambdaFuture, get_path
from torch._inductor.codegen import cpp
from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
from torch._inductor.utils import clear_on_fresh_cache

from memo_compile.torch_private.patches import replaced

log = logging.getLogger("memo")

MAX_KERNELS = 20
"""Most kernels of a file: they take about as long as its headers; files compile side by side."""

MAX_FILES = 4
"""After so many files in a process headers are precompiled, which takes as long as four files."""

_HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
_BINDING_HEADERS = ("<Python.h>", "<sstream>", "<cstdlib>", "<cerrno>")
"""Headers of torch's binding, included once outside of the namespaces of the bindings."""
_ELF = struct.Struct("=40xQ10xHH2x")
"""From an ELF file's header: offset, entry size and length of the table of sections."""
_TORCHS_COMPILER = vars(AsyncCompile)["cpp_pybinding"]


@contextlib.contextmanager
def kernels_in_background() -> Iterator[None]:
    """Compiles the kernels of all graphs lowered inside in few files; ready at the end.

    A generated module ends in a wait for its kernels; here all waits come last. Inside, the modules
    cannot run.
    """
    waiting: list[tuple[AsyncCompile, dict[str, Any]]] = []
    files = _Files()
    methods: dict[str, Callable[..., Any]] = {
        "wait": lambda self, scope: waiting.append((self, scope))
    }
    if vars(AsyncCompile)["cpp_pybinding"] is _TORCHS_COMPILER:  # else nothing is to be compiled
        methods["cpp_pybinding"] = lambda self, *source: files.kernel(self, *source)
    with replaced(AsyncCompile, **methods):
        yield
    files.compile()
    for compiler, scope in waiting:
        for name, kernel in scope.items():  # with one thread torch waits for none
            if isinstance(kernel, LambdaFuture):
                scope[name] = kernel.result()
        compiler.wait(scope)


_COMPILERS = ("cpp", "cpp_pybinding", "halide", "triton", "multi_kernel", "pallas", "cuda", "rocm")
"""AsyncCompile's methods that turn a kernel's source into something that runs; 2.11, 2.13."""


@contextlib.contextmanager
def quick_strides() -> Iterator[None]:
    """Inside, Inductor computes strides of polynomial indices by expanding, not simplifying.

    Simplifying takes half of the time in which Inductor writes a region's code with symbols. A
    difference of polynomials is 0 or 1 where its expanded form is (2.11, 2.13).
    """
    module: Any = cpp
    simplified_stride = module.stride_at_vec_range

    @functools.lru_cache(maxsize=4096)
    def stride(index: Any, var: Any, vec_length: int | None = None) -> Any:
        if not all(map(_is_polynomial, sympy.preorder_traversal(index))):
            return simplified_stride(index, var, vec_length)
        return sympy.expand(index.xreplace({var: var + 1}) - index)

    with replaced(module, stride_at_vec_range=stride):
        yield


def rounded_on_load() -> contextlib.AbstractContextManager[None]:
    """Inside, a C++ kernel that stores a low-precision value and reads it again reads it rounded.

    Inductor drops a conversion to bfloat16 and back. In 2.11 that undoes the rounding that is asked
    for (``inductor_api.ROUNDED``); 2.13 leaves that alone.
    """
    return replaced(
        cpp.CppKernel, cache_dtype_convert=lambda self, dst, dst_dtype, src, src_dtype: None
    )


def _is_polynomial(part: Any) -> bool:
    """True for a part of an expression that a polynomial may have."""
    is_power = part.is_Pow and part.exp.is_Integer and part.exp.is_nonnegative
    return bool(part.is_Add or part.is_Mul or part.is_Symbol or part.is_Integer or is_power)


@contextlib.contextmanager
def without_kernels(*, without_vectors: bool = False) -> Iterator[None]:
    """Inside, graphs become wrapper code without compiled kernels: what is lowered cannot run.

    ``without_vectors`` says that there are no vector instructions, which Inductor would find out by
    compiling and loading programs.
    """
    names = (name for name in (*_COMPILERS, "wait") if name in vars(AsyncCompile))
    vectors: dict[str, Any] = {"valid_vec_isa_list": lambda: []} if without_vectors else {}
    methods: dict[str, Any] = dict.fromkeys(names, lambda *_, **__: None)
    with replaced(cpu_vec_isa, **vectors), replaced(AsyncCompile, **methods):
        yield


@clear_on_fresh_cache
class _File(CppPythonBindingsCodeCache):
    """Compiles a library of several kernels; "loads" only its path."""

    cache: dict[str, Any] = {}  # noqa: RUF012  torch's own is none of ours
    cache_clear = staticmethod(cache.clear)
    num_made = 0

    @classmethod
    def _get_uncompiled_header(cls, device: str) -> str | None:
        """Returns the header to be precompiled; None: it is not worth it yet."""
        cls.num_made += 1
        is_precompiled = any(Path(codecache._HEADER_DIR).glob("*.[gp]ch"))
        is_worth = is_precompiled or cls.num_made > MAX_FILES
        return super()._get_uncompiled_header(device) if is_worth else None

    @classmethod
    def _load_library_inner(cls, path: str, key: str) -> Any:
        return SimpleNamespace(path=path)


@dataclass(eq=False, slots=True, kw_only=True)
class _Shared:
    """A file that is being filled, then one that is compiled."""

    sections: dict[str, str] = field(default_factory=dict)
    """Name of a kernel -> its source and its binding."""
    load: Callable[[], Any] | None = None
    path: str = ""

    def start(self) -> None:
        """Begins to compile it, in the background where torch does so."""
        includes = "".join(f"#include {header}\n" for header in _BINDING_HEADERS)
        text = f"{_HEADER}#define PY_SSIZE_T_CLEAN\n{includes}{''.join(self.sections.values())}"
        submit = AsyncCompile.submit if get_compile_threads() > 1 else None
        self.load = _File.load_async(text, submit_fn=submit)

    def library(self) -> str:
        """Waits for the library and returns its path; links it under each kernel's name."""
        assert self.load is not None, "files are compiled before their kernels are waited for"
        if not self.path:
            path = self.load().path
            _require_whole(Path(path))
            self.path = path
            for link in map(_path_of, self.sections):
                link.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(OSError):  # it exists, or cannot be linked
                    os.link(self.path, link)
        return self.path


class _Files:
    """The files of the kernels of one session."""

    def __init__(self) -> None:
        self._filling = _Shared()
        self._futures: dict[str, LambdaFuture] = {}

    def kernel(self, compiler: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
        """Replaces ``AsyncCompile.cpp_pybinding``: returns a future of the kernel."""
        if not _is_one_function(source_code):
            return _TORCHS_COMPILER(compiler, argtypes, source_code)
        kernel_code_log.info("CPP+Bindings Kernel:\n%s", source_code)
        name = _name_of(argtypes, source_code)
        if name not in self._futures:
            self._futures[name] = LambdaFuture(self._loaded(name, argtypes, source_code))
        return self._futures[name]

    def _loaded(self, name: str, argtypes: list[str], source_code: str) -> Callable[[], Any]:
        """Returns a function that loads the kernel; by torch's own way if anything fails."""
        try:
            get = self._get(name, argtypes, source_code)
        except Exception as error:
            return functools.partial(_by_torch, argtypes, source_code, error)

        def loaded() -> Any:
            try:
                return get()
            except Exception as error:
                return _by_torch(argtypes, source_code, error)

        return loaded

    def _get(self, name: str, argtypes: list[str], source_code: str) -> Callable[[], Any]:
        """As ``_loaded``, from a library that exists or a file; what fails is raised."""
        path = _path_of(name)
        entry = _entry(name)
        if path.exists():
            _require_whole(path)
            loaded = entry._load_library(str(path), name)
            return lambda: getattr(loaded, name)
        shared = self._filling
        shared.sections[name] = _section(entry, argtypes, source_code)
        if len(shared.sections) == MAX_KERNELS:
            self.compile()
        return lambda: getattr(entry._load_library(shared.library(), name), name)

    def compile(self) -> None:
        """Begins to compile the kernels of the file that is being filled."""
        if self._filling.sections:
            self._filling.start()
            self._filling = _Shared()


def _by_torch(argtypes: list[str], source_code: str, error: Exception) -> Any:
    """Compiles a kernel in a file of its own, after ``error``."""
    log.info("memo: a kernel is compiled by itself: %s: %s", type(error).__name__, error)
    return CppPythonBindingsCodeCache.load_pybinding(argtypes, source_code)


def _is_one_function(source_code: str) -> bool:
    """True for a plain loop kernel, which can stand in a file with others."""
    before, _, code = source_code.partition(_HEADER)
    is_alone = code.count('extern "C"') == 1 and "#include" not in code and "#define" not in code
    return not before.strip() and code.lstrip().startswith('extern "C"') and is_alone


def _name_of(argtypes: Sequence[str], source_code: str) -> str:
    """Returns a kernel's name in the code and in the cache: a digest of all it is compiled from."""
    text = repr((torch.__version__, argtypes, source_code, _command(cpu_vec_isa.pick_vec_isa())))
    return f"k{hashlib.sha256(text.encode()).hexdigest()[:48]}"


def _command(instructions: Any) -> str:
    """Returns the compiler's command line, as in torch's own key."""
    flags: dict[str, Any] = _File.cpp_compile_command_flags
    options = CppTorchDeviceOptions(device_type="cpu", vec_isa=instructions, **flags)
    return str(CppBuilder(name="o", sources="i", BuildOption=options).get_command_line())


def _path_of(name: str) -> Path:
    """Returns the path of a kernel's library."""
    return Path(get_path(name, "so")[2])


def _require_whole(path: Path) -> None:
    """Raises OSError for a truncated library, and removes it: loading it would kill the process.

    A library is a 64-bit ELF file, whose last part is the table of its sections.
    """
    with path.open("rb") as file:
        head = file.read(_ELF.size)
    if head[:5] == b"\x7fELF\x02" and len(head) == _ELF.size:
        table, size, count = _ELF.unpack(head)
        if path.stat().st_size >= table + size * count:
            return
    elif head[:4] != b"\x7fELF" and len(head) == _ELF.size:
        return  # of another system
    path.unlink(missing_ok=True)
    raise OSError(f"{path} is cut short")


def _entry(name: str) -> Any:
    """Returns a subclass of torch's cache of bindings for a kernel called ``name``."""
    members = {"entry_function": name, "call_entry_function": f"{name}({{}}); Py_RETURN_NONE;"}
    return type("Entry", (CppPythonBindingsCodeCache,), members)


def _section(entry: Any, argtypes: Sequence[str], source_code: str) -> str:
    """Returns a kernel and its binding as a part of a file.

    Rewrite:
        #include <cpp_prefix.h>           #define kernel k12ab
        extern "C" void kernel(...)   ->  extern "C" void kernel(...)
                                          #undef kernel
                                          namespace k12ab_binding { PyInit_k12ab ... }
    """
    texts: list[str] = []

    def keep(text: str, *_: Any, **__: Any) -> Callable[[], None]:
        texts.append(text)
        return lambda: None

    entry.load_async = keep
    entry.load_pybinding_async(argtypes, "")
    del entry.load_async
    (binding,) = texts
    name, body = entry.entry_function, source_code.replace(_HEADER, "", 1)
    return (
        f"#define kernel {name}\n{body}\n#undef kernel\n"
        f"namespace {name}_binding {{\n{binding}\n}}\n"
    )
