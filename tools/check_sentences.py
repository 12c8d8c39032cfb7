"""Find sentences that are too long: ``python tools/check_sentences.py [FILE ...]``.

A reader loses a sentence of more than 35 words. Looked at are README.md and the pages of ``docs``;
code, tables, headings, links' addresses and the marks before blocks are left out. The words between
two full stops, question marks, colons at the end of a line, or items of a list are one sentence.
"""

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_WORDS = 35
REFERENCES = ("plan-json.md", "glossary.md")
"""Pages to look things up in: what a field or a word means may take one long sentence."""

FENCED = re.compile(r"^(```|~~~).*?^\1\s*$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->|</?\w+[^>\n]*>", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+|^\s*#+ .*$|^\s*\|.*$|^ {4,}\S.*$|^\s*$", re.MULTILINE)
END = re.compile(r"(?<=[.!?])[)\"'*_]*\s+|:\s*$", re.MULTILINE)


def pages() -> list[Path]:
    """README.md and all pages of the documentation but the references."""
    docs = (path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name not in REFERENCES)
    return [ROOT / "README.md", *docs]


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """The sentences of a page of Markdown, each with the line of its block, from 1."""
    for pattern in (FENCED, COMMENT):
        text = pattern.sub(lambda match: "\n" * match[0].count("\n"), text)
    text = LINK.sub(lambda match: match[1], text)
    starts = sorted({0, len(text), *(place for m in ITEM.finditer(text) for place in m.span())})
    for start, end in itertools.pairwise(starts):
        block = text[start:end]
        if ITEM.fullmatch(block):
            continue
        line = text.count("\n", 0, start + len(block) - len(block.lstrip())) + 1
        for sentence in END.split(block):
            if words := sentence.split():
                yield line, " ".join(words)


def too_long(path: Path) -> list[str]:
    """What a page's author should read: file, line, number of words, sentence."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {len(sentence.split())} words: {sentence}"
        for line, sentence in sentences(path.read_text())
        if len(sentence.split()) > MAX_WORDS
    ]


def main() -> int:
    """Print the sentences that are too long; 1 where there is one."""
    paths = [Path(name).resolve() for name in sys.argv[1:]] or pages()
    long_ones = [text for path in paths for text in too_long(path)]
    print("\n".join(long_ones) or "no sentence is too long")
    return 1 if long_ones else 0


if __name__ == "__main__":
    sys.exit(main())
