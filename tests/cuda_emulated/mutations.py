"""Random removals of waits, events, holds and orders of lanes from the runtime: are they seen?

    python -m tests.cuda_emulated mutations --mutations 50 --seed 1 [--captured]

The runtime's, and those of updates of optimizers that are offloaded; with ``--captured`` those that
become a part of a CUDA graph, or order one. Each mutation leaves one to
three of these calls out, told apart by the lines that lead to them; each alone must be seen. Seen
is a race (``order``), a wrong number or an exception, in a scenario that makes the call. What
cannot change a number is not drawn, and is printed with its reason.
"""

import argparse
import collections
import random
import sys
import time
from collections.abc import Mapping, Sequence

from tests.cuda_emulated import kernels
from tests.cuda_emulated.captured_scenarios import SCENARIOS as CAPTURED
from tests.cuda_emulated.scenarios import Scenario, failure
from tests.cuda_emulated.training_scenarios import SCENARIOS
from tests.cuda_emulated.waits import Site, is_exempt, reason_of, sites_of, without

MOST_AT_ONCE = 3
CHANCES = (0.0, 0.5)
"""That a stream goes on at each call of the host, see ``device_calls.run_late``."""

Sites = Mapping[Site, Sequence[Scenario]]


def all_sites(scenarios: Sequence[Scenario] = SCENARIOS) -> Sites:
    """Every call that orders something, and the scenarios that make it."""
    used: dict[Site, list[Scenario]] = {}
    for scenario in scenarios:
        for site in sites_of(lambda scenario=scenario: failure(scenario, chance=None)):
            used.setdefault(site, []).append(scenario)
    return used


def is_seen(left_out: Sequence[Site], used: Sites) -> str:
    """What goes wrong without ``left_out``; "" if nothing does."""
    scenarios = list(dict.fromkeys(found for site in left_out for found in used[site]))
    with without(*left_out):
        for chance in CHANCES:
            for scenario in scenarios:
                if failed := failure(scenario, chance=chance):
                    return f"{scenario.__name__}: {failed}"
    return ""


def main() -> int:
    """Print a table, and what was not seen; 1 if there is any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutations", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--captured", action="store_true")
    options = parser.parse_args()
    kernels.install()
    begin = time.monotonic()
    used = all_sites(CAPTURED if options.captured else SCENARIOS)
    if options.captured:
        used = {site: used[site] for site in used if "cuda_graphs." in " ".join(site)}
    drawn, missed = collections.Counter(), []
    wanted = sorted(site for site in used if not is_exempt(site))
    chooser = random.Random(options.seed)
    for number in range(options.mutations):
        left_out = chooser.sample(wanted, chooser.randint(1, MOST_AT_ONCE))
        drawn.update(site[0] for site in left_out)
        seen = [is_seen([site], used) for site in left_out]
        together = is_seen(left_out, used)
        if not all((*seen, together)):
            missed.append(left_out)
        print(f"{number}: {'; '.join(map(_line, left_out))}: {(together or 'NOT SEEN')[:160]}")
    print(f"\n{len(used)} calls, {len(wanted)} of them change something when they are left out")
    print("\n| left out | in mutations |\n| --- | ---: |")
    for name, count in sorted(drawn.items()):
        print(f"| {name} | {count} |")
    print(f"\n{options.mutations} mutations, {len(missed)} not seen", end="")
    print(f", seed {options.seed}, {time.monotonic() - begin:.0f} s")
    for site in sorted(set(used) - set(wanted)):
        print(f"never drawn: {_line(site)}: {reason_of(site)}")
    return 1 if missed else 0


def _line(site: Site) -> str:
    return " < ".join(site[:3])


if __name__ == "__main__":
    sys.exit(main())
