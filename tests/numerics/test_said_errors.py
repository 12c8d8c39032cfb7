"""Errors that a user reads: a refusal in a few lines, and an error of the user's own program."""

import traceback

import pytest
import torch
from torch import nn

import memo_compile
from memo_compile.errors import Infeasible

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def layers():
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))


def compiled(model, **options):
    return torch.compile(model, backend="memo", options={"lowering": "aten", **options})


def test_a_refusal_shows_no_code_of_memo():
    with pytest.raises(Infeasible) as refused:
        compiled(layers(), memory_budget="1KiB")(torch.randn(8, 32))
    shown = "".join(traceback.format_exception(refused.value)).splitlines()
    assert len(shown) < 40
    assert sum("memo_compile" in line for line in shown) <= 3


def test_notes_of_a_refusal_go_when_the_next_try_gets_a_plan():
    model, x = layers(), torch.randn(8, 32)
    with pytest.raises(Infeasible) as refused:
        compiled(model, memory_budget="1KiB")(x)
    assert any("memo is off" in note for note in memo_compile.report().notes)
    torch._dynamo.reset()
    compiled(model, memory_budget=2 * refused.value.floor_bytes)(x).square().mean().backward()
    report = memo_compile.report()
    assert report.active
    assert not any("memo is off" in note for note in report.notes)


@pytest.mark.parametrize("options", [{}, {"memory_budget": "1GiB"}, {"strict": True}])
def test_an_error_of_the_users_program_is_torchs_own(caplog, options):
    def overwrites_what_its_backward_reads(x, weight):
        for _ in range(3):
            y = (x @ weight).exp()
            z = y * 1
            y.mul_(2.0)
            x = torch.tanh(y + z)
        return x.sum()

    weight = torch.randn(8, 8, requires_grad=True)
    with pytest.raises(Exception, match="modified by an inplace operation") as error:
        compiled(overwrites_what_its_backward_reads, **options)(torch.randn(4, 8), weight)
    assert "report" not in str(error.value).replace("reporting a bug to PyTorch", "")
    assert not [record for record in caplog.records if record.name == "memo"]
