"""What is remembered after an answer, for questions about other budgets, and by which process."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from memo_compile.cli import background
from memo_compile.cli.main import main
from memo_compile.costs import models
from memo_compile.costs.hardware import find_hardware
from memo_compile.errors import TooSlow
from memo_compile.file_store import FileStore
from memo_compile.offline import forecast as forecasting
from memo_compile.offline import model_plans, preparing
from memo_compile.offline.forecast import Question
from memo_compile.offline.remembered_tries import tried
from memo_compile.step.serialise import to_json
from tests.commands.tiny import TINY

SHAPE = dataclasses.replace(TINY, name="tiny-prepared")
ASKED = Question(model=SHAPE.name, hardware=find_hardware("h200"), seq=1024, policy="greedy")
BUDGETS = ("130MiB", "64MiB", "1MiB")
"""The last two fit nothing."""


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch):
    monkeypatch.setitem(models.MODELS, SHAPE.name, SHAPE)
    monkeypatch.setenv("MEMO_LOWERING", "aten")


def text_of(found):
    plan = dataclasses.replace(found.step.plan, planning_s=0.0, lowering_s=0.0)
    return found.fits, found.peak_bytes, found.notes, to_json(found.step.problem), to_json(plan)


def answer(budget=None, *, fully=False, **changes):
    """An answer as text, after which everything else is remembered if it is ``fully``."""
    asked = dataclasses.replace(ASKED, budget=budget, **changes)
    with forecasting.forecasting(asked) as (found, remembering):
        if fully:
            assert remembering.is_needed()
            remembering.fully()
            assert not remembering.is_needed()
        return text_of(found)


def test_every_budget_is_answered_without_the_model_once_all_is_prepared(store, traces):
    alone = [answer(budget, remembers=False) for budget in BUDGETS]
    assert [fits for fits, *_ in alone] == [True, False, False]
    answer(fully=True)
    traces.clear()
    assert [answer(budget) for budget in BUDGETS] == alone
    assert not traces
    assert not [*store.folder.glob("*.claim")]


def test_a_claim_is_one_holders_and_ends_with_it(tmp_path):
    store, key = FileStore(folder=tmp_path), {"kind": "a"}
    assert not store.is_claimed(key)
    claim = store.claim(key)
    assert store.is_claimed(key)
    assert not store.is_claimed({"kind": "b"})
    assert store.claim(key) is None
    claim.release()
    assert not store.is_claimed(key)
    held = store.claim(key)
    os.close(held.file)  # as if its process had been killed
    assert not store.is_claimed(key)
    assert FileStore(folder=tmp_path / "none").claim(key) is None


def claimed_by_another(store, plans, config):
    """As if another process prepared what ``plans`` needs."""
    return store.claim(plans.claim_key(config, preparing.TILES))


@pytest.fixture
def waits(monkeypatch):
    """Holds the claim from the first search for a step on; what was waited for, and how often."""
    seen, held, awaited = [], [], preparing.awaited

    def claims_first(plans, options, find):
        if not held and plans.lasting is not None:
            held.append(claimed_by_another(plans.lasting.store, plans, options))
        begin = time.monotonic()
        awaited(plans, options, find)
        seen.append(time.monotonic() - begin)

    monkeypatch.setattr(model_plans, "awaited", claims_first)
    yield seen, held
    for claim in held:
        with contextlib.suppress(OSError):
            claim.release()


def test_a_step_that_another_process_makes_is_awaited(store, traces, waits, monkeypatch):
    seen, held = waits
    monkeypatch.setattr(preparing, "WAIT_S", 60.0)
    alone = answer("200MiB", remembers=False)
    kept = {}
    store.folder.mkdir(exist_ok=True)
    held.append(None)  # nothing is claimed while this is made
    answer("200MiB")
    for path in store.folder.glob("*.json"):
        kept[path.name] = path.read_bytes()
        if b'"long step"' in kept[path.name][:200]:
            path.unlink()
    held.clear()
    seen.clear()
    traces.clear()

    def made_by_another():
        while not held:
            time.sleep(0.01)
        time.sleep(0.3)
        for name, content in kept.items():
            (store.folder / name).write_bytes(content)

    other = threading.Thread(target=made_by_another)
    other.start()
    assert answer("200MiB") == alone
    other.join()
    assert 0.2 < max(seen) < 30.0
    assert not traces


def test_nobody_waits_for_ever(store, traces, waits, monkeypatch):
    seen, _ = waits
    store.folder.mkdir()
    monkeypatch.setattr(preparing, "WAIT_S", 0.3)
    monkeypatch.setattr(model_plans.ModelPlans, "is_traced", False)
    alone = answer("200MiB", remembers=False)
    traces.clear()
    assert answer("200MiB") == alone
    assert 0.2 < max(seen)
    assert traces


def test_what_another_process_prepares_is_not_prepared_twice(store, traces, monkeypatch):
    with forecasting.forecasting(dataclasses.replace(ASKED, budget="200MiB")) as (_, remembering):
        (plans,) = remembering.subject._plans.values()
        claim = claimed_by_another(store, plans, plans.answered)
        before = sorted(store.folder.glob("*.json"))
        monkeypatch.setattr(preparing, "BRIEFLY", 100.0)
        assert not remembering.is_needed()
        remembering.briefly()
        remembering.fully()
        assert sorted(store.folder.glob("*.json")) == before
        claim.release()
        assert remembering.is_needed()
        remembering.briefly()
        assert sorted(store.folder.glob("*.json")) != before


def test_what_a_command_waits_for_is_made_next(store, traces, monkeypatch):
    with forecasting.forecasting(ASKED) as (_, remembering):
        (plans,) = remembering.subject._plans.values()
        config, order, made = plans.answered, [], []
        while (tiles := plans.missing(preparing._any_budget(plans, config), order)) is not None:
            order.append(tiles)
        assert len(order) > 1
        claim = claimed_by_another(store, plans, config)
        with monkeypatch.context() as another:
            another.setattr(model_plans.ModelPlans, "is_traced", False)
            another.setattr(preparing, "WAIT_S", 0.01)
            preparing.awaited(plans, order[-1].options(config), lambda _: None)
        claim.release()
        prepare = plans.prepare

        def noted(tiles, config):
            made.append(tiles[:3])
            prepare(tiles, config)

        monkeypatch.setattr(plans, "prepare", noted)
        remembering.fully()
        assert made[0] == order[-1][:3]
        assert order[0][:3] in made[1:]


def test_a_try_that_was_too_slow_is_not_made_again(tmp_path):
    store, made = FileStore(folder=tmp_path), []

    def slow():
        made.append(1)
        raise TooSlow("no plan is fast", step_s=2.5, is_bound=True)

    for _ in range(2):
        with pytest.raises(TooSlow, match="no plan is fast") as error:
            tried(store, {"kind": "slow try"}, slow)
        assert (error.value.step_s, error.value.is_bound) == (2.5, True)
    assert made == [1]
    assert tried(store, {"kind": "slow try", "of": "another"}, lambda: 5) == 5
    (path,) = tmp_path.glob("*.json")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(TooSlow):
        tried(store, {"kind": "slow try"}, slow)
    assert made == [1, 1]


LEAVES = """
import os, sys, time
from memo_compile.cli import background
from memo_compile.cli.main import main

def work():
    print("nobody reads this", flush=True)
    time.sleep(1.0)
    with open(sys.argv[1] + ".part", "w") as file:
        file.write(f"{os.getpid()} {os.getsid(0)} {os.nice(0)} {len(os.listdir('/proc/self/fd'))}")
    os.rename(sys.argv[1] + ".part", sys.argv[1])

background.tell(is_own=True)
assert background.can_be_left()
background.leave(work)
print(os.getpid(), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are divided on Linux only")
def test_work_is_left_to_a_process_that_holds_nothing_of_the_callers(tmp_path):
    script, written = tmp_path / "memo", tmp_path / "written"
    script.write_text(LEAVES)
    read, write = os.pipe()  # as of a tool that waits until all writers are gone
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(script), str(written)],
        capture_output=True,
        text=True,
        check=True,
        pass_fds=[write],
    )
    os.close(write)
    assert os.read(read, 1) == b""
    os.close(read)
    assert not written.exists(), f"waited for {time.monotonic() - begin} s"
    assert (done.stdout.split(), done.stderr) == ([done.stdout.strip()], "")
    until = time.monotonic() + 60
    while not written.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    process, session, niceness, num_files = map(int, written.read_text().split())
    assert process == session != int(done.stdout)
    assert niceness == background.NICENESS
    assert num_files <= 6


@pytest.mark.skipif(sys.platform != "linux", reason="processes are divided on Linux only")
def test_work_that_takes_too_long_is_ended_and_gives_up_what_it_holds(tmp_path):
    script, written = tmp_path / "memo", tmp_path / "written"
    late = LEAVES.replace("time.sleep(1.0)", "hold()").replace(
        "background.tell(", "background.LIMIT_S = 0.2\nbackground.tell(", 1
    )
    holds = """
def hold():
    try:
        while True:
            pass
    finally:
        open(sys.argv[1], "w").close()
"""
    script.write_text(late.replace("\ndef work", holds + "\ndef work"))
    subprocess.run([sys.executable, str(script), str(written)], check=True)
    until = time.monotonic() + 30
    while not written.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(0.2)
    assert written.read_text() == ""  # it did not go on


HANGS = """
import hashlib, sys
from pathlib import Path
from memo_compile.cli import background
from memo_compile.cli.main import main
from memo_compile.file_store import FileStore

def work():
    claim = FileStore(folder=Path(sys.argv[1])).claim({"kind": "a"})
    (Path(sys.argv[1]) / "begun").touch()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # no signal is seen in Python

background.LIMIT_S, background.ALIVE_S = 0.1, 2
background.tell(is_own=True)
background.leave(work)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are divided on Linux only")
def test_work_that_hangs_is_ended_and_what_it_claimed_is_free(tmp_path):
    script, store = tmp_path / "memo", FileStore(folder=tmp_path)
    script.write_text(HANGS)
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)
    until = time.monotonic() + 60
    while not (tmp_path / "begun").exists() or store.is_claimed({"kind": "a"}):
        assert time.monotonic() < until
        time.sleep(0.05)
    (tmp_path / "tmpabc").mkdir()
    (tmp_path / "tmpabc" / "whole").touch()  # as of a process that was killed while it wrote
    store.clear()
    assert not [*tmp_path.glob("*.claim"), *tmp_path.glob("tmp*")]


def test_an_answer_stands_where_no_process_can_be_left(store, monkeypatch, capfd):
    def refused():
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(background, "can_be_left", lambda: True)
    monkeypatch.setattr(os, "fork", refused)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as left:
            main(["plan", SHAPE.name, "--seq", "1024", "--policy", "greedy", "--json"])
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # it has nothing to interrupt
    finally:
        signal.signal(signal.SIGINT, before)
    out, err = capfd.readouterr()
    assert (left.value.code, json.loads(out)["fits"], "Error" in err) == (0, True, False)


def test_nothing_is_left_behind_by_a_process_that_is_not_the_commands_own(monkeypatch):
    own = sys.modules["__main__"]
    monkeypatch.setattr(own, "__file__", "/bin/memo", raising=False)
    monkeypatch.setattr(sys, "argv", ["/bin/memo", "plan"])
    for is_own in (False, True):
        background.tell(is_own=is_own)
        assert background.can_be_left() == (is_own and sys.platform == "linux")
    monkeypatch.setattr(sys, "argv", ["/bin/pytest"])  # a test, whose files are another's
    assert not background.can_be_left()
    monkeypatch.setattr(own, "__file__", "/home/me/my_program.py")
    monkeypatch.setattr(sys, "argv", ["/home/me/my_program.py", "plan"])  # its own files are others
    assert not background.can_be_left()
    monkeypatch.delattr(own, "__file__")
    monkeypatch.setattr(sys, "argv", [""])
    assert not background.can_be_left()
    background.tell(is_own=False)
