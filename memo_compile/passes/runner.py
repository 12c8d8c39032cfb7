"""The one runner of passes: it alone names, times, lints, dumps and wraps failures."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.errors import MemoError, PassFailed

__all__ = ["GraphPass", "PassResult", "PassRunner", "graph_text"]


class GraphPass(Protocol):
    """A frozen dataclass: options as fields, ``name`` in kebab-case, GraphModule in and out."""

    @property
    def name(self) -> str:
        """What dumps, timings and errors call the pass."""
        ...

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite ``gm``; ``modified=False`` promises that the graph's text is unchanged."""
        ...


def graph_text(gm: fx.GraphModule) -> str:
    """The graph as text, one node a line, with shapes; the same graph always gives the same."""
    lines = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        shape = f"  # {value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else ""
        lines.append(f"{node.format_node()}{shape}")
    return "\n".join(lines) + "\n"


class PassRunner:
    """Runs passes over one graph after the other, in the order given.

    With ``dump`` every pass leaves ``NN-stage-pass.before.txt`` and ``.after.txt`` there.
    """

    def __init__(self, dump: Path | None = None) -> None:
        self._dump = dump
        self._count = 0
        self.seconds: dict[str, float] = {}

    def run(self, gm: fx.GraphModule, passes: Sequence[GraphPass], *, stage: str) -> fx.GraphModule:
        """``gm`` after all ``passes``.

        Raises:
            PassFailed: a pass raised, left a graph that does not lint, or claimed "unchanged"
                for a graph whose text did change.
        """
        for one in passes:
            gm = self._run_one(gm, one, stage)
        return gm

    def _run_one(self, gm: fx.GraphModule, one: GraphPass, stage: str) -> fx.GraphModule:
        before = graph_text(gm)
        start = time.perf_counter()
        try:
            result = one(gm)
            result.graph_module.graph.lint()
        except MemoError:
            raise
        except Exception as error:
            raise PassFailed(
                f"pass {one.name} on {stage}: {type(error).__name__}: {error}"
            ) from error
        spent = time.perf_counter() - start
        self.seconds[one.name] = self.seconds.get(one.name, 0.0) + spent
        after = graph_text(result.graph_module)
        if not result.modified and after != before:
            raise PassFailed(f"pass {one.name} on {stage}: says unchanged, but the graph changed")
        self.write(f"{stage}-{one.name}.before.txt", before)
        self.write(f"{stage}-{one.name}.after.txt", after)
        result.graph_module.recompile()
        return result.graph_module

    def write(self, name: str, text: str) -> None:
        """Leave ``text`` in the dump folder under the next number; nothing without one."""
        if self._dump is None:
            return
        self._dump.mkdir(parents=True, exist_ok=True)
        (self._dump / f"{self._count:02d}-{name}").write_text(text)
        self._count += 1
