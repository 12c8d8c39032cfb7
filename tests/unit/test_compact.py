"""Golden texts are short enough to read."""

from tests.conftest import GOLDEN
from tests.steps.compact import COLUMNS, compact


def test_nodes_are_written_as_python_would():
    torchs = (
        "%in_0 : [num_users=2] = placeholder[target=in_0]  # torch.float32[8, 16]\n"
        "%tanh : [num_users=1] = call_function[target=torch.ops.aten.tanh.default]"
        "(args = (%in_0,), kwargs = {})  # torch.float32[8, 16]\n"
        "%full : [num_users=1] = call_function[target=torch.ops.aten.full.default]"
        "(args = ([], 0), kwargs = {dtype: torch.float32, pin_memory: False})\n"
        "return (tanh, full)"
    )
    assert compact(torchs) == (
        "%in_0 = placeholder  # float32[8, 16]\n"
        "%tanh = aten.tanh.default(%in_0)  # float32[8, 16]\n"
        "%full = aten.full.default([], 0, dtype=float32, pin_memory=False)\n"
        "return (tanh, full)"
    )


def test_long_lines_are_continued():
    text = compact(f"  layer@0  {', '.join(f'mm_{number}' for number in range(60))}")
    assert all(len(line) <= COLUMNS for line in text.splitlines())
    assert [line.startswith("    mm_") for line in text.splitlines()] == [False, True, True, True]
    assert text.replace("\n    ", " ").endswith("mm_58, mm_59")


def test_no_line_of_a_golden_text_is_too_long():
    files = sorted(GOLDEN.glob("*.txt"))
    assert files
    lines = [line for path in files for line in path.read_text().splitlines()]
    assert [line for line in lines if len(line) > COLUMNS] == []
