"""The command line as a newcomer meets it: help, examples, versions, ctrl-C, refusals at once."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import typer

from memo_compile.cli import main as cli
from memo_compile.cli.options import RAW_ARGUMENTS

WITHOUT_TORCH = """
import contextlib, io, json, sys
sys.modules["torch"] = None  # so that importing it fails
from memo_compile.cli.main import main
answers = []
for argv in json.load(sys.stdin):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        main(argv)
    answers.append(err.getvalue())
print(json.dumps(answers))
"""

REFUSED_AT_ONCE = [
    (["plan", "llama3-8b"], "seq: missing; give --seq N"),
    (["plan", "llama3-8b", "--seq", "0"], "seq: expected at least 1, got 0"),
    (["plan", "llama3-8b", "--seq", "8", "--batch", "0"], "batch: expected at least 1, got 0"),
    (["plan", "llama3-8b", "--seq", "8", "--policy", "foo"], "policy: expected one of auto, "),
    (["plan", "llama3-8b", "--seq", "8", "--tp", "3"], "tp: 3 does not divide the attention heads"),
    (["plan", "llama3-8b", "--seq", "8", "--cp-kind", "ring"], "cp-kind: it is of --cp devices; "),
    (
        ["plan", "llama3-8b", "--seq", "8", "--cp", "2", "--cp-kind", "rings"],
        "cp-kind: expected ring or ulysses, got 'rings'",
    ),
    (
        ["plan", "llama3-8b", "--seq", "24", "--cp", "12", "--cp-kind", "ulysses"],
        "cp-kind: ulysses divides heads over devices, and 12 devices do not divide 32 attention "
        "heads (8 of keys and values); take ring",
    ),
    (["plan", "llama3-8b", "--seq", "8", "--budget", "6 apples"], "budget: expected bytes"),
    (["plan", "llama3-8b", "--seq", "8", "--host-budget", "x"], "host-budget: expected bytes"),
    (["plan", "llama3-8b", "--seq", "8", "--out", "no/p.json"], "no/p.json: is a folder, or its"),
    (["plan", "llama3-8b", "--seq", "8", "--sweep", "x"], "sweep: expected budget, got 'x'"),
    (["plan", "lama3-8b", "--seq", "8"], "model: unknown 'lama3-8b'; did you mean llama3-8b?"),
    (
        ["plan", "Qwen/Qwen3-0.6B", "--seq", "8"],
        "hf download Qwen/Qwen3-0.6B config.json --local-dir Qwen3-0.6B, then: "
        "memo plan Qwen3-0.6B/config.json",
    ),
    (["plan", "absent.json", "--seq", "8"], "absent.json: cannot be read: No such file"),
    (["plan", "FOLDER", "--seq", "8"], "a folder; give the file in it: "),
    (["fit", "--vary", "x", "SCRIPT"], "vary: expected sequence, batch or both, got 'x'"),
    (["fit", "--memory", "x", "SCRIPT"], "memory: expected bytes"),
    (["fit", "--host-budget", "x", "SCRIPT"], "host-budget: expected bytes"),
    (["fit", "--multiple-of", "0", "SCRIPT"], "multiple-of: expected at least 1, got 0"),
    (["fit", "absent.py"], "absent.py: no such file"),
    (["verify", "absent.py"], "absent.py: no such file"),
    (["explain", "absent.py"], "absent.py: no such file"),
    (["hardware", "measure", "--device", "tpu"], "device: expected cpu, cuda or cuda:N"),
    (
        ["plan", "llama3-8b", "--seq", "1024", "--fresh"],
        "this command needs torch, which is not installed here: pip install torch",
    ),
]
"""Command lines that no torch is needed to refuse -> what stderr says."""


def test_what_cannot_be_answered_is_refused_before_torch_is_imported(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    paths = {"SCRIPT": str(script), "FOLDER": str(tmp_path)}
    lines = [[paths.get(word, word) for word in argv] for argv, _ in REFUSED_AT_ONCE]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    for (argv, message), err in zip(REFUSED_AT_ONCE, json.loads(done.stdout), strict=True):
        assert err.startswith("memo: "), argv
        assert message in err, argv
        assert err.count("\n") == 1, err


def shown(argv, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(argv)
    assert left.value.code == 0
    return capsys.readouterr().out


def test_the_help_has_commands_in_three_groups():
    """In a process of its own: documents are made by tools that change how help is drawn."""
    done = subprocess.run(
        [sys.executable, "-m", "memo_compile.cli.main", "-h"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "100"},
    )
    lines = done.stdout.splitlines()
    headings = ["Use", "Inspect", "Papers"]
    starts = [next(i for i, line in enumerate(lines) if f" {name} ──" in line) for name in headings]
    assert starts == sorted(starts)
    groups = [lines[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    names = [[n for n in cli._COMMANDS if any(f"│ {n} " in line for line in g)] for g in groups]
    assert names[0] == ["doctor", "plan", "fit", "explain", "verify"]
    assert names[1] == ["compare", "diff", "replay", "hardware", "cache"]
    assert sorted(name for group in names for name in group) == sorted(cli._COMMANDS)


def test_versions_are_shown(capsys):
    assert shown(["--version"], capsys).startswith("memo 0.1.0 (torch 2.")


def commands(command, words=()):
    """(words, command) of ``command`` and all below it."""
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*words, name))


def test_every_help_ends_with_an_example_that_can_be_read():
    for name in cli._COMMANDS:
        cli._register(name)
    root = typer.main.get_command(cli.app)
    for words, command in commands(root):
        program, *argv = command.epilog.removeprefix("Example: ").split()
        assert program == "memo"
        assert tuple(argv[: len(words)]) == words
        leaf, rest = root, argv
        while hasattr(leaf, "commands"):
            leaf, rest = leaf.commands[rest[0]], rest[1:]
        settings = RAW_ARGUMENTS if words and words[0] in cli._RUN_SCRIPTS else {}
        leaf.make_context(argv[0], rest, **settings)  # raises what cannot be read


WAITING = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


@pytest.mark.parametrize(
    "command", ["explain", "verify", pytest.param("fit", marks=pytest.mark.full)]
)
def test_ctrl_c_ends_a_command_with_130_and_one_line(command, tmp_path):
    script, began = tmp_path / "train.py", tmp_path / "began"
    script.write_text(WAITING)
    process = subprocess.Popen(
        [sys.executable, "-m", "memo_compile.cli.main", command, str(script), str(began)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
        # A shell lets what it starts in the background ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    until = time.monotonic() + 60
    if command == "verify":  # whose child may be importing torch when ctrl-C comes
        process.stderr.readline()
        time.sleep(0.5)
    while command != "verify" and not began.exists() and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to children too
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "memo: interrupted\n")
    assert ("memo is NOT active" in out) == (command == "explain")


def test_ctrl_c_while_a_command_is_imported_is_one_line_too(capsys, monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_register", interrupted)
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", "llama3-8b"])
    assert left.value.code == 130
    assert capsys.readouterr() == ("", "memo: interrupted\n")
