"""The passes over the graphs of a step, in the order in which they run."""

from collections.abc import Sequence

from memo_compile.errors import ConfigError, nearest
from memo_compile.passes.accumulate import AccumulateInPlace
from memo_compile.passes.bodies import InlineRegions, ReadOutside
from memo_compile.passes.cse import MergeCommonSubexpressions
from memo_compile.passes.effect_tokens import TokensApart
from memo_compile.passes.equal_cut import EqualCut, SaveMinCut, SufficientCut
from memo_compile.passes.gather_once import GatherOnce
from memo_compile.passes.hoist import HoistInvariants
from memo_compile.passes.keep_jumps import KeepJumps
from memo_compile.passes.lease import FetchLeased, LeaseSaved
from memo_compile.passes.loss_gradient import GradientOfLoss
from memo_compile.passes.needless_masks import NeedlessMasks
from memo_compile.passes.numbers import PutNumbers, ReadOpenNumbers
from memo_compile.passes.overwritten import KeepOverwritten
from memo_compile.passes.own_inputs import OwnInputs
from memo_compile.passes.own_outputs import OwnOutputs
from memo_compile.passes.round_values import RoundValues
from memo_compile.passes.runner import GraphPass, PassSelection, required
from memo_compile.passes.separate import SeparateResults
from memo_compile.passes.shorten import ShortenTokens
from memo_compile.passes.slice_first import SliceFirst
from memo_compile.passes.spread_seeds import SpreadSeeds
from memo_compile.passes.store_float8 import ReadFloat8, StoreFloat8
from memo_compile.passes.traced_collectives import TracedCollectives

PASSES: tuple[type[GraphPass], ...] = (
    InlineRegions,  # Dynamo's graph
    ReadOutside,  # Dynamo's graph
    PutNumbers,  # Dynamo's graph, where it has sizes as symbols
    NeedlessMasks,  # Dynamo's graph
    SliceFirst,  # Dynamo's graph
    ReadOpenNumbers,  # joint graph, where sizes are symbols
    TracedCollectives,  # joint graph
    MergeCommonSubexpressions,  # joint graph
    HoistInvariants,  # joint graph
    GradientOfLoss,  # joint graph
    KeepJumps,  # joint graph
    KeepOverwritten,  # joint graph
    OwnInputs,  # joint graph
    SaveMinCut,  # joint graph
    EqualCut,  # joint graph
    SufficientCut,  # joint graph
    GatherOnce,  # joint graph, for a step in tiles
    StoreFloat8,  # forward half
    ReadFloat8,  # backward half
    LeaseSaved,  # forward half
    FetchLeased,  # backward half
    SeparateResults,  # both halves, as Inductor simplified them
    TokensApart,  # both halves, the last in each
    AccumulateInPlace,  # backward half
    OwnOutputs,  # each region that Inductor lowers
    RoundValues,  # the same
    SpreadSeeds,  # the same, on CUDA
    ShortenTokens,  # a copy of a region that is too large to be timed whole
)
"""The joint graph is cut into halves behind ``GatherOnce``; the halves are cut into regions, and
wide regions into tiles, behind ``TokensApart``."""


def selection(entries: Sequence[str]) -> PassSelection:
    """Returns the passes that the option ``passes`` selects: ``-NAME`` skips one, ``..N`` runs N.

    ``..N`` helps to find the pass that makes a fault by halving: required passes run all the same
    and are not counted. Raises ConfigError: an entry is neither, or the pass is unknown or
    required.
    """
    is_required = {graph_pass.name: graph_pass.is_required for graph_pass in PASSES}
    skipped: set[str] = set()
    limit = None
    for entry in entries:
        name = entry.removeprefix("-")
        if entry.startswith(".."):
            digits = entry.removeprefix("..")
            if not (digits.isascii() and digits.isdigit()):
                raise ConfigError(f"passes: expected a number of passes behind '..', got {entry!r}")
            limit = int(digits)
        elif name == entry:
            raise ConfigError(f"passes: expected -NAME or ..N, got {entry!r}")
        elif name not in is_required:
            all_names = f"; known passes: {', '.join(is_required)}"
            hint = nearest(name, is_required, otherwise=all_names)
            raise ConfigError(f"passes: unknown pass {name!r}{hint}")
        elif is_required[name]:
            raise ConfigError(required(name))
        else:
            skipped.add(name)
    return PassSelection(skipped=frozenset(skipped), limit=limit)
