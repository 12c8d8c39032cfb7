"""``memo plan package.module:function``: what model code does at its fakes; what is remembered."""

import collections
import dataclasses
import importlib
import json
import logging
import os
import re
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

from memo_compile.cli.main import main
from memo_compile.costs.hardware import find_hardware
from memo_compile.offline import function_content as code_of
from memo_compile.offline.forecast import Question, forecast
from memo_compile.offline.function_content import function_content
from memo_compile.offline.shapes.degrees import Degrees
from memo_compile.offline.shapes.load import load


def plan(capsys, *arguments):
    """(exit code, stdout, stderr) of ``memo plan ARGUMENTS``."""
    with pytest.raises(SystemExit) as left:
        main(["plan", *arguments])
    out, err = capsys.readouterr()
    return left.value.code, out, err


def test_a_function_that_does_not_run_on_fakes_is_refused(capsys, tmp_path, monkeypatch):
    (tmp_path / "reads_a_value.py").write_text(
        "import torch\ndef build():\n    return torch.ones(3)[0].item(), ()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    code, out, err = plan(capsys, "reads_a_value:build")
    assert (code, out) == (2, "")
    assert "reads_a_value:build, line 3: DataDependentOutputException" in err
    assert "no values to read" in err
    assert len(err.splitlines()) == 1


def test_a_forward_that_takes_its_length_from_a_tensor_is_refused(capsys, tmp_path, monkeypatch):
    forward = "        for _ in range(self.sizes['width'].item()): x = x + 1\n        return"
    code = KEPT.replace('"width": width', '"width": torch.tensor(width)')
    (tmp_path / "reads_in_forward.py").write_text(code.replace("        return", forward))
    monkeypatch.syspath_prepend(tmp_path)
    code, out, err = plan(capsys, "reads_in_forward:build", "--seq", "128", "--hardware", "a100")
    assert (code, out) == (2, "")
    assert "does not trace into one graph" in err


RATED = """
import torch
class Layer(torch.nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.register_buffer("steps", torch.linspace(0, 1, 64))
        torch.nn.init.trunc_normal_(self.up.weight, std=0.02)
        self.drop = torch.nn.Dropout(rate)
    def forward(self, x):
        hidden = torch.nn.functional.gelu(self.up(x * self.steps))
        return x + self.drop(self.down(hidden)) * self.scale
def build(seq, dtype):
    rates = [rate for part in torch.linspace(0, 0.2, 4).split(2) for rate in part.tolist()]
    model = torch.nn.Sequential(*map(Layer, rates))
    MAKE
    return model, (torch.randn(seq, 64, dtype=dtype),)
"""
"""Layers as model code makes them: from rates, truncated normals, and in another dtype at last."""


def test_a_function_may_cast_draw_and_read_a_linspace(capsys, tmp_path, monkeypatch):
    """And the plan is that of a model that is made in its dtype."""
    torch_default = "torch.set_default_dtype(torch.float32)"
    early = RATED.replace("    rates =", "    torch.set_default_dtype(dtype)\n    rates =")
    (tmp_path / "cast_late.py").write_text(RATED.replace("MAKE", "model.to(dtype)"))
    (tmp_path / "made_in_it.py").write_text(early.replace("MAKE", torch_default))
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for name in ("cast_late", "made_in_it"):
        arguments = (f"{name}:build", "--seq", "4096", "--hardware", "a100", "--json")
        code, out, err = plan(capsys, *arguments, "--budget", "1GiB")
        assert (code, err) == (0, "")
        found.append(json.loads(out))
    late, early = found
    assert late["fixed_bytes"] == early["fixed_bytes"]
    assert late["fixed_bytes"]["parameters"] == 2 * 4 * (2 * 64 * 256 + 256 + 64 + 1)
    assert (late["peak_bytes"], late["step_s"]) == (early["peak_bytes"], early["step_s"])


COPIED = """
import copy, torch
from torch import nn
def layers(dtype):
    norm, layer = nn.BatchNorm1d(64), nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)
    norms = nn.ModuleList([norm, copy.deepcopy(norm)])
    return nn.ModuleDict({"norms": norms, "layers": nn.TransformerEncoder(layer, 2)})
def cast(dtype):
    return layers(dtype).to(dtype), ()
"""


def test_a_function_may_copy_modules_before_it_casts(tmp_path, monkeypatch):
    """torch's TransformerEncoder copies its layer; a copy of a mode would be another mode."""
    (tmp_path / "copied_layers.py").write_text(COPIED)
    monkeypatch.syspath_prepend(tmp_path)
    sizes = {"seq": None, "batch": 1, "dtype": torch.bfloat16, "degrees": Degrees()}
    made = load("copied_layers:cast", **sizes).model
    assert isinstance(made, torch.nn.Module)
    assert {own.dtype for own in made.parameters()} == {torch.bfloat16}
    assert len({own.fake_mode for own in (*made.parameters(), *made.buffers())}) == 1


KEPT = """
import torch
FACTOR = 2
class Rows(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, width), torch.nn.Linear(width, 64)
        self.sizes, self.act = {"width": width}, lambda x, by=FACTOR: torch.relu(x) * by
    def forward(self, x):
        return self.down(self.act(self.up(x)))
def build(seq):
    return Rows(256), (torch.randn(seq, 64),)
"""


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A module with a function, and what stands for what it makes, after a change."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "kept_rows.py").write_text(KEPT)
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module("kept_rows")
    monkeypatch.setenv("MEMO_LOWERING", "aten")

    def content(change=None, seq=128):
        name = "kept_rows:build"
        made = load(name, seq=seq, batch=1, dtype=torch.float32, degrees=Degrees())
        if change is not None:
            change(made.model)
        return function_content(name, made)

    yield folder, module, content
    sys.modules.pop("kept_rows")


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.sizes.update(width=257),
        lambda model: model.eval(),
        lambda model: setattr(model, "other", model.up),
        lambda model: setattr(model, "act", lambda x, by=3: torch.relu(x) * by),
        lambda model: model.down.requires_grad_(False),
        lambda model: model.register_forward_hook(lambda *_: None),
        lambda model: setattr(model.down, "weight", model.up.weight),
    ],
    ids=["a value", "a mode", "a module", "a default", "a parameter", "a hook", "a tie"],
)
def test_what_a_model_holds_stands_for_it(kept, change):
    _, _, content = kept
    before = content()
    assert before == content()
    assert before != content(change)


class Slot:
    __slots__ = "width"


class Private:
    __slots__ = ("__width",)

    def __init__(self, width):
        self.__width = width


class Number(int):
    pass


class Named(dict):
    pass


def with_attribute(value, width):
    value.width = width
    return value


@pytest.mark.parametrize(
    "made",
    [
        lambda width: with_attribute(Slot(), width),
        Private,
        Number,
        lambda width: with_attribute(Named(), width),
        lambda width: with_attribute(lambda: None, width),
        lambda width: {"width": width}.get,
        lambda width: collections.defaultdict(lambda: width),
        lambda width: (lambda: 2) if width == 2 else (lambda: 3),
    ],
    ids="slot private int mapping function method default lambda".split(),
)
def test_what_a_value_holds_is_found(kept, made):
    _, _, content = kept
    found = [content(lambda model, w=w: setattr(model, "own", made(w))) for w in (2, 2, 3)]
    assert found[0] == found[1] != found[2]
    assert found[2] is not None


def test_data_that_was_read_stands_for_a_function(tmp_path, monkeypatch):
    """On import, and in the call; what the function writes does not."""
    read = "import json\nfrom pathlib import Path\n"
    read += 'WIDTHS = json.loads(Path("widths.json").read_text())\n'
    call = '    Path("log").write_text(Path("sizes.txt").read_text())\n    return Rows'
    (tmp_path / "reads_data.py").write_text(read + KEPT.replace("    return Rows", call))
    (tmp_path / "widths.json").write_text("[1]")
    (tmp_path / "sizes.txt").write_text("1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def content():
        name = "reads_data:build"
        made = load(name, seq=128, batch=1, dtype=torch.float32, degrees=Degrees())
        return function_content(name, made)

    before = content()
    assert before == content()
    (tmp_path / "widths.json").write_text("[12]")
    after = content()
    assert after != before
    (tmp_path / "sizes.txt").write_text("12")
    assert content() != after


def test_packages_that_a_trace_loads_do_not_stand_for_a_function(kept, monkeypatch):
    """The second length of a search is found by a process that traced no first one."""
    _, _, content = kept
    before = content()
    other = types.ModuleType("loaded_by_a_trace")
    other.__file__ = str(Path(pytest.__file__).with_name("__main__.py"))
    monkeypatch.setitem(sys.modules, other.__name__, other)
    assert content() == before


def test_code_beside_the_package_of_a_function_stands_for_it(tmp_path, monkeypatch):
    folder = tmp_path / "some_package" / "models"
    folder.mkdir(parents=True)
    (folder / "rows.py").write_text(KEPT)
    (tmp_path / "some_package" / "layers.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    name, found = "some_package.models.rows:build", []
    for _ in range(2):
        made = load(name, seq=128, batch=1, dtype=torch.float32, degrees=Degrees())
        found.append(function_content(name, made))
        os.utime(tmp_path / "some_package" / "layers.py", ns=(1, 1))
    assert found[0] != found[1]


def test_code_globals_and_environment_stand_for_a_function(kept, monkeypatch):
    folder, module, content = kept
    found = [content(), content(seq=256)]
    monkeypatch.setattr(module, "FACTOR", 2.5)
    found.append(content())
    monkeypatch.setenv("MY_FLAG", "1")
    found.append(content())
    os.utime(folder / "kept_rows.py", ns=(1, 1))
    found.append(content())
    (folder / "deeper").mkdir()
    (folder / "deeper" / "helper.py").write_text("")  # a forward may import it
    found.append(content())
    assert len({json.dumps(own) for own in found}) == len(found)


@pytest.mark.parametrize("named", [logging.getLogger("own"), re.compile("own")])
def test_what_is_known_by_its_name_may_be_held(kept, named):
    assert kept[2](lambda model: setattr(model, "named", named)) is not None


def test_an_environment_beside_a_function_is_none_of_its_code(kept, monkeypatch):
    """A project's root has one, with many files; with as many of its own nothing is remembered."""
    monkeypatch.setattr(code_of, "MAX_FILES", 20)
    folder, _, content = kept
    before = content()
    for place in (".venv/lib", "venv/lib/site-packages"):
        (folder / place).mkdir(parents=True)
        for number in range(30):
            (folder / place / f"m{number}.py").write_text("")
    assert before is not None
    assert content() == before
    for number in range(30):
        (folder / f"m{number}.py").write_text("")
    assert content() is None


@pytest.mark.parametrize(
    "unknown",
    [threading.Lock(), iter(()), object(), 10**5000],
    ids=["lock", "iterator", "object", "digits"],
)
def test_nothing_stands_for_a_model_that_holds_what_cannot_be_told(kept, unknown):
    assert kept[2](lambda model: setattr(model, "unknown", unknown)) is None


def test_steps_of_a_function_are_remembered(kept, store, traces):
    """Its plans are those without memory, for another budget too; with other code it is traced."""
    folder, _, _ = kept
    asked = Question(model="kept_rows:build", hardware=find_hardware("a100"), seq=4096)
    without = forecast(dataclasses.replace(asked, remembers=False))
    assert not list(store.folder.glob("*.json"))
    first = forecast(asked)
    assert traces
    traces.clear()
    again = forecast(dataclasses.replace(asked, budget=first.peak_bytes))
    assert not traces
    for other in (first, again):
        assert (other.peak_bytes, other.step_s) == (without.peak_bytes, without.step_s)
    os.utime(folder / "kept_rows.py", ns=(1, 1))
    forecast(asked)
    assert traces
