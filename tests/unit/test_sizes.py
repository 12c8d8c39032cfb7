import textwrap

import pytest

from tools import check_sizes


def breaches(source):
    return [str(b) for b in check_sizes.check_source("f.py", textwrap.dedent(source))]


def function_of(num_lines):
    return "def f():\n" + "    x = 1\n" * (num_lines - 1)


def test_longest_allowed_function_passes():
    assert breaches(function_of(61)) == []


def test_one_line_more_is_named():
    assert breaches(function_of(62)) == ["f.py:1: f() has 61 lines, at most 60; split it"]


def test_neither_decorators_nor_docstring_count():
    source = '@one\n@two\nasync def f():\n    """a\n\n    b"""\n' + "    x = 1\n" * 61
    assert breaches(source) == ["f.py:3: f() has 61 lines, at most 60; split it"]


def test_parameters_that_must_be_given_by_position_count():
    assert breaches("def f(a, b, c, d, e, g, h=1, *, i, j):\n    pass") == []
    assert breaches("class C:\n    def f(self, a, b, c, d, e, g):\n        pass") == []
    (breach,) = breaches("def f(a, b, c, d, e, g, h):\n    pass")
    assert "takes 7 parameters by position, at most 6" in breach


def test_sums_that_are_too_large_are_named(monkeypatch, capsys):
    monkeypatch.setattr(check_sizes, "MAX_SUMS", {("tools",): 1})
    assert check_sizes.main([]) == 1
    assert "lines, at most 1" in capsys.readouterr().out


def test_methods_and_inner_functions_are_checked():
    inner = textwrap.indent(function_of(62), "    ")
    assert breaches("class C:\n" + inner) == ["f.py:2: f() has 61 lines, at most 60; split it"]
    assert len(breaches("def outer():\n" + inner)) == 2


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


@pytest.mark.parametrize("part", ["try", "except", "else", "finally"])
def test_every_part_of_a_try_counts_once(part):
    deep = nested(["if a:"] * 4).split("\n", 1)[1]
    parts = {name: "        pass" for name in ("try", "except", "else", "finally")}
    parts[part] = textwrap.indent(deep, "    ")
    source = "def f():\n" + "".join(f"    {name}:\n{body}\n" for name, body in parts.items())
    assert len(breaches(source)) == 1
    assert "nests 5 blocks" in breaches(source)[0]


def test_elif_is_not_deeper_than_its_if():
    arms = "".join(f"    elif a == {k}:\n        pass\n" for k in range(10))
    assert breaches(f"def f(a):\n    if a:\n        pass\n{arms}") == []


def test_if_in_an_else_is_deeper():
    source = """
    def f(a):
        if a:
            pass
        else:
            if a:
                pass
            x = 1
            if a:
                if a:
                    if a:
                        if a:
                            pass
    """
    assert breaches(source) == ["f.py:12: f() nests 5 blocks here, at most 4; return early"]


def test_match_arms_count():
    source = """
    def f(a):
        match a:
            case 1:
                if a:
                    if a:
                        if a:
                            if a:
                                pass
    """
    assert breaches(source) == ["f.py:8: f() nests 5 blocks here, at most 4; return early"]


def test_inner_function_starts_from_zero():
    source = """
    def f():
        if a:
            if a:
                if a:
                    def g():
                        if a:
                            if a:
                                pass
    """
    assert breaches(source) == []


def test_command_line_names_breaches_and_fails(tmp_path, capsys):
    (tmp_path / "long.py").write_text(function_of(90))
    assert check_sizes.main([str(tmp_path)]) == 1
    assert "long.py:1: f() has 89 lines" in capsys.readouterr().out


def test_command_line_refuses_what_it_cannot_read(tmp_path, capsys):
    (tmp_path / "broken.py").write_text("def f(:\n")
    assert check_sizes.main([str(tmp_path)]) == 2
    assert "broken.py" in capsys.readouterr().err
    assert check_sizes.main([str(tmp_path / "absent")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_default_paths_are_this_checkout_without_goldens():
    names = {
        str(f.relative_to(check_sizes.ROOT))
        for f in check_sizes.python_files(check_sizes.DEFAULT_PATHS)
    }
    assert {"memo_compile/errors.py", "tools/check_sizes.py", "tests/unit/test_sizes.py"} <= names
    assert not any(name.startswith(("tests/golden", ".venv")) for name in names)
