"""Refuse what a newcomer suffers from: ``python tools/check_sizes.py [PATHS...]``.

That is a file, a function, a list of parameters or a nest of blocks that is too large, and a part
of the project whose sum of lines is. Hard limits, not goals: a file holds one idea. Exit 0 when all
hold, 1 with one ``file:line: what is too large`` for each breach, 2 for a path that cannot be read.
Without PATHS the sums are printed as well.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60
"""Of the body, without its docstring."""
MAX_PARAMETERS = 6
"""Those that must be given by position: a keyword says at the call what it is."""
MAX_NESTING = 4
FIXED_SIGNATURES = (
    "memo_compile/offline/shapes/parallel.py",
    "memo_compile/planners/placement/greedy_kernel.py",
    "memo_compile/planners/placement/kernel.py",
    "tests/steps/flash_attention.py",
)
"""Files of compiled kernels, which take plain arrays, and of operators. Tests take fixtures."""

MAX_SUMS = {
    ("memo_compile", "runtime"): 67_300,
    ("tests",): 62_450,
    ("benchmarks",): 8_900,
}
"""The lines of Python that parts of the project may have in all. Lower these as code goes."""

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_PATHS = ("memo_compile", "runtime", "tests", "benchmarks", "examples", "tools")
EXCLUDED = ("tests/golden",)

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith),
    *(ast.Try, ast.TryStar, ast.Match),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """One limit that does not hold at ``path:line``."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def check_source(path: str, text: str) -> list[Breach]:
    """The breaches of one file, top to bottom.

    Raises:
        SyntaxError: ``text`` is not Python.
    """
    breaches = []
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        what = f"file has {num_lines} lines, at most {MAX_FILE_LINES}; split it"
        breaches.append(Breach(path=path, line=1, what=what))
    for node in ast.walk(ast.parse(text, filename=path)):
        if isinstance(node, _FUNCTIONS):
            breaches.extend(_check_function(path, node))
    return sorted(breaches, key=lambda breach: breach.line)


def _check_function(
    path: str, function: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[Breach]:
    num_lines = _body_lines(function)
    if num_lines > MAX_FUNCTION_LINES:
        what = f"{function.name}() has {num_lines} lines, at most {MAX_FUNCTION_LINES}; split it"
        yield Breach(path=path, line=function.lineno, what=what)
    by_position = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    num_parameters = len(by_position) - len(function.args.defaults)
    num_parameters -= by_position[:1] in (["self"], ["cls"])
    is_fixed = path in FIXED_SIGNATURES or function.name.startswith("test_")
    if num_parameters > MAX_PARAMETERS and not is_fixed:
        what = (
            f"{function.name}() takes {num_parameters} parameters by position, at most "
            f"{MAX_PARAMETERS}; group them, or name them at the call"
        )
        yield Breach(path=path, line=function.lineno, what=what)
    depth, line = _deepest(function.body, 0, function.lineno)
    if depth > MAX_NESTING:
        what = f"{function.name}() nests {depth} blocks here, at most {MAX_NESTING}; return early"
        yield Breach(path=path, line=line, what=what)


def _body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many lines the body of ``function`` has, without its docstring."""
    has_docstring = ast.get_docstring(function, clean=False) is not None
    begin = function.body[0].end_lineno if has_docstring else function.body[0].lineno - 1
    return (function.end_lineno or 0) - (begin or 0)


def _deepest(body: Sequence[ast.AST], depth: int, line: int) -> tuple[int, int]:
    """The largest number of blocks around a statement of ``body``, and the first such line.

    ``elif`` counts as its ``if``; functions and classes inside start again from zero, because
    their own check covers them.
    """
    best = (depth, line)
    for node in body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            continue
        inside = depth + isinstance(node, _BLOCKS)
        for field, value in ast.iter_fields(node):
            if not isinstance(value, list):
                continue
            is_elif = field == "orelse" and [type(v) for v in value] == [ast.If] == [type(node)]
            nested = [
                v for v in value if isinstance(v, ast.stmt | ast.excepthandler | ast.match_case)
            ]
            found = _deepest(nested, depth if is_elif else inside, getattr(node, "lineno", line))
            best = max(best, found, key=lambda pair: pair[0])
    return best


def python_files(paths: Sequence[str]) -> Iterator[Path]:
    """Every ``.py`` file under ``paths`` (relative to the checkout), sorted, less ``EXCLUDED``.

    Raises:
        FileNotFoundError: a path does not exist.
    """
    excluded = tuple(ROOT / name for name in EXCLUDED)
    for name in paths:
        path = ROOT / name
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder")
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            if not any(file.is_relative_to(folder) for folder in excluded):
                yield file


def sums() -> Iterator[tuple[str, int, int]]:
    """Parts of the project, their lines of Python, and how many they may have."""
    for paths, most in MAX_SUMS.items():
        files = python_files(paths)
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        yield " + ".join(paths), lines, most


def main(argv: Sequence[str]) -> int:
    """Check ``argv``, or the whole checkout, and print each breach."""
    breaches: list[Breach] = []
    num_files = 0
    try:
        for file in python_files(argv or DEFAULT_PATHS):
            name = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)
            breaches.extend(check_source(name, file.read_text(encoding="utf-8")))
            num_files += 1
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        print(f"check_sizes: {error}", file=sys.stderr)
        return 2
    for name, lines, most in () if argv else sums():
        print(f"{name}: {lines} lines, at most {most}", file=sys.stderr)
        if lines > most:
            breaches.append(Breach(path=name, line=1, what=f"{lines} lines, at most {most}"))
    for breach in breaches:
        print(breach)
    print(f"sizes: {num_files} files, {len(breaches)} too large", file=sys.stderr)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
