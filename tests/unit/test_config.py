"""Where an option's value comes from, and what is said about one that cannot be used."""

import json

import pytest

from memo_compile import config
from memo_compile.config import MemoConfig, configure, resolve
from memo_compile.errors import ConfigError


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in (*config._FIELDS, "config"):
        monkeypatch.delenv(f"MEMO_{name.upper()}", raising=False)
    monkeypatch.setattr(config, "_configured", {})


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    def write(text: str) -> None:
        path = tmp_path / "memo.json"
        path.write_text(text)
        monkeypatch.setenv("MEMO_CONFIG", str(path))

    return write


def test_exact_forbids_tiles():
    with pytest.raises(ConfigError, match="exact=True forbids tiles"):
        MemoConfig(exact=True, token_tiles=4)


def test_precedence(config_file, monkeypatch):
    """Call > configure() > environment > file > default, each seen by taking the next away."""
    assert resolve(None, None).max_plans == 8
    config_file(json.dumps({"max_plans": 2, "strict": True}))
    assert resolve(None, None).max_plans == 2
    monkeypatch.setenv("MEMO_MAX_PLANS", "3")
    assert resolve(None, None).max_plans == 3
    configure(max_plans=4)
    assert resolve(None, None).max_plans == 4
    assert resolve({"max_plans": 5}, None).max_plans == 5
    assert resolve({"max_plans": 5}, None).strict  # the file still decides what nobody else says
    configure(max_plans=None)
    assert resolve(None, None).max_plans == 3


def test_mode_is_the_calls():
    configure(mode="max-autotune")
    assert resolve(None, None).mode == "max-autotune"
    assert resolve(None, "reduce-overhead").mode == "reduce-overhead"


WRONG = {"memory_bugdet": "1GiB"}
SUGGESTION = "unknown option 'memory_bugdet'; did you mean 'memory_budget'"


def test_unknown_option_suggests_the_nearest(config_file):
    with pytest.raises(ConfigError, match=f"^options: {SUGGESTION}"):
        resolve(WRONG, None)
    with pytest.raises(ConfigError, match=SUGGESTION):
        configure(**WRONG)
    config_file(json.dumps(WRONG))
    with pytest.raises(ConfigError, match=f"^MEMO_CONFIG .*: {SUGGESTION}"):
        resolve(None, None)


def test_an_option_like_no_other_lists_all():
    with pytest.raises(ConfigError, match=r"known options: .*lowering.*memory_budget"):
        resolve({"qqqq": 1}, None)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("STRICT", "1", True),
        ("STRICT", "false", False),
        ("MAX_INFLIGHT", "3", 3),
        ("TOKEN_TILES", "4", 4),
        ("PLACEMENT_TIME_LIMIT_S", "2.5", 2.5),
        ("DEBUG", "poison", ("poison",)),
        ("MEMORY_BUDGET", "6GiB", "6GiB"),
        ("COPY_BYTES_PER_S", "2e9", 2e9),
        ("COPY_BYTES_PER_S", "2e9,1e9", (2e9, 1e9)),
        ("INDUCTOR_OPTIONS", '{"max_autotune": true}', {"max_autotune": True}),
    ],
)
def test_environment(monkeypatch, name, text, value):
    monkeypatch.setenv(f"MEMO_{name}", text)
    assert getattr(resolve(None, None), name.lower()) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [("STRICT", "maybe"), ("MAX_INFLIGHT", "two"), ("INDUCTOR_OPTIONS", "{"), ("LOWERING", "atem")],
)
def test_environment_that_cannot_be_used(monkeypatch, name, text):
    monkeypatch.setenv(f"MEMO_{name}", text)
    with pytest.raises(ConfigError, match=rf"(?i){name}"):
        resolve(None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lowering": "atem"}, "lowering: expected one of inductor, aten, got 'atem'.*'aten'"),
        ({"mode": "fast"}, "mode: expected one of"),
        ({"debug": "poisson"}, "debug: expected one of poison, .*, got 'poisson'"),
        ({"max_inflight": 0}, "max_inflight: expected an integer of at least 1, got 0"),
        ({"token_tiles": 2.0}, "token_tiles: expected an integer of at least 1, got 2.0"),
        ({"exact": "false"}, "exact: expected True or False, got 'false'"),
        ({"strict": 1}, "strict: expected True or False, got 1"),
        ({"host_store": "file:"}, "host_store: file:DIR needs a folder"),
        ({"max_plans": True}, "max_plans: expected an integer"),
        ({"copy_bytes_per_s": 0}, "copy_bytes_per_s: expected speeds above 0, got 0"),
        ({"copy_bytes_per_s": (1e9, -1)}, r"copy_bytes_per_s: expected speeds above 0, got \(1"),
        ({"copy_bytes_per_s": (1e9,)}, r"expected one speed, or \(to the host, back\), got"),
        ({"placement_time_limit_s": 0}, "placement_time_limit_s: expected seconds above 0"),
    ],
)
def test_values_that_cannot_be_used(options, message):
    with pytest.raises(ConfigError, match=message):
        resolve(options, None)


def test_misspelt_variables_are_named_once_with_the_nearest(monkeypatch, caplog):
    config._warn_misspelt.cache_clear()
    for variable in ("MEMO_MEMORY_BUGDET", "MEMO_TILES", "MEMO_BENCHMARK_RESULT", "MEMOIR"):
        monkeypatch.setenv(variable, "1")
    resolve(None, None)
    resolve(None, None)
    assert sorted(record.getMessage() for record in caplog.records) == [
        "memo: MEMO_MEMORY_BUGDET sets no option; did you mean MEMO_MEMORY_BUDGET?",
        "memo: MEMO_TILES sets no option; did you mean MEMO_TOKEN_TILES?",
    ]


def test_one_copy_speed_bounds_both_directions():
    assert MemoConfig().copy_speeds() == (None, None)
    assert MemoConfig(copy_bytes_per_s=1e9).copy_speeds() == (1e9, 1e9)
    assert MemoConfig(copy_bytes_per_s=(2e9, 1e9)).copy_speeds() == (2e9, 1e9)


def test_files_that_cannot_be_read(config_file, monkeypatch):
    config_file("{")
    with pytest.raises(ConfigError, match=r"MEMO_CONFIG: cannot read .*memo\.json"):
        resolve(None, None)
    config_file("[1]")
    with pytest.raises(ConfigError, match="expected a JSON object"):
        resolve(None, None)
    monkeypatch.setenv("MEMO_CONFIG", "/nowhere/memo.json")
    with pytest.raises(ConfigError, match=r"/nowhere/memo\.json"):
        resolve(None, None)


def test_budget_in_bytes():
    assert MemoConfig().budget_bytes(None) is None
    assert MemoConfig(memory_budget="2KiB").budget_bytes(None) == 2048
    assert MemoConfig(memory_budget="80%").budget_bytes(1000) == 800


def test_what_configure_refuses_is_not_kept():
    with pytest.raises(ConfigError, match="max_plans"):
        configure(max_plans=0)
    configure(debug="poison")
    assert resolve(None, None).debug == ("poison",)
    configure(debug=None)
    assert resolve(None, None).debug == ()
