"""What ``memo plan`` remembers: the same plans as without, and nothing damaged or foreign."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from memo_compile.cli.main import main
from memo_compile.config import resolve, user_store
from memo_compile.costs import models
from memo_compile.costs.hardware import find_hardware
from memo_compile.file_store import FileStore
from memo_compile.offline import forecast as forecasting
from memo_compile.offline import plan_offline, recorded_model
from memo_compile.offline.forecast import Question, forecast
from memo_compile.offline.offline_step import offline_config
from memo_compile.offline.recorded_model import RecordedModel
from memo_compile.offline.shapes.degrees import Degrees
from memo_compile.offline.shapes.load import load
from memo_compile.offline.step_record import StepRecord, Threshold
from memo_compile.passes.runner import graph_text
from memo_compile.step.serialise import plain, restore, to_json
from memo_compile.torch_private import inductor_api
from tests.commands.tiny import CPU_BUILD, TINY

SHAPE = dataclasses.replace(TINY, name="tiny-remembered")
ASKED = Question(model=SHAPE.name, hardware=find_hardware("h200"), seq=1024)
RECOMPUTES = {"policy": "full-recompute"}
KEEPS = {"policy": "save"}
OFFLOADS = {"policy": "full-offload"}
BUDGETED = {"policy": "greedy", "budget": "206MiB"}


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch):
    monkeypatch.setitem(models.MODELS, SHAPE.name, SHAPE)
    monkeypatch.setenv("MEMO_LOWERING", "aten")


def answer(**changes):
    """All that is answered, as text, but for how long it took."""
    found = forecast(dataclasses.replace(ASKED, **changes))
    plan = dataclasses.replace(found.step.plan, planning_s=0.0, lowering_s=0.0)
    step = found.step
    facts = (found.name, found.peak_bytes, found.tokens_per_s, found.mfu, found.notes, step.exact)
    return to_json(step.problem), to_json(plan), to_json(step.costs), facts


def records(store):
    return sorted(store.folder.glob("*.json"), key=lambda path: path.stat().st_size)


_kept: dict[str, bytes] = {}
_whole: list[object] = []


@pytest.fixture
def kept(store):
    """The answer where all is kept, which the store remembers: planned once for all tests."""
    if not _whole:
        _whole.append(answer(**KEEPS))
        _kept.update({path.name: path.read_bytes() for path in records(store)})
    store.folder.mkdir(exist_ok=True)
    for name, content in _kept.items():
        (store.folder / name).write_bytes(content)
    return _whole[0]


def test_answers_are_the_same_with_and_without_memory(store, traces):
    questions = (OFFLOADS, BUDGETED)
    without = [answer(**question, remembers=False) for question in questions]
    assert not records(store)
    assert '"offload"' in without[0][0]
    assert [answer(**question) for question in questions] == without
    traces.clear()
    assert [answer(**question) for question in questions] == without
    assert not traces


def model_asked():
    names = ("model", "seq", "batch", "dtype", "degrees", "hardware")
    return RecordedModel(**{name: getattr(ASKED, name) for name in names})


def test_what_takes_seconds_is_said(store):
    asked = dataclasses.replace(ASKED, **KEEPS)
    first, second = [], []
    forecast(asked, lambda *said: first.append(said))
    forecast(asked, lambda *said: second.append(said))
    assert first == [("tracing the model",), ("lowering, whole",), ("planning, whole",)]
    assert second == [("planning, whole",)]


@pytest.mark.full
@pytest.mark.parametrize(
    "damaged",
    [
        lambda text: text.replace('"offload', '"upload', 1).replace("1", "2", 1),
        *(
            pytest.param(other, marks=pytest.mark.full)
            for other in (
                lambda text: text[: len(text) // 2],
                lambda text: "[" * 100_000,
                lambda text: "",
                lambda text: "[]\n[]",
            )
        ),
    ],
)
def test_a_damaged_file_is_ignored_and_said(store, kept, caplog, damaged):
    for path in records(store):
        path.write_text(damaged(path.read_text()))
    assert answer(**KEEPS) == kept
    assert "is not used, its content is made anew" in caplog.text
    caplog.clear()
    assert answer(**KEEPS) == kept  # it was written again
    assert not caplog.text


@pytest.mark.full
def test_a_file_of_another_question_under_this_name_is_ignored(store, caplog):
    answer(**KEEPS, batch=2)
    foreign = records(store)[-1].read_text()
    whole = answer(**KEEPS)
    for path in records(store):
        path.write_text(foreign)
    assert answer(**KEEPS) == whole
    assert "was written for something else" in caplog.text


def test_what_is_no_step_is_ignored_though_its_digest_is_right(kept, caplog, monkeypatch):
    read = FileStore.read

    def other(self, key):
        for body in read(self, key):
            yield {**body, "token_granule": "7"} if "token_granule" in body else body

    with monkeypatch.context() as patched:
        patched.setattr(FileStore, "read", other)
        assert answer(**KEEPS) == kept
    assert "what was recorded of a step is not used" in caplog.text


@pytest.mark.full
def test_a_region_that_is_not_remembered_is_made(store, traces):
    whole = answer(**RECOMPUTES)
    assert '"recompute"' in whole[0]
    read = {path: json.loads(path.read_text().split("\n")[1]) for path in records(store)}
    (path, record), *_ = (
        (path, body)
        for path, body in read.items()
        if isinstance(body, dict) and body.get("regions")
    )
    assert plain(restore(record, StepRecord, "step")) == record

    def forgetful(self, key):
        for found in read(self, key):
            yield {**found, "regions": []} if "regions" in found else found

    read = FileStore.read
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FileStore, "read", forgetful)
        traces.clear()
        assert answer(**RECOMPUTES) == whole
    assert traces
    again = json.loads(path.read_text().split("\n")[1])
    assert all(region in again["regions"] for region in record["regions"])


def test_what_stands_for_a_model(tmp_path):
    config = tmp_path / "config.json"
    config.write_text("{}")

    def stands(model):
        return dataclasses.replace(model_asked(), model=model)._content

    shape, file = stands(SHAPE.name), stands(str(config))
    assert shape["model"]["hidden"] == SHAPE.hidden
    config.write_text("{ }")
    assert stands(str(config))["model"] != file["model"]
    assert stands(str(tmp_path / "other.json")) is None  # it is not there
    assert stands("models:small") is None  # a function's code may change unseen


class TracedError(Exception):
    """A model would be traced now."""


def test_what_a_record_depends_on_is_in_its_name(kept, monkeypatch):
    def refuse(*_, **__):
        raise TracedError

    monkeypatch.setattr(plan_offline, "tracing", refuse)
    assert answer(**KEEPS) == kept
    for change in (
        {"seq": 512},
        {"hardware": find_hardware("a100")},
    ):
        with pytest.raises(TracedError):
            answer(**KEEPS, **change)
    monkeypatch.setattr(recorded_model, "code_version", lambda: "another memo")
    with pytest.raises(TracedError):
        answer(**KEEPS)


def test_a_bound_decides_as_another_where_it_divides_the_sizes_alike():
    bound = Threshold(bound_bytes=5, sizes=(0, 3, 8))
    assert [other for other in range(10) if bound.decides_as(other)] == [3, 4, 5, 6, 7]
    everything = Threshold(bound_bytes=0, sizes=(0, 3, 8))  # no bound: all sizes count
    assert [other for other in range(10) if everything.decides_as(other)] == [0]


def test_the_store_drops_what_was_not_used_for_longest(tmp_path):
    small = FileStore(folder=tmp_path, max_bytes=760)
    for number in range(3):
        small.write({"number": number}, "x" * 100)
        assert list(small.read({"number": 0})) == ["x" * 100]
    small.write({"number": 3}, "y" * 100)
    kept = [number for number in range(4) if list(small.read({"number": number}))]
    assert kept == [0, 3]


def test_other_tries_are_cut_from_the_joint_graph_that_was_traced_first(monkeypatch):
    """And are what they were if each had been traced by itself."""
    seen, compiled = [], inductor_api.compile_fx

    def counted(*args, **kwargs):
        seen.append(1)
        return compiled(*args, **kwargs)

    monkeypatch.setattr(inductor_api, "compile_fx", counted)
    config = offline_config(resolve({"memory_budget": 2**30}, None), ASKED.hardware)
    whole = dataclasses.replace(config, token_tiles=1)
    in_tiles = dataclasses.replace(config, token_tiles=8).trying(drop_above_bytes=2**40)
    first, second = lowered_in((whole, in_tiles))
    assert len(seen) == 1
    (alone,) = lowered_in((in_tiles,))
    assert second == alone
    assert first != second


def lowered_in(tries):
    """Of each of ``tries`` the graphs and the step, as text, of one traced model."""
    loaded = load(SHAPE.name, seq=1024, batch=1, dtype=torch.bfloat16, degrees=Degrees())
    found = []
    with plan_offline.tracing(loaded.model, loaded.args, {}, hardware=ASKED.hardware) as traced:
        for options in tries:
            captured = traced.captured(options)
            known = traced.lowered(options).lowered
            halves = graph_text(captured.forward), graph_text(captured.backward)
            found.append((*halves, captured.units.structure, to_json(known.problem), known.whole))
    return found


def test_a_remembered_plan_needs_no_torch(tmp_path, monkeypatch, capsys):
    """Planned here first, then asked for in a process of its own."""
    asked = [SHAPE.name, *"--policy save --seq 1024 --json".split()]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(forecasting, "user_store", user_store)
    with pytest.raises(SystemExit):
        main(["plan", *asked])
    planned = capsys.readouterr().out
    assert list(tmp_path.rglob("*.json"))
    program = (
        "import sys; from memo_compile import gpus; real = gpus.version_of; "
        f"gpus.version_of = lambda of: {CPU_BUILD!r} if of == 'torch' else real(of); "
        "from memo_compile.costs import models; "
        f"models.MODELS[{SHAPE.name!r}] = models.ModelShape(**{dataclasses.asdict(SHAPE)!r}); "
        "from memo_compile.cli.plan_command import plan_command; import typer; "
        "app = typer.Typer(); app.command()(plan_command); "
        f"app({asked!r}, standalone_mode=False); "
        "print([name for name in ('torch', 'numba') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{planned}[]\n"


def test_a_store_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    store = FileStore(folder=tmp_path / "file" / "steps")
    store.write({"a": 1}, 2)
    assert list(store.read({"a": 1})) == []
