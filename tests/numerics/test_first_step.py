"""A budget holds in the first step of a process, where nothing was run before."""

import json
import os
import subprocess
import sys

MOST_LEFT_BYTES = 2**20


def test_the_first_step_brings_no_buffers_of_the_product_library():
    """They are there when the planned forward begins, and no step adds to them."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.numerics.first_step"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["runtime", "."])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    first, second = json.loads(run.stdout)
    assert first["grown_bytes"] <= first["planned_bytes"]
    assert second["before_bytes"] - first["before_bytes"] <= MOST_LEFT_BYTES
