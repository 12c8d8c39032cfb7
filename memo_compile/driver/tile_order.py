"""Chooses the tiles in which a step is planned: tries them in turn until a plan is taken.

The first try mostly suffices. No graph is read here: a step that was lowered in an earlier process
is tried in the same way (``offline.step_record``).
"""

import logging
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, TypeVar

from memo_compile.config import MemoConfig
from memo_compile.driver.left_whole import UNEXPECTED, is_bug, refused, say_dropped
from memo_compile.errors import (
    ConfigError,
    Infeasible,
    MemoError,
    TooSlow,
    UnsupportedGraph,
    without_frames,
)
from memo_compile.reporting import state
from memo_compile.units import format_bytes

log = logging.getLogger("memo")

T = TypeVar("T")

TOKEN_TILES = 8
"""Tiles of a region: an eighth of its widest tensor is less than a layer's other transients."""

HEAD_BYTES = 2**28
"""Logits of so many bytes run in tiles even without a budget: at that size tiles cost no time."""

HEAD_FACTOR = 2
"""A product that has this many times the bytes of every other one is taken to make the logits."""

HEAD_TILES = 16
"""Tiles of a region that alone breaks the budget, mostly the loss head: then a tile's logits are
small beside the gradient of their weight. Each tile reads and writes that gradient, so there are
fewer tiles where logits fit."""

MANY_BYTES = 2**33
"""Logits of so many bytes run in HEAD_TILES even where they fit: a tile of half a gibibyte takes a
hundred times as long as the gradient's way through memory, and other budgets find the same step."""

LAYERS_SHARE = 0.1
"""Share of the budget that layers are taken to need beside parameters and logits."""

SMALL_LOGITS = 0.25
"""Where logits take up to this share of the room for logits and layers, tiling them alone makes no
slow plan fast: either the whole graph is fast, or all chains run in tiles."""

FAST, FAST_IN_ALL = 1.02, 1.03
"""A plan is taken at once if its step takes at most this many times the seconds of the computation
without tiles: FAST where only what breaks the budget runs in tiles, FAST_IN_ALL where all chains
do. All tiles cost a factor of 1.005 to 1.01, recomputing what they make 1.04. Planning other tiles
takes up to half a minute, which two percent of a step are not worth."""

NOT_FAST = 0.0
"""As ``max_over_compute``: every plan counts as too slow, but is made and compared with others."""

ONLY_BOUND = 0.5
"""As ``max_over_compute``: a plan whose lower bound is too slow is not made at all."""

COMPILING = 1.03
"""Factor on FAST where each try compiles and times its regions, which takes a minute."""


class Tiles(NamedTuple):
    """One try of a graph: which regions run in how many tiles of tokens, or of heads."""

    number: int
    above_bytes: int = 0
    """Regions whose transients are no larger run whole."""
    drop_above_bytes: int = 0
    """Tensors that are no larger may be saved."""
    max_over_compute: float = math.inf
    """A plan whose step takes more than this many times its computation is refused (TooSlow)."""
    by_heads: bool = False
    """Attention runs in tiles of heads."""
    stores_float8: bool = False
    """Saved activations are stored as float8."""

    def __str__(self) -> str:
        where = f", where more than {format_bytes(self.above_bytes)} are in use at once"
        saved = f", what takes up to {format_bytes(self.drop_above_bytes)} is saved"
        heads = " and heads" if self.by_heads else ""
        return (
            f"{self.number} tiles of tokens{heads}{where if self.above_bytes else ''}"
            f"{saved if self.drop_above_bytes else ''}"
            f"{', saved as float8' if self.stores_float8 else ''}"
        )

    def options(
        self, config: MemoConfig, max_step_s: float = math.inf, enough_s: float = 0.0
    ) -> MemoConfig:
        """Returns ``config`` for this try.

        Plans of ``max_step_s`` seconds or more are refused, of ``enough_s`` or less taken.
        """
        return replace(config, token_tiles=self.number).trying(
            tile_above_bytes=self.above_bytes,
            drop_above_bytes=self.drop_above_bytes,
            by_heads=self.by_heads,
            stores_float8=self.stores_float8,
            max_over_compute=self.max_over_compute,
            max_step_s=max_step_s,
            enough_s=enough_s,
        )


Attempt = Callable[[MemoConfig], T]
"""Plans a step under options that name a number of tiles."""


def where_weights_fit(config: MemoConfig, attempt: Attempt[T]) -> T:
    """Returns what ``attempt`` makes of ``config``; by ``weights="auto"`` on the device if it fits.

    Else with weights on the host, if a declared ``host_budget`` allows it. Raises as ``attempt``.
    """
    if config.weights != "auto":
        return attempt(config)
    try:
        return attempt(replace(config, weights="device"))
    except Infeasible as error:
        log.info("memo: with weights on the device: %s", error)
        on_device = without_frames(error)
    try:
        planned = attempt(config)
    except ConfigError as error:
        raise Infeasible(f"{on_device}; {error}", floor_bytes=on_device.floor_bytes) from None
    state.add_note("weights='auto': on the host, since nothing fits with them on the device")
    return planned


def first_of(
    order: Iterable[Tiles],
    config: MemoConfig,
    attempt: Attempt[T],
    ends_planning: Callable[[Exception], bool],
) -> T:
    """Returns the result of ``attempt`` in the first tiles of ``order`` in which it succeeds.

    After a TooSlow the other tiles are tried; if all are too slow, the fastest plan is made again
    and taken. Where all fail, the most telling error is raised; one that ``ends_planning`` at once.
    """
    failed: Exception | None = None
    tries = _Tries(order)
    try:
        while (tiles := tries.following()) is not None:
            try:
                return attempt(tiles.options(config, tries.limit_s, tries.enough_s))
            except TooSlow as error:
                log.info("memo: in %s: %s", tiles, error)
                tries.note_slow(tiles, error)
            except refused(MemoError, *UNEXPECTED) as error:
                if ends_planning(error) or (
                    failed is None and not _leads_on(error, tiles.number, config)
                ):
                    raise
                log.info("memo: in %s: %s", tiles, error)
                if is_bug(error) and (failed is None or isinstance(failed, Infeasible)):
                    say_dropped(f"the graph is not planned in {tiles}", error)
                failed = error if failed is None else _more_telling(failed, error)
        assert failed is not None, "there are tilings to try"
        raise failed
    finally:
        # The error's traceback holds this frame, which holds the error: that cycle would keep all
        # callers' frames, and so what the first forward returns, until the collector runs.
        failed = None


class _Tries:
    """Says which tiles come next, by the results of those before.

    1. All come in order. Where a lower bound shows that no plan in these tiles is fast, they are
       put off unplanned.
    2. Those that were put off are planned, the smallest bound first, while one of them may be the
       fastest.
    3. The fastest comes again, and is taken.
    """

    def __init__(self, order: Iterable[Tiles]) -> None:
        self._untried = list(order)
        self._put_off: list[tuple[float, Tiles]] = []
        """(lower bound in seconds, tiles)."""
        self._slow: list[Tiles] = []
        """Tiles that are too slow, by their plan or by their bound."""
        self._fastest: Tiles | None = None
        """Those of ``_slow`` with the fastest plan that was made."""
        self._takes_fastest = False
        """True in step 3."""
        self.limit_s = math.inf
        """Seconds of the plan of ``_fastest``; slower plans are refused."""
        self.enough_s = 0.0
        """A plan of at most so many seconds is taken: no bound in ``_put_off`` is lower."""

    def following(self) -> Tiles | None:
        """Returns the tiles to try now; None when there are no more."""
        while self._untried:
            tiles = self._untried.pop(0)
            is_whole = tiles.number == 1 and not tiles.stores_float8  # for where nothing else fits
            if not is_whole or not (self._fastest or self._put_off):
                only_bound = self._put_off and tiles.max_over_compute == math.inf
                return tiles._replace(max_over_compute=ONLY_BOUND) if only_bound else tiles
        self._put_off.sort()
        if self._takes_fastest or not self._put_off or self._put_off[0][0] >= self.limit_s:
            return self._at_any_speed()
        _, tiles = self._put_off.pop(0)
        self.enough_s = self._put_off[0][0] if self._put_off else math.inf
        return tiles._replace(max_over_compute=NOT_FAST)

    def _at_any_speed(self) -> Tiles | None:
        """Returns the fastest tiles; where they are refused now, the other slow ones, in order."""
        if self._fastest is None:
            return None
        if not self._takes_fastest:
            self._takes_fastest, self.limit_s, self.enough_s = True, math.inf, 0.0
            self._slow.remove(self._fastest)
            self._slow.insert(0, self._fastest)
        return self._slow.pop(0) if self._slow else None

    def note_slow(self, tiles: Tiles, error: TooSlow) -> None:
        """Notes that ``tiles`` are too slow: by a plan that was made, or by a bound only."""
        tiles = tiles._replace(max_over_compute=math.inf)
        if tiles not in self._slow:
            self._slow.append(tiles)
        if not error.is_bound:
            if error.step_s < self.limit_s:
                self.limit_s, self._fastest = error.step_s, tiles
        elif error.step_s < self.limit_s:
            self._put_off.append((error.step_s, tiles))


def _leads_on(error: Exception, tiles: int, config: MemoConfig) -> bool:
    """False where the step without tiles failed for another reason than its memory."""
    if tiles != 1 or isinstance(error, refused()):
        return True
    return config.memory_budget is not None and isinstance(error, Infeasible)


def _more_telling(before: Exception, error: Exception) -> Exception:
    """Returns the error with the lower floor; without floors the later one, if about memory."""
    if isinstance(error, UnsupportedGraph):
        return before
    if not isinstance(before, Infeasible):
        return error
    if not isinstance(error, Infeasible):
        return before if is_bug(error) else error
    floors = before.floor_bytes, error.floor_bytes
    if floors[1] is None or (floors[0] is not None and floors[0] < floors[1]):
        return before
    return error


class Sizes(NamedTuple):
    """The sizes that decide the order of tiles."""

    products_bytes: tuple[int, int]
    """Bytes of the widest two products' results, which differ."""
    constant_bytes: int
    """Parameters, a gradient for each that is trained, and optimizer state."""
    has_attention: bool


def order_of(sizes: Sizes, config: MemoConfig, budget_bytes: int | None) -> tuple[Tiles, ...]:
    """Returns the tries of a step: its tiles, and these again with float8 if that is allowed.

    Where a step with exact saved activations is as fast as its computation, nothing is rounded.
    Where nothing fits, the exact ones come last, for their floor.
    """
    if config.token_tiles is not None:
        order: tuple[Tiles, ...] = (Tiles(config.token_tiles),)
    else:
        order = _tiles_of(sizes, config, budget_bytes)
    if config.saved_dtype == "same" or budget_bytes is None:
        return order
    limit = FAST * (COMPILING if config.costs != "roofline" else 1.0)
    exact = (each._replace(max_over_compute=min(each.max_over_compute, limit)) for each in order)
    return (*exact, *(each._replace(stores_float8=True) for each in order), *order)


def _tiles_of(sizes: Sizes, config: MemoConfig, budget_bytes: int | None) -> tuple[Tiles, ...]:
    """Returns the tiles to try, the most promising first, for a step under a budget.

    Without tiles the loss head's logits and their gradient exist at the same time, and may exceed
    the budget together with parameters, gradients and optimizer state. Then are tried:

    * ``needed``: only regions that break the budget by themselves run in tiles, since tiles cost
      time;
    * ``in_all``: all regions with wide chains run in tiles;
    * ``everywhere``: these chains are recomputed tile by tile as well, instead of saved;
    * ``by_heads``: attention runs in tiles of heads, and is recomputed in them as well, which takes
      a third of its time: where nothing else fits.

    Sizes are estimates: a step that would just have fitted whole may run in tiles. Where logits
    just fit, the whole graph is taken only if it is fast: with less memory the step might run in
    tiles, and a smaller budget must not be faster. Where each try is compiled and timed, it is
    taken all the same.
    """
    whole, in_tiles = Tiles(1), Tiles(TOKEN_TILES)
    everywhere = (in_tiles, *([in_tiles._replace(by_heads=True)] if sizes.has_attention else []))
    widest, second = sizes.products_bytes
    head = Tiles(HEAD_TILES if widest >= MANY_BYTES else TOKEN_TILES, widest, sys.maxsize)
    first = head if widest >= max(HEAD_BYTES, HEAD_FACTOR * second) else whole
    if budget_bytes is None:
        return (first, whole, in_tiles) if first is head else (whole, in_tiles)
    room = int(budget_bytes * (1 - LAYERS_SHARE)) - sizes.constant_bytes
    if room <= 0:
        return *everywhere, whole
    compiles = config.costs != "roofline"
    patience = COMPILING if compiles else 1.0
    needed = Tiles(HEAD_TILES, room, room, FAST * patience)
    in_all = Tiles(TOKEN_TILES, 0, room, FAST_IN_ALL * patience)
    if 2 * widest > room:
        return needed, in_all, *everywhere, whole
    if first is whole and compiles:
        return whole, *everywhere
    if first is whole and 2 * widest <= SMALL_LOGITS * room:
        return whole._replace(max_over_compute=FAST_IN_ALL), in_all, *everywhere
    order = (first._replace(max_over_compute=FAST * patience), needed, in_all, *everywhere)
    return (*order, whole) if first is head else order
