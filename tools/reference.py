"""The pages of the reference, from the code: options, commands, report, errors.

    python tools/reference.py FOLDER    # writes them as Markdown, to look at

The site's build calls ``pages`` (``tools/site_hooks.py``). Every field must have a docstring: one
without is a KeyError that names it. Needs no torch.
"""

import ast
import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]

from memo_compile import config, errors  # noqa: E402  (a checkout needs no install)
from memo_compile.cli import main as cli  # noqa: E402
from memo_compile.reporting import state  # noqa: E402
from memo_compile.step import plans, problem  # noqa: E402

REPORT_CLASSES = (
    *(plans.Decision, plans.Timeline, plans.Span, plans.FrontierPoint, plans.CheckVerdict),
    *(problem.FixedBytes, problem.LayerClassInfo),
)
"""What the fields of a plan consist of."""


def pages() -> dict[str, str]:
    """File name, in the folder ``reference``, -> its Markdown."""
    return {
        "options.md": options_page(),
        "command-line.md": commands_page(),
        "report.md": report_page(),
        "errors.md": errors_page(),
    }


def markdown(docstring: str) -> str:
    """``docstring`` with its code between single backticks, and lines joined to paragraphs."""
    text = inspect.cleandoc(docstring).replace("``", "`")
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text))


@functools.cache
def attribute_docs(module: ModuleType, class_name: str) -> Mapping[str, str]:
    """Attribute -> the docstring below it, in the source of ``class_name``."""
    tree = ast.parse(inspect.getsource(module))
    (found,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    docs = {}
    for field, below in zip(found.body, found.body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            docs[field.target.id] = markdown(str(below.value.value))
    return docs


def type_text(kind: object) -> str:
    """A type as a reader writes it: ``int | None``, not ``typing.Optional``."""
    text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)


def options_page() -> str:
    """A section for each option of ``MemoConfig``."""
    docs = attribute_docs(config, "MemoConfig")
    parts = [
        "# Options",
        'Given as `torch.compile(model, backend="memo", options={...})`, by '
        "`memo_compile.configure(...)`, by a variable, or in the JSON file that `MEMO_CONFIG` "
        "names; the first of these that has a value wins. Sizes: whole bytes, `60GiB`, `60GB`, "
        "or `80%` of the device.",
    ]
    for name, option in config._FIELDS.items():
        parts += [
            f"## `{name}`",
            f"`{type_text(option.type)}`, default `{_default(option)}`, "
            f"variable `MEMO_{name.upper()}`",
        ]
        if name in config._CHOICES:
            parts.append(f"One of {', '.join(f'`{word}`' for word in config._CHOICES[name])}.")
        parts.append(docs[name])
    return _joined(parts)


def _default(option: "dataclasses.Field[Any]") -> str:
    if option.default is not dataclasses.MISSING:
        return repr(option.default)
    assert option.default_factory is not dataclasses.MISSING
    return repr(option.default_factory())


def commands_page() -> str:
    """A section for each command, with its arguments and options."""
    parts = [
        "# Command line",
        "Every command ends with 0 (done, fits, equal), 1 (infeasible, does not fit, unequal), 2 "
        "(bad input, with one line that says where) or 3 (time limit without an answer); `memo "
        "explain` ends as its script does. With `--json` stdout holds one JSON object.",
    ]
    for path, command in commands():
        lines = [f"## `memo {path}`", markdown(command.help or "")]
        usage = " ".join(["memo", path, *_usage(command)])
        lines += [f"```text\n{usage}\n```"]
        rows = [row for parameter in command.params for row in _parameter_rows(parameter)]
        if rows:
            lines.append("\n".join(["| | default | meaning |", "|---|---|---|", *rows]))
        parts += lines
    return _joined(parts)


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its full name, those of groups included."""
    for name in cli._COMMANDS:
        cli._register(name)
    root = typer.main.get_command(cli.app)
    for name in cli._COMMANDS:
        command = root.commands[name]
        yield from _flattened(name, command)


def _flattened(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    for name, below in inner.items():
        yield from _flattened(f"{path} {name}", below)


def _usage(command: Any) -> Iterator[str]:
    if any(parameter.param_type_name == "option" for parameter in command.params):
        yield "[OPTIONS]"
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            name = parameter.metavar or parameter.name.upper()
            yield name if parameter.required else f"[{name}]"


def _parameter_rows(parameter: Any) -> Iterator[str]:
    """A row of the table for ``parameter``; none for ``--help``."""
    if parameter.name == "help":
        return
    is_option = parameter.param_type_name == "option"
    value = parameter.metavar or parameter.name.upper().replace("_", "-")
    is_flag = bool(getattr(parameter, "is_flag", False))
    shown = ", ".join([*parameter.opts, *parameter.secondary_opts]) if is_option else value
    if is_option and not is_flag:
        shown += f" {parameter.metavar or 'VALUE'}"
    default = "" if parameter.default is None or is_flag else f"`{parameter.default}`"
    if parameter.required:
        default = "required"
    text = markdown(parameter.help or "").replace("|", "\\|")
    yield f"| `{shown}` | {default} | {text} |"


def report_page() -> str:
    """The fields of ``report()`` and of the plans in it."""
    parts = [
        "# The report",
        "`memo_compile.report()` returns a picture of the moment; `print` it for a table.",
        _field_table(state.Report, state),
        "## A plan",
        "Each of `.plans`. The same fields are in plan.json ([files of a dump](../plan-json.md)).",
        _field_table(plans.ReportedPlan, plans, plans.Plan, plans.Observed),
        "Beside these: " + ", ".join(_properties(plans.ReportedPlan)) + ".",
    ]
    for kind in REPORT_CLASSES:
        module = sys.modules[kind.__module__]
        parts += [f"## {kind.__name__}", markdown(kind.__doc__ or ""), _field_table(kind, module)]
    return _joined(parts)


def _properties(kind: type) -> list[str]:
    """What ``kind`` works out, with its meaning."""
    found = inspect.getmembers(kind, lambda member: isinstance(member, property))
    texts = ((name, markdown(member.__doc__ or "").rstrip(".")) for name, member in found)
    return [f"`{name}` ({text[:1].lower()}{text[1:]})" for name, text in texts]


def _field_table(kind: Any, module: ModuleType, *sources: type) -> str:
    docs: dict[str, str] = {}
    for source in sources or (kind,):
        docs |= attribute_docs(module, source.__name__)
    rows = ["| field | type | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(kind):
        kind_text, text = (
            cell.replace("|", "\\|") for cell in (type_text(field.type), docs[field.name])
        )
        rows.append(f"| `{field.name}` | `{kind_text}` | {text} |")
    return "\n".join(rows)


RUNTIME_ERRORS = ("arena", "pinned_memory", "backward_run", "copies")
"""Modules of the runtime that define one; they are read, not imported, since they need torch."""


def errors_page() -> str:
    """Every exception that memo raises on purpose."""
    parts = ["# Errors", markdown(errors.__doc__ or "")]
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.MemoError):
            bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
            parts += [
                f"## `memo_compile.errors.{name}`",
                f"Bases: {bases}.",
                markdown(kind.__doc__),
            ]
    for module in RUNTIME_ERRORS:
        for node in ast.parse((ROOT / f"runtime/memo_runtime/{module}.py").read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
                bases = ", ".join(f"`{ast.unparse(base)}`" for base in node.bases)
                parts += [f"## `memo_runtime.{module}.{node.name}`", f"Bases: {bases}."]
                parts.append(markdown(ast.get_docstring(node) or ""))
    return _joined(parts)


def _joined(parts: list[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for file_name, content in pages().items():
        (target / file_name).write_text(content)
        print(target / file_name)
