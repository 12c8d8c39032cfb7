import json
import sys

import pytest

from memo_compile.cli import doctor_command as doctor
from memo_compile.cli import main
from memo_compile.offline import checkup
from memo_compile.offline.checkup import Finding, Health
from memo_compile.planners.solver import Engine


def run(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main.main(["doctor", *argv])
    return caught.value.code, capsys.readouterr().out


def test_this_machine_can_run_memo(capsys):
    code, out = run(["--json"], capsys)
    found = json.loads(out)
    assert found["ok"] is True
    assert code == 0
    assert found["versions"]["torch"]["value"] == sys.modules["torch"].__version__
    assert found["backend"]["memo"]["health"] == "ok"
    assert found["solvers"]["HIGHS"]["health"] == "ok"
    assert found["host memory"]["total"]["value"] > found["host memory"]["usable"]["value"] > 0


def finding(health, **changes):
    values = {"group": "versions", "name": "torch", "value": None, "text": "x", **changes}
    return Finding(health=health, **values)


@pytest.mark.parametrize(
    ("health", "code"), [(Health.OK, 0), (Health.LIMITED, 0), (Health.BROKEN, 1)]
)
@pytest.mark.parametrize("argv", [[], ["--json"]])
def test_exit_code_says_whether_memo_can_run(health, code, argv, capsys, monkeypatch):
    monkeypatch.setattr(checkup, "examine", lambda: [finding(health)])
    assert run(argv, capsys)[0] == code


def test_remedies_are_printed_as_they_are(capsys, monkeypatch):
    broken = finding(Health.BROKEN, text="[Errno 2] gone", remedy="pip install numba[x]")
    monkeypatch.setattr(checkup, "examine", lambda: [broken])
    _code, out = run([], capsys)
    assert "[Errno 2] gone" in out
    assert "torch: pip install numba[x]" in out
    assert "memo cannot run here" in out


def test_json_names_what_is_missing():
    found = doctor.as_dict([finding(Health.LIMITED, name="numba", remedy="pip install numba")])
    assert found == {
        "ok": True,
        "missing": ["numba"],
        "versions": {
            "numba": {
                "value": None,
                "text": "x",
                "health": "limited",
                "remedy": "pip install numba",
            }
        },
    }


@pytest.mark.parametrize(
    ("version", "health"),
    [
        ("2.10.1", Health.BROKEN),
        ("1.13.0", Health.BROKEN),
        ("2.11.0+cu130", Health.OK),
        ("2.13.0a0+git1234", Health.OK),
        ("2.16.0.dev20260101", Health.LIMITED),
        ("3.0.0", Health.LIMITED),
    ],
)
def test_torch_versions_are_judged(version, health, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", type("torch", (), {"__version__": version}))
    found = checkup._torch_version()
    assert (found.health, found.value) == (health, version)
    assert bool(found.remedy) == (health is not Health.OK)


def test_without_torch_memo_cannot_run_and_doctor_still_answers(monkeypatch):
    for name in [name for name in sys.modules if name == "torch" or name.startswith("torch.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    by_name = {(finding.group, finding.name): finding for finding in checkup.examine()}
    assert by_name["versions", "torch"].health is Health.BROKEN
    assert "pytorch.org" in by_name["versions", "torch"].remedy
    assert by_name["backend", "memo"].health is Health.BROKEN
    assert by_name["solvers", "HIGHS"].health is Health.OK


def test_engines_are_tried_on_a_model():
    assert checkup.try_engine(Engine.HIGHS) == ""


def test_an_engine_with_a_wrong_answer_is_named(monkeypatch):
    monkeypatch.setattr(checkup.solver.LinearProgram, "integer_value", lambda program, term: 0)
    assert "wrong answer (0, 0) (optimal)" in checkup.try_engine(Engine.HIGHS)


def test_an_engine_that_fails_is_named(monkeypatch):
    def fail(*_arguments, **_options):
        raise OSError("libhighs.so: gone")

    monkeypatch.setattr(checkup.solver.LinearProgram, "solve", fail)
    assert checkup.try_engine(Engine.HIGHS) == "fails: OSError: libhighs.so: gone"
    findings = {finding.name: finding for finding in checkup._solvers()}
    assert findings["HIGHS"].health is Health.LIMITED
    assert findings["HIGHS"].remedy == "install highspy again"


def test_a_compiler_that_works_is_found_to():
    assert checkup.try_compiler("g++") == ""


def test_a_compiler_that_is_absent_or_fails_is_named():
    assert "no-such-compiler" in checkup.try_compiler("no-such-compiler")
    assert checkup.try_compiler("false").startswith("false fails")


def test_a_bad_rank_count_is_a_finding(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    (found,) = checkup._memory()
    assert found.health is Health.LIMITED
    assert "LOCAL_WORLD_SIZE: expected an integer of at least 1, got 'many'" in found.text
