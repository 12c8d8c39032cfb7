"""What an install holds: a light core, extras for the rest, and nothing imported before its use."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CORE = PROJECT["project"]["dependencies"]
EXTRAS = PROJECT["project"]["optional-dependencies"]
HEAVY = ("torch", "numba", "transformers", "mip", "highspy", "networkx", "scipy")
CARRIED = {"sympy", "torch_dynamo_backends", "cbcbox"}
"""What is imported and comes with something else: torch's sympy."""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return done.stdout


def test_the_import_loads_nothing_heavy():
    loaded = run("import sys, memo_compile\nprint(*sys.modules)").split()
    assert "memo_compile.reporting.state" in loaded
    assert set(loaded).isdisjoint(HEAVY)


def test_the_help_loads_no_torch():
    code = "import sys\nfrom memo_compile.cli import main\n[main._register(name) for name in "
    loaded = run(f"{code}main._COMMANDS]\nprint(*sys.modules)").split()
    assert "memo_compile.cli.plan_command" in loaded
    assert set(loaded).isdisjoint({"torch", "numba", "transformers", "mip"})


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in requirements}


def imported() -> set[str]:
    """Top-level packages that memo's own code imports anywhere."""
    found = set()
    for folder in ("memo_compile", "runtime/memo_runtime"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    found.add(str(node.module).split(".")[0])
    return found - set(sys.stdlib_module_names) - {"memo_compile", "memo_runtime"}


def test_every_package_that_is_imported_is_asked_for():
    asked = names(CORE).union(*(names(lines) for name, lines in EXTRAS.items() if name != "dev"))
    assert imported() - asked <= CARRIED


def test_the_core_is_light_and_moves_no_torch():
    assert names(CORE).isdisjoint({"mip", "numba", "transformers", "triton"})
    (torch,) = (line for line in CORE if line.startswith("torch"))
    assert re.fullmatch(r"torch>=[\d.]+", torch), "an upper bound would replace a newer torch"


@pytest.mark.parametrize("extra", ["mip", "fast", "hf", "gpu", "flash", "docs", "dev"])
def test_every_extra_is_explained(extra):
    assert EXTRAS[extra]
    page = (ROOT / "docs" / "how-to" / "install.md").read_text()
    assert re.search(rf"^\| `{extra}` \|", page, re.MULTILINE)


def test_the_source_distribution_has_what_a_reader_looks_for():
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {"/*.md", "/tests", "/docs", "/Makefile"} <= set(included)
    assert (ROOT / "CHANGELOG.md").exists()
    assert {"/CITATION.cff", "/hatch_build.py"} <= set(included)
    assert (ROOT / "SECURITY.md").exists()
    assert PROJECT["project"]["license-files"] == ["LICENSE"]


def test_authors_and_version_are_told_alike():
    project, citation = PROJECT["project"], (ROOT / "CITATION.cff").read_text()
    (author,) = project["authors"]
    assert f'name: "{author["name"]}"' in citation
    assert f"\nversion: {project['version']}\n" in citation
    assert f"\nlicense: {project['license']}\n" in citation


@pytest.fixture
def build_hook(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("hatch_build")


def test_the_readmes_links_lead_to_the_repository_wherever_that_is(build_hook):
    text = (
        "See [docs](docs/a.md#b), [torch](https://pytorch.org) and [below](#more). "
        '![plot](docs/p.svg) <img src="docs/q.png">'
    )
    there = build_hook.absolute_links(text, "https://x.org/memo")
    assert there == (
        "See [docs](https://x.org/memo/blob/main/docs/a.md#b), [torch](https://pytorch.org) and "
        "[below](#more). ![plot](https://x.org/memo/raw/main/docs/p.svg) "
        '<img src="https://x.org/memo/raw/main/docs/q.png">'
    )
    assert (
        build_hook.absolute_links("[docs](a.md) [b](https://b.org)", "")
        == "docs [b](https://b.org)"
    )


@pytest.mark.parametrize("repository", ["", "https://x.org/memo/"])
def test_the_package_page_has_the_readme_and_links_where_the_address_is_known(
    build_hook, repository
):
    metadata = {}
    hook = build_hook.RepositoryHook(str(ROOT), {"repository": repository})
    hook.update(metadata)
    assert metadata["readme"]["content-type"] == "text/markdown"
    assert "](docs/" not in metadata["readme"]["text"]
    assert bool(metadata["urls"]) == bool(repository)
    assert metadata["urls"].get("Source", "https://x.org/memo") == "https://x.org/memo"


def test_a_plain_install_solves_integer_programs():
    code = """
import sys
sys.modules["mip"] = None
from memo_compile.planners import solver
program = solver.exact_program()
x = program.variable(high=5, is_integer=True)
program.require(2 * x <= 7)
program.minimise(-x)
print(program.solve(), program.integer_value(x))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "SolveStatus.OPTIMAL 3\n"
    assert done.stderr == ""
