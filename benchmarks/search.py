"""Seconds of the configuration search: evaluating all points, and the whole call after import.

Run: python -m benchmarks.search
"""

import os
import platform
import time

from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import find_model
from memo_compile.papers.search.ranking import SearchQuestion, search


def main() -> None:
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for name, points in (("llama-175b", 2310), ("llama-65b", 1710)):
        whole, evaluation = [], []
        for _ in range(5):
            started = time.perf_counter()
            question = SearchQuestion(
                shape=find_model(name),
                gpus=256,
                seq=4096,
                global_batch=256,
                hardware=find_hardware("h800"),
            )
            found = search(question)
            whole.append(time.perf_counter() - started)
            evaluation.append(found.evaluation_s)
        assert found.num_points == points, f"{found.num_points} points"
        print(
            f"{name}: {points} points, evaluation {1e3 * min(evaluation):.2f} ms, "
            f"whole call {1e3 * min(whole):.1f} ms (first {1e3 * whole[0]:.1f} ms), "
            f"best step {found.configurations[0].iteration_s:.2f} s"
        )


if __name__ == "__main__":
    main()
