"""A long compilation says what it does, on a terminal or where it is asked to."""

import time

import pytest
import torch
from torch import nn

from memo_compile.reporting import compiling
from memo_compile.reporting.compiling import say


def test_the_first_line_comes_after_five_seconds_of_silence(capsys, monkeypatch):
    assert compiling.FIRST_S == 5
    with compiling.compiling(", planning under 60GiB", shows=True):
        say("lowering 11 regions")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(compiling, "FIRST_S", 0.05)
    with compiling.compiling(", planning under 60GiB", shows=True):
        say("lowering 11 regions")
        time.sleep(0.08)
        say("choosing what is kept")
        time.sleep(0.1)
    assert capsys.readouterr().err.splitlines() == [
        "memo: lowering 11 regions, planning under 60GiB; 0 s",
        "memo: choosing what is kept, planning under 60GiB; 0 s",
        "memo: ready; 0 s",
    ]
    say("nobody listens")
    assert compiling._speakers == []


def test_nothing_is_said_where_it_does_not_show(capsys, monkeypatch):
    monkeypatch.setattr(compiling, "FIRST_S", 0.0)
    with compiling.compiling("", shows=False):
        time.sleep(0.02)
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("fresh_report")
@pytest.mark.parametrize(("progress", "is_terminal"), [(None, True), (True, False)])
def test_a_terminal_or_the_option_shows_it(progress, is_terminal, capsys, monkeypatch):
    from memo_compile.backends import entry

    monkeypatch.setattr(compiling, "FIRST_S", 0.0)
    monkeypatch.setattr(entry, "is_terminal", lambda: is_terminal)
    torch._dynamo.reset()
    options = {"lowering": "aten", "memory_budget": "1GiB", "progress": progress}
    options = {name: value for name, value in options.items() if value is not None}
    torch.compile(nn.Linear(8, 8), backend="memo", options=options)(torch.ones(2, 8))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("memo: tracing the step, planning under 1GiB; ")
    assert lines[-1].startswith("memo: ready; ")


@pytest.mark.usefixtures("fresh_report")
def test_a_pipe_stays_silent(capsys, monkeypatch):
    monkeypatch.setattr(compiling, "FIRST_S", 0.0)
    torch._dynamo.reset()
    torch.compile(nn.Linear(8, 8), backend="memo", options={"lowering": "aten"})(torch.ones(2, 8))
    assert capsys.readouterr().err == ""
