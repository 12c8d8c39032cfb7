"""Recompute regions made of the graphs of a step's layers: estimated, compared, lowered."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from memo_compile.analysis.regions import LoweredRegion, RegionGraph
from memo_compile.config import MemoConfig
from memo_compile.costs.roofline import is_in_memory
from memo_compile.driver.left_whole import UNEXPECTED, say_dropped
from memo_compile.driver.probe import believed, probe_rows
from memo_compile.driver.recompute_library import Estimated, Lowered
from memo_compile.errors import MemoError, described
from memo_compile.lowering.aten import estimate
from memo_compile.lowering.lower import lower_regions
from memo_compile.lowering.workspace import with_workspaces
from memo_compile.passes.recompute import ClassGraph, recompute_graph
from memo_compile.passes.runner import PassRunner
from memo_compile.step.movable import RecomputeKey, RegionInput

Measure = Callable[[Mapping[str, LoweredRegion], Mapping[str, RegionGraph]], Mapping[str, float]]
"""Seconds of every region by name."""


@dataclass(slots=True, kw_only=True)
class RecomputeGraphs:
    """Makes recompute regions; a ``recompute_library.RegionMaker``."""

    graphs: Mapping[str, ClassGraph]
    """The forward of each layer class."""
    config: MemoConfig
    measure: Measure
    runner: PassRunner
    may_run: bool = True
    """False where nothing may be computed while planning: slices of rows are believed then."""
    region_graphs: dict[RecomputeKey, RegionGraph] = field(default_factory=dict)
    code: dict[str, LoweredRegion] = field(default_factory=dict)
    """The regions that are lowered, by name."""

    def estimated(self, key: RecomputeKey) -> Estimated:
        """The region of ``key`` before it is lowered. Raises UnsupportedGraph: there is none."""
        region, inputs = self._graph(key)
        self.region_graphs[key] = region
        fuses = self.config.lowering != "aten"
        profile = replace(
            estimate(region, in_registers) if fuses else estimate(region),
            name=key.region,
            input_layouts=region.input_layouts(),
            output_layouts=region.output_layouts(),
        )
        return Estimated(profile, inputs)

    def lowered(self, keys: Sequence[RecomputeKey]) -> Mapping[RecomputeKey, Lowered | str]:
        """Returns each of ``keys`` lowered, or why it cannot be used. All were estimated before."""
        refused: dict[RecomputeKey, str] = {}
        usable = [key for key in keys if self._agrees(key, refused)]
        graphs = {key.region: self.region_graphs[key] for key in usable}
        code = self._lowered(usable, refused)
        if any(graph.device.type == "cuda" for graph in graphs.values()):
            code = with_workspaces(code, graphs)
        seconds = self.measure(code, {name: graphs[name] for name in code})
        results: dict[RecomputeKey, Lowered | str] = dict(refused)
        for key in usable:
            if key.region in code:
                self.code[key.region] = code[key.region]
                profile = replace(code[key.region].profile, name=key.region)
                results[key] = Lowered(profile, seconds[key.region])
        return results

    def lowered_graphs(self) -> dict[str, RegionGraph]:
        """Returns the graphs of the regions that were lowered."""
        graphs = self.region_graphs.items()
        return {key.region: graph for key, graph in graphs if key.region in self.code}

    def _graph(self, key: RecomputeKey) -> tuple[RegionGraph, tuple[RegionInput, ...]]:
        """Returns the graph that recomputes ``key``, and where each of its inputs comes from."""
        graph = self.graphs[key.class_key]
        return self.runner.derive(
            "recompute",
            graph.region.gm,
            lambda: recompute_graph(graph, key),
            stage=key.region,
            graphs=lambda made: {made[0].name: made[0].gm},
        )

    def _lowered(
        self, keys: Sequence[RecomputeKey], refused: dict[RecomputeKey, str]
    ) -> dict[str, LoweredRegion]:
        """Lowers the regions of ``keys``; adds those that fail to ``refused``."""
        graphs = [replace(self.region_graphs[key], name=key.region) for key in keys]
        try:
            return lower_regions(graphs, self.config, self.runner)
        except (MemoError, *UNEXPECTED) as error_of_all:
            lowered: dict[str, LoweredRegion] = {}
            for key, graph in zip(keys, graphs, strict=True):
                try:
                    lowered.update(lower_regions([graph], self.config, self.runner))
                except (MemoError, *UNEXPECTED) as error:
                    refused[key] = described(error)
                    say_dropped(f"{key.region} is not lowered", error)
            if len(lowered) == len(keys):
                say_dropped("recompute regions are lowered one by one", error_of_all)
            return lowered

    def _agrees(self, key: RecomputeKey, refused: dict[RecomputeKey, str]) -> bool:
        """False for a slice of rows whose results are not the whole's first rows."""
        if key.rows is None or not self.may_run:
            return True
        whole, _ = self._graph(replace(key, rows=None))
        probe = probe_rows(whole, self.region_graphs[key])
        agrees = believed(
            probe,
            differs=f"{key.region} is not used: its rows differ from the whole's",
            not_run=f"{key.region}: was not compared with the whole",
        )
        if not agrees:
            refused[key] = f"its rows differ from the whole's: {probe.reason}"
        return agrees


def in_registers(node: fx.Node) -> bool:
    """True for a value that Inductor makes in the kernel that reads it."""
    return node.op == "call_function" and not is_in_memory(node)
