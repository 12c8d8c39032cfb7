"""Where a dump goes: a folder for each rank, and nowhere when the folder cannot be written."""

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import memo_compile
from memo_compile.backends import entry
from memo_compile.cli.main import main
from memo_compile.config import MemoConfig
from memo_compile.passes.order import PASSES
from memo_compile.reporting import state

pytestmark = pytest.mark.usefixtures("fresh_report")


def step(steps: int = 1, **options: object) -> nn.Module:
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
    compiled = torch.compile(
        model, backend="memo", options={"lowering": "aten", "strict": True, **options}
    )
    for _ in range(steps):
        compiled(torch.ones(512, 64)).sum().backward()
    return model


def test_one_process_dumps_where_it_was_told(tmp_path):
    config = entry._with_own_dump(MemoConfig(dump=str(tmp_path / "new" / "folder")))
    assert config.dump == str(tmp_path / "new" / "folder")


@pytest.mark.parametrize(("ranks", "folders"), [(1, ["."]), (2, ["rank0", "rank1"])])
def test_each_of_several_ranks_has_a_folder_of_its_own(tmp_path, monkeypatch, ranks, folders):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    found = []
    for rank in range(ranks):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        found.append(entry._with_own_dump(MemoConfig(dump=str(tmp_path))).dump)
    assert found == [str(tmp_path / folder) for folder in folders]
    assert all(Path(folder).is_dir() for folder in found)


def test_a_folder_that_cannot_be_written_costs_no_plan(tmp_path):
    (tmp_path / "file").write_text("in the way")
    step(dump=str(tmp_path / "file" / "folder"))
    report = memo_compile.report()
    assert report.active
    (note,) = report.notes
    assert note.startswith(f"nothing is dumped: {tmp_path / 'file' / 'folder'} cannot be written: ")


@pytest.mark.parametrize(
    "options",
    [{}, {"policy": "full-offload"}, {"policy": "full-recompute", "memory_budget": "1GiB"}],
    ids=["save", "offload", "recompute"],
)
def test_a_fresh_dump_is_replayed_to_the_same_plan(tmp_path, capsys, options):
    """The chosen point of the frontier, if any, is the plan."""
    step(dump=str(tmp_path), **options)
    (folder,) = tmp_path.iterdir()
    with pytest.raises(SystemExit) as left:
        main(["replay", str(folder)])
    assert capsys.readouterr().out.splitlines()[-1] == "the plan equals plan.json"
    assert left.value.code == 0
    (plan,) = memo_compile.report().plans
    assert all(point.peak_bytes == plan.peak_bytes for point in plan.frontier if point.chosen)
    chosen = {
        (point.layers_to_host > 0, point.layers_recomputed > 0)
        for point in plan.frontier
        if point.chosen
    }
    policy = options.get("policy")
    moves = {(policy == "full-offload", policy == "full-recompute")} if policy else set()
    assert chosen == moves
    page = (folder / "report.html").read_text()
    head = page[page.index('<dl class="about">') : page.index("</dl>")]
    assert "<dt>model</dt><dd>Sequential, 0.01248 million parameters</dd>" in head
    assert "<dt>inputs</dt><dd>torch.float32 [512, 64]</dd>" in head
    assert "lowering=&#39;aten&#39;" in head
    assert "<dt>device</dt><dd>cpu: " in head


def test_after_three_steps_the_page_says_what_a_step_took(tmp_path):
    step(steps=3, dump=str(tmp_path / "three"), policy="full-recompute", memory_budget="1GiB")
    (page,) = (tmp_path / "three").rglob("report.html")
    assert "<dt>measured</dt><dd>step " in page.read_text()
    (plan,) = memo_compile.report().plans
    assert plan.measured_s > 0
    assert "measured; the last one moved" in " ".join(str(memo_compile.report()).split())
    step(steps=2, dump=str(tmp_path / "two"))
    (page,) = (tmp_path / "two").rglob("report.html")
    assert "<dt>measured</dt>" not in page.read_text()


def test_plans_of_models_that_are_gone_do_not_pile_up():
    for _ in range(2):
        step()
        torch._dynamo.reset()
        gc.collect()
    assert len(memo_compile.report().plans) == 1
    assert state.report().active


def test_the_passes_run_in_the_order_of_the_tuple(tmp_path):
    step(dump=str(tmp_path))
    (folder,) = tmp_path.iterdir()
    files = " ".join(path.name for path in sorted(folder.glob("*.before.txt")))
    found = [graph_pass.name for graph_pass in PASSES if graph_pass.name in files]
    assert sorted(found, key=files.index) == found
    assert {"merge-common-subexpressions", "accumulate-in-place"} <= set(found)
