"""A budget holds in the first step of a process, where nothing was run before."""

import contextlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memo_compile
from memo_compile.driver import knowledge
from memo_compile.errors import Infeasible, UnsupportedGraph
from tests.numerics.first_step import watches_of
from tests.numerics.small import Block
from tests.numerics.training import in_ci

pytestmark = pytest.mark.usefixtures("probes_once")

MOST_LEFT_BYTES = 2**20
MOST_OVER_BUDGET = 1.005
ROWS, VOCABULARY = 8192, 1024
keeps_kernels = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="oneDNN has no bfloat16 kernels for this processor, so it keeps none",
)
OPTIONS = {
    "strict": True,
    "costs": "roofline",
    "token_tiles": 4,
    "optimizer_state_bytes_per_parameter": 0,
}


def test_the_first_step_brings_no_buffers_of_the_product_library():
    """They are there when the planned forward begins, and no step adds to them."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.numerics.first_step"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["runtime", "."])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    first, second = json.loads(run.stdout)
    assert first["grown_bytes"] <= first["planned_bytes"]
    assert second["before_bytes"] - first["before_bytes"] <= MOST_LEFT_BYTES


class Narrow:
    """A model whose products are in bfloat16, and its data. Nothing else in the process multiplies
    in that type at width ``hidden``."""

    def __init__(self, hidden: int, *, autocast: bool) -> None:
        torch.manual_seed(0)
        dtype = torch.float32 if autocast else torch.bfloat16
        body = nn.Sequential(Block(hidden), Block(hidden), nn.Linear(hidden, VOCABULARY))
        self.model = body.to(dtype)
        self.x, self.y = torch.randn(ROWS, hidden, dtype=dtype), torch.randint(VOCABULARY, (ROWS,))
        self.autocast = autocast

    def loss(self) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return functional.cross_entropy(self.model(self.x), self.y)

    def compiled(self, budget: int, **options: Any) -> Any:
        torch._dynamo.reset()
        options = {**OPTIONS, "memory_budget": budget, **options}
        return torch.compile(self.loss, backend="memo", options=options)

    def floor(self, **options: Any) -> int:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
            self.compiled(1, **options)()
        error = raised.value.inner_exception
        assert isinstance(error, Infeasible)
        assert error.floor_bytes is not None
        return error.floor_bytes

    def step(self, compiled: Any) -> int:
        """The most memory of a step, with what the program holds."""
        self.model.zero_grad()
        held = sum(tensor.nbytes for tensor in (*self.model.parameters(), self.x, self.y))
        with contextlib.ExitStack() as stack:
            watches = watches_of(stack)
            compiled().backward()
        return held + watches[0].growth_bytes


@pytest.mark.full
@keeps_kernels
@pytest.mark.parametrize(
    ("lowering", "hidden", "autocast"),
    in_ci(
        [("aten", 72, False), ("aten", 88, True), ("inductor", 104, True)],
        ("aten", 88, True),
    ),
)
def test_kernels_of_narrow_products_are_there_before_the_first_step(lowering, hidden, autocast):
    training = Narrow(hidden, autocast=autocast)
    budget = training.floor(lowering=lowering)
    compiled = training.compiled(budget, lowering=lowering)
    ratios = [training.step(compiled) / budget for _ in range(2)]
    assert max(ratios) <= MOST_OVER_BUDGET, ratios
    assert not any("no plan knows of" in note for note in memo_compile.report().notes)


@pytest.mark.full
@keeps_kernels
def test_what_could_not_be_brought_before_is_named(monkeypatch):
    """The user's loss takes nothing here."""

    def refuses(lowered: Any, region: Any) -> None:
        raise UnsupportedGraph(f"region {region.name} cannot run alone: no room")

    monkeypatch.setattr(knowledge, "run_once", refuses)
    training = Narrow(120, autocast=False)
    budget = training.floor(lowering="aten")
    training.step(training.compiled(budget, lowering="aten"))
    notes = [note for note in memo_compile.report().notes if "no plan knows of" in note]
    if not notes:
        pytest.skip("this processor's library takes no memory for products of bfloat16")
    assert "cannot run alone: no room" in notes[0]
