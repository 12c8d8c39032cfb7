"""Where an option's value comes from, and what is said about one that cannot be used."""

import json
import typing
from types import NoneType

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
        ("CACHE", "0", False),
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
        ({"microbatches": 0}, "microbatches: expected an integer of at least 1, got 0"),
        ({"token_tiles": 2.0}, "token_tiles: expected an integer, got 2.0"),
        ({"exact": "false"}, "exact: expected True or False, got 'false'"),
        ({"strict": 1}, "strict: expected True or False, got 1"),
        ({"host_store": "file:"}, "host_store: file:DIR needs a folder"),
        ({"max_plans": True}, "max_plans: expected an integer"),
        ({"copy_bytes_per_s": 0}, "copy_bytes_per_s: expected speeds above 0, got 0"),
        ({"copy_bytes_per_s": (1e9, -1)}, r"copy_bytes_per_s: expected speeds above 0, got \(1"),
        ({"copy_bytes_per_s": (1e9,)}, r"expected a number or two: \(to the host, back\), got"),
        ({"copy_bytes_per_s": "fast"}, "copy_bytes_per_s: expected a number"),
        ({"comm_bytes_per_s": 0}, "comm_bytes_per_s: expected a speed above 0, got 0"),
        ({"comm_windows": "no"}, "comm_windows: expected True or False, got 'no'"),
        ({"ranks_timeout_s": 0}, "ranks_timeout_s: expected seconds above 0, got 0"),
        ({"placement_time_limit_s": 0}, "placement_time_limit_s: expected seconds above 0"),
        ({"placement_solver": "lp"}, "placement_solver: expected one of auto, greedy"),
        ({"gradients": "kept"}, "gradients: expected one of auto, fresh, accumulated, got 'kept'"),
        ({"memory_budget": "12Q"}, "memory_budget: expected bytes, or a number with KB"),
        ({"memory_budget": 12.5}, "memory_budget: expected whole bytes, got 12.5"),
        ({"memory_budget": True}, "memory_budget: expected a number or a text, got True"),
        ({"memory_budget": "120%"}, "memory_budget: expected at most 100%"),
        ({"host_budget": [1]}, r"host_budget: expected a number or a text, got \(1,\)"),
        ({"host_store": 5}, "host_store: expected a text, got 5"),
        ({"dump": 5}, "dump: expected a text, got 5"),
        ({"outside_loss": "no"}, "outside_loss: expected True or False, got 'no'"),
        ({"placement_time_limit_s": "5 s"}, "placement_time_limit_s: expected a number, got '5 s'"),
        ({"token_granule": "12.5"}, "token_granule: expected an integer, got 12.5"),
        ({"passes": 5}, "passes: expected texts, got 5"),
        ({"debug": [1]}, r"debug: expected texts, got \(1,\)"),
        ({"policy": None}, "policy: expected one of"),
        ({"inductor_options": "max_autotune"}, "inductor_options: expected a mapping of names"),
    ],
)
def test_values_that_cannot_be_used(options, message):
    with pytest.raises(ConfigError, match=message):
        resolve(options, None)


def test_a_setting_of_inductor_is_told_where_it_belongs():
    hint = r"'max_autotune'; it is a setting of Inductor: inductor_options=\{'max_autotune': True\}"
    with pytest.raises(ConfigError, match=hint):
        resolve({"max_autotune": True}, None)


def test_every_source_is_held_to_the_types(config_file, monkeypatch):
    for value in ("false", 1, None):
        config_file(json.dumps({"exact": value}))
        with pytest.raises(
            ConfigError, match=r"exact \(from .*memo.json, .*\): expected True or False"
        ):
            resolve(None, None)
        if value is not None:
            with pytest.raises(ConfigError, match="exact: expected True or False"):
                configure(exact=value)
    config_file(json.dumps({"debug": ["poison"], "copy_bytes_per_s": [2e9, 1]}))
    assert resolve(None, None).debug == ("poison",)
    assert resolve(None, None).copy_speeds() == (2e9, 1)


def test_a_bad_value_names_where_it_is_from(config_file, monkeypatch, tmp_path):
    monkeypatch.setenv("MEMO_POLICY", "foo")
    with pytest.raises(ConfigError, match=r"^policy \(from MEMO_POLICY\): expected one of auto"):
        resolve(None, None)
    assert resolve({"policy": "save"}, None).policy == "save"  # the call decides
    monkeypatch.delenv("MEMO_POLICY")
    monkeypatch.setenv("MEMO_TOKEN_TILES", "few")
    with pytest.raises(ConfigError, match=r"^token_tiles \(from MEMO_TOKEN_TILES\): expected"):
        resolve(None, None)
    monkeypatch.delenv("MEMO_TOKEN_TILES")
    config_file(json.dumps({"memory_budget": "12Q"}))
    named = (
        rf"^memory_budget \(from {tmp_path}/memo.json, which MEMO_CONFIG names\): expected bytes"
    )
    with pytest.raises(ConfigError, match=named):
        resolve(None, None)
    with pytest.raises(ConfigError, match=r"^memory_budget: expected bytes.*'13Q'"):
        resolve({"memory_budget": "13Q"}, None)


@pytest.mark.parametrize("source", ["call", "configure", "environment", "file"])
def test_numbers_may_be_texts_everywhere(source, config_file, monkeypatch):
    texts = {
        "memory_budget": "1e9",
        "host_budget": "0",
        "max_plans": "3",
        "token_granule": "1e2",
        "alpha": "0.5",
        "comm_bytes_per_s": "1e9",
        "copy_bytes_per_s": "2e9,1e9",
        "optimizer_state_bytes_per_parameter": "8",
    }
    if source == "configure":
        configure(**texts)
    if source == "file":
        config_file(json.dumps(texts))
    for name, text in texts.items() if source == "environment" else ():
        monkeypatch.setenv(f"MEMO_{name.upper()}", text)
    options = resolve(texts if source == "call" else None, None)
    assert options.budget_bytes(None) == 10**9
    assert options.declared_host_budget_bytes(None) == 0
    assert (options.max_plans, options.token_granule, options.alpha) == (3, 100, 0.5)
    assert options.comm_bytes_per_s == 1e9
    assert options.copy_speeds() == (2e9, 1e9)
    assert options.optimizer_state_bytes_per_parameter == 8


def test_a_budget_is_the_memory_budget():
    with pytest.raises(ConfigError, match="unknown option 'budget'; did you mean 'memory_budget'"):
        resolve({"budget": "1GiB"}, None)


def test_options_that_change_nothing_are_named():
    assert MemoConfig().idle_options() == []
    assert MemoConfig(policy="memo", alpha=0.5).idle_options() == []
    (note,) = MemoConfig(alpha=0.5).idle_options()
    assert note.startswith("alpha=0.5 changes nothing under policy 'auto': only memo and kwai")
    beside_aten = MemoConfig(lowering="aten", inductor_options={"max_autotune": True})
    (note,) = beside_aten.idle_options()
    assert note == "inductor_options change nothing with lowering='aten': Inductor is not run"


def test_type_checkers_see_every_option():
    options = typing.get_type_hints(config.Options)
    assert list(options) == list(config._FIELDS)
    for name, kind in options.items():
        kinds = set(typing.get_args(kind))
        assert NoneType in kinds
        assert kinds >= {bool, int, float, str}.intersection(config._kinds_of(config._FIELDS[name]))
    hint = typing.get_type_hints(configure)["options"]
    assert typing.get_args(hint) == (config.Options,)


def test_a_path_is_as_good_as_its_text(tmp_path):
    assert resolve({"dump": tmp_path}, None).dump == str(tmp_path)


def test_unknown_variables_are_named_once_with_the_nearest(monkeypatch, caplog):
    config._log_once.cache_clear()
    for variable in ("MEMO_MEMORY_BUGDET", "MEMO_TILES", "MEMO_QQQQ", "MEMOIR"):
        monkeypatch.setenv(variable, "1")
    resolve(None, None)
    resolve(None, None)
    assert sorted(record.getMessage() for record in caplog.records) == [
        "memo: MEMO_MEMORY_BUGDET sets no option; did you mean MEMO_MEMORY_BUDGET?",
        "memo: MEMO_QQQQ sets no option",
        "memo: MEMO_TILES sets no option; did you mean MEMO_TOKEN_TILES?",
    ]
    assert "MEMO_QQQQ sets no option" in config.misspelt_variables()  # for the report


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
    assert MemoConfig(memory_budget=12e6).budget_bytes(None) == 12_000_000
    assert MemoConfig(memory_budget="12M").budget_bytes(None) == 12_000_000


def test_what_configure_refuses_is_not_kept():
    with pytest.raises(ConfigError, match="max_plans"):
        configure(max_plans=0)
    configure(debug="poison")
    assert resolve(None, None).debug == ("poison",)
    configure(debug=None)
    assert resolve(None, None).debug == ()


def test_the_schedule_of_collectives():
    assert MemoConfig().collective_schedule() == "normal"
    both = MemoConfig(debug=("poison", "copies-early", "collectives-late"))
    assert (both.copy_schedule(), both.collective_schedule()) == ("early", "late")
