"""``memo plan package.module:function``: what model code does at its fakes."""

import json

import pytest
import torch

from memo_compile.cli.main import main
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


@pytest.mark.full
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
