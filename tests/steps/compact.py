"""Texts of graphs and programs as a person reads them: a short line for each node."""

import re

COLUMNS = 120
INDENT = "    "

_NODE = re.compile(
    r"(%\w+) : \[num_users=\d+\] = call_function\[target=([^\]]+)\]"
    r"\(args = \((.*)\), kwargs = \{(.*)\}\)(.*)"
)
_PLACEHOLDER = re.compile(r"(%\w+) : \[num_users=\d+\] = placeholder\[target=\w+\](.*)")


def compact(text: str) -> str:
    """``text`` without what torch writes in every line; no line is longer than COLUMNS."""
    return "\n".join("\n".join(_wrapped(_short(line))) for line in text.split("\n"))


def _short(line: str) -> str:
    """``%mm = aten.mm.default(%x, %w)  # float32[8, 16]``."""
    if found := _PLACEHOLDER.fullmatch(line):
        name, shape = found.groups()
        return f"{name} = placeholder{_without_torch(shape)}"
    if found := _NODE.fullmatch(line):
        name, target, args, options, shape = found.groups()
        named = re.sub(r"(\w+): ", r"\1=", options)
        given = ", ".join(part for part in (args.removesuffix(","), named) if part)
        return f"{name} = {_without_torch(f'{target}({given}){shape}')}"
    return line


def _without_torch(text: str) -> str:
    return re.sub(r"\btorch\.(ops\.)?", "", text)


def _wrapped(line: str) -> list[str]:
    lines = []
    while len(line) > COLUMNS:
        at = line.rfind(" ", len(INDENT) + 1, COLUMNS + 1)
        assert at > 0, f"no place to break {line}"
        lines.append(line[:at])
        line = INDENT + line[at + 1 :]
    return [*lines, line]
