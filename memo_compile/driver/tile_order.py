"""In which tiles of tokens a step is tried, one after the other, until one of its plans is taken.

The first try is the one that will mostly do. No graph is read here: a step that was lowered before
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
from memo_compile.errors import Infeasible, MemoError, TooSlow, UnsupportedGraph
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

REST = 0.1
"""Share of the budget that layers are taken to need beside parameters and logits."""

SMALL = 0.25
"""Where logits take up to this share of the room for logits and layers, tiling them alone makes no
slow plan fast: either the whole graph is, or all chains run in tiles."""

FAST, FAST_IN_ALL = 1.02, 1.03
"""A plan is taken at once if its step takes at most this many times the seconds of the computation
without tiles: FAST where only what breaks the budget runs in tiles, FAST_IN_ALL where all chains
do. All tiles cost a factor of 1.005 to 1.01, recomputing what they make 1.04. Planning other tiles
takes up to half a minute, which two percent of a step are not worth."""

NOT_FAST = 0.0
"""Value of ``max_over_compute``: the plan is too slow, but it is made, and compared with others."""

ONLY_BOUND = 0.5
"""Value of ``max_over_compute``: no plan is fast if its bound is not, and then none is made."""

COMPILING = 1.03
"""Factor on FAST where each try compiles and times its regions, which takes a minute."""


class Tiles(NamedTuple):
    """How a graph is tried: which regions run in how many tiles of tokens."""

    number: int
    above_bytes: int = 0
    """Regions whose transients are no larger run whole."""
    drop_above_bytes: int = 0
    """Tensors that are no larger may be saved."""
    max_over_compute: float = math.inf
    """A plan that takes more than this many times its computation leads to the next tiles."""

    def __str__(self) -> str:
        where = f", where more than {format_bytes(self.above_bytes)} are in use at once"
        saved = f", what takes up to {format_bytes(self.drop_above_bytes)} is saved"
        return (
            f"{self.number} tiles of tokens{where if self.above_bytes else ''}"
            f"{saved if self.drop_above_bytes else ''}"
        )

    def options(
        self, config: MemoConfig, max_step_s: float = math.inf, enough_s: float = 0.0
    ) -> MemoConfig:
        """``config`` for this try: plans of ``max_step_s`` are refused, of ``enough_s`` taken."""
        return replace(
            config,
            token_tiles=self.number,
            tile_above_bytes=self.above_bytes,
            drop_above_bytes=self.drop_above_bytes,
            max_over_compute=self.max_over_compute,
            max_step_s=max_step_s,
            enough_s=enough_s,
        )


Attempt = Callable[[MemoConfig], T]
"""Plans a step under options that name a number of tiles."""


def first_of(
    order: Iterable[Tiles],
    config: MemoConfig,
    attempt: Attempt[T],
    ends_planning: Callable[[Exception], bool],
) -> T:
    """What ``attempt`` makes in the first tiles of ``order`` for which it does not fail.

    After a TooSlow the other tiles are tried; if all are slow, the fastest plan is taken. Where all
    fail, the error that tells most is raised. An error that ``ends_planning`` is raised at once.
    """
    failed: Exception | None = None
    tries = _Tries(order)
    try:
        while (tiles := tries.following()) is not None:
            try:
                return attempt(tiles.options(config, tries.limit_s, tries.enough_s))
            except TooSlow as error:
                log.info("memo: in %s: %s", tiles, error)
                tries.tell(tiles, error)
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
    """Which tiles come next, by what is known of those before.

    First all come in order. Tiles whose bound shows that no plan is fast are not planned then, but
    at last, the smallest bound first, and only while one of them may be the fastest. Then the
    fastest comes again, and is taken.
    """

    def __init__(self, order: Iterable[Tiles]) -> None:
        self._slow: list[Tiles] = []
        """What was found slow, by its plan or by its bound."""
        self._fastest: Tiles | None = None
        """The one of them whose plan is the fastest of all that were made."""
        self._is_last = False
        """True once no plan is fast: then the fastest is taken."""
        self.limit_s = math.inf
        """Seconds of that plan."""
        self.enough_s = 0.0
        """A plan of at most so many seconds is taken, because no bound that is left is lower."""
        self._left = list(order)
        self._bounds: list[tuple[float, Tiles]] = []

    def following(self) -> Tiles | None:
        """The tiles to try now; None when there are no more."""
        while self._left:
            tiles = self._left.pop(0)
            if tiles.number > 1 or not (self._fastest or self._bounds):
                waits = self._bounds and tiles.max_over_compute == math.inf
                return tiles._replace(max_over_compute=ONLY_BOUND) if waits else tiles
        self._bounds.sort()
        if self._is_last or not self._bounds or self._bounds[0][0] >= self.limit_s:
            return self._at_any_speed()
        _, tiles = self._bounds.pop(0)
        self.enough_s = self._bounds[0][0] if self._bounds else math.inf
        return tiles._replace(max_over_compute=NOT_FAST)

    def _at_any_speed(self) -> Tiles | None:
        """The fastest of all; where that is refused, what was found slow, in order."""
        if self._fastest is None:
            return None
        if not self._is_last:
            self._is_last, self.limit_s, self.enough_s = True, math.inf, 0.0
            self._slow.remove(self._fastest)
            self._slow.insert(0, self._fastest)
        return self._slow.pop(0) if self._slow else None

    def tell(self, tiles: Tiles, error: TooSlow) -> None:
        """Remember what was found of ``tiles``."""
        tiles = tiles._replace(max_over_compute=math.inf)
        if tiles not in self._slow:
            self._slow.append(tiles)
        if not error.is_bound:
            if error.step_s < self.limit_s:
                self.limit_s, self._fastest = error.step_s, tiles
        elif error.step_s < self.limit_s:
            self._bounds.append((error.step_s, tiles))


def _leads_on(error: Exception, tiles: int, config: MemoConfig) -> bool:
    """True where other tiles may fit; False where the whole failed, but not for its memory."""
    if tiles != 1 or isinstance(error, refused()):
        return True
    return config.memory_budget is not None and isinstance(error, Infeasible)


def _more_telling(before: Exception, error: Exception) -> Exception:
    """The failure to raise: the lower floor, else the later one if it says something of memory."""
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
    """What the order of tiles is made of."""

    products_bytes: tuple[int, int]
    """Bytes of the widest two products' results, which differ."""
    constant_bytes: int
    """Parameters, a gradient for each that is trained, and optimizer state."""


def order_of(sizes: Sizes, config: MemoConfig, budget_bytes: int | None) -> tuple[Tiles, ...]:
    """The tiles to try, the more promising first, for a step under a budget.

    Without tiles the loss head's logits and their gradient exist at the same time. With parameters,
    gradients and optimizer state they alone may exceed the budget. Then regions that break the
    budget by themselves run in tiles, which cost time; if that is not enough, all regions with wide
    chains do; at last what those chains make is recomputed tile by tile instead of saved. This is
    an estimate: a step that would just have fitted whole may run in tiles. Where logits just fit,
    the whole graph is taken only if it is fast: with less memory the step might run in tiles, and a
    smaller budget must not be faster. Where each try is compiled and timed, it is taken all the
    same.
    """
    whole, everywhere = Tiles(1), Tiles(TOKEN_TILES)
    widest, second = sizes.products_bytes
    head = Tiles(HEAD_TILES if widest >= MANY_BYTES else TOKEN_TILES, widest, sys.maxsize)
    first = head if widest >= max(HEAD_BYTES, HEAD_FACTOR * second) else whole
    if budget_bytes is None:
        return (first, whole, everywhere) if first is head else (whole, everywhere)
    room = int(budget_bytes * (1 - REST)) - sizes.constant_bytes
    if room <= 0:
        return everywhere, whole
    compiles = config.costs != "roofline"
    more = COMPILING if compiles else 1.0
    needed = Tiles(HEAD_TILES, room, room, FAST * more)
    in_all = Tiles(TOKEN_TILES, 0, room, FAST_IN_ALL * more)
    if 2 * widest > room:
        return needed, in_all, everywhere, whole
    if first is whole and compiles:
        return whole, everywhere
    if first is whole and 2 * widest <= SMALL * room:
        return whole._replace(max_over_compute=FAST_IN_ALL), in_all, everywhere
    order = (first._replace(max_over_compute=FAST * more), needed, in_all, everywhere)
    return (*order, whole) if first is head else order
