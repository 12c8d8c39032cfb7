"""The options of memo, and the places that their values come from.

Precedence: options of the call > ``memo_compile.configure()`` > ``MEMO_*`` environment variables >
the file named by ``MEMO_CONFIG`` (JSON) > defaults. This is the only file that reads os.environ.
"""

import dataclasses
import difflib
import functools
import importlib
import json
import logging
import math
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypedDict, Unpack

from memo_compile.errors import ConfigError, nearest
from memo_compile.file_store import FileStore
from memo_compile.units import parse_size

log = logging.getLogger("memo")

POLICIES = (
    *("auto", "save", "full-recompute", "full-offload", "memo", "kwai", "lynx-heu", "lynx-opt"),
    "greedy",
)
_CHOICES = {
    "lowering": ("inductor", "aten"),
    "mode": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    "policy": POLICIES,
    "costs": ("auto", "measured", "roofline"),
    "outputs": ("auto", "held", "dropped"),
    "gradients": ("auto", "fresh", "accumulated"),
    "saved_dtype": ("same", "float8"),
    "weights": ("device", "host", "auto"),
    "placement_solver": ("auto", "greedy", "mip", "search", "cbc", "gurobi"),
}
CUDA_GRAPHS = "triton.cudagraphs"
"""Inductor's setting behind ``mode="reduce-overhead"``."""
DEBUG_FLAGS = (
    "poison",
    "copies-early",
    "copies-late",
    "copies-serial",
    "collectives-early",
    "collectives-late",
    "stalls",
)
_KEEPING = ("auto", "greedy", "save", "full-offload")
"""Policies that recompute nothing; the first two only without a budget."""
_MOVING = ("auto", "greedy", "full-offload", "memo", "kwai")
"""Policies that move activations to the host."""
_WITH_ALPHA = ("memo", "kwai")
"""Policies that ``alpha`` is for."""
ALPHAS = (0.0, 0.125, 0.25, 0.5, 1.0)
"""MEMO's fractions of the tokens (section 4.2 of the paper)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One attempt at a step, of several that are compared; users cannot set it."""

    tile_above_bytes: int = 0
    """Regions whose transients are no larger run whole; ``driver/tile_order.py`` sets it."""
    drop_above_bytes: int = 0
    """What is no larger, with its gradient, may be saved where chains run in tiles."""
    by_heads: bool = False
    """Attention runs in tiles of heads, and nothing between its projections is saved."""
    stores_float8: bool = False
    """Saved activations are stored as float8."""
    max_over_compute: float = math.inf
    """Refuse a plan slower than this many times its computation alone: other tiles are to be
    tried."""
    max_step_s: float = math.inf
    """Refuse a plan that takes this many seconds or more: other tiles are faster."""
    enough_s: float = 0.0
    """Accept a plan of at most this many seconds even so: no tiles that are left can be faster."""
    arena_percent: int = 100
    """Percent of the arena that counts under the budget: above 100 for a plan that never runs, of a
    step that has several frames at once, or of which a frame is an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoConfig:
    """The options of ``torch.compile(..., backend="memo", options={...})``."""

    memory_budget: float | str | None = None
    """Bound on the device memory of the step: bytes, ``"60GiB"`` or ``"80%"``."""
    host_budget: float | str | None = None
    """Bound on the host memory for offloaded activations; by default what the control group and
    the ranks of this host leave."""
    policy: str = "auto"
    """``auto`` decides tensor by tensor; the others do one thing everywhere, for ablation."""
    outputs: str = "auto"
    """What becomes of what the forward returns: ``held`` to the end of the step, and by its name
    until the next forward has ended; ``dropped`` before the backward, a promise; ``auto``: held
    under a budget, else dropped until they were seen to be held."""
    outside_loss: bool = False
    """Another loss is computed outside, from large results (distillation, z-loss), though the graph
    returns one: its memory counts from the first step on, instead of once a backward shows it."""
    gradients: str = "auto"
    """Whether ``.grad`` exists when a step begins: ``accumulated`` counts those that do from
    the first step on, ``fresh`` none that happens to exist while the step is compiled; ``auto``
    counts those that exist then. What is found when a step runs counts with all three."""
    early_gradients: bool = True
    """A gradient goes to autograd as soon as the step has no more use for it, instead of at the end
    of the backward, so that it is added, reduced among ranks or used up while the rest runs."""
    weights: str = "device"
    """Where the weights of repeating layers lie: on the ``host`` they are copied to the device
    before each pass of their layer; ``auto``: there where the step does not fit otherwise. Weights
    of ``memo_compile.parameters_on_host`` lie on the host in any case."""
    alpha: float | None = None
    """Policy ``memo``: the part of the tokens that is offloaded; by default MEMO's program's.
    Policy ``kwai``: the part of the saved bytes; by default all."""
    optimizer_state_bytes_per_parameter: float | None = None
    """Bytes of state that does not exist yet; by default two tensors of the parameter's dtype."""
    host_store: str = "auto"
    """``auto`` (pinned on CUDA, else ``shm``), ``shm`` or ``file:DIR`` (memory-mapped files)."""
    token_granule: int = 128
    """Splits along the tokens are multiples of this."""
    token_tiles: int | None = None
    """Run wide chains (loss head, MLP) in this many tiles of tokens, or in up to 64 where a tile
    would take above 1 GiB; 1: never; by default where the budget asks for it, and for logits that
    are large and stand out (``driver/tile_order.py``)."""
    saved_dtype: str = "same"
    """``float8``: saved activations may be stored as float8 with a scale for each 128 numbers,
    where that makes a step fit or faster: half of bf16's bytes. Lossy; the report names them."""
    exact: bool = False
    """Forbid recomputation of a slice of tokens, and tiles of tokens: their results may differ in
    the last bits."""
    costs: str = "auto"
    """``measured`` runs each region a few times, ``roofline`` computes; ``auto`` measures."""
    copy_bytes_per_s: float | tuple[float, float] | None = None
    """Slows copies down to this speed, or to one for each direction (to the host, back), for
    tests and what-if measurements."""
    comm_windows: bool = True
    """The step computes while ranks talk: a collective is waited for where its result is read.
    ``False`` waits at once, for comparisons."""
    comm_bytes_per_s: float | None = None
    """Slows the link between ranks down to this speed, for tests and what-if measurements; plans
    count with it."""
    ranks_timeout_s: float = 600.0
    """How long a rank waits for the others to say which collectives their graph begins; after that
    it raises. The slowest rank's compilation must fit. It waits as long for the plan of another
    rank; after that it plans by itself."""
    lowering: str = "inductor"
    """``inductor``, or ``aten``: slow and simple, the reference."""
    mode: str = "default"
    """torch.compile's mode. With ``reduce-overhead`` and ``max-autotune`` halves of a step become
    CUDA graphs, as with Inductor's setting ``triton.cudagraphs``."""
    dump: str | None = None
    """Folder for graphs before and after every pass, their times, problem.json and plan.json."""
    passes: tuple[str, ...] = ()
    """To find a pass that makes a fault: ``-NAME`` leaves one out, ``..N`` all behind the first N.
    Passes that a step cannot do without always run and are not counted."""
    debug: tuple[str, ...] = ()
    """``poison``: fill every range with NaN when its life ends. ``copies-early``, ``copies-late``:
    copy as soon, or as late, as the plan allows. ``copies-serial``: never beside computation.
    ``collectives-early``, ``collectives-late``: other ranks are waited for in the issue, or are
    told nothing before the wait. ``stalls``: on CUDA the host waits with the device, so that a
    plan's ``stall_s`` is measured."""
    strict: bool = False
    """Raise instead of stepping aside to plain Inductor."""
    progress: bool | None = None
    """Whether a compilation of more than five seconds says on stderr what it does; by default where
    that is a terminal."""
    max_inflight: int = 1
    """Forwards of one graph that may be live at once in the arena."""
    microbatches: int = 1
    """Of so many forwards in a row inputs and results stay until the last one's backward has ended:
    they count under a budget. ``memo_compile.pipeline`` sets it where each is a step by itself."""
    max_plans: int = 8
    """Plans kept for one graph whose shapes vary; the least recently used goes."""
    placement_solver: str = "auto"
    """How offsets are found: ``auto``, ``greedy``, ``search``, or by an integer program. That is
    solved by HiGHS (``mip``), or with the extra ``mip`` by ``cbc`` or ``gurobi``."""
    placement_time_limit_s: float = 5.0
    """Seconds that the search for offsets may take, where greed alone is not good enough; counted
    by its work, which takes so long on a quiet machine."""
    cache: bool = True
    """What was found out before, in this process or another, comes from a cache: code of regions
    and what is around a step from torch's own, what memo must know of it, captured steps and cuts,
    from memo's (``memo cache show``)."""
    inductor_options: Mapping[str, Any] = field(default_factory=dict)
    """Settings for Inductor itself, passed through."""
    attempt: Try = field(default=Try(), metadata={"internal": True})
    """No option: it is memo's own."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            _require_one_of(name, getattr(self, name), allowed)
        for option in _FIELDS.values():
            kinds = [_KINDS[kind] for kind in _kinds_of(option)]
            expected = " or ".join(kind.words for kind in kinds if kind is not _KINDS[NoneType])
            is_valid = any(kind.holds(getattr(self, option.name)) for kind in kinds)
            self._require(option.name, expected, is_valid)
        for name in ("memory_budget", "host_budget"):
            if getattr(self, name) is not None:
                parse_size(getattr(self, name), total_bytes=0, what=name)
        is_store = self.host_store in ("auto", "shm") or self.host_store.startswith("file:")
        self._require("host_store", "auto, shm or file:DIR", is_store)
        if self.host_store == "file:":
            raise ConfigError("host_store: file:DIR needs a folder, got 'file:'")
        for name in ("max_inflight", "max_plans", "microbatches", "token_granule", "token_tiles"):
            value = getattr(self, name)
            self._require(name, "an integer of at least 1", value is None or value >= 1)
        self._require("alpha", f"one of {ALPHAS}", self.alpha is None or self.alpha in ALPHAS)
        for flag in self.debug:
            _require_one_of("debug", flag, DEBUG_FLAGS)
        if self.exact and (self.token_tiles or 1) > 1:
            raise ConfigError("token_tiles: exact=True forbids tiles, which round differently")
        if self.exact and self.saved_dtype != "same":
            raise ConfigError("saved_dtype: exact=True forbids float8, which rounds")
        state_bytes = self.optimizer_state_bytes_per_parameter
        is_size = state_bytes is None or state_bytes >= 0
        self._require("optimizer_state_bytes_per_parameter", "at least 0", is_size)
        are_speeds = all(speed is None or speed > 0 for speed in self.copy_speeds())
        self._require("copy_bytes_per_s", "speeds above 0", are_speeds)
        is_speed = self.comm_bytes_per_s is None or self.comm_bytes_per_s > 0
        self._require("comm_bytes_per_s", "a speed above 0", is_speed)
        self._require("ranks_timeout_s", "seconds above 0", self.ranks_timeout_s > 0)
        self._require("placement_time_limit_s", "seconds above 0", self.placement_time_limit_s > 0)

    def _require(self, name: str, expected: str, is_valid: bool) -> None:
        if not is_valid:
            raise ConfigError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

    def budget_bytes(self, device_bytes: int | None) -> int | None:
        """Returns the budget in bytes; ``80%`` is of ``device_bytes``."""
        if self.memory_budget is None:
            return None
        return parse_size(self.memory_budget, total_bytes=device_bytes, what="memory_budget")

    def plan_bytes(self, budget_bytes: int, beside_bytes: int) -> int:
        """Returns the peak that a plan may have with ``beside_bytes`` outside of its arena.

        With an arena that counts 200 %, a budget of 10 and 2 bytes beside it: 2 + (10 - 2) / 2.
        """
        if self.attempt.arena_percent == 100:
            return budget_bytes
        arenas_bytes = max(0, budget_bytes - beside_bytes)
        return min(budget_bytes, beside_bytes + arenas_bytes * 100 // self.attempt.arena_percent)

    @property
    def recomputes(self) -> bool:
        """True where a plan may recompute something."""
        in_tiles = (self.token_tiles or 1) > 1
        return in_tiles or self.memory_budget is not None or self.policy not in _KEEPING

    @property
    def num_frames(self) -> int:
        """How many steps of one graph hold memory at once in a plan that never runs."""
        return max(1, self.attempt.arena_percent // 100)

    @property
    def moves(self) -> bool:
        """True where a plan may move something to the host."""
        return self.policy in _MOVING

    def declared_host_budget_bytes(self, total_bytes: int | None) -> int | None:
        """Returns the user's host budget in bytes; ``50%`` is of ``total_bytes``; None: none."""
        if self.host_budget is None:
            return None
        return parse_size(self.host_budget, total_bytes=total_bytes, what="host_budget")

    def copy_speeds(self) -> tuple[float | None, float | None]:
        """Returns the declared bytes/s of copies to the host, and back; None: no limit."""
        speeds = self.copy_bytes_per_s
        if speeds is None or isinstance(speeds, int | float):
            return speeds, speeds
        return speeds

    def store(self) -> FileStore | None:
        """Returns the files that earlier compilations have kept; None: they are not used."""
        return user_store() if self.cache else None

    def at_any_speed(self) -> "MemoConfig":
        """Returns the same options without bounds on seconds, for tiles that are chosen."""
        return self.trying(max_over_compute=math.inf, max_step_s=math.inf, enough_s=0.0)

    def trying(self, **changes: Any) -> "MemoConfig":
        """Returns the same options with these fields of ``attempt``."""
        return dataclasses.replace(self, attempt=dataclasses.replace(self.attempt, **changes))

    def drops_above(self) -> int | None:
        """Returns the bytes above which a value made in tiles is not saved; None: all may be."""
        return self.attempt.drop_above_bytes if (self.token_tiles or 1) > 1 else None

    def host_kind(self, device_type: str) -> str:
        """Returns the memory for offloaded activations: ``pinned``, ``shm`` or ``file:DIR``."""
        if self.host_store == "auto":
            return "pinned" if device_type == "cuda" else "shm"
        return self.host_store

    def kind_for_kernels(self, device_type: str) -> str:
        """Returns the host memory for tensors that kernels read where they lie."""
        return "pinned" if device_type == "cuda" else self.host_kind(device_type)

    def asks_for_cuda_graphs(self) -> str:
        """Returns the option that asks for CUDA graphs; "" where none does."""
        if self.mode in ("reduce-overhead", "max-autotune"):
            return f"mode={self.mode!r}"
        return CUDA_GRAPHS if self.inductor_options.get(CUDA_GRAPHS) else ""

    def idle_options(self) -> list[str]:
        """Returns a note for each option that was set and changes nothing beside the others."""
        notes = []
        if self.alpha is not None and self.policy not in _WITH_ALPHA:
            notes.append(
                f"alpha={self.alpha:g} changes nothing under policy {self.policy!r}: only "
                f"{' and '.join(_WITH_ALPHA)} have one"
            )
        if self.inductor_options and self.lowering == "aten":
            notes.append(
                "inductor_options change nothing with lowering='aten': Inductor is not run"
            )
        return notes

    def host_is_device(self, device_type: str) -> bool:
        """True on a CPU that does not copy to files: a copy takes the very memory that it frees."""
        return device_type == "cpu" and not self.host_kind("cpu").startswith("file:")

    def collective_schedule(self) -> str:
        """Returns when collectives run: ``normal``, or one of the debugging schedules."""
        flags = (flag for flag in self.debug if flag.startswith("collectives-"))
        return next(flags, "collectives-normal").removeprefix("collectives-")

    def copy_schedule(self) -> str:
        """Returns when copies happen: ``normal``, or one of the debugging schedules."""
        flags = (flag for flag in self.debug if flag.startswith("copies-"))
        return next(flags, "copies-normal").removeprefix("copies-")


class Options(TypedDict, total=False):
    """The options of ``MemoConfig`` as type checkers see them; None: as if it was not given."""

    memory_budget: float | str | None
    host_budget: float | str | None
    policy: str | None
    outputs: str | None
    outside_loss: bool | None
    gradients: str | None
    early_gradients: bool | None
    weights: str | None
    alpha: float | None
    optimizer_state_bytes_per_parameter: float | None
    host_store: str | None
    token_granule: int | None
    token_tiles: int | None
    saved_dtype: str | None
    exact: bool | None
    costs: str | None
    copy_bytes_per_s: float | tuple[float, float] | None
    comm_windows: bool | None
    comm_bytes_per_s: float | None
    ranks_timeout_s: float | None
    lowering: str | None
    mode: str | None
    dump: str | os.PathLike[str] | None
    passes: str | Sequence[str] | None
    debug: str | Sequence[str] | None
    strict: bool | None
    progress: bool | None
    max_inflight: int | None
    microbatches: int | None
    max_plans: int | None
    placement_solver: str | None
    placement_time_limit_s: float | None
    cache: bool | None
    inductor_options: Mapping[str, Any] | None


class _Kind(NamedTuple):
    """A type of options: its words in a message, and whether a value is of it."""

    words: str
    holds: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, tuple) and all(isinstance(part, kind) for part in value)


_KINDS: Mapping[Any, _Kind] = {
    NoneType: _Kind("None", lambda value: value is None),
    bool: _Kind("True or False", lambda value: isinstance(value, bool)),
    int: _Kind("an integer", lambda value: _is_number(value) and isinstance(value, int)),
    float: _Kind("a number", _is_number),
    str: _Kind("a text", lambda value: isinstance(value, str)),
    tuple[str, ...]: _Kind("texts", lambda value: _is_list(value, str)),
    tuple[float, float]: _Kind(
        "two: (to the host, back)",
        lambda value: isinstance(value, tuple) and len(value) == 2 and all(map(_is_number, value)),
    ),
    Mapping[str, Any]: _Kind(
        "a mapping of names", lambda value: isinstance(value, Mapping) and _is_list((*value,), str)
    ),
}
"""Type in an option's annotation -> the values that are accepted, from any source."""


def _kinds_of(option: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """Returns the types that an option may have."""
    is_union = isinstance(option.type, UnionType)
    return typing.get_args(option.type) if is_union else (option.type,)


_FIELDS = {
    option.name: option for option in dataclasses.fields(MemoConfig) if option.name != "attempt"
}
_VARIABLES = ("MEMO_CONFIG", *(f"MEMO_{name.upper()}" for name in _FIELDS))
_LISTS = ("debug", "passes")
"""Options that may be given as one text, with commas."""
_configured: dict[str, Any] = {}


def configure(**options: Unpack[Options]) -> None:
    """Sets defaults for every later compilation in this process; ``None`` resets an option.

    Raises ConfigError: an option is unknown or its value cannot be used.
    """
    values = {**_configured, **_checked(options, "configure()")}
    values = {name: value for name, value in values.items() if value is not None}
    _config_of(values, {})  # which refuses before anything is kept
    _configured.clear()
    _configured.update(values)


def resolve(options: Mapping[str, Any] | None, mode: str | None) -> MemoConfig:
    """Returns the configuration of one compilation, by the precedence in this file's head."""
    for note in misspelt_variables():
        _log_once(note)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    file = f"{os.environ.get('MEMO_CONFIG')}, which MEMO_CONFIG names"
    for origin, source_values in (
        (file, _from_file()),
        ("MEMO_{}", _from_environment()),
        ("configure()", _configured),
    ):
        values.update(source_values)
        origins.update((name, origin.replace("{}", name.upper())) for name in source_values)
    call_values = _checked(options or {}, "options") | ({} if mode is None else {"mode": mode})
    values.update(call_values)
    return _config_of(values, {name: origins[name] for name in origins if name not in call_values})


def _config_of(options: Mapping[str, Any], origins: Mapping[str, str]) -> MemoConfig:
    """Returns ``options`` as a configuration. Raises ConfigError: a value cannot be used.

    The message names where the option is from, by ``origins``: option -> variable or file, for
    those that the call itself does not give.
    """
    values = dict(options)
    for name, value in options.items():
        if name in _LISTS and isinstance(value, str):
            values[name] = tuple(part.strip() for part in value.split(",") if part.strip())
        elif isinstance(value, str):
            values[name] = _as_number(value, _kinds_of(_FIELDS[name]))
        elif isinstance(value, list):  # as JSON gives them
            values[name] = tuple(value)
        elif isinstance(value, os.PathLike):
            values[name] = os.fspath(value)
    try:
        return MemoConfig(**values)
    except ConfigError as error:
        name, _, reason = str(error).partition(":")
        if name not in origins:
            raise
        raise ConfigError(f"{name} (from {origins[name]}):{reason}") from None


def _as_number(text: str, kinds: Sequence[Any]) -> Any:
    """Returns the number that ``text`` spells, as in "128", "1e9" or "2e9,1e9".

    Returns ``text`` itself where it spells none, or where an option takes texts.
    """
    numbers = [kind for kind in kinds if kind in (int, float)]
    if str in kinds or not numbers:
        return text
    try:
        if "," in text:
            return tuple(map(float, text.split(",")))
        value = float(text)
    except ValueError:
        return text
    return int(value) if int in numbers and value.is_integer() else value


def _checked(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns ``options``. Raises ConfigError, beginning with ``where``: a name is unknown."""
    for key in options:
        if key not in _FIELDS:
            raise ConfigError(f"{where}: unknown option {key!r}{_hint(str(key), options[key])}")
    return dict(options)


def _hint(name: str, value: object) -> str:
    """Says what may have been meant by an option ``name`` that memo lacks."""
    # Imported here, where the program is wrong anyway, since options are read without torch.
    inductor = importlib.import_module("memo_compile.torch_private.inductor_api")
    if name in inductor.inductor_settings():
        return f"; it is a setting of Inductor: inductor_options={{{name!r}: {value!r}}}"
    longer = [option for option in _FIELDS if name and name.lower() in option]
    if longer:  # of "budget": memory_budget
        return f"; did you mean {longer[0]!r}?"
    return nearest(name, _FIELDS, otherwise=f"; known options: {', '.join(sorted(_FIELDS))}")


def _from_environment() -> dict[str, Any]:
    """Returns the options that variables ``MEMO_NAME`` set."""
    values = {}
    for name, option in _FIELDS.items():
        text = os.environ.get(f"MEMO_{name.upper()}")
        if text:
            values[name] = _parsed(name, _kinds_of(option), text)
    return values


def misspelt_variables() -> list[str]:
    """Returns a note for each variable ``MEMO_*`` that sets nothing, with what may be meant."""
    notes = []
    for variable in os.environ:
        if variable.startswith("MEMO_") and variable not in _VARIABLES:
            near = difflib.get_close_matches(variable, _VARIABLES, n=1, cutoff=0.75)
            hint = f"; did you mean {near[0]}?" if near else ""
            notes.append(f"{variable} sets no option{hint}")
    return notes


@functools.cache
def _log_once(note: str) -> None:
    log.warning("memo: %s", note)


_TRUTHS = {"1": True, "true": True, "0": False, "false": False}


def _parsed(name: str, kinds: Sequence[Any], text: str) -> Any:
    """Returns a variable's ``text`` as a truth or a mapping; ``_config_of`` makes other types."""
    if bool in kinds:
        if text.lower() not in _TRUTHS:
            raise ConfigError(f"MEMO_{name.upper()}: expected 1, 0, true or false, got {text!r}")
        return _TRUTHS[text.lower()]
    if Mapping[str, Any] in kinds:
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(f"MEMO_{name.upper()}: cannot use {text!r}: {error}") from error
    return text


def local_world_size() -> int:
    """Returns this job's ranks on this host (LOCAL_WORLD_SIZE), or 1. Raises ConfigError."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigError(f"LOCAL_WORLD_SIZE: expected an integer of at least 1, got {text!r}")
    return int(text)


def torch_settings() -> dict[str, str]:
    """Returns the environment variables that torch and its compilers may read."""
    prefixes = ("TORCH", "PYTORCH", "INDUCTOR", "TRITON", "ATEN_")
    return {key: os.environ[key] for key in sorted(os.environ) if key.startswith(prefixes)}


def expands_segments() -> bool:
    """True where torch's CUDA allocator was told to grow its segments, which leaves no gaps."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    settings = "".join(os.environ.get(name, "") for name in names)
    return "expandable_segments:true" in settings.replace(" ", "").lower()


def cublas_setting() -> str | None:
    """Returns the user's sizes of cuBLAS's workspaces; None: the default."""
    return os.environ.get("CUBLAS_WORKSPACE_CONFIG")


def cublas_lt_setting() -> str | None:
    """Returns the user's size of cublasLt's workspace in KiB; "0": it uses those of cuBLAS."""
    if os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") == "1":
        return "0"
    return os.environ.get("CUBLASLT_WORKSPACE_SIZE")


def cache_folder() -> Path | None:
    """``$XDG_CACHE_HOME/memo``, else ``~/.cache/memo``; None where the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base and Path(base).is_absolute():
        return Path(base) / "memo"
    try:
        return Path.home() / ".cache" / "memo"
    except RuntimeError:
        return None


def user_store() -> FileStore | None:
    """Returns the files in the user's cache; None where the user has no home."""
    folder = cache_folder()
    return None if folder is None else FileStore(folder=folder / "steps")


def _from_file() -> dict[str, Any]:
    """Returns the options in the JSON file that ``MEMO_CONFIG`` names."""
    path = os.environ.get("MEMO_CONFIG")
    if not path:
        return {}
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"MEMO_CONFIG: cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"MEMO_CONFIG: {path}: expected a JSON object of options")
    return _checked(content, f"MEMO_CONFIG {path}")


def _require_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises ConfigError: the ``value`` of option ``name`` is none of ``allowed``."""
    if value not in allowed:
        hint = nearest(str(value), allowed)
        raise ConfigError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}{hint}")
