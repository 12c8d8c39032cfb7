import textwrap

from tools import check_sizes


def breaches(source):
    return [str(b) for b in check_sizes.check_source("f.py", textwrap.dedent(source))]


def function_of(num_lines):
    return "def f():\n" + "    x = 1\n" * (num_lines - 1)


def test_longest_allowed_function_passes():
    assert breaches(function_of(61)) == []


def test_parameters_that_must_be_given_by_position_count():
    assert breaches("def f(a, b, c, d, e, g, h=1, *, i, j):\n    pass") == []
    assert breaches("class C:\n    def f(self, a, b, c, d, e, g):\n        pass") == []
    (breach,) = breaches("def f(a, b, c, d, e, g, h):\n    pass")
    assert "takes 7 parameters by position, at most 6" in breach


def test_sums_that_are_too_large_are_named(monkeypatch, capsys):
    monkeypatch.setattr(check_sizes, "MAX_SUMS", {("tools",): 1})
    monkeypatch.setattr(check_sizes, "DEFAULT_PATHS", ("tools",))
    assert check_sizes.main([]) == 1
    assert "lines, at most 1" in capsys.readouterr().out


def test_longest_allowed_file_passes_and_one_line_more_is_named():
    assert breaches("x = 1\n" * 800) == []
    assert breaches("x = 1\n" * 801) == ["f.py:1: file has 801 lines, at most 800; split it"]


def nested(blocks):
    lines = ["def f():"]
    for depth, block in enumerate(blocks, start=1):
        lines.append("    " * depth + block)
    lines.append("    " * (len(blocks) + 1) + "pass")
    return "\n".join(lines)


def test_four_blocks_pass_and_the_fifth_is_named():
    four = ["for a in b:", "while a:", "with a:", "if a:"]
    assert breaches(nested(four)) == []
    assert breaches(nested([*four, "if b:"])) == [
        "f.py:6: f() nests 5 blocks here, at most 4; return early"
    ]


def test_elif_is_not_deeper_than_its_if():
    arms = "".join(f"    elif a == {k}:\n        pass\n" for k in range(10))
    assert breaches(f"def f(a):\n    if a:\n        pass\n{arms}") == []


def test_command_line_names_breaches_and_fails(tmp_path, capsys):
    (tmp_path / "long.py").write_text(function_of(90))
    assert check_sizes.main([str(tmp_path)]) == 1
    assert "long.py:1: f() has 89 lines" in capsys.readouterr().out


def test_default_paths_are_this_checkout_without_goldens():
    names = {
        str(f.relative_to(check_sizes.ROOT))
        for f in check_sizes.python_files(check_sizes.DEFAULT_PATHS)
    }
    assert {"memo_compile/errors.py", "tools/check_sizes.py", "tests/unit/test_sizes.py"} <= names
    assert not any(name.startswith(("tests/golden", ".venv")) for name in names)
