"""``memo plan package.module:function``: budgets, lengths and advice that a function can take."""

import pytest

from memo_compile.cli.main import main
from memo_compile.costs.hardware import find_hardware
from memo_compile.offline.forecast import Question
from memo_compile.offline.shapes.degrees import Degrees

ROWS = """
import torch

def made(tokens):
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
    ), (torch.randn(tokens, 64),)

def build(seq):
    return made(seq)

def fixed():
    return made(1024)

def ignoring(seq):
    return made(1024)

def short(seq=2048, batch=1):
    return made(seq * batch)
"""


@pytest.fixture
def plan(capsys, tmp_path, monkeypatch):
    """(exit code, stdout, stderr) of ``memo plan rows_of_lengths:FUNCTION ARGUMENTS``."""
    (tmp_path / "rows_of_lengths.py").write_text(ROWS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MEMO_LOWERING", "aten")

    def planned(function, *arguments):
        with pytest.raises(SystemExit) as left:
            main(["plan", f"rows_of_lengths:{function}", "--hardware", "a100", *arguments])
        out, err = capsys.readouterr()
        return left.value.code, out, err

    return planned


@pytest.mark.parametrize("budget", ["0", "0%", "0GiB", "0.4"])
def test_a_budget_below_a_byte_is_refused(plan, budget):
    code, out, err = plan("build", "--seq", "1024", "--budget", budget)
    assert (code, out) == (2, "")
    assert err == f"memo: budget: expected at least 1 byte, got {budget}\n"


def test_no_host_memory_is_a_budget(plan):
    assert plan("build", "--seq", "1024", "--host-budget", "0")[0] == 0


def test_the_longest_sequence_of_a_function_without_one_is_refused(plan):
    code, out, err = plan("fixed", "--max-seq")
    assert (code, out) == (2, "")
    assert err == "memo: max-seq: rows_of_lengths:fixed takes no seq; leave out --max-seq\n"


def test_a_search_ends_where_the_length_changes_nothing(plan):
    code, out, err = plan("ignoring", "--max-seq")
    assert (code, out) == (2, "")
    assert "1073741824 tokens as with fewer: the length changes nothing" in err
    assert len(err.splitlines()) <= 8
    close = plan("ignoring", "--max-seq", "--budget", "2GiB")  # a line would go on in small steps
    assert close[0] == 2


def test_without_a_length_that_of_the_function_is_taken(plan):
    code, out, _ = plan("short")
    assert code == 0
    assert "note: without --seq the function's own is taken: 2048" in out
    _, asked, _ = plan("short", "--seq", "2048")
    rows = [[line for line in text.splitlines() if "peak" in line] for text in (out, asked)]
    assert rows[0] == rows[1]
    assert plan("build")[0] == 2


def test_advice_names_no_devices_for_a_function(plan):
    code, out, _ = plan("build", "--seq", "1024", "--budget", "1KiB")
    assert code == 1
    assert "what to change:" in out
    assert "--tp" not in out


@pytest.mark.parametrize(
    ("least", "seq", "tp"),
    [
        (1.0, 4096, 4),
        (3.0, 4096, 4),
        (5.0, 4096, 8),
        (9.0, 4096, 16),
        (33.0, 4096, None),
        (3.0, 4098, None),
    ],
)
def test_a_shape_is_cut_only_as_its_heads_and_tokens_can_be(least, seq, tp):
    degrees = Degrees(tp=2)
    question = Question(model="llama3-8b", hardware=find_hardware("h200"), seq=seq, degrees=degrees)
    assert question.tp_of(least) == tp


def test_advice_of_a_length_only_where_the_function_takes_one(plan):
    code, out, _ = plan("fixed", "--seq", "1024", "--budget", "1MiB")
    assert code == 1
    assert "shorter" not in out
    assert "--seq 0" not in plan("build", "--seq", "4", "--budget", "600KiB")[1]
