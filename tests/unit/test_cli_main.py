import pytest
import typer

from memo_compile.cli import main as cli
from memo_compile.errors import ConfigError, Infeasible, InputError, UnsupportedGraph


def leave(argv, capsys):
    """Exit code, stdout and stderr of ``memo argv``, run in this process."""
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    return caught.value.code, *capsys.readouterr()


@pytest.fixture
def fails_with(monkeypatch):
    """Let the whole application raise the given error."""

    def arrange(error):
        def fail(**_options):
            raise error

        monkeypatch.setattr(cli, "_register", lambda name: None)
        monkeypatch.setattr(cli, "app", fail)

    return arrange


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["bogus"], "memo: No such command 'bogus'."),
        (["--bogus"], "memo: No such option: --bogus"),
        (["explain"], "memo: Missing argument"),
        (["doctor", "surplus"], "memo: Got unexpected extra argument"),
        (["doctor", "--jsn"], "memo: No such option: --jsn"),
    ],
)
def test_usage_errors_are_one_line_on_stderr_and_exit_code_2(argv, message, capsys):
    code, out, err = leave(argv, capsys)
    assert code == 2
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_without_arguments_it_shows_its_commands(capsys):
    code, out, _err = leave([], capsys)
    assert code == 2
    for command in ("doctor", "explain", "lynx"):
        assert command in out


@pytest.mark.parametrize("argv", [["--help"], ["doctor", "--help"], ["explain", "--help"]])
def test_help_is_exit_code_0(argv, capsys):
    code, out, _err = leave(argv, capsys)
    assert code == 0
    assert "Usage" in out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Infeasible("budget 6 B < floor 7 B"), 1),
        (InputError("f.csv:3: size: expected bytes"), 2),
        (ConfigError("memory_budget: expected bytes"), 2),
        (UnsupportedGraph("no such operator"), 2),
        (typer.BadParameter("alignment: expected at least 1"), 2),
    ],
)
def test_errors_become_exit_codes(error, code, capsys, fails_with):
    fails_with(error)
    got, out, err = leave([], capsys)
    assert got == code
    assert out == ""
    if isinstance(error, typer.BadParameter):
        assert err == "memo: Invalid value: alignment: expected at least 1\n"
    else:
        assert err == f"memo: {error}\n"


def test_other_exceptions_are_not_swallowed(fails_with):
    fails_with(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main([])
