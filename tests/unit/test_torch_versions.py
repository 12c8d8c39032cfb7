"""``tools/torch_versions.py``: what has passed on a commit is not run again."""

import json

import pytest

from tools import torch_versions
from tools.torch_versions import Outcome


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """The suites that were run, by version; with torch 2.12.0 all fail."""
    found = []

    def tested(version, suite, commit):
        found.append((version, suite))
        code = int(version == "2.12.0")
        return Outcome(
            asked=version, torch=version, suite=suite, commit=commit, exit_code=code, summary="s"
        )

    monkeypatch.setattr(torch_versions, "tested", tested)
    monkeypatch.setattr(torch_versions, "RESULTS", tmp_path)
    monkeypatch.setattr(torch_versions, "checked_out", lambda: "abc")
    return found


def test_a_suite_that_passed_is_not_run_again_and_one_that_failed_is(ran):
    assert torch_versions.main(["--suite", "quick", "2.11.0"]) == 0
    assert torch_versions.main(["2.11.0", "2.12.0"]) == 1
    assert torch_versions.main(["--suite", "numerics", "2.12.0"]) == 1
    assert ran == [
        *(("2.11.0", "quick"), ("2.11.0", "numerics")),
        *(("2.12.0", "quick"), ("2.12.0", "numerics"), ("2.12.0", "numerics")),
    ]
    rows = json.loads(torch_versions.result_path().read_text())["rows"]
    assert [(row["asked"], row["suite"], row["exit_code"]) for row in rows] == [
        ("2.11.0", "numerics", 0),
        ("2.11.0", "quick", 0),
        ("2.12.0", "numerics", 1),
        ("2.12.0", "quick", 1),
    ]


def test_another_commit_or_a_changed_file_is_run_again(ran, monkeypatch):
    for commit in ("abc", "def", "def+", "def+"):
        monkeypatch.setattr(torch_versions, "checked_out", lambda commit=commit: commit)
        assert torch_versions.main(["--suite", "quick", "2.11.0"]) == 0
    assert len(ran) == 4
