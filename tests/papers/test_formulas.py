"""MEMO's published numbers against memo's closed forms: alpha, FLOPs, Table 4."""

import csv
import itertools
import json
from pathlib import Path

import pytest

from benchmarks import memo_tables
from benchmarks.memo_steps import (
    Rates,
    Training,
    layer_times,
    rotating_step_s,
)
from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import find_model
from memo_compile.errors import InputError
from memo_compile.papers.layer_costs import Efficiency
from memo_compile.papers.memo.alpha import compute_alpha

DATA = Path(__file__).parents[1] / "data"


def rows_of(name):
    with (DATA / name).open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("row", rows_of("memo_models.csv"), ids=lambda row: row["model"])
def test_named_shapes_are_those_of_table_2(row):
    shape = find_model(f"gpt-{row['model']}")
    found = (shape.num_layers, shape.hidden, shape.ffn, shape.num_heads, shape.vocab)
    assert found == tuple(int(row[key]) for key in ("n_layers", "h", "h_ffn", "n_head", "n_vocab"))


PUBLISHED = [
    row
    for row in rows_of("memo_strategies.csv")
    if row["system"] == "Memo" and row["status"] == "ok"
]


@pytest.mark.parametrize(
    "row", PUBLISHED, ids=lambda row: f"{row['model']}-{row['seqlen_k']}K-{row['gpus']}"
)
def test_the_optimum_is_never_below_a_published_alpha(row):
    """With what the paper states: 32 GB/s, 2 TB per 8 GPUs, and half of an A800's FLOP/s."""
    shape = find_model(f"gpt-{row['model']}")
    found = compute_alpha(
        hidden=shape.hidden,
        num_layers=shape.num_layers,
        seq=1024 * int(row["seqlen_k"]),
        tp=int(row["tp"]),
        cp=int(row["cp"]),
        pp=int(row["pp"]),
        bandwidth_bytes_per_s=32e9,
        host_bytes=250e9,
        flops_per_s=156e12,
    )
    assert found.fits_host
    assert found.value >= float(row["alpha"])
    assert found.quantised >= float(row["alpha"])


def test_mfu_of_table_3_follows_from_its_tokens_per_second():
    """In two cells of 84 the two printed numbers contradict each other by more than 1 %."""
    cells = [row for row in rows_of("memo_table3_mfu.csv") if row["status"] == "ok"]
    peak = find_hardware("a800").peak_flops_per_s
    ratios = {}
    for row in cells:
        shape = find_model(f"gpt-{row['model']}")
        flops_per_token = shape.flops_per_token(1024 * int(row["seqlen_k"]))
        mfu = float(row["tgs"]) * flops_per_token / peak
        ratios[row["model"], row["method"], row["seqlen_k"]] = 100 * mfu / float(row["mfu"])
    assert len(ratios) == 84
    off = {cell: ratio for cell, ratio in ratios.items() if abs(ratio - 1) > 0.01}
    assert off.keys() <= {("7B", "DS", "64"), ("13B", "Mega", "640")}, off


RATES = Rates(
    hardware=find_hardware("a800"),
    efficiency=Efficiency(gemm=0.6, hbm=0.5),
    copy_bytes_per_s=11e9,
)


def training(seq=128 * 1024, **changes):
    setup = {"shape": find_model("gpt-7b"), "seq": seq, "tp": 4, "cp": 2, "host_bytes": 250e9}
    return Training(**{**setup, **changes})


def test_a_step_is_the_papers_form_where_copies_hide():
    layer = {"forward_s": 2.0, "backward_s": 5.0}
    found = rotating_step_s(num_layers=32, out_s=1.5, in_s=2.0, **layer)
    assert found == 32 * 2.0 + 32 * 5.0


def test_copies_that_do_not_hide_set_the_pace_of_all_but_two_layers():
    layer = {"forward_s": 2.0, "backward_s": 5.0}
    found = rotating_step_s(num_layers=32, out_s=3.0, in_s=6.0, **layer)
    assert found == 2 * 2.0 + 30 * 3.0 + 2 * 5.0 + 30 * 6.0
    assert rotating_step_s(num_layers=2, out_s=9.0, in_s=9.0, **layer) == 14.0
    assert rotating_step_s(num_layers=1, out_s=9.0, in_s=9.0, **layer) == 7.0


def test_a_layer_moves_sixteen_units():
    times = layer_times(training(), RATES)
    unit_bytes = 2 * 4096 * 128 * 1024 / 8
    assert times.always_bytes == 2 * unit_bytes
    assert times.others_bytes == 14 * unit_bytes
    assert times.others_s < times.forward_s
    assert 2 * times.forward_s < times.backward_s < 3 * times.forward_s


def test_what_the_closed_form_does_not_cover_is_refused():
    with pytest.raises(InputError, match=r"is for GPT layers .* got llama-7b"):
        training(shape=find_model("llama-7b"))
    with pytest.raises(InputError, match="cp: expected at least 1, got 0"):
        training(cp=0)
    with pytest.raises(InputError, match="num_layers: expected at least 1, got 0"):
        rotating_step_s(num_layers=0, forward_s=1, backward_s=1, out_s=1, in_s=1)
    with pytest.raises(InputError, match="copy_bytes_per_s: expected more than 0, got nan"):
        Rates(
            hardware=find_hardware("a800"),
            efficiency=RATES.efficiency,
            copy_bytes_per_s=float("nan"),
        )


def test_table_4_is_predicted_within_three_points(tmp_path, capsys):
    cells = memo_tables.read_cells()
    counts = {row: sum(cell.row == row for cell in cells) for row in memo_tables.POLICY_OF_ROW}
    assert counts == {"full_recompute_plan": 6, "full_swap_plan": 3, "memo": 8}
    assert memo_tables.main(["--out", str(tmp_path)]) == 0
    assert "within 3" in capsys.readouterr().out
    (written,) = tmp_path.glob("memo_tables-*.json")
    body = json.loads(written.read_text())
    held_out = [cell["held_out"] for cell in body["cells"]]
    assert len(held_out) == 17
    assert max(abs(cell["error_points"]) for cell in held_out) <= 3
    assert sorted(fold["num_fitted"] for fold in body["folds"]) == [8, 9]
    for fold in body["folds"]:
        assert 0.5 < fold["gemm_efficiency"] < 0.8
        assert 10e9 <= fold["copy_bytes_per_s"] <= 12e9


def test_the_fit_finds_numbers_that_made_the_cells():
    """Cells that the planner itself made are fitted to a hundredth of a point."""
    true = (0.57, 0.33, 10.4e9)
    cells = [
        memo_tables.Cell(
            row=cell.row,
            training=cell.training,
            mfu_points=100 * memo_tables.predict(cell, true).mfu,
        )
        for cell in memo_tables.read_cells()
    ]
    found = memo_tables.fit(cells[::2])
    errors = [memo_tables.error_points(cell, found) for cell in cells]
    assert max(map(abs, errors)) < 0.1


def test_a_cell_that_is_far_off_fails_the_benchmark(tmp_path, monkeypatch, capsys):
    cells = list(memo_tables.read_cells())
    wrong = memo_tables.Cell(row="memo", training=cells[12].training, mfu_points=60.0)
    monkeypatch.setattr(memo_tables, "read_cells", lambda: [*cells[:12], wrong, *cells[13:]])
    assert memo_tables.main(["--out", str(tmp_path)]) == 1
    assert "BEYOND 3" in capsys.readouterr().out


def test_the_stated_link_contradicts_the_papers_own_measurements():
    """At 32 GB/s full offload would hide from 64K tokens on; Table 4 shows it only from 256K on."""
    crossing = {}
    for bandwidth, seq in itertools.product((11e9, 32e9), (64, 128, 256)):
        rates = Rates(
            hardware=RATES.hardware, efficiency=RATES.efficiency, copy_bytes_per_s=bandwidth
        )
        setup = training(1024 * seq)
        layer = layer_times(setup, rates)
        copy_s = (layer.always_bytes + layer.others_bytes) / bandwidth
        crossing[bandwidth, seq] = copy_s <= layer.forward_s
    assert [crossing[32e9, seq] for seq in (64, 128, 256)] == [True, True, True]
    assert [crossing[11e9, seq] for seq in (64, 128, 256)] == [False, False, True]
