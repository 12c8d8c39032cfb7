"""Each example finds memo's losses equal to eager's, memo active, and its budget kept."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "tools"

NEEDS = {
    "accelerate_loop.py": ["accelerate"],
    "diffusion.py": ["diffusers"],
    "dpo.py": ["accelerate", "trl", "datasets"],
    "finetune_loop.py": [],
    "grpo.py": ["accelerate", "trl", "datasets"],
    "lightning_fit.py": ["lightning"],
    "lora.py": ["peft"],
    "preference_loss.py": [],
    "sft.py": ["accelerate", "trl", "datasets", "peft"],
    "torchtitan_fsdp.py": ["torchtitan"],
    "trainer.py": ["accelerate"],
}
"""Example -> packages that the development environment lacks; `make examples` has them."""

RUNS = [
    *((name, ()) for name in NEEDS if NEEDS[name]),
    *(pytest.param(name, (), marks=pytest.mark.full) for name in NEEDS if not NEEDS[name]),
    ("trainer.py", ("--spelling", "compiled")),
    ("trainer.py", ("--bf16",)),
    *((name, ("--offload",)) for name in ("trainer.py", "accelerate_loop.py", "lightning_fit.py")),
]


def test_every_example_is_run():
    found = {path.name for path in FOLDER.glob("*.py")}
    assert found == {*NEEDS, "beside_eager.py"}


@pytest.mark.parametrize(("name", "arguments"), RUNS, ids=lambda value: "".join(value))
def test_an_example(name, arguments):
    missing = [package for package in NEEDS[name] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, which `make examples` installs")
    paths = [str(ROOT), str(ROOT / "runtime"), os.environ.get("PYTHONPATH", "")]
    environment = {
        "MEMO_LOWERING": "aten",  # what is compiled is not the point, and takes minutes
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, str(FOLDER / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=FOLDER,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of eager's" in done.stdout
