"""What a step in tiles must do, as pure data: the step before any tiles, and what each tile reads.

A tiled region has three parts: ``before`` allocates results and computes what all tiles read,
``tile`` runs once for each slice of the rows, ``after`` computes the rest. Where the rows do not
divide into equal tiles the last one is shorter, and a region of its own. What a tile contributes to
sums over all rows (gradients of weights) is added to running sums by regions of their own. The
checker proves that the calls of a step do just this (``check_program.py``); that the parts compute
what the region computes is tried on numbers (``driver/probe.py``).
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from memo_compile.step.problem import Half, Layout, Layouts, StepCall


class Source(enum.Enum):
    """The list that a ``Ref`` points into."""

    REGION_INPUT = "region input"
    BEFORE = "output of before"
    TILE = "output of tile"
    AFTER = "output of after"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """A value: the ``index``-th of ``source``."""

    source: Source
    index: int

    def __str__(self) -> str:
        return f"{self.source.value} {self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Tile i of a run has ``length`` entries of dimension ``dim``, from ``start + i * length``."""

    dim: int
    length: int
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """What a tile, or a sum behind it, reads: a value laid out as ``whole``, or a slice of it."""

    value: Ref
    whole: Layout | None
    slice: Slice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Where an output of the tile lies: it is a slice of output ``whole`` of ``before``."""

    whole: int
    slice: Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSum:
    """``region(total, *terms)`` written over ``total``, an output of ``before``, by every tile."""

    region: str
    total: int
    terms: tuple[Operand, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TileRun:
    """Tiles of equally many rows, one after the other."""

    num_tiles: int
    region: str
    inputs: tuple[Operand, ...]
    rows: tuple[Rows, ...]
    """The region's first outputs; only its sums read the later ones."""
    sums: tuple[RunningSum, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """One region in tiles. Parts are names of regions; ``outputs`` are the region's."""

    before: str
    before_inputs: tuple[int, ...]
    runs: tuple[TileRun, ...]
    """One; or two, the second of the last, shorter tile."""
    after: str | None
    after_inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    output_layouts: Layouts

    @property
    def num_tiles(self) -> int:
        """Tiles of all runs."""
        return sum(run.num_tiles for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """The step before tiles and moves, as its graphs say it: calls in order, results, tilings."""

    calls: tuple[StepCall, ...]
    halves: tuple[Half, ...]
    tilings: Mapping[str, Tiling] = field(default_factory=dict)
    """Region -> how it runs in tiles."""

    def tiles(self) -> Mapping[str, int]:
        """Returns the number of tiles of each region of the step before any tiles; 1: whole."""
        tiles = {region: tiling.num_tiles for region, tiling in self.tilings.items()}
        return {call.region: tiles.get(call.region, 1) for call in self.calls}
