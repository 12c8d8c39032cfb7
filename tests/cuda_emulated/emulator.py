"""Builds the emulated CUDA device: the libraries that torch's CUDA build finds before NVIDIA's.

``device/*.cpp`` is a CUDA runtime and driver; ``device/device.h`` says how it works. Functions of
cuBLAS do nothing, those of other processes' memory answer "not supported". Headers come with
torch's CUDA build: from nvidia-cuda-runtime and from triton.
"""

import hashlib
import os
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).parent / "device"
LIBRARIES = ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13", "libcuda.so.1")
NOT_SUPPORTED = 801
"""``cudaErrorNotSupported``."""

_LIKE_CUBLAS = """
int cublasCreate_v2(void** handle) {  // torch keeps a workspace for each
  static long made;
  *handle = (void*)(64 * __atomic_add_fetch(&made, 1, __ATOMIC_RELAXED));
  return 0;
}
int cublasGetMathMode(void* handle, int* mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void* handle, int* mode) { *mode = 0; return 0; }
"""
_LIKE_CUBLASLT = """
unsigned long cublasLtGetVersion(void) { return 130100; }
int cublasLtMatmulAlgoGetHeuristic(void* h, void* o, void* a, void* b, void* c, void* d, void* p,
                                   int wanted, char* results, int* found) {
  *found = wanted > 0;
  return 0;
}
int cublasLtMatmulDescCreate(void** made) { *made = (void*)64; return 0; }
int cublasLtMatmulPreferenceCreate(void** made) { *made = (void*)64; return 0; }
int cublasLtMatrixLayoutCreate(void** made) { *made = (void*)64; return 0; }
"""
_EXPORTS = "libcudart.so.13 { global: cuda*; __cuda*; };\nEMULATED { global: cu[A-Z]*; memo_*; };\n"


def has_cuda_build() -> bool:
    """True where torch is a CUDA 13 build, whose libraries the device stands in for."""
    import torch

    return (torch.version.cuda or "").startswith("13.")


def environment(folder: Path) -> dict[str, str]:
    """The variables with which a process finds the device of ``folder``, as built there.

    Caches lie there too: no real device of the same name may believe what is timed here. Those of
    compiled kernels are kept when the device changes.
    """
    preloaded = ":".join(str(folder / name) for name in LIBRARIES)
    found = {
        "LD_PRELOAD": preloaded,
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "EMULATED_CUDA": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "kernels" / "inductor"),
        "TRITON_CACHE_DIR": str(folder.parent / "kernels" / "triton"),
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # cuDNN is not emulated
    }
    return os.environ | found


def build(root: Path) -> Path:
    """The folder with the built libraries, below ``root``; kept until a source changes.

    Raises subprocess.CalledProcessError: the compiler failed.
    """
    text = "".join(path.read_text() for path in [Path(__file__), *sorted(SOURCE.iterdir())])
    folder = root / f"device-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if all((folder / name).exists() for name in LIBRARIES):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    packages = Path(sysconfig.get_paths()["purelib"])
    headers = ("nvidia/cu13/include", "triton/backends/nvidia/include")
    refused = {name: f"return {NOT_SUPPORTED};" for name in _names("refused.txt")}
    _compile_c(folder / "refused.o", _functions(refused), "-c")
    (folder / "exports.map").write_text(_EXPORTS)
    _run(
        *("g++", "-shared", "-fPIC", "-O1", "-std=c++17", "-w"),
        *(f"-I{packages / header}" for header in headers),
        *map(str, sorted(SOURCE.glob("*.cpp"))),
        *(str(folder / "refused.o"), "-ldl"),
        *("-o", str(folder / "libcudart.so.13"), "-Wl,-soname,libcudart.so.13"),
        f"-Wl,--version-script={folder / 'exports.map'}",
    )
    for name, idle, own in (
        ("libcublas.so.13", "cublas_idle.txt", _LIKE_CUBLAS),
        ("libcublasLt.so.13", "cublaslt_idle.txt", _LIKE_CUBLASLT),
    ):
        (folder / f"{name}.map").write_text(f"{name} {{ global: *; }};\n")
        script = f"-Wl,--version-script={folder / f'{name}.map'}"
        text = own + _functions(dict.fromkeys(_names(idle), "return 0;"))
        _compile_c(folder / name, text, "-shared", f"-Wl,-soname,{name}", script)
    linked = ("-Wl,-soname,libcuda.so.1", "-Wl,--no-as-needed", f"-L{folder}", "-l:libcudart.so.13")
    _compile_c(folder / "libcuda.so.1", "void memo_emulated_anchor(void) {}\n", "-shared", *linked)
    return folder


def _names(file: str) -> list[str]:
    return (SOURCE / file).read_text().split()


def _functions(bodies: Mapping[str, str]) -> str:
    return "".join(f"int {name}() {{ {body} }}\n" for name, body in bodies.items())


def _compile_c(target: Path, text: str, *options: str) -> None:
    source = target.with_name(f"{target.name}.c")
    source.write_text(text)
    kind, *linked = options
    _run("gcc", kind, "-fPIC", "-w", str(source), "-o", str(target), *linked)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
