"""Hooks of the documentation site (mkdocs.yml): pages from elsewhere, links that lead to them.

The reference is made from the code (``tools/reference.py``); CHANGELOG.md and CONTRIBUTING.md lie
in the repository's root, where people look for them. Documents link to files as the repository has
them; here such links become those of the site.
"""

import html
import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import reference  # noqa: E402  (mkdocs runs a hook as a file, outside of any package)

FROM_ROOT = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
"""File in the repository's root -> page of the site."""

ELSEWHERE = FROM_ROOT | {"README.md": "index.md"}
"""As ``FROM_ROOT``, with what another page stands for."""

LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[\w-]*)?\)")


BARS = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The site also has the pages of the reference and those of the repository's root."""
    for name, text in reference.pages().items():
        shown = BARS.sub(_shown_bars, text)
        files.append(File.generated(config, f"reference/{name}", content=shown))
    for name, page in FROM_ROOT.items():
        text = (ROOT / name).read_text()
        files.append(File.generated(config, page, content=_for_site(text, ".")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """``markdown`` with links that lead to pages of the site."""
    if page.file.generated_by is not None:
        return markdown
    return _for_site(markdown, posixpath.join("docs", posixpath.dirname(page.file.src_uri)))


def _for_site(text: str, folder: str) -> str:
    """Links of a document in ``folder`` of the repository, as links between pages.

    A link to what is no page (LICENSE, a result) becomes its text: the site has no such file.
    """

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        if target.startswith("docs/"):
            target = target.removeprefix("docs/")
        elif target in ELSEWHERE:
            target = ELSEWHERE[target]
        elif (ROOT / target).exists():
            return match[1]
        page_folder = posixpath.relpath(folder, "docs") if folder != "." else "."
        return f"[{match[1]}]({posixpath.relpath(target, page_folder)}{match[3] or ''})"

    return BARS.sub(_shown_bars, LINK.sub(replaced, text))


def _shown_bars(code: re.Match[str]) -> str:
    """A table's code with bars as HTML: Markdown here shows the backslash that GitHub needs."""
    return f"<code>{html.escape(code[1]).replace(chr(92) + '|', '&#124;')}</code>"
