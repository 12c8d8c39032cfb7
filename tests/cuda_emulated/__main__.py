"""Build the emulated device, and run tests, a script or random mutations on it.

python -m tests.cuda_emulated [PYTEST OPTIONS] [FILES]     all tests, or those of the files
python -m tests.cuda_emulated mutations [OPTIONS]          see ``mutations``
python -m tests.cuda_emulated run MODULE [ARGUMENTS]       any module
"""

import os
import sys
from pathlib import Path

from tests.cuda_emulated.emulator import build, environment, has_cuda_build

ROOT = Path(__file__).resolve().parent.parent.parent


def main() -> int:
    """Becomes pytest; returns only where it cannot."""
    if not has_cuda_build():
        print("tests.cuda_emulated: expected torch's CUDA 13 build; see make cuda-emulated")
        return 2
    folder = build(Path(os.environ.get("EMULATED_FOLDER", ROOT / "build" / "cuda_emulated")))
    os.chdir(ROOT)
    command = [sys.executable, "-m", *_module(sys.argv[1:])]
    os.execve(sys.executable, command, environment(folder))
    return 1


def _module(arguments: list[str]) -> list[str]:
    """The module to run, and its arguments."""
    if arguments[:1] == ["mutations"]:
        return ["tests.cuda_emulated.mutations", *arguments[1:]]
    if arguments[:1] == ["run"]:
        return arguments[1:]
    # Kernels do nothing, so that tensors cannot be printed: pytest must not show values.
    command = ["pytest", "-q", "--tb=native", *arguments]
    named = any(Path(argument.partition("::")[0]).exists() for argument in arguments)
    return command if named else [*command, "tests/cuda_emulated"]


if __name__ == "__main__":
    sys.exit(main())
