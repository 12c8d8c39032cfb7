"""What ``memo plan`` remembers after an answer, so that other budgets are answered in seconds.

An answer is made of the step in one to four ways of tiling it; other budgets need other ways, nine
to twenty in all, each of which is to be traced or lowered once. ``briefly`` makes the next ones,
before the command ends. ``fully`` makes all of them, and what says that nothing fits, in a process
that is left behind; a command that needs one of them meanwhile leaves word of it, and waits
(``awaited``): what is waited for is made next.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memo_compile.config import MemoConfig
from memo_compile.driver.tile_order import Tiles
from memo_compile.errors import Infeasible, MemoError
from memo_compile.file_store import digest_of
from memo_compile.offline.remembered_keys import ignored_if_wrong, log, nobody_watches

if TYPE_CHECKING:
    from memo_compile.offline.model_plans import ModelPlans

BRIEFLY = 0.15
"""After this share of the processor seconds that the answer took, no further tiles are begun
before the command ends: those of the first take a fifth of it."""

WAIT_S, POLL_S = 10.0, 0.1
"""How long a command waits in all for tiles that another process makes, which may have little of a
busy processor; alone it takes a second or two for each."""

TILES, FLOOR, WANTED = "preparing tiles", "preparing the floor", "wanted tiles"


def briefly(plans: "ModelPlans", answer_s: float) -> None:
    """Remember what smaller budgets than the last one need, where its answer was traced for.

    ``answer_s``: the processor seconds that the answer took, which bound those of this.
    """
    config, memory = plans.prepares_for, plans.lasting
    if config is None or memory is None:
        return
    if not memory.store.is_claimed(plans.claim_key(config, TILES)):
        _all_tiles(plans, config, until_s=time.process_time() + BRIEFLY * answer_s)


def lacks(plans: "ModelPlans") -> bool:
    """True where something is to be remembered for other budgets, and no other process does it."""
    config, memory = plans.prepares_for, plans.lasting
    if config is None or memory is None or memory.store.is_claimed(plans.claim_key(config, TILES)):
        return False
    return plans.missing(_any_budget(plans, config), ()) is not None or not _knows_floor(
        plans, config
    )


def fully(plans: "ModelPlans") -> None:
    """Remember what every budget needs, in several times the seconds of the answer."""
    config, memory = plans.prepares_for, plans.lasting
    claim = None
    if config is not None and memory is not None:
        claim = memory.store.claim(plans.claim_key(config, TILES))
    if config is None or claim is None:
        return
    plans.say = nobody_watches
    try:
        _all_tiles(plans, _any_budget(plans, config))
    finally:
        claim.release()
    _floors(plans, config)


def _any_budget(plans: "ModelPlans", config: MemoConfig) -> MemoConfig:
    return replace(config, memory_budget=plans.hardware.memory_bytes)


def _all_tiles(plans: "ModelPlans", config: MemoConfig, until_s: float | None = None) -> None:
    failed = set[Tiles]()
    while (tiles := plans.missing(config, failed, _wanted(plans, config))) is not None:
        if until_s is not None and time.process_time() >= until_s:
            break
        try:
            plans.prepare(tiles, config)
        except Exception as error:  # the answer was given, and stands
            log.info("memo: in %s: not remembered: %r", tiles, error)
            failed.add(tiles)


def _wanted(plans: "ModelPlans", config: MemoConfig) -> list[Tiles]:
    """What other commands have waited for, whether it is there by now or not."""
    memory, found = plans.lasting, list[Tiles]()
    for body in () if memory is None else memory.store.read(plans.claim_key(config, WANTED)):
        with ignored_if_wrong():
            number, above_bytes, drop_above_bytes = map(int, body)
            found.append(Tiles(number, above_bytes, drop_above_bytes))
    return found


def _want(plans: "ModelPlans", options: MemoConfig) -> None:
    memory = plans.lasting
    if memory is not None and options.token_tiles is not None:
        tiles = [options.token_tiles, options.tile_above_bytes, options.drop_above_bytes]
        memory.store.write(plans.claim_key(options, WANTED), tiles, digest_of(tiles)[:16])


def _floor_key(plans: "ModelPlans", config: MemoConfig) -> dict[str, Any]:
    return plans.claim_key(config, FLOOR)


def _knows_floor(plans: "ModelPlans", config: MemoConfig) -> bool:
    memory = plans.lasting
    return memory is None or bool(memory.store.variants(_floor_key(plans, config)))


def _floors(plans: "ModelPlans", config: MemoConfig) -> None:
    """Answers where nothing fits are made: such plans recompute with regions that no other needs.

    First for the least budget, then for one of each order of tiles that is below the floor.
    """
    memory, key = plans.lasting, _floor_key(plans, config)
    claim = None if memory is None or _knows_floor(plans, config) else memory.store.claim(key)
    if memory is None or claim is None:
        return
    try:
        with plans.preparing():
            floor_bytes = _floor_bytes(plans, config, 1)
            if floor_bytes is not None:
                plans.plan(replace(config, memory_budget=floor_bytes))
            for budget_bytes in plans.smaller_budgets(config):
                if budget_bytes < (floor_bytes or 0):
                    _floor_bytes(plans, config, budget_bytes)
        memory.store.write(key, floor_bytes)
    except MemoError as error:
        log.info("memo: the smallest plans are not remembered: %s", error)
    finally:
        claim.release()


def _floor_bytes(plans: "ModelPlans", config: MemoConfig, budget_bytes: int) -> int | None:
    try:
        plans.plan(replace(config, memory_budget=budget_bytes))
    except Infeasible as error:
        return error.floor_bytes
    return None


def awaited(plans: "ModelPlans", options: MemoConfig, find: Callable[[MemoConfig], object]) -> None:
    """Wait while another process may be making the step that ``find`` does not find."""
    memory = plans.lasting
    if memory is None or plans.is_traced or find(options) is not None:
        return
    store, claimed, key = memory.store, plans.claim_key(options, TILES), plans.record_key(options)
    seen = store.variants(key)
    if store.is_claimed(claimed) and plans.waited_s < WAIT_S:
        _want(plans, options)
        plans.say("waiting for a memo plan that prepares this", 0)
    while store.is_claimed(claimed) and plans.waited_s < WAIT_S:
        time.sleep(POLL_S)
        plans.waited_s += POLL_S
        if (now := store.variants(key)) != seen:
            seen = now
            if find(options) is not None:
                return
