import pytest

from tools import bootstrap


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """An empty checkout whose installation is only counted."""
    for name in ("requirements-dev.txt", "pyproject.toml"):
        (tmp_path / name).write_text("a==1\n")
    (tmp_path / ".venv").mkdir()
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "REQUIREMENTS", tmp_path / "requirements-dev.txt")
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / ".venv" / "stamp")
    calls = []
    monkeypatch.setattr(bootstrap, "install", lambda: calls.append("install"))
    return tmp_path, calls


def test_a_second_call_does_nothing(checkout):
    _root, calls = checkout
    assert (bootstrap.main(), bootstrap.main()) == (0, 0)
    assert calls == ["install"]


@pytest.mark.parametrize("name", ["requirements-dev.txt", "pyproject.toml"])
def test_an_edited_pin_installs_again(checkout, name):
    root, calls = checkout
    bootstrap.main()
    (root / name).write_text("a==2\n")
    bootstrap.main()
    assert calls == ["install", "install"]


def test_a_failed_installation_leaves_no_stamp(checkout, monkeypatch, capsys):
    root, _calls = checkout

    def fail():
        raise bootstrap.subprocess.CalledProcessError(1, ["pip", "install", "x"])

    monkeypatch.setattr(bootstrap, "install", fail)
    assert bootstrap.main() == 2
    assert "pip" in capsys.readouterr().err
    assert not (root / ".venv" / "stamp").exists()


def test_an_old_python_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 10, 4))
    assert bootstrap.main() == 2
    assert "needs Python 3.11 or newer, this is 3.10.4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("chosen", "driver", "online", "arguments"),
    [
        (None, None, True, ["--extra-index-url", bootstrap.CPU_INDEX]),
        (None, None, False, []),
        (None, "/usr/bin/nvidia-smi", True, []),
        ("", None, True, []),
        (
            "https://mirror/x",
            "/usr/bin/nvidia-smi",
            False,
            ["--extra-index-url", "https://mirror/x"],
        ),
    ],
)
def test_the_build_of_torch_follows_the_machine(monkeypatch, chosen, driver, online, arguments):
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    if chosen is not None:
        monkeypatch.setenv("TORCH_INDEX", chosen)
    monkeypatch.setattr(bootstrap.shutil, "which", lambda _name: driver)
    monkeypatch.setattr(bootstrap, "reachable", lambda _url: online)
    assert bootstrap.torch_index() == arguments
