"""Draw the pictures of docs/why-memory.md: plans of one step, as memo's own report draws them.

    python tools/draw_docs.py    # needs the extra `plot`; takes some minutes

Nothing runs on a device: the step is planned as ``memo plan`` does it.
"""

import dataclasses
import tempfile
from pathlib import Path

from memo_compile.costs.hardware import find_hardware
from memo_compile.offline.forecast import Question, forecast
from memo_compile.reporting.write import write_pictures

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
STEP = Question(model="gpt-1.3b", hardware=find_hardware("h100"), seq=16384)
BUDGETS = {"kept": None, "budget": "24GiB"}
"""Name of the picture -> the budget; None is all but 1 GiB of the device, in which all is kept."""


def main() -> None:
    """Every picture lies in docs/pictures; what it shows is printed."""
    PICTURES.mkdir(exist_ok=True)
    for name, budget in BUDGETS.items():
        step = forecast(dataclasses.replace(STEP, budget=budget)).step
        with tempfile.TemporaryDirectory() as folder:
            write_pictures(Path(folder), step.problem, step.plan)
            for kind in ("memory", "arena"):
                (PICTURES / f"{kind}-{name}.png").write_bytes(
                    (Path(folder) / f"{kind}.png").read_bytes()
                )
        plan = step.plan
        moved = sorted({row.decision for row in plan.decisions})
        print(f"{name}: peak {plan.peak_bytes} B, step {plan.step_s} s, {', '.join(moved)}")


if __name__ == "__main__":
    main()
