import json
import os
import subprocess
import sys
import textwrap

import pytest


@pytest.fixture
def explain(tmp_path):
    """Run ``memo explain OPTIONS SCRIPT ARGS`` on a script of the given text."""

    def run(source, *arguments, options=()):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        command = [sys.executable, "-m", "memo_compile.cli.main", "explain", *options]
        return subprocess.run(
            [*command, str(script), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    return run


def test_arguments_after_the_script_are_the_scripts_own(explain, tmp_path):
    done = explain("import sys; print(sys.argv[1:], __name__)", "--json", "-v", "--", "x", "--help")
    assert done.returncode == 2  # the script does not use memo
    assert "memo: --json behind " in done.stderr
    assert f"memo explain --json {tmp_path / 'script.py'}" in done.stderr
    assert "-v" not in done.stderr
    assert done.stdout.splitlines()[0] == "['--json', '-v', '--', 'x', '--help'] __main__"
    assert "memo is NOT active" in done.stdout


def test_the_scripts_folder_can_be_imported_from(explain, tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 17\n")
    assert explain("import neighbour; print(neighbour.VALUE)").stdout.startswith("17\n")


@pytest.mark.parametrize(
    ("leave", "code"),
    [("", 2), ("raise SystemExit", 2), ("raise SystemExit(5)", 5), ("raise SystemExit('bad')", 1)],
)
def test_exit_codes_pass_through(explain, leave, code):
    done = explain(leave)
    assert done.returncode == code
    assert "memo is NOT active" in done.stdout
    assert ("bad" in done.stderr) == ("bad" in leave)
    is_told = 'nothing in it went through torch.compile(backend="memo")' in done.stderr
    assert is_told == (code == 2)


def test_exceptions_are_shown_from_the_script_on_and_the_report_comes(explain):
    done = explain("def f():\n    raise ValueError('boom')\nf()\n")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert 'script.py", line 3, in <module>' in done.stderr
    assert "ValueError: boom" in done.stderr
    assert "memo_compile" not in done.stderr
    assert "runpy" not in done.stderr
    assert "memo is NOT active" in done.stdout


def test_errors_of_memo_that_a_script_raises_are_the_scripts(explain):
    done = explain("from memo_compile.errors import Infeasible\nraise Infeasible('floor')\n")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "Infeasible: floor" in done.stderr


def test_syntax_errors_are_shown_as_python_shows_them(explain):
    done = explain("def f(:\n")
    assert done.returncode == 1
    assert "SyntaxError" in done.stderr
    assert "runpy" not in done.stderr


def test_json_is_the_only_thing_on_stdout(explain):
    source = """
    import subprocess, sys
    print("from print")
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    sys.exit(7)
    """
    done = explain(source, options=["--json"])
    assert done.returncode == 7
    report = json.loads(done.stdout)
    assert report["active"] is False
    assert report["plans"] == []
    assert report["unplanned_steps"] == 0
    assert "from print" in done.stderr
    assert "from a child" in done.stderr


def test_threads_that_the_script_left_are_waited_for(explain):
    source = """
    import threading, time
    threading.Thread(target=lambda: (time.sleep(0.3), print("late"))).start()
    """
    lines = explain(source).stdout.splitlines()
    assert lines[0] == "late"
    assert "memo is NOT active" in lines[1]


def test_idle_workers_of_a_thread_pool_do_not_hold_the_end_up(explain):
    source = """
    from concurrent.futures import ThreadPoolExecutor
    pool = ThreadPoolExecutor(2)
    print(pool.submit(lambda: "done").result())
    """
    assert "memo is NOT active" in explain(source).stdout


def test_the_scripts_exit_handlers_and_forks_come_before_the_one_report(explain):
    source = """
    import atexit, os, sys
    atexit.register(print, "handler", flush=True)
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    """
    out = explain(source).stdout
    assert out.index("handler") < out.index("memo is NOT active")
    assert out.count("memo is NOT active") == 1


def test_what_memo_did_in_the_script_is_reported(explain):
    source = """
    from memo_compile.reporting import state
    state.add_note("seen in the script")
    """
    assert "seen in the script" in explain(source).stdout
    assert json.loads(explain(source, options=["--json"]).stdout)["notes"] == ["seen in the script"]


def test_a_missing_script_is_named(explain, tmp_path):
    done = explain("", options=[str(tmp_path / "absent.py")])
    assert done.returncode == 2
    assert (
        done.stderr == f"memo: {tmp_path / 'absent.py'}: no such file; expected a Python script\n"
    )
    assert done.stdout == ""
