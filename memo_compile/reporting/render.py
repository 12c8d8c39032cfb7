"""Texts and pages from the files in ``templates``."""

from typing import Any

import jinja2

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("memo_compile.reporting", "templates"),
    autoescape=jinja2.select_autoescape(enabled_extensions=("html.j2",)),
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(name: str, **values: Any) -> str:
    """Returns the template ``name`` with ``values`` filled in, escaped where it is HTML."""
    return _TEMPLATES.get_template(name).render(**values)
