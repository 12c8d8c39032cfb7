"""``memo place``: exit codes, the JSON object, the files it writes."""

import json
from pathlib import Path

import pytest

from memo_compile.cli.main import main
from memo_compile.planners.placement import check_placement
from memo_compile.planners.placement.files import read_problem

DATA = Path(__file__).parent.parent / "data" / "minimalloc"
CSV = "id,lower,upper,size\na,0,2,3\nb,2,4,3\nlow,1,3,3\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "problem.csv"
    path.write_text(CSV)
    return path


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as left:
        main(["place", *map(str, arguments)])
    out, err = capsys.readouterr()
    return left.value.code, out, err


def test_json_is_one_object_with_the_promised_keys(capsys, file):
    code, out, err = run(capsys, file, "--json", "--capacity", "6")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer.pop("seconds") >= 0
    assert answer == {
        "status": "optimal",
        "height_bytes": 6,
        "lower_bound_bytes": 6,
        "solver": "greedy",
    }


def test_the_written_csv_is_a_valid_placement_and_reads_back(capsys, file, tmp_path):
    out, svg = tmp_path / "out.csv", tmp_path / "map.svg"
    code, _, _ = run(capsys, file, "--out", out, "--svg", svg, "--alignment", "2")
    placed = read_problem(out)
    assert code == 0
    offsets = {b.id: b.offset for b in placed.buffers}
    check_placement(read_problem(file, alignment=2), offsets)
    assert svg.read_text().count("<title>") == 3


def test_infeasible_is_exit_1_and_names_the_conflict(capsys, file, tmp_path):
    out = tmp_path / "out.csv"
    code, stdout, err = run(capsys, file, "--capacity", "5", "--json", "--out", out)
    answer = json.loads(stdout)
    assert code == 1
    assert answer["status"] == "infeasible"
    assert len(answer["conflict"]) == 2
    assert "low" in answer["conflict"]
    assert "is not written: infeasible" in err
    assert not out.exists()


def test_time_limit_without_an_answer_is_exit_3(capsys):
    options = ("--json", "--capacity", "1MiB", "--solver", "greedy")
    code, stdout, _ = run(capsys, DATA / "I.1048576.csv", *options)
    answer = json.loads(stdout)
    assert code == 3
    assert answer["status"] == "time_limit"
    assert answer["height_bytes"] > 1048576 == answer["lower_bound_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacity", "many"], "--capacity: expected bytes"),
        (["--alignment", "0"], "--alignment: expected at least 1 byte"),
        (["--solver", "cplex"], "cplex"),
        (["--time-limit", "-1"], "--time-limit"),
    ],
)
def test_bad_options_are_exit_2_with_one_line(capsys, file, arguments, message):
    code, out, err = run(capsys, file, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_bad_files_are_exit_2_with_file_and_line(capsys, file):
    file.write_text(CSV + "b,0,1,1\n")
    code, _, err = run(capsys, file, "--json")
    assert code == 2
    assert f"{file}:5: id: 'b' was used on line 3 already" in err
