"""The only parser and formatter of byte sizes and durations."""

import math
import re

from memo_compile.errors import ConfigError

_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_LETTERS = {unit[0]: factor for unit, factor in _DECIMAL.items()}
"""A letter alone counts as decimal: as a bound that is the smaller of what it may mean."""
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_FACTORS = {"": 1, "B": 1, **_LETTERS, **_DECIMAL, **_BINARY}
_SIZE = re.compile(r"^\s*((?:\d+(?:\.\d*)?|\.\d+)(?:[eE]\+?\d{1,2})?)\s*([A-Za-z]*)\s*$")
_PERCENT = re.compile(r"^\s*(\d+(?:\.\d*)?)\s*%\s*$")


def parse_size(text: str | float, *, total_bytes: int | None = None, what: str = "size") -> int:
    """Returns the bytes that ``text`` names: 4096, ``12e9``, ``1.5GB`` (10^9), ``1.5GiB`` (2^30).

    ``80%`` is of ``total_bytes``, the device's memory. ``what`` begins the messages. Raises
    ConfigError: not a size, negative, or a percentage where the total is unknown.
    """
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        raise ConfigError(f"{what}: expected bytes or a text like '60GiB', got {text!r}")
    if not isinstance(text, str):
        if text < 0:
            raise ConfigError(f"{what}: expected at least 0 bytes, got {text}")
        if not math.isfinite(text) or text != int(text):
            raise ConfigError(f"{what}: expected whole bytes, got {text}")
        return int(text)
    if percent := _PERCENT.match(text):
        part = float(percent.group(1))
        if total_bytes is None:
            raise ConfigError(f"{what}: {part:g}% of what? The device's memory is unknown here")
        if part > 100:
            raise ConfigError(f"{what}: expected at most 100%, got {part:g}%")
        return int(total_bytes * part / 100)
    match = _SIZE.match(text)
    factor = _FACTORS.get(match.group(2).upper()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f"{what}: expected bytes, or a number with KB, MB, GB, KiB, MiB, GiB or %, got {text!r}"
        )
    return round(float(match.group(1)) * factor) if factor > 1 else int(float(match.group(1)))


def parse_budget(text: str | float, *, total_bytes: int | None = None, what: str = "budget") -> int:
    """Returns what ``parse_size`` does. Raises ConfigError for less than a byte too."""
    budget_bytes = parse_size(text, total_bytes=total_bytes, what=what)
    if budget_bytes < 1:
        raise ConfigError(f"{what}: expected at least 1 byte, got {text}")
    return budget_bytes


def format_enough(num_bytes: int) -> str:
    """Formats ``num_bytes`` as ``format_bytes`` does, but rounds up: a bound that holds them."""
    unit_bytes = 1
    while num_bytes >= 1024 * unit_bytes and unit_bytes < _BINARY["TIB"]:
        unit_bytes *= 1024
    last_digit_bytes = unit_bytes / 100 if unit_bytes > 1 else 1
    return format_bytes(math.ceil(num_bytes / last_digit_bytes) * last_digit_bytes)


def format_bytes(num_bytes: float) -> str:
    """Formats ``num_bytes`` with a binary unit and two decimals: ``1.25 GiB``, ``17 B``."""
    value, sign = abs(float(num_bytes)), "-" if num_bytes < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{sign}{value:.0f} {unit}" if unit == "B" else f"{sign}{value:.2f} {unit}"
        value /= 1024
    return f"{sign}{value:.2f} TiB"


def format_seconds(seconds: float, digits: int = 2) -> str:
    """Formats ``seconds`` in s, ms, us or ns, with 1 to 3 digits before the point: ``12.50 ms``."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.{digits}f} {unit}"
    return f"{seconds * 1e9:.0f} ns"
