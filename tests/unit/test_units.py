import math

import pytest

from memo_compile.errors import ConfigError
from memo_compile.units import format_bytes, format_enough, format_seconds, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (0, 0),
        (7, 7),
        ("0", 0),
        ("123", 123),
        ("123 B", 123),
        ("1KB", 1000),
        ("1 KiB", 1024),
        ("2MB", 2_000_000),
        ("2MiB", 2 * 2**20),
        ("60GiB", 60 * 2**30),
        ("60gib", 60 * 2**30),
        ("1.5GiB", 3 * 2**29),
        (".5KiB", 512),
        ("3TB", 3 * 10**12),
        ("1TiB", 2**40),
        ("  8 MB ", 8_000_000),
        ("0.1KB", 100),
        ("12M", 12_000_000),
        ("1.5 g", 1_500_000_000),
        (12e6, 12_000_000),
    ],
)
def test_sizes_are_read(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "total", "num_bytes"), [("80%", 1000, 800), ("100 %", 64, 64), ("0%", 9, 0)]
)
def test_percentages_are_of_the_total(text, total, num_bytes):
    assert parse_size(text, total_bytes=total) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1 XB", "1e-9", "1,5GB", "60 GiB please", "nan", "inf", "0x10"]
)
def test_nonsense_is_refused_with_the_field_and_the_text(text):
    with pytest.raises(ConfigError, match="memory_budget: expected bytes") as caught:
        parse_size(text, what="memory_budget")
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("value", "total_bytes", "said"),
    [
        *((value, None, "expected bytes or a text") for value in (True, None, b"1GiB", [1])),
        *((value, None, "expected whole bytes, got") for value in (1.5, math.inf, math.nan)),
        (-1, None, "at least 0 bytes, got -1"),
        ("80%", None, "of what"),
        ("101%", 1000, "at most 100%, got 101%"),
    ],
)
def test_what_is_no_size_is_refused(value, total_bytes, said):
    with pytest.raises(ConfigError, match=said):
        parse_size(value, total_bytes=total_bytes)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**19, "1.50 MiB"),
        (60 * 2**30, "60.00 GiB"),
        (5 * 2**40, "5.00 TiB"),
        (5000 * 2**40, "5000.00 TiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_bytes_are_written(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize("num_bytes", [0, 1023, 1025, 12345, 2**20 - 1, 3841626, 7 * 10**9, 3**30])
def test_a_bound_that_is_written_is_enough(num_bytes):
    bound = parse_size(format_enough(num_bytes))
    assert num_bytes <= bound <= 1.01 * num_bytes


@pytest.mark.parametrize("exponent", range(10, 45))
def test_what_is_written_reads_back(exponent):
    num_bytes = 2**exponent
    assert parse_size(format_bytes(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5, "2.50 s"), (0.25, "250.00 ms"), (3e-5, "30.00 us"), (2e-8, "20 ns"), (0, "0 ns")],
)
def test_seconds_are_written(seconds, text):
    assert format_seconds(seconds) == text
