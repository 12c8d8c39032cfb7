"""Streams, events and copies of the runtime: with any of its waits left out, a scenario fails."""

import pytest

from tests.cuda_emulated import kernels
from tests.cuda_emulated.device_calls import run_at_once
from tests.cuda_emulated.mutations import all_sites, is_seen
from tests.cuda_emulated.scenarios import failure
from tests.cuda_emulated.training_scenarios import SCENARIOS
from tests.cuda_emulated.waits import FOUND, is_exempt

SEEDS = range(3)
FEWEST_SITES = 50
"""Calls that wait, record or hold, told apart by the runtime's lines that lead to them."""


@pytest.fixture(autouse=True)
def _computing_kernels():
    kernels.install()
    yield
    run_at_once()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_nothing_is_left_to_chance(scenario):
    assert failure(scenario, chance=None) == ""
    for seed in SEEDS:
        assert failure(scenario, chance=seed / len(SEEDS), seed=seed) == ""


def test_every_wait_that_is_left_out_is_seen():
    used = all_sites()
    assert len(used) >= FEWEST_SITES
    assert {site[0] for site in used} == {f"{owner.__name__}.{name}" for owner, name in FOUND}
    assert [site for site in used if not is_exempt(site) and not is_seen([site], used)] == []
