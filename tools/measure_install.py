"""Install the wheel of a folder into a fresh environment, try it, and measure it.

    python tools/measure_install.py dist    # `make package` does this last

torch is left out on purpose: whoever installs memo has one, and what memo adds is the question. So
is everything that only torch brings. What is tried: ``import memo_compile``, ``memo --help`` and
the help of every command, with the light core alone.
"""

import email
import email.message
import re
import statistics
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

NUM_IMPORTS = 9
MEBIBYTE = 2**20
LEAST_FILES = ("memo_compile/py.typed", "memo_compile/reporting/templates/report.html.j2")
"""Files without which an install would fail later: the wheel must have them."""


def main() -> int:
    """Print what the wheel in the folder adds to an environment, and how long its import takes."""
    (wheel,) = Path(sys.argv[1]).glob("*.whl")
    (sdist,) = Path(sys.argv[1]).glob("*.tar.gz")
    metadata = looked_at(wheel)
    print(f"wheel {wheel.stat().st_size / MEBIBYTE:.1f} MiB, sdist {sdist.name}")
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        (packages,) = Path(folder).glob("lib/python*/site-packages")
        before = size_bytes(packages)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *requirements(metadata)], check=True)
        subprocess.run([*pip, "--no-deps", str(wheel.resolve())], check=True)
        added = size_bytes(packages) - before
        tried(Path(folder))
        print(f"added, torch not counted: {added / MEBIBYTE:.0f} MiB")
        for name, size in sorted(sizes(packages), key=lambda pair: -pair[1])[:6]:
            print(f"  {name}: {size / MEBIBYTE:.0f} MiB")
        print(f"import memo_compile: {1e3 * import_s(python):.0f} ms, median of {NUM_IMPORTS}")
    return 0


def looked_at(wheel: Path) -> email.message.Message:
    """The wheel's metadata; an AssertionError where a file is missing that an install needs."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        missing = [name for name in LEAST_FILES if name not in names]
        assert not missing, f"{wheel.name} lacks {missing}"
        assert any(name.endswith("licenses/LICENSE") for name in names), "no licence"
        (found,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(found))


def requirements(metadata: email.message.Message) -> list[str]:
    """What the core requires, without torch and without extras."""
    lines = metadata.get_all("Requires-Dist") or []
    core = [line for line in lines if "extra ==" not in line]
    return [line for line in core if re.split(r"[^\w-]", line)[0] != "torch"]


def size_bytes(folder: Path) -> int:
    """Bytes of all files below ``folder``, compiled Python left out."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files if path.suffix != ".pyc")


def sizes(packages: Path) -> Iterator[tuple[str, int]]:
    """The folders of ``packages``, with their bytes."""
    for path in packages.iterdir():
        if path.is_dir() and path.name not in ("pip", "setuptools", "__pycache__"):
            yield path.name, size_bytes(path)


def tried(folder: Path) -> None:
    """The core works without torch. Raises subprocess.CalledProcessError: it does not."""
    subprocess.run([folder / "bin/python", "-c", "import memo_compile"], check=True, cwd=folder)
    help_text = subprocess.run(
        [folder / "bin/memo", "--help"], capture_output=True, text=True, check=False, cwd=folder
    )
    assert help_text.returncode == 0, help_text.stderr
    for command in ("plan", "explain", "verify", "doctor", "place"):
        assert command in help_text.stdout, command
        run = [folder / "bin/memo", command, "--help"]
        subprocess.run(run, check=True, cwd=folder, stdout=subprocess.DEVNULL)


def import_s(python: Path) -> float:
    """Seconds of ``import memo_compile`` by Python's own clock, the median of several processes."""
    found = []
    for _ in range(NUM_IMPORTS):
        run = [python, "-X", "importtime", "-c", "import memo_compile"]
        done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=python.parent)
        (line,) = (line for line in done.stderr.splitlines() if line.endswith("| memo_compile"))
        found.append(int(line.split("|")[1]) / 1e6)
    return statistics.median(found)


if __name__ == "__main__":
    sys.exit(main())
