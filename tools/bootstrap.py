"""Create the development environment in ``.venv``: pinned versions, torch first.

Run with any Python 3.11 or newer, nothing installed: ``python3.11 tools/bootstrap.py``. With
``--examples`` the environment is ``.venv-examples``, which also holds what the examples of
``examples/tools`` need. A stamp
holds the hash of what was asked for, so a second call returns at once and an edited pin installs
again. torch comes first because a plain ``pip install torch`` on Linux pulls gigabytes of CUDA
libraries: where no NVIDIA driver is found, the CPU build is taken from PyTorch's own index.

Environment: ``TORCH_INDEX`` names another package index for torch; empty means pip's own.
"""

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import urllib.parse
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".memo-stamp"
REQUIREMENTS = ROOT / "requirements-dev.txt"
EXAMPLES = ROOT / "requirements-examples.txt"
MORE: list[Path] = []
"""Requirements beside those."""
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CONNECT_TIMEOUT_S = 5.0
"""Long enough for any working network; without one, pip's retries would cost 15 s per package."""
OLDEST_PYTHON = (3, 11)


def main(arguments: Sequence[str] = ()) -> int:
    """Install what is missing; 0 when the environment is ready, 2 with a message when not."""
    if "--examples" in arguments:
        use_examples()
    if sys.version_info < OLDEST_PYTHON:
        have = ".".join(map(str, sys.version_info[:3]))
        print(
            f"bootstrap: needs Python 3.11 or newer, this is {have}; set PYTHON=", file=sys.stderr
        )
        return 2
    wanted = fingerprint()
    if STAMP.is_file() and STAMP.read_text() == wanted:
        return 0
    try:
        install()
    except subprocess.CalledProcessError as error:
        print(f"bootstrap: failed (exit {error.returncode}): {error.cmd}", file=sys.stderr)
        return 2
    STAMP.write_text(wanted)
    return 0


def use_examples() -> None:
    """From here on the environment is that of the examples."""
    global VENV, STAMP
    VENV = ROOT / ".venv-examples"
    STAMP = VENV / ".memo-stamp"
    MORE.append(EXAMPLES)


def fingerprint() -> str:
    """A hash of everything that decides what the environment holds."""
    parts = [TORCH, sys.version, str(ROOT), REQUIREMENTS.read_text()]
    parts.append((ROOT / "pyproject.toml").read_text())
    parts.extend(path.read_text() for path in MORE)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def install() -> None:
    """Fill ``.venv``: torch, then the pins, then this checkout in editable mode.

    Raises:
        subprocess.CalledProcessError: pip failed; its own message is already on stderr.
    """
    python = VENV / "bin" / "python"
    if not python.exists():
        print(f"bootstrap: creating {VENV}", flush=True)
        venv.create(VENV, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    print(f"bootstrap: installing {TORCH}", flush=True)
    subprocess.run([*pip, TORCH, *torch_index()], check=True)
    print(f"bootstrap: installing {REQUIREMENTS.name}", flush=True)
    for path in (REQUIREMENTS, *MORE):
        constraint = ["-c", str(REQUIREMENTS)]
        subprocess.run([*pip, "-r", str(path), TORCH, *constraint, *torch_index()], check=True)
    # The build backend is among the pins, so no second, unpinned environment is made for it.
    subprocess.run([*pip, "--no-build-isolation", "--no-deps", "-e", str(ROOT)], check=True)
    subprocess.run([str(python), "-m", "pip", "check"], check=True, stdout=subprocess.DEVNULL)
    # An installed package has its bytecode, a checkout only where Python writes it. Without, each
    # process compiles memo's modules for more than a second.
    rooms = [str(ROOT / name) for name in ("memo_compile", "runtime")]
    subprocess.run([str(python), "-m", "compileall", "-q", *rooms], check=True)


def torch_index() -> list[str]:
    """Arguments for pip that select torch's build: CPU where there is no NVIDIA driver."""
    chosen = os.environ.get("TORCH_INDEX")
    if chosen is not None:
        return ["--extra-index-url", chosen] if chosen else []
    if shutil.which("nvidia-smi") or not reachable(CPU_INDEX):
        return []
    return ["--extra-index-url", CPU_INDEX]


def reachable(url: str) -> bool:
    """Whether the host of ``url`` answers within ``CONNECT_TIMEOUT_S`` (directly or by proxy)."""
    proxy = os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY")
    target = urllib.parse.urlsplit(proxy or url)
    try:
        address = (target.hostname or "", target.port or 443)
        with socket.create_connection(address, timeout=CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
