"""A budget is used to the last byte: what an answer takes is enough for the same answer."""

import dataclasses
import functools

import pytest
import torch

import memo_compile
from memo_compile.config import MemoConfig
from memo_compile.costs import models
from memo_compile.costs.hardware import find_hardware
from memo_compile.errors import Infeasible
from memo_compile.file_store import FileStore
from memo_compile.offline import forecast as forecasting
from memo_compile.offline.forecast import Question, forecast, longest, needed, sweep
from memo_compile.offline.room import Room
from memo_compile.offline.shapes.degrees import Degrees
from tests.commands.test_longest import OPTIONS, Model
from tests.commands.tiny import TINY

DEEP = dataclasses.replace(TINY, name="deep", num_layers=4)
H100 = find_hardware("h100")
SLOW_LINK = 5e8
"""So slow that each byte that stays on the device saves time."""
SLOW = dataclasses.replace(H100, d2h_bytes_per_s=SLOW_LINK, h2d_bytes_per_s=SLOW_LINK)
WHOLE = pytest.param(1, marks=pytest.mark.full)
"""One stage with the loss head, whose tiles are traced one after the other; the others lack it."""
ADAMW_STATE = 2**20
"""Bytes that lie beside the arena, so that a share of them is more than rounding."""


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """What is traced once for all tests here."""
    return FileStore(folder=tmp_path_factory.mktemp("steps"))


@pytest.fixture(autouse=True)
def _known(steps, monkeypatch):
    monkeypatch.setattr(forecasting, "user_store", lambda: steps)
    monkeypatch.setitem(models.MODELS, DEEP.name, DEEP)
    monkeypatch.setenv("MEMO_LOWERING", "aten")


def asked(seq=4096, budget=None, pp=1):
    return Question(model=DEEP.name, hardware=SLOW, seq=seq, budget=budget, degrees=Degrees(pp=pp))


def forecasts(budgets, pp):
    """One answer for each budget; the model is traced once."""
    with forecasting._recorded_model(asked(pp=pp)) as model:
        for budget in budgets:
            yield forecasting._forecast(asked(budget=budget, pp=pp), model)


@pytest.mark.full
@pytest.mark.parametrize("pp", [WHOLE, 2])
def test_what_an_answer_takes_is_enough_for_no_slower_one(pp):
    answers = list(sweep(asked(pp=pp), 5))
    afresh = forecasts([answer.peak_bytes for answer in answers], pp)
    for answer, again in zip(answers, afresh, strict=True):
        assert again.fits
        assert again.peak_bytes <= answer.peak_bytes
        assert again.step_s <= answer.step_s * (1 + 1e-9)
    assert answers[0].step_s > answers[2].step_s > answers[-1].step_s


@pytest.mark.parametrize("pp", [WHOLE, 2])
def test_a_smaller_budget_is_not_faster_and_takes_no_more(pp):
    least, *_, most = sweep(asked(pp=pp), 2)
    step, last = (most.peak_bytes - least.peak_bytes) // 7, None
    for answer in forecasts(range(least.peak_bytes, most.peak_bytes, step), pp):
        assert answer.fits
        if last is not None:
            assert answer.step_s <= last.step_s * (1 + 1e-9)
            assert answer.peak_bytes >= last.peak_bytes
        last = answer


@pytest.mark.parametrize("pp", [WHOLE, 2, pytest.param(4, marks=pytest.mark.full)])
def test_one_byte_less_than_the_least_fits_nowhere(pp):
    least = forecast(asked(budget=1, pp=pp)).peak_bytes
    for budget, fits in ((least, True), (least - 1, False)):
        question = asked(budget=budget, pp=pp)
        assert forecast(question).fits is needed(question).fits is fits


def test_micro_batches_in_flight_share_the_host_memory():
    offloading = dataclasses.replace(asked(pp=2), hardware=H100, policy="full-offload")
    host_bytes = forecast(offloading).host_bytes
    assert host_bytes > 0
    enough = forecast(dataclasses.replace(offloading, host_budget=host_bytes))
    assert enough.host_bytes == host_bytes
    with pytest.raises(Infeasible, match="host_budget"):
        forecast(dataclasses.replace(offloading, host_budget=host_bytes * 3 // 4))


@pytest.mark.full
def test_the_longest_sequence_takes_no_more_than_its_least_budget():
    least = forecast(asked(seq=8192, budget=1, pp=2)).peak_bytes
    assert longest(asked(budget=least, pp=2), lambda *_: None) == 8192
    assert longest(asked(budget=least - 1, pp=2), lambda *_: None) < 8192


def test_a_script_takes_what_its_smallest_size_is_said_to_need():
    call = functools.partial(Model(), torch.zeros(2, 64, dtype=torch.int64))
    options = {**OPTIONS, "optimizer_state_bytes_per_parameter": ADAMW_STATE}
    asking = functools.partial(
        memo_compile.longest, call, options=options, hardware="h100", multiple_of=8
    )
    with pytest.raises(Infeasible) as refused:
        asking(1000)
    floor = refused.value.floor_bytes
    assert floor is not None
    found = asking(floor)
    room = Room.on(H100, floor)
    assert found.size == 8
    assert room.taken_bytes(found.plan) + room.missed_bytes <= floor


@pytest.mark.parametrize("num_frames", [1, 3])
@pytest.mark.parametrize("arena", [1, 99, 100, 101, 512, 12345])
def test_what_a_plan_takes_leaves_room_for_it_and_no_byte_more(num_frames, arena):
    beside = 1000
    room = Room(budget_bytes=0, num_frames=num_frames, missed_percent=1)
    taken = room.counted_bytes(beside + arena, beside)
    config = room.configured(MemoConfig())
    assert config.plan_bytes(taken, beside) == beside + arena
    assert config.plan_bytes(taken - 1, beside) < beside + arena
    assert config.plan_bytes(beside - 1, beside) == beside - 1
