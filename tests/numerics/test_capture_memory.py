"""Captured steps from the cache: nothing is traced, and losses and gradients equal eager's."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import memo_compile
from memo_compile.backends import capture_memory, entry
from memo_compile.backends.capture_memory import CaptureCounts
from memo_compile.config import MemoConfig
from memo_compile.errors import UnsupportedGraph
from memo_compile.file_store import FileStore
from memo_compile.reporting import state
from memo_compile.step.plans import Plan
from tests.numerics.caches import flipped, rewritten, truncated
from tests.numerics.small import Pair, Stack, rows
from tests.numerics.training import INDUCTOR, in_ci, memo_compiled

MADE, RECALLED = CaptureCounts(made=1), CaptureCounts(recalled=1)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileStore:
    """Empty caches of captured steps, where a process finds them that is given ``tmp_path``."""
    made = FileStore(folder=tmp_path / "memo" / "steps")
    monkeypatch.setattr(MemoConfig, "store", lambda config: made if config.cache else None)
    entries = staticmethod(lambda: str(tmp_path / "inductor" / "aotautograd"))
    monkeypatch.setattr(AOTAutogradCache, "_get_tmp_dir", entries)
    return made


def stack() -> nn.Module:
    return Stack(hidden=16)


def trained(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module] = stack, **options: object
) -> CaptureCounts:
    """Three steps of a model and its optimizer, compiled as if for the first time."""
    counts = CaptureCounts()
    monkeypatch.setattr(capture_memory, "counts", counts)
    torch._dynamo.reset()
    torch.manual_seed(0)
    pair = Pair(make(), **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (pair.ours, pair.eager)]
    for seed in (1, 2, 3):
        pair.assert_step(rows(seed, hidden=16))
        for optimizer in optimizers:
            optimizer.step()
    assert memo_compile.report().active
    return counts


def newest_plan() -> Plan:
    plan = memo_compile.report().plans[-1]
    return replace(plan, planning_s=0.0, lowering_s=0.0, measured_s=0.0, name="")


def files(store: FileStore) -> list[Path]:
    return [known.path for known in store.stored() if known.kind == "capture"]


def torchs_files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "inductor").rglob("*") if path.is_file()]


@pytest.mark.parametrize("options", in_ci([{}, INDUCTOR, {"memory_budget": "1GiB"}], {}))
def test_a_second_compilation_traces_nothing(store, monkeypatch, options):
    assert trained(monkeypatch, **options) == MADE
    plan = newest_plan()
    assert trained(monkeypatch, **options) == RECALLED
    assert newest_plan() == plan
    assert trained(monkeypatch, **options, cache=False) == CaptureCounts()
    assert newest_plan() == plan


class Tied(nn.Module):
    """Gives its logits, a product of three dimensions, and a part of them: one is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.exit = nn.Linear(16, 16), nn.Parameter(torch.randn(8, 16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.entry(x).relu() @ self.exit.t()
        return logits.square().mean(), logits[:, -1], logits


@pytest.mark.parametrize("plain", [False, True])
def test_what_torch_stores_wrongly_is_not_stored(store, monkeypatch, tmp_path, plain):
    """Also where plain Inductor runs: torch would end the process, or read random shapes."""
    if plain:
        monkeypatch.setattr(entry, "_planned_once", Mock(side_effect=UnsupportedGraph("no")))
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(3, 5, 16)
    for _ in range(2):
        torch._dynamo.reset()
        results = memo_compiled(model, **{**INDUCTOR, "strict": not plain})(x)
        torch.testing.assert_close(results, model(x))
        results[0].backward()
    assert bool(memo_compile.report().plans) != plain
    assert not torchs_files(tmp_path)


class Frozen(Stack):
    def __init__(self) -> None:
        super().__init__(hidden=16)
        self.entry.requires_grad_(False)


class Wider(Stack):
    """The same graph but for one number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x)).pow(4).mean()


def test_another_graph_or_other_options_are_not_found(store, monkeypatch):
    assert trained(monkeypatch) == MADE
    assert trained(monkeypatch, Frozen) == MADE
    assert trained(monkeypatch, lambda: Wider(hidden=16)) == MADE
    assert trained(monkeypatch, debug="") == MADE
    assert trained(monkeypatch, Frozen) == RECALLED


@pytest.mark.full
def test_autocast_is_part_of_the_key(store, monkeypatch):
    def step() -> CaptureCounts:
        counts = CaptureCounts()
        monkeypatch.setattr(capture_memory, "counts", counts)
        torch._dynamo.reset()
        torch.manual_seed(0)
        pair = Pair(stack())
        pair.each(lambda model: model(rows(1, hidden=16)).backward())
        for ours, eager in zip(pair.ours.parameters(), pair.eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, eager.grad, rtol=0.05, atol=1e-2)
        return counts

    assert step() == MADE
    with torch.autocast("cpu", torch.bfloat16):
        assert step() == MADE
        assert step() == RECALLED
    assert step() == RECALLED


def test_a_recalled_backward_runs_twice(store, monkeypatch):
    """Autograd is told again that memo's handle may be read twice."""
    trained(monkeypatch)
    torch._dynamo.reset()
    torch.manual_seed(0)
    pair = Pair(stack())

    def twice(model: nn.Module) -> None:
        loss = model(rows(1, hidden=16))
        loss.backward(retain_graph=True)
        loss.backward()

    pair.each(twice)
    assert capture_memory.counts.recalled == 1
    pair.assert_equal()


class Checkpointed(Stack):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().features, x, use_reentrant=False)


def test_the_report_says_what_it_said_before(store, monkeypatch):
    trained(monkeypatch, lambda: Checkpointed(hidden=16))
    notes = memo_compile.report().notes
    assert any("checkpoint()" in note for note in notes)
    state.reset()
    assert trained(monkeypatch, lambda: Checkpointed(hidden=16)) == RECALLED
    assert memo_compile.report().notes == notes


@pytest.mark.parametrize("damage", in_ci([flipped, truncated, Path.unlink], flipped))
def test_damaged_files_are_not_used_and_made_anew(store, monkeypatch, tmp_path, caplog, damage):
    trained(monkeypatch)
    (path,) = files(store)
    damage(path)
    assert trained(monkeypatch) == MADE
    assert ("is not used" in caplog.text) == (damage is not Path.unlink)
    assert trained(monkeypatch) == RECALLED
    (path,) = torchs_files(tmp_path)
    damage(path)
    assert trained(monkeypatch) == MADE
    assert trained(monkeypatch) == RECALLED


def another_size(record: dict) -> None:
    record["num_results"] += 1


def no_half(record: dict) -> None:
    record["forward"] = None


@pytest.mark.parametrize("change", in_ci([another_size, no_half], another_size))
def test_a_record_that_was_changed_is_not_used(store, monkeypatch, change, caplog):
    trained(monkeypatch)
    (path,) = files(store)
    rewritten(store, path, change)
    assert trained(monkeypatch) == MADE
    assert "was remembered of a graph is not used" in caplog.text


class WithConstant(Stack):
    """The graph holds a tensor of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * torch.tensor([1.0, 2.0] * 8))


@torch.library.custom_op("memo_capture_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: 2 * grad)


class WithCustom(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(twice(x))


def test_what_cannot_be_written_is_traced_each_time(store, monkeypatch):
    counts = trained(monkeypatch, lambda: WithConstant(hidden=16))
    assert counts == CaptureCounts(refused=1)
    assert trained(monkeypatch, lambda: WithCustom(hidden=16)) == CaptureCounts()
    assert files(store) == []


CHILD = """
import pytest, torch
from tests.numerics.test_capture_memory import trained
torch.set_num_threads(1)
print(trained(pytest.MonkeyPatch()))
"""


def begun(folder: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "XDG_CACHE_HOME": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    return subprocess.Popen(
        [sys.executable, "-c", CHILD], env=environment, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.full
def test_processes_that_start_at_once_and_one_after_them(tmp_path):
    for child in [begun(tmp_path), begun(tmp_path)]:
        assert "CaptureCounts(" in child.communicate()[0]
    assert begun(tmp_path).communicate()[0].strip() == repr(RECALLED)


class _Overlapping(nn.Module):
    """Writes into two inputs that share memory: AOTAutograd traces what both are parts of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        b.add_(1)
        return self.second(torch.tanh(self.first(a)) * b)


def _parts(strides: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    base = torch.empty_strided((16, 16), strides).copy_(torch.randn(16, 16))
    first, second = (base.as_strided((6, 16), (16, 1), start) for start in (0, 32))
    return first, second


@pytest.mark.usefixtures("store")
def test_inputs_that_are_parts_of_another_whole_are_traced_anew(
    monkeypatch: pytest.MonkeyPatch,
):
    found = []
    for strides in ((16, 1), (1, 16)):
        counts = CaptureCounts()
        monkeypatch.setattr(capture_memory, "counts", counts)
        torch._dynamo.reset()
        torch.manual_seed(0)
        eager = _Overlapping()
        ours = copy.deepcopy(eager)
        compiled = torch.compile(ours, backend="memo", options={"lowering": "aten"})
        for run in (eager, compiled):
            run(*_parts(strides)).square().mean().backward()
        for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        found.append(counts.recalled)
    assert found == [0, 0]


def test_settings_that_torch_does_not_tell_apart_are_in_the_tag():
    config, gm = MemoConfig(), torch.fx.symbolic_trace(nn.Tanh())

    def tag() -> str:
        return capture_memory.tag_of(gm, [torch.ones(2)], config, ())

    plain = tag()
    assert tag() == plain
    tags = {plain}
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            tags.add(tag())
    with sdpa_kernel(SDPBackend.MATH):
        tags.add(tag())
    torch.set_default_dtype(torch.float64)
    try:
        tags.add(tag())
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(tags) == 5
