"""Makes the package's metadata that depends on where the repository will be found.

``repository`` in pyproject.toml, under ``tool.hatch.metadata.hooks.custom``, alone knows the
address, such as ``https://example.org/memo``. While it is empty the package has no links out of
its page. With it, the README's relative links lead to the repository's files, and the package page
has links to source, documentation and changes.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)\s]+)\)")
"""A link or a picture of Markdown whose target is a file of the repository."""
_PICTURE = re.compile(r'(<(?:img|source)[^>]*?(?:src|srcset)=")(?!\w+:)([^"]+)(")')


def absolute_links(text: str, repository: str) -> str:
    """Returns Markdown whose links to files lead to ``repository``; without one, plain words."""

    def link(match: re.Match[str]) -> str:
        is_picture, words, target = match.groups()
        if not repository:
            return words
        return (
            f"{is_picture}[{words}]({repository}/{'raw' if is_picture else 'blob'}/main/{target})"
        )

    text = _LINK.sub(link, text)
    if not repository:
        return text
    return _PICTURE.sub(rf"\g<1>{repository}/raw/main/\g<2>\g<3>", text)


class RepositoryHook(MetadataHookInterface):
    """Adds ``readme`` and ``urls``, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fills in both fields of ``metadata``."""
        repository = str(self.config["repository"]).rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        readme = {"content-type": "text/markdown", "text": absolute_links(text, repository)}
        metadata["readme"] = readme
        metadata["urls"] = {}
        if repository:
            metadata["urls"] = {
                "Source": repository,
                "Documentation": f"{repository}/blob/main/docs/index.md",
                "Changes": f"{repository}/blob/main/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
