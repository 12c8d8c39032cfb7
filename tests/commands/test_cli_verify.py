"""``memo verify``: what two recorded runs say, and one script in child processes."""

import copy
import json
import math
import os
import sys
import textwrap

import pytest

from memo_compile.cli import verify_command
from memo_compile.cli.main import main
from memo_compile.cli.verify_command import judge

STEP = {"losses": [2.0], "gradients": [(1.0, 0.5), (4.0, -1.0), None], "half": False}

RUN = {
    "steps": [STEP, STEP],
    "active": True,
    "unplanned_steps": 0,
    "notes": [],
    "measured_peak_bytes": 900 * 2**20,
    "planned_peak_bytes": 1000 * 2**20,
    "check": [],
    "failed": False,
}

EAGER = {**RUN, "active": False, "measured_peak_bytes": None, "planned_peak_bytes": None}


def run_with(path, value):
    """RUN with one entry, at ``path``, replaced."""
    changed = copy.deepcopy(RUN)
    *inner, last = path
    place = changed
    for key in inner:
        place = place[key]
    place[last] = value
    return changed


def test_equal_runs_keep_the_promise():
    verdict = judge(EAGER, RUN)
    assert verdict.holds
    assert (verdict.loss_difference, verdict.gradient_difference) == (0.0, 0.0)
    assert "2 steps" in str(verdict)
    assert "peak 900.00 MiB, planned 1000.00 MiB" in str(verdict)


def test_rounding_is_allowed_and_reported():
    verdict = judge(EAGER, run_with(("steps", 1, "losses"), [2.0 + 1e-6]))
    assert verdict.holds
    assert verdict.loss_difference == pytest.approx(5e-7)


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("steps", 1, "losses"), [2.01], "step 2: losses differ by 5.0e-03, more than 0.001"),
        (("steps", 0, "losses"), [math.nan], "step 1: losses differ by inf"),
        (("steps", 0, "losses"), [], "step 1: losses differ by inf"),
        (("steps", 0, "gradients", 1), (4.1, -1.0), "step 1: gradients differ by 2.5e-02"),
        (("steps", 0, "gradients", 1), (4.0, 1.0), "step 1: gradients differ by 5.0e-01"),
        (("steps", 0, "gradients", 2), (1.0, 1.0), "step 1: gradients differ by inf"),
        (("steps", 0, "gradients", 0), None, "step 1: gradients differ by inf"),
        (("steps",), [STEP], "2 steps without memo, 1 with it"),
        (("active",), False, "memo is not active"),
        (("unplanned_steps",), 3, "3 steps ran without their plan"),
        (("check",), ["bytes overlap"], "the checker: bytes overlap"),
        (("failed",), True, "the script failed with memo after 2 steps"),
        (("measured_peak_bytes",), 1100 * 2**20, "peak is 1.07 GiB, planned were 1000.00 MiB"),
    ],
)
def test_every_broken_promise_is_named(path, value, fault):
    verdict = judge(EAGER, run_with(path, value))
    assert not verdict.holds
    assert fault in str(verdict)


def test_a_process_that_died_breaks_the_promise():
    assert "the process with memo died" in str(judge(EAGER, None))


def test_half_precision_may_differ_by_more():
    half = {**STEP, "half": True}
    near = {**half, "losses": [2.05]}
    assert judge({**EAGER, "steps": [half]}, {**RUN, "steps": [near]}).holds
    assert not judge(
        {**EAGER, "steps": [STEP]}, {**RUN, "steps": [{**STEP, "losses": [2.05]}]}
    ).holds


def test_a_gradient_that_is_all_rounding_is_not_judged():
    tiny = {**STEP, "gradients": [(1.0, 0.0), (1e-9, 1e-9)]}
    other = {**STEP, "gradients": [(1.0, 0.0), (3e-9, -2e-9)]}
    assert judge({**EAGER, "steps": [tiny]}, {**RUN, "steps": [other]}).holds


@pytest.fixture
def verify(tmp_path, capfd, monkeypatch):
    """(exit code, stdout, stderr) of ``memo verify`` of a script, which runs in child processes."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(source, *options):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        with pytest.raises(SystemExit) as left:
            main(["verify", *options, str(script)])
        return left.value.code, *capfd.readouterr()

    return run


TRAINING = """
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 8))
    step = torch.compile(model, backend="memo", options={"lowering": "aten"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(1000):
        loss = (step(torch.randn(256, 64)) * SCALE).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", number)
"""


def test_a_script_is_compared_and_its_peak_measured(verify):
    code, out, err = verify(TRAINING.replace("SCALE", "1.0"), "--steps", "4", "--json")
    body = json.loads(out)
    assert code == 0, err
    assert body["holds"] is True
    assert body["num_steps"] == 4
    assert 0 <= body["gradient_difference"] < 1e-4
    assert body["measured_peak_bytes"] > 0
    assert "step 2" in err
    assert "step 4" not in err
    assert "run 1 of 2, eager: 4 steps in" in err
    assert "run 2 of 2, with memo: 4 steps in" in err


@pytest.mark.full
def test_a_script_that_computes_something_else_with_memo_is_caught(verify):
    scale = "(1.1 if 'memo' in sys.argv[0] or 'memo' in sys.orig_argv else 1.0)"
    source = "import sys\n" + textwrap.dedent(TRAINING).replace("SCALE", scale)
    code, out, _ = verify(source, "--steps", "2")
    assert code == 1
    assert "memo does not keep its promise:\n  step 1: losses differ by 2.1e-01" in out


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as left:
        main(["verify", *arguments])
    assert left.value.code == 2
    return capsys.readouterr().err


def test_a_missing_script_is_refused(capsys, tmp_path):
    assert "no such file" in refused(capsys, str(tmp_path / "none.py"))


NO_STEP = "no training step went through torch.compile"


@pytest.mark.parametrize(
    ("eager", "message"), [({"steps": []}, NO_STEP), (None, "fails without memo too")]
)
def test_without_a_step_in_eager_nothing_is_compared(capsys, tmp_path, monkeypatch, eager, message):
    monkeypatch.setattr(verify_command, "_run", lambda *_: eager)
    (tmp_path / "script.py").write_text("")
    assert message in refused(capsys, str(tmp_path / "script.py"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "message"),
    [("print('hello')", NO_STEP), ("raise ValueError('boom')", "fails without memo too")],
)
def test_scripts_that_train_nothing_are_refused(capsys, tmp_path, source, message):
    script = tmp_path / "script.py"
    script.write_text(source)
    assert message in refused(capsys, str(script))


OTHER = run_with(("steps", 0, "losses"), [3.0])


@pytest.fixture
def verify_runs(tmp_path, monkeypatch, capsys):
    """(exit code, stdout, stderr) of ``memo verify`` where each arm recorded what is given."""
    script = tmp_path / "script.py"
    script.write_text("")

    def run(**runs):
        monkeypatch.setattr(verify_command, "_run", lambda arm, *_: runs[arm.replace("-", "_")])
        with pytest.raises(SystemExit) as left:
            main(["verify", str(script)])
        return left.value.code, *capsys.readouterr()

    return run


def test_a_script_whose_own_runs_differ_is_not_judged(verify_runs):
    code, out, err = verify_runs(eager=EAGER, memo=OTHER, eager_again=OTHER)
    assert (code, out) == (2, "")
    assert "two runs without memo differ too (step 1: losses differ by 5.0e-01" in err
    assert "seed what draws its data" in err


def test_where_plain_inductor_is_right_memo_is_to_blame(verify_runs):
    code, out, _ = verify_runs(eager=EAGER, memo=OTHER, eager_again=EAGER, inductor=RUN)
    assert code == 1
    assert "plain Inductor is right (losses within 0.0e+00" in out
    assert "memo is to blame" in out


def test_where_plain_inductor_is_wrong_alike_torch_is_to_blame(verify_runs):
    code, out, _ = verify_runs(eager=EAGER, memo=OTHER, eager_again=EAGER, inductor=OTHER)
    assert code == 1
    assert "plain Inductor differs from eager too (losses within 5.0e-01" in out
    assert "torch is to blame" in out


def test_where_plain_inductor_fails_that_is_said(verify_runs):
    failed = {**RUN, "failed": True}
    _, out, _ = verify_runs(eager=EAGER, memo=OTHER, eager_again=EAGER, inductor=failed)
    assert "plain Inductor: the script fails with it too" in out


@pytest.mark.full
def test_an_unseeded_script_is_told_so(verify):
    unseeded = TRAINING.replace("SCALE", "(1 + int.from_bytes(os.urandom(2)))")
    code, _, err = verify("import os\n" + textwrap.dedent(unseeded), "--steps", "2")
    assert code == 2
    assert "two runs without memo differ too" in err
