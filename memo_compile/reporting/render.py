"""Texts and pages from the files in ``templates``."""

import functools
from typing import Any

import jinja2


def render(name: str, **values: Any) -> str:
    """The template ``name`` with ``values`` filled in, escaped where it is HTML."""
    return _environment().get_template(name).render(**values)


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("memo_compile.reporting", "templates"),
        autoescape=jinja2.select_autoescape(enabled_extensions=("html.j2",)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
