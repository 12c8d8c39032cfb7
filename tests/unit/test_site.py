"""The documentation site: a complete nav and reference, tables that are the results'."""

import dataclasses
import re
from pathlib import Path

import pytest

from benchmarks import published
from memo_compile import errors
from memo_compile.cli import main as cli
from memo_compile.config import MemoConfig
from memo_compile.reporting.state import Report
from memo_compile.step.plans import ReportedPlan
from tools import reference

ROOT = Path(__file__).parents[2]
SETTINGS = (ROOT / "mkdocs.yml").read_text()
NAV = re.findall(r"^ +- (?:Home: )?([\w/-]+\.md)$", SETTINGS.split("\nnav:\n")[1], re.MULTILINE)
PAGES = {path.relative_to(ROOT / "docs").as_posix(): path for path in (ROOT / "docs").rglob("*.md")}
FROM_ROOT = {"contributing.md": "CONTRIBUTING.md", "changes.md": "CHANGELOG.md"}


def test_every_page_is_in_the_nav_once_and_no_other():
    generated = {f"reference/{name}" for name in reference.pages()}
    assert len(NAV) == len(set(NAV))
    assert set(NAV) == {*PAGES, *FROM_ROOT, *generated}


def test_pages_of_the_root_are_those_that_the_hooks_add():
    hooks = (ROOT / "tools" / "site_hooks.py").read_text()
    for page, name in FROM_ROOT.items():
        assert f'"{name}": "{page}"' in hooks


def test_the_site_loads_nothing_from_elsewhere():
    assert re.search(r"^  font: false", SETTINGS, re.MULTILINE)
    shim = "iframe-worker/shim.js"  # else the plugin `offline` names an address for it
    assert re.search(rf"^    - {shim}$", SETTINGS, re.MULTILINE)
    assert "/*! iframe-worker" in (ROOT / "docs" / shim).read_text()
    styles = (ROOT / "docs" / "site.css").read_text()
    assert "://" not in re.sub(r"^#.*$", "", SETTINGS, flags=re.MULTILINE) + styles
    pictures = (re.findall(r"!\[[^\]]*\]\(([^)]+)\)", path.read_text()) for path in PAGES.values())
    assert not [link for links in pictures for link in links if "://" in link]


@pytest.mark.parametrize("path", PAGES.values(), ids=PAGES.keys())
def test_links_of_pages_lead_somewhere(path):
    made = {ROOT / "docs" / "reference" / name for name in reference.pages()}
    for target in re.findall(r"\]\((?!\w+:|#)([^)#]+)(?:#[\w-]*)?\)", path.read_text()):
        found = (path.parent / target).resolve()
        assert found.exists() or found in made, target


def headings(name: str) -> set[str]:
    return set(re.findall(r"^## `?([^`\n]+?)`?$", reference.pages()[name], re.MULTILINE))


def test_the_reference_has_every_option_command_and_error():
    options = {
        field.name for field in dataclasses.fields(MemoConfig) if not field.metadata.get("internal")
    }
    assert headings("options.md") == options
    commands = {heading.split()[1] for heading in headings("command-line.md")}
    assert commands == set(cli._COMMANDS)
    public = {
        f"memo_compile.errors.{name}"
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.MemoError)
    }
    runtime = {name for name in headings("errors.md") if name.startswith("memo_runtime.")}
    assert headings("errors.md") - runtime == public
    assert {name.split(".")[-1] for name in runtime} == {
        *("ArenaError", "HostStoreError", "StepError", "CopyError")
    }


def test_the_reference_has_every_field_of_the_report():
    text = reference.pages()["report.md"]
    for kind in (Report, ReportedPlan, *reference.REPORT_CLASSES):
        for field in dataclasses.fields(kind):
            assert re.search(rf"^\| `{field.name}` \| `[^`]+` \| \S", text, re.MULTILINE), field


def test_every_parameter_of_a_command_is_in_its_table():
    text = reference.pages()["command-line.md"]
    plan = text.split("## `memo plan`")[1].split("\n## ")[0]
    for option in ("--seq", "--budget", "--hardware", "--json", "MODEL"):
        assert re.search(rf"^\| `{option}\b", plan, re.MULTILINE), option


def test_an_undocumented_field_is_refused(monkeypatch):
    docs = dict(reference.attribute_docs(reference.config, "MemoConfig"))
    del docs["alpha"]
    monkeypatch.setattr(reference, "attribute_docs", lambda *_: docs)
    with pytest.raises(KeyError, match="alpha"):
        reference.options_page()


@pytest.mark.parametrize("name", ["README.md", "docs/comparison.md"])
def test_tables_are_those_of_the_committed_results(name):
    """Else: python -m benchmarks.published."""
    text = (ROOT / name).read_text()
    budget, peers = published.newest("budget"), published.newest("peers")
    assert "<!-- table: " in text
    assert published.filled(text, published.tables(budget, peers)) == text


def test_the_curve_is_that_of_the_committed_results():
    budget, peers = published.newest("budget"), published.newest("peers")
    for name, theme in published.THEMES.items():
        picture = (ROOT / "docs" / "pictures" / f"curve-{name}.svg").read_text()
        assert published.curve(budget, peers, theme) == picture


def test_a_row_says_what_lies_on_the_host_and_where_memo_needs_more():
    row = {"budget_bytes": 2**21, "peak_bytes": 2**20, "host_bytes": 0, "step_s": 1, "ratio": 0.5}
    peers = {"inductor": {"all_bytes": 2**20, "memo": {"0": row}}}
    result = {"file": "f", "settings": {"layers": 1, "tokens": 1}, "peers": peers}
    result["hardware"] = {"date": "", "cores": 1, "torch": "", "load_at_start": 0.0}
    *_, line = published.beside_peers(result, "0")
    assert line == (
        "| Inductor, everything kept | 1 MiB | 1.00 s | 1 MiB | none | 0.50, at its floor |"
    )
    assert published.beside_peers(result, "auto") == ["Not measured yet."]
