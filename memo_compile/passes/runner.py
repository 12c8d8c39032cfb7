"""The one runner of passes: it alone names, times, skips, lints, dumps and wraps failures."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.analysis.joint_units import SAVED
from memo_compile.errors import ConfigError, MemoError, PassFailed

T = TypeVar("T")

TIMES_FILE = "passes.txt"
"""File of the dump folder with the passes that ran, how often, and for how long."""


class GraphPass(Protocol):
    """A frozen dataclass: options as fields, ``name`` in kebab-case, GraphModule in and out."""

    name: ClassVar[str]
    """What dumps, timings, errors and the option ``passes`` call the pass."""
    is_required: ClassVar[bool]
    """True if the step would be wrong, or impossible, without the pass: it is never skipped."""

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite ``gm``; ``modified=False`` promises that the graph's text is unchanged."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSelection:
    """Which of the passes that are not required run; by default all."""

    skipped: frozenset[str] = frozenset()
    """Names of passes that never run."""
    limit: int | None = None
    """Most runs of passes that are not required; None: no limit."""


ALL = PassSelection()


def graph_text(gm: fx.GraphModule) -> str:
    """Returns the graph as text, a node a line, with shapes; equal graphs have equal texts."""
    lines = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        notes = [f"{value.dtype}{list(value.shape)}"] if hasattr(value, "dtype") else []
        if node.meta.get(SAVED):
            notes.append("saved")
        lines.append(f"{node.format_node()}{'  # ' if notes else ''}{', '.join(notes)}")
    return "\n".join(lines) + "\n"


def _nodes(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Returns what to compare to see whether a graph changed; cheaper than its text."""
    return [(node, node.target, node.args, node.kwargs) for node in gm.graph.nodes]


def _notes(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Returns what passes write into ``node.meta``, to compare."""
    return [(node.meta.get(SAVED), id(node.meta.get("val"))) for node in gm.graph.nodes]


class PassRunner:
    """Runs passes, and functions that derive graphs from a graph, one after the other.

    With ``dump`` each run writes ``NN-stage-name.before.txt`` to that folder, and
    ``NN-stage-name.after.txt`` with the pass's graph, or all derived graphs, each under its name.
    """

    def __init__(self, dump: Path | None = None, selection: PassSelection = ALL) -> None:
        self.dump = dump
        self._selection = selection
        self._count = 0
        self._optional_runs = 0
        self._seconds: dict[str, list[float]] = {}

    def run(self, gm: fx.GraphModule, passes: Sequence[GraphPass], *, stage: str) -> fx.GraphModule:
        """Runs the selected ones of ``passes``; returns the last graph.

        Raises:
            ConfigError: a required pass is among those to skip.
            PassFailed: a pass raised, left a graph that does not lint, or claimed "unchanged"
                for a graph whose text did change.
        """
        for graph_pass in passes:
            if self._is_selected(graph_pass):
                gm = self._run_one(gm, graph_pass, stage)
        return gm

    def _is_selected(self, graph_pass: GraphPass) -> bool:
        """True if the pass runs; counts the runs of passes that are not required."""
        skipped = graph_pass.name in self._selection.skipped
        if graph_pass.is_required:
            if skipped:
                raise ConfigError(required(graph_pass.name))
            return True
        limit = self._selection.limit
        if skipped or (limit is not None and self._optional_runs >= limit):
            return False
        self._optional_runs += 1
        return True

    def skips(self, name: str) -> bool:
        """True for a pass that is not selected."""
        return name in self._selection.skipped

    def _run_one(self, gm: fx.GraphModule, graph_pass: GraphPass, stage: str) -> fx.GraphModule:
        """Runs one pass, checks what it has left and claimed, and dumps the graph around it."""
        name = graph_pass.name
        before = "" if self.dump is None else graph_text(gm)
        nodes, notes = _nodes(gm), _notes(gm)
        with self._watched(f"pass {name} on {stage}", name):
            result = graph_pass(gm)
            result.graph_module.graph.lint()
        after = result.graph_module
        if not result.modified and (_nodes(after), _notes(after)) != (nodes, notes):
            raise PassFailed(f"pass {name} on {stage}: says unchanged, but the graph changed")
        if self.dump is not None:
            self.write(f"{stage}-{name}.before.txt", before)
            self.write(f"{stage}-{name}.after.txt", graph_text(after))
        if result.modified:
            after.recompile()
        return after

    def derive(
        self,
        name: str,
        gm: fx.GraphModule,
        function: Callable[[], T],
        *,
        stage: str,
        graphs: Callable[[T], Mapping[str, fx.GraphModule]],
    ) -> T:
        """Returns the result of ``function``, which reads ``gm``; ``graphs`` lists its graphs.

        Raises PassFailed: it raised another error than a MemoError, made a graph that does not
        lint, or changed ``gm``.
        """
        before = _nodes(gm)
        with self._watched(f"{name} of {stage}", name):
            result = function()
            derived = graphs(result)
            for graph in derived.values():
                graph.graph.lint()
        if _nodes(gm) != before:
            raise PassFailed(f"{name} of {stage}: changed the graph that it reads")
        if self.dump is not None:
            texts = (f"# {part}\n{graph_text(graph)}" for part, graph in derived.items())
            self.write(f"{stage}-{name}.before.txt", graph_text(gm))
            self.write(f"{stage}-{name}.after.txt", "\n".join(texts))
        return result

    @contextmanager
    def _watched(self, what: str, name: str) -> Iterator[None]:
        """Counts the block's time for ``name``; turns errors but MemoErrors into PassFailed."""
        start = time.perf_counter()
        try:
            yield
        except MemoError:
            raise
        except Exception as error:
            raise PassFailed(f"{what}: {type(error).__name__}: {error}") from error
        finally:
            self._seconds.setdefault(name, []).append(time.perf_counter() - start)

    def times(self) -> str:
        """Returns a line for each pass and derivation: name, number of runs, milliseconds."""
        lines = [f"{'pass':32}{'runs':>6}{'ms':>10}"]
        lines += [
            f"{name:32}{len(seconds):6}{1e3 * sum(seconds):10.1f}"
            for name, seconds in self._seconds.items()
        ]
        return "\n".join(lines) + "\n"

    def write_times(self) -> None:
        """Writes ``times`` to the dump folder, if there is one."""
        if self.dump is not None:
            self.dump.mkdir(parents=True, exist_ok=True)
            (self.dump / TIMES_FILE).write_text(self.times())

    def write(self, name: str, text: str) -> None:
        """Writes ``text`` to the dump folder, if there is one, under the next number."""
        if self.dump is None:
            return
        self.dump.mkdir(parents=True, exist_ok=True)
        plain = re.sub(r"[^\w.-]+", "_", name)
        (self.dump / f"{self._count:02d}-{plain}").write_text(text)
        self._count += 1


def required(name: str) -> str:
    """Returns the sentence for somebody who wants to skip a required pass."""
    return f"passes: {name} is required, a step without it would be wrong; take -{name} out"
