"""Kernels that are lowered together are one file for the compiler, and found by their content."""

from typing import Any

import pytest
import sympy
import torch
import torch._inductor.config as inductor_config
from torch._inductor import codecache
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen import cpp
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from memo_compile.torch_private import kernels

ARGUMENTS = ["const float*", "float*", "const int64_t"]


def source(term: str, more: str = "") -> str:
    """A kernel as Inductor writes it."""
    return f"""
#include <torch/csrc/inductor/cpp_prefix.h>
{more}
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0, const int64_t ks0)
{{
    for(int64_t x0=0; x0<ks0; x0+=1) out_ptr0[x0] = in_ptr0[x0] + {term};
}}
"""


def compiled(*sources: str) -> list[Any]:
    """The kernels, as a generated module asks for them."""
    compiler = AsyncCompile()
    scope: dict[str, Any] = {}
    with kernels.kernels_in_background():
        for number, text in enumerate(sources):
            scope[str(number)] = compiler.cpp_pybinding(ARGUMENTS, text)
        compiler.wait(scope)
    return list(scope.values())


def assert_adds(kernel: Any, number: float) -> None:
    x = torch.arange(5.0)
    out = torch.zeros(5)
    kernel(x, out, 3)
    assert out.tolist() == [number, 1 + number, 2 + number, 0, 0]


@pytest.fixture
def built(monkeypatch, tmp_path) -> list[str]:
    """An empty cache of kernels; the sources that the compiler is given."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found: list[str] = []
    plain = codecache.CppBuilder.build

    def build(self: Any) -> None:
        found.append(self.get_command_line())
        plain(self)

    monkeypatch.setattr(codecache.CppBuilder, "build", build)
    return found


@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_share_a_file_and_are_found_alone(threads, built):
    more = source(f"{threads + 10}")  # a file of its own: a process loads each once
    with inductor_config.patch(compile_threads=threads):
        first, second, again = compiled(source("1"), more, source("1"))
    assert_adds(first, 1)
    assert_adds(second, threads + 10)
    assert_adds(again, 1)
    assert sum(".main.cpp" in command for command in built) == 1
    (found,) = compiled(more)
    assert_adds(found, threads + 10)
    with_argument = kernels._name_of([*ARGUMENTS, "float"], more)
    assert with_argument != kernels._name_of(ARGUMENTS, more)
    assert sum(".main.cpp" in command for command in built) == 1


def test_a_library_that_was_cut_short_is_not_loaded(built, tmp_path):
    compiled(source("4"))
    libraries = [*tmp_path.rglob("*.main.so"), *tmp_path.rglob("k*.so")]
    assert libraries
    for path in libraries:  # another file each: this process has loaded the whole one
        whole = path.read_bytes()
        path.unlink()
        path.write_bytes(whole[: len(whole) // 2])
    before = len(built)
    assert_adds(*compiled(source("4")), 4)
    assert len(built) > before
    assert_adds(*compiled(source("4")), 4)


def test_what_is_no_single_function_is_compiled_by_torch(built):
    (kernel,) = compiled(source("one()", 'extern "C" float one() { return 1.0f; }'))
    assert_adds(kernel, 1)


def test_a_torch_of_other_ways_compiles_as_it_does(built, monkeypatch):
    def refuse(*_: Any) -> None:
        raise AttributeError("load_async")

    monkeypatch.setattr(kernels, "_section", refuse)
    (kernel,) = compiled(source("3"))
    assert_adds(kernel, 3)


def test_strides_are_those_that_torch_finds():
    x, y, n = sympy.symbols("x0 x1 ks0", integer=True, nonnegative=True)
    module: Any = cpp
    plain = module.stride_at_vec_range
    indices = [x, 64 * x + y, n * x + (n + 1) * y, x * (x - 1) * n, FloorDiv(x, 16) + y, n]
    indices += [ModularIndexing(x, 1, 32) + 32 * y, n * n * FloorDiv(x + n, n)]
    with kernels.quick_strides():
        assert module.stride_at_vec_range is not plain
        for index in indices:
            found, torchs = module.stride_at_vec_range(index, x, 16), plain(index, x, 16)
            assert sympy.simplify(found - torchs) == 0, index
            assert (found in (0, 1)) == (torchs in (0, 1)), index
    assert module.stride_at_vec_range is plain
