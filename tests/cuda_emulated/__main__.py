"""``python -m tests.cuda_emulated [PYTEST OPTIONS]``: build the device, run the tests on it."""

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
    # Kernels do nothing, so that tensors cannot be printed: pytest must not show values.
    command = [sys.executable, "-m", "pytest", "-q", "--tb=native", "tests/cuda_emulated"]
    os.chdir(ROOT)
    os.execve(sys.executable, [*command, *sys.argv[1:]], environment(folder))
    return 1


if __name__ == "__main__":
    sys.exit(main())
