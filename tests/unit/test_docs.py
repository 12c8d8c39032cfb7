"""What the documents name exists: files, functions, tests, options, commands, stages."""

import dataclasses
import functools
import re
import tomllib
import typing
from pathlib import Path

import pytest

from memo_compile import config
from memo_compile.cli import main as cli
from memo_compile.config import MemoConfig
from memo_compile.driver import bind, pipeline, plan_step, stages, tile_order
from memo_compile.planners.policy import frontier
from tools import check_sentences

ROOT = Path(__file__).parents[2]
DOCS = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "tests" / "situations.md",
    *sorted((ROOT / "docs").glob("*.md")),
)
HOMES = ("", "memo_compile", "runtime", "docs", "tests")
"""Where a document's relative path may begin."""

MADE_LATER = ("tests/fuzz/corpus",)
"""Made by whoever needs it first."""

PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)+/?|[\w-]+\.(?:py|md)")
DEFINED = r"^ *(?:(?:def|class) {name}\b|{name} *[:=])"
NUM_SITUATIONS = 57


def spans(path: Path) -> list[str]:
    """What stands between backticks, outside of fenced blocks."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", text)


@functools.cache
def sources() -> tuple[Path, ...]:
    folders = ("memo_compile", "runtime", "tests", "benchmarks", "examples", "tools", "docs")
    found = (path for folder in folders for path in sorted((ROOT / folder).rglob("*")))
    return tuple(path for path in found if path.suffix in (".py", ".md"))


@functools.cache
def code() -> str:
    return "\n".join(path.read_text() for path in sources() if path.suffix == ".py")


def is_citation(text: str) -> bool:
    """True for a path in the repository: lower case, and of a kind that documents cite."""
    name, _, _ = text.partition("::")
    first = name.split("/")[0]
    known = (ROOT / first).is_dir() or (ROOT / "memo_compile" / first).is_dir()
    is_path = PATH.fullmatch(name) is not None and name == name.lower()
    return is_path and (name.endswith((".py", ".md")) or known)


def file_of(name: str) -> Path | None:
    """The file or folder that a document means by ``name``; a bare file name may lie anywhere."""
    for home in HOMES:
        if (ROOT / home / name).exists():
            return ROOT / home / name
    if "/" in name:
        return None
    return next((path for path in sources() if path.name == name), None)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_files_and_what_is_cited_in_them_exist(path):
    missing = []
    for text in filter(is_citation, spans(path)):
        name, _, symbol = text.partition("::")
        if name in MADE_LATER:
            continue
        found = file_of(name)
        if found is None:
            missing.append(text)
        elif symbol:
            pattern = DEFINED.format(name=re.escape(symbol))
            if not re.search(pattern, found.read_text(), re.MULTILINE):
                missing.append(text)
    assert missing == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    targets = re.findall(r"\]\(([^)#]+)(?:#[\w-]*)?\)", path.read_text())
    local = [target for target in targets if "://" not in target]
    assert [link for link in local if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_modules_exist(path):
    text = path.read_text()
    for dotted in re.findall(r"\b(?:memo_compile|memo_runtime|benchmarks)(?:\.[a-z_]+)+\b", text):
        first, *rest = dotted.split(".")
        found = ROOT / ("runtime" if first == "memo_runtime" else "") / first
        while rest and ((found / rest[0]).is_dir() or (found / f"{rest[0]}.py").exists()):
            found /= rest.pop(0)
        if rest and rest[0] != "md":
            module = found.with_suffix(".py") if found.with_suffix(".py").exists() else found
            source = module / "__init__.py" if module.is_dir() else module
            assert re.search(rf"\b{rest[0]}\b", source.read_text()), dotted


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_commands_and_targets_exist(path):
    text = "\n".join(spans(path))
    for command in re.findall(r"^memo ([a-z][a-z-]*)", text, re.MULTILINE):
        assert command in cli._COMMANDS
    for target in re.findall(r"^make ([a-z][a-z-]*)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_options_on_the_command_line_exist(path):
    for option in set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", "\n".join(spans(path)))):
        name = option.replace("-", "_")
        declared = re.compile(rf"--{option}\b|^    {name}: ", re.MULTILINE)
        assert declared.search(code()), option


def test_every_option_is_in_the_index_and_no_other():
    text = (ROOT / "docs" / "index.md").read_text()
    table = text[text.index("| option | meaning |") :].split("\n\n")[0]
    first_cells = "".join(line.split("|")[1] for line in table.splitlines())
    assert set(re.findall(r"`(\w+)`", first_cells)) == {
        field.name for field in dataclasses.fields(MemoConfig) if not field.metadata.get("internal")
    }


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_variables_exist(path):
    found = set(re.findall(r"\bMEMO_[A-Z_]*[A-Z]\b", path.read_text()))
    assert found <= {*config._VARIABLES, "MEMO_NAME"}


def situations() -> dict[int, str]:
    """Number -> the text of the card."""
    text = (ROOT / "docs" / "situations.md").read_text()
    cards = re.findall(r"^### (\d+)\. (.*?)^</div>", text, re.MULTILINE | re.DOTALL)
    assert len(cards) == len({number for number, _ in cards}), "a card stands twice"
    return {int(number): card for number, card in cards}


def test_every_situation_names_a_test_or_says_that_it_is_not_handled():
    cards = situations()
    assert set(range(1, NUM_SITUATIONS + 1)) <= set(cards)
    text = (ROOT / "tests" / "situations.md").read_text()
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", text, re.MULTILINE)
    tests = {int(number): row for number, row in rows}
    assert len(rows) == len(tests), "a row stands twice"
    assert set(tests) <= set(cards)
    for number, card in cards.items():
        shown = re.search(r"`tests/[\w/]+\.py", tests.get(number, ""))
        assert shown or re.search(r"not handled yet: ", card, re.IGNORECASE), number


def test_the_situations_that_tests_cite_exist():
    cards = situations()
    for path in (ROOT / "tests").rglob("*.py"):
        for several in re.findall(r"\"\"\"Rows? ([\d, and]+)[:.]", path.read_text()):
            assert {int(digits) for digits in re.findall(r"\d+", several)} <= set(cards), path.name


def test_the_rooms_are_those_of_the_layers_from_top_to_bottom():
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (
        contract["layers"] for contract in linter["contracts"] if contract["type"] == "layers"
    )
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## The rooms\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    rooms = [re.findall(r"`(?:memo_compile/)?(\w+)(?:\.py)?`", cell) for cell in cells]
    assert rooms == [layer.split(" | ") for layer in layers]


def test_the_docs_say_when_a_plan_is_fast_enough():
    contributing, policies = (
        " ".join((ROOT / name).read_text().split())
        for name in ("CONTRIBUTING.md", "docs/policies.md")
    )
    slower = f"more than {100 * frontier.GOOD_ENOUGH_SHARE:g} % slower than keeping everything"
    assert slower in contributing
    assert policies.count(f"within {tile_order.FAST:g} times") == 2
    assert f"(the second way: {tile_order.FAST_IN_ALL:g}; " in policies


def indented_block(text: str) -> str:
    """The first block of ``text`` that is indented by four spaces, without the indentation."""
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    return "\n".join(line[4:] for line in lines)


def test_the_picture_of_the_stages_is_that_of_the_pipeline():
    design = (ROOT / "docs" / "design.md").read_text()
    shown = re.search(r"## The stages\n.*?```text\n(.*?)\n```", design, re.DOTALL)
    assert shown is not None
    assert shown[1] == indented_block(pipeline.__doc__)


def test_the_readme_names_the_stages_in_their_order():
    section = (ROOT / "README.md").read_text().split("## How it works")[1].split("\n## ")[0]
    named = re.findall(r"^\d\. `(\w+)`: ", section, re.MULTILINE)
    assert named == re.findall(r"^  (\w+) +-> ", indented_block(pipeline.__doc__), re.MULTILINE)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


@pytest.mark.parametrize("page", check_sentences.pages(), ids=lambda page: page.stem)
def test_no_sentence_is_too_long(page):
    assert check_sentences.too_long(page) == []


def test_a_sentence_that_is_too_long_is_found():
    text = (
        "# Title\n\nShort. "
        + "word " * 36
        + "end.\n\n* item\n\n```text\n"
        + "code " * 40
        + "\n```\n"
    )
    lengths = [(line, len(words.split())) for line, words in check_sentences.sentences(text)]
    assert lengths == [(3, 1), (3, 37), (5, 1)]


def test_the_stages_of_the_picture_are_functions_that_fit_together():
    """Each takes the value of the one before and returns the one that the picture names."""
    picture = indented_block(pipeline.__doc__)
    named = re.findall(r"^  (\w+) +-> (\w+)", picture, re.MULTILINE)
    functions = {
        "cut_step": pipeline.cut_step,
        "lower_step": pipeline.lower_step,
        "plan_step": plan_step.plan_step,
        "bind_step": bind.bind_step,
    }
    assert [name for name, _ in named] == list(functions)
    given = stages.CapturedStep
    for name, made in named:
        taken = typing.get_type_hints(functions[name])
        returned = taken.pop("return")
        assert given in taken.values(), name
        assert returned.__name__ == made
        given = returned
