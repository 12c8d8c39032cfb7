"""Every block of code that a reader would copy runs: on the CPU, with small shapes, page by page.

A comment before a block says what the block cannot say itself:

* ``<!-- with: model, ids -->``: names that a reader has already (``READERS``).
* ``<!-- needs: peft -->``: left out where one of these is not installed.
* ``<!-- full: why -->``: dear, so that it has the marker ``full``. A command is still parsed.
* ``<!-- not run: why -->``: cannot be run here.

``title="train.py"`` behind the language writes the block to that file too. Blocks of a page share
their names, as a reader's session does.
"""

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn

import memo_compile
from memo_compile.cli import main as cli
from memo_compile.reporting import state

ROOT = Path(__file__).parents[2]
PAGES = (
    *(ROOT / name for name in ("README.md", "docs/index.md", "docs/start.md", "docs/planning.md")),
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
)
DEAR_PAGES = (
    *("accumulation", "budgets", "distributed", "does-not-fit", "fit", "host-files", "lengths"),
    *("regional", "report", "slow", "stepped-aside", "trainer"),
)
"""Of several compilations, mostly under budgets: run with the marker ``full``."""

BLOCK = re.compile(
    r"(?P<comments>(?:^<!--[^>]*-->\n)*)^```(?P<language>\w+)(?P<rest>[^\n]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
COMMENTS = ("with", "needs", "full", "not run", "follow")
LANGUAGES = ("python", "shell", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    file_name: str
    text: str
    comments: dict[str, str]

    def names(self, comment: str) -> tuple[str, ...]:
        return tuple(filter(None, re.split(r"[,\s]+", self.comments.get(comment, ""))))

    def run(self, names: dict[str, Any]) -> None:
        # Lines are those of the page, for tracebacks and for torch's own messages.
        code = compile("\n" * self.line + self.text, str(self.page), "exec")
        exec(code, names)


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in BLOCK.finditer(text):
        comments = dict(re.findall(r"<!-- ([a-z ]+?): (.*?) -->", found["comments"]))
        assert set(comments) <= set(COMMENTS), (page.name, comments)
        title = re.search(r'title="([\w.]+)"', found["rest"])
        yield Block(
            page=page,
            line=text[: found.start("text")].count("\n"),
            language=found["language"],
            file_name=title[1] if title else "",
            text=found["text"],
            comments=comments,
        )


class Model(nn.Module):
    """What a reader brings: layers that are alike, and a loss inside."""

    def __init__(self, width: int = 32, vocab: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
            for _ in range(3)
        )
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(3))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer, down in zip(self.layers, self.down, strict=True):
            x = x + down(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def make_ids(length: int = 256) -> torch.Tensor:
    return torch.randint(64, (2, length))


BUDGET = 9 * 2**18
"""Between the floor of ``Model`` with ``make_ids()``, and what it takes with everything kept."""

READERS: dict[str, Callable[[], dict[str, Any]]] = {
    "model": lambda: {"model": Model()},
    "ids": lambda: {"ids": make_ids()},
    "batches": lambda: {"batches": [make_ids() for _ in range(3)]},
    "budget": lambda: {"budget": BUDGET},
    "make_ids": lambda: {"make_ids": make_ids},
    "torch": lambda: {"torch": torch},
    "memo_compile": lambda: {"memo_compile": memo_compile},
    "step": lambda: {"step": torch.Tensor.square},
    "batch": lambda: {"batch": torch.ones(2)},
}


def given(block: Block, names: dict[str, Any]) -> None:
    """What the reader has: a model and its optimizer are made once for a page."""
    for name in block.names("with"):
        if name == "optimizer":
            names.setdefault(name, torch.optim.SGD(names["model"].parameters(), lr=0.1))
        elif name not in names or name == "budget":
            names |= READERS[name]()


OLD_NAMES = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
"""peft asks transformers by a name that goes."""


def is_missing(block: Block) -> bool:
    return any(importlib.util.find_spec(name) is None for name in block.names("needs"))


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A reader's empty folder, and the reference lowering: these tests are about the text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMO_LOWERING", "aten")
    monkeypatch.setenv("MEMO_COSTS", "roofline")
    monkeypatch.delenv("MEMO_DUMP", raising=False)
    state.reset()
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    memo_compile.configure(**dict.fromkeys(("memory_budget", "policy")))
    state.reset()
    torch._dynamo.reset()


def run_page(page: Path, *, dear: bool) -> None:
    """Run the blocks of ``page`` in order; commands that are ``full`` only where ``dear``."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.file_name:
            Path(block.file_name).write_text(block.text)
        if block.language == "shell":
            for command in commands(block):
                run_command(command, parse_only="full" in block.comments and not dear)
        elif block.language == "python" and not {"not run", "follow"} & set(block.comments):
            if not is_missing(block) and (dear or "full" not in block.comments):
                given(block, names)
                block.run(names)


def commands(block: Block) -> list[list[str]]:
    return [
        words
        for line in block.text.splitlines()
        if (words := shlex.split(line, comments=True)) and "not run" not in block.comments
    ]


def run_command(words: list[str], *, parse_only: bool) -> None:
    """``memo`` runs in this process; what else a page asks for must be there."""
    program, *arguments = words
    if program == "memo":
        run_memo(arguments, parse_only=parse_only)
    elif program == "make":
        for target in (word for word in arguments if "=" not in word):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for extra in re.findall(r"\[([\w,]+)\]", " ".join(arguments)):
            assert set(extra.split(",")) <= set(extras["optional-dependencies"]), words
    elif program == "python":
        assert (ROOT / arguments[0]).exists() or Path(arguments[0]).exists(), words
    else:
        raise AssertionError(f"a page asks for {words}, which no test tries")


def run_memo(arguments: list[str], *, parse_only: bool) -> None:
    name, *rest = arguments
    cli._register(name)
    if parse_only:
        command = typer.main.get_command(cli.app).commands[name]
        with command.make_context(name, rest):
            return
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code in (0, 1), arguments


@OLD_NAMES
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"  # Dynamo hides it by a filter
)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.full] * (page.stem in DEAR_PAGES)) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_the_blocks_of_a_page_run(page, reader):
    run_page(page, dear=False)


@pytest.mark.full
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any("full" in block.comments for block in blocks(page))],
    ids=lambda page: page.stem,
)
def test_the_dear_blocks_of_a_page_run(page, reader):
    run_page(page, dear=True)


def test_every_block_says_its_language_and_why_it_is_not_run():
    for page in PAGES:
        text = page.read_text()
        assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(list(blocks(page))), page
        for block in blocks(page):
            assert block.language in LANGUAGES, (page.name, block.line)
            for comment in ("full", "not run"):
                assert block.comments.get(comment, "why"), (page.name, block.line)


def test_a_block_that_fails_is_noticed(tmp_path, reader):
    page = tmp_path / "page.md"
    page.write_text("```python\nvalue = 1\n```\n\n```python\nassert value == 2\n```\n")
    with pytest.raises(AssertionError):
        run_page(page, dear=False)
    page.write_text("```shell\nmemo plan --no-such-option\n```\n")
    with pytest.raises(AssertionError):
        run_page(page, dear=False)
    page.write_text("<!-- full: dear -->\n```shell\nmemo plan llama3-8b --no-such-option\n```\n")
    with pytest.raises(Exception, match="no-such-option"):
        run_page(page, dear=False)
